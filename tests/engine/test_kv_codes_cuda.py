# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Attention on a GPU over codes with scales of every token and head, as tight as bfloat16.

Held to float64 over what the codes mean; slots of no request have garbage, their scales are NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import BF16, DECODE, F16, MIXED, Case
from compare import assert_attention
from flashbsr.errors import UnsupportedError
from harness import Device, attention_for
from kv_codes import E5M2, FP8, INT4, INT4_32, INT4_64, INT8, INT8_HALF, NVFP4, Kind, build
from reference import Variant

FP8_HALF = Kind("float8_e4m3fn", scale="float16")
SERVED = [INT8, INT8_HALF, FP8, FP8_HALF, E5M2, INT4, INT4_64, INT4_32, NVFP4]
#: Few rows stream through decode_scaled, many take prefill kernels; on 7.5 all do.
ONE = dataclasses.replace(DECODE, decode=False)
few_and_many = pytest.mark.parametrize("case", [ONE, MIXED], ids=["few", "many"])
LONG = Case(
    "long", (1, 3, 1), (7001, 40, 2000), heads=(8, 2), dims=(128, 128), variant=Variant(causal=True)
)


@pytest.fixture
def gpu(device: Device) -> Device:
    if not device.is_cuda:
        pytest.skip("tests/engine/test_kv_codes.py has the CPU's")
    return device


def moved(gpu: Device, x: Any) -> Any:
    """To the device; rows of codes begin at multiples of 16 bytes there."""
    if isinstance(x, tuple):
        return tuple(moved(gpu, part) for part in x)
    return gpu.put(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x


def dense(gpu: Device, x: Any) -> Any:
    """To the device, without room between rows: as caches are."""
    if isinstance(x, tuple):
        return tuple(dense(gpu, part) for part in x)
    if not isinstance(x, np.ndarray):
        return x
    return gpu.put(np.ascontiguousarray(x).reshape(-1)).reshape(x.shape)


def run(
    gpu: Device,
    case: Case,
    kind: Kind,
    *others: Kind,
    backend: str = "",
    place: Callable[[Device, Any], Any] = moved,
    **task: Any,
) -> tuple[np.ndarray, np.ndarray, str]:
    coded = build(gpu.adapt(case), kind, *(others or [kind]))
    problem = coded.problem
    attention = attention_for(problem, backend or gpu.backend, kv_dtype=coded.kv_dtype, **task)
    problem.plan(attention)
    q, kv = gpu.put(problem.q), place(gpu, coded.kv)
    options = {name: place(gpu, x) for name, x in coded.options.items()}
    found = []
    for _ in range(2):
        out, lse = map(gpu.put, problem.new_outputs())
        attention.run(q, kv, out=out, lse=lse, **options)
        found.append((gpu.get(out), gpu.get(lse)))
    (out, lse), (again, lse_again) = found
    np.testing.assert_array_equal(out, again)
    np.testing.assert_array_equal(lse, lse_again)
    work = "bfloat16"  # of weights times V's scales, whatever q is: they may be of any size
    value = others[0] if others else kind
    kernel = attention.explain().kernel
    # Whose codes take the scales, so that weights are in float16; 7.5 has no products of bfloat16.
    if value.dtype == "nvfp4" or not streams(kernel):
        work = "float16"
    exact, working = problem.reference(), problem.reference(work)
    assert_attention(out, lse, exact, working, work, case.name, kernel)
    return out, lse, kernel


def is_decode(kernel: str) -> bool:
    """Whether decodes are all that there is: beside chunks they have the first of two kernels."""
    return kernel.split(" + ")[-1].startswith("decode_scaled_")


def streams(kernel: str) -> bool:
    """Whether the build has kernels that stream: one for compute capability 7.5 has not."""
    return "_sm75_" not in kernel


@pytest.mark.parametrize("kind", SERVED, ids=str)
@pytest.mark.parametrize("dtypes", [BF16, F16], ids=lambda x: x[0])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=lambda x: str(x[0]))
@pytest.mark.parametrize("case", [DECODE, MIXED], ids=lambda x: x.name)
def test_codes(
    gpu: Device, case: Case, dims: tuple[int, int], dtypes: tuple[str, str, str], kind: Kind
) -> None:
    kernel = run(gpu, dataclasses.replace(case, dtypes=dtypes, dims=dims), kind)[2]
    assert is_decode(kernel) == (case is DECODE and streams(kernel))  # 14 rows: many


@pytest.mark.parametrize("kind", [INT8, INT8_HALF, FP8, INT4_64, NVFP4], ids=str)
@pytest.mark.parametrize("layout", ["ragged", "paged", "table", "bounds"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16])
@few_and_many
def test_layouts(
    gpu: Device, case: Case, page_size: int, kv_layout: str, layout: str, kind: Kind
) -> None:
    few = case is ONE
    case = dataclasses.replace(
        case, dtypes=BF16, dims=(64, 64), layout=layout, kv_layout=kv_layout, page_size=page_size
    )
    kernel = run(gpu, case, kind)[2]
    assert is_decode(kernel) == (few and streams(kernel))


@pytest.mark.parametrize(
    "kind", [INT8, INT8_HALF, FP8, E5M2, INT4, INT4_64, INT4_32, NVFP4], ids=str
)
def test_split_requests(gpu: Device, kind: Kind) -> None:
    for dtypes in (BF16, F16):
        run(gpu, dataclasses.replace(LONG, dtypes=dtypes), kind)


