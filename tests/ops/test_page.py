# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The page cache: appending to it, and the index arithmetic around it."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
import reference
from cases import GARBAGE, indptr, poisoned, strided
from harness import Device, assert_poison_survived
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import DTYPES


class Batch:
    """Requests that grow by some tokens each, on permuted pages."""

    def __init__(self, seq_lens: list[int], new: list[int], page_size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        counts = [-(-n // page_size) for n in seq_lens]
        self.num_pages = sum(counts) + 2
        self.page_size = page_size
        self.seq_lens = np.array(seq_lens, np.int32)
        self.append_indptr = indptr(new)
        self.kv_indptr = indptr(counts)
        order = rng.permutation(self.num_pages)[: sum(counts)]
        self.kv_indices = np.concatenate([order, [GARBAGE]]).astype(np.int32)
        self.last_page_len = np.array(
            [(n - 1) % page_size + 1 if n else 0 for n in seq_lens], np.int32
        )
        self.batch_indices = np.repeat(np.arange(len(new)), new).astype(np.int32)
        self.positions = np.concatenate(
            [np.zeros(0), *(n - m + np.arange(m) for n, m in zip(seq_lens, new, strict=True))]
        ).astype(np.int32)

    def cache(self, kv_layout: str, heads: int, dims: tuple[int, int], dtype: str) -> Any:
        """K and V, strided and full of NaN."""
        arrays = []
        for dim in dims:
            shape = (self.num_pages, self.page_size, heads, dim)
            if kv_layout == "HND":
                shape = (self.num_pages, heads, self.page_size, dim)
            arrays.append(strided(poisoned(shape, dtype), dtype))
        return tuple(arrays)

    @property
    def slots(self) -> np.ndarray:
        """Slot of each new row: page * page_size + offset."""
        pages = self.kv_indices[
            self.kv_indptr[self.batch_indices] + self.positions // self.page_size
        ]
        return pages.astype(np.int64) * self.page_size + self.positions % self.page_size

    def on(self, device: Device) -> tuple[Any, ...]:
        """Arguments of an append behind the rows: (indices and positions), (the page table)."""
        table = self.kv_indices, self.kv_indptr, self.last_page_len
        return tuple(map(device.put, (self.batch_indices, self.positions))), tuple(
            map(device.put, table)
        )


def equal_bits(a: np.ndarray, b: np.ndarray) -> None:
    """Equal as bits, NaN included."""
    np.testing.assert_array_equal(
        np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8)
    )


def check_cache(device: Device, cache: Any, expected: tuple[np.ndarray, ...]) -> None:
    """The cache's bits, and the poison around it."""
    for got, want in zip(map(device.get, cache), expected, strict=True):
        equal_bits(got, want)
        assert_poison_survived(got, "cache")


SAME = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("dtype", SAME)
@pytest.mark.parametrize("by", ["table", np.int64, np.int32], ids=["table", "slots", "slots32"])
def test_append(
    kv_layout: str, page_size: int, dtype: str, by: Any, rng: np.random.Generator, device: Device
) -> None:
    """Exactly the appended slots change, on pages, tails and padding alike."""
    batch = Batch([5, 100, 0, 17, 1], [5, 30, 0, 1, 1], page_size)
    heads, dims = 3, (40, 24)
    key, value = (
        strided(rng.standard_normal((37, heads, dim)).astype(DTYPES[dtype]), dtype) for dim in dims
    )
    expected = batch.cache(kv_layout, heads, dims, dtype)
    cache = device.put_kv(batch.cache(kv_layout, heads, dims, dtype))
    where, table = batch.on(device)
    rows = device.put(key), device.put(value)
    if by == "table":
        result = flashbsr.append_paged_kv_cache(*rows, *where, cache, *table, kv_layout)
    else:
        slots = device.put(batch.slots.astype(by))
        result = flashbsr.append_paged_kv_cache(
            *rows, paged_kv_cache=cache, kv_layout=kv_layout, slot_mapping=slots
        )
    assert result is None
    reference.append(
        key,
        value,
        batch.batch_indices,
        batch.positions,
        *expected,
        batch.kv_indices,
        batch.kv_indptr,
        kv_layout,
    )
    check_cache(device, cache, expected)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_append_to_a_stacked_cache_in_parts(
    kv_layout: str, rng: np.random.Generator, device: Device
) -> None:
    """A prompt in three chunks gives the same cache as in one, and attention can read it."""
    seq_lens, page_size, heads, dim = [40, 23], 8, 2, 32
    tokens = [rng.standard_normal((n, 2, heads, dim)).astype(np.float16) for n in seq_lens]
    counts = [5, 3]
    shape = (8, 2, page_size, heads, dim) if kv_layout == "NHD" else (8, 2, heads, page_size, dim)
    cache = device.put(np.full(shape, np.nan, np.float16))
    indices = np.random.default_rng(0).permutation(8).astype(np.int32)
    done = [0, 0]
    for upto in ([7, 23], [8, 23], [40, 23]):
        new = [b - a for a, b in zip(done, upto, strict=True)]
        pages = [-(-n // page_size) for n in upto]
        kv_indices = np.concatenate(
            [indices[start : start + n] for start, n in zip((0, counts[0]), pages, strict=True)]
        )
        rows = np.concatenate([x[a:b] for x, a, b in zip(tokens, done, upto, strict=True)])
        last = np.array([(n - 1) % page_size + 1 for n in upto], np.int32)
        append_indptr, seq, table_indptr, kv_indices, last = map(
            device.put, (indptr(new), np.array(upto, np.int32), indptr(pages), kv_indices, last)
        )
        where = flashbsr.get_batch_indices_positions(append_indptr, seq, len(rows))
        on_device = device.put(rows)
        flashbsr.append_paged_kv_cache(
            on_device[:, 0],
            on_device[:, 1],
            *where,
            cache,
            kv_indices,
            table_indptr,
            last,
            kv_layout,
        )
        got = device.get(flashbsr.get_seq_lens(table_indptr, last, page_size))
        np.testing.assert_array_equal(got, upto)
        done = upto
    filled = device.get(cache)
    for request, start in ((0, 0), (1, counts[0])):
        pages = indices[start : start + counts[request]]
        for which in (0, 1):
            got = reference.gather_pages(filled[:, which], pages, seq_lens[request], kv_layout)
            np.testing.assert_array_equal(got, tokens[request][:, which])


@pytest.mark.parametrize("by_slots", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("cache_dtype", "largest"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)]
)
def test_append_quantises(
    dtype: str,
    cache_dtype: str,
    largest: float,
    by_slots: bool,
    rng: np.random.Generator,
    device: Device,
) -> None:
    """Rows are divided by the scale, saturate at the largest number, and round to nearest even."""
    batch = Batch([9], [9], 4)
    rows = rng.standard_normal((9, 2, 16)) * 10.0 ** rng.integers(-4, 5, (9, 2, 16))
    rows = rows.astype(DTYPES[dtype])
    rows[0, 0, :3] = 0, np.nan, -0.0
    cache = device.put_kv(batch.cache("NHD", 2, (16, 16), cache_dtype))
    where, table = batch.on(device)
    both = device.put(rows), device.put(rows)
    places: dict[str, Any] = {"slot_mapping": device.put(batch.slots)}
    if not by_slots:
        names = "batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len"
        places = dict(zip(names, (*where, *table), strict=True))
    flashbsr.append_paged_kv_cache(*both, paged_kv_cache=cache, k_scale=0.25, v_scale=8.0, **places)
    for x, scale in zip(map(device.get, cache), (0.25, 8.0), strict=True):
        got = reference.gather_pages(x, batch.kv_indices[:3], 9, "NHD")
        scaled = np.clip(rows.astype(np.float32) / np.float32(scale), -largest, largest)
        want = scaled.astype(DTYPES[cache_dtype])
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
        assert np.isnan(got[0, 0, 1].astype(np.float32))


def test_append_skips_padding(rng: np.random.Generator, device: Device) -> None:
    """Rows with batch index -1 are not written, whatever their position says."""
    batch = Batch([9, 4], [3, 2], 4)
    key, value = rng.standard_normal((2, 8, 1, 8)).astype(np.float32)
    expected = batch.cache("NHD", 1, (8, 8), "float32")
    cache = device.put_kv(batch.cache("NHD", 1, (8, 8), "float32"))
    padded = np.concatenate([batch.batch_indices, [-1, -1, -1]]).astype(np.int32)
    positions = np.concatenate([batch.positions, [0, GARBAGE, -7]]).astype(np.int32)
    rows = [device.put(x) for x in (key, value, padded, positions)]
    flashbsr.append_paged_kv_cache(*rows, cache, *batch.on(device)[1])
    by_slots = device.put_kv(batch.cache("NHD", 1, (8, 8), "float32"))
    slots = device.put(np.concatenate([batch.slots, [-1, -1, -1]]))
    flashbsr.append_paged_kv_cache(*rows[:2], paged_kv_cache=by_slots, slot_mapping=slots)
    reference.append(
        key[:5],
        value[:5],
        batch.batch_indices,
        batch.positions,
        *expected,
        batch.kv_indices,
        batch.kv_indptr,
        "NHD",
    )
    check_cache(device, cache, expected)
    check_cache(device, by_slots, expected)


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("slot", [-2, -(2**40), 5 * 4, 2**31, 2**32 + 3, 2**62])
def test_slots_outside_of_the_cache(
    device: Device, slot: int, rope: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU writes all other rows; asked to look, it refuses as the CPU does."""
    slots = np.array([3, slot, 19, -1], np.int64)
    rows = device.put(np.ones((4, 1, 8), np.float32))
    cache = tuple(device.put(np.zeros((5, 4, 1, 8), np.float32)) for _ in "kv")
    append: Any = flashbsr.append_paged_kv_cache
    arguments: dict[str, Any] = {"paged_kv_cache": cache, "slot_mapping": device.put(slots)}
    arguments |= {"append_key": rows, "append_value": rows}
    if rope:
        append = flashbsr.rope_append_paged_kv_cache
        arguments |= {"q": rows, "positions": device.put(np.zeros(4, np.int32))}
    with monkeypatch.context() as patch:
        patch.setenv("FLASHBSR_CHECK", "1")
        with pytest.raises(flashbsr.IndexRangeError, match="below 20") as caught:
            append(**arguments)
    assert caught.value.argument == "slot_mapping[1]"
    assert not any(device.get(x).any() for x in cache)
    if device.is_cuda:
        append(**arguments)
        for x in cache:
            written = np.flatnonzero(device.get(x).reshape(20, 8)[:, 0])
            assert written.tolist() == [3, 19]


def test_slots_or_a_table() -> None:
    """Both, neither, and slots of another shape or type are refused by name."""
    x, cache, slots = np.ones((2, 1, 8)), np.zeros((1, 2, 4, 1, 8)), np.array([0, 1])
    x, cache = x.astype(np.float32), cache.astype(np.float32)
    append, rope_append = flashbsr.append_paged_kv_cache, flashbsr.rope_append_paged_kv_cache
    with pytest.raises(flashbsr.FlashbsrError, match="slot_mapping and positions"):
        append(x, x, positions=slots, paged_kv_cache=cache, slot_mapping=slots)
    with pytest.raises(flashbsr.FlashbsrError, match="slot_mapping and kv_indptr"):
        rope_append(x, x, x, None, slots, cache, kv_indptr=np.array([0, 1]), slot_mapping=slots)
    with pytest.raises(flashbsr.FlashbsrError, match="batch_indices: .*slot_mapping"):
        append(x, x, paged_kv_cache=cache)
    with pytest.raises(flashbsr.FlashbsrError, match="positions: .*angles"):
        rope_append(x, x, x, paged_kv_cache=cache, slot_mapping=slots)
    with pytest.raises(flashbsr.ShapeError, match="paged_kv_cache"):
        append(x, x, slot_mapping=slots)
    with pytest.raises(flashbsr.ShapeError, match="slot_mapping"):
        append(x, x, paged_kv_cache=cache, slot_mapping=slots[:1])
    with pytest.raises(flashbsr.DTypeError, match="slot_mapping"):
        append(x, x, paged_kv_cache=cache, slot_mapping=slots.astype(np.uint32))


# The device fixture is the same in every example.
per_device = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
LENS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=8).map(
    lambda pairs: [(max(a, b), min(a, b)) for a, b in pairs]
)


@per_device
@given(LENS, st.integers(0, 5))
def test_batch_indices_and_positions(
    device: Device, lens: list[tuple[int, int]], padding: int
) -> None:
    batch = Batch([n for n, _ in lens], [m for _, m in lens], 4)
    nnz = int(batch.append_indptr[-1]) + padding
    results = flashbsr.get_batch_indices_positions(
        device.put(batch.append_indptr), device.put(batch.seq_lens), nnz
    )
    batch_indices, positions = map(device.get, results)
    assert batch_indices.dtype == positions.dtype == np.int32
    assert batch_indices.shape == positions.shape == (nnz,)
    used = nnz - padding
    np.testing.assert_array_equal(batch_indices[:used], batch.batch_indices)
    np.testing.assert_array_equal(positions[:used], batch.positions)
    assert (batch_indices[used:] == -1).all()


def test_batch_indices_into_given_arrays(device: Device) -> None:
    outs = tuple(device.put(np.full(6, 77, np.int32)) for _ in range(2))
    starts, lens = (device.put(np.array(x, np.int32)) for x in ([0, 2, 5], [10, 3]))
    results = flashbsr.get_batch_indices_positions(starts, lens, 6, *outs)
    assert results[0] is outs[0]
    assert results[1] is outs[1]
    assert device.get(outs[0]).tolist() == [0, 0, 1, 1, 1, -1]
    assert device.get(outs[1]).tolist()[:5] == [8, 9, 0, 1, 2]


@per_device
@given(st.lists(st.integers(0, 300), max_size=8), st.integers(1, 70))
def test_seq_lens(device: Device, seq_lens: list[int], page_size: int) -> None:
    batch = Batch(seq_lens, [0] * len(seq_lens), page_size)
    table = device.put(batch.kv_indptr), device.put(batch.last_page_len)
    got = device.get(flashbsr.get_seq_lens(*table, page_size))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, seq_lens)
