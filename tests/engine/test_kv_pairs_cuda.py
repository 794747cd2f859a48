# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Decode over packed codes on a GPU, two KV heads at once: every row keeps what its own head gave.

Held to float64 over what the codes mean; slots of no request have garbage, their scales are NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flashbsr
import numpy as np
import pytest
import reference
from cases import BF16, DECODE, F16, Case
from harness import DEVICES, Device, attention_for
from kv_codes import INT4, INT4_32, INT4_64, NVFP4, Kind, assert_attends, build, decode, encode
from reference import Variant
from test_kv_codes_cuda import LONG, dense, moved, run

GPUS = [device for device in DEVICES if device.is_cuda]
if not GPUS:
    pytest.skip("no GPU, or a build or a PyTorch without CUDA", allow_module_level=True)

PACKED = [INT4, INT4_64, INT4_32, NVFP4]
ONE = dataclasses.replace(DECODE, decode=False, dtypes=BF16)
MANY = dataclasses.replace(
    DECODE, q_lens=(1,) * 140, kv_lens=tuple(range(140)), dtypes=BF16, dims=(128, 128)
)
everywhere = pytest.mark.parametrize("gpu", GPUS, ids=lambda device: device.name)
of_each_kind = pytest.mark.parametrize("kind", PACKED, ids=str)


def family(gpu: Device, case: Case, kind: Kind, **task: Any) -> str:
    """Run the case under a capacity, where pairs do not depend on lengths."""
    room = {
        "max_batch_size": len(case.q_lens),
        "max_q_tokens": max(sum(case.q_lens), 1),
        "max_kv_len": 2 * max(case.kv_lens),  # bounds are longer
    }
    return run(gpu, case, kind, **room, **task)[2].partition("_d")[0]


def assert_pairs(gpu: Device, case: Case, kind: Kind, *, place: Any = dense, **task: Any) -> None:
    """Run the case; boxes are of 16 tokens, with two scales of a head, on 9.0."""
    name = family(gpu, case, kind, place=place, **task)
    boxes = name.endswith("_sm90") and case.dims == (128, 128) and kind in (INT4_64, NVFP4)
    boxes &= case.kv_layout == "NHD" and (case.layout == "ragged" or case.page_size % 16 == 0)
    boxes &= place is dense  # otherwise heads lie apart
    assert name.rpartition("_sm")[0] == ("decode_pairs" if boxes else "decode_pairs_gather")


