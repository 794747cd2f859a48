# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Clocks of a GPU: replayed CUDA graphs, and the device's own limits in the same run.

Calls are captured in a CUDA graph that rotates over sets of arrays larger than the L2 cache, so
that K and V come from memory and no launch gap is timed; a figure is the median of replays. Before
compute-bound cases the device rests, so that all start from the same power state.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .timing import Samples

__all__ = ["Clock", "Gpu", "measure", "measure_limits"]

REPLAYS = 15
REPLAY_S = 2.5e-3
REST_S = 0.2
BANDWIDTH_BYTES = 2 << 30
MATMUL_SIZE = 8192

# A plain read: 16 bytes a load, eight of them in flight per thread.
_READ = r"""
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* x, long long n,
                                                           unsigned* never) {
  const long long step = (long long)gridDim.x * blockDim.x;
  unsigned seen = 0;
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = x[i + k * step];
#pragma unroll
    for (int k = 0; k < 8; ++k) seen ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < n; i += step) seen ^= x[i].x ^ x[i].y ^ x[i].z ^ x[i].w;
  if (seen == 0x9e3779b9u) *never = seen;
}
"""


class Clock:
    """Records work as a CUDA graph and times it with events."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work`, which ran before, and return its replay."""
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    def seconds(self, work: Callable[[], None]) -> float:
        """Time between events around `work` on the current stream."""
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def synchronize(self) -> None:
        """Wait for the device."""
        self._torch.cuda.synchronize()

    def rest(self) -> None:
        """Let the device cool down from what ran before."""
        self.synchronize()
        time.sleep(REST_S)


@dataclass(slots=True)
class Gpu:
    """Where a session runs: PyTorch for arrays, its device, the backend's name, a clock."""

    torch: Any
    device: str = "cuda"
    backend: str = "cuda"
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.torch)


def measure(
    clock: Clock, call: Callable[[int], object], sets: int = 1, *, compute_bound: bool = False
) -> Samples:
    """Seconds of one call, a sample per replay.

    Parameters
    ----------
    clock : Clock
    call : callable
        ``call(i)`` enqueues the work on set ``i``.
    sets : int
        Sets of arrays that the graph rotates over.
    compute_bound : bool
        Rest first.
    """

    def calls(count: int) -> Callable[[], None]:
        def work() -> None:
            for index in range(count):
                call(index % sets)

        return work

    calls(sets)()  # loads kernels, makes handles: not under capture
    clock.synchronize()
    short = clock.record(calls(sets))
    short()
    once = clock.seconds(short) / sets
    count = max(1, math.ceil(REPLAY_S / max(once, 1e-9)))
    graph = clock.record(calls(count))
    graph()
    if compute_bound:
        clock.rest()
    return Samples([clock.seconds(graph) / count for _ in range(REPLAYS)])


def _reader(gpu: Gpu, x: Any) -> tuple[Callable[[], object], str]:
    """Give a call that reads all of `x` once, and what it is."""
    torch = gpu.torch
    if importlib.util.find_spec("cupy") is None or x.device.type != "cuda":
        words = x.view(torch.float32)
        return lambda: torch.sum(words), "torch.sum"
    cupy = importlib.import_module("cupy")
    kernel = cupy.RawKernel(_READ, "read_all")
    never = torch.zeros(1, dtype=torch.int32, device=x.device)
    blocks = 4 * torch.cuda.get_device_properties(x.device).multi_processor_count
    pointers = np.uint64(x.data_ptr()), np.int64(x.nbytes // 16), np.uint64(never.data_ptr())

    def call() -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel((blocks,), (512,), pointers)

    return call, "16-byte loads"


def _rate(clock: Clock, call: Callable[[], object], per_call: float) -> float:
    """Units per second of a call that is long against its launch, median."""

    def work() -> None:
        for _ in range(3):
            call()

    work()
    return 3 * per_call / statistics.median(clock.seconds(work) for _ in range(REPLAYS))


def _bandwidth(gpu: Gpu) -> dict[str, Any]:
    torch = gpu.torch
    x, y = (
        torch.randint(0, 255, (BANDWIDTH_BYTES,), dtype=torch.uint8, device=gpu.device)
        for _ in range(2)
    )
    reader, method = _reader(gpu, x)
    copy = _rate(gpu.clock, lambda: y.copy_(x), 2 * BANDWIDTH_BYTES)
    read = _rate(gpu.clock, reader, BANDWIDTH_BYTES)
    return {"copy_gbs": copy * 1e-9, "read_gbs": read * 1e-9, "read_method": method}


def measure_limits(gpu: Gpu) -> dict[str, Any]:
    """Measure what the device can do.

    Returns
    -------
    dict
        ``copy_gbs`` (bytes read and written), ``read_gbs`` and ``read_method``, ``matmul_tflops``
        (bf16 product of PyTorch, from rest).
    """
    torch, clock = gpu.torch, gpu.clock
    bandwidth = _bandwidth(gpu)
    n = MATMUL_SIZE
    a, b = (torch.randn(n, n, device=gpu.device).to(torch.bfloat16) for _ in range(2))
    product = measure(clock, lambda _: torch.mm(a, b), compute_bound=True)
    return {
        **bandwidth,
        "matmul_tflops": 2 * n**3 / product.median * 1e-12,
    }
