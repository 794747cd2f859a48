# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Keys shared among ranks: what each computes of its share, merged, is attention over all."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
from cases import indptr
from flashbsr import ContextParallel
from reference import Variant
from shares import PAGE, VARIANTS, Batch, attention_of, latent_twice, merged, paged, shares


@pytest.mark.parametrize("layout", ["ragged", "paged", "table", "bounds"])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", range(6))
def test_shares_add_up(seed: int, name: str, layout: str) -> None:
    """Interleaves of one token, a page and odd ones, ranks without a key, lengths of all sorts."""
    rng = np.random.default_rng(seed)
    variant, batch = VARIANTS[name], Batch.random(rng)
    qo = indptr(batch.q_lens)
    states = []
    for share in shares(int(rng.choice([2, 3, 5])), int(rng.choice([1, 3, PAGE, 64]))):
        mine = batch.share(share)
        lens = np.array([len(k) for k, _ in mine])
        np.testing.assert_array_equal(lens, share.local_lens(batch.kv_lens))
        attention = attention_of(variant, share)
        cache, table = paged(mine, rng)
        more: dict[str, Any] = {}
        if layout == "ragged":
            kv: Any = tuple(np.concatenate(x) for x in zip(*mine, strict=True))
            plan: Any = flashbsr.Ragged(qo, indptr(lens))
        elif layout == "table":
            kv, plan = cache, flashbsr.BlockTable(qo, table, lens, page_size=PAGE)
        elif layout == "paged":
            pages = -(-lens // PAGE)
            ids = np.concatenate([row[:n] for row, n in zip(table, pages, strict=True)])
            kv = cache
            plan = flashbsr.Paged(
                qo, indptr(pages), ids.astype(np.int32), kv_lens=lens, page_size=PAGE
            )
        else:
            bounds = lens + rng.integers(0, 50, lens.size)
            kv, plan = cache, flashbsr.Bounds(qo, bounds, page_size=PAGE)
            # Planned for queries that are elsewhere; the update says where.
            more = {"q_positions": batch.positions}
        anywhere = rng.integers(0, 200, batch.positions.size)
        attention.plan(plan, q_positions=anywhere if more else batch.positions)
        if more:
            attention.update(lens, table, **more)
        states.append(attention.run(batch.q, kv, return_lse=True))
    batch.check(*merged(states), variant)


@pytest.mark.parametrize("seed", range(8))
def test_trees(seed: int) -> None:
    """Drafts whose keys are spread over ranks: each sees its ancestors, wherever they are."""
    rng = np.random.default_rng(seed)
    batch = Batch.random(rng)
    parents = [rng.integers(-1, np.maximum(np.arange(n), 0), n) for n in batch.q_lens]
    masks = []
    for above, n, position in zip(parents, batch.q_lens, batch.positions, strict=True):
        mask = np.zeros((n, position + n), bool)
        mask[:, :position] = True
        for t in range(n):
            mask[t] |= mask[above[t]] if above[t] >= 0 else False
            mask[t, position + t] = True
        masks.append(mask)
    states = []
    for share in shares(int(rng.choice([2, 3])), int(rng.choice([1, 2, 16]))):
        attention = attention_of(Variant(causal=True), share)
        cache, table = paged(batch.share(share), rng)
        lens = share.local_lens(batch.kv_lens)
        attention.plan(
            flashbsr.BlockTable(indptr(batch.q_lens), table, lens, page_size=PAGE),
            tree_parents=np.concatenate([*parents, np.zeros(0, np.int64)]),
            q_positions=batch.positions,
        )
        states.append(attention.run(batch.q, cache, return_lse=True))
    batch.check(*merged(states), Variant(), mask=masks)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_chunk_of_a_prompt_meets_keys_from_anywhere(name: str) -> None:
    """Queries from 40 on meet keys 0 to 16, 16 to 50, 50 to 64 of their prompt, one run each."""
    rng, variant = np.random.default_rng(3), VARIANTS[name]
    whole = Batch.random(rng)
    whole.kv = [tuple(rng.standard_normal((64, 2, 16)).astype(np.float32) for _ in range(2))]
    whole.q, whole.q_lens = rng.standard_normal((24, 4, 16)).astype(np.float32), np.array([24])
    attention = attention_of(variant, ContextParallel(1, 0))
    states = []
    for begin, end in ((0, 16), (16, 50), (50, 64)):
        k, v = (x[begin:end] for x in whole.kv[0])
        attention.plan(flashbsr.Ragged([0, 24], [0, end - begin]), q_positions=[40 - begin])
        states.append(attention.run(whole.q, (k, v), return_lse=True))
    if variant.causal and variant.window_left < 0:
        assert np.isinf(states[2][1][:10]).all(), "rows before position 50 see none of the last"
    whole.check(*merged(states), variant)


@pytest.mark.parametrize("interleave", [1, 5, 16])
def test_latent_drafts_are_requests_of_one_token(interleave: int) -> None:
    """By positions, or by lengths of the caller's own: the same."""
    rng = np.random.default_rng(interleave)
    drafts, page = 4, 16
    q = rng.standard_normal((3 * drafts, 8, 72)).astype(np.float32)
    for share in shares(3, interleave):
        cache = rng.standard_normal((3 * 19, page, 72)).astype(np.float32)
        task = flashbsr.TaskInfo(
            8, 1, 72, head_dim_vo=64, latent=True, context_parallel=share, backend="cpu"
        )
        results = latent_twice(task, np.array([77, 4, 300]), drafts, page, q, cache)
        for one, other in zip(*results, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_one_rank_is_no_rank() -> None:
    batch = Batch.random(np.random.default_rng(9))
    kv = tuple(np.concatenate(x) for x in zip(*batch.kv, strict=True))
    layout = flashbsr.Ragged(indptr(batch.q_lens), indptr(batch.kv_lens))
    plain = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=True), flashbsr.TaskInfo(4, 2, 16, backend="cpu")
    )
    plain.plan(layout)
    alone = attention_of(Variant(causal=True), ContextParallel(1, 0, 5))
    alone.plan(layout, q_positions=batch.positions)
    assert np.array_equal(alone.run(batch.q, kv), plain.run(batch.q, kv))


