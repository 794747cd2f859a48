# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Operands of mma.sync out of swizzled tiles: fragments.cu against NumPy, in exact integers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from driver import Gpu, compiled

SOURCE = "fragments.cu"
TOKENS = 32
TYPES = {
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
}
#: Architecture whose code it is, type of Q and P, type of K and V.
KINDS = [
    (75, "F16", "F16"), (80, "F16", "F16"), (80, "BF16", "BF16"), (80, "F16", "E4M3"),
    (80, "F16", "E5M2"), (90, "F16", "E4M3"), (90, "F16", "E5M2"),
]  # fmt: skip


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_compiles(target: str) -> None:
    assert len(compiled(SOURCE, target)) > 1000


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("arch", "kind", "kv"), KINDS)
def test_products(
    gpu: Gpu, rng: np.random.Generator, arch: int, kind: str, kv: str, dim: int
) -> None:
    number = 10 * gpu.capability[0] + gpu.capability[1]
    if number < max(arch, 80):
        pytest.skip(f"code for sm_{max(arch, 80)}")
    target = "sm_90a" if number == 90 else f"sm_{number}"

    def integers(shape: tuple[int, int], name: str) -> np.ndarray:
        return rng.integers(-4, 5, shape).astype(TYPES[name])

    q, p = integers((16, dim), kind), integers((16, TOKENS), kind)
    k, v = integers((TOKENS, dim), kv), integers((TOKENS, dim), kv)
    kernel = gpu.function(SOURCE, target, f"attend_{arch}_{dim}_{kind}_{kv}")
    outputs = [np.empty((16, TOKENS), np.float32), np.empty((16, dim), np.float32)]
    s, o = gpu.compute(kernel, 32, 0, [q, k, v, p], outputs)
    exact = [x.astype(np.float64) for x in (q, k, v, p)]
    np.testing.assert_array_equal(s, exact[0] @ exact[1].T)
    np.testing.assert_array_equal(o, exact[3] @ exact[2])


@pytest.mark.parametrize(("arch", "kv"), [(80, "E4M3"), (80, "E5M2"), (90, "E4M3")])
def test_every_code_of_float8(gpu: Gpu, arch: int, kv: str) -> None:
    number = 10 * gpu.capability[0] + gpu.capability[1]
    if number < arch:
        pytest.skip(f"code for sm_{arch}")
    target = "sm_90a" if number == 90 else f"sm_{number}"
    codes = np.arange(256, dtype=np.uint8)
    kernel = gpu.function(SOURCE, target, f"widen_{arch}_{kv}")
    (halves,) = gpu.compute(kernel, 64, 0, [codes], [np.empty(256, np.float16)])
    exact = codes.view(TYPES[kv]).astype(np.float16)
    np.testing.assert_array_equal(halves, exact)  # NaN where it is NaN
    number_there = ~np.isnan(exact)  # of -0, too
    np.testing.assert_array_equal(np.signbit(halves)[number_there], np.signbit(exact)[number_there])
