# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""JAX arrays on the CPU or a CUDA device.

JAX arrays cannot be written, so ``out=`` and the in-place functions refuse them. Results are
written into buffers of the core, which JAX then adopts through DLPack without a copy (on the CPU
they are 64-byte aligned: it copies memory that is aligned less).

JAX has no current stream, and no way to learn that somebody else's kernel still reads its arrays,
whose memory it reuses as soon as nothing of its own needs it. On a GPU work goes to the legacy
default stream, which is made to wait for the inputs, and a call returns when its results are there
(``WAITS``).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

import flashbsr._core as _core

from ..errors import DeviceError, DTypeError, UnsupportedError
from .numpy import export as export_numpy

name = "jax"
MUTABLE = False
WAITS = True
OPERATORS = None

_LEGACY = 1  # CU_STREAM_LEGACY, as DLPack numbers it

_BFLOAT16 = jax.numpy.dtype("bfloat16")
_Buffer = type(_core.empty_dlpack((0,), "float32"))


def dtype_name(x: Any, argument: str = "array") -> str:  # noqa: ARG001
    """Name the element type."""
    return str(x.dtype.name)


def _platform(x: jax.Array, argument: str) -> str:
    """``cpu`` or ``gpu``. JAX takes a microsecond to say where an array is: ask once."""
    if isinstance(x, jax.core.Tracer):
        raise DTypeError(
            argument,
            "a traced JAX array",
            "a concrete one; inside a program use flashbsr.integrations.jax",
        )
    where = x.device  # a Sharding where the array is spread over several devices
    platform = str(getattr(where, "platform", None))
    if platform not in ("cpu", "gpu"):
        raise DeviceError(argument, f"device {where}", "one CPU or CUDA device: jax.device_put")
    return platform


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
    if _platform(x, argument) == "gpu":
        return x.__dlpack__(stream=_LEGACY)
    if x.dtype == _BFLOAT16:
        return x.__dlpack__()  # waits for the values; half the time of the way through NumPy
    return export_numpy(np.asarray(x), False, argument)


def empty(like: Any, shape: tuple[int, ...], dtype_name: str) -> Any:
    """Allocate a buffer where `like` is, which `finish` turns into a JAX array."""
    ordinal = device(like)
    if ordinal is None:
        return _core.empty_dlpack(shape, dtype_name)
    return _core.empty_on_device(shape, dtype_name, ordinal)


def finish(x: Any, a: Any = None, b: Any = None) -> jax.Array:  # noqa: ARG001
    """Turn the buffer into a JAX array. It must not be written afterwards."""
    array: jax.Array = jax.dlpack.from_dlpack(x)
    return array


def to_numpy(x: Any) -> npt.NDArray[Any]:
    """View a CPU array; copy one that is on a device."""
    return np.asarray(x)


def address(x: Any) -> tuple[int, tuple[int, ...]]:
    """Address of the first element, and the strides in bytes."""
    _platform(x, "array")
    return int(x.unsafe_buffer_pointer()), strides(x)


def strides(x: Any) -> tuple[int, ...]:
    """Strides in bytes: rows lie densely."""
    found = [x.dtype.itemsize]
    for length in x.shape[:0:-1]:
        found.append(found[-1] * length)
    return tuple(found[: x.ndim][::-1])


def extend(x: Any, rows: int, step: int | None = None) -> None:  # noqa: ARG001
    """None: JAX's arrays are no views."""
    return


def join(parts: list[Any], axis: int = 0) -> jax.Array:
    """Copy all into one array."""
    return jax.numpy.concatenate(parts, axis)


def as_bytes(x: Any) -> Any:
    """Return the array itself: nothing can be written into it anyway."""
    return x


def of_bytes(x: Any, dtype_name: str) -> Any:  # noqa: ARG001
    """Return the array itself: nothing can be written into it anyway."""
    return x


def cast(x: Any, dtype_name: str) -> jax.Array:
    """Convert the elements."""
    converted: jax.Array = x.astype(dtype_name)
    return converted


def device(x: Any) -> int | None:
    """CUDA ordinal; None on the CPU, and for what `export` refuses."""
    where = None if isinstance(x, jax.core.Tracer) else x.device
    if getattr(where, "platform", None) != "gpu":
        return None
    return int(where.local_hardware_id)  # type: ignore[union-attr]


def stream(device: int) -> int:  # noqa: ARG001
    """Handle of the legacy default stream, after which `export` orders."""
    return _LEGACY
