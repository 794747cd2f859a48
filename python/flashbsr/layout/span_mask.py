# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Mask functions that are spans: windows and documents, run by the kernels that know no mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedError
from ..variant.spec import AttentionSpec
from .block_mask import SeenBy, check_lengths, trace_for_heads
from .layouts import Ragged

__all__ = ["SpanMask", "span_mask"]

_ROWS = 256  # evaluated at once: a row of booleans per query, a megabyte at 4096 keys
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SpanMask:
    """A mask as causality and a window within segments; `span_mask` makes it.

    Attributes
    ----------
    qo_indptr, kv_indptr : int32 arrays, shape (segments + 1,)
        Rows of q and of k of each segment: requests, cut where documents end.
    causal, window_left
        Fields of the `AttentionSpec` that the layout needs.

    Examples
    --------
    >>> spans = span_mask(lambda b, h, q, kv: (q // 3 == kv // 3) & (kv <= q), 6, 6)
    >>> spans.causal, spans.window_left, spans.kv_indptr.tolist()
    (True, -1, [0, 3, 6])
    """

    qo_indptr: npt.NDArray[np.int32]
    kv_indptr: npt.NDArray[np.int32]
    causal: bool
    window_left: int

    @property
    def fields(self) -> dict[str, Any]:
        """Arguments of `AttentionSpec`."""
        return {"causal": self.causal, "window_left": self.window_left}

    def layout(self) -> Ragged:
        """Make the layout to plan, with a spec of `fields`; ragged KV, positions by segment."""
        return SpannedRagged(self.qo_indptr, self.kv_indptr, (self.causal, self.window_left))


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class SpannedRagged(Ragged):
    """Segments of a `SpanMask`, which are right with its own causality and window only."""

    fields: tuple[bool, int]

    def check(self, spec: AttentionSpec) -> None:
        """Raise `UnsupportedError` where the spec has other spans or asks for positions."""
        if (spec.causal, spec.window_left) != self.fields:
            causal, window_left = self.fields
            raise UnsupportedError(
                "layout",
                f"spans of causal={causal}, window_left={window_left}",
                f"those of the spec, causal={spec.causal}, window_left={spec.window_left}: "
                "AttentionSpec(**spans.fields)",
            )
        if spec.variant is not None and spec.variant.uses_positions:
            raise UnsupportedError(
                "variant",
                f"{spec.variant.name}, which asks for positions or the request",
                "one that does not with spans: positions are those within a segment",
            )


def span_mask(
    mask_mod: Callable[..., Any], q_lens: int | Sequence[int], kv_lens: int | Sequence[int]
) -> SpanMask:
    """Evaluate a mask function for all pairs and find the spans that it is.

    Sliding windows, causal masks, documents, and those together: kernels skip what such masks hide
    and test nothing. For other masks, `block_mask`.

    Parameters
    ----------
    mask_mod : callable ``(b, h, q_idx, kv_idx) -> bool``
        As in `block_mask`.
    q_lens, kv_lens : int or sequence of int
        Query tokens and keys of each request.

    Returns
    -------
    SpanMask

    Raises
    ------
    UnsupportedError
        The mask is something else; the message names a query where it shows.

    Notes
    -----
    Segments end where no query sees keys on both sides. Within one, the query of index i has the
    position ``p = keys - queries + i`` and sees ``j <= p`` (causal), ``j >= p - window_left``.

    Examples
    --------
    >>> window = span_mask(lambda b, h, q, kv: (kv <= q) & (kv > q - 256), 1024, 1024)
    >>> window.fields
    {'causal': True, 'window_left': 255}
    """
    queries, keys = check_lengths(q_lens, kv_lens)
    seen_by, _ = trace_for_heads(mask_mod)
    parts = [
        _segments(b, *_spans(seen_by, b, q_len, kv_len), kv_len)
        for b, (q_len, kv_len) in enumerate(zip(queries, keys, strict=True))
    ]
    none = np.zeros(0, np.int64)
    q_counts, kv_counts, begin, end = (
        np.concatenate([none, *(part[i] for part in parts)]) for i in range(4)
    )
    causal, window_left = _flags(q_counts, kv_counts, begin, end)
    qo_indptr, kv_indptr = (
        np.cumsum([0, *counts]).astype(np.int32) for counts in (q_counts, kv_counts)
    )
    return SpanMask(qo_indptr, kv_indptr, causal, window_left)


