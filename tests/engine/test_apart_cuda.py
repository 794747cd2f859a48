# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed batches that no kernel does both kinds of: a kernel for decodes, then one for chunks.

Against float64, with NaN in slots of no request. Tiles of a height that is asked for are planned so
whatever the price.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cases import BF16, F16, Case
from harness import Device, compare, results_of
from kv_codes import FP8, INT4, INT4_32, INT4_64, INT8, INT8_HALF, NVFP4, Kind
from reference import Variant
from test_kv_codes_cuda import gpu, run

__all__ = ["gpu"]

#: Chunks between decodes: some end inside of pages, some have no rows or no keys; one decode is
#: split, and chunks leave a few rows behind whole tiles.
MIXED = Case(
    "apart", (1, 161, 0, 2, 300, 3, 1, 1, 34, 1), (900, 700, 50, 5000, 1543, 0, 33, 1, 34, 0),
    heads=(8, 2), dims=(128, 128), dtypes=BF16, layout="paged", page_size=16,
    variant=Variant(causal=True), task={"tile_rows": 128},
)  # fmt: skip


@pytest.fixture
def hopper(gpu: Device) -> Device:
    """Its kernels have tiles of 128 rows for all that is here."""
    torch = pytest.importorskip("torch")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("tiles of other heights elsewhere")
    return gpu


def case(**changes: Any) -> Case:
    return dataclasses.replace(MIXED, **changes)


def check(gpu: Device, problem: Case, few: str = "decode_") -> None:
    """Without scales of every token."""
    found = results_of(problem, gpu)
    names = found[0].kernel.split(" + ")
    if problem.variant.activation != "sigmoid":  # which is run without asking
        assert len(names) == 2
        assert names[0].startswith(few)
    compare(*found)


@pytest.mark.parametrize("kind", [INT8, INT8_HALF, FP8, INT4, INT4_64, INT4_32, NVFP4], ids=str)
@pytest.mark.parametrize("room", [0, 1 << 28], ids=["codes", "16 bits"])
@pytest.mark.parametrize("layout", ["ragged", "paged", "table", "bounds"])
def test_codes(hopper: Device, layout: str, room: int, kind: Kind) -> None:
    kernel = run(hopper, case(layout=layout), kind, dequantize_bytes=room)[2]
    assert kernel.startswith("decode_scaled_")
    assert " + " in kernel


@pytest.mark.parametrize("kind", [INT8, INT4_64, NVFP4], ids=str)
@pytest.mark.parametrize("change", [
    {"dtypes": F16}, {"kv_layout": "HND"}, {"page_size": 1}, {"page_size": 3}, {"gain": 100.0},
    {"scales": "head"}, {"sinks": "extreme"}, {"variant": Variant(causal=True, window_left=200)},
    {"heads": (3, 1)}, {"heads": (8, 8)},
], ids=str)  # fmt: skip
def test_codes_of_all_sorts(hopper: Device, change: dict[str, Any], kind: Kind) -> None:
    assert " + " in run(hopper, case(**change), kind)[2]


FP8_KV = ("bfloat16", "float8_e4m3fn", "bfloat16")


@pytest.mark.parametrize("change", [
    {"dtypes": FP8_KV},
    {"dtypes": ("float16", "float8_e4m3fn", "float16"), "task": {"tile_rows": 192}},
    {"dtypes": FP8_KV, "layout": "bounds"}, {"dtypes": FP8_KV, "layout": "ragged"},
    {"dtypes": FP8_KV, "sinks": "extreme", "scales": "head"},
    {"heads": (16, 1)}, {"heads": (12, 1), "layout": "table"},
    {"dims": (256, 256)}, {"dims": (256, 256), "layout": "bounds", "dtypes": F16},
], ids=str)  # fmt: skip
def test_caches_without_scales_of_tokens(hopper: Device, change: dict[str, Any]) -> None:
    check(hopper, case(**change))


@pytest.mark.parametrize("variant", [
    Variant(causal=True, logits_soft_cap=20.0), Variant(causal=True, pos_encoding_mode="ALIBI"),
    Variant(activation="sigmoid"),
], ids=str)  # fmt: skip
def test_variants(hopper: Device, variant: Variant) -> None:
    check(hopper, case(variant=variant, task={"tile_rows": 192}))


def test_mma_sync_has_both_kernels_too(gpu: Device) -> None:
    """The price decides there: tiles of 64 rows are a whole one for each decode."""
    problem = case(
        q_lens=(300, *(1,) * 60), kv_lens=(400, *(3000 + 7 * i for i in range(60))),
        dtypes=FP8_KV, task={},
    )  # fmt: skip
    found = results_of(problem, dataclasses.replace(gpu, backend="fa2"))
    few, wide = found[0].kernel.split(" + ")
    assert few.startswith("decode_")
    assert wide.startswith("prefill_")
    compare(*found)


def test_the_same_bits_again(hopper: Device) -> None:
    """And of one plan whatever is planned between."""
    first, second = (results_of(MIXED_INT, hopper) for _ in range(2))
    for x, y in zip(first[1:], second[1:], strict=True):
        np.testing.assert_array_equal(x, y)


MIXED_INT = case(dtypes=FP8_KV)
