# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""CuPy arrays.

They live on a GPU, where this build has no backend: handing one to the core raises `DeviceError`,
which names the way out. Lists of lengths and offsets that Python code reads are copied to the host.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy.typing as npt

from ..dtypes import normalize_dtype
from ..errors import DeviceError

name = "cupy"
MUTABLE = True


def dtype_name(x: Any, argument: str = "array") -> str:
    """Name the element type."""
    found = normalize_dtype(x.dtype, argument)
    assert found is not None
    return found


def export(x: Any, writable: bool = False, argument: str = "array") -> NoReturn:  # noqa: ARG001
    """Raise `DeviceError`: the CPU backend cannot reach the memory."""
    raise DeviceError(argument, f"a CuPy array on {x.device}", "an array on the CPU: cupy.asnumpy")


def empty(like: Any, shape: tuple[int, ...], dtype_name: str) -> NoReturn:  # noqa: ARG001
    """Raise `DeviceError`, as `export` does."""
    export(like)


def finish(x: Any) -> Any:
    """Return the array itself."""
    return x


def to_numpy(x: Any) -> npt.NDArray[Any]:
    """Copy the array to the host."""
    return x.get()  # type: ignore[no-any-return]
