# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Codes with scales of every token by Hopper's tiles of 128 rows, which warps of their own widen,
and by those of 192, whatever the price is: as they are, and written as 16 bits before.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cases import BF16, F16, Case
from harness import Device, attention_for
from kv_codes import FP8, INT4_64, INT8, Kind, build
from reference import Variant
from test_kv_codes_cuda import gpu, moved, run

__all__ = ["gpu"]

CHUNKS = Case(
    "chunks", (1, 70, 0, 17, 300, 129, 64), (330, 200, 9, 17, 300, 1000, 3), heads=(8, 2),
    dims=(128, 128), dtypes=BF16, layout="paged", page_size=16, variant=Variant(causal=True),
)  # fmt: skip
LONG = CHUNKS.but("long", q_lens=(100, 40), kv_lens=(9001, 40), heads=(4, 1))

CHANGES: dict[str, dict[str, Any]] = {
    "causal": {},
    "ragged": {"layout": "ragged"},
    "page-1": {"page_size": 1},
    "page-7": {"page_size": 7, "kv_layout": "HND"},
    "page-64": {"page_size": 64, "layout": "table"},
    "bounds": {"layout": "bounds"},
    "group-of-one": {"heads": (2, 2)},
    "dims": {"dims": (112, 80)},
    "all": {"variant": Variant()},
    "window": {"variant": Variant(causal=True, window_left=100)},
    "negative": {"variant": Variant(causal=True, sm_scale=-0.1)},
    "sinks": {"sinks": "extreme"},
    "per-head": {"scales": "head"},
}


@pytest.fixture
def hopper(gpu: Device) -> Device:
    """Products of warpgroups are instructions of sm_90a."""
    if "sm90a" not in run(gpu, CHUNKS, INT8)[2]:
        pytest.skip("a Hopper GPU has the kernels")
    return gpu


def name_of(case: Case, kind: Kind | None, rows: int) -> str:
    q = {"float16": "f16", "bfloat16": "bf16"}[case.dtypes[0]]
    kv = {INT8: "xi8", FP8: "xe4m3", None: ""}[kind]
    return f"hopper_scaled_sm90a_d128_{q}{kv}_r{rows}_plain"


@pytest.mark.parametrize("rows", [128, 192])
@pytest.mark.parametrize("kind", [INT8, FP8], ids=str)
@pytest.mark.parametrize("dtypes", [BF16, F16], ids=lambda x: x[0])
@pytest.mark.parametrize("change", CHANGES)
def test_as_they_are(
    hopper: Device, change: str, dtypes: tuple[str, str, str], kind: Kind, rows: int
) -> None:
    case = dataclasses.replace(CHUNKS, dtypes=dtypes, **CHANGES[change])
    kernel = run(hopper, case, kind, backend="fa3", dequantize_bytes=0, tile_rows=rows)[2]
    assert kernel == name_of(case, kind, rows)


@pytest.mark.parametrize("rows", [128, 192])
@pytest.mark.parametrize("size", [0, 512])
@pytest.mark.parametrize("kind", [INT8, FP8], ids=str)
def test_parts(hopper: Device, kind: Kind, size: int, rows: int) -> None:
    task = {"fixed_split_size": size} if size else {}
    kernel = run(hopper, LONG, kind, dequantize_bytes=0, tile_rows=rows, **task)[2]
    assert kernel == name_of(LONG, kind, rows)


@pytest.mark.parametrize("kind", [INT8, FP8], ids=str)
@pytest.mark.parametrize("rows", [128, 192])
@pytest.mark.parametrize("power", [-60, 60])
def test_scales_of_any_size(hopper: Device, power: int, rows: int, kind: Kind) -> None:
    """Outputs of a cache whose V is 2^power times as large are 2^power times as large, exactly; the
    same again is the same."""
    outputs = []
    for factor in (1.0, 2.0**power, 1.0):
        coded = build(CHUNKS, kind, kind)
        attention = attention_for(coded.problem, "fa3", kv_dtype=coded.kv_dtype, tile_rows=rows)
        coded.problem.plan(attention)
        scales = np.array(coded.options["v_scale"]) * np.float32(factor)
        options = coded.options | {"v_scale": scales}
        out = attention.run(
            hopper.put(coded.problem.q),
            moved(hopper, coded.kv),
            **{name: moved(hopper, x) for name, x in options.items()},
        )
        outputs.append(hopper.get(out).astype(np.float64))
    assert np.abs(outputs[0]).max() > 0.1
    np.testing.assert_array_equal(outputs[1], outputs[0] * 2.0**power)
    np.testing.assert_array_equal(outputs[2], outputs[0])


#: So many rows that the pass is worth it.
WIDE = CHUNKS.but(
    "wide", q_lens=(2500, 0, 260), kv_lens=(2543, 77, 1001), heads=(16, 2), variant=Variant()
)


@pytest.mark.parametrize("rows", [128, 192])
@pytest.mark.parametrize("kind", [INT8, INT4_64], ids=str)
@pytest.mark.parametrize("dtypes", [BF16, F16], ids=lambda x: x[0])
@pytest.mark.parametrize("change", ["causal", "ragged", "page-1", "page-64", "sinks"])
def test_as_16_bits(
    hopper: Device, change: str, dtypes: tuple[str, str, str], kind: Kind, rows: int
) -> None:
    case = dataclasses.replace(WIDE, dtypes=dtypes, **CHANGES[change])
    name = name_of(case, None, rows)
    if kind is INT4_64:  # two scales of a row
        name = name.replace("scaled", "halves")
    assert run(hopper, case, kind, tile_rows=rows)[2] == name
