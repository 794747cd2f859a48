# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the table that builds from source leave to NVRTC. test_fake_cuda.py runs this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flashbsr
import numpy as np
import pytest
from flashbsr.jit.kernel_source import Wish, kernel_source

from fake_cuda.jit_kernels import attention, wishes
from fake_cuda.world import DECODE, PREFILL, World

__all__ = ["wishes"]  # a fixture

pytestmark = pytest.mark.usefixtures("fake_torch", "wishes")


@pytest.mark.parametrize(
    ("shape", "kind", "name"),
    [
        (DECODE, {}, "decode_scaled_sm90_d64_i8_r8_plain"),
        (DECODE, {}, "decode_pairs_gather_sm90_d64_i4_r8_plain"),
        (PREFILL, {}, "hopper_scaled_sm90a_d64_bf16xi8_r192_plain"),
        (DECODE, {"logits_soft_cap": 30.0}, "decode_sm90_d64_f16_r8_standard"),
        (PREFILL, {"pos_encoding_mode": "ALIBI"}, "hopper_sm90a_d64_f16_r192_alibi"),
    ],
)
def test_rare_rows_have_the_source_of_the_build(
    wishes: list[Wish], shape: Any, kind: dict[str, Any], name: str
) -> None:
    """With FLASHBSR_KERNELS=common they are asked for under their name, otherwise never."""
    rows = {row["name"]: row for row in flashbsr._core.cuda_kernels()}
    if "xi8" in name or "_i" in name:
        types: dict[str, Any] = {"q_dtype": "bfloat16", "kv_dtype": "int8"}
        if "pairs" in name:  # of so few requests under a capacity
            room = {"max_batch_size": 3, "max_q_tokens": 3, "max_kv_len": 400}
            types = {"q_dtype": "bfloat16", "kv_dtype": "int4"} | room
        batch: Any = flashbsr.Ragged([0, *np.cumsum(shape[1] or [1, 1, 1])], [0, 9, 18, 400])
    else:
        types, batch = {"kv_dtype": "float16"}, World.batch(*shape[:2])
    layer = attention(flashbsr.AttentionSpec(**kind), **types)
    layer.plan(batch)
    assert layer._engine.kernel_name() == name
    # A process compiles a kernel once, and other tests are in this one.
    assert {wish.name for wish in wishes} <= ({name} if not rows[name]["image_bytes"] else set())
    for wish in wishes:
        source = kernel_source(wish, Path(flashbsr.get_include()).parent / "kernels")
        assert f"{name}(const" in source
        assert "KvCopies::kEither" in source or not name.startswith("hopper")