def test_queries_before_and_behind_all_keys() -> None:
    attention = attention_of(Variant(causal=True), ContextParallel(2, 1, 4))
    k = np.ones((8, 2, 16), np.float32)
    q = np.ones((3, 4, 16), np.float32)
    attention.plan(flashbsr.Ragged([0, 1, 2, 3], [0, 3, 6, 8]), q_positions=[-5, 3, 10_000])
    out, lse = attention.run(q, (k, k), return_lse=True)
    assert (out[:2] == 0).all() and np.isneginf(lse[:2]).all()
    assert (out[2] == 1).all() and np.isfinite(lse[2]).all()


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ((2, 2), "rank"),
        ((2, 0, 0), "interleave"),
        ((0, 0), "size"),
        ((1 << 20, 0, 1 << 20), "interleave"),
        ((1,), "context_parallel"),
        ("2/0", "context_parallel"),
    ],
)
def test_shares_that_cannot_be(task: Any, message: str) -> None:
    with pytest.raises(flashbsr.FlashbsrError, match=message):
        flashbsr.TaskInfo(4, 2, 16, context_parallel=task)


def test_what_needs_positions_asks_for_them() -> None:
    layout = flashbsr.Ragged([0, 2], [0, 9])
    for name in ("causal", "window alone", "alibi"):
        with pytest.raises(flashbsr.FlashbsrError, match="q_positions"):
            attention_of(VARIANTS[name], ContextParallel(2, 0)).plan(layout)
    attention_of(VARIANTS["plain"], ContextParallel(2, 0)).plan(layout)  # all keys are seen
    placed = attention_of(VARIANTS["causal"], ContextParallel(2, 0))
    for positions, error in (
        ([1, 2], flashbsr.ShapeError),
        ([1 << 31], flashbsr.IndexRangeError),
        ([0.5], flashbsr.DTypeError),
    ):
        with pytest.raises(error, match="q_positions"):
            placed.plan(layout, q_positions=positions)
    with pytest.raises(flashbsr.FlashbsrError, match="mask"):
        placed.plan(layout, q_positions=[7], custom_mask=np.ones(18, bool))
    with pytest.raises(flashbsr.IndexRangeError, match="behind its last"):
        placed.plan(layout, q_positions=[2], tree_parents=[-1, 0])
    with pytest.raises(flashbsr.UnsupportedError, match="Bounds"):
        placed.plan(
            flashbsr.Bounds([0, 2], [9], page_size=4), q_positions=[7], tree_parents=[-1, 0]
        )
    alibi = attention_of(VARIANTS["alibi"], ContextParallel(2, 0))
    with pytest.raises(flashbsr.UnsupportedError, match="pos_encoding_mode"):
        alibi.plan(layout, q_positions=[17], tree_parents=[-1, 0])
    matrix = attention_of(VARIANTS["plain"], ContextParallel(1, 0))
    with pytest.raises(flashbsr.UnsupportedError, match="q_positions"):
        matrix.plan(flashbsr.Bsr([0, 1], [0], (1, 4), (1, 4)), q_positions=[3])


