# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts and chunks over codes with scales of every token, on both families of prefill kernels.

Held to float64 over what the codes mean; slots of no request have garbage, their scales are NaN.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from cases import BF16, F16, Case
from flashbsr.errors import UnsupportedError
from harness import DEVICES, Device, attention_for
from kv_codes import E5M2, FP8, INT4, INT4_32, INT4_64, INT8, INT8_HALF, NVFP4, Kind, build
from reference import Variant
from test_kv_codes_cuda import FP8_HALF, moved, run

GPUS = [device for device in DEVICES if device.is_cuda]
if not GPUS:
    pytest.skip("no GPU, or a build or a PyTorch without CUDA", allow_module_level=True)

FAMILIES = {"fa2": "prefill_scaled_", "fa3": "hopper_scaled_"}
CHUNKS = Case(
    "chunks", (1, 70, 0, 17, 300, 129, 64), (330, 200, 9, 17, 300, 1000, 3), heads=(8, 2),
    dims=(128, 128), dtypes=BF16, layout="paged", variant=Variant(causal=True),
)  # fmt: skip
LONG = CHUNKS.but("long", q_lens=(100, 40), kv_lens=(9001, 40), heads=(4, 1))

LAYOUTS = [("ragged", 1), *itertools.product(("paged", "table", "bounds"), (1, 7, 16, 64))]

everywhere = pytest.mark.parametrize("gpu", GPUS, ids=lambda device: device.name)
BYTES = [(family, kind) for family in FAMILIES for kind in (INT8, FP8)]
of_bytes = pytest.mark.parametrize(("family", "kind"), BYTES, ids=str)
of_codes = pytest.mark.parametrize(
    ("family", "kind"), [*BYTES, ("fa2", INT4_64), ("fa2", NVFP4)], ids=str
)


def check(gpu: Device, case: Case, kind: Kind, family: str, **task: Any) -> None:
    """Run the case on a family, whose kernels read codes as they are."""
    kernel = run(gpu, case, kind, backend=family, dequantize_bytes=0, **task)[2]
    assert kernel.split(" + ")[-1].startswith(FAMILIES[family])


@everywhere
@of_bytes
@pytest.mark.parametrize("dtypes", [BF16, F16], ids=lambda x: x[0])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (32, 96), (112, 80)], ids=str)
@pytest.mark.parametrize("layout", ["ragged", "paged"])
def test_chunks(
    gpu: Device,
    layout: str,
    dims: tuple[int, int],
    dtypes: tuple[str, str, str],
    kind: Kind,
    family: str,
) -> None:
    check(gpu, dataclasses.replace(CHUNKS, dims=dims, dtypes=dtypes, layout=layout), kind, family)


@everywhere
@pytest.mark.parametrize("kind", [INT4, INT4_64, INT4_32, NVFP4], ids=str)
@pytest.mark.parametrize("dtypes", [BF16, F16], ids=lambda x: x[0])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize(("layout", "rows"), [("ragged", 64), ("paged", 64), ("paged", 128)])
def test_chunks_of_packed_codes(
    gpu: Device,
    layout: str,
    rows: int,
    dims: tuple[int, int],
    dtypes: tuple[str, str, str],
    kind: Kind,
) -> None:
    case = dataclasses.replace(CHUNKS, dims=dims, dtypes=dtypes, layout=layout)
    check(gpu, case, kind, "fa2", tile_rows=rows)


@everywhere
@pytest.mark.parametrize(("kind", "rows"), [(INT8, 64), (INT8, 128), (FP8, 64)], ids=str)
def test_rows_of_a_tile(gpu: Device, rows: int, kind: Kind) -> None:
    kernel = run(gpu, CHUNKS, kind, backend="fa2", tile_rows=rows)[2]
    assert f"_r{rows}_" in kernel


@everywhere
@of_codes
@pytest.mark.parametrize(("layout", "page_size"), LAYOUTS)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_layouts(
    gpu: Device, page_size: int, kv_layout: str, layout: str, kind: Kind, family: str
) -> None:
    fields = {"layout": layout, "kv_layout": kv_layout, "page_size": page_size}
    check(gpu, dataclasses.replace(CHUNKS, **fields), kind, family)


