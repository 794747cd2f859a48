# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: V is a part of K, in one array or in two, on every backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import flashbsr
import numpy as np
import pytest
import reference
from compare import assert_attention
from harness import DEVICES, Device
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
from reference import State, Variant

# On a GPU the kernels of compute capability 9.0, and those of all from 8.0 on.
MMA = [
    dataclasses.replace(device, name="cuda-fa2", backend="fa2")
    for device in DEVICES
    if device.is_cuda
]


@pytest.fixture(params=[*DEVICES, *MMA], ids=lambda device: device.name)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Each backend's device, a GPU with either family of kernels."""
    yield from request.param.lend(request.node.nodeid)


def check(
    device: Device, out: Any, lse: Any, b: Batch, spec: dict[str, Any], latent: int = LATENT,
    **options: Any,
) -> None:  # fmt: skip
    variant, name = Variant(**{"sm_scale": SCALE, **spec}), reference_name(b.q)
    exact = answer(b, variant, None, latent, **options)
    working = answer(b, variant, name, latent, **options)
    assert_attention(device.get(out), device.get(lse), exact, working, name, "latent")


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("heads", [16, 128])
def test_batches(name: str, spec: str, heads: int, device: Device) -> None:
    b = make(*BATCHES[name], heads, dtype_of(device))
    attention = engine(device, heads, SPECS[spec])
    attention.plan(b.layout(64))
    out, lse = attention.run(device.put(b.q), device.put(b.cache), return_lse=True)
    check(device, out, lse, b, SPECS[spec])
    again = attention.run(device.put(b.q), parts(device, b.cache))
    np.testing.assert_array_equal(device.get(again), device.get(out))


@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("heads", [8, 32, 40, 64])
def test_pages_and_heads(page_size: int, dtype: str, heads: int, device: Device) -> None:
    b = make((1, 3, 1), (300, 77, 1), heads, dtype, page_size)
    attention = engine(device, heads, {"causal": True})
    attention.plan(b.layout(page_size))
    out, lse = attention.run(device.put(b.q), device.put(b.cache), return_lse=True)
    check(device, out, lse, b, {"causal": True})
    if page_size > 1:
        return
    rows = attention.run(device.put(b.q), device.put(b.cache[:, 0]))  # tokens without pages
    np.testing.assert_array_equal(device.get(rows), device.get(out))


def test_strides_and_heads_dimension(device: Device) -> None:
    """Pages with room around them, and a head that is written out, in both orders."""
    b = make((1, 2), (130, 70), 16, dtype_of(device))
    expected = None
    for kv_layout, axis in (("NHD", 2), ("HND", 1)):
        wide = np.full((*b.cache.shape[:2], 640), np.nan, np.float32).astype(b.cache.dtype)
        wide[..., :576] = b.cache
        attention = engine(device, 16, {"causal": True}, kv_layout=kv_layout)
        attention.plan(b.layout(64))
        there = device.put(np.expand_dims(wide, axis))[..., :576]
        out = device.get(attention.run(device.put(b.q), there))
        expected = out if expected is None else expected
        np.testing.assert_array_equal(out, expected)


def test_ragged(device: Device) -> None:
    b = make((3, 1), (3, 90), 16, dtype_of(device))
    tokens = np.concatenate(b.rows)
    attention = engine(device, 16, {"causal": True})
    attention.plan(flashbsr.Ragged(b.qo_indptr, np.array([0, 3, 93], np.int32)))
    out, lse = attention.run(device.put(b.q), device.put(tokens), return_lse=True)
    check(device, out, lse, b, {"causal": True})


def test_options(device: Device) -> None:
    """Sinks, scales, a mask, outputs in float32, base 2."""
    b = make((4, 2), (200, 65), 16, dtype_of(device))
    rng = np.random.default_rng(5)
    sinks = rng.standard_normal(16).astype(np.float32)
    masks = [rng.random((q, kv)) < 0.7 for q, kv in ((4, 200), (2, 65))]
    attention = engine(device, 16, {}, o_dtype="float32", lse_base="2")
    attention.plan(b.layout(64), custom_mask=np.concatenate([m.ravel() for m in masks]))
    out, lse = attention.run(
        device.put(b.q), device.put(b.cache), return_lse=True, sinks=device.put(sinks), v_scale=0.5
    )
    name = reference_name(b.q)
    found = {}
    for work in (None, name):
        states = [
            reference.attend(
                b.q[i:j], row[:, None], row[:, None, :LATENT], Variant(sm_scale=SCALE), mask=mask,
                sinks=sinks, v_scale=0.5, work=work, out_dtype=work and "float32",
            )
            for i, j, row, mask in zip(b.qo_indptr, b.qo_indptr[1:], b.rows, masks, strict=False)
        ]  # fmt: skip
        found[work] = State.concatenate(states, 16, LATENT)
    natural = device.get(lse) * np.float32(np.log(2))
    assert_attention(device.get(out), natural, found[None], found[name], name, "options")


