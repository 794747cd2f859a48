# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Which codes are written as 16 bits before attention; test_fake_cuda.py runs it."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest


def kernel(
    q_len: int, kv_len: int, kv_dtype: str = "nvfp4", window_left: int = -1, **task: Any
) -> str:
    """Name of the kernel for four requests."""
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=True, window_left=window_left),
        flashbsr.TaskInfo(
            32, 8, 128, q_dtype="bfloat16", kv_dtype=kv_dtype, backend="cuda", **task
        ),
    )
    steps = np.arange(5)
    attention.plan(flashbsr.Ragged(steps * q_len, steps * kv_len))
    return str(attention._engine.kernel_name())


def test_many_rows_are_worth_the_pass() -> None:
    assert kernel(512, 8192).startswith("hopper_sm90a_d128_bf16_")


def test_few_rows_read_codes_as_they_are() -> None:
    assert kernel(1, 8192).startswith("decode_scaled_")


@pytest.mark.parametrize(("window_left", "codes"), [(128, True), (8192, False)])
def test_a_pass_over_what_windows_hide(window_left: int, codes: bool) -> None:
    assert ("_scaled_" in kernel(512, 8192, window_left=window_left)) == codes


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_keys_whose_values_16_bits_do_not_hold_stay_codes(kv_dtype: str) -> None:
    # Eight bits have a kernel of Hopper's of their own, so that more rows are needed.
    rows = 512 if kv_dtype == "int4" else 8192
    family = "hopper_halves" if kv_dtype == "int4" else "hopper_scaled"
    assert kernel(rows, 8192, kv_dtype).startswith(f"{family}_sm90a_d128_bf16_r")


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_codes_with_hooks_are_read_as_they_are(kv_dtype: str) -> None:
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=True, logits_soft_cap=20.0),
        flashbsr.TaskInfo(32, 8, 128, q_dtype="bfloat16", kv_dtype=kv_dtype, backend="cuda"),
    )
    steps = np.arange(5)
    attention.plan(flashbsr.Ragged(steps * 8192, steps * 8192))
    assert "_bf16_" not in attention._engine.kernel_name()


@pytest.mark.parametrize("task", [
    {"dequantize_bytes": 0},
    {"dequantize_bytes": 4 * 8192 * 8 * 256 * 2 - 1},
    {"fixed_split_size": 4096},
    {"max_batch_size": 4, "max_q_tokens": 2048, "max_kv_len": 1 << 15},
], ids=["off", "no room", "fixed splits", "a capacity"])  # fmt: skip
def test_what_keeps_codes(task: dict[str, Any]) -> None:
    assert "_scaled_" in kernel(512, 8192, **task)


def test_room_to_the_byte() -> None:
    assert kernel(512, 8192, dequantize_bytes=4 * 8192 * 8 * 256 * 2).startswith("hopper_sm90a")
