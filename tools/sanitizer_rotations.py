# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Cases of tools/sanitizer_cases.py that rotate queries and keys; `normal` draws arrays there."""

from __future__ import annotations

from collections.abc import Callable

import flashbsr
import torch

Normal = Callable[[tuple[int, ...], str], torch.Tensor]


def rope(normal: Normal) -> None:
    """Every way to say positions; into arrays of the same type and of float8."""
    q, k = normal((21, 4, 80), "bfloat16"), normal((21, 1, 80), "bfloat16")
    starts, offsets, positions = (
        torch.tensor(x, dtype=torch.int32).to(q.device) for x in ([0, 9, 21], [3, 0], range(21))
    )
    flashbsr.apply_rope(q, k, starts, offsets)
    flashbsr.apply_llama31_rope_pos_ids(q, k, positions, 64, True)
    flashbsr.apply_rope_pos_ids_inplace(q, k, positions)
    table = normal((30, 80), "float32")
    flashbsr.apply_rope_with_cos_sin_cache(
        positions.long(), q.reshape(21, -1), k.reshape(21, -1), 80, table
    )
    flashbsr.rope_quantize(q, k, positions, table, q_scale=2.0)
    flashbsr.rope_quantize(q, k, positions)


def hadamard(normal: Normal) -> None:
    """Heads of fewer elements than a warp has lanes, of several turns, and of Paley's matrices."""
    for dim in (8, 24, 80, 128, 512):
        flashbsr.hadamard(normal((21, 3, dim), "bfloat16"))
