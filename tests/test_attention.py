# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`Attention` against the reference: the matrix of `cases.py` on every device, and its memory."""

from __future__ import annotations

import sys

import cases
import flashbsr
import matrix
import numpy as np
import pytest
from cases import BF16, F16, F32, Case, build
from harness import (
    Device,
    attention_for,
    check_case,
    compare,
    execute,
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
    problem = build(cases.MIXED.but("new", dtypes=dtypes, layout=layout))
    attention = attention_for(problem, device.backend)
    problem.plan(attention)
    out = attention.run(problem.q, problem.kv)
    kept = out.copy()
    again, lse = attention.run(problem.q, problem.kv, return_lse=True)
    assert out.shape == again.shape == (len(problem.q), 4, 64)
    assert out.dtype == again.dtype == DTYPES[dtypes[2]]
    assert lse.shape == (len(problem.q), 4)
    assert lse.dtype == np.float32
    assert not np.shares_memory(out, again)
    np.testing.assert_array_equal(out, kept)
    compare(problem, again, lse)
    compare(problem, out, None)


def test_infinite_garbage(device: Device) -> None:
    """Infinities in slots that no request owns do not reach an output."""
    for dtypes in (F32, BF16, F16):
        problem = build(cases.MIXED.but("inf", layout="paged", page_size=7, dtypes=dtypes))
        base = problem.kv.base
        base[np.isnan(base.astype(np.float32))] = -np.inf
        compare(problem, *execute(problem, attention_for(problem, device.backend), device))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_hidden_values_do_not_matter(poison: float, device: Device) -> None:
    """NaN and infinity in V at positions that causality, window or mask hide from every row."""
    case = Case("hidden", (3, 20), (90, 100), variant=Variant(causal=True, window_left=10))
    problem = build(case)
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
    problem = build(case)
    expected, _ = execute(problem, attention_for(problem, device.backend), device)
    problem.q[17, 2, 5] = np.nan
    out, lse = execute(problem, attention_for(problem, device.backend), device)
    assert np.isnan(out[17, 2].astype(np.float32)).all()
    assert np.isnan(lse[17, 2])
    out[17, 2] = expected[17, 2]
    np.testing.assert_array_equal(out, expected)

    problem = build(case)
    for x in problem.kv:
        x[60:69] = np.nan  # request 1
    out, lse = execute(problem, attention_for(problem, device.backend), device)
    assert np.isnan(out[30:39].astype(np.float32)).all()
    assert np.isnan(lse[30:39]).all()
    out[30:39] = expected[30:39]
    np.testing.assert_array_equal(out, expected)


def test_one_object_many_plans(device: Device) -> None:
    """Plans of one object replace each other: larger, smaller, empty, with and without mask."""
    first = build(cases.MIXED.but("replan", layout="paged", variant=Variant(causal=True)))
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
    base = Case("layers", (1, 5, 40), (300, 77, 40), layout="paged", variant=Variant(causal=True))
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
        problem = build(cases.DECODE.but("workspace", **changes))
        capacity = {"max_batch_size": 5, "max_q_tokens": 5, "max_kv_pages": 40}
        size = attention_for(problem, device.backend, **capacity).workspace_size()
        assert size > 0
        guard = 4096
        arena = np.full(size + 2 * guard, 0xFF, np.uint8)
        arena[:guard] = arena[-guard:] = 0xA5
        attention = flashbsr.Attention(
            flashbsr.AttentionSpec(**problem.spec_fields()),
            flashbsr.TaskInfo(**{**problem.task_fields(), "backend": device.backend, **capacity}),
            workspace=device.put(arena[guard:-guard]),
        )
        compare(problem, *execute(problem, attention, device))
        for edge in (arena[:guard], arena[-guard:]):
            assert (edge == 0xA5).all()


def test_strides_of_all_signs(device: Device) -> None:
    """Zero and negative strides, and K and V that are one array."""
    problem = build(Case("signs", (6, 11), (30, 11), heads=(4, 4), variant=Variant(causal=True)))
    attention = attention_for(problem, device.backend)
    problem.plan(attention)

    def run(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return np.array(attention.run(device.put(q), (device.put(k), device.put(v))))

    q, (k, v) = problem.q, problem.kv
    one_head = np.broadcast_to(k[:, :1], k.shape)
    np.testing.assert_array_equal(run(q, one_head, v), run(q, one_head.copy(), v))
    backwards = np.ascontiguousarray(v[::-1, ::-1])[::-1, ::-1]
    assert max(backwards.strides[:2]) < 0
    np.testing.assert_array_equal(run(q, k, backwards), run(q, k, v))
    np.testing.assert_array_equal(run(q, k, k), run(q, k, k.copy()))


def test_odd_addresses(device: Device) -> None:
    """Arrays that are not aligned to their element, as a memory-mapped file may hold them."""

    def moved(x: np.ndarray) -> np.ndarray:
        y = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
        y[...] = x
        assert y.ctypes.data % 2 == 1
        return y

    for dtypes in (F32, BF16, F16):
        problem = build(cases.PREFILL.but("odd", dtypes=dtypes, layout="paged"))
        attention = attention_for(problem, device.backend)
        problem.plan(attention)
        expected = attention.run(problem.q, problem.kv)
        out = attention.run(moved(problem.q), moved(problem.kv), out=moved(0 * expected))
        np.testing.assert_array_equal(out, expected)


@pytest.mark.skipif(sys.platform != "linux", reason="sparse anonymous memory")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("many_pages", [False, True])
def test_huge_offsets(dtype: str, many_pages: bool, device: Device) -> None:
    """Element offsets beyond 2^31, by a long page stride or by a high page id.

    The cache lies in anonymous memory of which only the pages written take room.
    """
    page_size, heads, dim = 4, 2, 32
    kv_lens, itemsize = (9, 6), DTYPES[dtype].itemsize
    dense = page_size * heads * dim
    stride = 2 * dense if many_pages else 2**30 + 8
    num_pages = 2**32 // stride + 2 if many_pages else 5
    memory = cases.sparse_memory((num_pages * stride + dense) * itemsize)
    cache = as_strided(
        np.frombuffer(memory, DTYPES[dtype]),
        (num_pages, 2, page_size, heads, dim),
        tuple(itemsize * n for n in (stride, dense, heads * dim, dim, 1)),
    )
    q_type = "float32" if dtype.startswith("float8") else dtype
    problem = build(
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
    pages = np.array([num_pages - 1, 0, num_pages - 2, 1, num_pages - 3], np.int32)
    assert int(pages.max()) * stride > 2**31
    problem.kv_indices = pages
    for request, (_, k, v, _) in enumerate(problem.requests):
        own = pages[slice(*problem.kv_indptr[request : request + 2])]
        for token in range(kv_lens[request]):
            cache[own[token // page_size], :, token % page_size] = k[token], v[token]
    for kv in (cache, (cache[:, 0], cache[:, 1])):
        problem.kv = kv
        compare(problem, *execute(problem, attention_for(problem, device.backend), device))


def test_run_stats(device: Device) -> None:
    """Seconds of the last run: the kernel's, and each thread's share."""
    problem = build(cases.PREFILL.but("stats", task={"num_threads": 2}))
    attention = attention_for(problem, device.backend)
    execute(problem, attention, device)
    stats = attention.run_stats()
    assert 0 < stats["kernel_s"] < 60
    assert len(stats["busy_s"]) == 2
    assert all(0 <= busy <= stats["kernel_s"] * 1.5 + 1e-3 for busy in stats["busy_s"])
