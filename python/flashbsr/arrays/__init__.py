# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""One module per array framework; nothing else in the package knows a framework.

An adapter says what an array's element type is, hands the array to the compiled core without a
copy, allocates an array of the caller's kind and gives results back as that kind. `adapter_for`
finds it by the type's module name, so no framework is imported that the caller has not imported.

To add a framework: write a module with the names of `Adapter` and add a line to ``_MODULES``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from ..errors import DTypeError, FlashbsrError, ShapeError
from .dtypes import O_DTYPES
from .operators import operators_by

__all__ = [
    "Adapter", "adapter_for", "as_bytes", "device_of", "export", "float_dtype", "operand",
    "operators_by", "per_head", "stream_handle", "to_indices", "to_numpy", "to_values",
]  # fmt: skip


class Adapter(Protocol):
    """What an adapter module provides."""

    @property
    def name(self) -> str:
        """The framework."""

    @property
    def MUTABLE(self) -> bool:  # noqa: N802
        """Whether arrays can be written: ``out=`` and in-place functions."""

    @property
    def WAITS(self) -> bool:  # noqa: N802
        """Whether a call on a GPU returns only when its results are there.

        For a framework that would reuse the memory of its arrays while a kernel still reads them.
        """

    @property
    def OPERATORS(self) -> Any:  # noqa: N802
        """What a compiler puts into its program in place of a call; None: arrays have values."""

    def dtype_name(self, x: Any, argument: str = "array") -> str:
        """Name the element type as `flashbsr.dtypes` does; `DTypeError` for unknown ones."""

    def export(self, x: Any, writable: bool = False, argument: str = "array") -> Any:
        """Hand `x` to the compiled core without a copy.

        Returns an object that nanobind imports (DLPack capsule, buffer), `x` itself where its type
        was given to ``_core.use_exchange_api``, or a tuple ``(unsigned view, dtype name)`` for
        element types that none of these can carry. A capsule can be imported once. For an array on
        a GPU no stream is ordered after another, except that JAX's arrays are ready on the legacy
        default stream.

        Raises, naming the `argument`, `DeviceError` where the core cannot reach the memory,
        `DTypeError` for unknown element types, and either that or `UnsupportedError` for a
        read-only array with ``writable=True``.
        """

    def empty(self, like: Any, shape: tuple[int, ...], dtype_name: str) -> Any:
        """Allocate an array on the device of `like`; `export` it, then `finish` it."""

    def finish(self, x: Any, a: Any = None, b: Any = None) -> Any:
        """Turn what `empty` made into an array of the framework, computed of `a` and `b`."""

    def to_numpy(self, x: Any) -> npt.NDArray[Any]:
        """View `x` as a NumPy array on the host, for reading; zero copy on the CPU."""

    def address(self, x: Any) -> tuple[int, tuple[int, ...]]:
        """Address of the first element, and the strides in bytes."""

    def strides(self, x: Any) -> tuple[int, ...]:
        """Strides in bytes; `DTypeError` or what the framework raises where there are none."""

    def extend(self, x: Any, rows: int, step: int | None = None) -> Any:
        """View `x` with `rows` rows, from its first one on in steps of its first stride.

        Or, of `step` bytes: rows may lie within each other.

        For reading, and of memory that the caller keeps. None: the framework has no such views, or
        not of that memory.
        """

    def join(self, parts: list[Any], axis: int = 0) -> Any:
        """Copy arrays of one type into one array, behind each other along an axis."""

    def as_bytes(self, x: Any) -> Any:
        """View a contiguous array as a vector of uint8; any other one is given back as it is."""

    def of_bytes(self, x: Any, dtype_name: str) -> Any:
        """View bytes, whose last dimension is contiguous, as elements of another type."""

    def cast(self, x: Any, dtype_name: str) -> Any:
        """Convert the elements, into a new array unless they are of that type."""

    def device(self, x: Any) -> int | None:
        """CUDA ordinal of the device that `x` is on; None for host memory."""

    def stream(self, device: int) -> int:
        """Handle (``CUstream``) of the framework's current stream on a CUDA device."""


# Root of type.__module__ -> adapter module. ml_dtypes arrays are NumPy arrays.
_MODULES = {"numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax", "cupy": "cupy"}

_ALIGNMENT = 16  # of workspaces, in bytes

_ADAPTERS: dict[type, Adapter] = {}  # type of array -> its adapter


def adapter_for(x: Any, argument: str = "array") -> Adapter:
    """Adapter of an array.

    Parameters
    ----------
    x : array
        NumPy (with ml_dtypes), PyTorch, JAX or CuPy; subclasses too.
    argument : str
        Name for the error message.

    Raises
    ------
    DTypeError
        Not an array of these frameworks.

    Examples
    --------
    >>> import numpy as np
    >>> adapter_for(np.zeros(3)).name
    'numpy'
    """
    adapter = _ADAPTERS.get(type(x))
    if adapter is None:
        adapter = _ADAPTERS[type(x)] = _find(type(x), argument)
    return adapter


def _adapter_in_a_trace(x: Any, argument: str = "array") -> Adapter:
    """Adapter of an array, while torch.compile reads the program: its tensors have no values."""
    import torch

    if isinstance(x, torch.Tensor):
        from . import traced

        return cast("Adapter", traced)
    return _find(type(x), argument)


# torch.compile reads this function in the other's place, which costs a call outside of it nothing.
adapter_for._torchdynamo_inline = _adapter_in_a_trace  # type: ignore[attr-defined]


def operand(number: int) -> Any:
    """Hold a number as an operand of PyTorch's programs; None where PyTorch is not loaded."""
    if sys.modules.get("torch") is None:  # None: who is without it on purpose
        return None
    return importlib.import_module(".torch", __name__).operand(number)


