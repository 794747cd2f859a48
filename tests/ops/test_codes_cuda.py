# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Appends that quantise on a GPU: the same bits as docs/kv-quantization.md's formulas give."""

from __future__ import annotations

import flashbsr
import numpy as np
import pytest
from harness import DEVICES, Device
from kv_codes import INT4_32, INT8, KINDS, Kind, encode
from reference import DTYPES

GPUS = [device for device in DEVICES if device.is_cuda]
if not GPUS:
    pytest.skip("no GPU, or a build or a PyTorch without CUDA", allow_module_level=True)

HEADS, SIZE, PAGES = 3, 4, 50
everywhere = pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)


def rows(seed: int, count: int, dim: int, dtype: str) -> np.ndarray:
    """Rows of all sizes; among them zeros, and elements of one sign."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, HEADS, dim)) * 2.0 ** rng.integers(-8, 8, (count, HEADS, 1))
    x[3] = 0
    x[6] = np.abs(x[6])
    return x.astype(np.float32).astype(DTYPES[dtype])


def check(device: Device, k_kind: Kind, v_kind: Kind, dim: int, dtype: str, hnd: bool) -> None:
    """Append in a shuffled order, and compare every byte of the cache."""
    count = PAGES * SIZE // 2
    slots = np.random.default_rng(0).permutation(PAGES * SIZE)[:count].astype(np.int64)
    slots[1] = -1
    written = slots >= 0
    page, slot = slots[written] // SIZE, slots[written] % SIZE
    inputs, wanted, caches, scales = [], [], [], []
    for seed, kind in ((1, k_kind), (2, v_kind)):
        x = rows(seed, count, dim, dtype)
        codes, scale = encode(np.ones((PAGES, SIZE, HEADS, dim), np.float32), kind)
        for y in (codes, scale):
            y.view(np.uint8)[...] = 0xEE
        before = [np.ascontiguousarray(y.swapaxes(1, 2) if hnd else y) for y in (codes, scale)]
        new, of_new = encode(x[written].astype(np.float32), kind)
        if kind.dtype == "nvfp4":  # scales may round to 0: codes of 0, without a sign
            new[np.repeat(of_new.astype(np.float32) == 0, kind.group // 2, axis=-1)] = 0
        codes[page, slot], scale[page, slot] = new, of_new
        inputs.append(device.put(x))
        caches.append(device.put(before[0]))
        scales.append(device.put(before[1]))
        wanted += [y.swapaxes(1, 2) if hnd else y for y in (codes, scale)]
    flashbsr.append_paged_kv_cache(
        *inputs, paged_kv_cache=tuple(caches), slot_mapping=device.put(slots),
        kv_layout="HND" if hnd else "NHD", k_scale=scales[0], v_scale=scales[1],
        kv_dtype=(k_kind.dtype, v_kind.dtype),
    )  # fmt: skip
    for name, got, want in zip(
        ("k", "k_scale", "v", "v_scale"),
        (caches[0], scales[0], caches[1], scales[1]), wanted, strict=True,
    ):  # fmt: skip
        found, want = (np.ascontiguousarray(y).view(np.uint8) for y in (device.get(got), want))
        np.testing.assert_array_equal(found, want, err_msg=name)


@everywhere
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("hnd", [False, True], ids=["NHD", "HND"])
def test_append(device: Device, kind: Kind, dim: int, dtype: str, hnd: bool) -> None:
    check(device, kind, kind, dim, dtype, hnd)


@everywhere
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_a_scale_of_nan(
    device: Device, kind: Kind, poison: float
) -> None:
    x = np.ones((1, HEADS, 128), np.float32).astype(DTYPES["bfloat16"])
    x[0, 1, 37] = poison
    codes, scale = encode(np.ones((1, SIZE, HEADS, 128), np.float32), kind)
    cache, scales = device.put(codes), device.put(np.ascontiguousarray(scale))
    flashbsr.append_paged_kv_cache(
        device.put(x), device.put(x), paged_kv_cache=(cache, device.put(codes)),
        slot_mapping=device.put(np.array([2])), k_scale=scales,
        v_scale=device.put(np.ascontiguousarray(scale)), kv_dtype=kind.dtype,
    )  # fmt: skip
    bad = np.isnan(device.get(scales).astype(np.float32)).reshape(1, SIZE, HEADS, -1)
    wanted = np.zeros_like(bad)
    wanted[0, 2, 1, 37 // (kind.group or 128)] = True
    np.testing.assert_array_equal(bad, wanted)


@everywhere
def test_two_types(device: Device) -> None:
    check(device, INT8, INT4_32, 128, "bfloat16", False)
