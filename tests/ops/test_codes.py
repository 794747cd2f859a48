# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Appends that quantise, and reading back: bit for bit the formulas of docs/kv-quantization.md."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
from flashbsr.errors import DTypeError, FlashbsrError, ShapeError
from kv_codes import (
    FP8,
    INT4,
    INT4_32,
    INT8,
    INT8_HALF,
    KINDS,
    NVFP4,
    Kind,
    decode,
    encode,
    hostile,
)
from reference import DTYPES, rope_frequencies, rotate

HEADS, DIM, SIZE, PAGES = 3, 64, 4, 5


def empty(kind: Kind, kv_layout: str) -> tuple[np.ndarray, np.ndarray]:
    """A cache and its scales, strided views of garbage."""
    codes, scale = encode(np.ones((PAGES, SIZE, HEADS, DIM), np.float32), kind)
    codes = np.frombuffer(b"\xee" * codes.nbytes, codes.dtype).reshape(codes.shape)
    scale = np.frombuffer(b"\xee" * scale.nbytes, scale.dtype).reshape(scale.shape)
    if kv_layout == "HND":
        codes, scale = codes.swapaxes(1, 2), scale.swapaxes(1, 2)
    return hostile(codes), hostile(scale)


def rows(seed: int, count: int, dtype: str) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((count, HEADS, DIM)) * 3 + 0.5
    return x.astype(np.float32).astype(DTYPES[dtype])


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


SLOTS = np.array([7, -1, 0, 18, 19], np.int64)
WRITTEN = [0, 2, 3, 4]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_append_writes_codes_and_scales(kind: Kind, dtype: str, kv_layout: str) -> None:
    key, value = rows(1, len(SLOTS), dtype), rows(2, len(SLOTS), dtype)
    (k, k_scale), (v, v_scale) = empty(kind, kv_layout), empty(kind, kv_layout)
    flashbsr.append_paged_kv_cache(
        key, value, paged_kv_cache=(k, v), slot_mapping=SLOTS, kv_layout=kv_layout,
        k_scale=k_scale, v_scale=v_scale, kv_dtype=kind.dtype,
    )  # fmt: skip
    for x, cache, scale in ((key, k, k_scale), (value, v, v_scale)):
        codes, scales = empty(kind, "NHD")
        page, slot = SLOTS[WRITTEN] // SIZE, SLOTS[WRITTEN] % SIZE
        codes[page, slot], scales[page, slot] = encode(x[WRITTEN].astype(np.float32), kind)
        turn = (lambda y: y.swapaxes(1, 2)) if kv_layout == "HND" else (lambda y: y)
        # What was not written is as it was.
        assert same(turn(cache), codes)
        assert same(turn(scale), scales)
        back = flashbsr.dequantize_kv_cache(cache, scale, kv_dtype=kind.dtype)
        means = decode(codes[page, slot], scales[page, slot], kind)
        np.testing.assert_array_equal(turn(back)[page, slot], means.astype(np.float32))
        error = np.abs(means - x[WRITTEN].astype(np.float64)).max(-1)
        top = np.abs(x[WRITTEN].astype(np.float64)).max(-1)
        bound = {"int8": 1 / 250, "int4": 1 / 14, "nvfp4": 1 / 5, "float8_e4m3fn": 1 / 28}
        assert (error <= top * bound.get(kind.dtype, 1 / 14)).all()


