# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Mask functions as block-sparse matrices: which blocks are left, and what runs over them."""

from __future__ import annotations

import flashbsr
import numpy as np
import pytest
import reference
from compare import assert_attention
from flashbsr import Attention, AttentionSpec, ShapeError, TaskInfo, UnsupportedError, block_mask
from harness import CPU, DEVICES, framework
from reference import Variant

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


def dense(mask_mod, q_len, kv_len, **named):
    q, k = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    return np.broadcast_to(np.asarray(mask_mod(0, 0, q, k, **named), bool), (q_len, kv_len))


MASKS = [window, document, prefix, nothing, everything]
SIZES = [(32, 32), (16, 64), (64, 8)]


def expected(mask_mod, q_len, kv_len):
    named = {"q_position": kv_len - q_len + np.arange(q_len)[:, None]} if mask_mod is prefix else {}
    return dense(mask_mod, q_len, kv_len, **named)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask_mod", MASKS)
def test_blocks(mask_mod, size):
    q_len, kv_len = 250, 256
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
        len(found.indices) / (-(-250 // size[0]) * 256 // size[1])
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
        TaskInfo(4, 2, 64, page_size=c, q_dtype=dtype, kv_dtype=dtype, backend=device.backend),
    )
    block_mask(mask_mod, q_len, kv_len, block_size=(r, c)).plan(attention)
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
        block_mask(everything, 100, 100, block_size=64)
    with pytest.raises(ShapeError, match="q_lens: got 100; expected a multiple"):
        block_mask(everything, [100, 64], [64, 64], block_size=64)
    with pytest.raises(ShapeError, match="as many as q_lens"):
        block_mask(everything, [64, 64], [64], block_size=64)
    with pytest.raises(UnsupportedError, match="a function of the head"):
        block_mask(lambda b, h, q, k: q >= k * h, 128, 128)
    with pytest.raises(flashbsr.FlashbsrError, match="a parameter 'x'"):
        block_mask(lambda b, h, q, k, x: q >= x, 128, 128)
    spec = AttentionSpec.from_functions(score_mod=lambda s, b, h, q, k: s + q)
    attention = Attention(spec, TaskInfo(1, 1, 8, page_size=8))
    with pytest.raises(UnsupportedError, match="asks for positions"):
        block_mask(everything, 8, 8, block_size=8).plan(attention)


def test_a_variant_without_positions_goes_with_blocks(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHBSR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHBSR_QUIET", "1")
    spec = AttentionSpec.from_functions(score_mod=lambda s, b, h, q, k: s * (h + 1))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((128, 2, 16)).astype(np.float32) for _ in "qkv")
    attention = Attention(spec, TaskInfo(2, 2, 16, page_size=16))
    block_mask(window, 128, 128, block_size=16).plan(attention)
    out = attention.run(q, (k.reshape(8, 16, 2, 16), v.reshape(8, 16, 2, 16)))
    hooks = reference.Hooks(score=lambda x, b, h, q, k: x * (h + 1))
    mask = dense(window, 128, 128)
    exact, working = (
        reference.attend(q, k, v, Variant(), mask=mask, hooks=hooks, work=work)
        for work in (None, "float32")
    )
    assert_attention(out, None, exact, working, "float32", "heads")
