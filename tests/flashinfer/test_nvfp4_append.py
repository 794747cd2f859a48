# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Appends that quantise to NVFP4, in FlashInfer's form: every byte by the formulas."""

from __future__ import annotations

from typing import Any

import flashbsr
import flashbsr.flashinfer as flashinfer
import numpy as np
import pytest
from harness import Device
from kv_codes import NVFP4, encode
from nvfp4_world import (
    E4M3,
    K_NUMBER,
    KV_HEADS,
    KV_LENS,
    LAYOUTS,
    PAGE,
    V_NUMBER,
    WORLDS,
    build,
    given,
    planned,
)


def empty(device: Device, layout: str, dim: int, pages: int, form: str) -> tuple[Any, Any]:
    shape = (pages, PAGE, KV_HEADS, dim // 2)
    codes = [np.full(shape, 0xEE, np.uint8) for _ in "KV"]
    scales = [np.full((*shape[:-1], dim // 16), 0x7F, np.uint8).view(E4M3) for _ in "KV"]
    return given(device, codes, layout, form), given(device, scales, layout, form)


def read_back(device: Device, x: Any, layout: str) -> list[np.ndarray]:
    """Bytes of K and V in slots, whatever form they are in."""
    halves = x if isinstance(x, (tuple, list)) else (x[:, 0], x[:, 1])
    found = [np.ascontiguousarray(device.get(y)).view(np.uint8) for y in halves]
    found = [y.swapaxes(1, 2) if layout == "HND" else y for y in found]
    return [y.reshape(-1, *y.shape[2:]) for y in found]


@WORLDS
@LAYOUTS
@pytest.mark.parametrize("form", ["tuple", "stacked", "bytes"])
@pytest.mark.parametrize("by_slots", [False, True])
def test_append(by_slots: bool, form: str, layout: str, device: Device) -> None:
    """Every byte is the formulas', with rows of padding and without a write beside them."""
    dim, pages, count = 64, 5, 9
    rng = np.random.default_rng(3)
    x = [rng.standard_normal((count + 3, KV_HEADS, dim)).astype(np.float16) for _ in "KV"]
    slots = rng.permutation(pages * PAGE)[:count].astype(np.int64)
    slots[[2, 7]] = -1
    kv, scales = empty(device, layout, dim, pages, form)
    put = device.put
    if by_slots:
        flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            *map(put, x), put(slots), kv, scales, np.array([K_NUMBER], np.float32), V_NUMBER, layout
        )
    else:  # a request of one page for each
        indptr = np.arange(pages + 1, dtype=np.int32)
        requests = np.where(slots < 0, -1, slots // PAGE).astype(np.int32)
        flashinfer.page.nvfp4_quantize_append_paged_kv_cache(
            *(put(y[:count]) for y in x), put(requests), put(np.maximum(slots, 0) % PAGE), kv,
            scales, put(indptr[:-1]), put(indptr), put(np.full(pages, PAGE, np.int32)), K_NUMBER,
            V_NUMBER, kv_layout=layout,
        )  # fmt: skip
    kept = slots >= 0
    halves = (read_back(device, kv, layout), read_back(device, scales, layout))
    for half, number in ((0, K_NUMBER), (1, V_NUMBER)):
        inverse = np.float32(1) / np.float32(number)
        rows = (x[half][:count][kept].astype(np.float32) * inverse).astype(np.float32)
        codes, of_codes = encode(rows, NVFP4)
        for found, wanted, poison in (
            (halves[0][half], codes, 0xEE),
            (halves[1][half], of_codes.view(np.uint8), 0x7F),
        ):
            expected = np.full_like(found, poison)
            expected[slots[kept]] = wanted
            np.testing.assert_array_equal(found, expected)


@WORLDS
@pytest.mark.parametrize("layout", ["HND"])
def test_what_was_appended_is_attended_to(layout: str, device: Device) -> None:
    """The same numbers for both: a program's way, from rows to outputs."""
    batch = build()
    rng = np.random.default_rng(8)
    rows = [[rng.standard_normal((n, KV_HEADS, 64)) for n in KV_LENS] for _ in "KV"]
    x = [device.put(np.concatenate(half).astype(np.float16)) for half in rows]
    kv, scales = empty(device, layout, 64, len(batch.codes[0]), "tuple")
    table = [device.put(y) for y in batch.table]
    ends = device.put(np.cumsum([0, *KV_LENS]).astype(np.int32))
    places = flashinfer.get_batch_indices_positions(
        ends, device.put(np.array(KV_LENS, np.int32)), sum(KV_LENS)
    )
    flashinfer.nvfp4_quantize_append_paged_kv_cache(
        *x, *places, kv, scales, table[1], table[0], table[2], 0.01, 0.02, layout
    )
    wrapper = planned("prefill", device, batch, layout)
    out = wrapper.run(device.put(batch.q), kv, kv_cache_sf=scales, k_scale=0.01, v_scale=0.02)
    batch.rows = rows
    exact = batch.exact().out
    found = np.asarray(device.get(out), np.float64)
    off = np.linalg.norm(found - exact.reshape(found.shape)) / np.linalg.norm(exact)
    assert off < 0.15, off  # of four bits; 1 where a number is forgotten


@WORLDS
def test_bad_appends(device: Device) -> None:
    kv, scales = empty(device, "NHD", 64, 3, "tuple")
    x = device.put(np.ones((2, KV_HEADS, 64), np.float16))
    slots = device.put(np.array([0, 5]))
    call = flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    for name, wrong in (
        ("k_scale", 0.0), ("v_scale", -1.0), ("k_scale", float("nan")), ("v_scale", float("inf")),
        ("k_scale", "1"), ("v_scale", np.ones(2, np.float32)), ("kv_cache_sf", scales[0]),
        ("kv_cache_sf", None), ("kv_cache_sf", kv), ("kv_cache_sf", scales[:1]),
        ("paged_kv_cache", kv[0]), ("paged_kv_cache", None), ("paged_kv_cache", (kv[0], None)),
        ("kv_layout", "NDH"),
        ("slot_mapping", None), ("append_key", device.put(np.ones((2, KV_HEADS, 32), np.float16))),
        ("append_value", device.put(np.ones((2, 3, 64), np.float16))),
    ):  # fmt: skip
        arguments = {
            "append_key": x, "append_value": x, "slot_mapping": slots, "paged_kv_cache": kv,
            "kv_cache_sf": scales, "k_scale": 1.0, "v_scale": 1.0, name: wrong,
        }  # fmt: skip
        with pytest.raises(flashbsr.FlashbsrError) as caught:
            call(**arguments)
        assert caught.value.argument.startswith(name), (name, wrong, caught.value)
    if not device.is_cuda:  # there they are skipped
        with pytest.raises(flashbsr.IndexRangeError, match="slot_mapping"):
            call(x, x, device.put(np.array([0, 12])), kv, scales, 1.0, 1.0)
    for found, poison in ((kv, 0xEE), (scales, 0x7F)):
        assert all((y == poison).all() for y in read_back(device, found, "NHD"))
