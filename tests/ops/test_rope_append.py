# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`rope_append_paged_kv_cache`, and appends whose indices name what does not exist."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
import reference
from cases import GARBAGE, strided
from harness import Device, assert_poison_survived
from reference import DTYPES
from test_page import Batch, equal_bits

# Relative error of a rounding to the type, and half of its smallest number.
ROUNDING = {
    "float32": (2.0**-24, 0.0),
    "float16": (2.0**-11, 2.0**-25),
    "bfloat16": (2.0**-8, 0.0),
    "float8_e4m3fn": (2.0**-4, 2.0**-10),
    "float8_e5m2": (2.0**-3, 2.0**-17),
}
ROWS = 36  # of Batch([5, 100, 0, 17], [5, 30, 0, 1]), without padding
PADDING = 3


def assert_near(got: np.ndarray, exact: np.ndarray) -> None:
    """Rounded once, after arithmetic in float32."""
    relative, smallest = ROUNDING[str(got.dtype)]
    exact = np.asarray(exact, np.float64)
    bound = relative * np.abs(exact) + smallest + 1e-5 * np.abs(exact).max()
    assert (np.abs(got.astype(np.float64) - exact) <= bound).all()


def stored_rows(cache: np.ndarray, batch: Batch, kv_layout: str) -> np.ndarray:
    """What lies in the slots of the batch's new rows."""
    slots = [
        (batch.kv_indices[batch.kv_indptr[b] + p // batch.page_size], p % batch.page_size)
        for b, p in zip(batch.batch_indices, batch.positions, strict=True)
    ]
    pages, tokens = np.array(slots).T
    return cache[pages, tokens] if kv_layout == "NHD" else cache[pages, :, tokens]


def padded(batch: Batch, device: Device) -> list[Any]:
    """Requests and positions of the new rows and of padding, then the page table."""
    where = (
        np.concatenate([batch.batch_indices, [-1] * PADDING]).astype(np.int32),
        np.concatenate([batch.positions, [0, GARBAGE, -7]]).astype(np.int32),
    )
    table = batch.kv_indices, batch.kv_indptr, batch.last_page_len
    return [*map(device.put, where), *map(device.put, table)]


@pytest.mark.parametrize("dim", [32, 128, 24])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", ["same", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"interleave": True, "rotary_dim": 16},
        {"llama31": (1, 4, 8192), "rope_theta": 5e5, "rope_scale": 8.0},
        {"table": True},
    ],
    ids=["plain", "interleaved", "llama31", "table"],
)
def test_rope_append(
    device: Device,
    dim: int,
    kv_layout: str,
    dtype: str,
    cache_dtype: str,
    options: dict[str, Any],
    rng: np.random.Generator,
) -> None:
    """Rotated rows of q and of the cache; padding is skipped, and its queries are copied."""
    batch = Batch([5, 100, 0, 17], [5, 30, 0, 1], 4)
    q, key, value = (
        strided(rng.standard_normal((ROWS + PADDING, heads, dim)).astype(DTYPES[dtype]), dtype)
        for heads in (6, 2, 2)
    )
    cache_dtype = dtype if cache_dtype == "same" else cache_dtype
    options = dict(options)
    freq = reference.rope_frequencies(
        options.get("rotary_dim", dim),
        options.get("rope_theta", 1e4),
        options.get("rope_scale", 1.0),
        options.get("llama31"),
    )
    if options.pop("table", False):
        angles = np.arange(128)[:, None] * freq
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        options["cos_sin_cache"] = device.put(table)
    cache = device.put_kv(batch.cache(kv_layout, 2, (dim, dim), cache_dtype))
    where, table = padded(batch, device)[:2], padded(batch, device)[2:]
    rows = map(device.put, (q, key, value))
    q_rope = flashbsr.rope_append_paged_kv_cache(
        *rows, *where, cache, *table, kv_layout, k_scale=0.5, v_scale=2.0, **options
    )
    got = device.get(q_rope)
    assert got.dtype == q.dtype
    np.testing.assert_array_equal(got[ROWS:], q[ROWS:])
    turned_q, turned_k = (
        reference.rotate(
            x[:ROWS].astype(np.float64),
            batch.positions,
            freq,
            interleave=options.get("interleave", False),
        )
        for x in (q, key)
    )
    assert_near(got[:ROWS], turned_q)
    wanted = turned_k / 0.5, value[:ROWS].astype(np.float64) / 2.0
    for x, want in zip(map(device.get, cache), wanted, strict=True):
        assert_near(stored_rows(x, batch, kv_layout), want)
        assert np.isnan(x.astype(np.float32)).sum() == x.size - want.size
        assert_poison_survived(x, "cache")


