# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Latent caches of eight bits on every backend: e4m3 of one scale, and rows of 656 bytes.

Against float64 over the dequantised cache, and the same in the type of q, to which products round
what they read.
"""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
from compare import assert_attention
from harness import Device
from latents import (
    BATCHES,
    LATENT,
    SCALE,
    SPECS,
    Batch,
    answer,
    dtype_of,
    engine,
    make,
    parts,
    reference_name,
    refused,
)
from reference import DTYPES, Variant

E4M3 = DTYPES["float8_e4m3fn"]
NUMBER = 0.37  # what codes of one scale are multiplied by
PACKED = "fp8_ds_mla"
KINDS = ["float8_e4m3fn", PACKED]


def coded(b: Batch, kind: str) -> Batch:
    """The batch with a cache of codes, NaN wherever no token lies; its rows are what they mean."""
    wide = b.cache.astype(np.float32)
    pages, page_size = wide.shape[:2]
    if kind == PACKED:
        rng = np.random.default_rng(7)
        # Groups of 128 dims of one token that differ by powers of two, and a group of zeros.
        size = np.exp2(rng.integers(-6, 1, (pages, page_size, 4))).astype(np.float32)
        size[:, :, 2] *= rng.random((pages, page_size)) < 0.9
        wide[..., :LATENT] *= np.repeat(size, 128, -1)
        cache = np.full((pages, page_size, 656), 255, np.uint8)
        slots = np.flatnonzero(~np.isnan(wide[..., 0].reshape(-1)))
        rows = wide.reshape(-1, wide.shape[-1])[slots]
        flashbsr.append_packed_latents(
            rows[:, :LATENT], rows[:, LATENT:], cache=cache, slot_mapping=slots
        )
        means = flashbsr.unpack_latents(cache)
    else:
        with np.errstate(invalid="ignore"):
            cache = (wide / np.float32(NUMBER)).astype(E4M3)
        means = cache.astype(np.float32) * np.float32(NUMBER)
    found = []
    for begin, n in zip(b.indptr, b.kv_lens, strict=False):
        at = np.arange(n)
        found.append(means[b.indices[begin + at // page_size], at % page_size])
    return b._replace(cache=cache, rows=found)


def scales(kind: str) -> dict[str, float]:
    return {} if kind == PACKED else {"k_scale": NUMBER, "v_scale": NUMBER}


def check(
    device: Device, out: Any, lse: Any, b: Batch, spec: dict[str, Any], **options: Any
) -> None:
    variant, name = Variant(**{"sm_scale": SCALE, **spec}), reference_name(b.q)
    exact = answer(b, variant, None, LATENT, **options)
    rounded = b._replace(rows=[row.astype(b.q.dtype) for row in b.rows])
    working = answer(rounded, variant, name, LATENT, **options)
    assert_attention(device.get(out), device.get(lse), exact, working, name, "latent")


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_batches(name: str, spec: str, heads: int, kind: str, device: Device) -> None:
    b = coded(make(*BATCHES[name], heads, dtype_of(device)), kind)
    attention = engine(device, heads, SPECS[spec])
    attention.plan(b.layout(64))
    q, cache = device.put(b.q), device.put(b.cache)
    out, lse = attention.run(q, cache, return_lse=True, **scales(kind))
    check(device, out, lse, b, SPECS[spec])
    again = attention.run(q, cache, **scales(kind))
    np.testing.assert_array_equal(device.get(again), device.get(out))
    if kind != PACKED:
        again = attention.run(q, parts(device, b.cache), **scales(kind))
        np.testing.assert_array_equal(device.get(again), device.get(out))


@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("heads", [8, 40, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_and_heads(page_size: int, dtype: str, heads: int, kind: str, device: Device) -> None:
    b = coded(make((1, 3, 1), (300, 77, 1), heads, dtype, page_size), kind)
    attention = engine(device, heads, {"causal": True}, q_dtype=dtype, kv_dtype=kind)
    attention.plan(b.layout(page_size))
    out, lse = attention.run(device.put(b.q), device.put(b.cache), return_lse=True, **scales(kind))
    check(device, out, lse, b, {"causal": True})
    if page_size > 1:
        return
    rows = attention.run(device.put(b.q), device.put(b.cache[:, 0]), **scales(kind))
    np.testing.assert_array_equal(device.get(rows), device.get(out))


@pytest.mark.parametrize("name", ["verification", "prefill"])
@pytest.mark.parametrize("spec", ["causal", "window"])
@pytest.mark.parametrize("heads", [1, 8, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_several_tiles(name: str, spec: str, heads: int, kind: str, device: Device) -> None:
    """Requests of more rows than the 16 of a tile on mma.sync, which other heads go by."""
    if not device.is_cuda:
        pytest.skip("a CPU has no tiles")
    b = coded(make(*BATCHES[name], heads, "bfloat16"), kind)
    attention = engine(device, heads, SPECS[spec], backend="fa2")
    attention.plan(b.layout(64))
    out, lse = attention.run(device.put(b.q), device.put(b.cache), return_lse=True, **scales(kind))
    assert attention.explain().kernel.startswith("latent_mma")
    check(device, out, lse, b, SPECS[spec])


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [5, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_many_requests(page_size: int, heads: int, kind: str, device: Device) -> None:
    """Several items for each block of a GPU, of all lengths; one that is cut into parts."""
    rng = np.random.default_rng(heads + page_size)
    lens = (*rng.integers(0, 900, 170 if device.is_cuda else 30).tolist(), 9000)
    q_lens = tuple(rng.choice([1, 1, 1, 2], len(lens)).tolist())
    b = coded(make(q_lens, lens, heads, dtype_of(device), page_size), kind)
    attention = engine(device, heads, {"causal": True})
    attention.plan(b.layout(page_size))
    if device.is_cuda:
        assert len(attention.plan_info.items) > 170
        assert len(attention.plan_info.merges) > 0
    q, cache = device.put(b.q), device.put(b.cache)
    out, lse = attention.run(q, cache, return_lse=True, **scales(kind))
    check(device, out, lse, b, {"causal": True})
    again = attention.run(q, cache, **scales(kind))
    np.testing.assert_array_equal(device.get(again), device.get(out))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2.0**-7, 2.0**9])
def test_sizes(size: float, kind: str, device: Device) -> None:
    """Queries and scales far from 1, and rows of zeros, beside each other: products are of fp16."""
    b = make((1, 3, 1), (300, 77, 1), 16, dtype_of(device))
    rows = np.resize(np.float32([1, 0, 2.0**-8, 2, 2.0**-40]), (len(b.q), 16, 1))
    if kind == PACKED:
        rows /= np.float32(size)
        b = b._replace(cache=(b.cache.astype(np.float32) * np.float32(size)).astype(b.cache.dtype))
    b = coded(b._replace(q=(b.q.astype(np.float32) * rows).astype(b.q.dtype)), kind)
    attention = engine(device, 16, {"causal": True})
    attention.plan(b.layout(64))
    out, lse = attention.run(device.put(b.q), device.put(b.cache), return_lse=True, **scales(kind))
    check(device, out, lse, b, {"causal": True})


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_and_strides(kind: str, device: Device) -> None:
    """Tokens one after another; pages with room around them and a head that is written out."""
    b = coded(make((3, 1), (3, 90), 16, dtype_of(device)), kind)
    page, slot = (np.concatenate(x) for x in zip(*map(_places, range(2), (b, b)), strict=True))
    attention = engine(device, 16, {"causal": True})
    attention.plan(flashbsr.Ragged(b.qo_indptr, np.array([0, 3, 93], np.int32)))
    tokens = device.put(b.cache[page, slot])
    out, lse = attention.run(device.put(b.q), tokens, return_lse=True, **scales(kind))
    check(device, out, lse, b, {"causal": True})
    width = b.cache.shape[-1]
    wide = np.full((*b.cache.shape[:2], 704), 255, np.uint8).view(b.cache.dtype)
    wide[..., :width] = b.cache
    for kv_layout, axis in (("NHD", 2), ("HND", 1)):
        attention = engine(device, 16, {"causal": True}, kv_layout=kv_layout)
        attention.plan(b.layout(64))
        there = device.put(np.expand_dims(wide, axis))[..., :width]
        again = attention.run(device.put(b.q), there, **scales(kind))
        np.testing.assert_allclose(
            device.get(again).astype(np.float32), device.get(out).astype(np.float32), atol=0.02
        )


def _places(request: int, b: Batch) -> tuple[np.ndarray, np.ndarray]:
    at = np.arange(b.kv_lens[request])
    return b.indices[b.indptr[request] + at // 64], at % 64


@pytest.mark.parametrize(("heads", "rows"), [(16, None), (128, None), (128, 64)])
@pytest.mark.parametrize("lens", [(300, 64, 1000, 1), (250, 63, 999, 0), (0,) * 4])
@pytest.mark.parametrize("kind", KINDS)
def test_bounds(
    lens: tuple[int, ...], heads: int, rows: int | None, kind: str, device: Device
) -> None:
    """Lengths and tables that come later, split among the blocks of clusters on a GPU; sinks."""
    if rows and device.backend != "cuda":
        pytest.skip("tiles of 64 rows, or none, are Hopper's")
    b = coded(make((1,) * 4, lens, heads, dtype_of(device)), kind)
    sinks = np.random.default_rng(2).standard_normal(heads).astype(np.float32)
    task = {"q_dtype": dtype_of(device), "kv_dtype": kind, "tile_rows": rows}
    late = engine(device, heads, {"causal": True}, **task)
    late.plan(flashbsr.Bounds(None, np.array([300, 64, 1000, 1], np.int32), page_size=64))
    if rows:
        assert late.plan_info.policy == "cluster"
    table = device.put(np.pad(b.table(), ((0, 0), (0, 16)), constant_values=-1))
    outs = [
        late.run(
            device.put(b.q), device.put(b.cache), return_lse=True, block_tables=table,
            kv_lens=device.put(b.kv_lens), sinks=device.put(sinks), **scales(kind),
        )
        for _ in range(2)
    ]  # fmt: skip
    (out, lse), again = outs
    check(device, out, lse, b, {"causal": True}, sinks=sinks)
    assert device.get(out).tobytes() == device.get(again[0]).tobytes()
    assert device.get(lse).tobytes() == device.get(again[1]).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_masks(kind: str, device: Device) -> None:
    b = coded(make((4, 2), (200, 65), 16, dtype_of(device)), kind)
    rng = np.random.default_rng(5)
    masks = [rng.random((q, kv)) < 0.7 for q, kv in ((4, 200), (2, 65))]
    attention = engine(device, 16, {})
    attention.plan(b.layout(64), custom_mask=np.concatenate([m.ravel() for m in masks]))
    out, lse = attention.run(device.put(b.q), device.put(b.cache), return_lse=True, **scales(kind))
    for i, mask in enumerate(masks):
        begin, end = b.qo_indptr[i : i + 2]
        one = b._replace(
            q=b.q[begin:end], rows=[b.rows[i]], qo_indptr=np.array([0, end - begin], np.int32)
        )
        rows = slice(begin, end)
        check(device, out[rows], lse[rows], one, {}, mask=mask)


def test_what_an_append_writes() -> None:
    """Codes by the formula, a token that goes nowhere, and bytes of others left alone."""
    rng = np.random.default_rng(0)
    cache = rng.integers(0, 256, (3, 16, 656)).astype(np.uint8)
    before = cache.copy()
    latent = rng.standard_normal((4, 512)).astype(np.float32)
    rotated = rng.standard_normal((4, 64)).astype(np.float32)
    latent[1, 128:256] = 0
    slots = np.array([17, 2, -1, 47])
    flashbsr.append_packed_latents(latent, rotated, cache=cache, slot_mapping=slots)
    untouched = np.setdiff1d(np.arange(48), slots)
    rows, old = cache.reshape(48, 656), before.reshape(48, 656)
    np.testing.assert_array_equal(rows[untouched], old[untouched])
    for token, slot in ((0, 17), (1, 2), (3, 47)):
        row = rows[slot]
        groups = latent[token].reshape(4, 128)
        scale = np.abs(groups).max(-1) / np.float32(448)
        np.testing.assert_array_equal(row[512:528].view(np.float32), scale)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
        codes = (groups * inverse[:, None]).astype(E4M3).reshape(-1)
        np.testing.assert_array_equal(row[:512], codes.view(np.uint8))
        tail = rotated[token].astype(DTYPES["bfloat16"])
        np.testing.assert_array_equal(row[528:].view(np.uint16), tail.view(np.uint16))
        back = flashbsr.unpack_latents(cache).reshape(48, 576)[slot]
        expected = codes.astype(np.float32).reshape(4, 128) * scale[:, None]
        np.testing.assert_array_equal(back[:512].reshape(4, 128), expected)
        np.testing.assert_array_equal(back[512:], tail.astype(np.float32))


def test_bytes_that_a_plan_reads(device: Device) -> None:
    """A row of 656 bytes has more than one for each dim."""
    found = {}
    for kind in KINDS:
        attention = engine(device, 16, {}, q_dtype=dtype_of(device), kv_dtype=kind)
        attention.plan(flashbsr.Ragged(None, np.array([0, 10], np.int32)))
        found[kind] = attention.explain().kv_bytes
    assert found == {"float8_e4m3fn": 5760, PACKED: 6560}


def test_append_on_a_device(device: Device) -> None:
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal((9, n)).astype(DTYPES[dtype_of(device)]) for n in (512, 64)]
    slots = rng.permutation(64)[:9]
    slots[4] = -1
    expected = np.full((4, 16, 1, 656), 255, np.uint8)
    there = device.put(expected.copy())
    flashbsr.append_packed_latents(*rows, cache=expected, slot_mapping=slots)
    flashbsr.append_packed_latents(
        *map(device.put, rows), cache=there, slot_mapping=device.put(slots)
    )
    np.testing.assert_array_equal(device.get(there), expected)


@pytest.mark.parametrize(
    ("task", "change", "name"),
    [
        ({"kv_dtype": PACKED}, lambda c: c[..., :576], "kv"),
        ({"kv_dtype": PACKED}, lambda c: c.view(np.uint16), "kv"),
        ({}, lambda c: c[..., :640], "kv"),
        ({}, lambda c: (c, c), "k"),
        ({"head_dim_vo": 256}, lambda c: c, "kv"),
    ],
)
def test_wrong_rows(task: dict[str, Any], change: Any, name: str, device: Device) -> None:
    b = coded(make((1,), (300,), 16, dtype_of(device)), PACKED)
    attention = engine(device, 16, {}, **task)
    if device.is_cuda and "head_dim_vo" in task:  # no kernel has these dims, whatever the cache
        with pytest.raises(flashbsr.UnsupportedError, match="^latent"):
            attention.plan(b.layout(64))
    else:
        refused(device, attention, b, change(b.cache), name)


def test_wrong_tasks_and_appends() -> None:
    with pytest.raises(flashbsr.UnsupportedError, match="latent=True"):
        flashbsr.TaskInfo(16, 1, 512, kv_dtype=PACKED)
    with pytest.raises(flashbsr.UnsupportedError, match="576 and 512"):
        flashbsr.TaskInfo(16, 1, 320, head_dim_vo=256, latent=True, kv_dtype=PACKED)
    latent, rotated = np.zeros((2, 512), np.float32), np.zeros((2, 64), np.float32)
    cache, slots = np.zeros((2, 4, 656), np.uint8), np.array([0, 1])
    append = flashbsr.append_packed_latents
    for arguments, name in (
        ((latent[:, :500], rotated, cache), "append_ckv"),
        ((latent, rotated[:, :63], cache), "append_kpe"),
        ((latent, rotated, cache[..., :600]), "cache"),
        ((latent, rotated, cache.view(np.int8)), "cache"),
        ((latent, rotated[:1], cache), "append"),
    ):
        with pytest.raises(flashbsr.FlashbsrError) as caught:
            append(arguments[0], arguments[1], cache=arguments[2], slot_mapping=slots)
        assert caught.value.argument.startswith(name), caught.value