def test_bounds(device: Device) -> None:
    """Lengths and tables that come later, beside a plan of them."""
    b = make((1, 1, 1), (700, 0, 65), 128, dtype_of(device))
    late = engine(device, 128, {"causal": True})
    late.plan(flashbsr.Bounds(None, np.array([900, 64, 65], np.int32), page_size=64))
    q, cache = device.put(b.q), device.put(b.cache)
    out, lse = late.run(
        q, cache, return_lse=True, kv_lens=device.put(b.kv_lens),
        block_tables=device.put(np.pad(b.table(), ((0, 0), (0, 4)), constant_values=-1)),
    )  # fmt: skip
    check(device, out, lse, b, {"causal": True})


@pytest.mark.parametrize(
    ("rows", "capacity"), [(None, False), (16, False), (16, True), (64, False), (64, True)]
)
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("lens", [(300, 64, 1000, 1), (250, 63, 999, 0), (80, 1, 64, 1), (0,) * 4])
def test_parts_that_lengths_leave_empty(
    lens: tuple[int, ...], heads: int, rows: int | None, capacity: bool, device: Device
) -> None:
    """Requests so few that each is split, on a GPU by rows of a tile, in or without clusters."""
    if rows and device.backend != "cuda":
        pytest.skip("tiles of 16 and 64 rows are Hopper's")
    b = make((1,) * 4, lens, heads, dtype_of(device))
    rng = np.random.default_rng(2)
    sinks = rng.standard_normal(heads).astype(np.float32)
    # Without rows a plan is for types that the first run turns out to have not.
    types = dict.fromkeys(("q_dtype", "kv_dtype"), dtype_of(device))
    task: dict[str, Any] = types if rows else {}
    if capacity:
        task |= {"max_batch_size": 4, "max_q_tokens": 4, "max_kv_len": 1024}
    late = engine(device, heads, {"causal": True}, tile_rows=rows, **task)
    late.plan(flashbsr.Bounds(None, np.array([300, 64, 1000, 1], np.int32), page_size=64))
    if device.backend == "cuda" and (rows != 16 or capacity or heads == 16):
        assert (late.plan_info.policy == "cluster") == (not capacity)
    if device.backend == "fa2":
        assert late.plan_info.header.num_merges > 0
    q, cache = device.put(b.q), device.put(b.cache)
    table = device.put(np.pad(b.table(), ((0, 0), (0, 16)), constant_values=-1))
    outs = [
        late.run(
            q, cache, return_lse=True, kv_lens=device.put(b.kv_lens), block_tables=table,
            sinks=device.put(sinks), v_scale=0.5,
        )
        for _ in range(2)
    ]  # fmt: skip
    (out, lse), again = outs
    check(device, out, lse, b, {"causal": True}, sinks=sinks, v_scale=0.5)
    assert device.get(out).tobytes() == device.get(again[0]).tobytes()
    assert device.get(lse).tobytes() == device.get(again[1]).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_logits_that_climb(heads: int, dtype: str, device: Device) -> None:
    """From tile to tile, read from the end, by 2^17 for heads of some warps, by little or nothing
    for those of others, and down for others: references hold for some rows of a tile, not for all.
    In the dims that are multiplied last: behind large sums tensor cores truncate each product.
    """
    b = make((1, 2, 1), (260, 200, 64), heads, dtype)
    along = np.zeros(LATENT + 64, np.float32)
    along[LATENT::2] = 1.0
    slope = np.array([0.9, 0.02, -0.9, 0.0, 0.9, 0.5, 0.3, -0.3], np.float32)
    q = b.q.astype(np.float32) + slope[np.arange(heads) // 16 % 8][None, :, None] * along
    cache, rows = b.cache.copy(), []
    for begin, row in zip(b.indptr, b.rows, strict=False):
        at = np.arange(len(row))
        climb = (len(row) - at)[:, None] * np.float32(0.09)
        rows.append((row.astype(np.float32) + climb * along).astype(row.dtype))
        cache[b.indices[begin + at // 64], at % 64] = rows[-1]
    b = b._replace(q=q.astype(b.q.dtype), cache=cache, rows=rows)
    attention = engine(device, heads, {})
    attention.plan(b.layout(64))
    out, lse = attention.run(device.put(b.q), device.put(b.cache), return_lse=True)
    check(device, out, lse, b, {})


@pytest.mark.parametrize("requests", [1, 3, 6, 8, 10, 16, 21, 32])
def test_clusters_of_any_size(requests: int, device: Device) -> None:
    """Tiles of 64 rows in 16 to 2 parts, in 6 and 3 among them, with and without keys."""
    if device.backend != "cuda":
        pytest.skip("tiles that clusters merge are Hopper's")
    rng = np.random.default_rng(requests)
    lens = (0, *rng.integers(800, 1000, requests - 1).tolist()) if requests > 1 else (1000,)
    b = make((1,) * requests, lens, 128, dtype_of(device))
    types = {"q_dtype": dtype_of(device), "kv_dtype": dtype_of(device)}
    attention = engine(device, 128, {}, tile_rows=64, **types)
    attention.plan(b.layout(64))
    assert attention.plan_info.policy == "cluster"
    q, cache = device.put(b.q), device.put(b.cache)
    out, lse = attention.run(q, cache, return_lse=True)
    check(device, out, lse, b, {})
    again = attention.run(q, cache)
    assert device.get(out).tobytes() == device.get(again).tobytes()


def test_shared_prefixes(device: Device) -> None:
    """Requests whose page lists begin alike."""
    b = make((1,), (640,), 16, dtype_of(device))
    indices = np.concatenate([b.indices] * 4)
    attention = engine(device, 16, {})
    attention.plan(
        flashbsr.Paged(
            None, np.arange(5) * 10, indices, kv_lens=np.array([640, 600, 577, 640]), page_size=64
        )
    )
    q = np.concatenate([b.q * (i + 1) for i in range(4)]).astype(b.q.dtype)
    out, lse = attention.run(device.put(q), device.put(b.cache), return_lse=True)
    rows = [b.rows[0][:n] for n in (640, 600, 577, 640)]
    check(device, out, lse, b._replace(q=q, rows=rows, qo_indptr=np.arange(5)), {})


DIMS = [(256, 64), (320, 0), (384, 64), (512, 0)]


@pytest.mark.parametrize("dims", [*DIMS, (256, 0), (320, 64), (384, 0)])
@pytest.mark.parametrize("heads", [8, 32, 64])
def test_dims(dims: tuple[int, int], heads: int, device: Device) -> None:
    """Others than 512 and 64: a GPU compiles kernels, of either family's name."""
    b = make((1, 2), (300, 77), heads, dtype_of(device), dims=dims)
    attention = engine(device, heads, {"causal": True}, head_dim_qk=sum(dims), head_dim_vo=dims[0])
    attention.plan(b.layout(64))
    out, lse = attention.run(device.put(b.q), device.put(b.cache), return_lse=True)
    check(device, out, lse, b, {"causal": True}, dims[0])
    if device.is_cuda:
        name = attention._engine.kernel_name()
        shape = f"{sum(dims)}x{dims[0]}" if dims[1] else str(dims[0])
        assert name.startswith("latent_mma_sm") and f"_d{shape}_" in name
    if dims[1]:
        again = attention.run(device.put(b.q), parts(device, b.cache, dims[0]))
        np.testing.assert_array_equal(device.get(again), device.get(out))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("heads", [16, 128])
def test_dims_with_bounds(dims: tuple[int, int], spec: str, heads: int, device: Device) -> None:
    """Lengths below those of the plan, parts, several tokens, sinks, a scale; and once more."""
    b = make((2, 1, 1, 3), (900, 0, 65, 64), heads, dtype_of(device), dims=dims)
    sinks = np.random.default_rng(3).standard_normal(heads).astype(np.float32)
    late = engine(device, heads, SPECS[spec], head_dim_qk=sum(dims), head_dim_vo=dims[0])
    late.plan(flashbsr.Bounds(b.qo_indptr, np.array([1000, 64, 65, 64], np.int32), page_size=64))
    table = np.pad(b.table(), ((0, 0), (0, 4)), constant_values=-1)
    outs = [
        late.run(
            device.put(b.q), device.put(b.cache), return_lse=True, v_scale=0.5,
            sinks=device.put(sinks), kv_lens=device.put(b.kv_lens), block_tables=device.put(table),
        )
        for _ in range(2)
    ]  # fmt: skip
    (out, lse), again = outs
    check(device, out, lse, b, SPECS[spec], dims[0], sinks=sinks, v_scale=0.5)
    assert device.get(out).tobytes() == device.get(again[0]).tobytes()
    assert device.get(lse).tobytes() == device.get(again[1]).tobytes()


def test_dims_that_no_kernel_has(device: Device) -> None:
    b = make((1,), (77,), 16, dtype_of(device), dims=(128, 16))
    attention = engine(device, 16, {}, head_dim_qk=144, head_dim_vo=128)
    if device.is_cuda:
        with pytest.raises(flashbsr.UnsupportedError, match="head_dim_vo 512, 384, 320 or 256"):
            attention.plan(b.layout(64))
        return
    attention.plan(b.layout(64))
    out, lse = attention.run(b.q, b.cache, return_lse=True)
    check(device, out, lse, b, {}, 128)


@pytest.mark.parametrize("rows", [None, 16, 64])
@pytest.mark.parametrize("kv_len", [1, 5, 200])
@pytest.mark.parametrize("heads", [8, 24, 128])
def test_rows_that_were_to_see_no_keys(
    heads: int, kv_len: int, rows: int | None, device: Device
) -> None:
    """More queries than keys were planned, fewer come: each block of a cluster took all keys."""
    if rows and (device.backend != "cuda" or (rows < heads and heads % rows)):
        pytest.skip("tiles of 16 and 64 rows are Hopper's, and hold heads that they divide")
    b = make((1, min(4, kv_len)), (700, kv_len), heads, dtype_of(device))
    types = dict.fromkeys(("q_dtype", "kv_dtype"), dtype_of(device))
    late = engine(device, heads, {"causal": True}, tile_rows=rows, **(types if rows else {}))
    planned = np.array([0, 4, 4 + 2 * kv_len + 17], np.int32)
    late.plan(flashbsr.Bounds(planned, np.array([700, kv_len], np.int32), page_size=64))
    table = np.pad(b.table(), ((0, 0), (0, 4)), constant_values=-1)
    late.update(*map(device.put, (b.kv_lens, table)), qo_indptr=device.put(b.qo_indptr))
    rows = len(b.q)
    q = np.zeros((planned[-1], *b.q.shape[1:]), b.q.dtype)
    q[:rows] = b.q
    out, lse = late.run(device.put(q), device.put(b.cache), return_lse=True)
    check(device, out[:rows], lse[:rows], b, {"causal": True})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda c: c[..., :568], "kv"),
        (lambda c: (c[..., :512], c[..., :512]), "v"),
        (lambda c: (c, c[..., 512:]), "k"),
        (lambda c: c[:, :32], "kv"),
        (lambda c: c.astype(np.float64), "kv"),
        (lambda c: (c[..., :512].copy(), c[:2, :, 512:].copy()), "v"),
        (lambda c: c[None, None], "kv"),
    ],
)
def test_wrong_caches(change: Any, name: str, device: Device) -> None:
    b = make((1,), (300,), 16, dtype_of(device))
    refused(device, engine(device, 16, {}), b, change(b.cache), name)


def test_wrong_tasks() -> None:
    with pytest.raises(flashbsr.ShapeError, match="num_kv_heads"):
        flashbsr.TaskInfo(16, 2, 576, head_dim_vo=512, latent=True)
    with pytest.raises(flashbsr.UnsupportedError, match="576"):
        flashbsr.TaskInfo(16, 1, 640, head_dim_vo=512, latent=True)
    with pytest.raises(flashbsr.ShapeError, match="head_dim_vo"):
        flashbsr.TaskInfo(16, 1, 256, head_dim_vo=512, latent=True)
    task = flashbsr.TaskInfo(16, 1, 576, head_dim_vo=512, latent=True)
    with pytest.raises(flashbsr.FlashbsrError, match="192 for"):
        flashbsr.Attention(flashbsr.AttentionSpec(), task)
