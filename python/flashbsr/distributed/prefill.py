# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Causal attention of prompts whose tokens are spread over ranks, in zig-zag order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from .._check import check_name, check_one_array
from ..engine.attention import Attention
from ..engine.task import TaskInfo
from ..errors import FlashbsrError, IndexRangeError, ShapeError
from ..layout.layouts import Ragged
from ..ops.state import merge_state_in_place
from ..variant.spec import AttentionSpec
from .merge import gather, together, wait

__all__ = ["PrefillOverRanks", "ZigZag", "zigzag"]

Ints = npt.NDArray[np.int64]
METHODS = ("ring", "all_gather")


class ZigZag(NamedTuple):
    """What a rank has of prompts: chunk *rank* of each, then chunk ``2 size - 1 - rank`` of each.

    Early chunks have little to attend to and late ones much, so that all ranks have the same work.

    Attributes
    ----------
    rows : int64 array [tokens]
        Of the whole batch's ragged arrays: ``q[rows]`` is what the rank has.
    positions : int64 array [tokens]
        Of those tokens within their prompts, for RoPE.
    starts : int64 array [2, batch_size]
        Position of the first token of either chunk.
    lens : int64 array [2, batch_size]
        Tokens of either.
    """

    rows: Ints
    positions: Ints
    starts: Ints
    lens: Ints

    def half(self, number: int) -> slice:
        """Rows of the first or the second chunks of all prompts, among the rank's own."""
        first = int(self.lens[0].sum())
        return slice(0, first) if number == 0 else slice(first, first + int(self.lens[1].sum()))