@pytest.mark.parametrize("kind", [INT8, FP8], ids=str)
def test_head_dims_between(gpu: Device, kind: Kind) -> None:
    for dims in ((32, 96), (80, 112)):
        run(gpu, dataclasses.replace(MIXED, dtypes=BF16, dims=dims), kind)


VARIANTS: dict[str, dict[str, Any]] = {
    "window": {"variant": Variant(causal=True, window_left=20)},
    "negative": {"variant": Variant(sm_scale=-0.1)},
    "sinks": {"sinks": "extreme"},
    "numbers": {"scales": "number"},
    "per_head": {"scales": "head"},
    "large": {"gain": 100.0},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", [INT8, FP8, INT4_64, NVFP4], ids=str)
@few_and_many
def test_variants(gpu: Device, case: Case, kind: Kind, name: str) -> None:
    # Hopper splits q in bfloat16 into products of e4m3, which sum in 14 bits (sm90a_fp8.md).
    splits = name == "large" and kind is FP8 and case is MIXED
    case = dataclasses.replace(case, dtypes=F16 if splits else BF16, dims=(128, 128))
    case = dataclasses.replace(case, layout="paged")
    run(gpu, dataclasses.replace(case, **VARIANTS[name]), kind)


@pytest.mark.parametrize(("kinds", "dims"), [
    ((INT8, INT4), (64, 128)), ((INT8, FP8), (64, 32)), ((INT4, INT4), (96, 96)),
    ((NVFP4, NVFP4), (128, 64)),
], ids=str)  # fmt: skip
def test_what_is_not_there_says_so(
    gpu: Device, kinds: tuple[Kind, Kind], dims: tuple[int, int]
) -> None:
    with pytest.raises(UnsupportedError, match="codes( for q in bfloat16|, head_dim .* sm_75)"):
        run(gpu, dataclasses.replace(DECODE, dtypes=BF16, dims=dims), *kinds)


@pytest.mark.parametrize("kind", [INT8_HALF, INT4, INT4_64, INT4_32, NVFP4], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@few_and_many
def test_scales_of_any_alignment(gpu: Device, case: Case, dim: int, kind: Kind) -> None:
    """Rows of scales beside other things: every second one is aligned to no more than a word."""
    case = dataclasses.replace(gpu.adapt(case), dtypes=BF16, dims=(dim, dim), layout="paged")
    coded = build(case, kind, kind)
    problem = coded.problem
    attention = attention_for(problem, gpu.backend, kv_dtype=coded.kv_dtype)
    problem.plan(attention)
    q, kv = gpu.put(problem.q), moved(gpu, coded.kv)
    plain, shifted = {}, {}
    for name, x in coded.options.items():
        x = np.ascontiguousarray(x)
        plain[name] = gpu.put(x)
        rows = x if kind.group else x[..., None]
        more = 4 if kind.dtype == "nvfp4" else 1
        wide = np.zeros((*rows.shape[:-1], rows.shape[-1] + more), x.dtype)
        wide[..., more:] = rows
        view = gpu.put(wide)[..., more:]
        shifted[name] = view if kind.group else view[..., 0]
    wanted, found = (gpu.get(attention.run(q, kv, **options)) for options in (plain, shifted))
    np.testing.assert_array_equal(found, wanted)


def test_scales_of_nvfp4_lie_in_words(gpu: Device) -> None:
    coded = build(dataclasses.replace(DECODE, dtypes=BF16), NVFP4, NVFP4)
    problem = coded.problem
    attention = attention_for(problem, gpu.backend, kv_dtype=coded.kv_dtype)
    problem.plan(attention)
    scale = np.ascontiguousarray(coded.options["k_scale"])
    wide = np.zeros((*scale.shape[:-1], scale.shape[-1] + 1), scale.dtype)
    wide[..., 1:] = scale
    options = {"k_scale": gpu.put(wide)[..., 1:], "v_scale": moved(gpu, coded.options["v_scale"])}
    with pytest.raises(UnsupportedError, match="k_scale: .*4 bytes"):
        attention.run(gpu.put(problem.q), moved(gpu, coded.kv), **options)


def test_a_float8_without_scales_goes_to_the_other_kernel(gpu: Device) -> None:
    """Whether there are scales is known when the arrays come."""
    case = dataclasses.replace(gpu.adapt(DECODE), dtypes=BF16, dims=(64, 64))
    coded = build(case, FP8, FP8)
    problem = coded.problem
    attention = attention_for(problem, gpu.backend, kv_dtype="float8_e4m3fn")
    problem.plan(attention)
    q, kv = gpu.put(problem.q), moved(gpu, coded.kv)
    attention.run(q, kv)
    plain = "decode_sm" if streams(attention.explain().kernel) else "prefill_sm75"
    assert attention.explain().kernel.startswith(plain)
    options = {name: moved(gpu, x) for name, x in coded.options.items()}
    attention.run(q, kv, **options)
    assert attention.explain().kernel.startswith(("decode_scaled_", "prefill_scaled_sm75"))
    attention.run(q, kv)
    assert attention.explain().kernel.startswith(plain)
