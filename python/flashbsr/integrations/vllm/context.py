# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Caches of which each rank has a share of every request's tokens (DCP). Knows no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...distributed.merge import gather, merge_over_ranks, together
from ...distributed.peers import PeerMerge
from ...engine.attention import Attention
from ...engine.context import ContextParallel
from ...errors import UnsupportedError
from .kinds import Kind

__all__ = ["METHODS", "Peers", "Ranks"]

# vLLM's names of the ways to merge (dcp_comm_backend); None: a model has no wish.
METHODS = {None: "reduce_scatter", "ag_rs": "reduce_scatter", "a2a": "all_to_all"}
# Bytes of a GPU's inbox: 1000 tokens of 32 heads of 128 of two ranks. A step of more sends so much
# that a collective's 20 us before its first byte are little.
INBOX = 64 << 20
# Bytes of queries that a rank may send through peers' memory, those of the others' heads included,
# which nobody reads: at 300 GB/s as long as a collective needs for its first byte.
QUERIES = 4 << 20


class Peers:
    """Ranks that are GPUs of one host, and reach each other's memory: no collective in a step.

    Queries of all heads come by a merge, too: each rank's own weigh 1, those of the others nothing.

    Parameters
    ----------
    share : ContextParallel
    group : process group
    heads, dim : int
        Of all ranks, and of each head.
    most : int
        The most tokens of a step.
    timeout : float
        Seconds that a GPU waits for the others.

    Raises
    ------
    UnsupportedError
        Ranks on several hosts, GPUs that do not reach each other.
    """

    def __init__(
        self, share: ContextParallel, group: Any, heads: int, dim: int, most: int, timeout: float
    ) -> None:
        token = 2 * share.size * heads * (dim + 1) * 4
        most = max(min(most, INBOX // token), 1)
        # Not of PyTorch's pools, which vLLM may have made of memory that nobody else can open.
        self.merge = PeerMerge(most, heads, dim, group, timeout=timeout, memory="symmetric")
        self.share, self.heads, self.dim = share, heads, dim
        own = heads // share.size
        self.mine = slice(share.rank * own, (share.rank + 1) * own)
        self.weights = torch.full((most, heads), -torch.inf, device=self.merge.device)
        self.weights[:, self.mine] = 0

    def takes(self, rows: int) -> bool:
        """Tell whether there is room for so many tokens."""
        return rows <= self.merge.max_tokens

    def brings(self, query: torch.Tensor) -> bool:
        """Tell whether `all_heads` is faster than a collective."""
        sent = (self.share.size - 1) * query.numel() * self.share.size * query.element_size()
        return bool(sent <= QUERIES)

    def all_heads(self, query: torch.Tensor) -> torch.Tensor:
        """Bring the heads of all ranks together, bit for bit."""
        rows = query.shape[0]
        padded = query.new_empty(rows, self.heads, self.dim)
        padded[:, self.mine] = query
        return self.merge.merge(padded, self.weights[:rows])[0]


@dataclass(frozen=True, eq=False, slots=True)
class Ranks:
    """Ranks that share the keys of each request, and by tensor parallelism the query heads.

    A step of any sort is one plan: each rank attends with the heads of all over its own keys, and
    rows see keys by their positions in the request. So several query tokens, chunks of prompts and
    decodes need no parts apart, and the new keys of a step are spread over the ranks as work too.

    Parameters
    ----------
    share : ContextParallel
        Which tokens are in this rank's cache.
    group : process group
    method : {"reduce_scatter", "all_to_all"}
        As of `flashbsr.distributed.merge_over_ranks`.
    peers : dict of (heads, dim) to Peers
        Where steps that are small enough go without collectives; heads are those of all ranks.
    """

    share: ContextParallel
    group: Any
    method: str = "reduce_scatter"
    peers: Mapping[tuple[int, int], Peers] = field(default_factory=dict)

    def through_peers(self, kinds: Sequence[Kind], most: int, timeout: float) -> Ranks:
        """Give ranks that merge through each other's memory.

        All of them call it, with the same arguments. Whoever merges through it must do so in the
        order in which the others do: on one stream.

        Parameters
        ----------
        kinds : sequence of Kind
        most : int
            The most tokens of a step.
        timeout : float
            Seconds that a GPU waits for the others.

        Raises
        ------
        UnsupportedError
            No GPUs of one host that reach each other's memory.
        """
        shapes = dict.fromkeys((k.num_qo_heads * self.share.size, k.head_dim) for k in kinds)
        peers = {
            (heads, dim): Peers(self.share, self.group, heads, dim, most, timeout)
            for heads, dim in shapes
        }
        return replace(self, peers=peers)

    def raise_if_missed(self) -> None:
        """Raise if a step that has run found a rank missing. Waits for nothing.

        Raises
        ------
        PeerError
        """
        for peers in self.peers.values():
            peers.merge.check(wait=False)

    def check(self, kinds: Sequence[Kind], *, crosses: bool = False) -> None:
        """Refuse layers whose keys or heads are not spread so.

        Parameters
        ----------
        kinds : sequence of Kind
        crosses : bool
            They read what an encoder has left.

        Raises
        ------
        UnsupportedError
            Encoders, and several KV heads of a rank, where heads of other ranks would not meet the
            same keys.
        """
        for kind in kinds:
            if kind.ragged or crosses:
                raise UnsupportedError(
                    "decode_context_parallel_size", self.share.size, "1 with an encoder"
                )
            if kind.num_kv_heads != 1:
                raise UnsupportedError(
                    "num_kv_heads",
                    f"{kind.num_kv_heads} of a rank beside "
                    f"decode_context_parallel_size={self.share.size}",
                    "1: tensor_parallel_size at least the model's KV heads times it",
                )

    def all_heads(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Bring the heads of all ranks together in dimension `dim`, in the order of ranks."""
        with together("decode_context_parallel_size", None):
            everyones = gather(x, self.group, self.share.size, None)
        return everyones.movedim(0, dim).flatten(dim, dim + 1)

    def attend(
        self,
        attention: Attention,
        query: torch.Tensor,
        kv: Any,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
        **options: Any,
    ) -> None:
        """Run this rank's plan, and write what all ranks have found for its own heads.

        Parameters
        ----------
        attention : Attention
            Planned for the step, with the heads of all ranks.
        query, out : tensors, shape (tokens, num_heads, head_size)
            Of this rank's heads.
        kv
            This rank's cache.
        sinks : tensor, shape (num_heads of all ranks,), optional
            They join the softmax once: on the first rank.
        options
            Of `Attention.run`, for the heads of all ranks.

        Raises
        ------
        PeerError
            A rank is gone, or late.
        """
        rows, heads, dim = query.shape
        peers = self.peers.get((heads * self.share.size, dim))
        if peers is not None and not peers.takes(rows):
            peers = None
        if peers is not None and peers.brings(query):
            queries = peers.all_heads(query)
        else:
            queries = self.all_heads(query)
        part, lse = attention.run(
            queries,
            kv,
            return_lse=True,
            sinks=None if self.share.rank else sinks,
            **options,
        )
        if peers is not None:
            merged, _ = peers.merge.merge(part, lse, scatter_heads=True)
        else:
            merged, _ = merge_over_ranks(
                part, lse, self.group, scatter_heads=True, method=self.method
            )
        out.copy_(merged)
