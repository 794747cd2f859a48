# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`Attention` against the reference: the matrix of `cases.py` on every device, and its memory."""

from __future__ import annotations

import sys
from typing import Any

import cases
import flashbsr
import matrix
import numpy as np
import pytest
from cases import BF16, F16, F32, Case, build
from harness import (
    CPU,
    Device,
    attention_for,
    check_case,
    compare,
    execute,
    framework,
)
from numpy.lib.stride_tricks import as_strided
from reference import DTYPES, Variant


@pytest.mark.parametrize("case", matrix.matrix(), ids=lambda case: case.name)
def test_matrix(case: Case, device: Device) -> None:
    check_case(case, device)


@pytest.mark.parametrize("dtypes", [F32, BF16], ids=lambda dtypes: dtypes[0])
@pytest.mark.parametrize("layout", ["ragged", "paged"])
def test_new_outputs(dtypes: tuple[str, str, str], layout: str, device: Device) -> None:
    """Without `out` and `lse` the engine makes them, and overwrites nothing of the last run's."""
    problem = device.build(cases.MIXED.but("new", dtypes=dtypes, layout=layout))
    attention = attention_for(problem, device.backend)
    problem.plan(attention)
    kv = device.put_kv(problem.kv)
    first = attention.run(device.put(problem.q), kv)
    kept = device.get(first).copy()
    new, new_lse = attention.run(device.put(-problem.q), kv, return_lse=True)
    assert tuple(first.shape) == tuple(new.shape) == (len(problem.q), 4, 64)
    np.testing.assert_array_equal(device.get(first), kept)
    compare(problem, kept, None)
    out, lse = device.get(new), device.get(new_lse)
    assert out.dtype == kept.dtype == DTYPES[problem.case.dtypes[2]]
    assert lse.shape == (len(problem.q), 4)
    assert lse.dtype == np.float32
    problem.requests = [(-q, *rest) for q, *rest in problem.requests]
    compare(problem, out, lse)


def test_infinite_garbage(device: Device) -> None:
    """Infinities in slots that no request owns do not reach an output."""
    for dtypes in (F32, BF16, F16):
        problem = device.build(cases.MIXED.but("inf", layout="paged", page_size=7, dtypes=dtypes))
        base = problem.kv.base
        base[np.isnan(base.astype(np.float32))] = -np.inf
        compare(problem, *execute(problem, attention_for(problem, device.backend), device))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_hidden_values_do_not_matter(poison: float, device: Device) -> None:
    """NaN and infinity in V at positions that causality, window or mask hide from every row."""
    case = Case("hidden", (3, 20), (90, 100), variant=Variant(causal=True, window_left=10))
    problem = device.build(case)
    out, lse = execute(problem, attention_for(problem, device.backend), device)
    k, v = problem.kv
    for x in (k, v):
        x[:75] = poison  # request 0: rows see 77..89
        x[90 : 90 + 65] = poison  # request 1: rows see 70..99
    out2, lse2 = execute(problem, attention_for(problem, device.backend), device)
    np.testing.assert_array_equal(out, out2)
    np.testing.assert_array_equal(lse, lse2)


@pytest.mark.parametrize("dtypes", [F32, BF16], ids=lambda dtypes: dtypes[0])
def test_nan_stays_in_its_row(dtypes: tuple[str, str, str], device: Device) -> None:
    """A NaN in a query reaches its own row and head only, one in the KV its own request."""
    case = Case("nan", (30, 9, 1), (60, 9, 300), dtypes=dtypes, variant=Variant(causal=True))
    problem = device.build(case)
    expected, _ = execute(problem, attention_for(problem, device.backend), device)
    problem.q[17, 2, 5] = np.nan
    out, lse = execute(problem, attention_for(problem, device.backend), device)
    assert np.isnan(out[17, 2].astype(np.float32)).all()
    assert np.isnan(lse[17, 2])
    out[17, 2] = expected[17, 2]
    np.testing.assert_array_equal(out, expected)

    problem = device.build(case)
    for x in problem.kv:
        x[60:69] = np.nan  # request 1
    out, lse = execute(problem, attention_for(problem, device.backend), device)
    assert np.isnan(out[30:39].astype(np.float32)).all()
    assert np.isnan(lse[30:39]).all()
    out[30:39] = expected[30:39]
    np.testing.assert_array_equal(out, expected)