def _spans(seen_by: SeenBy, b: int, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
    """First key and end of what each query sees; 0, 0 where that is nothing."""
    begin, end = np.zeros(q_len, np.int64), np.zeros(q_len, np.int64)
    for first in range(0, q_len if kv_len else 0, _ROWS):
        seen = seen_by((b, q_len, kv_len), first, min(_ROWS, q_len - first), 0)
        rows = slice(first, first + len(seen))
        some = seen.any(axis=1)
        begin[rows] = np.where(some, seen.argmax(axis=1), 0)
        end[rows] = np.where(some, kv_len - seen[:, ::-1].argmax(axis=1), 0)
        holes = np.flatnonzero(seen.sum(axis=1) != end[rows] - begin[rows])
        if len(holes):
            raise _refusal(
                f"query {first + holes[0]} of request {b} sees keys with others between them"
            )
    return begin, end


def _segments(b: int, begin: Ints, end: Ints, kv_len: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut a request: queries and keys of each segment, and the spans within it."""
    some = end > begin
    # Cuts before key j that some query sees across.
    across = np.zeros(kv_len + 2, np.int64)
    wide = end - begin >= 2
    np.add.at(across, begin[wide] + 1, 1)
    np.add.at(across, end[wide], -1)
    cuts = np.flatnonzero(np.cumsum(across)[: kv_len + 1] == 0)
    # Keys that nobody sees are one segment and not one each.
    used = np.zeros(len(cuts), np.bool_)
    used[np.searchsorted(cuts, begin[some], side="right") - 1] = True
    inside = np.zeros(len(cuts), np.bool_)
    inside[1:-1] = ~used[:-2] & ~used[1:-1]
    cuts = cuts[~inside]
    rows, segment = np.flatnonzero(some), np.searchsorted(cuts, begin[some], side="right") - 1
    if (np.diff(segment) < 0).any():
        wrong = rows[np.flatnonzero(np.diff(segment) < 0)[0]]
        raise _refusal(f"query {wrong} of request {b} sees keys behind those of a later one")
    counts: list[tuple[int, int]] = []
    row = 0
    for s, keys in enumerate(np.diff(cuts).tolist()):
        low, high = np.searchsorted(segment, (s, s + 1))
        if low == high:
            counts.append((0, keys))
            continue
        first, last = int(rows[low]), int(rows[high - 1])
        if last - first != high - low - 1:
            raise _refusal(f"between {first} and {last} of request {b} some queries see nothing")
        # Queries that see nothing have a segment without keys.
        counts += [(first - row, 0)] * (first > row) + [(last + 1 - first, keys)]
        row = last + 1
    counts += [(len(begin) - row, 0)] * (len(begin) > row)
    start = np.zeros_like(begin)
    start[rows] = cuts[segment]
    q_counts, kv_counts = np.array(counts, np.int64).reshape(-1, 2).T
    return q_counts, kv_counts, begin - start, end - start


def _flags(q_counts: Ints, kv_counts: Ints, begin: Ints, end: Ints) -> tuple[bool, int]:
    """Causality and window that give these spans."""
    keys = np.repeat(kv_counts, q_counts)
    index = np.arange(len(begin)) - np.repeat(np.cumsum(q_counts) - q_counts, q_counts)
    position = keys - np.repeat(q_counts, q_counts) + index
    bound = np.flatnonzero(begin > 0)
    windows = [-1, *(int(position[i] - begin[i]) for i in bound[:1])]
    worst = 0
    for window in windows:
        for causal in (False, True):
            stop = np.clip(position + 1, 0, keys) if causal else keys
            start = np.maximum(position - window, 0) if window >= 0 else np.zeros_like(keys)
            start = np.minimum(start, stop)
            same = np.where(stop > start, (begin == start) & (end == stop), end == begin)
            if same.all():
                return causal, window
            worst = max(worst, int(np.argmin(same)))
    raise _refusal(f"what query {worst} of all sees is no window and not causal")


def _refusal(what: str) -> UnsupportedError:
    return UnsupportedError("mask_mod", f"a mask that is no spans ({what})", "flashbsr.block_mask")