@pytest.mark.parametrize("dim", [64, 24])
@pytest.mark.parametrize("cache_dtype", ["float16", "float8_e4m3fn"])
def test_rope_append_by_slots(
    device: Device, cache_dtype: str, dim: int, rng: np.random.Generator
) -> None:
    """The bits of an append by a page table; queries of slots of -1 are rotated all the same."""
    batch = Batch([5, 100, 0, 17], [5, 30, 0, 1], 4)
    q, key, value = (
        rng.standard_normal((ROWS, heads, dim)).astype(np.float16) for heads in (6, 2, 2)
    )
    rows = [device.put(x) for x in (q, key, value)]
    angles = np.arange(100)[:, None] * reference.rope_frequencies(dim, 1e4, 1.0, None)
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    for options in ({"interleave": True}, {"cos_sin_cache": device.put(cos_sin)}):
        options |= {"k_scale": 0.5, "v_scale": 2.0}
        where, table = batch.on(device)
        expected = device.put_kv(batch.cache("HND", 2, (dim, dim), cache_dtype))
        rotated = flashbsr.rope_append_paged_kv_cache(
            *rows, *where, expected, *table, "HND", **options
        )
        kept = np.ones(ROWS, bool)
        kept[[0, 7, ROWS - 1]] = False
        for slots in (batch.slots, np.where(kept, batch.slots, -1)):
            cache = device.put_kv(batch.cache("HND", 2, (dim, dim), cache_dtype))
            out = flashbsr.rope_append_paged_kv_cache(
                *rows, positions=where[1], paged_kv_cache=cache, kv_layout="HND",
                slot_mapping=device.put(slots), **options,
            )  # fmt: skip
            equal_bits(device.get(out), device.get(rotated))
            for got, want in zip(map(device.get, cache), map(device.get, expected), strict=True):
                want = want.copy()
                for slot in batch.slots[slots < 0]:
                    want[slot // 4, :, slot % 4] = np.nan
                equal_bits(
                    got.astype(np.float32)[np.isfinite(got.astype(np.float32))],
                    want.astype(np.float32)[np.isfinite(want.astype(np.float32))],
                )
                assert (np.isnan(got.astype(np.float32)) == np.isnan(want.astype(np.float32))).all()


def test_padding_by_slots(device: Device) -> None:
    """A slot of -1 whose position lies outside of the table: the query is copied, not read past."""
    x = np.arange(1, 25, dtype=np.float32).reshape(3, 1, 8)
    cache = tuple(device.put(np.zeros((2, 4, 1, 8), np.float32)) for _ in "kv")
    table = np.concatenate([np.zeros((4, 4)), np.ones((4, 4))], axis=1).astype(np.float32)
    out = flashbsr.rope_append_paged_kv_cache(
        device.put(x), device.put(x), device.put(x),
        positions=device.put(np.array([1, GARBAGE, -5], np.int64)), paged_kv_cache=cache,
        slot_mapping=device.put(np.array([6, -1, -1])), cos_sin_cache=device.put(table),
    )  # fmt: skip
    got = device.get(out)
    np.testing.assert_array_equal(got[1:], x[1:])
    np.testing.assert_array_equal(got[0, 0], [-5, -6, -7, -8, 1, 2, 3, 4])
    np.testing.assert_array_equal(np.flatnonzero(device.get(cache[1]).reshape(8, 8)[:, 0]), [6])


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("q_dtype", ["float8_e4m3fn", "float8_e5m2", "float16"])
def test_queries_divided_by_a_scale(
    device: Device, q_dtype: str, coded: bool, rng: np.random.Generator
) -> None:
    """Rounded once, to the type of `q_out`; padding too; keys and values are as without."""
    batch = Batch([5, 100, 0, 17], [5, 30, 0, 1], 4)
    rows = (rng.standard_normal((ROWS + PADDING, 2, 64)) * 30).astype(np.float16)
    caches, q_scale = [], 0.25
    for scaled in (False, True):
        where, table = padded(batch, device)[:2], padded(batch, device)[2:]
        cache_dtype = "float8_e4m3fn" if coded else "float16"
        cache = device.put_kv(batch.cache("NHD", 2, (64, 64), cache_dtype))
        options: dict[str, Any] = {}
        if coded:
            scales = [np.full(tuple(x.shape)[:3], np.nan, np.float32) for x in cache]
            options = dict(zip(("k_scale", "v_scale"), map(device.put, scales), strict=True))
        if scaled:
            out = device.put(np.zeros(rows.shape, DTYPES[q_dtype]))
            options |= {"q_out": out, "q_scale": q_scale}
        got = flashbsr.rope_append_paged_kv_cache(
            *map(device.put, (rows, rows, rows)), *where, cache, *table, **options
        )
        caches.append([np.array(device.get(x)).view(np.uint8) for x in cache])
    assert got is out
    for without, there in zip(*caches, strict=True):
        np.testing.assert_array_equal(without, there)
    exact = rows.astype(np.float64)
    freq = reference.rope_frequencies(64, 1e4, 1.0, None)
    exact[:ROWS] = reference.rotate(exact[:ROWS], batch.positions, freq)
    most = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float16": 65504.0}[q_dtype]
    assert q_dtype != "float8_e4m3fn" or np.abs(exact / q_scale).max() > most
    assert_near(device.get(got), np.clip(exact / q_scale, -most, most))


def test_scales_of_queries_that_are_none(device: Device) -> None:
    x = device.put(np.ones((1, 1, 8), np.float32))
    cache = tuple(device.put(np.zeros((1, 4, 1, 8), np.float32)) for _ in "kv")
    options = {"positions": device.put(np.array([0])), "slot_mapping": device.put(np.array([0]))}
    for scale in (0.0, -1.0, np.inf, np.nan, 1e-45):
        with pytest.raises(flashbsr.FlashbsrError, match=r"^q_scale"):
            flashbsr.rope_append_paged_kv_cache(
                x, x, x, paged_kv_cache=cache, q_scale=float(scale), **options
            )
    with pytest.raises(flashbsr.DTypeError, match=r"^q_out"):
        flashbsr.rope_append_paged_kv_cache(
            x, x, x, paged_kv_cache=cache, q_out=device.put(np.ones((1, 1, 8), np.int8)), **options
        )


def test_q_in_place(device: Device, rng: np.random.Generator) -> None:
    """`q_out` may be `q`, and is returned."""
    batch = Batch([5, 100, 0, 17], [5, 30, 0, 1], 4)
    rows = rng.standard_normal((ROWS + PADDING, 2, 64)).astype(np.float16)
    results = []
    for in_place in (False, True):
        q = device.put(rows.copy())
        where, table = padded(batch, device)[:2], padded(batch, device)[2:]
        cache = device.put_kv(batch.cache("NHD", 2, (64, 64), "float16"))
        out = flashbsr.rope_append_paged_kv_cache(
            q, device.put(rows), device.put(rows), *where, cache, *table,
            q_out=q if in_place else None,
        )  # fmt: skip
        assert (out is q) == in_place
        results.append(device.get(out))
    equal_bits(*results)


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("batch_indices", 2, 7),
        ("batch_indices", 2, -3),
        ("positions", 2, 400),
        ("positions", 2, -1),
        ("kv_indices", 2, GARBAGE),
        ("kv_indices", 2, -1),
    ],
)
@pytest.mark.parametrize("rope", [False, True])
def test_what_does_not_exist(
    device: Device, name: str, at: int, value: int, rope: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU skips those rows and writes all others; asked to look, it refuses as the CPU does."""
    batch = Batch([9, 4], [9, 4], 4)
    getattr(batch, name)[at] = value
    rows = device.put(np.ones((13, 1, 8), np.float32))
    cache = device.put_kv(batch.cache("NHD", 1, (8, 8), "float32"))
    before = batch.cache("NHD", 1, (8, 8), "float32")
    where, table = batch.on(device)
    append: Any = flashbsr.append_paged_kv_cache
    arguments = [rows, rows, *where, cache, *table]
    if rope:
        append, arguments = flashbsr.rope_append_paged_kv_cache, [rows, *arguments]
    with monkeypatch.context() as patch:
        patch.setenv("FLASHBSR_CHECK", "1")
        with pytest.raises(flashbsr.IndexRangeError) as caught:
            append(*arguments)
    assert caught.value.argument == f"{name}[{at}]"
    for got, want in zip(cache, before, strict=True):
        equal_bits(device.get(got), want)
    if device.is_cuda:
        append(*arguments)
        # Row 2, or the one row on the third page of the first request.
        assert (device.get(cache[1]) == 1).sum() == 8 * (13 - 1)
        assert_poison_survived(device.get(cache[0]), "cache")
