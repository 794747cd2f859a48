# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`packbits` and `segment_packbits`."""

from __future__ import annotations

import flashbsr
import numpy as np
import pytest
import reference
from cases import indptr
from harness import Device
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ORDERS = st.sampled_from(["big", "little"])


# The device fixture is the same in every example.
per_device = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@per_device
@given(st.lists(st.booleans(), max_size=200), ORDERS, st.sampled_from([bool, np.uint8]))
def test_packbits(device: Device, bits: list[bool], order: str, kind: type) -> None:
    x = np.array(bits, kind)
    packed = device.get(flashbsr.packbits(device.put(x), order))
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(packed, reference.packbits(x, order))
    np.testing.assert_array_equal(packed, np.packbits(x, bitorder=order))


@per_device
@given(st.lists(st.lists(st.booleans(), max_size=40), max_size=9), ORDERS)
def test_segment_packbits(device: Device, segments: list[list[bool]], order: str) -> None:
    x = np.array([bit for segment in segments for bit in segment], bool)
    offsets = indptr([len(segment) for segment in segments])
    packed, packed_indptr = map(
        device.get, flashbsr.segment_packbits(device.put(x), device.put(offsets), order)
    )
    expected, expected_indptr = reference.segment_packbits(x, offsets, order)
    np.testing.assert_array_equal(packed, expected)
    np.testing.assert_array_equal(packed_indptr, expected_indptr)
    assert packed_indptr.dtype == np.int32


def test_big_is_the_default(device: Device) -> None:
    one = device.put(np.array([1, 0, 0, 0, 0, 0, 0, 0, 1], bool))
    assert device.get(flashbsr.packbits(one)).tolist() == [0x80, 0x80]
    packed, offsets = flashbsr.segment_packbits(one, device.put(np.array([0, 1, 9], np.int32)))
    assert device.get(packed).tolist() == [0x80, 0x01]
    assert device.get(offsets).tolist() == [0, 1, 2]


def test_nonzero_bytes_are_true(device: Device) -> None:
    x = device.put(np.array([0, 1, 2, 128, 255, 0, 4, 0], np.uint8))
    assert device.get(flashbsr.packbits(x, "little")).tolist() == [0b01011110]


def test_strided_input(device: Device) -> None:
    x = np.random.default_rng(0).random(301) < 0.5
    packed = flashbsr.packbits(device.put(x)[::3], "little")
    np.testing.assert_array_equal(device.get(packed), np.packbits(x[::3], bitorder="little"))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_long(dtype: type, device: Device) -> None:
    """Enough for every vector width, with all tails."""
    rng = np.random.default_rng(1)
    lens = [*range(70), 4096, 1, 5000]
    x = rng.random(sum(lens)) < 0.5
    packed, offsets = map(
        device.get,
        flashbsr.segment_packbits(device.put(x), device.put(indptr(lens).astype(dtype)), "little"),
    )
    expected, expected_offsets = reference.segment_packbits(x, indptr(lens), "little")
    np.testing.assert_array_equal(packed, expected)
    np.testing.assert_array_equal(offsets, expected_offsets)
