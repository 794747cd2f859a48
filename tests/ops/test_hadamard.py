# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`hadamard`: what makes a matrix one, its precision, and what it does to keys."""

from __future__ import annotations

import flashbsr
import numpy as np
import pytest
from compare import assert_rounded
from flashbsr.errors import DTypeError, FlashbsrError, ShapeError, UnsupportedError
from harness import Device, framework
from kv_codes import INT4, decode, encode, hostile
from reference import DTYPES, rounded

DIMS = [1, 2, 8, 12, 20, 24, 40, 64, 80, 96, 128, 160, 192, 256, 512]


def matrix(dim: int) -> np.ndarray:
    """The signs that `hadamard` multiplies by, from the images of the unit vectors."""
    return flashbsr.hadamard(np.eye(dim, dtype=np.float32)[:, None])[:, 0] * np.sqrt(dim)


@pytest.mark.parametrize("dim", DIMS)
def test_a_symmetric_matrix_of_signs_with_orthogonal_rows(dim: int) -> None:
    h = matrix(dim)
    signs = np.sign(h).astype(np.int64)
    assert np.abs(h - signs).max() < 1e-5
    assert (signs == signs.T).all()
    assert (signs @ signs == dim * np.eye(dim, dtype=np.int64)).all()


def test_powers_of_two_are_sylvesters() -> None:
    h = np.ones((1, 1))
    for _ in range(6):
        h = np.block([[h, h], [h, -h]])
    assert (np.sign(matrix(64)) == h).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 80, 96, 512])
def test_against_float64(dim: int, dtype: str, rng: np.random.Generator, device: Device) -> None:
    x = hostile(rng.standard_normal((7, 3, dim)).astype(np.float32).astype(DTYPES[dtype]))
    before = np.array(x)
    signs = np.sign(matrix(dim)).astype(np.float64)
    exact = x.astype(np.float64) @ signs / np.sqrt(dim)
    working = x.astype(np.float32) @ signs.astype(np.float32) * np.float32(dim**-0.5)
    size = np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True)
    there, out = device.put(x), device.put(hostile(np.full(x.shape, np.nan, x.dtype)))
    got = device.get(flashbsr.hadamard(there))
    assert got.dtype == x.dtype
    assert_rounded(got, exact, rounded(working, dtype), size, "hadamard")
    assert flashbsr.hadamard(there, out=out) is out
    np.testing.assert_array_equal(device.get(out), got)
    np.testing.assert_array_equal(device.get(there), before)
    assert flashbsr.hadamard(there, out=there) is there
    np.testing.assert_array_equal(device.get(there), got)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", DIMS)
def test_every_device_gives_the_same_bits(
    dim: int, dtype: str, rng: np.random.Generator, device: Device
) -> None:
    """More rows than one launch has warps for, in a view of a larger array."""
    x = rng.standard_normal((2311, 9, dim)).astype(np.float32).astype(DTYPES[dtype])[:, 1::2]
    got = device.get(flashbsr.hadamard(device.put(x)))
    np.testing.assert_array_equal(got, flashbsr.hadamard(x))


def test_a_nan_stays_in_its_head_and_nothing_is_nothing(
    rng: np.random.Generator, device: Device
) -> None:
    x = rng.standard_normal((3, 2, 24)).astype(np.float32)
    good = flashbsr.hadamard(x)
    x[1, 0, 5] = np.nan
    got = np.array(device.get(flashbsr.hadamard(device.put(x))))
    assert np.isnan(got[1, 0]).all()
    got[1, 0] = good[1, 0]
    np.testing.assert_array_equal(got, good)
    nothing = device.put(np.empty((0, 2, 16), np.float32))
    assert tuple(flashbsr.hadamard(nothing).shape) == (0, 2, 16)


def test_products_of_queries_and_keys_stay_and_int4_gains(rng: np.random.Generator) -> None:
    """Keys with a few channels that stand out, as those of language models have them."""
    q, k = (rng.standard_normal((50, 1, 128)).astype(np.float32) for _ in range(2))
    k[..., [3, 70]] *= 20
    turned = flashbsr.hadamard(q), flashbsr.hadamard(k)
    exact = np.einsum("ihd,jhd->hij", q.astype(np.float64), k.astype(np.float64))

    def error(q: np.ndarray, k: np.ndarray) -> float:
        return float(np.abs(np.einsum("ihd,jhd->hij", q.astype(np.float64), k) - exact).mean())

    assert error(*turned) < 1e-4
    plain, better = (error(a, decode(*encode(b, INT4), INT4)) for a, b in ((q, k), turned))
    assert better < plain / 2


def test_torch() -> None:
    torch = framework("torch")
    x = torch.randn(4, 2, 48, dtype=torch.bfloat16)
    got = flashbsr.hadamard(x)
    assert got.dtype == torch.bfloat16
    again = flashbsr.hadamard(got).float()
    assert float((again - x.float()).abs().max()) < 0.05


def test_mistakes_are_named(device: Device) -> None:
    x = np.ones((2, 1, 16), np.float32)
    with pytest.raises(UnsupportedError, match=r"x: got head dim 56; expected a power of two"):
        flashbsr.hadamard(device.put(np.ones((2, 1, 56), np.float32)))
    if device.is_cuda:
        with pytest.raises(UnsupportedError, match=r"x: got head dim 1024; .* up to 512 on a GPU"):
            flashbsr.hadamard(device.put(np.ones((2, 1, 1024), np.float32)))
        with pytest.raises(FlashbsrError, match=r"^out"):
            flashbsr.hadamard(device.put(x), out=x)
        return
    with pytest.raises(ShapeError, match=r"x: got shape \(2, 16\)"):
        flashbsr.hadamard(x[:, 0])
    with pytest.raises(ShapeError, match=r"out"):
        flashbsr.hadamard(x, out=np.ones((2, 2, 16), np.float32))
    with pytest.raises(DTypeError, match=r"out"):
        flashbsr.hadamard(x, out=np.ones(x.shape, np.float16))
    with pytest.raises(DTypeError, match=r"x"):
        flashbsr.hadamard(np.ones(x.shape, np.int8))
    with pytest.raises(ShapeError, match=r"x"):
        flashbsr.hadamard(np.ones((2, 1, 32), np.float32)[..., ::2])
