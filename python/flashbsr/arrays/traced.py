# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch tensors without values: what torch.compile and torch.export read a program with.

A call over them becomes an operator of the program. What has none says so.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ..errors import DeviceError
from .operators import operators
from .torch import dtype_name, join, strides

__all__ = [
    "MUTABLE", "OPERATORS", "WAITS", "device", "dtype_name", "join", "name", "stream", "strides",
]  # fmt: skip

name = "torch"
MUTABLE = True
WAITS = False
OPERATORS = operators()


def device(x: torch.Tensor) -> int:  # noqa: ARG001
    """Neither the host nor a GPU."""
    return -1


def stream(device: int) -> int:  # noqa: ARG001
    """None before the program runs."""
    return 0


def export(x: torch.Tensor, writable: bool = False, argument: str = "tensor") -> NoReturn:  # noqa: ARG001
    """Raise: there is nothing to hand over."""
    raise DeviceError(
        argument,
        "a tensor without values, as a program is traced with",
        "tensors with memory: this call is made before the compiled program",
    )


def to_numpy(x: torch.Tensor) -> NoReturn:
    """Raise, likewise."""
    export(x)


def _without_values(*args: Any) -> NoReturn:
    export(args[0])


empty = finish = address = extend = as_bytes = of_bytes = cast = _without_values
