# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs cases on devices and compares. A backend joins the suite by a line in `DEVICES`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cases
import flashbsr
import numpy as np
import pytest
from cases import Case, Problem
from compare import MismatchError, assert_attention


def framework(name: str) -> Any:
    """Import an optional array framework: without it the module's tests skip, in CI they fail."""
    if os.environ.get("CI"):
        return importlib.import_module(name)
    return pytest.importorskip(name)


@dataclass(frozen=True)
class Device:
    """Where cases run: the backend's name, and how arrays get there and back."""

    name: str
    backend: str
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]


DEVICES = [
    Device("cpu", "cpu", put=lambda x: x, get=np.asarray),
]


def attention_for(problem: Problem, backend: str = "cpu", **task: Any) -> flashbsr.Attention:
    """The engine for a problem, not planned yet."""
    return flashbsr.Attention(
        flashbsr.AttentionSpec(**problem.spec_fields()),
        flashbsr.TaskInfo(**{**problem.task_fields(), "backend": backend, **task}),
    )


def assert_poison_survived(view: np.ndarray, label: str) -> None:
    """Nothing was written around `view`, which `cases.strided` made."""
    base = view.base
    assert base is not None
    outside = np.isnan(base.astype(np.float32))
    outside[(*(slice(0, n) for n in view.shape[:-1]), slice(1, 1 + view.shape[-1]))] = True
    if not outside.all():
        at = tuple(int(i) for i in np.argwhere(~outside)[0])
        raise MismatchError(
            f"{label}: written outside of the output, at {at} of the array around it"
        )


def execute(
    problem: Problem, attention: flashbsr.Attention, device: Device = DEVICES[0], plan: bool = True
) -> tuple[np.ndarray, np.ndarray | None]:
    """Plan and run on poisoned outputs; `out` and `lse` (natural logarithm; None for sigmoid)."""
    if plan:
        problem.plan(attention)
    out, lse = problem.new_outputs()
    kv = (
        tuple(map(device.put, problem.kv))
        if isinstance(problem.kv, tuple)
        else device.put(problem.kv)
    )
    options = {
        name: device.put(value) if isinstance(value, np.ndarray) else value
        for name, value in problem.run_options.items()
    }
    device_out = device.put(out)
    if problem.case.variant.activation == "sigmoid":
        attention.run(device.put(problem.q), kv, out=device_out, **options)
        return device.get(device_out), None
    device_lse = device.put(lse)
    attention.run(
        device.put(problem.q), kv, out=device_out, lse=device_lse, return_lse=True, **options
    )
    lse = device.get(device_lse)
    if problem.case.task.get("lse_base") == "2":
        lse = lse * np.log(2.0)
    return device.get(device_out), lse


def check_case(case: Case, device: Device = DEVICES[0]) -> None:
    """Build, run, and only then compute the reference: no recycled buffer can hold the answer."""
    problem = cases.build(case)
    attention = attention_for(problem, device.backend)
    inputs = [problem.q, *(problem.kv if isinstance(problem.kv, tuple) else [problem.kv])]
    before = [x.tobytes() for x in inputs]
    out, lse = execute(problem, attention, device)
    assert [x.tobytes() for x in inputs] == before, "run wrote into its inputs"
    compare(problem, out, lse)
    assert_poison_survived(out, case.name)


def compare(problem: Problem, out: np.ndarray, lse: np.ndarray | None) -> None:
    """The tolerance rule, with the problem's own reference in both precisions."""
    case, work = problem.case, problem.case.dtypes[0]
    assert_attention(out, lse, problem.reference(), problem.reference(work), work, case.name)