def test_one_object_many_plans(device: Device) -> None:
    """Plans of one object replace each other: larger, smaller, empty, with and without mask."""
    first = device.build(cases.MIXED.but("replan", layout="paged", variant=Variant(causal=True)))
    attention = attention_for(first, device.backend)
    for q_lens, kv_lens, mask, layout in (
        ((1,), (5,), None, "paged"),
        ((30, 7), (300, 70), "bool", "paged"),
        (12 * (1,), tuple(range(1, 600, 50)), None, "table"),
        ((), (), None, "paged"),
        ((4, 0, 9), (4, 3, 900), "packed", "table"),
        ((2,), (2,), None, "paged_lens"),
        (cases.MIXED.q_lens, cases.MIXED.kv_lens, None, "paged"),
    ):
        problem = build(
            first.case.but(f"{q_lens}", q_lens=q_lens, kv_lens=kv_lens, mask=mask, layout=layout)
        )
        compare(problem, *execute(problem, attention, device))


def test_one_plan_many_runs(device: Device) -> None:
    """One plan serves all layers: other arrays, other strides, other options."""
    base = device.adapt(
        Case("layers", (1, 5, 40), (300, 77, 40), layout="paged", variant=Variant(causal=True))
    )
    attention = None
    for layer, changes in enumerate(
        (
            {},
            {"sinks": True},
            {"scales": "head"},
            {"scales": "number"},
            {"stacked": False},
            {},
        )
    ):
        problem = build(base.but(f"layer{layer}", **changes))
        if attention is None:
            attention = attention_for(problem, device.backend)
            problem.plan(attention)
        out, lse = execute(problem, attention, device, plan=False)
        compare(problem, out, lse)


def test_workspace_of_the_caller(device: Device) -> None:
    """Exactly `workspace_size()` bytes suffice, nothing is written around, any content does."""
    for changes in ({}, {"task": {"num_workers": 9}}, {"dtypes": BF16, "heads": (8, 1)}):
        problem = device.build(cases.DECODE.but("workspace", **changes))
        capacity = {"max_batch_size": 5, "max_q_tokens": 5, "max_kv_pages": 40}
        sized = attention_for(problem, device.backend, **capacity)
        with pytest.raises(flashbsr.PlanError):
            sized.workspace_size()
        problem.plan(sized)
        size = sized.workspace_size()
        assert size > 0
        guard = 4096
        arena = np.full(size + 2 * guard, 0xFF, np.uint8)
        arena[:guard] = arena[-guard:] = 0xA5
        arena = device.put(arena)
        attention = flashbsr.Attention(
            flashbsr.AttentionSpec(**problem.spec_fields()),
            flashbsr.TaskInfo(**{**problem.task_fields(), "backend": device.backend, **capacity}),
            workspace=arena[guard:-guard],
        )
        compare(problem, *execute(problem, attention, device))
        for edge in (arena[:guard], arena[-guard:]):
            assert (device.get(edge) == 0xA5).all()


def test_strides_of_all_signs(device: Device) -> None:
    """Zero and negative strides (PyTorch has no negative ones), and K and V that are one array."""
    problem = device.build(
        Case("signs", (6, 11), (30, 11), heads=(4, 4), variant=Variant(causal=True))
    )
    attention = attention_for(problem, device.backend)
    problem.plan(attention)

    def run(q: np.ndarray, k: Any, v: Any) -> np.ndarray:
        return device.get(attention.run(device.put(q), (device.put(k), device.put(v)))).copy()

    q, (k, v) = problem.q, problem.kv
    one_head = np.broadcast_to(k[:, :1], k.shape)
    np.testing.assert_array_equal(run(q, one_head, v), run(q, one_head.copy(), v))
    same = device.put(k)
    np.testing.assert_array_equal(run(q, same, same), run(q, k, k.copy()))
    if device is CPU:
        backwards = np.ascontiguousarray(v[::-1, ::-1])[::-1, ::-1]
        assert max(backwards.strides[:2]) < 0
        np.testing.assert_array_equal(run(q, k, backwards), run(q, k, v))


