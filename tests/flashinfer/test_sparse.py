# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Block-sparse matrices: one for each KV head, short last blocks, blocks of any sizes."""

from __future__ import annotations

from typing import Any

import cases
import flashbsr
import numpy as np
import pytest
import reference
from base2 import natural
from cases import indptr
from flashbsr.layout.bsr_blocks import block_pages
from harness import DEVICES, Device, assert_poison_survived
from hypothesis import given
from hypothesis import strategies as st
from kinds import KINDS, Kind
from sparse_problems import check_heads, normal, random_rows

DIM = 64
BACKENDS = [
    pytest.param(device, backend, id=backend)
    for device in DEVICES
    for backend in (("cuda", "fa2") if device.is_cuda else (device.backend,))
]
per_backend = pytest.mark.parametrize(("device", "backend"), BACKENDS)
SHAPES = [  # M, N, R, C
    (50, 60, 16, 20),
    (33, 70, 1, 1),
    (7, 13, 3, 4),  # C that TMA cannot follow
    (300, 515, 128, 128),
    (90, 250, 16, 16),
    (200, 136, 128, 32),  # boxes of 8 tokens
    (64, 130, 64, 32),
    (130, 48, 100, 96),  # half a block column
]


@per_backend
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [None, "mask", "packed_mask"])
@pytest.mark.parametrize(("m", "n", "r", "c"), SHAPES)
def test_a_matrix_for_each_head(
    m: int, n: int, r: int, c: int, kind: str | None, causal: bool, device: Device, backend: str
) -> None:
    rng, heads, dtype = np.random.default_rng(n), 3, "bfloat16"
    rows, columns = -(-m // r), -(-n // c)
    starts, indices = random_rows(rng, heads * rows, columns)
    mask = rng.random((len(indices), r, c)) < 0.7 if kind else None
    masks = {kind: flashbsr.packbits(mask.ravel(), "little") if kind == "packed_mask" else mask}
    q = normal(rng, (m, 2 * heads, DIM), dtype)
    k, v = (normal(rng, (n, heads, DIM), dtype) for _ in "kv")
    wrapper = flashbsr.flashinfer.BlockSparseAttentionWrapper(None, backend)
    wrapper.plan(
        device.put(starts), device.put(indices), m, n, r, c, 2 * heads, heads, DIM,
        causal=causal, per_head=True, **({} if kind is None else masks),
    )  # fmt: skip
    out = device.put(cases.strided(cases.poisoned(q.shape, dtype), dtype))
    found = wrapper.run(*map(device.put, (q, k, v)), out=out, return_lse=True)
    assert found[0] is out
    dense = []
    for h in range(heads):
        own = slice(starts[h * rows], starts[(h + 1) * rows])
        part = starts[h * rows : (h + 1) * rows + 1] - starts[h * rows]
        dense.append(
            reference.bsr_mask(
                part, indices[own], (m, n), (r, c), None if mask is None else mask[own]
            )
        )
        if causal:
            dense[-1] &= np.tri(m, n, n - m, dtype=bool)
    out_there, lse = map(device.get, found)
    check_heads(q, k, v, dense, out_there, natural(lse))
    assert_poison_survived(device.get(out), "out")
    assert wrapper.plan_info.per_head
    again = [device.get(x).tobytes() for x in found]
    found = wrapper.run(*map(device.put, (q, k, v)), out=out, return_lse=True)
    assert [device.get(x).tobytes() for x in found] == again


@per_backend
def test_split_rows_of_each_head(device: Device, backend: str) -> None:
    """Long block rows are cut, and their parts merged, in each head's own way."""
    rng, heads, (m, n, r, c) = np.random.default_rng(1), 4, (20, 3999, 16, 8)
    columns = -(-n // c)
    picked = [np.sort(rng.permutation(columns)[: columns // (1 + i)]) for i in range(2 * heads)]
    picked[3] = picked[3][:0]
    starts, indices = indptr([len(p) for p in picked]), np.concatenate(picked).astype(np.int32)
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(logits_soft_cap=4.0),
        flashbsr.TaskInfo(2 * heads, heads, DIM, backend=backend),
    )
    q = normal(rng, (m, 2 * heads, DIM), "float16")
    k, v = (normal(rng, (n, heads, DIM), "float16") for _ in "kv")
    attention.plan(flashbsr.Bsr(starts, indices, (m, n), (r, c), per_head=True))
    out, lse = attention.run(
        device.put(q), (device.put(k), device.put(v)), return_lse=True
    )  # tokens, the last page short
    plan = attention.plan_info
    assert plan.header.num_merges > 0
    heads_of = plan.kv_heads[plan.merges["request"]]
    np.testing.assert_array_equal(plan.merges["kv_head"], heads_of)
    dense = [
        reference.bsr_mask(
            indptr([len(p) for p in picked[2 * h : 2 * h + 2]]),
            np.concatenate(picked[2 * h : 2 * h + 2]),
            (m, n),
            (r, c),
        )
        for h in range(heads)
    ]
    check_heads(q, k, v, dense, device.get(out), device.get(lse), logits_soft_cap=4.0)
    pairs = sum(int(mask.sum()) for mask in dense)
    explained = attention.explain()
    assert explained.pairs == pairs
    assert explained.operations == 2 * 2 * DIM * pairs * 2
    seen = sum(int(mask.any(axis=0).sum()) for mask in dense)
    assert explained.kv_bytes == seen * 2 * DIM * 2


def test_equal_neighbours_are_one_request() -> None:
    """A tile of rows then serves them all; K and V are packed once."""
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(), flashbsr.TaskInfo(2, 1, 8, backend="cpu")
    )
    starts, indices = indptr([2, 2, 1, 1]), np.array([0, 2, 0, 2, 1, 1], np.int32)
    attention.plan(flashbsr.Bsr(starts, indices, (15, 12), (4, 4)))
    plan = attention.plan_info
    assert plan.requests["q_len"].tolist() == [8, 7]
    assert plan.kv_indices.tolist() == [0, 2, 1]
    mask = np.ones((6, 4, 4), bool)
    attention.plan(flashbsr.Bsr(starts, indices, (15, 12), (4, 4), mask=mask))
    assert attention.plan_info.requests["q_len"].tolist() == [4, 4, 4, 3]


@per_backend
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("n", [64, 61, 33])
def test_tokens_are_pages(n: int, layout: str, device: Device, backend: str) -> None:
    """K and V as tokens, or as pages whose last is short: the same bits."""
    rng, page = np.random.default_rng(n), 16
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(),
        flashbsr.TaskInfo(4, 2, DIM, kv_layout=layout, backend=backend),
    )
    columns = -(-n // page)
    indices = [*range(columns), columns - 1]
    attention.plan(flashbsr.Bsr([0, columns, columns + 1], indices, (9, n), (5, page)))
    q = normal(rng, (9, 4, DIM), "float16")
    k, v = (normal(rng, (n, 2, DIM), "float16") for _ in "kv")
    padded = [np.full((columns * page, 2, DIM), np.nan, np.float16) for _ in "kv"]
    for x, whole in zip((k, v), padded, strict=True):
        whole[:n] = x
    pages = [x.reshape(columns, page, 2, DIM) for x in padded]
    tokens = [k, v]
    if layout == "HND":
        tokens, pages = [x.swapaxes(0, 1) for x in tokens], [x.swapaxes(1, 2) for x in pages]
    mask = np.ones((9, n), bool)
    mask[5:, : (columns - 1) * page] = False
    found = [
        tuple(map(device.get, attention.run(device.put(q), device.put_kv(tuple(kv)), lse=None,
                                            return_lse=True)))
        for kv in (tokens, pages)
    ]  # fmt: skip
    check_heads(q, k, v, [mask, mask], *found[0])
    assert [x.tobytes() for x in found[0]] == [x.tobytes() for x in found[1]]
    short = tuple(x[:-1] if layout == "NHD" else x[:, :-1] for x in tokens)
    with pytest.raises(flashbsr.IndexRangeError, match=rf"^k: got {n - 1} tokens; .*least {n}"):
        attention.run(device.put(q), device.put_kv(short))
    pages = np.arange(columns)
    attention.plan(flashbsr.Paged([0, 9], [0, columns], pages, last_page_len=[1], page_size=page))
    if n % page:  # a plan of pages may ask for whole ones
        with pytest.raises(flashbsr.IndexRangeError, match=f"least {columns * page}"):
            attention.run(device.put(q), device.put_kv(tuple(tokens)))


# --- blocks of different sizes


def random_sizes(rng: np.random.Generator, blocks: int, total: int, step: int) -> np.ndarray:
    """Sizes that add up, some of them 0; all but the last border at a multiple of `step`."""
    cuts = np.sort(rng.integers(0, total // step + 1, blocks - 1)) * step
    return np.diff(cuts, prepend=0, append=total)


def variable_problem(
    seed: int, heads: int, lengths: tuple[int, int], blocks: tuple[int, int], steps: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Map, sizes of rows and of columns, and each head's dense mask."""
    rng = np.random.default_rng(seed)
    seen = rng.random((heads, *blocks)) < 0.4
    rows, columns = (
        np.stack([random_sizes(rng, count, total, step) for _ in range(heads)])
        for count, total, step in zip(blocks, lengths, steps, strict=True)
    )
    dense = [
        np.repeat(np.repeat(seen[h], rows[h], axis=0), columns[h], axis=1) for h in range(heads)
    ]
    return seen, rows, columns, dense


@per_backend
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("lengths", "blocks", "steps"),
    [
        ((60, 200), (5, 9), (1, 1)),
        ((300, 515), (4, 6), (1, 16)),
        ((129, 520), (3, 5), (64, 128)),
        ((16, 24), (1, 1), (1, 1)),
        ((10, 2500), (2, 40), (5, 8)),
    ],
)
def test_blocks_of_different_sizes(
    lengths: tuple[int, int],
    blocks: tuple[int, int],
    steps: tuple[int, int],
    dtype: str,
    device: Device,
    backend: str,
) -> None:
    heads, rng = 2, np.random.default_rng(0)
    seen, rows, columns, dense = variable_problem(3, heads, lengths, blocks, steps)
    wrapper = flashbsr.flashinfer.VariableBlockSparseAttentionWrapper(None, backend)
    sizes = (x.astype(np.int32) for x in (rows, columns))
    wrapper.plan(device.put(seen), *map(device.put, sizes), 3 * heads, heads, DIM)
    assert wrapper.page_size % steps[1] == 0
    assert (
        wrapper.plan_info.kv_indices.size
        <= sum(
            int(np.ceil(mask[begin].sum() / wrapper.page_size))
            for mask, cuts in zip(dense, rows, strict=True)
            for begin in (np.cumsum(cuts) - cuts)[cuts > 0]
        )
        + (rows == 0).sum() * lengths[1]
    )
    q = normal(rng, (3 * heads, lengths[0], DIM), dtype)
    k, v = (normal(rng, (heads, lengths[1], DIM), dtype) for _ in "kv")
    on_device = tuple(map(device.put, (q, k, v)))
    found = wrapper.run(*on_device, return_lse=True)
    assert tuple(found[0].shape) == q.shape and tuple(found[1].shape) == q.shape[:2]
    out, lse = (np.swapaxes(device.get(x), 0, 1) for x in found)
    check_heads(*(np.swapaxes(x, 0, 1) for x in (q, k, v)), dense, out, natural(lse))
    into = device.put(cases.strided(cases.poisoned(q.shape, dtype), dtype))
    into_lse = device.put(np.full(q.shape[:2], np.nan, np.float32))
    assert wrapper.run(*on_device, out=into, lse=into_lse) is into
    assert device.get(into).tobytes() == device.get(found[0]).tobytes()
    assert device.get(into_lse).tobytes() == device.get(found[1]).tobytes()
    assert_poison_survived(device.get(into), "out")
    alone = wrapper.run(*on_device)
    assert device.get(alone).tobytes() == device.get(found[0]).tobytes()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kinds_of_arrays(kind: Kind) -> None:
    seen, rows, columns, _ = variable_problem(5, 2, (30, 90), (3, 4), (1, 8))
    rng = np.random.default_rng(0)
    q = rng.standard_normal((4, 30, 32)).astype(np.float32)
    k, v = (rng.standard_normal((2, 90, 32)).astype(np.float32) for _ in "kv")
    results = []
    for put in (np.asarray, kind.put):
        wrapper = flashbsr.flashinfer.VariableBlockSparseAttentionWrapper(None, "cpu", lse_base="2")
        sizes = put(rows.astype(np.int32)), put(columns.astype(np.int32))
        wrapper.plan(put(seen), *sizes, 4, 2, 32)
        results.append(wrapper.run(*map(put, (q, k, v)), return_lse=True))
    assert all(isinstance(x, kind.array) for x in results[1])
    for expected, found in zip(*results, strict=True):
        np.testing.assert_array_equal(kind.get(found), expected)
    blocks = flashbsr.flashinfer.BlockSparseAttentionWrapper(None, "cpu")
    blocks.plan([0, 2, 3], [0, 5, 3], 30, 90, 15, 16, 4, 2, 32)
    by_tokens = [
        blocks.run(*(put(np.ascontiguousarray(x.swapaxes(0, 1))) for x in (q, k, v)))
        for put in (np.asarray, kind.put)
    ]
    np.testing.assert_array_equal(kind.get(by_tokens[1]), by_tokens[0])


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 5), st.integers(1, 12))
def test_pages_of_blocks(seed: int, heads: int, rows: int, columns: int) -> None:
    """Pages hold what is seen, once, in order; and no smaller ones would be needed."""
    rng = np.random.default_rng(seed)
    step, total = int(rng.choice([1, 2, 8])), int(rng.integers(0, 60))
    seen = rng.random((heads, rows, columns)) < rng.choice([0.1, 0.5, 1.0])
    widths = np.stack([random_sizes(rng, columns, total, step) for _ in range(heads)])
    offsets = np.zeros((heads, columns + 1), np.int64)
    np.cumsum(widths, axis=1, out=offsets[:, 1:])
    page, starts, indices = block_pages(seen, offsets)
    assert page % step == 0 or page >= total
    assert len(starts) == heads * rows + 1 and starts[-1] == len(indices)
    borders: set[int] = set()
    for h in range(heads):
        dense = np.repeat(seen[h], widths[h], axis=1)
        for i in range(rows):
            at = h * rows + i
            own = indices[starts[at] : starts[at + 1]]
            tokens = (own[:, None] * page + np.arange(page)).ravel()
            np.testing.assert_array_equal(tokens[tokens < total], np.flatnonzero(dense[i]))
        if rows:
            borders |= set(
                (np.flatnonzero((dense[:, 1:] != dense[:, :-1]).any(axis=0)) + 1).tolist()
            )
    assert page == (np.gcd.reduce(list(borders)) if borders else max(total, 1))


def test_variable_refused() -> None:
    wrapper = flashbsr.flashinfer.VariableBlockSparseAttentionWrapper(None, "cpu")
    seen, rows, columns = np.ones((2, 2, 3), bool), np.full((2, 2), 4), np.full((2, 3), 5)
    good: dict[str, Any] = {
        "block_mask_map": seen, "block_row_sz": rows, "block_col_sz": columns,
        "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    }  # fmt: skip
    for changes, name, kind in [
        ({"block_mask_map": seen[0]}, "block_mask_map", flashbsr.ShapeError),
        ({"block_mask_map": seen[:1]}, "block_mask_map", flashbsr.ShapeError),
        ({"block_mask_map": seen * 1.0}, "block_mask_map", flashbsr.DTypeError),
        ({"block_row_sz": rows[:, :1]}, "block_row_sz", flashbsr.ShapeError),
        ({"block_row_sz": rows * 1.0}, "block_row_sz", flashbsr.DTypeError),
        ({"block_col_sz": rows}, "block_col_sz", flashbsr.ShapeError),
        ({"block_col_sz": columns - 6}, "block_col_sz", flashbsr.IndexRangeError),
        ({"block_col_sz": columns + [[0], [1]]}, "block_col_sz", flashbsr.FlashbsrError),
        ({"causal": True}, "causal", flashbsr.UnsupportedError),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode", flashbsr.UnsupportedError),
        ({"pos_encoding_mode": "ROPE"}, "pos_encoding_mode", flashbsr.FlashbsrError),
        ({"num_kv_heads": 3}, "block_mask_map", flashbsr.ShapeError),
        ({"num_qo_heads": 3}, "num_qo_heads", flashbsr.FlashbsrError),
    ]:
        with pytest.raises(kind, match=rf"^{name}\b"):
            wrapper.plan(**{**good, **changes})
        with pytest.raises(flashbsr.PlanError):
            wrapper.run(rows, rows, rows)
    wrapper.plan(**good)
    q, k = np.ones((4, 8, 16), np.float32), np.ones((2, 15, 16), np.float32)
    wrapper.run(q, k, k)
    for changes, name in [
        ({"q": q[:, 1:]}, "q"),
        ({"k": k[:, 1:]}, "k"),
        ({"v": k[0]}, "v"),
        ({"out": q[0]}, "out"),
        ({"out": q[1:].copy()}, "out"),
        ({"lse": q.copy()}, "lse"),
        ({"q": q[1:]}, "q"),
    ]:
        with pytest.raises(flashbsr.FlashbsrError, match=rf"^{name}\b"):
            wrapper.run(**{"q": q, "k": k, "v": k, **changes})
