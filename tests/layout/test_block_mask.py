# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Mask functions as block-sparse matrices: which blocks are left, and what runs over them."""

from __future__ import annotations

from types import SimpleNamespace

import flashbsr
import numpy as np
import pytest
import reference
from compare import assert_attention
from flashbsr import (
    Attention,
    AttentionSpec,
    BlockMask,
    ShapeError,
    TaskInfo,
    UnsupportedError,
    block_mask,
)
from harness import CPU, DEVICES, framework, needs_cxx
from reference import Variant
from sparse_problems import check_heads

DOCUMENT = np.array([0] * 50 + [1] * 90 + [2] * 116)


def window(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) & (kv_idx > q_idx - 40)


def document(b, h, q_idx, kv_idx):
    return DOCUMENT[q_idx] == DOCUMENT[kv_idx]


def prefix(b, h, q_idx, kv_idx, q_position):
    return (kv_idx < 70) | (kv_idx <= q_position)


def nothing(b, h, q_idx, kv_idx):
    return q_idx < 0


def everything(b, h, q_idx, kv_idx):
    return True


def dense(mask_mod, q_len, kv_len, h=0, **named):
    q, k = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    return np.broadcast_to(np.asarray(mask_mod(0, h, q, k, **named), bool), (q_len, kv_len))


MASKS = [window, document, prefix, nothing, everything]
SIZES = [(32, 32), (16, 64), (64, 8)]


def expected(mask_mod, q_len, kv_len):
    named = {"q_position": kv_len - q_len + np.arange(q_len)[:, None]} if mask_mod is prefix else {}
    return dense(mask_mod, q_len, kv_len, **named)


