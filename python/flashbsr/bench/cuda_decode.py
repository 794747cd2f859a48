# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A planned and checked decode batch, for the runners that time it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashbsr

from .cuda_data import check_rows, normal, paged_kv, paged_sets, sample_rows
from .cuda_timing import Gpu
from .data import task_info
from .workloads import Workload

__all__ = ["decode_call"]


def decode_call(w: Workload, gpu: Gpu, **options: Any) -> tuple[Callable[[int], Any], int]:
    """Plan, run and check a decode batch; the call, with `options` of ``run``, and its sets.

    Raises
    ------
    RuntimeError
        A row is something else than float64 attention.
    """
    caches, pages = paged_sets(gpu, w)
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), task_info(w, gpu.backend))
    attention.plan(pages.layout())
    q = normal(gpu, (len(w.kv_lens), w.num_qo_heads, w.head_dim), w.dtype)
    out = gpu.torch.full_like(q, float("nan"))

    def call(index: int) -> Any:
        return attention.run(q, caches[index], out=out, **options)

    call(0)
    check_rows(gpu, "flashbsr", sample_rows(w, q, out, paged_kv(w, caches[0], pages)), w)
    return call, len(caches)