def test_updates_bring_positions_or_do_not() -> None:
    tables = np.arange(4, dtype=np.int32).reshape(1, 4)
    placed = attention_of(VARIANTS["causal"], ContextParallel(2, 0))
    placed.plan(flashbsr.Bounds(None, [64], page_size=16), q_positions=[127])
    with pytest.raises(flashbsr.FlashbsrError, match="q_positions"):
        placed.update([60], tables)
    with pytest.raises(flashbsr.ShapeError, match="q_positions"):
        placed.update([60], tables, q_positions=[1, 2])
    plain = attention_of(VARIANTS["causal"], ContextParallel(1, 0))
    plain.plan(flashbsr.Bounds(None, [64], page_size=16))
    with pytest.raises(flashbsr.FlashbsrError, match="q_positions"):
        plain.update([60], tables, q_positions=[59])


@pytest.mark.parametrize(("asked", "counts_as"), [(5000, 100), (1 << 30, 100), (-5000, -102)])
def test_rotary_tables_end_where_plan_was_told(asked: int, counts_as: int) -> None:
    """Beyond them nothing is read: it was another's memory."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 16)).astype(np.float32)
    cache = rng.standard_normal((4, 2, PAGE, 2, 16)).astype(np.float32)
    attention = attention_of(Variant(pos_encoding_mode="ROPE_LLAMA"), ContextParallel(1, 0))
    attention.plan(flashbsr.Bounds([0, 2], [64], page_size=PAGE), q_positions=[100])
    found = []
    for position in (asked, counts_as):
        attention.update([40], np.arange(4)[None], q_positions=[position])
        found.append(attention.run(q, cache))
    np.testing.assert_array_equal(*found)


def test_local_lens_of_every_kind_of_array() -> None:
    share = ContextParallel(3, 1, 4)
    lens = np.arange(40)
    wanted = [int(share.has(np.arange(n)).sum()) for n in lens]
    assert [share.local_lens(int(n)) for n in lens] == wanted
    assert share.local_lens(lens).tolist() == wanted
    torch = pytest.importorskip("torch")
    assert share.local_lens(torch.arange(40, dtype=torch.int32)).tolist() == wanted
    for count in (0, 1, 4, 5, 13):
        assert (
            share.key_positions(count).tolist() == [p for p in range(200) if share.has(p)][:count]
        )
        assert [share.local_lens(int(p)) for p in share.key_positions(count)] == list(range(count))
