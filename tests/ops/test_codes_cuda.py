# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Appends that quantise on a GPU: the same bits as docs/kv-quantization.md's formulas give.

Caches that are read back there: the same bits as on the host. Keys by RoPE: the codes of the host
but where an angle's last bits decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashbsr
import numpy as np
import pytest
from harness import DEVICES, Device
from kv_codes import E5M2, INT4_32, INT8, INT8_HALF, KINDS, NVFP4, Kind, encode
from reference import DTYPES

GPUS = [device for device in DEVICES if device.is_cuda]
if not GPUS:
    pytest.skip("no GPU, or a build or a PyTorch without CUDA", allow_module_level=True)

HEADS, SIZE, PAGES = 3, 4, 50
everywhere = pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)


def rows(seed: int, count: int, heads: int, dim: int, dtype: str) -> np.ndarray:
    """Rows of all sizes; among them zeros of either sign, and elements of one sign."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, heads, dim)) * 2.0 ** rng.integers(-8, 8, (count, heads, 1))
    x[3] = 0
    x[6] = np.abs(x[6])
    x[7, :, ::3] = -0.0
    return x.astype(np.float32).astype(DTYPES[dtype])


def check(
    device: Device, k_kind: Kind, v_kind: Kind, dim: int, dtype: str, hnd: bool,
    pages: int = PAGES, heads: int = HEADS,
) -> None:  # fmt: skip
    """Append in a shuffled order, and compare every byte of the cache."""
    count = pages * SIZE // 2
    slots = np.random.default_rng(0).permutation(pages * SIZE)[:count].astype(np.int64)
    slots[1] = slots[-1] = -1
    written = slots >= 0
    page, slot = slots[written] // SIZE, slots[written] % SIZE
    inputs, wanted, caches, scales = [], [], [], []
    for seed, kind in ((1, k_kind), (2, v_kind)):
        x = rows(seed, count, heads, dim, dtype)
        codes, scale = encode(np.ones((pages, SIZE, heads, dim), np.float32), kind)
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
@pytest.mark.parametrize(("k_kind", "v_kind"), [(INT8_HALF, INT4_32), (E5M2, NVFP4)], ids=str)
def test_a_warp_that_stays_for_several_tokens(device: Device, k_kind: Kind, v_kind: Kind) -> None:
    # 106510 tokens of two items: 13 tokens in each, and one in the last.
    check(device, k_kind, v_kind, 64, "bfloat16", hnd=False, pages=53255, heads=1)


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


@everywhere
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_dequantize(device: Device, dim: int, dtype: str, kind: Kind) -> None:
    """Of HND pages with garbage between rows, a slot of NaN, and scales times a number."""
    x = rows(3, PAGES * SIZE, HEADS, dim, "float32").reshape(PAGES, SIZE, HEADS, dim)
    codes, scale = encode(x, kind)
    scale[1, 2] = np.nan
    wide = np.full((PAGES, HEADS, SIZE, codes.shape[-1] + 16), 0x11, np.uint8).view(codes.dtype)
    wide[..., : codes.shape[-1]] = codes.swapaxes(1, 2)

    def read(put: Callable[[np.ndarray], Any], **options: Any) -> Any:
        held = put(wide)[..., : codes.shape[-1]]
        return flashbsr.dequantize_kv_cache(
            held.swapaxes(1, 2), (put(scale), 0.7), kv_dtype=kind.dtype, **options
        )

    wanted = read(lambda y: y, dtype=dtype)
    assert np.isnan(wanted[1, 2].astype(np.float32)).all()
    found = device.get(read(device.put, dtype=dtype))
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


@everywhere
def test_dequantize_tokens_into(device: Device) -> None:
    """Rows without pages, into rows of other strides: nothing beside them is written."""
    codes, scale = encode(rows(5, 37, HEADS, 64, "float32"), INT8)
    wanted = flashbsr.dequantize_kv_cache(codes, scale, dtype="float16")
    room = device.put(np.full((37, HEADS, 80), 7, np.float16))
    out = room[..., 8:72]
    assert flashbsr.dequantize_kv_cache(device.put(codes), device.put(scale), out=out) is out
    found = device.get(room)
    np.testing.assert_array_equal(found[..., 8:72], wanted)
    assert (found[..., :8] == 7).all()
    assert (found[..., 72:] == 7).all()


#: Codes that are neighbours mean values that differ by no more than this of a group's largest.
STEP = {
    "int8": 1 / 127,
    "float8_e4m3fn": 1 / 14,
    "float8_e5m2": 1 / 7,
    "int4": 2 / 15,
    "nvfp4": 1 / 3,
}


@everywhere
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("hadamard", [False, True], ids=["", "hadamard"])
@pytest.mark.parametrize("table", [False, True], ids=["angles", "table"])
@pytest.mark.parametrize(("dim", "rotary", "interleave"), [
    (64, 64, False), (128, 128, True), (192, 72, False), (64, 36, False), (128, 42, True),
])  # fmt: skip
def test_rope_append(
    device: Device, dim: int, rotary: int, interleave: bool, table: bool, hadamard: bool, kind: Kind
) -> None:
    """Keys by RoPE, and by a Hadamard matrix, then codes; a slot of -1 is written nowhere."""
    count = PAGES * SIZE // 2
    rng = np.random.default_rng(0)
    slots = rng.permutation(PAGES * SIZE)[:count].astype(np.int64)
    slots[1] = -1
    q, k, v = (rows(seed, count, HEADS, dim, "bfloat16") for seed in range(3))
    positions = rng.integers(0, 500 if table else 100000, count).astype(np.int32)
    options: dict[str, Any] = {"rotary_dim": rotary}
    if table:
        options = {"cos_sin_cache": rng.uniform(-1, 1, (500, rotary)).astype(np.float32)}

    def run(put: Callable[[np.ndarray], Any]) -> tuple[Any, list[Any], list[Any]]:
        caches, scales = [], []
        for _ in range(2):
            codes, scale = encode(np.ones((PAGES, SIZE, HEADS, dim), np.float32), kind)
            for y in (codes, scale):
                y.view(np.uint8)[...] = 0x2E
            caches.append(put(codes))
            scales.append(put(np.ascontiguousarray(scale)))
        out = flashbsr.rope_append_paged_kv_cache(
            put(q), put(k), put(v), paged_kv_cache=tuple(caches), slot_mapping=put(slots),
            positions=put(positions), interleave=interleave, k_scale=scales[0], v_scale=scales[1],
            kv_dtype=kind.dtype, hadamard=hadamard,
            **{n: put(y) if n[0] == "c" else y for n, y in options.items()},
        )  # fmt: skip
        return out, caches, scales

    host_q, host, host_scales = run(np.copy)
    out, caches, scales = run(device.put)
    found, found_scales = ([device.get(y) for y in group] for group in (caches, scales))
    np.testing.assert_array_equal(found[1].view(np.uint8), host[1].view(np.uint8))
    np.testing.assert_array_equal(found_scales[1].view(np.uint8), host_scales[1].view(np.uint8))
    size = max(float(np.abs(host_q.astype(np.float32)).max()), 1.0)
    np.testing.assert_allclose(
        device.get(out).astype(np.float32), host_q.astype(np.float32), rtol=2**-7, atol=1e-5 * size
    )
    different = found[0].view(np.uint8) != host[0].view(np.uint8)
    assert different.mean() < 0.01
    wanted, got = (
        flashbsr.dequantize_kv_cache(codes, scale, kv_dtype=kind.dtype)
        for codes, scale in ((host[0], host_scales[0]), (found[0], found_scales[0]))
    )
    groups = wanted.reshape(*wanted.shape[:-1], -1, kind.group or dim)
    step = STEP[kind.dtype] * np.abs(groups).max(-1, keepdims=True)
    assert (np.abs(got.reshape(groups.shape) - groups) <= 1.01 * step + 1e-9).all()
