# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`packbits` and `segment_packbits`."""

from __future__ import annotations

import flashbsr
import numpy as np
import pytest
import reference
from cases import indptr
from hypothesis import given
from hypothesis import strategies as st

ORDERS = st.sampled_from(["big", "little"])


@given(st.lists(st.booleans(), max_size=200), ORDERS, st.sampled_from([bool, np.uint8]))
def test_packbits(bits: list[bool], order: str, kind: type) -> None:
    x = np.array(bits, kind)
    packed = flashbsr.packbits(x, order)
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(packed, reference.packbits(x, order))
    np.testing.assert_array_equal(packed, np.packbits(x, bitorder=order))


@given(st.lists(st.lists(st.booleans(), max_size=40), max_size=9), ORDERS)
def test_segment_packbits(segments: list[list[bool]], order: str) -> None:
    x = np.array([bit for segment in segments for bit in segment], bool)
    offsets = indptr([len(segment) for segment in segments])
    packed, packed_indptr = flashbsr.segment_packbits(x, offsets, order)
    expected, expected_indptr = reference.segment_packbits(x, offsets, order)
    np.testing.assert_array_equal(packed, expected)
    np.testing.assert_array_equal(packed_indptr, expected_indptr)
    assert packed_indptr.dtype == np.int32


def test_big_is_the_default() -> None:
    one = np.array([1, 0, 0, 0, 0, 0, 0, 0, 1], bool)
    assert flashbsr.packbits(one).tolist() == [0x80, 0x80]
    packed, offsets = flashbsr.segment_packbits(one, np.array([0, 1, 9], np.int32))
    assert packed.tolist() == [0x80, 0x01]
    assert offsets.tolist() == [0, 1, 2]


def test_nonzero_bytes_are_true() -> None:
    x = np.array([0, 1, 2, 128, 255, 0, 4, 0], np.uint8)
    assert flashbsr.packbits(x, "little").tolist() == [0b01011110]


def test_strided_input() -> None:
    x = np.random.default_rng(0).random(301) < 0.5
    np.testing.assert_array_equal(
        flashbsr.packbits(x[::3], "little"), np.packbits(x[::3], bitorder="little")
    )


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_long(dtype: type) -> None:
    """Enough for every vector width, with all tails."""
    rng = np.random.default_rng(1)
    lens = [*range(70), 4096, 1, 5000]
    x = rng.random(sum(lens)) < 0.5
    packed, offsets = flashbsr.segment_packbits(x, indptr(lens).astype(dtype), "little")
    expected, expected_offsets = reference.segment_packbits(x, indptr(lens), "little")
    np.testing.assert_array_equal(packed, expected)
    np.testing.assert_array_equal(offsets, expected_offsets)