def _find(kind: type, argument: str) -> Adapter:
    if issubclass(kind, np.ma.MaskedArray):
        raise DTypeError(argument, "a masked array", "one without a mask: x.filled(value)")
    for base in kind.__mro__:
        # ndarray is asked for by identity: numpy's scalars and dtypes live in the same module.
        module = _MODULES.get(base.__module__.partition(".")[0])
        if module is None or (module == "numpy" and base is not np.ndarray):
            continue
        if base.__module__.startswith("torch._subclasses."):  # shapes only, as in torch.export
            module = "traced"
        return cast("Adapter", importlib.import_module(f".{module}", __name__))
    way_out = "; numpy.from_dlpack(x) first" if hasattr(kind, "__dlpack__") else ""
    raise DTypeError(
        argument, kind.__qualname__, f"an array of NumPy, PyTorch, JAX or CuPy{way_out}"
    )


def export(x: Any, argument: str, writable: bool = False) -> Any:
    """Hand an array of any framework to the compiled core; see `Adapter.export`."""
    return adapter_for(x, argument).export(x, writable, argument)


def device_of(x: Any, argument: str = "array") -> int | None:
    """CUDA ordinal of the device that `x` is on; None for host memory, lists and None."""
    if x is None or isinstance(x, (list, tuple, np.ndarray)):
        return None
    return adapter_for(x, argument).device(x)


def stream_handle(stream: Any, argument: str = "stream") -> int:
    """Handle of a CUDA stream.

    Parameters
    ----------
    stream : int, torch.cuda.Stream, cupy.cuda.Stream, or an object with ``__cuda_stream__``
        A handle as it is, or what has one. 0 and 1: the legacy default stream, 2: the per-thread
        one.
    argument : str
        Name for the error message.

    Raises
    ------
    DTypeError
        None of these.

    Examples
    --------
    >>> stream_handle(2)
    2
    """
    found = stream
    if hasattr(stream, "__cuda_stream__"):  # (version, handle)
        protocol = stream.__cuda_stream__
        found = (protocol() if callable(protocol) else protocol)[1]
    else:
        for attribute in ("cuda_stream", "ptr"):
            found = getattr(stream, attribute, found)
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise DTypeError(
            argument, repr(stream), "a CUDA stream: a handle, or a PyTorch or CuPy stream"
        )
    return found


def float_dtype(x: Any, argument: str, allowed: tuple[str, ...] = O_DTYPES) -> str:
    """Name the element type of queries, outputs or states.

    Raises
    ------
    DTypeError
        Not one of `allowed`, by default float32, float16 and bfloat16.
    """
    name = adapter_for(x, argument).dtype_name(x, argument)
    if name not in allowed:
        raise DTypeError(argument, name, ", ".join(allowed))
    return name


def to_numpy(x: Any, argument: str = "array") -> npt.NDArray[Any]:
    """Any array, list or tuple as a NumPy array on the host, for reading.

    Zero copy for arrays on the CPU.

    Raises
    ------
    DTypeError
        Not an array.
    """
    if isinstance(x, (list, tuple)):
        try:
            return np.asarray(x)
        except ValueError:
            raise DTypeError(argument, "a ragged sequence", "an array") from None
    adapter = adapter_for(x, argument)
    try:
        return adapter.to_numpy(x)
    except (TypeError, RuntimeError, NotImplementedError) as error:  # a type NumPy does not have
        raise DTypeError(argument, f"a {x.dtype} array", f"numbers NumPy has ({error})") from None


def to_values(x: Any, argument: str = "array") -> npt.NDArray[Any]:
    """Any array, list or tuple as a contiguous NumPy array: indices, lengths, masks.

    Copies what is strided or not on the host: these arrays are small.
    """
    # Three of these were a quarter of Python's part of a plan: NumPy's arrays go straight through.
    array = x if type(x) is np.ndarray else to_numpy(x, argument)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def to_indices(x: Any, argument: str = "array") -> npt.NDArray[np.int64]:
    """Any int32 or int64 vector, or list of integers, as a NumPy array of int64.

    Raises
    ------
    DTypeError, ShapeError
        Not integers, or not a vector.
    """
    array = to_numpy(x, argument)
    if array.dtype not in (np.int32, np.int64) and array.size:  # an empty list is of float64
        raise DTypeError(argument, array.dtype, "int32 or int64")
    if array.ndim != 1:
        raise ShapeError(argument, f"shape {array.shape}", "a vector")
    return array.astype(np.int64)


def as_bytes(workspace: Any, name: str) -> Any:
    """View a contiguous workspace of any type as bytes; None and a size stay.

    Raises
    ------
    FlashbsrError
        It is not aligned.
    """
    if workspace is None or isinstance(workspace, int):
        return workspace
    adapter = adapter_for(workspace, name)
    start = adapter.address(workspace)[0]
    if start % _ALIGNMENT:
        expected = f"{name} must be {_ALIGNMENT}-byte aligned"
        raise FlashbsrError(name, f"an array at {start:#x}", expected)
    return adapter.as_bytes(workspace)


def per_head(scale: Any, heads: int) -> Any:
    """Expand a scale that is one number in the memory of a GPU: reading it there would wait."""
    if scale is None or isinstance(scale, (int, float)) or heads == 1:
        return scale
    shape = getattr(scale, "shape", None)
    if shape is None or tuple(shape) not in ((), (1,)) or device_of(scale, "scale") is None:
        return scale
    return adapter_for(scale, "scale").join([scale.reshape(1)] * heads)
