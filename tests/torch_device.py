# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Hostile NumPy arrays as PyTorch tensors on a device, as hostile as the kernels' rules allow.

Rows of q, k, v and the output are 16-byte aligned on a GPU: base address and strides. So `put`
rebuilds what `cases.strided` made (a view inside NaN, longer on every dimension) with rows that
start on an odd multiple of 16 bytes, the least alignment that is allowed. Memory order and zero
strides stay; negative strides PyTorch does not have.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from cases import Case
from reference import DTYPES

ROW_ALIGNMENT = 16  # bytes
ROPE_DIMS = (64, 128, 256, 512)  # head dims of the kernels that rotate
# Compute capability -> head dims of the kernels that take float8 queries, ascending.
FLOAT8_Q_DIMS: dict[tuple[int, int], tuple[int, ...]] = {(9, 0): (64, 128, 256)}
_BITS = {2: np.dtype(np.uint16), 1: np.dtype(np.uint8)}
_EXTENDED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def _tensor(torch: Any, x: np.ndarray, device: str) -> Any:
    """Copy the contiguous `x`; types that PyTorch's NumPy does not know travel as their bits."""
    if x.dtype.name not in _EXTENDED:
        return torch.from_numpy(x).to(device, copy=True)
    bits = torch.from_numpy(x.view(_BITS[x.dtype.itemsize])).to(device, copy=True)
    return bits.view(getattr(torch, x.dtype.name))


def putter(torch: Any, device: str) -> Callable[[Any], Any]:
    """Return the function that copies an array to `device`; tensors pass through."""

    def put(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if x.ndim < 3 or x.dtype.kind in "iub":
            return _tensor(torch, np.array(x, order="C"), device)
        base, strides, offset = padded_copy(x)
        return _tensor(torch, base, device).as_strided(x.shape, strides, offset)

    return put


def padded_copy(x: np.ndarray) -> tuple[np.ndarray, list[int], int]:
    """Copy `x` into flat poisoned memory; strides and offset of the copy there, in elements.

    A contiguous array gets no more padding than its rows need.
    """
    if min(x.strides, default=0) < 0:
        raise ValueError("PyTorch has no negative strides")
    unit = ROW_ALIGNMENT // x.itemsize
    hostile = not x.flags.c_contiguous or x.size <= x.shape[-1]  # one row is always contiguous
    pitch = -(-x.shape[-1] // unit)
    if hostile:
        pitch += 2  # before the row and behind it
        pitch += pitch % 2 == 0
    strides = [0] * x.ndim
    strides[-1], size = 1, pitch * unit
    outer = [i for i in range(x.ndim - 1) if x.strides[i] or x.shape[i] < 2]
    for i in sorted(outer, key=lambda i: (x.strides[i], -i)):
        strides[i] = size
        size *= x.shape[i] + hostile
    base = np.full(size, np.nan, np.float32).astype(x.dtype)
    offset = unit if hostile else 0
    if x.size:
        steps = [stride * x.itemsize for stride in strides]
        view = np.ndarray(x.shape, x.dtype, base.view(np.uint8), offset * x.itemsize, steps)
        if any(stride == 0 and n > 1 for stride, n in zip(strides, x.shape, strict=True)):
            first = tuple(slice(None) if stride else slice(1) for stride in strides)
            view[first] = x[first]
        else:
            view[...] = x
    return base, strides, offset


def getter(torch: Any) -> Callable[[Any], np.ndarray]:
    """Return the function that copies a tensor back, with all of the memory that it lies in."""

    def get(x: Any) -> np.ndarray:
        if not isinstance(x, torch.Tensor):
            return np.asarray(x)
        x = x.detach()
        name = str(x.dtype).removeprefix("torch.")
        dtype = DTYPES.get(name) or np.dtype(name)
        storage = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
        memory = storage.to("cpu", copy=True).numpy()
        steps = [stride * dtype.itemsize for stride in x.stride()]
        if memory.size == 0:
            return np.zeros(tuple(x.shape), dtype)
        return np.ndarray(tuple(x.shape), dtype, memory, x.storage_offset() * dtype.itemsize, steps)

    return get


def adapt(case: Case, float8_q_dims: tuple[int, ...] = ()) -> Case:
    """Return the case as CUDA can run it.

    float32 q and KV become float16 or bfloat16, evenly but the same for the same case; the output
    follows unless its type was asked for. float8 q becomes bfloat16, over the KV that it has,
    unless `float8_q_dims` has a head dim for it, and no RoPE is asked for. RoPE inside attention
    needs a head dim that no kernel pads, rows of float8 are whole 16-byte pieces. Threads are a
    matter of the CPU.
    """
    (q, kv, o), dims, p_type = case.dtypes, case.dims, case.p_type
    if q == "float32":
        other = ("float16", "bfloat16")[zlib.crc32(case.name.encode()) % 2]
        q, kv, o = other, (other if kv == "float32" else kv), (other if o == "float32" else o)
    elif q.startswith("float8"):
        dim = next((n for n in float8_q_dims if n >= max(dims)), None)
        if dim is None or case.variant.pos_encoding_mode == "ROPE_LLAMA":
            q = "bfloat16"  # with the same type of output by default
        else:
            dims, p_type = (dim, dim), q
    if case.variant.pos_encoding_mode == "ROPE_LLAMA":
        dims = next(n for n in ROPE_DIMS if n >= max(dims)), dims[1]
    if kv.startswith("float8"):
        dims = (-(-dims[0] // 16) * 16, -(-dims[1] // 16) * 16)
    task = {name: value for name, value in case.task.items() if name != "num_threads"}
    return dataclasses.replace(case, dtypes=(q, kv, o), dims=dims, p_type=p_type, task=task)
