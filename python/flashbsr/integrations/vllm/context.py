# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Caches of which each rank has a share of every request's tokens (DCP). Knows no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...distributed.merge import gather, merge_over_ranks, together
from ...engine.attention import Attention
from ...engine.context import ContextParallel
from ...errors import UnsupportedError
from .kinds import Kind

__all__ = ["METHODS", "Ranks"]

# vLLM's names of the ways to merge (dcp_comm_backend); None: a model has no wish.
METHODS = {None: "reduce_scatter", "ag_rs": "reduce_scatter", "a2a": "all_to_all"}


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
    """

    share: ContextParallel
    group: Any
    method: str = "reduce_scatter"

    def check(self, kinds: Sequence[Kind], *, crosses: bool = False, on_gpu: bool = False) -> None:
        """Refuse layers whose keys or heads are not spread so.

        Parameters
        ----------
        kinds : sequence of Kind
        crosses : bool
            They read what an encoder has left.
        on_gpu : bool

        Raises
        ------
        UnsupportedError
            Encoders, latent attention, ALiBi on a GPU, and several KV heads of a rank, where heads
            of other ranks would not meet the same keys.
        """
        for kind in kinds:
            if kind.ragged or kind.latent or crosses:
                what = "latent attention" if kind.latent else "an encoder"
                raise UnsupportedError(
                    "decode_context_parallel_size", self.share.size, f"1 with {what}"
                )
            if kind.alibi and on_gpu:
                raise UnsupportedError(
                    "alibi_slopes",
                    f"some beside decode_context_parallel_size={self.share.size} on a GPU",
                    "a model without them, or decode_context_parallel_size=1",
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
        part, lse = attention.run(
            self.all_heads(query),
            kv,
            return_lse=True,
            sinks=None if self.share.rank else sinks,
            **options,
        )
        merged, _ = merge_over_ranks(part, lse, self.group, scatter_heads=True, method=self.method)
        out.copy_(merged)
