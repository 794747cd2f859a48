# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Partial results of several processes, merged over a gloo group."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="process groups are PyTorch's")
import ranks


@pytest.mark.parametrize(
    ("size", "seeds"), [(2, range(14)), (4, range(14, 21)), (8, range(21, 24))]
)
def test_all_ranks_have_attention_over_all_keys(size: int, seeds: range, tmp_path: Path) -> None:
    assert ranks.on_ranks(size, ranks.merge_shares, tmp_path, seeds) == [len(seeds)] * size


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    for said in ranks.on_ranks(2, ranks.bad_calls, tmp_path):
        assert said == ["out", "out", "lse", "lse", "out", "method", "lse_base"]


@pytest.mark.parametrize("what", ["dead", "late"])
def test_ranks_do_not_wait_for_ever(what: str, tmp_path: Path) -> None:
    found = ranks.on_ranks(3, ranks.merge_with, tmp_path, what)
    assert (found[2] is None) == (what == "dead")
    for text, seconds in found[:2]:
        assert "an answer of every rank" in text, text
        assert seconds < 5
    if what == "late":
        assert found[2][0] != "merged", "nobody has a result that the others do not have"
