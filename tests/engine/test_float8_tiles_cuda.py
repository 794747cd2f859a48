# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""bfloat16 queries over float8 by Hopper's tiles of 128 rows and of 192, whatever the price is."""

from __future__ import annotations

import numpy as np
import pytest
from cases import Case
from harness import DEVICES, Device, attention_for, compare, execute, framework
from reference import Variant

if not any(device.is_cuda for device in DEVICES):
    pytest.skip("no GPU, or a build or a PyTorch without CUDA", allow_module_level=True)
if framework("torch").cuda.get_device_capability() != (9, 0):
    pytest.skip("products of float8 are instructions of sm_90a here", allow_module_level=True)

CAUSAL = Case(
    "tiles", (64, 1, 33, 150, 3), (700, 300, 33, 1200, 0), heads=(8, 2), dims=(128, 128),
    dtypes=("bfloat16", "float8_e4m3fn", "bfloat16"), variant=Variant(causal=True),
)  # fmt: skip
CASES = [
    CAUSAL,
    CAUSAL.but("group-of-one", heads=(2, 2)),
    CAUSAL.but("paged-16", layout="paged", page_size=16),
    CAUSAL.but("paged-1", layout="paged", page_size=1),
    CAUSAL.but("paged-48", layout="table", page_size=48, kv_layout="HND"),
    CAUSAL.but("dims", dims=(96, 80)),
    CAUSAL.but("window", variant=Variant(causal=True, window_left=90)),
    CAUSAL.but("all", variant=Variant(), scales="head", sinks=True),
    CAUSAL.but("steep", gain=4.0),
    CAUSAL.but("bounds", layout="bounds"),
    CAUSAL.but("parts", task={"fixed_split_size": 256}),
]


@pytest.mark.parametrize("rows", [128, 192])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows(case: Case, rows: int, device: Device) -> None:
    if not device.is_cuda:
        pytest.skip("tiles of 128 and 192 rows are Hopper's")
    problem = device.build(case)
    attention = attention_for(problem, device.backend, tile_rows=rows)
    out, lse = execute(problem, attention, device)
    # Decodes beside chunks have a kernel of their own, before.
    assert problem.kernel.split(" + ")[-1] == f"hopper_sm90a_d128_bf16xe4m3_r{rows}_plain"
    compare(problem, out, lse)
    again, _ = execute(problem, attention, device, plan=False)
    assert np.asarray(out).tobytes() == np.asarray(again).tobytes()
