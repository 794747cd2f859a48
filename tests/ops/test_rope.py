# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`apply_rope` and its kin against the rotation's formula."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
import reference
from cases import strided
from compare import assert_rounded
from harness import CPU, Device, assert_poison_survived
from reference import DTYPES, rope_frequencies, rotate, rounded

TYPES = ["float32", "float16", "bfloat16"]
LLAMA31 = {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}


def some_heads(rng: np.random.Generator, rows: int, dim: int, dtype: str) -> list[np.ndarray]:
    """Q with 3 heads and k with 1, strided."""
    return [
        strided(rng.standard_normal((rows, heads, dim)).astype(DTYPES[dtype]), dtype)
        for heads in (3, 1)
    ]


def rotated(device: Device, function: Any, q: Any, k: Any, *args: Any, **options: Any) -> Any:
    """`function` of arrays on the device, index arrays too; both results."""
    args = tuple(device.put(x) if isinstance(x, np.ndarray) else x for x in args)
    return map(device.get, function(device.put(q), device.put(k), *args, **options))


def check(
    got: np.ndarray, x: np.ndarray, positions: np.ndarray, freq: np.ndarray, interleave: bool
) -> None:
    """Against float64; the working precision computes positions times frequencies in float32."""
    exact = rotate(x, positions, freq, interleave=interleave)
    working = rotate(x, positions, freq, interleave=interleave, dtype=np.float32)
    name = str(x.dtype)
    size = np.abs(rotate(x, positions, 0 * freq)).max(axis=-1, keepdims=True)
    # An angle of p radians is off by p * 2^-24 in float32.
    angle = np.minimum(1 + np.abs(positions).astype(float) * freq.max(), 2.0**24)[:, None, None]
    assert got.dtype == x.dtype
    assert_rounded(got, exact, rounded(working, name), size * angle, "rope")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize(
    ("dim", "rotary_dim"), [(64, None), (128, 128), (64, 32), (24, 8), (80, 80)]
)
def test_apply_rope_pos_ids(
    dtype: str,
    interleave: bool,
    dim: int,
    rotary_dim: int | None,
    rng: np.random.Generator,
    device: Device,
) -> None:
    q, k = some_heads(rng, 19, dim, dtype)
    positions = rng.integers(0, 5000, 19).astype(np.int32)
    freq = rope_frequencies(rotary_dim or dim, 1e4, 2.0)
    for index_type in (np.int32, np.int64):
        rope = flashbsr.apply_rope_pos_ids
        args = positions.astype(index_type), rotary_dim, interleave, 2.0, 1e4
        q_out, k_out = rotated(device, rope, q, k, *args)
        check(q_out, q, positions, freq, interleave)
        check(k_out, k, positions, freq, interleave)


def test_positions_restart_in_every_request(rng: np.random.Generator, device: Device) -> None:
    """`apply_rope`: token t of request i sits at ``offsets[i] + t``."""
    q, k = some_heads(rng, 12, 32, "float32")
    indptr, offsets = np.array([0, 4, 4, 12], np.int32), np.array([100, 7, 0], np.int32)
    positions = np.concatenate([100 + np.arange(4), np.arange(8)])
    q_out, k_out = rotated(device, flashbsr.apply_rope, q, k, indptr, offsets)
    check(q_out, q, positions, rope_frequencies(32), False)
    check(k_out, k, positions, rope_frequencies(32), False)


