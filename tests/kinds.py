# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The array frameworks of the tests, and cases by framework and by type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cases import BF16, F16, F32, FP8, Problem
from harness import framework
from reference import DTYPES

jax = framework("jax")
jnp = framework("jax.numpy")
torch = framework("torch")

# A type that NumPy proper lacks travels as its bits.
BITS = {
    "bfloat16": (np.uint16, torch.bfloat16),
    "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn),
    "float8_e5m2": (np.uint8, torch.float8_e5m2),
}


def to_torch(x: np.ndarray) -> torch.Tensor:
    """A tensor over the same memory, strides and all."""
    if x.dtype.name in BITS:
        bits, dtype = BITS[x.dtype.name]
        return torch.from_numpy(x.view(bits)).view(dtype)
    return torch.from_numpy(x)


def from_torch(x: torch.Tensor) -> np.ndarray:
    for name, (bits, dtype) in BITS.items():
        if x.dtype == dtype:
            as_bits = torch.uint16 if bits is np.uint16 else torch.uint8
            return x.view(as_bits).numpy().view(DTYPES[name])
    return x.numpy()


@dataclass(frozen=True)
class Kind:
    """An array framework."""

    name: str
    array: type
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]
    address: Callable[[Any], int]


NUMPY = Kind("numpy", np.ndarray, lambda x: x, lambda x: x, lambda x: x.ctypes.data)
TORCH = Kind("torch", torch.Tensor, to_torch, from_torch, lambda x: x.data_ptr())
JAX = Kind("jax", jax.Array, jnp.asarray, np.asarray, lambda x: x.unsafe_buffer_pointer())
KINDS = [NUMPY, TORCH, JAX]
by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
by_mutable_kind = pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.name)
by_dtypes = pytest.mark.parametrize(
    "dtypes",
    [
        F32,
        F16,
        BF16,
        ("bfloat16", "float8_e4m3fn", "bfloat16"),
        ("float32", "float8_e5m2", "float32"),
        ("float16", "float16", "float32"),
        FP8,
        (*FP8[:2], "float32"),
    ],
    ids=lambda dtypes: "-".join(dtypes),
)


def all_of(kind: Kind, problem: Problem) -> tuple[Any, Any]:
    """Q and the KV as arrays of a kind."""
    kv = tuple(map(kind.put, problem.kv)) if isinstance(problem.kv, tuple) else kind.put(problem.kv)
    return kind.put(problem.q), kv
