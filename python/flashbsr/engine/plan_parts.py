# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What a plan's items say together: its row tiles and its shared parts, and both in words."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .plan_records import PlanRecords

__all__ = ["SharedPart", "Tiles", "parts_of", "shared_text", "split_text", "tiles_of"]


class SharedPart(NamedTuple):
    """KV that several requests begin with, loaded for all of them at once.

    Attributes
    ----------
    kv_begin, kv_end : int
        KV positions of each of the requests.
    own_begin : int
        Where the next KV of these requests begins: behind `kv_end`, at a page.
    requests : numpy.ndarray, int64 [n]
        Their numbers, in the order of the part's rows.
    loads, loads_apart : int
        Row tiles of a KV head that load it, and those of the requests that would without.
    """

    kv_begin: int
    kv_end: int
    own_begin: int
    requests: npt.NDArray[np.int64]
    loads: int
    loads_apart: int


class Tiles(NamedTuple):
    """Row tiles of a KV head: whose they are, by their number in `Plan.owners`, and their items."""

    owner: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]


def tiles_of(plan: PlanRecords) -> Tiles:
    """Count the items of every row tile."""
    items = plan.items_of_a_head
    key = items["request"].astype(np.int64) << 32 | items["row_begin"]
    tiles, count = np.unique(key, return_counts=True)
    return Tiles(tiles >> 32, count)


def parts_of(plan: PlanRecords) -> list[SharedPart]:
    """Find the requests of the shared parts by their rows of q."""
    if not len(plan.shared):
        return []
    items = plan.items_of_a_head
    begin = np.full(len(plan.owners), np.iinfo(np.int64).max)
    np.minimum.at(begin, items["request"], items["kv_begin"])
    tiles = np.bincount(tiles_of(plan).owner, minlength=len(plan.owners))
    request_of = np.repeat(np.arange(len(plan.requests)), plan.requests["q_len"])
    found = []
    for number, part in enumerate(plan.shared, len(plan.requests)):
        members = request_of[plan.q_rows[part["q_begin"] : part["q_begin"] + part["q_len"]]]
        members = members[np.flatnonzero(np.diff(members, prepend=-1))]
        loads = int(tiles[number]), int(tiles[members].sum())
        end, size = int(part["kv_len"]), plan.header.page_size
        found.append(SharedPart(int(begin[number]), end, -(-end // size) * size, members, *loads))
    return found


def split_text(plan: PlanRecords) -> str:
    """``8 tiles split into 32 parts``, of all KV heads."""
    count = tiles_of(plan).items
    split = count[count > 1]
    if not len(split):
        return "none"
    heads = plan.heads_per_request
    return f"{len(split) * heads} tiles split into {split.sum() * heads} parts"


def shared_text(plan: PlanRecords) -> str:
    """``1 part of 8192 tokens over 64 requests, saves 62 loads, 94% of KV``."""
    parts = parts_of(plan)
    if not parts:
        return "nothing"
    lengths = [p.kv_end - p.kv_begin for p in parts]
    saved = [p.loads_apart - p.loads for p in parts]
    tokens = sum(n * length for n, length in zip(saved, lengths, strict=True))
    items = plan.items_of_a_head
    left = int(np.subtract(items["kv_end"], items["kv_begin"], dtype=np.int64).sum())
    requests = len(np.unique(np.concatenate([p.requests for p in parts])))
    span = " to ".join(str(n) for n in sorted({min(lengths), max(lengths)}))
    return (
        f"{len(parts)} part{'s' * (len(parts) > 1)} of {span} tokens over "
        f"{requests} request{'s' * (requests > 1)}, "
        f"saves {sum(saved)} loads, {tokens / (tokens + left):.0%} of KV"
    )
