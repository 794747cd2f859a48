# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""CuPy arrays.

They live on a GPU, where this build has no backend: `DeviceError`, naming the way out. Only index
arrays, whose values are needed on the host, are copied there.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy.typing as npt

from ..errors import DeviceError

name = "cupy"
MUTABLE = True


def dtype_name(x: Any, argument: str = "array") -> NoReturn:
    """Raise `DeviceError`: the CPU backend cannot reach the memory."""
    raise DeviceError(argument, f"a CuPy array on {x.device}", "an array on the CPU: cupy.asnumpy")


def export(x: Any, writable: bool = False, argument: str = "array") -> NoReturn:  # noqa: ARG001
    """Raise `DeviceError`, as `dtype_name` does."""
    dtype_name(x, argument)


def empty(like: Any, shape: tuple[int, ...], dtype: str) -> NoReturn:  # noqa: ARG001
    """Raise `DeviceError`, as `dtype_name` does."""
    dtype_name(like)


def finish(x: Any) -> Any:
    """Return the array itself."""
    return x


def to_numpy(x: Any) -> npt.NDArray[Any]:
    """Copy the array to the host."""
    return x.get()  # type: ignore[no-any-return]
