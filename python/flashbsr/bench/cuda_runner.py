# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs one workload on a GPU: makes its data, checks rows, times replays, adds the peers."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import math
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import flashbsr
from flashbsr.errors import FlashbsrError, UnsupportedError
from flashbsr.info import engine_info

from .cuda_bounds import run_bounds, run_bounds_plan, run_update
from .cuda_codes import run_append_codes, run_codes
from .cuda_data import io_bytes, normal, paged_sets, set_count
from .cuda_decode import decode_call
from .cuda_latent import run_latent
from .cuda_mixed import run_mixed
from .cuda_peers import add_peers
from .cuda_prefill import run_prefill
from .cuda_share import run_share
from .cuda_sparse import run_sparse
from .cuda_timing import Gpu, measure, measure_limits
from .cuda_workloads import REFERENCE_READ_GBS
from .machine import describe_machine
from .results import Result
from .runner import time_plan
from .session import usable_cores
from .timing import Samples
from .workloads import ITEMSIZE, Workload

__all__ = ["CudaSession", "find_gpu", "run_cuda_workload"]

HOST_CALLS = 1000


def find_gpu() -> Gpu:
    """Return the current CUDA device.

    Raises
    ------
    FlashbsrError
        Without PyTorch, a GPU or a build with CUDA; says which.
    """
    missing = "PyTorch, which makes the arrays and the graphs"
    if importlib.util.find_spec("torch") is not None:
        torch = importlib.import_module("torch")
        missing = "a GPU that PyTorch sees"
        if torch.cuda.is_available():
            missing = "a build of flashbsr with CUDA"
            if "cuda" in engine_info()["backends"]:
                return Gpu(torch)
    raise FlashbsrError("--device", "'cuda'", f"{missing}; 'flashbsr bench' runs on the CPU")


def describe_device(gpu: Gpu) -> dict[str, Any]:
    """Name, size and driver of the device."""
    properties = gpu.torch.cuda.get_device_properties(gpu.device)
    driver = "unknown"
    if shutil.which("nvidia-smi") is not None:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        driver = done.stdout.partition("\n")[0].strip() or driver
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver,
        "cuda": gpu.torch.version.cuda,
    }


@dataclass(slots=True)
class CudaSession:
    """Settings, and the device's limits, measured before the first workload and after the last.

    Attributes
    ----------
    gpu : Gpu
    quick : bool
        Recorded only: a quick run has fewer workloads, measured alike.
    peer : bool
        Also time PyTorch.
    tick : callable
        Gets the fraction of the current workload that is done.
    samples : list of dict
        What `measure_limits` gave.
    """

    gpu: Gpu
    quick: bool = False
    peer: bool = True
    tick: Callable[[float], None] = field(default=lambda _: None)
    samples: list[dict[str, Any]] = field(default_factory=list)

    device = "cuda"

    def sample_limits(self) -> None:
        """Measure copy, read and product once more."""
        self.samples.append(measure_limits(self.gpu))

    def limits(self) -> dict[str, Any]:
        """Mean of the measurements."""
        if not self.samples:
            self.sample_limits()
        found = {
            name: statistics.fmean(sample[name] for sample in self.samples)
            for name in ("copy_gbs", "read_gbs", "matmul_tflops")
        }
        return {**found, "read_method": self.samples[0]["read_method"], "samples": self.samples}

    def machine(self) -> dict[str, Any]:
        """Describe host and device."""
        return {**describe_machine(usable_cores()), "device": describe_device(self.gpu)}

    def finish(self, results: Iterable[Result]) -> None:
        """Add the metrics that are relative to the limits."""
        self.sample_limits()
        limits = self.limits()
        for result in results:
            metrics = result.metrics
            if "gbs" in metrics:
                metrics["read_fraction"] = metrics["gbs"] / limits["read_gbs"]
                metrics["copy_fraction"] = metrics["gbs"] / limits["copy_gbs"]
            if "tflops" in metrics:
                metrics["matmul_fraction"] = metrics["tflops"] / limits["matmul_tflops"]
            if "us" in metrics:
                metrics["us_scaled"] = metrics["us"] * limits["read_gbs"] / REFERENCE_READ_GBS


