# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""NVFP4 caches in FlashInfer's form, against float64 over the dequantised cache.

Slots that no request owns hold codes of 6 and -6 and scales of NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flashbsr
import flashbsr.flashinfer as flashinfer
import ml_dtypes
import numpy as np
import pytest
import reference
import torch_device
from harness import DEVICES, Device, framework
from kv_codes import NVFP4, encode
from reference import State, Variant

torch = framework("torch")

TENSORS = Device("torch", "cpu", torch_device.putter(torch, "cpu"), torch_device.getter(torch))
WORLDS = pytest.mark.parametrize("device", [*DEVICES, TENSORS], ids=lambda x: x.name)
LAYOUTS = pytest.mark.parametrize("layout", ["NHD", "HND"])

HEADS, KV_HEADS, PAGE = 6, 2, 4
Q_LENS, KV_LENS = (1, 5, 3), (9, 130, 3)
K_NUMBER, V_NUMBER = 0.5, 1.75
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)


@dataclasses.dataclass
class Batch:
    """Codes, block scales and what they mean, in pages and in rows."""

    q: np.ndarray
    codes: list[np.ndarray]  # of K and of V, [pages, PAGE, KV_HEADS, dim / 2]
    scales: list[np.ndarray]  # [pages, PAGE, KV_HEADS, dim / 16]
    rows: list[list[np.ndarray]]  # of K and of V, of each request, in float64
    table: list[np.ndarray]  # indptr, indices, tokens in the last pages

    def exact(self, q_lens: tuple[int, ...] = Q_LENS, causal: bool = True, **options: Any) -> State:
        """Attention of the requests one by one."""
        ends = np.cumsum([0, *q_lens])
        states = [
            reference.attend(self.q[a:b], k, v, Variant(causal=causal), **options)
            for a, b, k, v in zip(ends, ends[1:], *self.rows, strict=False)
        ]
        return State.concatenate(states, HEADS, self.q.shape[2])

    def blocks(self) -> np.ndarray:
        """Dense block table, filled up with a page that does not exist."""
        indptr, indices, _ = self.table
        own = [indices[a:b] for a, b in zip(indptr, indptr[1:], strict=False)]
        found = np.full((len(own), max(map(len, own))), 0, np.int32)
        for row, pages in zip(found, own, strict=True):
            row[: len(pages)] = pages
        return found


