# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`rope_append_paged_kv_cache(hadamard=True)`: rotated and transformed in float32, rounded once."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
import reference
from cases import strided
from flashbsr.errors import UnsupportedError
from harness import Device, assert_poison_survived
from kv_codes import INT4_32, INT8, NVFP4, Kind, decode, encode
from reference import DTYPES
from test_hadamard import matrix
from test_page import Batch, equal_bits
from test_rope_append import PADDING, ROWS, assert_near, padded, stored_rows

ROTATIONS: dict[str, dict[str, Any]] = {
    "halves": {},
    "interleaved": {"interleave": True},
    "part": {"rotary_dim": 16},
    "table": {"table": True},
}


def turned(x: np.ndarray, positions: np.ndarray, freq: np.ndarray, interleave: bool) -> np.ndarray:
    """What heads become, in float64."""
    rotated = reference.rotate(x.astype(np.float64), positions, freq, interleave=interleave)
    signs = np.sign(matrix(x.shape[-1])).astype(np.float64)
    return np.asarray(rotated @ signs / np.sqrt(x.shape[-1]))


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", ["same", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ROTATIONS)
def test_against_float64(
    device: Device,
    name: str,
    cache_dtype: str,
    dtype: str,
    dim: int,
    rng: np.random.Generator,
) -> None:
    """Queries and keys; values and the queries of padding are as without."""
    batch = Batch([5, 100, 0, 17], [5, 30, 0, 1], 4)
    q, key, value = (
        strided(rng.standard_normal((ROWS + PADDING, heads, dim)).astype(DTYPES[dtype]), dtype)
        for heads in (6, 3, 3)
    )
    cache_dtype = dtype if cache_dtype == "same" else cache_dtype
    options = dict(ROTATIONS[name])
    freq = reference.rope_frequencies(options.get("rotary_dim", dim))
    if options.pop("table", False):
        angles = np.arange(128)[:, None] * freq
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        options["cos_sin_cache"] = device.put(table)
    cache = device.put_kv(batch.cache("NHD", 3, (dim, dim), cache_dtype))
    where, pages = padded(batch, device)[:2], padded(batch, device)[2:]
    out = flashbsr.rope_append_paged_kv_cache(
        *map(device.put, (q, key, value)), *where, cache, *pages,
        k_scale=0.5, v_scale=2.0, hadamard=True, **options,
    )  # fmt: skip
    got, interleave = device.get(out), bool(options.get("interleave"))
    np.testing.assert_array_equal(got[ROWS:], q[ROWS:])
    assert_near(got[:ROWS], turned(q[:ROWS], batch.positions, freq, interleave))
    wanted = (
        turned(key[:ROWS], batch.positions, freq, interleave) / 0.5,
        value[:ROWS].astype(np.float64) / 2.0,
    )
    for x, want in zip(map(device.get, cache), wanted, strict=True):
        assert_near(stored_rows(x, batch, "NHD"), want)
        assert np.isnan(x.astype(np.float32)).sum() == x.size - want.size
        assert_poison_survived(x, "cache")


