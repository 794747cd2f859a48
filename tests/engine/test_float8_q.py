# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Queries in float8: types of the output, what goes with them, options; and kernel families.

The numbers are the matrix's business.
"""

from __future__ import annotations

from typing import Any

import cases
import flashbsr
import numpy as np
import pytest
from cases import FP8, Case, Problem
from flashbsr import _core, errors
from harness import Device, attention_for, compare, execute
from reference import DTYPES, Variant

CASE = Case(
    "float8_q",
    (5, 40, 1),
    (37, 40, 300),
    heads=(8, 2),
    dims=(128, 128),
    dtypes=FP8,
    layout="paged",
    variant=Variant(causal=True),
)


def planned(problem: Problem, **task: Any) -> flashbsr.Attention:
    attention = attention_for(problem, **task)
    problem.plan(attention)
    return attention


def test_output_types() -> None:
    """bfloat16, or what `o_dtype` says, or where that is open what `out` is."""
    problem = cases.build(CASE)
    shape = problem.q.shape
    assert planned(problem).run(problem.q, problem.kv).dtype == DTYPES["bfloat16"]
    for name in ("float32", "float16", "bfloat16", "float8_e4m3fn"):
        made = planned(problem, o_dtype=name).run(problem.q, problem.kv)
        given = np.full(shape, np.nan, np.float32).astype(DTYPES[name])
        assert planned(problem).run(problem.q, problem.kv, out=given) is given
        assert made.dtype == given.dtype == DTYPES[name]
        np.testing.assert_array_equal(made, given)
    with pytest.raises(errors.DTypeError, match=r"^out\b.*float16.*bfloat16"):
        planned(problem, o_dtype="bfloat16").run(
            problem.q, problem.kv, out=np.empty(shape, np.float16)
        )
    for name in ("float8_e5m2", "int32"):
        with pytest.raises(errors.DTypeError, match=rf"^out\b.*{name}.*float8_e4m3fn"):
            planned(problem).run(problem.q, problem.kv, out=np.empty(shape, DTYPES.get(name, name)))


def test_types_may_change_from_run_to_run() -> None:
    """One plan serves float8 and 16-bit queries where the task leaves the types open."""
    for dtypes in (FP8, ("bfloat16", "float8_e4m3fn", "bfloat16"), FP8):
        problem = cases.build(CASE.but("open", dtypes=dtypes))
        if dtypes is FP8:
            attention = planned(problem)
        compare(problem, *execute(problem, attention, plan=False))


def test_types_said_before() -> None:
    problem = cases.build(CASE)
    attention = planned(problem, q_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")
    assert "q [float8_e4m3fn]" not in str(attention.explain())
    compare(problem, *execute(problem, attention, plan=False))
    with pytest.raises(errors.DTypeError, match=r"^q\b.*bfloat16.*float8_e4m3fn"):
        attention.run(problem.q.astype(DTYPES["bfloat16"]), problem.kv)


def test_explain_counts_bytes() -> None:
    """One byte per element of q and KV, two of the output."""
    problem = cases.build(CASE)
    attention = planned(problem, q_dtype="float8_e4m3fn")
    elements = problem.q.size
    for explanation in (attention.explain(), None):
        if explanation is None:
            attention.run(problem.q, problem.kv)
            explanation = attention.explain()
        assert explanation.qo_bytes == 3 * elements


def test_e5m2_is_no_query_type() -> None:
    problem = cases.build(CASE)
    e5m2 = DTYPES["float8_e5m2"]
    with pytest.raises(errors.DTypeError, match=r"^q: got float8_e5m2; .*float8_e4m3fn"):
        planned(problem).run(problem.q.astype(e5m2), problem.kv)
    with pytest.raises(errors.DTypeError, match=r"^kv: got float8_e5m2; .*float16 or bfloat16"):
        planned(problem).run(problem.q, problem.kv.astype(e5m2))


def test_accumulation_is_exact_here() -> None:
    """Both names compute the same on the CPU, and only the two are names."""
    problem = cases.build(CASE)
    outs = [
        planned(problem, fp8_accumulation=name).run(problem.q, problem.kv)
        for name in ("default", "fast")
    ]
    np.testing.assert_array_equal(*outs)


def test_cuda_without_kernels_for_them(device: Device) -> None:
    """Refused by name, and not computed with some other type."""
    if not device.is_cuda or device.build(CASE).case.dtypes == FP8:
        pytest.skip("float8 queries are computed here")
    problem = cases.build(CASE)
    attention = attention_for(problem, device.backend)
    problem.plan(attention)
    with pytest.raises(errors.UnsupportedError, match=r"^q: got float8_e4m3fn in cuda:\d; .*there"):
        attention.run(device.put(problem.q), device.put_kv(problem.kv))


@pytest.mark.parametrize("family", ["fa2", "fa3"])
def test_kernel_families_are_cuda(family: str) -> None:
    """They are names of the CUDA engine: refused where that is, taken where it is."""
    if _core.cuda_problem():
        with pytest.raises(errors.UnsupportedError, match=rf"^backend: got '{family}'; .*'cpu'"):
            flashbsr.TaskInfo(1, 1, 64, backend=family, device=0)
        return
    assert flashbsr.TaskInfo(1, 1, 64, backend=family, device=0).backend == family
    x = np.zeros((1, 1, 64), np.float16)
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(), flashbsr.TaskInfo(1, 1, 64, backend=family)
    )
    attention.plan(flashbsr.Ragged([0, 1], [0, 1]))
    with pytest.raises(errors.DeviceError, match=rf"^q\b.*backend='{family}'"):
        attention.run(x, (x, x))
