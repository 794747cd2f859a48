# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of single values: each returns the value in its type or raises, naming the argument."""

from __future__ import annotations

import math
import operator
from typing import Any

import flashbsr._core as _core

from .errors import DTypeError, FlashbsrError, UnsupportedError

__all__ = [
    "BACKENDS",
    "backend_of",
    "check_backend",
    "check_float",
    "check_int",
    "check_llama31",
    "check_name",
    "check_one_array",
    "is_cuda",
    "on_cuda",
]

CUDA_BACKENDS = ("cuda", "fa2", "fa3")  # the last two name the kernels as well
BACKENDS = ("auto", "cpu", *CUDA_BACKENDS)
# FlashInfer's names of kernels that are not here: asking for one is not a typing error.
OTHER_BACKENDS = frozenset(("trtllm-gen", "cudnn", "cutlass", "cute-dsl", "fmha_v2", "xqa"))


def check_int(name: str, value: Any, least: int) -> int:
    """Return `value` as int if it is an integer in ``[least, 2**31)``; raise otherwise."""
    if isinstance(value, bool):
        raise DTypeError(name, value, "an integer")
    try:
        value = operator.index(value)
    except TypeError:
        raise DTypeError(name, repr(value), "an integer") from None
    if not least <= value < 2**31:
        raise FlashbsrError(name, value, f"an integer in [{least}, {2**31})")
    return int(value)


def check_float(name: str, value: Any) -> float:
    """Return `value` as float if it is a finite real number; raise otherwise."""
    try:
        if isinstance(value, (str, bytes)):  # float() would parse it
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise DTypeError(name, repr(value), "a number") from None
    if not -math.inf < number < math.inf:  # torch.compile reads no math.isfinite
        raise FlashbsrError(name, number, "a finite number")
    return number


def check_one_array(
    name: str,
    o_dtype: Any,
    expected: str = "another type here; flashbsr.Attention writes NVFP4, scales in order of rows",
) -> Any:
    """Return the type of an output unless it is two arrays, codes and scales; raise then."""
    if o_dtype == "nvfp4":
        raise UnsupportedError(name, "'nvfp4'", expected)
    return o_dtype


def check_name(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the `allowed` names."""
    if value not in allowed:
        quoted = [repr(a) for a in allowed]
        raise FlashbsrError(name, repr(value), f"{', '.join(quoted[:-1])} or {quoted[-1]}")


def check_llama31(value: Any) -> tuple[float, float, float]:
    """Check ``(low_freq_factor, high_freq_factor, old_context_len)``; return it as floats."""
    try:
        low, high, context = (check_float("rope_llama31", v) for v in value)
    except (TypeError, ValueError) as error:
        if isinstance(error, FlashbsrError):
            raise
        raise DTypeError(
            "rope_llama31", repr(value), "(low_freq_factor, high_freq_factor, old_context_len)"
        ) from None
    if not 0 < low < high or context <= 0:
        raise FlashbsrError(
            "rope_llama31",
            (low, high, context),
            "0 < low_freq_factor < high_freq_factor, 0 < old_context_len",
        )
    return low, high, context


def is_cuda(backend: Any) -> bool:
    """Whether `backend` names the CUDA engine, with or without a kernel family."""
    return isinstance(backend, str) and backend in CUDA_BACKENDS


def on_cuda(backend: str) -> str:
    """Name the CUDA engine, with the kernel family that `backend` asks for if it does."""
    return backend if is_cuda(backend) else "cuda"


def check_backend(backend: Any) -> None:
    """Raise unless this build and this machine have the backend."""
    if is_cuda(backend):
        problem = _core.cuda_problem()
        if problem:
            raise UnsupportedError("backend", repr(backend), f"'auto' or 'cpu' here: {problem}")
    elif isinstance(backend, str) and backend in OTHER_BACKENDS:
        raise UnsupportedError(
            "backend",
            repr(backend),
            "'auto', 'cpu' or 'cuda', which chooses the kernel itself, or 'fa2' or 'fa3'",
        )
    else:
        check_name("backend", backend, BACKENDS)


def backend_of(device: Any) -> tuple[str, int | None]:
    """Backend and CUDA ordinal of a device as PyTorch writes it."""
    if device is None:
        return "auto", None
    kind, _, ordinal = str(device).partition(":")
    if kind == "cpu":
        return "cpu", None
    if kind != "cuda" or (ordinal and not ordinal.isdecimal()):
        raise UnsupportedError("device", repr(device), "None, 'cpu', 'cuda' or 'cuda:N'")
    problem = _core.cuda_problem()
    if problem:
        raise UnsupportedError("device", repr(device), f"None or 'cpu' here: {problem}")
    return "cuda", int(ordinal) if ordinal else None
