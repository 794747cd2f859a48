# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Latent caches of which each rank has a share of every request's tokens (DCP). Knows no vLLM.

vLLM's layer brings the heads of all ranks together and merges what each has found. So a step is
attention of all heads to this rank's tokens, with LSEs. Rows see tokens by their positions in the
request: each row is a request by itself, which ends with its own token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...engine.context import ContextParallel
from .chosen import requests_of_rows
from .latent import LatentStep
from .steps import Batch, Step

__all__ = ["SpreadRows", "SpreadStep"]


class SpreadStep(LatentStep):
    """A step over this rank's tokens, as vLLM's layer reads it.

    Parameters
    ----------
    step : Step
        Planned for rows, each a request of its own.
    lens : int32 tensor, shape (rows,)
        Tokens of this rank that each row sees: vLLM gives rows without any no weight.
    starts : int32 tensor, shape (rows + 1,)
        0, 1, ...
    """

    gives_lse = True

    def __init__(self, step: Step, lens: Any, starts: Any) -> None:
        super().__init__(step, len(lens))
        self.seq_lens, self.query_start_loc = lens, starts
        self.decode: Any = self


class SpreadRows:
    """What rows of a step see of a rank's share, where captured runs read it.

    Parameters
    ----------
    share : ContextParallel
        Which tokens are in this rank's cache.
    most : int
        Rows of a step.
    device : torch.device
    """

    def __init__(self, share: ContextParallel, most: int, device: Any) -> None:
        self.share = share
        empty = {"dtype": torch.int32, "device": device}
        self._requests, self._lens = torch.empty(most, **empty), torch.empty(most, **empty)
        self._starts = torch.arange(most + 1, **empty)
        self._tables: Any = None

    def batch(self, batch: Batch, rows: int, *, drafts: bool = False) -> Batch:
        """Give a batch of as many requests as rows, those of no request behind the others.

        Parameters
        ----------
        batch : Batch
            The requests of a step, with all of their tokens, and this rank's blocks.
        rows : int
        drafts : bool
            The GPU may have fewer rows than the host was told, so that any may be any request's.
        """
        q_lens = np.diff(batch.starts)
        of_rows = np.repeat(np.arange(len(q_lens)), q_lens)
        seen = np.zeros(rows, np.int64)
        if batch.lens is not None and drafts:
            seen[:] = batch.bounds.max(initial=0)
        else:
            behind = batch.starts[1:][of_rows] - 1 - np.arange(len(of_rows))
            seen[: len(of_rows)] = batch.bounds[of_rows] - behind * batch.causal
        bounds = self.share.local_lens(np.maximum(seen, 0))
        starts = np.arange(rows + 1, dtype=np.int32)
        if batch.lens is None:
            tables = batch.tables[torch.as_tensor(of_rows)]
            self._lens[:rows] = torch.as_tensor(bounds)
            tables = torch.nn.functional.pad(tables, (0, 0, 0, rows - len(of_rows)))
            return Batch(starts, bounds, tables, causal=False)
        self._read(batch, rows)
        return Batch(starts, bounds, self._tables[:rows], self._lens[:rows], causal=False)

    def step(self, step: Step, rows: int) -> SpreadStep:
        """Give the step of the batch that was made last."""
        return SpreadStep(step, self._lens[:rows], self._starts[: rows + 1])

    def _read(self, batch: Batch, rows: int) -> None:
        """Write lengths and tables of rows, on the GPU, which the host does not wait for."""
        if self._tables is None:
            width = batch.tables.shape[1]
            self._tables = self._lens.new_zeros(len(self._lens), width)
        of_rows = requests_of_rows(batch.query_starts, rows, self._requests)
        known = of_rows.clamp(min=0)
        seen = batch.lens[known]
        if batch.causal:
            seen = seen - (batch.query_starts[1:][known] - 1 - self._starts[:rows])
        seen = seen.clamp(min=0).masked_fill(of_rows < 0, 0)
        self._lens[:rows] = self.share.local_lens(seen)
        torch.index_select(batch.tables, 0, known, out=self._tables[:rows])
