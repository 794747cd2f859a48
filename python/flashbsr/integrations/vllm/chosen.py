# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Latent attention to tokens that an indexer chose (DeepSeek V3.2). Knows no vLLM."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UnsupportedError
from .latent import LatentLayer, LatentStep
from .steps import Step

__all__ = ["ChosenLayer", "ChosenStep", "requests_of_rows"]


class ChosenStep(LatentStep):
    """A step whose rows attend to tokens that were chosen for each.

    Parameters
    ----------
    step : Step
        Planned for rows, each a request of its own.
    requests : int
    of_rows : int32 tensor, shape (rows,)
        Request of each row; -1: none.
    tables : int32 tensor, shape (requests or more, max_blocks)
    block : int
        Tokens of a block.
    topk : int
        The most tokens that are chosen for a row.
    """

    def __init__(
        self, step: Step, requests: int, of_rows: Any, tables: Any, block: int, topk: int
    ) -> None:
        super().__init__(step, requests)
        self.of_rows, self.tables, self.block, self.topk_tokens = of_rows, tables, block, topk
        self.prefill_max_seq_len = 0  # vLLM's layer is to absorb all rows

    def places(self, chosen: Any, stride: int) -> tuple[Any, Any]:
        """Say where chosen tokens lie in the cache, those that are none left out.

        Parameters
        ----------
        chosen : int32 tensor, shape (rows, topk)
            Positions in the row's request, in any order; -1: none.
        stride : int
            Rows of the cache from a block to the next.

        Returns
        -------
        places : int32 tensor, shape (rows, topk)
            Rows of the cache; behind each row's tokens anything.
        counts : int32 tensor, shape (rows,)
            Tokens of each row.
        """
        real = (chosen >= 0) & (self.of_rows >= 0).unsqueeze(1)
        at = chosen.clamp(0, self.tables.shape[1] * self.block - 1)
        blocks = self.tables[self.of_rows.clamp(min=0).long().unsqueeze(1), at // self.block]
        rows = blocks * stride + at % self.block
        # Tokens move to the front, what is none into a column behind them all.
        last = real.cumsum(1, dtype=torch.int32)
        to = torch.where(real, last - 1, chosen.shape[1])
        moved = rows.new_zeros(chosen.shape[0], chosen.shape[1] + 1)
        moved.scatter_(1, to.long(), rows)
        return moved[:, :-1].contiguous(), last[:, -1].contiguous()


class ChosenLayer(LatentLayer):
    """What vLLM calls a sparse implementation of latent attention; its arguments are vLLM's.

    All rows are absorbed, and read the tokens that the indexer has left in a buffer.

    Raises
    ------
    UnsupportedError
        As of `LatentLayer`; nobody who chooses; a cache whose blocks are no whole rows apart.
    """

    is_sparse = True
    supports_dcp = False
    supports_dense_mha_prefill = False
    masked_mha_available = False

    def __init__(
        self,
        *args: Any,
        indexer: Any = None,
        topk_indices_buffer: Any = None,
        index_group_builder: Any = None,  # noqa: ARG002
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        # Layers without an indexer read what the one before them chose.
        self.topk_indices_buffer = (
            topk_indices_buffer if indexer is None else indexer.topk_indices_buffer
        )
        if self.topk_indices_buffer is None:
            raise UnsupportedError("topk_indices_buffer", None, "an indexer's")

    def record_logical_topk_ready(self) -> None:
        """Nothing waits for the indexer but the stream that it is on."""

    def prepare_for_batch(self, attn_metadata: Any) -> None:
        """Nothing of a step is prepared but its plan."""

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: LatentStep, layer: Any
    ) -> tuple[Any, Any]:
        """Attention of absorbed queries to the tokens of each; arguments as of `LatentLayer`."""
        assert isinstance(attn_metadata, ChosenStep)
        tokens, stride = _tokens(self._cache(kv_c_and_k_pe_cache))
        rows = attn_metadata.step.rows
        places, counts = attn_metadata.places(self.topk_indices_buffer[:rows], stride)
        return self._attend(q, tokens, attn_metadata, layer, counts, places)


def requests_of_rows(starts: Any, rows: int, out: Any) -> Any:
    """Name the request of each row, -1 where it has none, without waiting for a GPU.

    Parameters
    ----------
    starts : int32 tensor, shape (requests + 1,)
    rows : int
    out : int32 tensor, shape (rows or more,)
        Written, and its first rows returned: a captured run reads them there.
    """
    at = torch.arange(rows, dtype=starts.dtype, device=starts.device)
    found = torch.bucketize(at, starts[1:], out_int32=True, right=True)
    return out[:rows].copy_(found.masked_fill_(found == len(starts) - 1, -1))


def _tokens(cache: Any) -> tuple[Any, int]:
    """View a cache token by token, and count the rows from a block to the next."""
    blocks, block, width = cache.shape
    row = cache.stride(1)
    if cache.stride(0) % row:
        raise UnsupportedError(
            "kv_cache", f"blocks of {cache.stride(0)} elements", f"whole rows of {row}"
        )
    stride = cache.stride(0) // row
    rows = (blocks - 1) * stride + block
    return cache.as_strided((rows, width), (row, 1)), stride
