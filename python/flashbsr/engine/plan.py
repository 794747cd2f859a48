# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the plan: the flat int32 buffer that every backend consumes.

The layout is that of ``include/flashbsr/core/plan.h``, whose words are used here: a *packed row* is
a query token and a head of its KV group, a *row tile* is a run of packed rows of one request and KV
head, a *work item* is a row tile against a range of KV positions, a *merge* contracts the partial
states of a run of rows, a *shared part* is KV that several requests begin with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .plan_parts import SharedPart, Tiles, parts_of, shared_text, split_text, tiles_of
from .plan_records import WORK_ITEM, PlanHeader, PlanRecords

__all__ = ["Plan", "PlanHeader"]

# How the KV ranges were cut: ``PlanHeader.policy``.
_POLICIES = ("algorithm 1", "disabled", "fixed", "whole", "quota", "even", "tail", "cluster")


class Plan(PlanRecords):
    """View of a plan. Copies nothing; later changes of the buffer show.

    Parameters
    ----------
    buffer : numpy.ndarray, int32 [n], contiguous
        A plan, as ``Attention.plan_info`` gives it.

    Attributes
    ----------
    buffer : numpy.ndarray, int32
    header : PlanHeader
        Read when the view was made.
    requests : numpy structured array [num_requests]
        ``q_begin, q_len, kv_begin, kv_len, mask_lo, mask_hi, index, mask_begin`` (tokens; bytes
        for the mask; the request's own number; the first KV position that the mask has bits of).
    shared : numpy structured array [num_shared]
        Shared parts, in the form of `requests` and numbered behind them: KV that several requests
        begin with. ``q_len`` query tokens, rows ``q_rows[r.q_begin : r.q_begin + q_len]`` of q.
        `parts` names the requests.
    owners : numpy structured array [num_requests + num_shared]
        Both, as ``items["request"]`` counts them.
    items : numpy structured array [num_items]
        ``request, row_begin, row_count, kv_head, merge_count, kv_begin, kv_end, slot, merge``, in
        claim order: the most expensive first. KV positions ``[kv_begin, kv_end)``; ``slot == -1``:
        the item writes the final output, otherwise rows ``slot`` to ``slot + row_count`` of the
        partial states.
    merges : numpy structured array [num_merges]
        ``request, row_begin, row_count, kv_head, slot, state_count, part, part_count``.
    merge_parts : numpy structured array [num_merge_parts]
        ``slot, count, stride``: where merges with ``part >= 0`` find their states.
    q_rows : numpy.ndarray, int32 [num_q_rows]
        Query tokens of the shared parts.
    queue_indptr : numpy.ndarray, int32 [num_workers + 1]
    queue_items : numpy.ndarray, int32 [num_items]
        Worker *w* owns the items ``queue_items[queue_indptr[w]:queue_indptr[w + 1]]``.
    kv_indices : numpy.ndarray, int32 [num_kv_indices]
        The page table; empty for ragged KV.

    Raises
    ------
    DTypeError, ShapeError
        Not a contiguous int32 vector.
    FlashbsrError
        Not a plan, or one of another version.

    Examples
    --------
    >>> import numpy as np
    >>> import flashbsr
    >>> attention = flashbsr.Attention(
    ...     flashbsr.AttentionSpec(causal=True),
    ...     flashbsr.TaskInfo(num_qo_heads=4, num_kv_heads=2, head_dim_qk=64),
    ... )
    >>> attention.plan(flashbsr.Ragged(np.array([0, 3, 5]), np.array([0, 8, 13])))
    >>> plan = attention.plan_info
    >>> plan.requests["kv_len"].tolist(), plan.header.num_q_tokens
    ([8, 5], 5)
    """

    __slots__ = ()

    @property
    def tiles(self) -> Tiles:
        """The row tiles of a KV head: ``owner``, a number in `owners`, and how many ``items``."""
        return tiles_of(self)

    @property
    def parts(self) -> list[SharedPart]:
        """The shared parts in words of requests, as `shared` has them: parents before children.

        Each with ``kv_begin, kv_end``, ``requests`` and ``loads``, the row tiles of a KV head that
        load it, of ``loads_apart`` that would without sharing.
        """
        return parts_of(self)

    def queue(self, worker: int) -> npt.NDArray[np.int32]:
        """Look up the items of one worker.

        Parameters
        ----------
        worker : int
            0 to ``num_workers - 1``.

        Returns
        -------
        numpy.ndarray, int32 [n]
            Item ids, in the worker's order.
        """
        begin, end = self.queue_indptr[worker], self.queue_indptr[worker + 1]
        return self.queue_items[begin:end]

    def cost(self, item: Any = None) -> npt.NDArray[np.int64]:
        """Estimate the time of work items, in the scheduler's units.

        ``cost_per_item + (kv_end - kv_begin) * (cost_per_kv + cost_per_kv_row *
        ceil(row_count / 2**cost_row_shift))``, and
        ``cost_per_split`` for a part of a split tile. Narrow items, of at most ``narrow_rows``
        rows, have ``narrow_cost_per_item`` and so on.

        Parameters
        ----------
        item : int, int array or record(s) of `items`, optional
            Default: all items.

        Returns
        -------
        numpy.ndarray, int64
            One number per item; 0-dimensional for a single one.
        """
        if item is None:
            item = self.items
        elif not isinstance(item, (np.void, np.ndarray)) or item.dtype != WORK_ITEM:
            item = self.items[item]
        h = self.header
        span = np.subtract(item["kv_end"], item["kv_begin"], dtype=np.int64)
        rows = np.asarray(item["row_count"], dtype=np.int64)
        cost = h.cost_per_item + span * (
            h.cost_per_kv + h.cost_per_kv_row * -(-rows >> h.cost_row_shift)
        )
        split = np.asarray(item["slot"]) >= 0
        narrow = h.narrow_cost_per_item + span * h.narrow_cost_per_kv
        return np.asarray(
            np.where(
                rows <= h.narrow_rows,
                narrow + h.narrow_cost_per_split * split,
                cost + h.cost_per_split * split,
            )
        )

    @property
    def balance(self) -> float:
        """Mean over most loaded worker by the scheduler's cost model: 1.0 is perfect."""
        return self.header.mean_cost / self.header.max_cost if self.header.max_cost else 1.0

    @property
    def policy(self) -> str:
        """How KV ranges were cut: ``algorithm 1``, ``disabled``, ``fixed``, or by price.

        The cheapest of several cuts, on GPUs: ``whole``, ``quota``, ``even``, ``tail``,
        ``cluster``.
        """
        return _POLICIES[self.header.policy]

    @property
    def reason(self) -> str:
        """Why KV ranges were cut as they are, in one line."""
        h = self.header
        tiles = self.tiles
        if (tiles.items[tiles.owner >= h.num_requests] > 1).any():
            return f"{self._cut}; shared parts beyond half of a worker's share"
        return self._cut

    @property
    def _cut(self) -> str:
        h = self.header
        chunk = f"{h.kv_chunk} KV tokens"
        above = h.max_cost / h.mean_cost - 1 if h.mean_cost else 0.0
        mine, other = (f"{p / (h.units_per_us or 1):.1f}" for p in (h.price, h.other_price))
        if h.cost_per_kv_row:  # the bound is one of cost
            chunk += f" at {h.tile_rows} rows"
        if not h.num_items:
            return "nothing to do"
        match self.policy:
            case "disabled":
                return "whole tiles: splits are disabled"
            case "fixed":
                return f"at multiples of {h.kv_chunk} KV tokens, whatever else is in the batch"
            case "algorithm 1" if (self.tiles.items > 1).any():
                return f"tiles beyond a worker's share of the work ({chunk}) are split"
            case "algorithm 1":
                return f"whole tiles: none is beyond a worker's share or the least part ({chunk})"
            case "whole":
                text = f"whole tiles: the longest queue is {above:.0%} above the mean"
                if h.other_price <= 0:
                    return f"{text}, and no split would better it"
                return f"{text}; {mine} us by the model, with splits at least {other}"
            case "quota":
                text = f"tiles beyond {h.policy_percent} % of a worker's share ({chunk}) are split"
            case "even":
                text = f"few long tiles: equal parts of at most {chunk} fill the workers"
            case "cluster":
                text = f"every tile in {h.cluster_parts} parts, merged within clusters of blocks"
            case _:
                text = f"whole rounds of all workers, what is left in parts of at most {chunk}"
        return f"{text}; {mine} us by the model, whole {other}"

    def __str__(self) -> str:
        h = self.header
        kind = [
            f"paged (page size {h.page_size})" if self.paged else "ragged",
            *(["causal"] if self.causal else []),
            *([f"window {h.window_left}"] if h.window_left >= 0 else []),
            *(["custom mask"] if self.custom_mask else []),
            *(["per KV head"] if self.per_head else []),
        ]
        kv_tokens = int(self.requests["kv_len"].sum(dtype=np.int64))
        batch = f"{h.num_requests}: {h.num_q_tokens} query tokens, {kv_tokens} KV tokens"
        lines = [
            f"plan: {', '.join(kind)}, {h.num_qo_heads} query / {self.kv_head_count} KV heads",
            f"  requests  {batch}, longest {h.max_kv_len}",
            *([f"  shared    {shared_text(self)}"] if h.num_shared else []),
            f"  items     {h.num_items} of at most {h.max_rows} packed rows",
            f"  splits    {split_text(self)}",
            f"  cut       {self.reason}",
            f"  workers   {h.num_workers}, balance {self.balance:.3f}",
            f"  memory    {4 * h.total_size} bytes",
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        h = self.header
        shared = f", {h.num_shared} shared parts" if h.num_shared else ""
        return f"<flashbsr.Plan: {h.num_requests} requests{shared}, {h.num_items} items>"
