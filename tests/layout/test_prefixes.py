# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`find_shared_prefixes` finds what looking at every beginning finds."""

from __future__ import annotations

import dataclasses
from typing import Any

import flashbsr
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared import Batch


def tree_of(batch: Batch, causal: bool) -> set[tuple[int, frozenset[int]]]:
    """Every set of requests that share a beginning, with all that they share, by brute force."""
    members: dict[tuple[int, ...], set[int]] = {}
    for request, (pages, kv_len, q_len) in enumerate(
        zip(batch.pages, batch.kv_lens, batch.q_lens, strict=True)
    ):
        seen = kv_len - (q_len - 1 if causal else 0)
        for depth in range(1, max(seen, 0) // batch.page_size + 1 if q_len else 1):
            members.setdefault(tuple(pages[:depth]), set()).add(request)
    longest: dict[frozenset[int], int] = {}
    for prefix, who in members.items():
        if len(who) > 1:
            key = frozenset(who)
            longest[key] = max(longest.get(key, 0), len(prefix) * batch.page_size)
    return {(tokens, who) for who, tokens in longest.items()}


PAGES = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=9)


@given(
    PAGES, st.sampled_from([1, 2, 16]), st.booleans(), st.randoms(), st.sampled_from(["i4", "i8"])
)
def test_find_shared_prefixes(
    pages: list[list[int]], size: int, causal: bool, random: Any, kind: str
) -> None:
    """The nodes of the tree, each once; parents before children, whose requests are neighbours."""
    lens = [max(size * len(own) - random.randrange(size), 0) for own in pages]
    batch = Batch(size, pages, lens, [random.choice([0, 1, 1, 4]) for _ in pages])
    table = batch.table()
    table = dataclasses.replace(table, **{name: x.astype(kind) for name, x in table.arrays()})
    found = flashbsr.find_shared_prefixes(table, causal=causal)
    expected = tree_of(batch, causal)
    assert {(tokens, frozenset(who)) for tokens, who in found} == expected
    assert len(found) == len(expected)
    for i, (tokens, who) in enumerate(found):
        for parent_tokens, parent in found[:i]:
            if set(who) & set(parent):
                assert parent_tokens < tokens
                first = parent.index(who[0])
                assert parent[first : first + len(who)] == who
    batch.q_lens = [1] * len(pages)
    decode = dataclasses.replace(table, qo_indptr=None)
    found = flashbsr.find_shared_prefixes(decode, causal=causal)
    assert {(tokens, frozenset(who)) for tokens, who in found} == tree_of(batch, causal)


@pytest.mark.parametrize("kind", ["i4", "i8"])
def test_find_shared_prefixes_of_a_large_table(kind: str, rng: np.random.Generator) -> None:
    """256 x 512 pages: all share 100 pages, groups of 16 another 200, pairs up to the last page."""
    order = iter(rng.permutation(200_000).tolist())

    def new(groups: int, count: int) -> list[list[int]]:
        return [[next(order) for _ in range(count)] for _ in range(groups)]

    all_of, groups, pairs, own = new(1, 100), new(16, 200), new(128, 211), new(256, 1)
    lists = [all_of[0] + groups[b // 16] + pairs[b // 2] + own[b] for b in range(256)]
    lens = np.full(256, 512 * 16, kind)
    tables = np.array(lists).astype(kind)
    indptr = np.arange(257).astype(kind) * 512
    layouts = (
        flashbsr.Paged(None, indptr, tables.ravel(), kv_lens=lens, page_size=16),
        flashbsr.BlockTable(None, tables, lens, page_size=16),
    )
    found, of_table = map(flashbsr.find_shared_prefixes, layouts)
    assert found == of_table
    expected = {(1600, frozenset(range(256)))}
    expected |= {(4800, frozenset(range(b, b + 16))) for b in range(0, 256, 16)}
    expected |= {(8176, frozenset((b, b + 1))) for b in range(0, 256, 2)}
    assert {(tokens, frozenset(who)) for tokens, who in found} == expected


def test_find_shared_prefixes_of_bad_tables() -> None:
    i32 = np.array
    good = flashbsr.Paged(None, i32([0, 2, 4]), i32([5, 6, 5, 7]), kv_lens=i32([8, 7]), page_size=4)
    assert flashbsr.find_shared_prefixes(good) == [(4, [0, 1])]
    names = ("kv_indptr", "kv_indices", "kv_lens", "page_size")
    for at, value, error in (
        (0, i32([0, 2, 5]), flashbsr.ShapeError),
        (0, i32([0, 3, 2]), flashbsr.IndexRangeError),
        (1, i32([5, 6, -5, 7]), flashbsr.IndexRangeError),
        (1, i32([5, 6, 2**40, 7]), flashbsr.IndexRangeError),
        (1, i32([5.0, 6, 5, 7]), flashbsr.DTypeError),
        (2, i32([8, 9]), flashbsr.IndexRangeError),
        (2, i32([8]), flashbsr.ShapeError),
        (3, 0, flashbsr.FlashbsrError),
        (3, 2.0, flashbsr.DTypeError),
    ):
        with pytest.raises(error):
            flashbsr.find_shared_prefixes(dataclasses.replace(good, **{names[at]: value}))
    for other in (flashbsr.Ragged(None, [0, 2]), i32([0, 2, 4]), None):
        with pytest.raises(flashbsr.DTypeError, match="^layout"):
            flashbsr.find_shared_prefixes(other)