@everywhere
@of_each_kind
@pytest.mark.parametrize("heads", [(2, 2), (8, 8), (8, 4), (24, 12), (8, 2), (32, 8)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_groups(gpu: Device, dim: int, heads: tuple[int, int], kind: Kind) -> None:
    case = dataclasses.replace(ONE, heads=heads, dims=(dim, dim))
    assert_pairs(gpu, case, kind)


@everywhere
@pytest.mark.parametrize("heads", [(4, 1), (12, 3), (6, 2), (16, 2), (20, 4)], ids=str)
def test_what_makes_no_pairs(gpu: Device, heads: tuple[int, int]) -> None:
    """An odd number of heads; rows that are no half of a tile's, or more."""
    for kind in (INT4_64, NVFP4):
        case = dataclasses.replace(ONE, heads=heads, dims=(128, 128))
        assert family(gpu, case, kind).startswith("decode_scaled_")


@everywhere
@of_each_kind
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("heads", "q_lens"), [
    ((4, 4), (4, 3, 1, 4)), ((8, 4), (2, 2, 0, 2)), ((8, 2), (1, 1, 1, 0)), ((6, 6), (9, 1, 1, 1)),
], ids=str)  # fmt: skip
def test_tokens(
    gpu: Device, heads: tuple[int, int], q_lens: tuple[int, ...], dim: int, kind: Kind
) -> None:
    """Several tokens of a request in a tile, or in several; what each sees ends at another key."""
    for variant in (Variant(causal=True), Variant(causal=True, window_left=20), Variant()):
        case = Case(
            "tokens", q_lens, (300, 21, 40, 77), heads=heads, dims=(dim, dim), variant=variant,
            layout="paged", dtypes=BF16,
        )  # fmt: skip
        assert_pairs(gpu, case, kind)


@everywhere
@of_each_kind
@pytest.mark.parametrize("layout", ["ragged", "paged", "table", "bounds"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 48, 64])
def test_layouts(gpu: Device, page_size: int, layout: str, kind: Kind) -> None:
    for heads in ((8, 8), (8, 2)):
        case = dataclasses.replace(
            ONE, heads=heads, dims=(128, 128), layout=layout, page_size=page_size
        )
        for place in (dense, moved):
            assert_pairs(gpu, case, kind, place=place)


@everywhere
@pytest.mark.parametrize("kind", [INT4_64, NVFP4], ids=str)
@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("window", [-1, 150, 7000])
def test_long_queues(gpu: Device, window: int, page_size: int, kind: Kind) -> None:
    """Several batches of an item's stages; items behind it, some without a stage of a warp."""
    lens = (9000, 1, 17, 0, 6400, 191, 192, 193, 3000)
    case = Case(
        "long", (1,) * len(lens), lens, heads=(4, 2), dims=(128, 128), layout="paged",
        page_size=page_size, variant=Variant(causal=True, window_left=window), dtypes=BF16,
    )  # fmt: skip
    for task in ({}, {"disable_split_kv": True}):
        assert_pairs(gpu, case, kind, **task)


@everywhere
def test_more_items_than_a_turn_has(gpu: Device) -> None:
    """A queue's items are in shared memory 128 at a time."""
    lens = tuple(int(n) for n in np.random.default_rng(5).integers(0, 40, 1060))
    case = dataclasses.replace(
        ONE, q_lens=(1,) * len(lens), kv_lens=lens, heads=(32, 32), dims=(128, 128)
    )
    assert_pairs(gpu, case, NVFP4)


@everywhere
@pytest.mark.parametrize("kind", [INT4_64, NVFP4], ids=str)
def test_when_heads_go_in_pairs_by_themselves(gpu: Device, kind: Kind) -> None:
    """Where there is a pair for every SM, whether heads of a token lie side by side or apart."""
    for kv_layout in ("NHD", "HND"):
        for case, kernel in ((MANY, "decode_pairs_"), (ONE, "decode_scaled_")):
            case = dataclasses.replace(case, heads=(8, 8), kv_layout=kv_layout)
            assert run(gpu, case, kind)[2].startswith(kernel)


@everywhere
@of_each_kind
@pytest.mark.parametrize("dtypes", [BF16, F16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 4), (8, 2)], ids=str)
def test_split_requests(
    gpu: Device, heads: tuple[int, int], dtypes: tuple[str, ...], kind: Kind
) -> None:
    case = dataclasses.replace(
        LONG, q_lens=(1, 1, 1), heads=heads, dtypes=dtypes, layout="paged", decode=True
    )
    assert_pairs(gpu, case, kind)
    assert_pairs(gpu, case, kind, fixed_split_size=512)


@everywhere
@of_each_kind
@pytest.mark.parametrize("options", [
    {"sinks": "extreme"}, {"scales": "number"}, {"gain": 100.0}, {"variant": Variant(sm_scale=-0.1)}
], ids=str)  # fmt: skip
def test_variants(gpu: Device, options: dict[str, object], kind: Kind) -> None:
    case = dataclasses.replace(ONE, heads=(8, 2), dims=(128, 128), **options)
    assert_pairs(gpu, case, kind)


