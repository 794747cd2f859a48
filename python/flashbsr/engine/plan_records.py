# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A plan's words as arrays of records: the format of ``include/flashbsr/core/plan.h``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DTypeError, FlashbsrError, ShapeError
from .context import ContextParallel

__all__ = ["WORK_ITEM", "PlanHeader", "PlanRecords"]

MAGIC = 0x52534246
VERSION = 9
HEADER_WORDS = 72

FLAG_CAUSAL = 1 << 0
FLAG_PAGED = 1 << 1
FLAG_CUSTOM_MASK = 1 << 2
FLAG_PER_HEAD = 1 << 3
FLAG_PLACED = 1 << 5


class PlanHeader(NamedTuple):
    """The words of the header that mean something. ``num_*``: contents; ``max_*``: capacity."""

    magic: int
    version: int
    total_size: int
    flags: int
    num_requests: int
    num_items: int
    num_workers: int
    num_merges: int
    num_slots: int
    num_kv_indices: int
    num_q_tokens: int
    num_kv_rows: int
    num_qo_heads: int
    num_kv_heads: int
    group_size: int
    page_size: int
    window_left: int
    tile_rows: int
    max_kv_len: int
    kv_chunk: int
    max_requests: int
    max_items: int
    max_merges: int
    max_partial_rows: int
    max_kv_indices: int
    off_requests: int
    off_items: int
    off_queue_indptr: int
    off_queue_items: int
    off_merges: int
    off_kv_indices: int
    mean_cost: int
    max_cost: int
    cost_per_item: int
    cost_per_kv: int
    cost_per_kv_row: int
    max_rows: int
    policy: int
    policy_percent: int
    cost_per_split: int
    price: int
    other_price: int
    units_per_us: int
    off_starts: int
    num_shared: int
    num_partial_rows: int
    num_q_rows: int
    num_merge_parts: int
    max_q_rows: int
    max_merge_parts: int
    off_q_rows: int
    off_merge_parts: int
    num_kv_tokens: int
    num_wide_items: int
    num_narrow_workers: int
    narrow_rows: int
    narrow_cost_per_item: int
    narrow_cost_per_kv: int
    narrow_cost_per_split: int
    num_narrow_blocks: int
    off_bounds: int
    kv_tile: int
    num_q_tokens_now: int
    cluster_parts: int
    context_size: int
    context_rank: int
    context_interleave: int
    cost_row_shift: int
    common_prefix: int
    end_position: int
    heads_of_item: int


def _record(*fields: str, half: tuple[str, ...] = ()) -> np.dtype[np.void]:
    return np.dtype([(name, np.int16 if name in half else np.int32) for name in fields])


# fmt: off
REQUEST = _record("q_begin", "q_len", "kv_begin", "kv_len", "mask_lo", "mask_hi",
                  "index", "mask_begin")
WORK_ITEM = _record("request", "row_begin", "row_count", "kv_head", "merge_count", "kv_begin",
                    "kv_end", "slot", "merge", half=("kv_head", "merge_count"))
MERGE = _record("request", "row_begin", "row_count", "kv_head", "slot", "state_count",
                "part", "part_count")
MERGE_PART = _record("slot", "count", "stride", "reserved0")
# fmt: on


