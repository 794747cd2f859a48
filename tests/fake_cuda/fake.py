# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The fake driver for Python: what to ask it, and PyTorch tensors that claim to be on its GPUs.

The tensors are on the CPU. The PyTorch adapter is patched to say otherwise: which memory its
capsules name, and what the current stream is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch_device
from flashbsr.arrays import torch as adapter
from harness import Device

CUDA = 2  # DLPack's device type


class Driver:
    """What the fake driver tells and does beyond a real one."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.library.fake_kernel.restype = ctypes.c_char_p
        self.library.fake_calls.restype = ctypes.c_long

    def calls(self, name: str) -> int:
        """How often an entry point was called."""
        return int(self.library.fake_calls(name.encode()))

    @property
    def kernel(self) -> str:
        """Name of the kernel launched last."""
        return self.library.fake_kernel().decode()

    @property
    def grid(self) -> int:
        """Its blocks."""
        return int(self.library.fake_grid())

    @property
    def block(self) -> tuple[int, int]:
        """Threads of a block, and bytes of its shared memory."""
        return int(self.library.fake_threads()), int(self.library.fake_shared())

    @property
    def overlap(self) -> int:
        """Its KernelArgs::overlap."""
        return int(self.library.fake_overlap())

    @property
    def programmatic(self) -> bool:
        """Whether it was launched with programmatic serialisation."""
        return bool(self.library.fake_programmatic())

    @property
    def cluster(self) -> int:
        """Blocks of a cluster; 0: it was launched without."""
        return int(self.library.fake_cluster())

    @property
    def path(self) -> str:
        """How K and V come to shared memory, of a Hopper kernel: HopperArgs::path."""
        return ("ragged", "paged", "gather", "none")[self.library.fake_path()]

    @property
    def box(self) -> int:
        """Tokens of a box of K or V: HopperArgs::box_tokens."""
        return int(self.library.fake_box())

    def variant(self, name: str, library: str) -> None:
        """Let kernels of a user's variant compute with the CPU's shared object of it."""
        assert self.library.fake_variant(name.encode(), str(library).encode()) == 0

    @contextlib.contextmanager
    def memory_of_h200(self) -> Iterator[None]:
        """Devices have as much bandwidth for each of 6 SMs as an H200 has for each of 132."""
        self.library.fake_memory_clock(3125000 * 6 // 132)
        try:
            yield
        finally:
            self.library.fake_memory_clock(3125000)

    @contextlib.contextmanager
    def no_maps_of(self, array: Any) -> Iterator[None]:
        """Refuse tensor maps of an array, as if its strides were too long."""
        self.library.fake_refuse_maps_of(ctypes.c_void_p(array.data_ptr()))
        try:
            yield
        finally:
            self.library.fake_refuse_maps_of(None)

    def corrupt_page(self, index: int, page: int) -> None:
        """Overwrite a page id of the plan that the last attention kernel had."""
        self.library.fake_corrupt_page(index, page)

    def drain(self) -> None:
        """Let all streams finish."""
        self.library.fake_drain()

    def synchronize(self, stream: int) -> None:
        """Let one stream finish."""
        assert self.library.cuStreamSynchronize(ctypes.c_void_p(stream)) == 0

    def stream(self) -> int:
        """Make a stream."""
        handle = ctypes.c_void_p()
        assert self.library.cuStreamCreate(ctypes.byref(handle), 1) == 0
        return handle.value or 0

    def destroy(self, stream: int) -> None:
        """Destroy a stream; its address may come back."""
        assert self.library.cuStreamDestroy_v2(ctypes.c_void_p(stream)) == 0

    @contextlib.contextmanager
    def capture(self, stream: int) -> Iterator[list[int]]:
        """Capture what is put on a stream; the list holds the graph afterwards."""
        graph: list[int] = []
        self.library.fake_begin_capture(ctypes.c_void_p(stream))
        try:
            yield graph
        finally:
            graph.append(self.library.fake_end_capture(ctypes.c_void_p(stream)))

    def replay(self, graph: list[int], stream: int) -> None:
        """Put a graph on a stream."""
        self.library.fake_replay(graph[0], ctypes.c_void_p(stream))

    def destroy_graph(self, graph: list[int]) -> None:
        """Destroy a graph, and what only it holds."""
        self.library.fake_destroy_graph(graph[0])

    @property
    def allocations(self) -> int:
        """Pieces of device memory that are there."""
        return self.calls("cuMemAlloc") - self.calls("cuMemFree")


class _Head(ctypes.Structure):
    """Where a DLTensor begins: its memory and its device."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("id", ctypes.c_int32)]


class FakeTorch:
    """Patches the adapter; `current` is what PyTorch would call the current stream."""

    def __init__(self) -> None:
        self.current = 0
        self.on_host: set[int] = set()  # addresses of tensors that stay on the host
        self.other: dict[int, int] = {}  # address -> ordinal of those not on GPU 0
        # A GPU's allocator gives memory away in stream order; here it must wait for lazy work.
        self.used: list[torch.Tensor] = []
        self._export = adapter.export
        adapter.export = self.export
        adapter.device = self.device
        adapter.stream = lambda _: self.current

    def device(self, x: torch.Tensor) -> int | None:
        """GPU of a tensor."""
        at = x.data_ptr()
        return None if at in self.on_host else self.other.get(at, 0)

    def export(self, x: torch.Tensor, writable: bool = False, argument: str = "tensor") -> Any:
        """Export as the adapter does, with the fake device in the capsule."""
        exported = self._export(x, writable, argument)
        if exported is x:  # by the exchange API, which tells the truth
            exported = adapter.capsule(x, argument)
        device = self.device(x)
        if device is not None:
            self.used.append(x)
            capsule = exported[0] if isinstance(exported, tuple) else exported
            pointer = ctypes.pythonapi.PyCapsule_GetPointer
            pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            head = ctypes.cast(pointer(capsule, b"dltensor"), ctypes.POINTER(_Head)).contents
            head.device_type, head.id = CUDA, device
        return exported


def device(driver: Driver, fake: FakeTorch) -> Device:
    """The fake GPU 0, of compute capability 9.0, for the harness."""
    get = torch_device.getter(torch)

    def drained(x: Any) -> np.ndarray:
        driver.drain()
        fake.used.clear()
        return get(x)

    adapt = functools.partial(torch_device.adapt, float8_q_dims=torch_device.FLOAT8_Q_DIMS[9, 0])
    return Device("cuda", "cuda", torch_device.putter(torch, "cpu"), drained, adapt)
