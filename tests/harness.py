# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs cases on devices and compares. A backend joins the suite by a line in `_devices`."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cases
import flashbsr
import heap
import numpy as np
import pytest
import torch_device
from cases import Case, Problem
from compare import MismatchError, assert_attention
from flashbsr.errors import UnsupportedError
from flashbsr.info import engine_info
from flashbsr.jit.cxx import compiler
from reference import Hooks

heap.keep()


def framework(name: str) -> Any:
    """Import an optional array framework: without it the module's tests skip, in CI they fail."""
    if os.environ.get("CI"):
        return importlib.import_module(name)
    return pytest.importorskip(name)


def _no_compiler() -> bool:
    try:
        compiler()
    except UnsupportedError:
        return True
    return False


# Variants for the CPU and fakes of libraries are compiled where they are used. In CI a missing
# compiler is a failure.
needs_cxx = pytest.mark.skipif(
    not os.environ.get("CI") and _no_compiler(), reason="no C++ compiler here"
)


def _same(case: Case) -> Case:
    return case


@dataclass(frozen=True)
class Device:
    """Where cases run: the backend, how arrays get there and back, and what it makes of a case."""

    name: str
    backend: str
    put: Callable[[Any], Any]
    get: Callable[[Any], np.ndarray]
    adapt: Callable[[Case], Case] = _same

    def build(self, case: Case) -> Problem:
        """Arrays of the case as this device runs it, still on the host."""
        return cases.build(self.adapt(case))

    def put_kv(self, kv: Any) -> Any:
        """Copy a stacked cache or a tuple of K and V."""
        return tuple(map(self.put, kv)) if isinstance(kv, tuple) else self.put(kv)

    def upload(self, problem: Problem, indices: bool = False) -> Problem:
        """The problem with q, KV and the run's options on the device; `indices` too if asked."""
        options = {name: self.put(value) for name, value in problem.run_options.items()}
        names = ["q"]
        if indices:
            names += ["qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "block_tables"]
            names += ["kv_lens", "custom_mask", "packed_mask"]
        moved = {name: self.put(getattr(problem, name)) for name in names}
        return dataclasses.replace(
            problem, kv=self.put_kv(problem.kv), run_options=options, **moved
        )

    @property
    def is_cuda(self) -> bool:
        """Whether kernels of the CUDA engine run here, with their rules."""
        return self.backend != "cpu"

    def lend(self, test: str) -> Iterator[Device]:
        """For a test. After a kernel that faulted nothing in this process can go on."""
        yield self
        if self.is_cuda and (problem := cuda_fault()):
            leave(test, problem)


CPU = Device("cpu", "cpu", put=lambda x: x, get=np.asarray)


def has_gpu() -> bool:
    """Ask the driver, so that a machine without one does not import PyTorch to learn that."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return (
        driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    ) and count.value > 0


def _devices() -> list[Device]:
    """Find the CPU, and CUDA where a GPU, PyTorch with CUDA and a build with the backend are.

    FLASHBSR_TEST_CUDA=0 leaves CUDA out, =1 makes it an error that something is missing.
    """
    wish = os.environ.get("FLASHBSR_TEST_CUDA", "")
    if wish == "0" or (wish != "1" and not has_gpu()):
        return [CPU]
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no GPU")
        if "cuda" not in engine_info()["backends"]:
            raise RuntimeError("flashbsr was built without CUDA")
    except (ImportError, RuntimeError):
        if wish == "1":
            raise
        return [CPU]
    put, get = torch_device.putter(torch, "cuda"), torch_device.getter(torch)
    float8_dims = torch_device.FLOAT8_Q_DIMS.get(torch.cuda.get_device_capability(), ())
    adapt = functools.partial(torch_device.adapt, float8_q_dims=float8_dims)
    return [CPU, Device("cuda", "cuda", put, get, adapt)]


def cuda_fault() -> str:
    """What a kernel of this process has done to the GPU's context, or nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def leave(test: str, problem: str) -> None:
    """End this process, whose context on the GPU is lost."""
    print(f"{test}: {problem}", file=sys.stderr, flush=True)
    if "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(70)  # pytest-xdist names the test and starts another worker
    pytest.exit(f"the GPU's context is lost: {problem}", 70)


DEVICES = _devices()


def attention_for(problem: Problem, backend: str = "cpu", **task: Any) -> flashbsr.Attention:
    """The engine for a problem, not planned yet."""
    return flashbsr.Attention(
        flashbsr.AttentionSpec(**problem.spec_fields()),
        flashbsr.TaskInfo(**{**problem.task_fields(), "backend": backend, **task}),
    )


def assert_poison_survived(view: np.ndarray, label: str) -> None:
    """Nothing was written around `view`, which `cases.strided` made, or a device's `put`."""
    base = view.base
    assert base is not None
    memory = base.reshape(-1).view(view.dtype)
    outside = np.isnan(memory.astype(np.float32))
    at = (view.ctypes.data - memory.ctypes.data) // view.itemsize
    steps = [stride // view.itemsize for stride in view.strides]
    np.ndarray(view.shape, bool, outside, at, steps)[...] = True
    if not outside.all():
        raise MismatchError(
            f"{label}: written outside of the output, at element {int(np.argmin(outside))} of the "
            f"array around it, {at} before its first"
        )


def send(device: Device, case: Case) -> tuple[Problem, Problem]:
    """The case's problem on the host, for the reference, and on the device, index arrays too."""
    problem = device.build(case)
    return problem, device.upload(problem, indices=True)


def execute(
    problem: Problem, attention: flashbsr.Attention, device: Device = CPU, plan: bool = True
) -> tuple[np.ndarray, np.ndarray | None]:
    """Plan and run on poisoned outputs; `out` and `lse` (natural logarithm; None for sigmoid)."""
    if plan:
        problem.plan(attention)
    on_device = device.upload(problem)
    out, lse = map(device.put, problem.new_outputs())
    if problem.case.variant.activation == "sigmoid":
        attention.run(on_device.q, on_device.kv, out=out, **on_device.run_options)
        return device.get(out), None
    attention.run(
        on_device.q, on_device.kv, out=out, lse=lse, return_lse=True, **on_device.run_options
    )
    problem.kernel = attention.explain().kernel
    lse = device.get(lse)
    if problem.case.task.get("lse_base") == "2":
        lse = lse * np.log(2.0)
    return device.get(out), lse


def kernel_of(problem: Problem, device: Device) -> str:
    """Name of the kernel that serves a ragged problem, for functions that keep their engine."""
    attention = attention_for(problem, device.backend)
    execute(problem, attention, device)
    return attention.explain().kernel


def input_bits(problem: Problem, device: Device) -> list[bytes]:
    """Contents of q and KV, wherever they are."""
    inputs = [problem.q, *(problem.kv if isinstance(problem.kv, tuple) else [problem.kv])]
    return [device.get(x).tobytes() for x in inputs]


def results_of(case: Case, device: Device = CPU) -> tuple[Problem, np.ndarray, np.ndarray | None]:
    """Build and run a case; neither its inputs nor what is around its outputs may change."""
    problem = device.build(case)
    attention = attention_for(problem, device.backend)
    on_device = device.upload(problem)
    before = input_bits(on_device, device)
    out, lse = execute(on_device, attention, device)
    assert input_bits(on_device, device) == before, "run wrote into its inputs"
    assert_poison_survived(out, case.name)
    problem.kernel = on_device.kernel
    return problem, out, lse


def check_case(case: Case, device: Device = CPU) -> None:
    """Run, and only then compute the reference: no recycled buffer can hold the answer."""
    compare(*results_of(case, device))


def check_variant(
    spec: flashbsr.AttentionSpec,
    hooks: Hooks,
    case: Case,
    device: Device = CPU,
    **extras: Any,
) -> None:
    """A user's variant on a case, whose own variant says the other fields of `spec`.

    `extras` are on the device already.
    """
    problem = device.build(case)
    task = flashbsr.TaskInfo(**{**problem.task_fields(), "backend": device.backend})
    attention = flashbsr.Attention(spec, task)
    problem.plan(attention)
    on_device = device.upload(problem)
    out, lse = map(device.put, problem.new_outputs())
    options = {**on_device.run_options, **extras}
    if hooks.activation is None:
        options["lse"] = lse
    attention.run(on_device.q, on_device.kv, out=out, **options)
    found = device.get(out), None if hooks.activation else device.get(lse)
    work = problem.case.work  # of the types that the device has
    exact, working = problem.reference(hooks=hooks), problem.reference(work, hooks)
    assert_attention(*found, exact, working, work, case.name, attention.explain().kernel)
    assert_poison_survived(found[0], case.name)


def compare(problem: Problem, out: np.ndarray, lse: np.ndarray | None) -> None:
    """The tolerance rule, with the problem's own reference in both precisions."""
    case, work = problem.case, problem.case.work
    exact, working = problem.reference(), problem.reference(work)
    assert_attention(out, lse, exact, working, work, case.name, problem.kernel)
