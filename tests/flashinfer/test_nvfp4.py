# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""NVFP4 caches in FlashInfer's form, against float64 over the dequantised cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashbsr
import flashbsr.flashinfer as flashinfer
import numpy as np
import pytest
import reference
from harness import Device, framework
from nvfp4_world import (
    E5M2,
    HEADS,
    K_NUMBER,
    KV_HEADS,
    KV_LENS,
    LAYOUTS,
    NUMBERS,
    PAGE,
    Q_LENS,
    V_NUMBER,
    WORLDS,
    Batch,
    build,
    given,
    near,
    planned,
)
from reference import Variant

torch = framework("torch")


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
