# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A small part of the CUDA driver for tests of device functions: modules, memory, launches.

ctypes is all it needs, so that it runs wherever a GPU and a compiler are. Without a GPU the sources
are compiled and nothing more.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from nvrtc import nvrtc
from toolchain import INCLUDE, run

FOLDER = Path(__file__).resolve().parent
POISON = 0xFF  # NaN in every floating-point type
SHARED_BYTES_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# CUtensorMapDataType, by bytes of an element: copies do not look at values.
MAP_TYPES = {1: 0, 2: 6}


class DriverError(RuntimeError):
    """What the driver refuses, or a kernel that failed."""


@functools.cache
def compiled(source: str, target: str) -> bytes:
    """Compile a file of this folder to machine code: by nvcc where there is one, else by NVRTC."""
    text = (FOLDER / source).read_text()
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        return nvrtc().cubin(text, target)
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "image.cubin"
        flags = ["-cubin", f"-arch={target}", "-std=c++20", "-O3", "-allow-unsupported-compiler"]
        done = run([nvcc, *flags, f"-I{INCLUDE}", FOLDER / source, "-o", image])
        assert done.status == 0, done.output
        return image.read_bytes()


class Gpu:
    """The first device, its primary context current in this thread."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        self.lost = ""
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        parts = ctypes.c_int(), ctypes.c_int()
        for part, attribute in zip(parts, (75, 76), strict=True):  # ..._COMPUTE_CAPABILITY_...
            self.call("cuDeviceGetAttribute", ctypes.byref(part), attribute, device)
        self.capability = (parts[0].value, parts[1].value)
        self._modules: dict[bytes, ctypes.c_void_p] = {}

    def call(self, name: str, *arguments: Any) -> None:
        """Call the driver."""
        status = getattr(self._lib, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(status, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()} ({status})")

    def function(self, source: str, target: str, name: str) -> ctypes.c_void_p:
        """Load a kernel of a file of this folder."""
        image = compiled(source, target)
        if image not in self._modules:
            module = ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), image)
            self._modules[image] = module
        function = ctypes.c_void_p()
        self.call(
            "cuModuleGetFunction", ctypes.byref(function), self._modules[image], name.encode()
        )
        return function

    @contextmanager
    def memory(self, *arrays: np.ndarray) -> Iterator[list[int]]:
        """Copy arrays to the device; addresses, multiples of 256."""
        addresses: list[int] = []
        try:
            for array in arrays:
                address = ctypes.c_uint64()
                self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(array.nbytes))
                addresses.append(address.value)
                self.write(address.value, array)
            yield addresses
        finally:
            if not self.lost:
                for value in addresses:
                    self.call("cuMemFree_v2", ctypes.c_uint64(value))

    def write(self, address: int, array: np.ndarray) -> None:
        """Copy to the device."""
        contents, size = np.ascontiguousarray(array), ctypes.c_size_t(array.nbytes)
        host = ctypes.c_void_p(contents.ctypes.data)
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), host, size)

    def read(self, address: int, like: np.ndarray) -> np.ndarray:
        """Copy from the device."""
        array = np.empty_like(like)
        size, host = ctypes.c_size_t(array.nbytes), ctypes.c_void_p(array.ctypes.data)
        self.call("cuMemcpyDtoH_v2", host, ctypes.c_uint64(address), size)
        return array

    def launch(
        self, function: ctypes.c_void_p, threads: int, shared_bytes: int, *arguments: Any
    ) -> None:
        """Run one block to its end. Addresses are int, 32-bit numbers np.int32."""
        values = [ctypes.c_uint64(a) if type(a) is int else a for a in arguments]
        values = [ctypes.c_int32(int(v)) if isinstance(v, np.int32) else v for v in values]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self.call("cuFuncSetAttribute", function, SHARED_BYTES_ATTRIBUTE, shared_bytes)
        shape = (1, 1, 1, threads, 1, 1, shared_bytes)
        self.call("cuLaunchKernel", function, *shape, None, pointers, None)
        try:
            self.call("cuCtxSynchronize")
        except DriverError as error:
            self.lost = str(error)
            raise

    def compute(
        self, function: ctypes.c_void_p, threads: int, shared_bytes: int,
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray],
    ) -> list[np.ndarray]:  # fmt: skip
        """Launch with inputs and then outputs, like `outputs` but poisoned; what they became."""
        poisoned = [np.full(out.nbytes, POISON, np.uint8) for out in outputs]
        with self.memory(*inputs, *poisoned) as addresses:
            self.launch(function, threads, shared_bytes, *addresses)
            found = addresses[len(inputs) :]
            return [self.read(at, out) for at, out in zip(found, outputs, strict=True)]

    def tensor_map(
        self, address: int, item: int, extents: Sequence[int], strides: Sequence[int],
        box: Sequence[int],
    ) -> ctypes.Array[ctypes.c_uint64]:  # fmt: skip
        """Describe an array of elements of `item` bytes, in 128-byte swizzle, innermost first.

        `strides` are bytes, of all dimensions but the innermost.
        """
        # The argument of a kernel, and what the driver writes to: a multiple of 64.
        room = (ctypes.c_uint64 * 24)()
        skip = -ctypes.addressof(room) % 64
        encoded = (ctypes.c_uint64 * 16).from_buffer(room, skip)
        rank = len(extents)
        swizzle_128, l2_128, no_fill = 3, 2, 0
        self.call(
            "cuTensorMapEncodeTiled", encoded, MAP_TYPES[item], rank, ctypes.c_uint64(address),
            (ctypes.c_uint64 * rank)(*extents), (ctypes.c_uint64 * (rank - 1))(*strides),
            (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank),
            0, swizzle_128, l2_128, no_fill,
        )  # fmt: skip
        return encoded
