# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of the steps of a group of layers: one for each kind of layer in it. Knows no vLLM."""

# Keys of graphs are what vLLM's builder says; one that is not "mixed" is a number of rows.
# mypy: disable-error-code="arg-type"

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import numpy as np
import torch

import flashbsr._core as _core

from ...engine.attention import Attention
from ...engine.context import ContextParallel
from ...errors import PlanError
from ...layout.bounds import Bounds
from ...layout.layouts import BlockTable, Layout, Ragged
from .context import Ranks
from .kinds import Kind
from .rows import Rows, rows_of
from .slots import ROOM, Graph, Slot

__all__ = ["Batch", "Place", "Step", "Steps"]

# Steps in flight: while one runs, the next is prepared.
IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Place:
    """Where a group of layers computes, and on what.

    Parameters
    ----------
    q_dtype : str
        Of queries and outputs.
    page_size : int
        Tokens of a block.
    device : int, optional
        Ordinal of the GPU; None: the CPU.
    num_threads : int, optional
        On the CPU.
    fixed_split_size : int, optional
        Of batch-invariant mode.
    ranks : Ranks, optional
        Those that share the keys of each request; None: all keys are here.
    """

    q_dtype: str
    page_size: int
    device: int | None = None
    num_threads: int | None = None
    fixed_split_size: int | None = None
    ranks: Ranks | None = None

    @property
    def mixes(self) -> bool:
        """Whether there is a kernel for mixed batches, of some kinds of layers."""
        if self.device is None or self.fixed_split_size or self.ranks is not None:
            return False
        known = _core.cuda_devices()[self.device : self.device + 1]
        hopper = any(x["compute_capability"] == (9, 0) for x in known)
        return hopper and self.q_dtype in ("float16", "bfloat16")

    def task(self) -> dict[str, Any]:
        """Give what `TaskInfo` says of it."""
        if self.device is None:
            place: dict[str, Any] = {"backend": "cpu", "num_threads": self.num_threads}
        else:
            place = {"backend": "cuda", "device": self.device}
        if self.ranks is not None:
            place["context_parallel"] = self.ranks.share
        return {**place, "fixed_split_size": self.fixed_split_size}


@dataclass(eq=False, slots=True)  # frozen, it took a step 2 us more (Zen 3)
class Batch:
    """The requests of a step, which nobody changes.

    Parameters
    ----------
    starts : int array, shape (requests + 1,)
        Query rows of each request, on the host.
    bounds : int array, shape (requests,)
        The most KV tokens of each, on the host; on the CPU the tokens.
    tables : int32 tensor, shape (requests, max_blocks)
        Blocks of each, where the computation is.
    lens, query_starts : int32 tensors
        On a GPU the tokens and query rows, which the host does not read. No `query_starts`: rows
        are those of `starts`, of every step that a graph is replayed for, too.
    causal : bool
    first, positions : int arrays, shape (requests,)
        Positions of first queries, where bounds and lengths do not tell: on the host (of bounds),
        and on a GPU.
    common_prefix : int
        Tokens, whole blocks, that all requests begin with; on the CPU they are found.
    topk : int
        Every row is a request of its own, for which each layer says which tokens it attends to, at
        most so many (`of_rows`); 0: requests have tables.
    known : Rows, optional
        Query rows of each request, where they have been looked at: those of `starts`.

    Attributes
    ----------
    of_requests : Rows
        Query rows of each request.
    """

    starts: np.ndarray[Any, Any]
    bounds: np.ndarray[Any, Any]
    tables: Any
    lens: Any = None
    query_starts: Any = None
    causal: bool = True
    first: np.ndarray[Any, Any] | None = None
    positions: Any = None
    common_prefix: int = 0
    topk: int = 0
    known: InitVar[Rows | None] = None
    of_requests: Rows = field(init=False)

    def __post_init__(self, known: Rows | None) -> None:
        self.of_requests = known or rows_of(self.starts)

    def of_rows(self, topk: int, rows: int) -> Batch:
        """Give a batch of as many requests as rows, those of no request behind the others.

        The layers will say the tokens of each, no more than `topk`.
        """
        bounds = np.zeros(rows, np.int64)
        bounds[: self.rows] = np.repeat(self.bounds, np.diff(self.starts))
        starts = np.arange(rows + 1, dtype=np.int32)
        return Batch(starts, np.minimum(bounds, topk), None, causal=False, topk=topk)

    def on(self, share: ContextParallel) -> Batch:
        """Give what a rank has of it. Queries are the last tokens, wherever their keys are."""
        positions = None if self.lens is None else self.lens - self.query_starts.diff()
        return replace(
            self,
            bounds=share.local_lens(self.bounds),
            lens=None if self.lens is None else share.local_lens(self.lens),
            first=self.bounds - np.diff(self.starts),
            positions=positions,
        )

    @property
    def rows(self) -> int:
        """Query rows of all requests."""
        return self.of_requests.total


