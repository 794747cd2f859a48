# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays, with ml_dtypes for bfloat16 and float8."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DTypeError

name = "numpy"
MUTABLE = True
WAITS = False
OPERATORS = None

# Element types that ml_dtypes adds: the buffer protocol cannot carry them, so a view of the bits
# goes with the name.
_BITS: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
}

# Those that the buffer protocol carries.
_EXPORTED = frozenset(
    f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)
) | {"bool"}

_NAMES: dict[np.dtype[Any], str] = {}  # dtype -> name, for the native ones seen
_DTYPES: dict[str, np.dtype[Any]] = {}  # name -> dtype


def dtype_name(x: npt.NDArray[Any], argument: str = "array") -> str:  # noqa: ARG001
    """Name the element type."""
    found = _NAMES.get(x.dtype)
    if found is None:
        # What it is for says which types would do: ">f4" and complex128 are names as well.
        found = x.dtype.name if x.dtype.isnative else x.dtype.str
        _NAMES[x.dtype] = found
    return found


def export(x: npt.NDArray[Any], writable: bool = False, argument: str = "array") -> Any:
    """Return the array itself (it speaks the buffer protocol), or its bits and their name."""
    found = _NAMES.get(x.dtype) or dtype_name(x, argument)
    if writable and not x.flags.writeable:
        raise DTypeError(argument, "a read-only NumPy array", "a writable one")
    if found in _EXPORTED:
        return x
    bits = _BITS.get(found)
    # Of a type that nothing takes the core gets the name and the shape, to say what would do.
    return (np.broadcast_to(np.uint8(0), x.shape) if bits is None else x.view(bits)), found


def empty(like: Any, shape: tuple[int, ...], dtype_name: str) -> npt.NDArray[Any]:  # noqa: ARG001
    """Allocate an array. Imports ml_dtypes where NumPy lacks the element type."""
    return np.empty(shape, _DTYPES.get(dtype_name) or _dtype(dtype_name))


def _dtype(dtype_name: str) -> np.dtype[Any]:
    if dtype_name in _BITS:
        import ml_dtypes  # present: the caller's arrays have its types, or asked for one

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype_name))
    else:
        dtype = np.dtype(dtype_name)
    _DTYPES[dtype_name] = dtype
    return dtype


def finish(x: npt.NDArray[Any], a: Any = None, b: Any = None) -> npt.NDArray[Any]:  # noqa: ARG001
    """Return the array itself."""
    return x


def to_numpy(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array itself."""
    return x


def address(x: npt.NDArray[Any]) -> tuple[int, tuple[int, ...]]:
    """Address of the first element, and the strides in bytes."""
    return x.__array_interface__["data"][0], x.strides


def strides(x: npt.NDArray[Any]) -> tuple[int, ...]:
    """Strides in bytes."""
    return x.strides


def extend(x: npt.NDArray[Any], rows: int, step: int | None = None) -> npt.NDArray[Any]:
    """View `x` with `rows` rows."""
    strides = x.strides[0] if step is None else step, *x.strides[1:]
    return np.lib.stride_tricks.as_strided(x, (rows, *x.shape[1:]), strides, writeable=False)


def join(parts: list[npt.NDArray[Any]], axis: int = 0) -> npt.NDArray[Any]:
    """Copy all into one array."""
    return np.concatenate(parts, axis)


def as_bytes(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """View a contiguous array as a vector of uint8."""
    return x.reshape(-1).view(np.uint8) if x.flags.c_contiguous else x


def of_bytes(x: npt.NDArray[Any], dtype_name: str) -> npt.NDArray[Any]:
    """View bytes as elements of another type."""
    return x.view(_DTYPES.get(dtype_name) or _dtype(dtype_name))


def cast(x: npt.NDArray[Any], dtype_name: str) -> npt.NDArray[Any]:
    """Convert the elements."""
    return x.astype(_DTYPES.get(dtype_name) or _dtype(dtype_name), copy=False)


def device(x: npt.NDArray[Any]) -> None:  # noqa: ARG001
    """None: NumPy's memory is the host's."""
    return


def stream(device: int) -> int:  # noqa: ARG001
    """NumPy has no streams: the legacy default one."""
    return 0