def run_cuda_workload(workload: Workload, session: CudaSession) -> Result:
    """Measure one workload; one that the device has no kernel for is skipped with a note.

    Raises
    ------
    RuntimeError
        A side computes something else than float64 attention.
    """
    if not session.samples:
        session.sample_limits()
    # Memory of its own: in pieces of what earlier ones had a workload took 83 us, alone 75 (H200).
    gc.collect()
    session.gpu.torch.cuda.empty_cache()
    try:
        return _RUNNERS[workload.kind](workload, session)
    except UnsupportedError as error:
        return Result(workload, note=f"not run: {error}")


def _run_decode(w: Workload, session: CudaSession) -> Result:
    clock = session.gpu.clock
    result = Result(w, {"flashbsr": measure(clock, *decode_call(w, session.gpu))})
    if w.page_size == 1:
        twin = replace(w, page_size=16)
        result.times["page 16"] = measure(clock, *decode_call(twin, session.gpu))
        times = result.times
        penalty = times["flashbsr"].median / times["page 16"].median - 1
        result.metrics["page_penalty"] = penalty
    seconds = result.times["flashbsr"].median
    result.metrics |= {"us": seconds * 1e6, "gbs": io_bytes(w) / seconds * 1e-9}
    if session.gpu.backend == "cuda":
        # Nothing writes the caches here, so a caller may promise it; the goals are without.
        early = measure(clock, *decode_call(w, session.gpu, kv_ready=True))
        result.times["kv_ready"] = early
        result.metrics["kv_ready_us"] = early.median * 1e6
    if w.peer and session.peer:
        add_peers(result, session.gpu)
    return result


def _run_prefill(w: Workload, session: CudaSession) -> Result:
    return run_prefill(w, session.gpu, peer=session.peer)


def _run_sparse(w: Workload, session: CudaSession) -> Result:
    return run_sparse(w, session.gpu)


def _run_latent(w: Workload, session: CudaSession) -> Result:
    return run_latent(w, session.gpu)


def _run_codes(w: Workload, session: CudaSession) -> Result:
    return run_codes(w, session.gpu)


def _run_share(w: Workload, session: CudaSession) -> Result:
    return run_share(w, session.gpu)


def _run_mixed(w: Workload, session: CudaSession) -> Result:
    return run_mixed(w, session.gpu)


def _run_append(w: Workload, session: CudaSession) -> Result:
    """All tokens of the batch, from contiguous rows into permuted pages."""
    gpu, clock = session.gpu, session.gpu.clock
    caches, pages = paged_sets(gpu, w)
    torch, tokens = gpu.torch, sum(w.q_lens)
    shape = (tokens, w.num_kv_heads, w.head_dim)
    rows = [(normal(gpu, shape, w.dtype), normal(gpu, shape, w.dtype)) for _ in caches]

    def there(x: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(x, np.int32)).to(gpu.device)

    requests = there(np.repeat(np.arange(len(w.q_lens)), w.q_lens))
    positions = there(np.concatenate([np.arange(n) for n in w.q_lens]))
    table = there(pages.indices), there(pages.indptr), there(pages.last_page_len)
    slots = [
        page * w.page_size + at for page, at in map(pages.tokens, range(len(w.q_lens)), w.q_lens)
    ]
    mapping = torch.from_numpy(np.concatenate(slots).astype(np.int64)).to(gpu.device)

    def call(index: int) -> None:
        cache = caches[index]
        if w.kind == "gpu-append":
            flashbsr.append_paged_kv_cache(*rows[index], requests, positions, cache, *table)
        else:
            append = flashbsr.append_paged_kv_cache
            append(*rows[index], paged_kv_cache=cache, slot_mapping=mapping)

    caches[0].fill_(float("nan"))
    call(0)
    page, slot = (x.tolist() for x in pages.tokens(len(w.q_lens) - 1, w.kv_lens[-1]))
    for side in (0, 1):
        if not torch.equal(caches[0][page, side, slot], rows[0][side][-w.kv_lens[-1] :]):
            raise RuntimeError("append_paged_kv_cache: wrong result")
    samples = measure(clock, call, len(caches))
    size = 4 * math.prod(shape) * ITEMSIZE[w.dtype]  # K and V, read and written
    return _memory_result(w, samples, size)


