# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""K and V in codes of two types on a GPU: a kernel of 64 rows, compiled when a pair is first used.

Held to float64 over what the codes mean; slots of no request have garbage, their scales are NaN.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from cases import BF16, DECODE, F16, MIXED, Case
from harness import Device, attention_for
from kv_codes import E5M2, FP8, INT4, INT4_32, INT4_64, INT8, INT8_HALF, NVFP4, Kind, build
from reference import Variant
from test_kv_codes_cuda import FP8_HALF, LONG, VARIANTS, moved, run

PAIRS = [
    (INT8, INT4_64), (INT4_64, INT8), (INT8, NVFP4), (NVFP4, INT8), (NVFP4, INT4), (INT4_32, NVFP4),
    (FP8, INT4_32), (INT4, E5M2), (FP8, INT8), (INT8_HALF, FP8), (INT4_64, INT8_HALF),
    (FP8_HALF, NVFP4),
]  # fmt: skip
SHORT = {"int8": "i8", "int4": "i4", "nvfp4": "e2m1", "float8_e4m3fn": "e4m3",
         "float8_e5m2": "e5m2"}  # fmt: skip
of_pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
of_two = pytest.mark.parametrize(
    "pair", [(INT8, INT4_64), (INT4_32, INT8_HALF), (NVFP4, FP8)], ids=lambda p: f"{p[0]}-{p[1]}"
)
LAYOUTS = [("ragged", 1), *itertools.product(("paged", "table", "bounds"), (1, 7, 16, 64))]
Pair = tuple[Kind, Kind]


@pytest.fixture
def gpu(device: Device) -> Device:
    if not device.is_cuda:
        pytest.skip("tests/engine/test_kv_codes.py has the CPU's")
    return device


def check(gpu: Device, case: Case, pair: Pair, **task: Any) -> None:
    kernel = run(gpu, case, *pair, **task)[2]
    assert kernel.startswith("prefill_scaled_sm80_")
    assert "_".join(SHORT[kind.dtype] for kind in pair) in kernel


@of_pairs
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=lambda x: str(x[0]))
@pytest.mark.parametrize("case", [DECODE, MIXED], ids=lambda x: x.name)
def test_pairs(gpu: Device, case: Case, dims: tuple[int, int], pair: Pair) -> None:
    for dtypes in (BF16, F16):
        check(gpu, dataclasses.replace(case, dtypes=dtypes, dims=dims), pair)


@of_two
@pytest.mark.parametrize(("layout", "page_size"), LAYOUTS)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_layouts(gpu: Device, page_size: int, kv_layout: str, layout: str, pair: Pair) -> None:
    fields = {"layout": layout, "kv_layout": kv_layout, "page_size": page_size}
    check(gpu, dataclasses.replace(MIXED, dtypes=BF16, dims=(128, 128), **fields), pair)


@of_two
def test_split_requests(gpu: Device, pair: Pair) -> None:
    for task in ({}, {"fixed_split_size": 512}):
        check(gpu, dataclasses.replace(LONG, dtypes=BF16), pair, **task)


@of_two
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(gpu: Device, name: str, pair: Pair) -> None:
    case = dataclasses.replace(MIXED, dtypes=BF16, dims=(128, 128), layout="paged")
    check(gpu, dataclasses.replace(case, **VARIANTS[name]), pair)


@of_two
def test_hooks(gpu: Device, pair: Pair) -> None:
    capped = Variant(causal=True, logits_soft_cap=8.0)
    check(gpu, dataclasses.replace(MIXED, dtypes=BF16, dims=(64, 64), variant=capped), pair)


def test_types_that_the_arrays_bring(gpu: Device) -> None:
    """A plan for one type, and runs with two, with one, and with two again."""
    case = dataclasses.replace(gpu.adapt(MIXED), dtypes=BF16, dims=(64, 64))
    two, one = build(case, INT8, FP8), build(case, INT8, INT8)
    attention = attention_for(two.problem, gpu.backend)
    two.problem.plan(attention)
    found = []
    for coded in (two, one, two):
        options = {name: moved(gpu, x) for name, x in coded.options.items()}
        out = attention.run(gpu.put(coded.problem.q), moved(gpu, coded.kv), **options)
        found.append((gpu.get(out), attention.explain().kernel))
    assert ["i8_e4m3" in kernel for _, kernel in found] == [True, False, True]
    np.testing.assert_array_equal(found[0][0], found[2][0])