@dataclass(slots=True)
class Step:
    """A step, as layers see it: the metadata of vLLM.

    Parameters
    ----------
    num_actual_tokens : int
    slot_mapping : int64 tensor
        Where the step's keys go; the cross-attention of vLLM replaces it.
    rows : int
        Rows of the output that the plans write, those of no request as zeros.
    captured : bool
        The plans are those of captured runs, whether or not a graph runs them.
    ranks : Ranks, optional
        Those that share the keys; None: all keys are here.
    late : Batch, optional
        Lengths and tables that the first layer of a kind tells, in the graph if one is captured.
    fewer : bool
        It tells query rows as well: the GPU may have fewer than were planned.
    """

    num_actual_tokens: int
    slot_mapping: Any
    rows: int
    captured: bool
    slots: dict[Kind, tuple[tuple[Slot, ...], int]]
    ranks: Ranks | None = None
    late: Batch | None = None
    fewer: bool = True
    told: set[tuple[Kind, bool]] = field(default_factory=set)

    def engines(self, kind: Kind) -> list[Attention]:
        """Give what layers of this kind run, planned and told the lengths.

        One engine; of graphs that follow prefixes two, of which one has no rows.

        Raises
        ------
        PlanError
            It was planned again since: more steps are in flight than there are engines.
        """
        slots, turn = self.slots[kind]
        if slots[0].turn != turn:
            raise PlanError(
                "attn_metadata",
                f"a step whose plan was replaced {slots[0].turn - turn} times",
                f"at most {IN_FLIGHT} steps at once, run in the order in which they were built",
            )
        if self.late is not None and not kind.ragged:
            told = kind, torch.cuda.is_current_stream_capturing()
            if told not in self.told:
                self.told.add(told)
                for slot in slots:
                    fewer = self.fewer and slot.rests < 0
                    _tell(slot.attention, self.late, fewer=fewer)
        return [slot.attention for slot in slots]

    def attention(self, kind: Kind) -> Attention:
        """Give the one engine of layers that no graph has two of."""
        (attention,) = self.engines(kind)
        return attention


def _tell(attention: Attention, batch: Batch, stream: Any = None, *, fewer: bool) -> None:
    """Say how long requests are, where their blocks lie, and if need be who has `fewer` rows.

    Rows that are not there are cleared, a launch more for each layer.
    """
    attention.update(
        batch.lens,
        batch.tables,
        # Which rows share a prefix was planned, from starts that the host has.
        qo_indptr=batch.query_starts if fewer and not batch.common_prefix else None,
        q_positions=batch.positions,
        stream=stream,
    )