def build(dim: int = 64, dtype: Any = np.float16) -> Batch:
    rng = np.random.default_rng(dim)
    counts = [-(-n // PAGE) for n in KV_LENS]
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    pages = int(indptr[-1]) + 3
    indices = rng.permutation(pages)[: indptr[-1]].astype(np.int32)
    codes = [np.full((pages, PAGE, KV_HEADS, dim // 2), 0x7F, np.uint8) for _ in "KV"]
    scales = [np.full((pages, PAGE, KV_HEADS, dim // 16), np.nan, E4M3) for _ in "KV"]
    rows: list[list[np.ndarray]] = [[], []]
    for begin, count in zip(indptr, KV_LENS, strict=False):
        at = np.arange(count)
        slots = indices[begin + at // PAGE], at % PAGE
        for half, number in ((0, K_NUMBER), (1, V_NUMBER)):
            x = rng.standard_normal((count, KV_HEADS, dim)) * 2.0 ** rng.integers(
                -3, 2, (count, 1, 1)
            )
            codes[half][slots], scales[half][slots] = encode(x.astype(np.float32), NVFP4)
            meant = flashbsr.dequantize_kv_cache(
                codes[half][slots], scales[half][slots], kv_dtype="nvfp4"
            )
            rows[half].append(meant.astype(np.float64) * number)
    last = np.array([(n - 1) % PAGE + 1 for n in KV_LENS], np.int32)
    q = rng.standard_normal((sum(Q_LENS), HEADS, dim)).astype(dtype)
    return Batch(q, codes, scales, rows, [indptr, indices, last])


def given(device: Device, halves: list[np.ndarray], layout: str, form: str) -> Any:
    """Hand K and V over as programs do."""
    if layout == "HND":
        halves = [x.swapaxes(-3, -2).copy() for x in halves]
    if form == "stacked":
        return device.put(np.stack(halves, 1))
    if form == "bytes":
        return [device.put(x.view(np.uint8)) for x in halves]
    return tuple(map(device.put, halves))


def near(device: Device, found: Any, exact: State, lse: Any = None) -> None:
    out = np.asarray(device.get(found), np.float64)
    np.testing.assert_allclose(out, exact.out.reshape(out.shape), atol=6e-3, rtol=6e-3)
    if lse is not None:
        expected = exact.lse.reshape(out.shape[:2]) / np.log(2)
        np.testing.assert_allclose(device.get(lse), expected, atol=4e-3, rtol=1e-3)


def planned(kind: str, device: Device, batch: Batch, layout: str, **options: Any) -> Any:
    """A wrapper with the batch's plan, and the rows of q that it takes."""
    table = [device.put(x) for x in batch.table]
    ends = device.put(np.cumsum([0, *Q_LENS]).astype(np.int32))
    dim = batch.q.shape[2]
    options = {"q_data_type": str(batch.q.dtype), "kv_data_type": torch.uint8, **options}
    if kind == "decode":
        wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, layout)
        wrapper.plan(*table, HEADS, KV_HEADS, dim, PAGE, **options)
    elif kind == "prefill":
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(None, layout)
        wrapper.plan(ends, *table, HEADS, KV_HEADS, dim, PAGE, causal=True, **options)
    else:
        wrapper = flashinfer.BatchAttention(layout, "cuda" if device.is_cuda else "cpu")
        lens = device.put(np.array(KV_LENS, np.int32))
        wrapper.plan(ends, *table[:2], lens, HEADS, KV_HEADS, dim, dim, PAGE, True, **options)
    return wrapper


NUMBERS = {"k_scale": K_NUMBER, "v_scale": V_NUMBER}


@WORLDS
@LAYOUTS
@pytest.mark.parametrize("form", ["tuple", "stacked", "bytes"])
@pytest.mark.parametrize("kind", ["decode", "prefill", "batch"])
def test_wrappers(kind: str, form: str, layout: str, device: Device) -> None:
    for dim in (64, 128):
        batch = build(dim)
        if kind == "decode":
            batch.q = batch.q[: len(KV_LENS)]
        wrapper = planned(kind, device, batch, layout)
        kv = given(device, batch.codes, layout, "stacked" if form == "stacked" else "tuple")
        scales = given(device, batch.scales, layout, form)
        options: Any = {} if kind == "batch" else {"return_lse": True}
        out, lse = wrapper.run(device.put(batch.q), kv, kv_cache_sf=scales, **NUMBERS, **options)
        exact = batch.exact((1, 1, 1), False) if kind == "decode" else batch.exact()
        near(device, out, exact, lse)


@WORLDS
@pytest.mark.parametrize("dtype", ["uint8", np.uint8, np.dtype(np.uint8), torch.uint8, "nvfp4"])
def test_how_programs_name_the_type(dtype: Any, device: Device) -> None:
    batch = build()
    wrapper = planned("prefill", device, batch, "NHD", kv_data_type=dtype)
    kv, scales = (given(device, x, "NHD", "tuple") for x in (batch.codes, batch.scales))
    out = wrapper.run(device.put(batch.q), kv, kv_cache_sf=scales, q_scale=2.0, **NUMBERS)
    near(device, out, batch.exact(q_scale=2.0))


@WORLDS
@pytest.mark.parametrize("form", ["tuple", "stacked", "bytes"])
def test_numbers_are_one_unless_given(form: str, device: Device) -> None:
    batch = build()
    wrapper = planned("prefill", device, batch, "NHD")
    kv, scales = (given(device, x, "NHD", form) for x in (batch.codes, batch.scales))
    found = wrapper.run(device.put(batch.q), kv, kv_cache_sf=scales)
    near(device, found, batch.exact(k_scale=1 / K_NUMBER, v_scale=1 / V_NUMBER))


@WORLDS
@LAYOUTS
def test_ragged_and_single(layout: str, device: Device) -> None:
    batch = build()
    rows = []
    for halves in (batch.codes, batch.scales):
        for x in halves:
            own = [
                x[batch.table[1][a:b]].reshape(-1, *x.shape[2:])[:n]
                for a, b, n in zip(batch.table[0], batch.table[0][1:], KV_LENS, strict=False)
            ]
            joined = np.concatenate(own)
            rows.append(device.put(joined.swapaxes(0, 1).copy() if layout == "HND" else joined))
    k, v, *scales = rows
    ends = [np.cumsum([0, *x]).astype(np.int32) for x in (Q_LENS, KV_LENS)]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None, layout)
    wrapper.plan(
        *map(device.put, ends), HEADS, KV_HEADS, 64, causal=True, q_data_type="float16",
        kv_data_type="uint8",
    )  # fmt: skip
    q = device.put(batch.q)
    out, lse = wrapper.run(q, k, v, kv_cache_sf=tuple(scales), return_lse=True, **NUMBERS)
    near(device, out, batch.exact(), lse)

    only = slice(ends[1][1], ends[1][2])
    one = [x[:, only] if layout == "HND" else x[only] for x in rows]
    begin, end = ends[0][1:3]
    out, lse = flashinfer.single_prefill_with_kv_cache(
        q[begin:end], *one[:2], causal=True, kv_layout=layout, kv_cache_sf=one[2:],
        return_lse=True, **NUMBERS,
    )  # fmt: skip
    exact = reference.attend(
        batch.q[begin:end], batch.rows[0][1], batch.rows[1][1], Variant(causal=True)
    )
    near(device, out, exact, lse)


def functions(device: Device, batch: Batch, layout: str) -> dict[str, Callable[..., Any]]:
    """The three functions over block tables, called alike; each gets its rows of q."""
    tables, lens = device.put(batch.blocks()), device.put(np.array(KV_LENS, np.int32))
    scale = batch.q.shape[2] ** -0.5 * K_NUMBER
    longest = max(KV_LENS)

    def decode(kv: Any, **options: Any) -> Any:
        return flashinfer.trtllm_batch_decode_with_kv_cache(
            device.put(batch.q[:3]), kv, None, tables, lens, longest, scale, V_NUMBER,
            kv_layout=layout, **options,
        )  # fmt: skip

    def xqa(kv: Any, **options: Any) -> Any:
        return flashinfer.xqa_batch_decode_with_kv_cache(
            device.put(batch.q[:3]), kv, None, tables, lens, longest, scale, V_NUMBER,
            kv_layout=layout, **options,
        )  # fmt: skip

    def context(kv: Any, **options: Any) -> Any:
        ends = np.cumsum([0, *Q_LENS]).astype(np.int32)
        return flashinfer.trtllm_batch_context_with_kv_cache(
            device.put(batch.q), kv, None, tables, lens, max(Q_LENS), longest, scale, V_NUMBER, 3,
            device.put(ends), None, kv_layout=layout, **options,
        )  # fmt: skip

    return {"decode": decode, "xqa": xqa, "context": context}


@WORLDS
@LAYOUTS
@pytest.mark.parametrize("form", ["tuple", "stacked"])
@pytest.mark.parametrize("name", ["decode", "xqa", "context"])
def test_functions(name: str, form: str, layout: str, device: Device) -> None:
    batch = build()
    exact = batch.exact()
    call = functions(device, batch, layout)[name]
    if name != "context":
        batch.q = batch.q[:3]
        exact = batch.exact((1, 1, 1), False)
    kv, scales = (given(device, x, layout, form) for x in (batch.codes, batch.scales))
    near(device, call(kv, kv_cache_sf=scales), exact)


@WORLDS
def test_o_scale_of_functions_is_in_bmm2_scale(device: Device) -> None:
    """Their programs give ``v_scale / o_scale`` and o_scale: the output is divided once."""
    batch = build()
    kv, scales = (given(device, x, "HND", "tuple") for x in (batch.codes, batch.scales))
    for name in ("decode", "xqa"):
        call = functions(device, batch, "HND")[name]
        plain = device.get(call(kv, kv_cache_sf=scales))
        again = device.get(call(kv, kv_cache_sf=scales, o_scale=0.25))
        np.testing.assert_array_equal(plain, again)


# --- what cannot be


@WORLDS
def test_a_wrapper_says_what_is_missing(device: Device) -> None:
    batch = build()
    kv, scales = (given(device, x, "NHD", "tuple") for x in (batch.codes, batch.scales))
    wide = given(device, [np.zeros((4, PAGE, KV_HEADS, 64), np.float16)] * 2, "NHD", "tuple")
    q = device.put(batch.q)
    wrapper = planned("prefill", device, batch, "NHD")
    flat, small = ((device.put(x), scales[1]) for x in (batch.scales[0][0], batch.scales[0][1:]))
    for wrong in (None, scales[:1], (scales[0], None), (*scales, scales[0]), scales[0], kv, flat,
                  small, wide, 3.0, (scales[0], scales[1][..., :3])):  # fmt: skip
        with pytest.raises(flashbsr.FlashbsrError) as caught:
            wrapper.run(q, kv, kv_cache_sf=wrong)
        assert caught.value.argument == "kv_cache_sf", (wrong, caught.value)
    half = device.put(batch.scales[0].astype(np.float32))
    for wrong in (half, device.put(batch.scales[0].view(E5M2))):
        with pytest.raises(flashbsr.DTypeError, match="kv_cache_sf.*block scales in float"):
            wrapper.run(q, kv, kv_cache_sf=(scales[0], wrong))
    with pytest.raises(flashbsr.DTypeError, match=r"kv_cache_sf.*codes in float16"):
        wrapper.run(q, wide, kv_cache_sf=scales)
    with pytest.raises(flashbsr.FlashbsrError, match=r"^paged_kv_cache"):
        wrapper.run(q, kv[:1], kv_cache_sf=scales)
    for name in ("k_scale", "v_scale"):
        with pytest.raises(flashbsr.FlashbsrError, match=f"^{name}"):
            wrapper.run(q, kv, kv_cache_sf=scales, **{name: device.put(np.ones(3, np.float32))})
    for dtype in ("float16", None):  # None: that of q
        wrapper = planned("prefill", device, batch, "NHD", kv_data_type=dtype)
        with pytest.raises(flashbsr.UnsupportedError, match=r"^kv_cache_sf.*torch.uint8"):
            wrapper.run(q, kv, kv_cache_sf=scales)


@WORLDS
def test_functions_say_what_is_missing(device: Device) -> None:
    batch = build()
    kv, scales = (given(device, x, "HND", "tuple") for x in (batch.codes, batch.scales))
    wide = given(
        device, [np.zeros((*x.shape[:-1], 64), np.float16) for x in batch.codes], "HND", "tuple"
    )
    for call in functions(device, batch, "HND").values():
        with pytest.raises(flashbsr.FlashbsrError, match=r"^kv_cache_sf.*NVFP4"):
            call(kv)
        with pytest.raises(flashbsr.UnsupportedError, match=r"^kv_cache_sf.*uint8"):
            call(wide, kv_cache_sf=scales)
        with pytest.raises(flashbsr.ShapeError, match="^kv_cache_sf"):
            call(kv, kv_cache_sf=scales[0])
    q, k = device.put(batch.q), device.put(batch.codes[0][0])
    with pytest.raises(flashbsr.FlashbsrError, match=r"^kv_cache_sf.*NVFP4"):
        flashinfer.single_prefill_with_kv_cache(q, k, k)


# --- appends


def empty(device: Device, layout: str, dim: int, pages: int, form: str) -> tuple[Any, Any]:
    shape = (pages, PAGE, KV_HEADS, dim // 2)
    codes = [np.full(shape, 0xEE, np.uint8) for _ in "KV"]
    scales = [np.full((*shape[:-1], dim // 16), 0x7F, np.uint8).view(E4M3) for _ in "KV"]
    return given(device, codes, layout, form), given(device, scales, layout, form)


def read_back(device: Device, x: Any, layout: str) -> list[np.ndarray]:
    """Bytes of K and V in slots, whatever form they are in."""
    halves = x if isinstance(x, (tuple, list)) else (x[:, 0], x[:, 1])
    found = [np.ascontiguousarray(device.get(y)).view(np.uint8) for y in halves]
    found = [y.swapaxes(1, 2) if layout == "HND" else y for y in found]
    return [y.reshape(-1, *y.shape[2:]) for y in found]


@WORLDS
@LAYOUTS
@pytest.mark.parametrize("form", ["tuple", "stacked", "bytes"])
@pytest.mark.parametrize("by_slots", [False, True])
def test_append(by_slots: bool, form: str, layout: str, device: Device) -> None:
    """Every byte is the formulas', with rows of padding and without a write beside them."""
    dim, pages, count = 64, 5, 9
    rng = np.random.default_rng(3)
    x = [rng.standard_normal((count + 3, KV_HEADS, dim)).astype(np.float16) for _ in "KV"]
    slots = rng.permutation(pages * PAGE)[:count].astype(np.int64)
    slots[[2, 7]] = -1
    kv, scales = empty(device, layout, dim, pages, form)
    put = device.put
    if by_slots:
        flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            *map(put, x), put(slots), kv, scales, np.array([K_NUMBER], np.float32), V_NUMBER, layout
        )
    else:  # a request of one page for each
        indptr = np.arange(pages + 1, dtype=np.int32)
        requests = np.where(slots < 0, -1, slots // PAGE).astype(np.int32)
        flashinfer.page.nvfp4_quantize_append_paged_kv_cache(
            *(put(y[:count]) for y in x), put(requests), put(np.maximum(slots, 0) % PAGE), kv,
            scales, put(indptr[:-1]), put(indptr), put(np.full(pages, PAGE, np.int32)), K_NUMBER,
            V_NUMBER, kv_layout=layout,
        )  # fmt: skip
    kept = slots >= 0
    halves = (read_back(device, kv, layout), read_back(device, scales, layout))
    for half, number in ((0, K_NUMBER), (1, V_NUMBER)):
        inverse = np.float32(1) / np.float32(number)
        rows = (x[half][:count][kept].astype(np.float32) * inverse).astype(np.float32)
        codes, of_codes = encode(rows, NVFP4)
        for found, wanted, poison in (
            (halves[0][half], codes, 0xEE),
            (halves[1][half], of_codes.view(np.uint8), 0x7F),
        ):
            expected = np.full_like(found, poison)
            expected[slots[kept]] = wanted
            np.testing.assert_array_equal(found, expected)


@WORLDS
@pytest.mark.parametrize("layout", ["HND"])
def test_what_was_appended_is_attended_to(layout: str, device: Device) -> None:
    """The same numbers for both: a program's way, from rows to outputs."""
    batch = build()
    rng = np.random.default_rng(8)
    rows = [[rng.standard_normal((n, KV_HEADS, 64)) for n in KV_LENS] for _ in "KV"]
    x = [device.put(np.concatenate(half).astype(np.float16)) for half in rows]
    kv, scales = empty(device, layout, 64, len(batch.codes[0]), "tuple")
    table = [device.put(y) for y in batch.table]
    ends = device.put(np.cumsum([0, *KV_LENS]).astype(np.int32))
    places = flashinfer.get_batch_indices_positions(
        ends, device.put(np.array(KV_LENS, np.int32)), sum(KV_LENS)
    )
    flashinfer.nvfp4_quantize_append_paged_kv_cache(
        *x, *places, kv, scales, table[1], table[0], table[2], 0.01, 0.02, layout
    )
    wrapper = planned("prefill", device, batch, layout)
    out = wrapper.run(device.put(batch.q), kv, kv_cache_sf=scales, k_scale=0.01, v_scale=0.02)
    batch.rows = rows
    exact = batch.exact().out
    found = np.asarray(device.get(out), np.float64)
    off = np.linalg.norm(found - exact.reshape(found.shape)) / np.linalg.norm(exact)
    assert off < 0.15, off  # of four bits; 1 where a number is forgotten


@WORLDS
def test_bad_appends(device: Device) -> None:
    kv, scales = empty(device, "NHD", 64, 3, "tuple")
    x = device.put(np.ones((2, KV_HEADS, 64), np.float16))
    slots = device.put(np.array([0, 5]))
    call = flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    for name, wrong in (
        ("k_scale", 0.0), ("v_scale", -1.0), ("k_scale", float("nan")), ("v_scale", float("inf")),
        ("k_scale", "1"), ("v_scale", np.ones(2, np.float32)), ("kv_cache_sf", scales[0]),
        ("kv_cache_sf", None), ("kv_cache_sf", kv), ("kv_cache_sf", scales[:1]),
        ("paged_kv_cache", kv[0]), ("paged_kv_cache", None), ("paged_kv_cache", (kv[0], None)), ("kv_layout", "NDH"),
        ("slot_mapping", None), ("append_key", device.put(np.ones((2, KV_HEADS, 32), np.float16))),
        ("append_value", device.put(np.ones((2, 3, 64), np.float16))),
    ):  # fmt: skip
        arguments = {
            "append_key": x, "append_value": x, "slot_mapping": slots, "paged_kv_cache": kv,
            "kv_cache_sf": scales, "k_scale": 1.0, "v_scale": 1.0, name: wrong,
        }  # fmt: skip
        with pytest.raises(flashbsr.FlashbsrError) as caught:
            call(**arguments)
        assert caught.value.argument.startswith(name), (name, wrong, caught.value)
    if not device.is_cuda:  # there they are skipped
        with pytest.raises(flashbsr.IndexRangeError, match="slot_mapping"):
            call(x, x, device.put(np.array([0, 12])), kv, scales, 1.0, 1.0)
    for found, poison in ((kv, 0xEE), (scales, 0x7F)):
        assert all((y == poison).all() for y in read_back(device, found, "NHD"))