def moved(x: np.ndarray, by: int = 1) -> np.ndarray:
    """A copy that starts `by` bytes after an aligned address."""
    raw = np.zeros(x.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 32 + by
    y = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


def test_odd_addresses() -> None:
    """The CPU reads arrays that are not aligned to their element, as a mapped file may hold."""
    for dtypes in (F32, BF16, F16):
        problem = build(cases.PREFILL.but("odd", dtypes=dtypes, layout="paged"))
        attention = attention_for(problem)
        problem.plan(attention)
        expected = attention.run(problem.q, problem.kv)
        assert moved(problem.q).ctypes.data % 2 == 1
        out = attention.run(moved(problem.q), moved(problem.kv), out=moved(0 * expected))
        np.testing.assert_array_equal(out, expected)


def test_rows_that_are_not_aligned(device: Device) -> None:
    """CUDA wants 16-byte rows: an array that has not got them is named, and nothing is written."""
    problem = device.build(cases.PREFILL.but("aligned", dtypes=F16, stacked=False))
    attention = attention_for(problem, device.backend)
    problem.plan(attention)
    k, v = problem.kv
    good = {"q": problem.q, "k": k, "v": v, "out": np.zeros(problem.q.shape, np.float16)}
    for name in good:
        arrays = {key: device.put(np.ascontiguousarray(x)) for key, x in good.items()}
        flat = device.put(np.zeros(good[name].size + 8, np.float16))
        arrays[name] = flat[1 : 1 + good[name].size].reshape(good[name].shape)
        if device.is_cuda:
            with pytest.raises(flashbsr.FlashbsrError, match=rf"^{name}\b.*16-byte"):
                attention.run(arrays["q"], (arrays["k"], arrays["v"]), out=arrays["out"])
            assert not device.get(arrays["out"]).any()
        else:
            attention.run(arrays["q"], (arrays["k"], arrays["v"]), out=arrays["out"])


def huge_cache(device: Device, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """A cache over gigabytes: on the CPU in anonymous memory of which only the pages written take
    room; a GPU has enough.
    """
    span = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    if device is CPU:
        itemsize = DTYPES[dtype].itemsize
        memory = np.frombuffer(cases.sparse_memory(span * itemsize), DTYPES[dtype])
        return as_strided(memory, shape, [itemsize * n for n in strides])
    torch = framework("torch")
    flat = torch.empty(span, dtype=getattr(torch, dtype), device=device.name)
    return flat.as_strided(shape, strides)


@pytest.mark.skipif(sys.platform != "linux", reason="sparse anonymous memory")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("many_pages", [False, True])
def test_huge_offsets(dtype: str, many_pages: bool, device: Device) -> None:
    """Element offsets beyond 2^31, by a long page stride or by a high page id."""
    page_size, heads, dim, kv_lens = 4, 2, 32, (9, 6)
    q_type = "float32" if dtype.startswith("float8") else dtype
    problem = device.build(
        Case(
            "huge",
            (1, 3),
            kv_lens,
            heads=(4, 2),
            dims=(dim, dim),
            layout="paged",
            dtypes=(q_type, dtype, q_type),
            page_size=page_size,
            variant=Variant(causal=True),
        )
    )
    dense = page_size * heads * dim
    stride = 2 * dense if many_pages else 2**30 + 16
    num_pages = 2**32 // stride + 2 if many_pages else 5
    cache = huge_cache(
        device,
        problem.case.dtypes[1],
        (num_pages, 2, page_size, heads, dim),
        (stride, dense, heads * dim, dim, 1),
    )
    pages = np.array([num_pages - 1, 0, num_pages - 2, 1, num_pages - 3], np.int32)
    assert int(pages.max()) * stride > 2**31
    problem.kv_indices = pages
    for request, (_, k, v, _) in enumerate(problem.requests):
        own = pages[slice(*problem.kv_indptr[request : request + 2])]
        for token in range(kv_lens[request]):
            page, slot = int(own[token // page_size]), token % page_size
            cache[page, 0, slot] = device.put(k[token])
            cache[page, 1, slot] = device.put(v[token])
    for kv in (cache, (cache[:, 0], cache[:, 1])):
        problem.kv = kv
        compare(problem, *execute(problem, attention_for(problem, device.backend), device))


def test_run_stats() -> None:
    """Seconds of the last run on the CPU: the kernel's, and each thread's share."""
    problem = build(cases.PREFILL.but("stats", task={"num_threads": 2}))
    attention = attention_for(problem)
    execute(problem, attention)
    stats = attention.run_stats()
    assert 0 < stats["kernel_s"] < 60
    assert len(stats["busy_s"]) == 2
    assert all(0 <= busy <= stats["kernel_s"] * 1.5 + 1e-3 for busy in stats["busy_s"])