def zigzag(seq_lens: npt.ArrayLike, size: int, rank: int) -> ZigZag:
    """Spread prompts over ranks.

    Parameters
    ----------
    seq_lens : integer array [batch_size]
        Tokens of each prompt. Chunks differ by a token where they are no multiples of ``2 size``.
    size, rank : int
        Ranks, and which one.

    Returns
    -------
    ZigZag

    Examples
    --------
    >>> zigzag([8], size=2, rank=0).positions.tolist(), zigzag([8], size=2, rank=1).rows.tolist()
    ([0, 1, 6, 7], [2, 3, 4, 5])
    """
    lens = np.asarray(seq_lens)
    if lens.ndim != 1 or not np.issubdtype(lens.dtype, np.integer) or (lens < 0).any():
        raise IndexRangeError("seq_lens", seq_lens, "a vector of integers from 0")
    if not 0 <= rank < size:
        raise FlashbsrError("rank", rank, f"from 0, below size={size}")
    lens = lens.astype(np.int64)
    chunks = np.array([rank, 2 * size - 1 - rank])[:, None]
    starts, ends = (lens * (chunks + end) // (2 * size) for end in (0, 1))
    counts = ends - starts
    begin = np.cumsum(counts.ravel()) - counts.ravel()
    first = starts.ravel() - begin
    positions = np.repeat(first, counts.ravel()) + np.arange(counts.sum())
    rows = positions + np.repeat(np.tile(np.cumsum(lens) - lens, 2), counts.ravel())
    return ZigZag(rows, positions, starts, counts)


class _Run:
    """Chunk `half` of the rank's queries of each prompt over a chunk of keys, or over all.

    `first`: nothing has been computed of those rows, so that the result is written, not merged.
    """

    def __init__(
        self,
        half: int,
        keys: slice,
        mine: ZigZag,
        key_lens: Ints,
        key_starts: Ints | int = 0,
        *,
        first: bool,
    ) -> None:
        self.rows, self.keys, self.first = mine.half(half), keys, first
        self.layout = Ragged(_indptr(mine.lens[half]), _indptr(key_lens))
        self.positions = mine.starts[half] - key_starts


class PrefillOverRanks:
    """Attention of prompts over all of their keys, each rank for the tokens that it has.

    Parameters
    ----------
    task : TaskInfo
        Of this rank: all heads that it attends with. Its `kv_dtype` and `o_dtype` are those of the
        arrays; what a ring merges is float32.
    spec : AttentionSpec, optional
        Default: causal. Causality is what the order is for, and asked for.
    group : process group, optional
        Default: all ranks.
    method : {"ring", "all_gather"}
        "ring": K and V travel from rank to rank while the ones before are attended to, and partial
        results are merged; a rank has the K and V of two at a time. "all_gather": everybody gets
        all K and V first; two launches, no merges, faster where K and V are short.
    timeout : float, optional
        Seconds to wait for the others on the CPU (gloo). Default, and always with NCCL: the limit
        that the group was made with.

    Raises
    ------
    FlashbsrError
        A spec that is not causal.
    UnsupportedError
        An output in NVFP4.

    Notes
    -----
    Ring attention (Liu et al., arXiv:2310.01889) with the zig-zag order of chunks: of a prompt of n
    tokens every rank has two chunks of n / 2N, and attends to 2N + 1 pairs of chunks whatever its
    number, of which two are halves.
    """

    def __init__(
        self,
        task: TaskInfo,
        spec: AttentionSpec | None = None,
        group: Any = None,
        *,
        method: str = "ring",
        timeout: float | None = None,
    ) -> None:
        check_name("method", method, METHODS)
        self.spec, self.task = spec or AttentionSpec(causal=True), task
        if not self.spec.causal:
            raise FlashbsrError("spec", "causal=False", "causal=True")
        check_one_array("o_dtype", task.o_dtype, "another type: what is merged is one array")
        self.group, self.method, self.timeout = group, method, timeout
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._shards: list[ZigZag] = []
        self._runs: list[list[_Run]] = []
        self._engines: list[Attention] = []
        # Where the rows of the batch are among those gathered, by device: once per plan, since a
        # copy to a GPU waits for it.
        self._places: dict[torch.device, torch.Tensor] = {}

    def plan(self, seq_lens: npt.ArrayLike) -> ZigZag:
        """Plan a batch, for any number of runs. Every rank brings the same lengths.

        Parameters
        ----------
        seq_lens : integer array [batch_size]
            Tokens of each prompt, on all ranks together.

        Returns
        -------
        ZigZag
            What this rank has of them.
        """
        self._shards = [zigzag(seq_lens, self.size, r) for r in range(self.size)]
        mine: ZigZag = self._shards[self.rank]
        if self.method == "ring":
            begun: set[int] = set()
            runs = [list(self._ring_runs(mine, source, begun)) for source in self._sources()]
            o_dtype: str | None = "float32"
        else:
            lens = np.asarray(seq_lens).astype(np.int64)
            keys = slice(0, int(lens.sum()))
            runs = [[_Run(half, keys, mine, lens, first=True) for half in (0, 1)]]
            o_dtype = self.task.o_dtype  # written once
            self._places.clear()
        count = sum(map(len, runs))
        while len(self._engines) < count:
            self._engines.append(Attention(self.spec, replace(self.task, o_dtype=o_dtype)))
        for engine, run in zip(self._engines, (r for step in runs for r in step), strict=False):
            engine.plan(run.layout, q_positions=run.positions, share_prefixes="off")
        self._runs = runs
        return mine

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend. Every rank calls it.

        Parameters
        ----------
        q : tensor, shape (tokens, num_qo_heads, head_dim_qk)
            Of this rank's tokens, in the order of `ZigZag.rows`.
        k : tensor, shape (tokens, num_kv_heads, head_dim_qk)
        v : tensor, shape (tokens, num_kv_heads, head_dim_vo)

        Returns
        -------
        out : tensor, shape (tokens, num_qo_heads, head_dim_vo)
            Of `o_dtype` of the task, or of the type of q (bfloat16 where that is float8).
        lse : float32 tensor, shape (tokens, num_qo_heads)

        Raises
        ------
        PeerError
            A rank is gone, or late.
        ShapeError
            Tokens that are not this rank's.
        """
        if not self._shards:
            raise FlashbsrError("run", "no plan", "plan(seq_lens) first")
        tokens = len(self._shards[self.rank].rows)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 3 or x.shape[0] != tokens:
                raise ShapeError(name, f"shape {tuple(x.shape)}", f"({tokens}, heads, head_dim)")
        dim = self.task.head_dim_vo or self.task.head_dim_qk
        default = "bfloat16" if q.dtype.itemsize == 1 else str(q.dtype).removeprefix("torch.")
        wanted = getattr(torch, self.task.o_dtype or default)
        partial = torch.float32 if self.method == "ring" else wanted
        out = torch.empty((*q.shape[:2], dim), dtype=partial, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        engines = iter(self._engines)
        with together("PrefillOverRanks", self.timeout):
            for step, (keys, values) in zip(self._runs, self._travel(k, v), strict=True):
                for run in step:
                    self._attend(run, next(engines), q, (keys, values), out, lse)
        return out.to(wanted), lse

    def _sources(self) -> list[int]:
        """Whose keys are met, one after another."""
        return [(self.rank - step) % self.size for step in range(self.size)]

    def _ring_runs(self, mine: ZigZag, source: int, begun: set[int]) -> Iterator[_Run]:
        """Pairs of a chunk of queries and one of keys of which some are seen.

        The rank's own keys come first, and are seen by both halves, which are `begun` by them.
        """
        theirs = self._shards[source]
        for half in (0, 1):
            for keys in (0, 1):
                if (theirs.starts[keys] < mine.starts[half] + mine.lens[half]).any():
                    yield _Run(
                        half,
                        theirs.half(keys),
                        mine,
                        theirs.lens[keys],
                        theirs.starts[keys],
                        first=half not in begun,
                    )
                    begun.add(half)

    def _travel(
        self, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each step. The next ones are under way meanwhile."""
        if self.method == "all_gather":
            yield self._gather(k), self._gather(v)
            return
        after, before = (self._peer(self.rank + step) for step in (1, -1))
        here: tuple[torch.Tensor, ...] = (k.contiguous(), v.contiguous())
        for step, source in enumerate(self._sources()):
            if step == self.size - 1:
                yield here[0], here[1]
                return
            count = len(self._shards[(source - 1) % self.size].rows)
            there = tuple(x.new_empty((count, *x.shape[1:])) for x in here)
            work = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, x, after, self.group) for x in here]
                + [dist.P2POp(dist.irecv, x, before, self.group) for x in there]
            )
            yield here[0], here[1]
            for one in work:
                wait(one, self.timeout)
            here = there

    def _peer(self, rank: int) -> int:
        """Name a rank of the group as the operations between two ranks want it."""
        rank %= self.size
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of all ranks in the order of the batch."""
        counts = [len(shard.rows) for shard in self._shards]
        most = max(counts)
        if x.shape[0] < most:
            padded = x.new_zeros((most, *x.shape[1:]))
            padded[: x.shape[0]] = x
            x = padded
        everyones = gather(x, self.group, self.size, self.timeout).flatten(0, 1)
        if x.device not in self._places:
            place = np.empty(sum(counts), np.int64)
            for rank, shard in enumerate(self._shards):
                place[shard.rows] = rank * most + np.arange(counts[rank])
            self._places[x.device] = torch.from_numpy(place).to(x.device)
        return everyones[self._places[x.device]]

    def _attend(
        self,
        run: _Run,
        engine: Attention,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        rows = run.rows
        if rows.start == rows.stop:
            return
        keys = kv[0][run.keys], kv[1][run.keys]
        if run.first:
            engine.run(q[rows], keys, out=out[rows], lse=lse[rows])
            return
        part, part_lse = engine.run(q[rows], keys, return_lse=True)
        merge_state_in_place(out[rows], lse[rows], part, part_lse)


def _indptr(lens: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(lens)])