@pytest.mark.parametrize("kind", [INT8, INT4_32, NVFP4], ids=str)
@pytest.mark.parametrize("dim", [64, 96])
def test_codes(kind: Kind, dim: int, rng: np.random.Generator) -> None:
    """Of keys, behind both; values are those of an append without."""
    q, key, value = (rng.standard_normal((5, 2, dim)).astype(np.float32) for _ in range(3))
    positions = np.array([0, 5, 17, 3, 9], np.int32)
    page, slot = np.array([1, 0, 2, 2]), np.array([3, 0, 1, 2])
    caches, scales = [], []
    for _ in "kv":
        codes, scale = encode(np.zeros((3, 4, 2, dim), np.float32), kind)
        caches.append(codes)
        scales.append(np.array(scale))
    flashbsr.rope_append_paged_kv_cache(
        q, key, value, positions=positions, paged_kv_cache=tuple(caches),
        slot_mapping=np.append(page * 4 + slot, -1), k_scale=scales[0], v_scale=scales[1],
        kv_dtype=kind.dtype, hadamard=True,
    )  # fmt: skip
    exact = turned(key, positions, reference.rope_frequencies(dim), False)[:4]
    found = decode(caches[0][page, slot], scales[0][page, slot], kind)
    direct = decode(*encode(exact.astype(np.float32), kind), kind)
    # Angles differ in the last bit of a float, and a code next to a midpoint may follow.
    assert (np.abs(found - direct) > 1e-4).mean() < 0.01
    codes, scale = encode(value[:4], kind)
    equal_bits(caches[1][page, slot], codes)
    equal_bits(np.asarray(scales[1][page, slot]), np.asarray(scale))


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("count", [36, 700])
def test_in_place_and_by_slots(
    device: Device, count: int, dim: int, rng: np.random.Generator
) -> None:
    """The bits of a query array of its own; a query whose slot is -1 is transformed, too."""
    rows = rng.standard_normal((count, 5, dim)).astype(np.float16)
    positions = rng.integers(0, 1000, count).astype(np.int32)
    slots = rng.permutation(count).astype(np.int64)
    slots[1] = -1
    results = []
    for in_place in (False, True):
        q = device.put(rows.copy())
        cache = tuple(device.put(np.full((count, 1, 5, dim), np.nan, np.float16)) for _ in "kv")
        out = flashbsr.rope_append_paged_kv_cache(
            q, device.put(rows), device.put(rows), positions=device.put(positions),
            paged_kv_cache=cache, slot_mapping=device.put(slots),
            q_out=q if in_place else None, hadamard=True,
        )  # fmt: skip
        results.append([np.array(device.get(x)) for x in (out, *cache)])
    for a, b in zip(*results, strict=True):
        equal_bits(a, b)
    out, k, v = results[0]
    kept = slots >= 0
    equal_bits(out[kept], k[slots[kept], 0])
    equal_bits(rows[kept], v[slots[kept], 0])
    exact = turned(rows, positions, reference.rope_frequencies(dim), False)
    assert_near(out, exact)


def test_float8_queries(device: Device, rng: np.random.Generator) -> None:
    rows = (rng.standard_normal((40, 2, 128)) * 30).astype(np.float16)
    positions = np.arange(40, dtype=np.int32)
    out = device.put(np.zeros(rows.shape, DTYPES["float8_e4m3fn"]))
    cache = tuple(device.put(np.zeros((40, 1, 2, 128), np.float16)) for _ in "kv")
    flashbsr.rope_append_paged_kv_cache(
        *(device.put(rows) for _ in range(3)), positions=device.put(positions),
        paged_kv_cache=cache, slot_mapping=device.put(np.arange(40)), q_out=out, q_scale=0.5,
        hadamard=True,
    )  # fmt: skip
    exact = turned(rows, positions, reference.rope_frequencies(128), False) / 0.5
    assert_near(device.get(out), np.clip(exact, -448, 448))


def test_products_stay(device: Device, rng: np.random.Generator) -> None:
    """Attention over keys that were transformed, by queries that were, is what it was."""
    tokens, dim = 37, 64
    x = [rng.standard_normal((tokens, 4, dim)).astype(np.float32) for _ in range(3)]
    outputs = []
    for hadamard in (False, True):
        cache = tuple(device.put(np.zeros((3, 16, 4, dim), np.float32)) for _ in "kv")
        q = flashbsr.rope_append_paged_kv_cache(
            *map(device.put, x), positions=device.put(np.arange(tokens)), paged_kv_cache=cache,
            slot_mapping=device.put(np.arange(tokens)), hadamard=hadamard,
        )  # fmt: skip
        rows = [np.asarray(device.get(y), np.float64) for y in (q, *cache)]
        logits = np.einsum("ihd,jhd->hij", rows[0], rows[1].reshape(48, 4, dim)[:tokens])
        outputs.append(logits)
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-4)


def test_mistakes_are_named(device: Device) -> None:
    def append(q_dim: int, k_dim: int) -> None:
        q, k = (device.put(np.ones((2, 1, dim), np.float32)) for dim in (q_dim, k_dim))
        cache = tuple(device.put(np.zeros((1, 4, 1, k_dim), np.float32)) for _ in "kv")
        where = device.put(np.arange(2))
        flashbsr.rope_append_paged_kv_cache(
            q, k, k, positions=where, paged_kv_cache=cache, slot_mapping=where, hadamard=True,
            rotary_dim=8,
        )  # fmt: skip

    with pytest.raises(UnsupportedError, match=r"hadamard: got head dims 56 of q and 56 of k"):
        append(56, 56)
    with pytest.raises(UnsupportedError, match=r"hadamard: got head dims 32 of q and 64 of k"):
        append(32, 64)
    if device.is_cuda:
        with pytest.raises(UnsupportedError, match=r"hadamard: .* up to 512 on a GPU"):
            append(1024, 1024)