def _run_append_codes(w: Workload, session: CudaSession) -> Result:
    return run_append_codes(w, session.gpu)


def _memory_result(w: Workload, samples: Samples, size: int) -> Result:
    seconds = samples.median
    return Result(w, {"flashbsr": samples}, {"us": seconds * 1e6, "gbs": size / seconds * 1e-9})


def _run_merge(w: Workload, session: CudaSession) -> Result:
    gpu, torch = session.gpu, session.gpu.torch
    (rows,) = w.q_lens
    shape = (rows, w.states, w.num_qo_heads, w.head_dim)
    size = (w.states + 1) * rows * w.num_qo_heads * (w.head_dim * ITEMSIZE[w.dtype] + 4)
    sets = [
        (normal(gpu, shape, w.dtype), normal(gpu, shape[:-1], "float32"))
        for _ in range(set_count(size))
    ]
    v, s = sets[0]
    weights = torch.softmax(s[-1].double(), 0)
    expected = (weights[..., None] * v[-1].double()).sum(0)
    got = flashbsr.merge_states(v, s)[0][-1].double()
    if not float((got - expected).abs().max()) <= 3e-2:
        raise RuntimeError("merge_states: wrong result")
    samples = measure(gpu.clock, lambda i: flashbsr.merge_states(*sets[i]), len(sets))
    return _memory_result(w, samples, size)


def _run_plan(w: Workload, session: CudaSession) -> Result:
    return time_plan(w, session.gpu.backend, session.tick)


def _run_host(w: Workload, session: CudaSession) -> Result:
    """Time what the caller waits for in `run()`: checks and launch, the stream never full."""
    call, _ = decode_call(w, session.gpu)
    seconds = []
    for index in range(HOST_CALLS):
        if index % 50 == 0:
            session.gpu.clock.synchronize()
        start = time.perf_counter_ns()
        call(0)
        seconds.append((time.perf_counter_ns() - start) * 1e-9)
    session.gpu.clock.synchronize()
    samples = Samples(seconds)
    return Result(w, {"flashbsr": samples}, {"host_us": samples.median * 1e6})


def _run_bounds(w: Workload, session: CudaSession) -> Result:
    return run_bounds(w, session.gpu)


def _run_update(w: Workload, session: CudaSession) -> Result:
    return run_update(w, session.gpu, session.tick)


def _run_bounds_plan(w: Workload, session: CudaSession) -> Result:
    return run_bounds_plan(w, session.gpu, session.tick)


_RUNNERS: dict[str, Callable[[Workload, CudaSession], Result]] = {
    "gpu-decode": _run_decode,
    "gpu-fp8": _run_decode,
    "gpu-codes": _run_codes,
    "gpu-codes-extend": _run_codes,
    "gpu-prefill": _run_prefill,
    "gpu-variants": _run_prefill,
    "gpu-prefill-fp8": _run_prefill,
    "gpu-short": _run_prefill,
    "gpu-chunk": _run_prefill,
    "gpu-bounds": _run_bounds,
    "gpu-update": _run_update,
    "gpu-mixed": _run_mixed,
    "gpu-mla": _run_latent,
    "gpu-sparse": _run_sparse,
    "gpu-share": _run_share,
    "gpu-append": _run_append,
    "gpu-append-slots": _run_append,
    "gpu-append-codes": _run_append_codes,
    "gpu-merge": _run_merge,
    "gpu-plan": _run_plan,
    "gpu-plan-bounds": _run_bounds_plan,
    "gpu-run": _run_host,
}
