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


def rope_hadamard(normal: Normal) -> None:
    """Heads in registers and in shared memory, to keys as they are and to codes."""
    for dim, rotary in ((128, 128), (80, 80), (64, 32)):
        rows = [normal((21, heads, dim), "bfloat16") for heads in (4, 2, 2)]
        slots = torch.arange(21, device=rows[0].device)
        for kind in ("bfloat16", "int8"):
            cache = [torch.zeros(3, 8, 2, dim, dtype=getattr(torch, kind)).to(slots.device)] * 2
            scales = {}
            if kind == "int8":
                names = ("k_scale", "v_scale")
                scales = {name: torch.zeros(3, 8, 2, device=slots.device) for name in names}
            flashbsr.rope_append_paged_kv_cache(
                *rows, positions=slots, paged_kv_cache=(cache[0], cache[1].clone()),
                slot_mapping=slots, rotary_dim=rotary, hadamard=True, **scales,
            )  # fmt: skip
