# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts that several processes attend to together."""

from __future__ import annotations

from pathlib import Path

import flashbsr
import numpy as np
import pytest

pytest.importorskip("torch", reason="process groups are PyTorch's")
import ranks
from flashbsr.distributed import zigzag
from shares import VARIANTS, Batch


@pytest.mark.parametrize(("size", "seeds"), [(2, range(10)), (3, range(10, 15))])
def test_ranks_together_have_what_one_would_have(size: int, seeds: range, tmp_path: Path) -> None:
    found = ranks.on_ranks(size, ranks.prefill, tmp_path, seeds)
    for n, (seed, _method) in enumerate((s, m) for s in seeds for m in ("ring", "all_gather")):
        name, lens, (q, k, v) = ranks.prompts(seed)
        out = np.full(q.shape, np.nan, np.float32)
        lse = np.full(q.shape[:2], np.nan, np.float32)
        for rank in range(size):
            rows, part, part_lse = found[rank][n]
            out[rows], lse[rows] = part, part_lse
        ends = np.cumsum(lens)[:-1]
        kv = list(zip(np.split(k, ends), np.split(v, ends), strict=True))
        Batch(q, kv, lens).check(out, lse, VARIANTS[name])


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("lens", [[4096], [1000, 7, 0, 333], [1]])
def test_every_token_is_on_one_rank_and_all_have_the_same_work(size: int, lens: list[int]) -> None:
    shards = [zigzag(lens, size, rank) for rank in range(size)]
    rows = np.concatenate([shard.rows for shard in shards])
    assert sorted(rows.tolist()) == list(range(sum(lens)))
    starts = np.concatenate([np.arange(n) for n in lens])
    for shard in shards:
        assert np.array_equal(starts[shard.rows], shard.positions)
        assert len(shard.positions) == shard.lens.sum()
    work = [int((shard.positions + 1).sum()) for shard in shards]
    if lens == [4096]:
        assert max(work) <= 1.02 * min(work)


@pytest.mark.parametrize(
    ("lens", "size", "rank"), [([[3]], 2, 0), ([-1], 2, 0), ([1.5], 2, 0), ([3], 2, 2)]
)
def test_what_cannot_be_spread(lens: object, size: int, rank: int) -> None:
    with pytest.raises(flashbsr.FlashbsrError):
        zigzag(lens, size, rank)


def test_a_ring_does_not_wait_for_ever(tmp_path: Path) -> None:
    found = ranks.on_ranks(2, ranks.prefill_with_a_late_rank, tmp_path)
    assert "an answer of every rank" in found[0]