class PlanRecords:
    """The sections of a plan; `Plan` documents them."""

    __slots__ = (
        "buffer", "first_positions", "header", "items", "kv_indices", "merge_parts", "merges",
        "owners", "q_rows", "queue_indptr", "queue_items", "requests", "shared",
    )  # fmt: skip

    def __init__(self, buffer: npt.NDArray[np.int32]) -> None:
        if not isinstance(buffer, np.ndarray) or buffer.dtype != np.int32:
            raise DTypeError("buffer", getattr(buffer, "dtype", type(buffer)), "an int32 array")
        if buffer.ndim != 1 or not buffer.flags.c_contiguous or buffer.size < HEADER_WORDS:
            raise ShapeError("buffer", f"shape {buffer.shape}", "a contiguous vector with a header")
        self.buffer = buffer
        self.header = h = PlanHeader(*buffer[: len(PlanHeader._fields)].tolist())
        if (h.magic, h.version) != (MAGIC, VERSION):
            raise FlashbsrError(
                "buffer",
                f"magic {h.magic:#x}, version {h.version}",
                f"a plan: magic {MAGIC:#x}, version {VERSION}",
            )
        if h.total_size > buffer.size:
            raise ShapeError("buffer", f"{buffer.size} words", f"{h.total_size} words")
        self.owners = self._records(h.off_requests, h.num_requests + h.num_shared, REQUEST)
        self.first_positions = (self.owners["kv_len"] - self.owners["q_len"]).astype(np.int64)
        if h.flags & FLAG_PLACED:  # positions are where numbers of tokens were: core/plan.h
            self.owners = self.owners.copy()
            self.owners["q_len"] = self.owners["mask_lo"]
            self.owners["mask_lo"] = -1
        self.requests, self.shared = np.split(self.owners, [h.num_requests])
        self.items = self._records(h.off_items, h.num_items, WORK_ITEM)
        self.merges = self._records(h.off_merges, h.num_merges, MERGE)
        self.queue_indptr = self._words(h.off_queue_indptr, h.num_workers + 1)
        self.queue_items = self._words(h.off_queue_items, h.num_items)
        self.kv_indices = self._words(h.off_kv_indices, h.num_kv_indices)
        self.q_rows = self._words(h.off_q_rows, h.num_q_rows)
        self.merge_parts = self._records(h.off_merge_parts, h.num_merge_parts, MERGE_PART)

    def _words(self, offset: int, count: int) -> npt.NDArray[np.int32]:
        return self.buffer[offset : offset + count]

    def _records(self, offset: int, count: int, dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
        return self._words(offset, count * (dtype.itemsize // 4)).view(dtype)

    def visible(
        self, positions: npt.NDArray[np.int64], kv_lens: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Keys ``[begin, end)`` that queries see of `kv_lens`: ``visible_keys`` of ``core/plan.h``.

        Parameters
        ----------
        positions : int64 array
            Of the queries among the keys of their requests, on all ranks.
        kv_lens : int or integer array
            Keys that are here.
        """
        h, kv_lens = self.header, np.asarray(kv_lens, np.int64)
        share = ContextParallel(
            max(h.context_size, 1), h.context_rank, max(h.context_interleave, 1)
        )
        end = np.broadcast_to(kv_lens, positions.shape)
        if self.causal:
            end = np.clip(share.local_lens(np.maximum(positions + 1, 0)), 0, kv_lens)
        begin = np.zeros_like(positions)
        if h.window_left >= 0:
            begin = share.local_lens(np.maximum(positions - h.window_left, 0))
        return np.minimum(begin, end), end

    @property
    def causal(self) -> bool:
        """Whether the plan is trimmed by causality."""
        return bool(self.header.flags & FLAG_CAUSAL)

    @property
    def paged(self) -> bool:
        """Whether the KV is paged."""
        return bool(self.header.flags & FLAG_PAGED)

    @property
    def custom_mask(self) -> bool:
        """Whether requests carry a custom mask."""
        return bool(self.header.flags & FLAG_CUSTOM_MASK)

    @property
    def per_head(self) -> bool:
        """Whether a request belongs to one KV head, that of its items."""
        return bool(self.header.flags & FLAG_PER_HEAD)

    @property
    def kv_heads(self) -> npt.NDArray[np.int32]:
        """KV head of each request; -1: all of them, or no query."""
        heads = np.full(len(self.requests), -1, np.int32)
        if self.per_head:
            heads[self.items["request"]] = self.items["kv_head"]
        return heads

    @property
    def kv_head_count(self) -> int:
        """KV heads that there are: an item may read two of them."""
        return self.header.num_kv_heads * self.header.heads_of_item

    @property
    def heads_per_request(self) -> int:
        """KV heads, or pairs that are read together, that each request has items for."""
        return 1 if self.per_head else self.header.num_kv_heads

    @property
    def items_of_a_head(self) -> npt.NDArray[np.void]:
        """Items of one KV head: the others' are the same. All of them where requests have one."""
        return self.items if self.per_head else self.items[self.items["kv_head"] == 0]
