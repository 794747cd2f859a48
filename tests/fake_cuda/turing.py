# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Which kernels compute capability 7.5 has for codes; test_fake_cuda.py runs it with such a GPU."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
from flashbsr.errors import UnsupportedError

TYPES = {
    "int8": "i8",
    "int4": "i4",
    "nvfp4": "e2m1",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


def kernel(kv_dtype: Any, q_len: int = 1, dim: int = 128, soft_cap: float = 0.0) -> str:
    """Name of the kernel for four requests of 8192 tokens, once it is known that they are codes."""
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=True, logits_soft_cap=soft_cap),
        flashbsr.TaskInfo(8, 2, dim, q_dtype="float16", kv_dtype=kv_dtype, backend="cuda"),
    )
    steps = np.arange(5)
    attention.plan(flashbsr.Ragged(steps * q_len, steps * 8192))
    return str(attention._engine.kernel_name())


@pytest.mark.parametrize("dim", [40, 64, 128])
@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "nvfp4"])
def test_one_family_reads_codes_of_few_rows_and_many(kv_dtype: str, dim: int) -> None:
    """None is widened before attention: that pass is for compute capability 8.0 and later."""
    size = 64 if dim <= 64 else 128
    for q_len in (1, 512):
        name = kernel(kv_dtype, q_len, dim)
        assert name == f"prefill_scaled_sm75_d{size}_{TYPES[kv_dtype]}_r64_plain"


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "nvfp4"])
def test_hooks_are_compiled(kv_dtype: str) -> None:
    name = kernel(kv_dtype, soft_cap=20.0)
    assert name == f"prefill_scaled_sm75_d128_{TYPES[kv_dtype]}_r64_standard"


@pytest.mark.parametrize(("kv_dtype", "dim"), [(("int8", "int4"), 128), ("int8", 256)], ids=str)
def test_what_is_not_there_says_so(kv_dtype: Any, dim: int) -> None:
    with pytest.raises(UnsupportedError, match=r"codes, head_dim .* sm_75; expected head dims"):
        kernel(kv_dtype, dim=dim)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_with_a_scale_of_the_tensor(kv_dtype: str, dim: int) -> None:
    name = f"prefill_sm75_d{dim}_{TYPES[kv_dtype]}_r64_"
    assert kernel(kv_dtype, dim=dim) == name + "plain"
    assert kernel(kv_dtype, dim=dim, soft_cap=20.0) == name + "standard"
