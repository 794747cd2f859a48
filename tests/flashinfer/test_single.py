# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The functions for one request: `single_decode_with_kv_cache`, `single_prefill_with_kv_cache`."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
from base2 import compare
from cases import BF16, F16, F32, FP8, Case, Problem
from harness import Device, kernel_of, send
from reference import Variant

SPEC = {
    "plain": {},
    "soft_cap": {"logits_soft_cap": 2.0},
    "window": {"window_left": 7},
    "scale": {"sm_scale": 0.2},
    "alibi": {"pos_encoding_mode": "ALIBI"},
    "rope": {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 1e5},
}
by_spec = pytest.mark.parametrize("options", SPEC.values(), ids=SPEC.keys())
by_dtypes = pytest.mark.parametrize(
    "dtypes",
    [F32, BF16, F16, ("bfloat16", "float8_e4m3fn", "bfloat16"), FP8],
    ids=lambda dtypes: "-".join(dtypes[:2]),
)


def check(
    device: Device, problem: Problem, result: Any, causal: bool = False, **options: Any
) -> None:
    """`result` is (out, lse) of the problem under other options of the computation."""
    problem.case = problem.case.but("options", variant=Variant(causal=causal, **options), task={})
    compare(problem, *map(device.get, result))


@by_spec
@by_dtypes
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_single_decode(
    options: dict[str, Any], dtypes: tuple[str, ...], kv_layout: str, device: Device
) -> None:
    variant = Variant(**options)
    case = Case(
        "one", (1,), (77,), heads=(8, 2), dtypes=dtypes, variant=variant, kv_layout=kv_layout
    )
    problem, there = send(device, case)
    args = there.q[0], *there.kv, kv_layout
    out, lse = flashbsr.flashinfer.single_decode_with_kv_cache(*args, return_lse=True, **options)
    assert tuple(out.shape) == (8, problem.case.dims[1])
    assert tuple(lse.shape) == (8,)
    again = flashbsr.flashinfer.single_decode_with_kv_cache(*args, **options)
    np.testing.assert_array_equal(device.get(out), device.get(again))
    check(device, problem, (out[None], lse[None]), **options)


def test_single_decode_scales(device: Device) -> None:
    case = Case("one", (1,), (77,), dtypes=("bfloat16", "float8_e5m2", "bfloat16"))
    problem, there = send(device, case)
    scales = {"q_scale": 0.5, "k_scale": 2.5, "v_scale": 0.3}
    out, lse = flashbsr.flashinfer.single_decode_with_kv_cache(
        there.q[0], *there.kv, return_lse=True, **scales
    )
    problem.run_options = scales
    check(device, problem, (out[None], lse[None]))


@by_spec
@by_dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_single_prefill(
    options: dict[str, Any], dtypes: tuple[str, ...], causal: bool, device: Device
) -> None:
    variant = Variant(**options)
    case = Case("one", (33,), (77,), heads=(8, 2), dims=(64, 32), dtypes=dtypes, variant=variant)
    problem, there = send(device, case)
    result = flashbsr.flashinfer.single_prefill_with_kv_cache(
        there.q, *there.kv, causal=causal, return_lse=True, **options
    )
    problem.kernel = kernel_of(problem, device)
    check(device, problem, result, causal, **options)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_single_prefill_masks(packed: bool, kv_layout: str, device: Device) -> None:
    """The mask has rank 2 here, and replaces causality."""
    problem, there = send(device, Case("one", (33,), (77,), mask="bool", kv_layout=kv_layout))
    mask = problem.requests[0][3]
    masks = (
        {"packed_custom_mask": device.put(flashbsr.packbits(mask.ravel(), "little"))}
        if packed
        else {"custom_mask": device.put(mask)}
    )
    for causal in (False, True):
        result = flashbsr.flashinfer.single_prefill_with_kv_cache(
            there.q, *there.kv, kv_layout=kv_layout, causal=causal, return_lse=True, **masks
        )
        compare(problem, *map(device.get, result))


def test_single_prefill_scales_and_output_type(device: Device) -> None:
    problem, there = send(
        device,
        Case(
            "one",
            (9,),
            (20,),
            heads=(4, 2),
            dtypes=("float16", "float8_e4m3fn", "float32"),
            scales="head",
        ),
    )
    options = there.run_options
    result = flashbsr.flashinfer.single_prefill_with_kv_cache(
        there.q,
        *there.kv,
        options["q_scale"],
        options["k_scale"],
        options["v_scale"],
        "float32",
        return_lse=True,
    )
    assert device.get(result[0]).dtype == np.float32
    compare(problem, *map(device.get, result))
    problem.run_options = {"k_scale": 0.25, "v_scale": 3.0}
    result = flashbsr.flashinfer.single_prefill_with_kv_cache(
        there.q, *there.kv, o_dtype=np.float32, return_lse=True, k_scale=0.25, v_scale=3.0
    )
    compare(problem, *map(device.get, result))
