# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""JAX arrays on the CPU.

JAX arrays cannot be written, so ``out=`` and the in-place functions refuse them. Results are
written into 64-byte aligned buffers of the core, which JAX then adopts through DLPack without a
copy (it copies memory that is aligned less).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from .. import _core
from ..dtypes import normalize_dtype
from ..errors import DeviceError, DTypeError, UnsupportedError
from .numpy import export as export_numpy

name = "jax"
MUTABLE = False

_Buffer = type(_core.empty_dlpack((0,), "float32"))


def dtype_name(x: Any, argument: str = "array") -> str:
    """Name the element type."""
    found = normalize_dtype(x.dtype, argument)
    assert found is not None
    return found


def _check(x: jax.Array, argument: str) -> None:
    if isinstance(x, jax.core.Tracer):
        raise DTypeError(
            argument, "a traced JAX array", "a concrete one: call outside jit, or jax.pure_callback"
        )
    device = x.device  # a Sharding where the array is spread over several devices
    if getattr(device, "platform", None) != "cpu":
        raise DeviceError(argument, f"device {device}", "one CPU device: jax.device_put")


def export(x: Any, writable: bool = False, argument: str = "array") -> Any:
    """View the array's memory, once it has been computed."""
    if type(x) is _Buffer:
        return x
    if writable:
        raise UnsupportedError(
            argument,
            "a JAX array",
            "an array that can be written; JAX arrays are immutable: use the function that returns "
            "new ones, or keep this one in NumPy",
        )
    _check(x, argument)
    if x.dtype == jax.numpy.bfloat16:
        return x.__dlpack__()  # waits for the values; half the time of the way through NumPy
    return export_numpy(np.asarray(x), False, argument)


def empty(like: Any, shape: tuple[int, ...], dtype_name: str) -> Any:  # noqa: ARG001
    """Allocate a buffer that `finish` turns into a JAX array."""
    return _core.empty_dlpack(shape, dtype_name)


def finish(x: Any) -> jax.Array:
    """Turn the buffer into a JAX array. It must not be written afterwards."""
    array: jax.Array = jax.dlpack.from_dlpack(x)
    return array


def to_numpy(x: Any) -> npt.NDArray[Any]:
    """View a CPU array; copy one that is on a device."""
    return np.asarray(x)
