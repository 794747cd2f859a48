# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Codes at the ends of their range on a GPU: scales of any size, float8's NaN."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cases import BF16
from cases import DECODE as CASE
from harness import DEVICES, Device, attention_for
from kv_codes import FP8, INT4, INT4_32, INT4_64, INT8, Kind, build

GPUS = [device for device in DEVICES if device.is_cuda]
if not GPUS:
    pytest.skip("no GPU, or a build or a PyTorch without CUDA", allow_module_level=True)

DECODE = dataclasses.replace(CASE, dtypes=BF16, dims=(128, 128))

everywhere = pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
of_each_kind = pytest.mark.parametrize("kind", [INT8, FP8, INT4, INT4_64, INT4_32], ids=str)


@everywhere
@pytest.mark.parametrize("power", [-60, -20, 20, 60])
@of_each_kind
def test_scales_of_any_size(device: Device, power: int, kind: Kind) -> None:
    """Outputs of a cache whose V is 2^power times as large are 2^power times as large, exactly."""
    outputs = []
    for factor in (1.0, 2.0**power):
        coded = build(DECODE, kind, kind)
        scales = np.array(coded.options["v_scale"])
        if kind.dtype == "int4":
            bits = scales.view(np.uint32)
            large = ((bits & ~np.uint32(15)).view(np.float32) * np.float32(factor)).view(np.uint32)
            scales = (large | (bits & 15)).view(np.float32)
        else:
            scales = scales * np.float32(factor)
        attention = attention_for(coded.problem, device.backend, kv_dtype=coded.kv_dtype)
        coded.problem.plan(attention)
        options = coded.options | {"v_scale": scales}
        out = attention.run(
            device.put(coded.problem.q),
            device.put_kv(coded.kv),
            **{name: device.put(x) for name, x in options.items()},
        )
        outputs.append(device.get(out).astype(np.float64))
    assert np.abs(outputs[0]).max() > 0.1
    np.testing.assert_array_equal(outputs[1], outputs[0] * 2.0**power)


@everywhere
def test_a_nan_among_the_codes_of_float8_is_seen(device: Device) -> None:
    coded = build(DECODE, FP8, FP8)
    problem = coded.problem
    v = coded.kv[1]
    page = problem.kv_indices[problem.kv_indptr[1]]
    v.view(np.uint8)[page, 3, 0, 77] = 0x7F
    attention = attention_for(problem, device.backend, kv_dtype=coded.kv_dtype)
    problem.plan(attention)
    options = {name: device.put(x) for name, x in coded.options.items()}
    out = attention.run(device.put(problem.q), device.put_kv((coded.kv[0], v)), **options)
    bad = np.isnan(device.get(out).astype(np.float32))
    group = problem.case.heads[0] // problem.case.heads[1]
    assert bad[1, :group, 77].all()
    bad[1, :group, 77] = False
    assert not bad.any()
