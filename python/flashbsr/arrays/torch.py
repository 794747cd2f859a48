# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch tensors on the CPU or a CUDA device; there, work goes to PyTorch's current stream.

The engine is forward only: a tensor that requires a gradient is read as it is, and the result, of
which one may be asked then, raises when it is.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

import flashbsr._core as _core

from ..errors import DeviceError, DTypeError, UnsupportedError

name = "torch"
MUTABLE = True
WAITS = False
OPERATORS = None

_CPU = torch.device("cpu")

# A tenth of the cost of Tensor.__dlpack__, and no stream work.
to_dlpack = torch.to_dlpack

# PyTorch 2.10 and later describe a tensor to C code without a capsule, in a tenth of its cost.
_EXCHANGES = hasattr(torch.Tensor, "__dlpack_c_exchange_api__") and _core.use_exchange_api(
    torch.Tensor, torch.Tensor.__dlpack_c_exchange_api__
)

# Imaginary parts of conjugated tensors are negative views; only these types are parts of complex
# numbers. To ask every tensor takes 0.1 us.
_MAYBE_NEGATIVE = {
    x.to_real() for x in vars(torch).values() if isinstance(x, torch.dtype) and x.is_complex
}

_NAMES: dict[torch.dtype, str] = {}
_DTYPES = {
    dtype: getattr(torch, dtype)
    for dtype in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32",
        "int64", "uint8", "bool",
    )
}  # fmt: skip
# DLPack learned float8 late; older PyTorch cannot export it. Its bits can always travel.
_FLOAT8 = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}


def dtype_name(x: torch.Tensor, argument: str = "tensor") -> str:  # noqa: ARG001
    """Name the element type."""
    found = _NAMES.get(x.dtype)
    if found is None:
        found = _NAMES[x.dtype] = str(x.dtype).removeprefix("torch.")
    return found


def export(x: torch.Tensor, writable: bool = False, argument: str = "tensor") -> Any:
    """Return the tensor itself where the core can ask PyTorch about it, otherwise a `capsule`."""
    if x.get_device() < 0 and not x.is_cpu:  # other accelerators are the core's to refuse
        raise DeviceError(argument, f"device {x.device}", "device cpu or cuda: tensor.cpu()")
    if writable and x.requires_grad:
        raise DTypeError(argument, "one that requires a gradient", "tensor.detach()")
    # The memory holds the negated values; DLPack has no flag for it.
    if x.dtype in _MAYBE_NEGATIVE and x.is_neg():
        raise DTypeError(argument, "one with the negative bit set", "tensor.resolve_neg()")
    return x if _EXCHANGES else capsule(x, argument)


def capsule(x: torch.Tensor, argument: str = "tensor") -> Any:
    """Make a DLPack capsule, or one of the bits of a float8 tensor and the name of the type."""
    if x.dtype in _FLOAT8:
        return to_dlpack(x.detach().view(torch.uint8)), _FLOAT8[x.dtype]
    try:
        return to_dlpack(x)
    except (RuntimeError, BufferError) as error:
        raise DTypeError(
            argument, f"layout {x.layout}, dtype {x.dtype} ({error})", "a strided tensor"
        ) from None


def empty(like: Any, shape: tuple[int, ...], dtype_name: str) -> torch.Tensor:
    """Allocate a tensor where `like` is, whatever torch's default device is."""
    where = like.device if like.is_cuda else _CPU  # a meta tensor is refused by name later
    return torch.empty(shape, dtype=_DTYPES[dtype_name], device=where)


class _ForwardOnly(torch.autograd.Function):  # type: ignore[misc]
    """The node of a result in the graph of gradients, where the way back ends."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # noqa: ARG004
        raise UnsupportedError(
            "backward",
            "a gradient through flashbsr",
            "forward passes only: torch.no_grad(), or inputs that are detached",
        )


_is_grad_enabled = torch.is_grad_enabled


def finish(x: torch.Tensor, a: Any = None, b: Any = None) -> torch.Tensor:
    """Return the tensor, in the graph of gradients where an input is: then ``backward`` raises."""
    if _is_grad_enabled():
        for y in (a, *b) if type(b) is tuple else (a, b):
            if getattr(y, "requires_grad", False):
                result: torch.Tensor = _ForwardOnly.apply(x, y)
                return result
    return x


def operand(number: int) -> torch.Tensor:
    """Hold a number that programs take as an operand: another one is no other program."""
    with torch.inference_mode(False):  # programs outside of that mode take it as well
        return torch.tensor(number, dtype=torch.int64, device=_CPU)


def to_numpy(x: torch.Tensor) -> npt.NDArray[Any]:
    """View a CPU tensor; copy one that is on a device."""
    array: npt.NDArray[Any]
    try:
        array = x.numpy()  # a third of the cost of force=True
    except (RuntimeError, TypeError):  # requires a gradient, or is on a device
        array = x.numpy(force=True)
    return array


def address(x: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Address of the first element, and the strides in bytes."""
    return x.data_ptr(), strides(x)


def strides(x: torch.Tensor) -> tuple[int, ...]:
    """Strides in bytes."""
    return tuple(step * x.element_size() for step in x.stride())


def extend(x: torch.Tensor, rows: int, step: int | None = None) -> torch.Tensor | None:
    """View `x` with `rows` rows; None: its storage has no more."""
    first = x.stride(0) if step is None else step // x.element_size()
    try:
        strides = first, *x.stride()[1:]
        return x.detach().as_strided((rows, *x.shape[1:]), strides, x.storage_offset())
    except RuntimeError:
        return None


def join(parts: list[torch.Tensor], axis: int = 0) -> torch.Tensor:
    """Copy all into one tensor, in the graph of gradients: `finish` refuses what asks for one."""
    return torch.cat(parts, axis)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as a vector of uint8."""
    return x.detach().view(-1).view(torch.uint8) if x.is_contiguous() else x


def of_bytes(x: torch.Tensor, dtype_name: str) -> torch.Tensor:
    """View bytes as elements of another type."""
    return x.detach().view(_DTYPES[dtype_name])


def cast(x: torch.Tensor, dtype_name: str) -> torch.Tensor:
    """Convert the elements."""
    return x.to(_DTYPES[dtype_name])


def device(x: torch.Tensor) -> int | None:
    """CUDA ordinal; None on the CPU."""
    return x.get_device() if x.is_cuda else None


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# A tenth of the cost, where this PyTorch has it.
stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)
"""Handle of PyTorch's current stream on a CUDA device."""