@pytest.mark.parametrize("kv_len", [256, 249])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask_mod", MASKS)
def test_blocks(mask_mod, size, kv_len):
    q_len = 250
    found = block_mask(mask_mod, q_len, kv_len, block_size=size)
    seen = expected(mask_mod, q_len, kv_len)
    again = reference.bsr_mask(found.indptr, found.indices, found.shape, size, found.mask)
    np.testing.assert_array_equal(again, seen)
    # No block without a pair, and none called partial that is whole.
    for row in range(len(found.indptr) - 1):
        for at in range(found.indptr[row], found.indptr[row + 1]):
            column = found.indices[at]
            block = seen[row * size[0] : (row + 1) * size[0], column * size[1] :][:, : size[1]]
            assert block.any() and found.partial[at] == (not block.all())
    assert (found.mask is None) == (not found.partial.any())
    assert found.density == pytest.approx(
        len(found.indices) / (-(-250 // size[0]) * -(-kv_len // size[1]))
    )


def test_requests_follow_each_other():
    def by_request(b, h, q_idx, kv_idx, kv_len):
        return (kv_idx + b) % 32 < kv_len // 64

    found = block_mask(by_request, [32, 64, 10], [64, 0, 128], block_size=(32, 32))
    parts = [
        np.broadcast_to((np.arange(n) + b) % 32 < n // 64, (m, n))
        for b, (m, n) in enumerate(zip([32, 64, 10], [64, 0, 128], strict=True))
    ]
    whole = np.zeros((106, 192), bool)
    whole[:32, :64], whole[96:, 64:] = parts[0], parts[2]
    assert found.shape == (106, 192)
    again = reference.bsr_mask(found.indptr, found.indices, found.shape, (32, 32), found.mask)
    np.testing.assert_array_equal(again, whole)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask_mod", MASKS)
def test_attention(mask_mod, dtype, device):
    if device is not CPU and dtype == "float32":
        pytest.skip("float32 queries are the CPU's")
    q_len, kv_len, (r, c) = 250, 256, (64, 32)
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((n, heads, 64)).astype(reference.DTYPES[dtype])
        for n, heads in ((q_len, 4), (kv_len, 2), (kv_len, 2))
    )
    attention = Attention(
        AttentionSpec(),
        TaskInfo(4, 2, 64, q_dtype=dtype, kv_dtype=dtype, backend=device.backend),
    )
    attention.plan(block_mask(mask_mod, q_len, kv_len, block_size=(r, c)).layout())
    pages = tuple(device.put(x.reshape(kv_len // c, c, 2, 64)) for x in (k, v))
    out, lse = map(device.get, attention.run(device.put(q), pages, return_lse=True))
    mask = expected(mask_mod, q_len, kv_len)
    exact, working = (
        reference.attend(
            q, k, v, Variant(), mask=mask, work=work, out_dtype=dtype if work else None
        )
        for work in (None, dtype)
    )
    assert_attention(out, lse, exact, working, dtype, mask_mod.__name__)


def test_functions_of_torch():
    torch = framework("torch")
    ids = torch.from_numpy(DOCUMENT)

    def documents(b, h, q_idx, kv_idx):
        return torch.logical_and(ids[q_idx] == ids[kv_idx], torch.abs(q_idx - kv_idx) < 100)

    found = block_mask(documents, 256, 256, block_size=64)
    q, k = np.arange(256)[:, None], np.arange(256)[None, :]
    seen = (DOCUMENT[q] == DOCUMENT[k]) & (abs(q - k) < 100)
    again = reference.bsr_mask(found.indptr, found.indices, found.shape, (64, 64), found.mask)
    np.testing.assert_array_equal(again, seen)


def test_refused():
    with pytest.raises(ShapeError, match="kv_lens: got 100; expected a multiple"):
        block_mask(everything, [64, 64], [100, 64], block_size=64)
    with pytest.raises(ShapeError, match="q_lens: got 100; expected a multiple"):
        block_mask(everything, [100, 64], [64, 64], block_size=64)
    with pytest.raises(ShapeError, match="as many as q_lens"):
        block_mask(everything, [64, 64], [64], block_size=64)
    with pytest.raises(UnsupportedError, match="a function of the head"):
        block_mask(lambda b, h, q, k: q >= k * h, 128, 128)
    with pytest.raises(UnsupportedError, match="query heads 0 and 1 of KV head 0 apart"):
        block_mask(lambda b, h, q, k: q >= k * h, 128, 128, heads=(4, 2))
    with pytest.raises(ShapeError, match=r"heads: got \(3, 2\)"):
        block_mask(lambda b, h, q, k: q >= k * h, 128, 128, heads=(3, 2))
    with pytest.raises(ShapeError, match="block_size"):
        block_mask(everything, 128, 128, block_size=(1, 2, 3))
    with pytest.raises(flashbsr.FlashbsrError, match="a parameter 'x'"):
        block_mask(lambda b, h, q, k, x: q >= x, 128, 128)
    spec = AttentionSpec.from_functions(score_mod=lambda s, b, h, q, k: s + q)
    attention = Attention(spec, TaskInfo(1, 1, 8))
    with pytest.raises(UnsupportedError, match="asks for positions"):
        attention.plan(block_mask(everything, 8, 8, block_size=8).layout())


@needs_cxx
def test_a_variant_without_positions_goes_with_blocks(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHBSR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHBSR_QUIET", "1")
    spec = AttentionSpec.from_functions(score_mod=lambda s, b, h, q, k: s * (h + 1))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((128, 2, 16)).astype(np.float32) for _ in "qkv")
    attention = Attention(spec, TaskInfo(2, 2, 16))
    attention.plan(block_mask(window, 128, 128, block_size=16).layout())
    out = attention.run(q, (k.reshape(8, 16, 2, 16), v.reshape(8, 16, 2, 16)))
    hooks = reference.Hooks(score=lambda x, b, h, q, k: x * (h + 1))
    mask = dense(window, 128, 128)
    exact, working = (
        reference.attend(q, k, v, Variant(), mask=mask, hooks=hooks, work=work)
        for work in (None, "float32")
    )
    assert_attention(out, None, exact, working, "float32", "heads")


def test_a_function_of_the_head():
    """Each KV head has the blocks that its query heads see, and the right keys."""

    def bands(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (kv_idx > q_idx - 20 * (h // 2 + 1))

    q_len, heads = 70, (4, 2)
    found = block_mask(bands, q_len, q_len, block_size=(16, 32), heads=heads)
    assert found.per_head and len(found.indptr) == 2 * 5 + 1
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((q_len, n, 32)).astype(np.float32) for n in (4, 2, 2))
    attention = Attention(AttentionSpec(), TaskInfo(*heads, 32))
    attention.plan(found.layout())
    out, lse = attention.run(q, (k, v), return_lse=True)
    check_heads(q, k, v, [dense(bands, q_len, q_len, h=2 * h) for h in range(2)], out, lse)
    with pytest.raises(ShapeError, match="indptr: .*1"):  # heads of the task
        Attention(AttentionSpec(), TaskInfo(4, 1, 32)).plan(found.layout())
    alike = block_mask(window, 64, 64, block_size=16, heads=heads)
    assert not alike.per_head
    by_name = block_mask(
        lambda b, h, q_idx, kv_idx, kv_head: kv_idx <= q_idx - 9 * kv_head, 64, 64,
        block_size=16, heads=heads,
    )  # fmt: skip
    assert by_name.per_head


# --- maps of blocks, and SciPy


@pytest.mark.parametrize("heads", [None, 2])
def test_block_maps(heads):
    rng = np.random.default_rng(1)
    block_map = rng.random((5, 4) if heads is None else (heads, 5, 4)) < 0.5
    found = BlockMask.from_block_map(block_map, (10, 16), q_len=43, kv_len=60)
    assert (found.shape, found.block, found.per_head) == ((43, 60), (10, 16), heads is not None)
    assert found.density == pytest.approx(block_map.mean())
    for h in range(heads or 1):
        part = found.indptr[5 * h : 5 * h + 6]
        seen = block_map if heads is None else block_map[h]
        own = reference.bsr_mask(
            part - part[0], found.indices[part[0] : part[-1]], (43, 60), (10, 16)
        )
        whole = np.repeat(np.repeat(seen, 10, axis=0), 16, axis=1)[:43, :60]
        np.testing.assert_array_equal(own, whole)
    assert BlockMask.from_block_map(block_map, (10, 16)).shape == (50, 64)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
@pytest.mark.parametrize("form", ["bsr", "csr"])
@pytest.mark.parametrize("size", [None, (8, 16), (5, 7), (64, 64)])
def test_scipy(form, size, device):
    """Entries that are not zero, in blocks of any size; a matrix per head."""
    sparse = framework("scipy.sparse")
    rng, (m, n), heads = np.random.default_rng(2), (48, 80), 2
    masks = np.kron(rng.random((heads, 6, 5)) < 0.5, np.ones((8, 16))) > 0
    masks &= rng.random(masks.shape) < 0.9
    matrices = []
    for mask in masks:
        values = mask * rng.standard_normal(mask.shape)
        one = sparse.csr_matrix(values)
        one.data[::7] = 0  # explicit zeros are not kept
        mask[...] = one.toarray() != 0
        matrices.append(one.tobsr((8, 16)) if form == "bsr" else one)
    found = BlockMask.from_scipy(matrices, block_size=size)
    default = (8, 16) if form == "bsr" else (1, 1)
    assert found.block == (default if size is None else size)
    q, k, v = (rng.standard_normal((x, h, 64)).astype("f2") for x, h in ((m, 4), (n, 2), (n, 2)))
    attention = Attention(AttentionSpec(), TaskInfo(4, 2, 64, backend=device.backend))
    attention.plan(found.layout())
    result = attention.run(device.put(q), (device.put(k), device.put(v)), return_lse=True)
    check_heads(q, k, v, masks, *map(device.get, result))
    alone = BlockMask.from_scipy(matrices[1], block_size=size)
    assert not alone.per_head
    again = reference.bsr_mask(alone.indptr, alone.indices, (m, n), alone.block, alone.mask)
    np.testing.assert_array_equal(again, masks[1])


def test_builders_refuse():
    def csr(**changes):
        arrays = {"indptr": np.array([0, 2, 3]), "indices": np.array([0, 3, 1]), "data": np.ones(3)}
        return SimpleNamespace(**{"format": "csr", "shape": (2, 4), **arrays, **changes})

    def bsr(**changes):
        return csr(**{"format": "bsr", "shape": (4, 16), "data": np.ones((3, 2, 4)), **changes})

    assert BlockMask.from_scipy(bsr()).mask is None
    for matrix, match in [
        (np.ones((3, 3)), "^matrix: got ndarray; .*BSR or CSR"),
        (csr(format="csc"), "^matrix: got form 'csc'"),
        (csr(data=np.ones((3, 1))), "^matrix.data: got shape"),
        (csr(data=np.ones(4)), "^matrix.data: got shape"),
        (bsr(data=np.ones(3)), "^matrix.data: got shape"),
        (bsr(shape=(5, 16)), "^matrix: got shape"),
        (csr(indptr=np.array([0, 3])), "^matrix.indptr: got shape"),
        (csr(indptr=np.array([0, 4, 3])), "^matrix.indptr: got from"),
        (csr(indptr=np.array([0, 2, 2])), "^matrix.indptr: got from"),
        (csr(indices=np.array([0, 4, 1])), "^matrix.indices: got 4 at 1"),
        (csr(indices=np.array([0, -1, 1])), "^matrix.indices: got -1 at 1"),
        (csr(indices=np.array([3, 3, 1])), r"^matrix: got several entries at \(0, 3\)"),
        (csr(indices=np.array([0.0, 3, 1])), "^matrix.indices: got float64"),
        ([csr(), csr(shape=(2, 5))], "^matrix: got shapes"),
        ([], "^matrix: got an empty sequence"),
    ]:
        with pytest.raises(flashbsr.FlashbsrError, match=match):
            BlockMask.from_scipy(matrix)
    with pytest.raises(flashbsr.FlashbsrError, match="^block_size"):
        BlockMask.from_scipy(csr(), block_size=0)
    good = np.ones((3, 4), bool)
    for block_map, options, match in [
        (good * 1.0, {}, "^block_map: got float64"),
        (good[0], {}, r"^block_map: got shape \(4,\)"),
        (good, {"block_size": (0, 2)}, "^block_size: got 0"),
        (good, {"q_len": 41}, "^q_len: got 41; expected a length of 3 blocks of 10"),
        (good, {"kv_len": 48}, "^kv_len: got 48"),
        (good, {"kv_len": 65}, "^kv_len: got 65"),
    ]:
        with pytest.raises(flashbsr.FlashbsrError, match=match):
            BlockMask.from_block_map(block_map, **{"block_size": (10, 16), **options})
