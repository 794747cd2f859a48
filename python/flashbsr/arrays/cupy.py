# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""CuPy arrays, with ml_dtypes for bfloat16 and float8.

They live on a GPU. Work goes to CuPy's current stream of that GPU. CuPy is imported where one of
its functions is needed: the package is documented and checked on machines without it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DTypeError

name = "cupy"
MUTABLE = True
WAITS = False
OPERATORS = None

# float8 has no DLPack export in CuPy: a view of the bits goes with the name.
_BITS = {"float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}


def dtype_name(x: Any, argument: str = "array") -> str:  # noqa: ARG001
    """Name the element type."""
    return str(x.dtype.name)


def export(x: Any, writable: bool = False, argument: str = "array") -> Any:  # noqa: ARG001
    """Make a DLPack capsule, or one of the bits of a float8 array and the name of the type.

    No stream is ordered after another (stream -1): the work follows on CuPy's own.
    """
    found = dtype_name(x, argument)
    try:
        if found in _BITS:
            return x.view(_BITS[found]).__dlpack__(stream=-1), found
        return x.__dlpack__(stream=-1)
    except (BufferError, TypeError) as error:
        raise DTypeError(argument, f"{found} ({error})", "a type that CuPy exports") from None


def empty(like: Any, shape: tuple[int, ...], dtype_name: str) -> Any:
    """Allocate an array on the GPU of `like`."""
    import cupy

    if dtype_name in ("bfloat16", *_BITS):
        import ml_dtypes  # present: the caller's arrays have its type, or asked for it

        dtype: Any = getattr(ml_dtypes, dtype_name)
    else:
        dtype = dtype_name
    with like.device:
        return cupy.empty(shape, dtype)


def finish(x: Any, a: Any = None, b: Any = None) -> Any:  # noqa: ARG001
    """Return the array itself."""
    return x


def to_numpy(x: Any) -> npt.NDArray[Any]:
    """Copy the array to the host."""
    return x.get()  # type: ignore[no-any-return]


def address(x: Any) -> tuple[int, tuple[int, ...]]:
    """Address of the first element, and the strides in bytes."""
    return int(x.data.ptr), x.strides


def strides(x: Any) -> tuple[int, ...]:
    """Strides in bytes."""
    return x.strides  # type: ignore[no-any-return]


def extend(x: Any, rows: int, step: int | None = None) -> Any:
    """View `x` with `rows` rows; None: its allocation has no more."""
    import cupy

    memory = x.data.mem
    shape = rows, *x.shape[1:]
    strides = x.strides[0] if step is None else step, *x.strides[1:]
    last = sum((n - 1) * by for n, by in zip(shape, strides, strict=True))
    if x.data.ptr + last + x.itemsize > memory.ptr + memory.size:
        return None
    return cupy.ndarray(shape, x.dtype, memptr=x.data, strides=strides)


def join(parts: list[Any], axis: int = 0) -> Any:
    """Copy all into one array."""
    import cupy

    kind = parts[0].dtype
    bits = {1: np.uint8, 2: np.uint16}.get(kind.itemsize, kind)  # CuPy copies no bfloat16
    return cupy.concatenate([x.view(bits) for x in parts], axis).view(kind)


def as_bytes(x: Any) -> Any:
    """View a contiguous array as a vector of uint8."""
    return x.reshape(-1).view(np.uint8) if x.flags.c_contiguous else x


def of_bytes(x: Any, dtype_name: str) -> Any:
    """View bytes as elements of another type."""
    return x.view(dtype_name)


def cast(x: Any, dtype_name: str) -> Any:
    """Convert the elements."""
    return x.astype(dtype_name, copy=False)


def device(x: Any) -> int:
    """CUDA ordinal."""
    return int(x.device.id)


def stream(device: int) -> int:
    """Handle of CuPy's current stream on a GPU."""
    import cupy

    return int(cupy.cuda.get_current_stream(device).ptr)