@pytest.mark.parametrize("interleave", [False, True])
def test_llama31(interleave: bool, rng: np.random.Generator, device: Device) -> None:
    q, k = some_heads(rng, 9, 128, "float32")
    positions = np.array([0, 1, 2, 100, 1000, 8191, 8192, 20000, 131071], np.int32)
    freq = rope_frequencies(128, 5e5, 8, (1, 4, 8192))
    plain = rope_frequencies(128, 5e5, 1)
    assert (freq[:28] == plain[:28]).all()  # short wavelengths stay
    np.testing.assert_allclose(freq[-10:], plain[-10:] / 8)  # long ones are scaled
    rope: Any = flashbsr.apply_llama31_rope_pos_ids
    q_out, k_out = rotated(device, rope, q, k, positions, None, interleave)
    check(q_out, q, positions, freq, interleave)
    check(k_out, k, positions, freq, interleave)
    rope = flashbsr.apply_llama31_rope
    q_out, k_out = rotated(
        device,
        rope,
        q,
        k,
        np.array([0, 9], np.int32),
        np.array([5000], np.int32),
        None,
        interleave,
        4.0,
        1e4,
        2,
        8,
        1024,
    )
    freq = rope_frequencies(128, 1e4, 4, (2, 8, 1024))
    check(q_out, q, 5000 + np.arange(9), freq, interleave)
    check(k_out, k, 5000 + np.arange(9), freq, interleave)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("apply_rope", (np.array([0, 3, 8], np.int32), np.array([4, 0], np.int32))),
        ("apply_rope_pos_ids", (np.arange(8, dtype=np.int32),)),
        ("apply_llama31_rope", (np.array([0, 3, 8], np.int32), np.array([4, 0], np.int32))),
        ("apply_llama31_rope_pos_ids", (np.arange(8, dtype=np.int32),)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_in_place(
    dtype: str, name: str, args: tuple[Any, ...], rng: np.random.Generator, device: Device
) -> None:
    """The twin writes the same bits into its arguments, and nothing around them."""
    before = some_heads(rng, 8, 48, dtype)
    arrays = [device.put(strided(x, dtype)) for x in before]
    args = tuple(map(device.put, args))
    wanted = getattr(flashbsr, name)(*arrays, *args, rotary_dim=32)
    for x, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(device.get(x), old)
    assert getattr(flashbsr, f"{name}_inplace")(*arrays, *args, rotary_dim=32) is None
    for x, want in zip(arrays, wanted, strict=True):
        np.testing.assert_array_equal(device.get(x), device.get(want))
        assert_poison_survived(device.get(x), name)
    q = device.get(arrays[0])
    np.testing.assert_array_equal(q[..., 32:], before[0][..., 32:])
    assert (q[1:, :, :32] != before[0][1:, :, :32]).any()


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rotary_dim", [64, 16])
def test_cos_sin_cache(
    is_neox: bool, dtype: str, rotary_dim: int, rng: np.random.Generator, device: Device
) -> None:
    """Angles from a table ``[max_position, rotary_dim]``: cosines, then sines."""
    rows, size = 11, 64
    freq = rope_frequencies(rotary_dim)
    angles = np.arange(300)[:, None] * freq
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    positions = rng.integers(0, 300, rows).astype(np.int64)
    query, key = (
        rng.standard_normal((rows, heads * size)).astype(DTYPES[dtype]) for heads in (3, 1)
    )
    where, angle = device.put(positions), device.put(table)
    results = flashbsr.apply_rope_with_cos_sin_cache(
        where, device.put(query), device.put(key), size, angle, is_neox
    )
    q_out, k_out = map(device.get, results)
    for got, x in ((q_out, query), (k_out, key)):
        assert got.shape == x.shape
        shape = (rows, -1, size)
        check(got.reshape(shape), x.reshape(shape), positions, freq, not is_neox)
    copies = device.put(query.copy()), device.put(key.copy())
    in_place = flashbsr.apply_rope_with_cos_sin_cache_inplace
    assert in_place(where, *copies, size, angle, is_neox) is None
    for copy, want in zip(copies, (q_out, k_out), strict=True):
        np.testing.assert_array_equal(device.get(copy), want)


def test_position_zero_is_the_identity(rng: np.random.Generator, device: Device) -> None:
    q, k = some_heads(rng, 5, 64, "bfloat16")
    q_out, k_out = rotated(device, flashbsr.apply_rope_pos_ids, q, k, np.zeros(5, np.int32))
    np.testing.assert_array_equal(q_out, q)
    np.testing.assert_array_equal(k_out, k)


def test_rope_in_attention_is_rope_before_attention(
    rng: np.random.Generator, device: Device
) -> None:
    """ROPE_LLAMA equals rotating q and k first; only the relative position counts."""
    dtype = "float32" if device is CPU else "float16"
    q, k = (device.put(x) for x in some_heads(rng, 30, 64, dtype))
    v = device.put(rng.standard_normal(tuple(k.shape)).astype(DTYPES[dtype]))
    scaling = {"rope_scale": 2.0, "rope_theta": 1e5}
    spec = flashbsr.AttentionSpec(causal=True, pos_encoding_mode="ROPE_LLAMA", **scaling)
    fused = flashbsr.attention(q[None], k[None], v[None], spec=spec)
    for shift in (0, 1000):
        positions = device.put(np.arange(shift, shift + 30, dtype=np.int32))
        q_rot, k_rot = flashbsr.apply_rope_pos_ids(q, k, positions, **scaling)
        apart = flashbsr.attention(q_rot[None], k_rot[None], v[None], causal=True)
        # Angles of up to 1000 radians in float32; rotated rows that are rounded to float16.
        atol = 1e-2 if dtype == "float16" else 2e-4 if shift else 2e-6
        np.testing.assert_allclose(device.get(fused), device.get(apart), atol=atol)


def test_empty(rng: np.random.Generator, device: Device) -> None:
    q, k = some_heads(rng, 0, 64, "float32")
    none = np.array([0], np.int32), np.zeros(0, np.int32)
    q_out, k_out = rotated(device, flashbsr.apply_rope, q, k, *none)
    assert q_out.shape == (0, 3, 64)
    assert k_out.shape == (0, 1, 64)


def test_reference_rotation() -> None:
    """The reference itself: a quarter turn of one plane."""
    x = np.array([[[1.0, 10.0, 2.0, 20.0]]])
    turned = rotate(x, np.array([1]), np.array([np.pi / 2, 0.0]))
    np.testing.assert_allclose(turned, [[[-2.0, 10.0, 1.0, 20.0]]])
    turned = reference.rotate(x, np.array([1]), np.array([np.pi / 2, 0.0]), interleave=True)
    np.testing.assert_allclose(turned, [[[-10.0, 1.0, 2.0, 20.0]]])
