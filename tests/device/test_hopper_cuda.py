# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The wrappers of sm_90a's instructions, one by one: hopper.cu against NumPy.

Values are small integers, so that every product and sum is exact and results are equal or wrong.
"""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from driver import POISON, Gpu, compiled

SOURCE, TARGET = "hopper.cu", "sm_90a"
# Name in DType, NumPy's type, largest value: float8 sums keep about 14 bits.
TYPES = {
    "F16": (np.float16, 8),
    "BF16": (ml_dtypes.bfloat16, 8),
    "E4M3": (ml_dtypes.float8_e4m3fn, 2),
}
LINE = 128  # bytes of a swizzled row


def integers(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    dtype, largest = TYPES[kind]
    return rng.integers(-largest, largest + 1, shape).astype(dtype)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64)


def test_compiles() -> None:
    assert len(compiled(SOURCE, TARGET)) > 1000


@pytest.mark.parametrize("columns", [64, 80, 96, 128])
@pytest.mark.parametrize("kind", TYPES)
def test_both_operands_in_shared_memory(
    hopper: Gpu, rng: np.random.Generator, kind: str, columns: int
) -> None:
    """Q K^T: rows of two lines, steps of 32 bytes, two warpgroups with one B."""
    depth = 2 * LINE // np.dtype(TYPES[kind][0]).itemsize
    a, b = integers(rng, (128, depth), kind), integers(rng, (columns, depth), kind)
    kernel = hopper.function(SOURCE, TARGET, f"shared_{kind}_{columns}")
    room = 2 * LINE * (128 + columns) + 1024
    (out,) = hopper.compute(kernel, 256, room, [a, b], [np.empty((128, columns), np.float32)])
    np.testing.assert_array_equal(out, product(a, b.T))


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("kind", TYPES)
def test_left_operand_in_registers(
    hopper: Gpu, rng: np.random.Generator, kind: str, columns: int
) -> None:
    """P V, added to ones: 16-bit V lies with tokens as rows, float8 V with dims as rows."""
    depth = 256 if kind == "E4M3" else 80
    a, b = integers(rng, (64, depth), kind), integers(rng, (depth, columns), kind)
    kept = np.ascontiguousarray(b.T if kind == "E4M3" else b)
    kernel = hopper.function(SOURCE, TARGET, f"registers_{kind}_{columns}")
    out = np.empty((64, columns), np.float32)
    (out,) = hopper.compute(kernel, 128, kept.nbytes + 1024, [a, kept], [out])
    np.testing.assert_array_equal(out, 1 + product(a, b))


def box_of(array: np.ndarray, box: tuple[int, ...], start: tuple[int, ...]) -> np.ndarray:
    """The box as rows of 128 bytes, zeros outside of the array; sizes are outermost first."""
    out = np.zeros(box, array.dtype)
    for at in itertools.product(*map(range, box[:-1])):
        place = [first + i for first, i in zip(start[:-1], at, strict=True)]
        if all(0 <= p < n for p, n in zip(place, array.shape[:-1], strict=True)):
            row = array[tuple(place)][start[-1] : start[-1] + box[-1]]
            out[at][: row.size] = row
    return out.reshape(-1, box[-1]).view(np.uint8)


@pytest.mark.parametrize("item", [2, 1])
@pytest.mark.parametrize(
    ("box", "start", "first_row"),
    [
        ((1, 1, 8), (0, 0, 0), 0),
        ((1, 1, 24), (2, 1, 3), 8),
        ((1, 1, 128), (1, 2, 0), 16),  # beyond the last token
        ((1, 1, 16), (1, 0, -5), 8),  # before the first
        ((1, 5, 8), (1, 1, 2), 0),  # beyond the last head: as Q's boxes are
        ((1, 2, 12), (2, 0, 0), 0),
        ((1, 1, 8), (3, 0, 0), 0),  # of no page at all
        ((1, 1, 4), (2, 1, 3), 4),  # one query of a group of 4, where requests share KV
        ((1, 1, 5), (0, 0, 1), 13),  # of 5
        ((1, 1, 4), (0, 1, 46), 12),  # pages of few tokens: in the middle of eight rows
        ((1, 1, 3), (1, 0, 48), 6),  # across them, beyond the last token
        ((1, 1, 1), (2, 3, 9), 7),
    ],
)
@pytest.mark.parametrize("line", [0, 1, 2])
def test_boxes_lie_as_swizzle_says(
    hopper: Gpu, rng: np.random.Generator, item: int, box: tuple[int, ...],
    start: tuple[int, ...], first_row: int, line: int,
) -> None:  # fmt: skip
    """Rows in tile/swizzle.h's places, zeros for what is not there, nothing written around."""
    dtype, wide = {2: (np.uint16, 64), 1: (np.uint8, 128)}[item]
    shape = (3, 4, 50, 2 * wide + wide // 2)  # page, head, token, dim; the last line is half a one
    pitched = rng.integers(1, 255, (*shape[:-1], shape[-1] + 16)).astype(dtype)
    array = pitched[..., : shape[-1]]
    rows = box[0] * box[1] * box[2]
    tile_rows = first_row + rows + 8
    expected = np.full((tile_rows, LINE), POISON, np.uint8)
    full_box, full_start = (*box, wide), (*start, line * wide)
    expected[first_row : first_row + rows] = box_of(array, full_box, full_start)
    kernel = hopper.function(SOURCE, TARGET, "load_box")
    out = np.full((tile_rows, LINE), 0xA5, np.uint8)
    with hopper.memory(pitched, out) as (source, target):
        inner_first = [array.strides[i] for i in (2, 1, 0)]
        encoded = hopper.tensor_map(source, item, shape[::-1], inner_first, full_box[::-1])
        numbers = map(np.int32, (*full_start[::-1], rows, first_row, tile_rows))
        hopper.launch(kernel, 128, tile_rows * LINE + 1024, encoded, *numbers, target)
        found = hopper.read(target, out)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("count", [1, 7, 80])
def test_copies_announce_themselves(hopper: Gpu, rng: np.random.Generator, count: int) -> None:
    """Lines in any order, zeros for what is not there."""
    memory = rng.integers(1, 255, (200, LINE)).astype(np.uint8)
    lines = rng.permutation(200)[:count].astype(np.int32)
    lines[::5] = -1
    kernel = hopper.function(SOURCE, TARGET, "gather_lines")
    out = np.full((count, LINE), POISON, np.uint8)
    with hopper.memory(memory, lines, out) as (source, at, target):
        hopper.launch(kernel, 128, count * LINE + 1024, source, at, np.int32(count), target)
        found = hopper.read(target, out)
    np.testing.assert_array_equal(found, np.where(lines[:, None] < 0, 0, memory[lines]))


@pytest.mark.parametrize("groups", [8, 10, 12, 16])
@pytest.mark.parametrize("misaligned", [0, 1, 2, 3])
@pytest.mark.parametrize("kept", [-3, 0, 1, 31, 32, 33, 63])
def test_mask_bits(
    hopper: Gpu, rng: np.random.Generator, groups: int, misaligned: int, kept: int
) -> None:
    """Bits from any bit on, of memory from any byte on; select() and to_float() with them."""
    bits = rng.integers(0, 2, 4096).astype(bool)
    packed = np.packbits(bits, bitorder="little")
    memory = np.full(packed.size + misaligned + 64, POISON, np.uint8)
    memory[misaligned : misaligned + packed.size] = packed
    firsts = np.concatenate([np.arange(67), rng.integers(0, 4096 - 8 * groups, 61)]).astype(
        np.int64
    )
    kernel = hopper.function(SOURCE, TARGET, f"bits_{groups}")
    out = np.full((firsts.size, 2 * groups), np.nan, np.float32)
    with hopper.memory(memory, firsts, out) as (at, starts, target):
        numbers = np.int32(firsts.size), np.int32(kept)
        hopper.launch(kernel, 128, 0, at + misaligned, starts, *numbers, target)
        found = hopper.read(target, out)
    columns = np.arange(2 * groups) // 2 * 8 + np.arange(2 * groups) % 2
    positions = firsts[:, None] + columns
    set_or_kept = bits[positions] | (columns < kept)
    np.testing.assert_array_equal(found, np.where(set_or_kept, positions, -1))