class Steps:
    """Plan steps for the layers of a group.

    On a GPU plans are made of bounds that the host has; lengths and tables are read there, and
    nothing is waited for. Runs that CUDA graphs capture have engines with a capacity, and follow
    the plan and the lengths of the step that they are replayed for: all is put on one stream.

    Parameters
    ----------
    kinds : sequence of Kind
        Of the group's layers.
    place : Place
    fixed : bool
        Replays find lengths and tables where they lay at the capture, so that graphs read them by
        themselves: a launch less of the host for every step.
    drafts : bool
        Requests may have fewer query rows on the GPU than the host was told.
    cascades : bool
        Steps may tell of a prefix. Graphs of decode steps have a second engine then, by the kernel
        for mixed batches, where there is one.

    Requests that pad a step have the length 0 on the GPU, as vLLM gives them ("unused seq_lens").
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        place: Place,
        *,
        fixed: bool = False,
        drafts: bool = False,
        cascades: bool = False,
    ) -> None:
        self.kinds = tuple(dict.fromkeys(kinds))
        self.place = place
        self.fixed, self.drafts = fixed, drafts
        self.cascades = cascades and not drafts and place.mixes
        self._eager: dict[bool, list[dict[Kind, Slot]]] = {}
        self._graphs: dict[tuple[Hashable, bool], Graph] = {}
        self._next = 0

    def captures(
        self, key: Hashable, causal: bool, rows: int, *, requests: int, tokens: int, pages: int
    ) -> None:
        """Make engines for runs that are captured, if there are none for these.

        Steps of more rows than the largest of these runs has are no graph's: engines capture up to
        some size, and compute larger steps without.

        Parameters
        ----------
        key : hashable
            Rows of every request, or "mixed": any rows.
        rows : int
            Of the run that comes.
        requests, tokens, pages : int
            The most of requests, of query rows and of blocks of all requests that replays have.
        """
        graph = self._graphs.get((key, causal))
        if graph is None:
            graph = self._graphs[key, causal] = Graph(requests, key == "mixed")
            capacity = {"max_batch_size": requests, "max_q_tokens": tokens, "max_kv_pages": pages}
            for kind in self.kinds:
                task = {**self.place.task(), **capacity}
                graph.slots[kind] = Slot(kind.attention(causal, self.place.q_dtype, **task))
                if self.cascades and not graph.mixed and kind.mixes(key):
                    engine = kind.attention(causal, self.place.q_dtype, mixed=True, **task)
                    graph.sharing[kind] = Slot(engine)
        graph.rows = max(graph.rows, rows)

    def plan(self, batch: Batch, slot_mapping: Any, num_actual_tokens: int, stream: Any) -> Step:
        """Plan a step; `stream` is the current one of the GPU, None on the CPU."""
        ranks = self.place.ranks
        if ranks is not None:
            batch = batch.on(ranks.share)
        graph = self._graph_for(batch, max(batch.rows, num_actual_tokens))
        slots = self._turn(batch.causal) if graph is None else graph.slots
        rows = batch.of_requests if graph is None else _over(batch, num_actual_tokens)
        if batch.common_prefix and rows.total > batch.rows and batch.bounds[-1] > 0:
            # The last request has the rows that pad the graph, and no keys for them.
            batch = replace(batch, common_prefix=0)
        fewer = self.drafts or (graph is not None and graph.mixed) or not _all_told(batch, rows)
        # Positions are made for the step, and lie anywhere.
        late = None
        if self.fixed and graph is not None and not batch.topk and batch.positions is None:
            late = batch
        turns: dict[Kind, tuple[tuple[Slot, ...], int]] = {}
        made: dict[bool, Attention] = {}  # over keys of the step, or the cache: planned first
        for kind, slot in slots.items():
            slot.turn += 1
            turns[kind] = (slot,), slot.turn
            like = made.get(kind.ragged)
            if kind.ragged or (self.place.device is None and not batch.topk):
                self._planned(slot, like or self._layout(kind, batch), batch, stream)
            else:
                other = graph.sharing.get(kind) if graph else None
                if other is not None:
                    turns[kind] = (slot, other), slot.turn
                    if batch.common_prefix:
                        slot, other = other, slot
                    rested = other.rest(len(batch.bounds), self.place.page_size, stream)
                    if rested and late is None:
                        _tell(other.attention, batch, stream, fewer=False)
                planned = self._bound(slot, batch, rows, like, stream)
                if late is None and not batch.topk:
                    _tell(slot.attention, batch, stream, fewer=fewer)
                if not planned:
                    continue
            made.setdefault(kind.ragged, slot.attention)
        return Step(
            num_actual_tokens,
            slot_mapping,
            rows.total,
            graph is not None,
            turns,
            ranks,
            late,
            fewer,
        )

    def _planned(self, slot: Slot, layout: Layout | Attention, batch: Batch, stream: Any) -> None:
        """Plan with the positions of the batch, which an engine that is planned has already."""
        own = isinstance(layout, Layout)
        slot.attention.plan(layout, q_positions=batch.first if own else None, stream=stream)

    def _layout(self, kind: Kind, batch: Batch) -> Layout:
        if kind.ragged:
            return Ragged(batch.starts, batch.starts)
        return BlockTable(batch.starts, batch.tables, batch.bounds, page_size=self.place.page_size)

    def _bound(
        self,
        slot: Slot,
        batch: Batch,
        rows: Rows,
        like: Attention | None,
        stream: Any,
    ) -> bool:
        """Plan bounds where the last plan's do not hold.

        Returns whether it planned, as `like` was in this step, if that is given.
        """
        planned = not slot.holds(rows, batch.bounds, batch.common_prefix)
        if planned:
            page_size = 1 if batch.topk else self.place.page_size
            bounds = batch.bounds.astype(np.int64)
            if batch.of_requests.even is not None:  # a decode step, and probably more of them
                most = batch.topk or int(batch.tables.shape[1]) * page_size
                bounds = np.where(bounds > 0, np.minimum(bounds + ROOM, most), 0)
            slot.forget()  # a plan that raises leaves none
            common = batch.common_prefix
            layout = like or Bounds(rows.starts, bounds, page_size=page_size, common_prefix=common)
            self._planned(slot, layout, batch, stream)
            slot.rows, slot.bounds, slot.common_prefix = rows, bounds, common
        return planned

    def _turn(self, causal: bool) -> dict[Kind, Slot]:
        """Take the engines that the step before the last had."""
        if causal not in self._eager:
            task = self.place.task()
            self._eager[causal] = [
                {
                    kind: Slot(kind.attention(causal, self.place.q_dtype, **task))
                    for kind in self.kinds
                }
                for _ in range(IN_FLIGHT)
            ]
        self._next = (self._next + 1) % IN_FLIGHT
        return self._eager[causal][self._next]

    def _graph_for(self, batch: Batch, rows: int) -> Graph | None:
        """Find the engines of captured runs that this step may be replayed for.

        With drafts, graphs read query rows on the GPU, and which of them share a prefix is planned:
        such a step has none, and is told to vLLM as one (`use_cascade_attention`).
        """
        if not self._graphs or (batch.common_prefix and self.drafts):
            return None
        graph = self._graphs.get(("mixed", batch.causal))
        if graph is None:
            graph = self._graphs.get((batch.of_requests.even, batch.causal))
        fits = graph and len(batch.bounds) <= graph.requests and rows <= graph.rows
        return graph if fits else None


def _all_told(batch: Batch, rows: Rows) -> bool:
    """Whether every planned row is a request's, by the length alone.

    So it is in decode steps: a request that pads a graph has no keys, and gets zeros. The launch
    that clears rows behind each layer was 3 of 15 us (8 requests of 1000 tokens, an H100).
    """
    if rows is batch.of_requests:
        return True
    even = batch.of_requests.even
    return even is not None and even * len(batch.bounds) == rows.total


def _over(batch: Batch, rows: int) -> Rows:
    """Give query rows that cover all that a graph has: where lengths say fewer, zeros are written.

    Requests that pad a decode step get as many as the others have, which keeps the plan for steps
    of fewer requests; otherwise the last request gets what is over.
    """
    mine, count = batch.of_requests, len(batch.bounds)
    if mine.even is not None and mine.even * count == rows:
        if mine.absent is None:
            return mine
        return rows_of(np.arange(0, rows + 1, mine.even, dtype=batch.starts.dtype))
    starts = batch.starts.copy()
    starts[-1] = max(rows, mine.total)
    return rows_of(starts)
