# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Results are equal bit for bit where nothing but the circumstances differ."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from cases import BF16, F16, F32, FP8, Case
from harness import CPU, Device, attention_for, execute
from reference import Variant

# Splits, merges, several tiles a request: whatever could depend on the order of threads.
BUSY = Case(
    "busy",
    (1, 1, 90, 1, 40),
    (4000, 3, 400, 700, 40),
    heads=(8, 2),
    layout="paged",
    variant=Variant(causal=True),
)
BASES = [
    BUSY,
    BUSY.but("bf16", dtypes=BF16),
    BUSY.but("f16", dtypes=F16, sinks=True),
    BUSY.but("fp8", dtypes=("bfloat16", "float8_e4m3fn", "bfloat16"), scales="head"),
    BUSY.but("fp8_q", dtypes=FP8, dims=(128, 128), scales="head"),
    BUSY.but("sigmoid", variant=Variant(activation="sigmoid", causal=True)),
    BUSY.but("rope", variant=Variant(causal=True, pos_encoding_mode="ROPE_LLAMA")),
    BUSY.but("mask", mask="bool"),
]
by_name = pytest.mark.parametrize("case", BASES, ids=lambda case: case.name)


def bits(problem: cases.Problem, device: Device, **task: object) -> tuple[bytes, bytes]:
    out, lse = execute(problem, attention_for(problem, device.backend, **task), device)
    return out.tobytes(), b"" if lse is None else lse.tobytes()


def threads(device: Device, count: int) -> dict[str, int]:
    """`num_threads` where threads compute."""
    return {} if device.is_cuda else {"num_threads": count}


@by_name
def test_repeated_runs(case: Case, device: Device) -> None:
    problem = device.build(case)
    attention = attention_for(problem, device.backend, **threads(device, 3))
    problem.plan(attention)
    assert attention.plan_info.header.num_merges > 0
    first = [x.tobytes() for x in execute(problem, attention, device, plan=False) if x is not None]
    for _ in range(10):
        again = execute(problem, attention, device, plan=False)
        assert [x.tobytes() for x in again if x is not None] == first


@by_name
@pytest.mark.parametrize("num_workers", [None, 1, 5])
def test_thread_counts(case: Case, num_workers: int | None) -> None:
    """Of the CPU; a GPU's parallelism is its own."""
    problem = cases.build(case)
    results = {
        bits(problem, CPU, num_workers=num_workers, num_threads=n) for n in (1, 2, 3, 8, None)
    }
    assert len(results) == 1


@by_name
def test_objects_and_workspaces(case: Case, device: Device) -> None:
    """A new object, one used before, one with capacity to spare."""
    case = device.adapt(case)
    problem = cases.build(case)
    expected = bits(problem, device)
    assert bits(problem, device) == expected
    attention = attention_for(problem, device.backend)
    other = cases.build(case.but("other", q_lens=(3, 200), kv_lens=(900, 333)))
    execute(other, attention, device)
    out, lse = execute(problem, attention, device)
    assert (out.tobytes(), b"" if lse is None else lse.tobytes()) == expected


@by_name
def test_page_permutations(case: Case, device: Device) -> None:
    """Pages lie elsewhere, in another layout: the same bits."""
    case = device.adapt(case)
    problem = cases.build(case)
    expected = bits(problem, device)
    for kv_layout in ("NHD", "HND"):
        for stacked in (True, False):
            for seed in (1, 2):
                other = cases.build(
                    case.but(
                        "moved", kv_layout=kv_layout, stacked=stacked, page_size=(16, 1)[seed - 1]
                    )
                )
                shuffle = np.random.default_rng(seed).permutation(
                    len(other.kv[0]) if isinstance(other.kv, tuple) else len(other.kv)
                )
                where = np.argsort(shuffle).astype(np.int32)
                other.kv = (
                    tuple(x[shuffle] for x in other.kv)
                    if isinstance(other.kv, tuple)
                    else other.kv[shuffle]
                )
                used = other.kv_indptr[-1]
                other.kv_indices[:used] = where[other.kv_indices[:used]]
                assert bits(other, device) == expected


@pytest.mark.parametrize("dtypes", [F32, BF16], ids=lambda dtypes: dtypes[0])
@pytest.mark.parametrize("split", [16, 100, 4096])
def test_batch_invariance(dtypes: tuple[str, str, str], split: int, device: Device) -> None:
    """With `fixed_split_size` a request's result does not depend on its company."""
    base = device.adapt(BUSY.but("invariant", dtypes=dtypes, task={"fixed_split_size": split}))
    together = cases.build(base)
    out, lse = execute(together, attention_for(together, device.backend), device)
    for i in range(len(base.q_lens)):
        rows = slice(*together.qo_indptr[i : i + 2])
        alone = cases.build(base)
        alone.q = alone.q[rows]
        pages = slice(*alone.kv_indptr[i : i + 2])
        alone.kv_indices = alone.kv_indices[pages]
        alone.kv_indptr = np.array([0, pages.stop - pages.start], np.int32)
        alone.qo_indptr = np.array([0, rows.stop - rows.start], np.int32)
        alone.last_page_len = alone.last_page_len[i : i + 1]
        for count in (1, 4):
            attention = attention_for(
                alone, device.backend, num_workers=2 + count, **threads(device, count)
            )
            out_one, lse_one = execute(alone, attention, device)
            np.testing.assert_array_equal(out_one, out[rows])
            np.testing.assert_array_equal(lse_one, lse[rows])


@pytest.mark.parametrize("requests", [1, 5, 9])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtypes", [F32, BF16, F16], ids=lambda dtypes: dtypes[0])
def test_requests_that_pad_a_batch(
    dtypes: tuple[str, str, str], sinks: bool, requests: int, device: Device
) -> None:
    """Behind the others, without keys: those are cut as without them, and their bits are equal."""
    lens = tuple(2900 - 37 * i for i in range(requests)) + (0,) * (16 - requests)
    case = Case("padded", (1,) * 16, lens, heads=(8, 2), layout="paged", dtypes=dtypes, sinks=sinks)
    case = device.adapt(case)
    padded = cases.build(case)
    out, lse = execute(padded, attention_for(padded, device.backend), device)
    assert not out[requests:].any()
    assert lse is not None
    assert sinks or np.isneginf(lse[requests:]).all()
    alone = cases.build(case)
    alone.q = alone.q[:requests]
    alone.kv_indptr, alone.qo_indptr = (
        x[: requests + 1] for x in (alone.kv_indptr, alone.qo_indptr)
    )
    alone.last_page_len = alone.last_page_len[:requests]
    out_alone, lse_alone = execute(alone, attention_for(alone, device.backend), device)
    np.testing.assert_array_equal(out_alone, out[:requests])
    np.testing.assert_array_equal(lse_alone, lse[:requests])