@everywhere
@pytest.mark.parametrize("kind", [INT8_HALF, FP8_HALF], ids=str)
@pytest.mark.parametrize(("layout", "page_size"), [("ragged", 1), ("paged", 1), ("paged", 16)])
def test_scales_in_float16(gpu: Device, layout: str, page_size: int, kind: Kind) -> None:
    case = dataclasses.replace(CHUNKS, layout=layout, page_size=page_size)
    check(gpu, case, kind, "fa2")
    assert run(gpu, case, kind)[2].startswith("prefill_scaled_")  # Hopper's reads float32


@everywhere
@of_codes
@pytest.mark.parametrize("size", [0, 512])
def test_split_requests(gpu: Device, size: int, kind: Kind, family: str) -> None:
    task = {"fixed_split_size": size} if size else {}
    if size and family == "fa3":
        task["tile_rows"] = 192
    check(gpu, LONG, kind, family, **task)


VARIANTS: dict[str, dict[str, Any]] = {
    "all": {"variant": Variant()},
    "window": {"variant": Variant(causal=True, window_left=100)},
    "negative": {"variant": Variant(causal=True, sm_scale=-0.1)},
    "capped": {"variant": Variant(causal=True, logits_soft_cap=20.0)},
    "mask": {"mask": "bool"},
    "blocks": {"mask": "blocks"},
    "sinks": {"sinks": "extreme"},
    "numbers": {"scales": "number"},
    "per_head": {"scales": "head"},
    "large": {"gain": 100.0},
}


@everywhere
@of_codes
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(gpu: Device, name: str, kind: Kind, family: str) -> None:
    case = dataclasses.replace(CHUNKS, **VARIANTS[name])
    if name == "large" and kind is FP8 and family == "fa3":
        # q in bfloat16 is split into products of e4m3, which sum in 14 bits (sm90a_fp8.md).
        case = dataclasses.replace(case, dtypes=F16)
    check(gpu, case, kind, family)


@everywhere
def test_e5m2_is_compiled(gpu: Device) -> None:
    check(gpu, CHUNKS, E5M2, "fa2")


@everywhere
@of_bytes
@pytest.mark.parametrize("power", [-60, 60])
def test_scales_of_any_size(gpu: Device, power: int, kind: Kind, family: str) -> None:
    """Outputs of a cache whose V is 2^power times as large are 2^power times as large, exactly."""
    outputs = []
    for factor in (1.0, 2.0**power):
        coded = build(CHUNKS, kind, kind)
        attention = attention_for(coded.problem, family, kv_dtype=coded.kv_dtype)
        coded.problem.plan(attention)
        scales = np.array(coded.options["v_scale"]) * np.float32(factor)
        options = coded.options | {"v_scale": scales}
        out = attention.run(
            gpu.put(coded.problem.q),
            moved(gpu, coded.kv),
            **{name: moved(gpu, x) for name, x in options.items()},
        )
        outputs.append(gpu.get(out).astype(np.float64))
    assert np.abs(outputs[0]).max() > 0.1
    np.testing.assert_array_equal(outputs[1], outputs[0] * 2.0**power)


@everywhere
def test_few_rows_go_to_the_decode_kernel(gpu: Device) -> None:
    few = dataclasses.replace(CHUNKS, q_lens=(2, 1, 0, 2, 1, 2, 1))
    for case, start in ((few, "decode_scaled_"), (CHUNKS, "hopper_scaled_")):
        kernel = run(gpu, case, INT8, dequantize_bytes=0)[2]
        assert kernel.split(" + ")[-1].startswith(start)


@everywhere
@pytest.mark.parametrize("kind", [INT8, FP8], ids=str)
def test_rope_inside_goes_to_mma_sync(gpu: Device, kind: Kind) -> None:
    case = CHUNKS.but("rope", variant=Variant(causal=True, pos_encoding_mode="ROPE_LLAMA"))
    check(gpu, case, kind, "fa2")
    with pytest.raises(UnsupportedError, match="pos_encoding_mode"):
        check(gpu, case, kind, "fa3")