def test_append_by_a_page_table_and_a_stacked_cache() -> None:
    key, value = rows(1, 2, "bfloat16"), rows(2, 2, "bfloat16")
    cache = np.zeros((PAGES, 2, SIZE, HEADS, DIM), np.int8)
    k_scale, v_scale = np.full((2, PAGES, SIZE, HEADS), np.nan, np.float16)
    flashbsr.append_paged_kv_cache(
        key, value, np.array([0, 0]), np.array([3, 4]), cache,
        np.array([2, 1]), np.array([0, 2]), np.array([1]),
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    for x, half, scale in ((key, 0, k_scale), (value, 1, v_scale)):
        codes, scales = encode(x.astype(np.float32), INT8_HALF)
        assert same(cache[[2, 1], half, [3, 0]], codes)
        assert same(scale[[2, 1], [3, 0]], scales)
        assert np.isnan(scale).sum() == scale.size - 2 * HEADS


@pytest.mark.parametrize("kind", [INT8, INT4_32, NVFP4], ids=str)
def test_keys_are_rotated_before_they_are_rounded_once(kind: Kind) -> None:
    q, key, value = (rows(i, 4, "float32") for i in range(3))
    positions = np.array([0, 5, 17, 3], np.int32)
    (k, k_scale), (v, v_scale) = empty(kind, "NHD"), empty(kind, "NHD")
    slots = np.array([3, 9, 0, -1])
    flashbsr.rope_append_paged_kv_cache(
        q, key, value, positions=positions, paged_kv_cache=(k, v), slot_mapping=slots,
        k_scale=k_scale, v_scale=v_scale, kv_dtype=kind.dtype,
    )  # fmt: skip
    turned = rotate(key, positions, rope_frequencies(DIM), dtype=np.float64)
    page, slot = slots[:3] // SIZE, slots[:3] % SIZE
    means = decode(k[page, slot], k_scale[page, slot], kind)
    direct = decode(*encode(turned[:3].astype(np.float32), kind), kind)
    # Angles differ in the last bit of a float, and a code next to a midpoint may follow.
    assert (np.abs(means - direct) > 1e-4).mean() < 0.01
    codes, scales = encode(value[:3], kind)
    assert same(v[page, slot], codes)
    assert same(v_scale[page, slot], scales)


def one(x: Any, kind: Kind, number: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scale and value of one row."""
    row = np.asarray(x, np.float32).reshape(1, 1, -1)
    codes, scale = (np.array(y[None]) for y in encode(np.ones_like(row), kind))
    flashbsr.append_paged_kv_cache(
        row, row, paged_kv_cache=(codes, codes.copy()), slot_mapping=np.array([0]),
        k_scale=(scale, number), v_scale=scale.copy(), kv_dtype=kind.dtype,
    )  # fmt: skip
    back = flashbsr.dequantize_kv_cache(codes, (scale, number), kv_dtype=kind.dtype)
    return codes.reshape(-1), scale.reshape(-1), back.reshape(-1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_at_the_edges(kind: Kind) -> None:
    assert not one(np.zeros(64), kind)[2].any()
    for poison in (np.nan, np.inf, -np.inf):
        x = np.ones(64)
        x[5] = poison
        assert np.isnan(one(x, kind)[2][: kind.group or 64]).all()
        if kind.group:  # other groups do not know
            assert np.isfinite(one(x, kind)[2][kind.group :]).all()
    for size in (1e-44, 1e-38, 1e-6, 60000.0, 1e30):
        x = np.linspace(-1, 1, 64, dtype=np.float32) * np.float32(size)
        back = one(x, kind)[2]
        assert np.isfinite(back).all(), size
        fits = size > 1e-30 if kind.scale == "float32" else 1 < size < 1e6
        if fits and kind.dtype != "nvfp4":
            assert np.abs(back - x).max() <= size / 7


def test_a_row_far_from_zero_keeps_its_place_in_int4() -> None:
    back = one(np.linspace(10, 11, 64), INT4)[2]
    assert np.abs(back - np.linspace(10, 11, 64)).max() < 0.4


def test_the_number_of_a_tensor() -> None:
    x = np.random.default_rng(0).standard_normal(64) * 1e4  # scales of e4m3 end at 448
    codes, scale, back = one(x, NVFP4, 64.0)
    expected = encode((x.astype(np.float32) / 64)[None], NVFP4)
    assert same(codes, expected[0])
    assert same(scale, expected[1])
    assert np.abs(back - x).max() < np.abs(x).max() / 5


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dequantize_into(dtype: str) -> None:
    codes, scale = encode(rows(0, 7, "float32"), FP8)
    back = flashbsr.dequantize_kv_cache(codes, scale, dtype=dtype)
    assert back.dtype == DTYPES[dtype]
    assert same(back, decode(codes, scale, FP8).astype(np.float32).astype(DTYPES[dtype]))
    out = np.empty_like(back)
    assert flashbsr.dequantize_kv_cache(codes, scale, out=out) is out
    assert same(out, back)


def test_torch_and_vllms_pages() -> None:
    """A page of bytes as vLLM has it for int4: codes, then a scale with its zero point inside."""
    torch = pytest.importorskip("torch")
    pages = torch.zeros(PAGES, HEADS, SIZE, 2 * (DIM // 2 + 4), dtype=torch.uint8)
    half = DIM // 2
    k, v = pages[..., :half], pages[..., half : 2 * half]
    scales = pages[..., 2 * half :].view(torch.float32)
    key, value = (torch.from_numpy(rows(i, 2, "float32")) for i in range(2))
    flashbsr.append_paged_kv_cache(
        key, value, paged_kv_cache=(k, v), slot_mapping=torch.tensor([1, 6]), kv_layout="HND",
        k_scale=scales[..., 0], v_scale=scales[..., 1], kv_dtype="int4",
    )  # fmt: skip
    codes, scale = encode(key.numpy(), INT4)
    assert same(k.numpy()[[0, 1], :, [1, 2]], codes)
    assert same(scales.numpy()[[0, 1], :, [1, 2], 0], scale)


def test_mistakes_are_named() -> None:
    key = rows(0, 1, "float32")
    slot = np.array([0])
    k, scale = empty(INT8, "NHD")
    four, four_scale = empty(INT4, "NHD")

    def append(cache: Any, **scales: Any) -> None:
        flashbsr.append_paged_kv_cache(
            key, key, paged_kv_cache=(cache, cache.copy()), slot_mapping=slot, **scales
        )

    with pytest.raises(DTypeError, match="uint8"):
        append(four, k_scale=four_scale, v_scale=four_scale.copy())
    with pytest.raises(FlashbsrError, match="int4 without scales"):
        append(four, kv_dtype="int4")
    with pytest.raises(ShapeError, match="k_scale"):
        append(k, k_scale=scale[:-1], v_scale=scale)
    with pytest.raises(DTypeError, match="k_scale"):
        append(k, k_scale=np.zeros(scale.shape, np.int32), v_scale=scale)
    with pytest.raises(DTypeError, match="scales of every token"):
        append(np.zeros(k.shape, np.float32), k_scale=scale, v_scale=scale)
    bytes_ = np.zeros((PAGES, SIZE, HEADS, DIM), np.int8)
    with pytest.raises(FlashbsrError, match="memory that the cache has"):
        append(bytes_, k_scale=bytes_.view(np.float32)[..., 0], v_scale=scale)
    with pytest.raises(FlashbsrError, match="tuple of 1"):
        append(k, k_scale=(scale,), v_scale=scale)
    with pytest.raises(ShapeError, match="scale"):
        flashbsr.dequantize_kv_cache(k, scale[:, :, :1])
    with pytest.raises(FlashbsrError, match="scale"):
        flashbsr.dequantize_kv_cache(k, (scale, 1.0, 2.0))