@everywhere
@pytest.mark.parametrize("kind", [INT4_64, NVFP4], ids=str)
def test_scales_of_heads_beside_those_of_tokens(gpu: Device, kind: Kind) -> None:
    """A merge of two heads' rows knows of no scale of each: one head at a time."""
    for case in (ONE, dataclasses.replace(LONG, q_lens=(1, 1, 1), dtypes=BF16)):
        case = dataclasses.replace(case, heads=(8, 2), dims=(128, 128), scales="head")
        assert family(gpu, case, kind).startswith("decode_scaled_")


@everywhere
@pytest.mark.parametrize("side", ["k_scale", "v_scale"])
@pytest.mark.parametrize("kind", [INT4, INT4_64, NVFP4], ids=str)
def test_a_scale_that_is_nan(gpu: Device, kind: Kind, side: str) -> None:
    """Rows of its head are NaN; the neighbour's are as before, or under V of NVFP4 NaN too."""
    case = dataclasses.replace(gpu.adapt(ONE), heads=(8, 2), dims=(128, 128))
    coded = build(case, kind, kind)
    problem = coded.problem
    room = {"max_batch_size": 5, "max_q_tokens": 5, "max_kv_len": 300}
    attention = attention_for(problem, gpu.backend, kv_dtype=coded.kv_dtype, **room)
    problem.plan(attention)
    found = []
    for hurt in (False, True):
        options = {name: np.ascontiguousarray(x) for name, x in coded.options.items()}
        if hurt:
            page, slot = problem.kv_indices[problem.kv_indptr[1]], 5
            options[side][page, slot, 1] = np.nan
        options = {name: dense(gpu, x) for name, x in options.items()}
        out = attention.run(gpu.put(problem.q), dense(gpu, coded.kv), **options)
        found.append(gpu.get(out).astype(np.float32))
    assert attention.explain().kernel.startswith("decode_pairs_")
    well, ill = found
    assert np.isfinite(well).all()
    assert np.isnan(ill[1, 4:]).all()
    np.testing.assert_array_equal(ill[[0, 2, 3, 4]], well[[0, 2, 3, 4]])
    if side == "k_scale" or kind is not NVFP4:
        np.testing.assert_array_equal(ill[1, :4], well[1, :4])


@everywhere
@pytest.mark.parametrize("kind", [INT4_64, NVFP4], ids=str)
def test_shared_prefixes(gpu: Device, kind: Kind) -> None:
    """Four requests of one query head have room in a tile; of four heads one alone fills it."""
    rng = np.random.default_rng(3)
    shared, own, size, dim, count, heads = 300, 2, 16, 64, 40, 8
    pages = np.arange(shared + own * count, dtype=np.int32)
    lists = [np.r_[pages[:shared], pages[shared + own * i :][:own]] for i in range(count)]
    x = rng.standard_normal((2, len(pages), size, heads, dim)).astype(np.float32)
    (k, k_scale), (v, v_scale) = (encode(part, kind) for part in x)
    q = rng.standard_normal((count, heads, dim)).astype(reference.DTYPES["bfloat16"])
    length = (shared + own) * size - 3
    layout = flashbsr.Paged(
        None,
        np.arange(count + 1, dtype=np.int32) * (shared + own),
        np.concatenate(lists),
        page_size=size,
        kv_lens=np.full(count, length, np.int32),
    )
    task = flashbsr.TaskInfo(
        heads, heads, dim, q_dtype="bfloat16", kv_dtype=kind.dtype, backend=gpu.backend,
        max_batch_size=count, max_q_tokens=count, max_kv_pages=count * (shared + own),
    )  # fmt: skip
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), task)
    attention.plan(layout)
    options = {"k_scale": moved(gpu, k_scale), "v_scale": moved(gpu, v_scale)}
    out = gpu.get(attention.run(gpu.put(q), moved(gpu, (k, v)), **options))
    assert attention.explain().kernel.startswith("decode_pairs_")
    assert attention.plan_info.header.num_shared
    keys, values = decode(k, k_scale, kind), decode(v, v_scale, kind)
    assert_attends(out, q, (keys, values), lists, length)
