# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What programs ask about the machine, and FlashInfer's enumerations."""

from __future__ import annotations

from enum import Enum
from typing import Any

import flashbsr._core as _core

from ._arguments import described

__all__ = [
    "GPUArchitectureError",
    "MaskMode",
    "PosEncodingMode",
    "TensorLayout",
    "device_support_pdl",
    "get_compute_capability",
    "has_flashinfer_jit_cache",
    "is_fa3_backend_supported",
    "is_sm12x_supported",
    "is_sm90a_supported",
    "is_sm100a_supported",
    "is_sm100f_supported",
    "is_sm110a_supported",
    "is_sm120a_supported",
    "is_sm120f_supported",
    "is_sm121a_supported",
]  # fmt: skip


class MaskMode(Enum):
    """FlashInfer's numbers of masks."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class PosEncodingMode(Enum):
    """FlashInfer's numbers of position encodings."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class TensorLayout(Enum):
    """FlashInfer's numbers of layouts."""

    NHD = 0
    HND = 1


class GPUArchitectureError(Exception):
    """FlashInfer's, for programs that catch it. flashbsr raises `flashbsr.UnsupportedError`."""


@described("cuda")
def get_compute_capability(device: Any = None) -> tuple[int, int]:
    """Tell the compute capability of a GPU.

    Raises
    ------
    ValueError
        No GPU.
    """
    kind, _, ordinal = str("cuda" if device is None else device).partition(":")
    if kind.isdecimal():
        kind, ordinal = "cuda", kind
    devices = _core.cuda_devices()
    if kind != "cuda":
        raise ValueError(f"device must be a cuda device, not {device!r}")
    if int(ordinal or 0) >= len(devices):
        raise ValueError(f"there is no device {device!r}: {_core.cuda_problem() or 'too few GPUs'}")
    major, minor = str(devices[int(ordinal or 0)]["compute_capability"]).split(".")
    return int(major), int(minor)


def _is(device: Any, *capabilities: tuple[int, int | None]) -> bool:
    if str(device).partition(":")[0] == "cpu":
        return False
    major, minor = get_compute_capability(device)
    return any(major == a and b in (None, minor) for a, b in capabilities)


@described("cuda")
def is_sm90a_supported(device: Any) -> bool:
    """Whether a GPU is of compute capability 9.0, for which there are kernels of its own."""
    return _is(device, (9, 0))


@described("cuda")
def is_sm100a_supported(device: Any) -> bool:
    """Whether a GPU is of compute capability 10.x."""
    return _is(device, (10, None))


@described("cuda")
def is_sm110a_supported(device: Any) -> bool:
    """Whether a GPU is of compute capability 11.x."""
    return _is(device, (11, None))


@described("cuda")
def is_sm120a_supported(device: Any) -> bool:
    """Whether a GPU is of compute capability 12.0."""
    return _is(device, (12, 0))


@described("cuda")
def is_sm121a_supported(device: Any) -> bool:
    """Whether a GPU is of compute capability 12.1."""
    return _is(device, (12, 1))


@described("cuda")
def is_sm12x_supported(device: Any) -> bool:
    """Whether a GPU is of compute capability 12.x."""
    return _is(device, (12, None))


is_sm100f_supported, is_sm120f_supported = is_sm100a_supported, is_sm12x_supported


@described("cuda")
def device_support_pdl(device: Any) -> bool:
    """Whether a GPU overlaps kernels that depend on each other: compute capability 9.0 on."""
    return str(device).partition(":")[0] != "cpu" and get_compute_capability(device) >= (9, 0)


@described("cuda")
def is_fa3_backend_supported(
    pos_encoding_mode: int, use_fp16_qk_reductions: bool, use_custom_mask: bool, dtype_q: Any,
    dtype_kv: Any,
) -> bool:  # fmt: skip
    """Whether FlashInfer's ``backend="fa3"`` has it. Here "auto" chooses by itself."""
    q, kv = (str(x).removeprefix("torch.") for x in (dtype_q, dtype_kv))
    plain = not (pos_encoding_mode or use_fp16_qk_reductions or use_custom_mask)
    return plain and (q == kv or kv.startswith("float8"))


def has_flashinfer_jit_cache() -> bool:
    """Whether FlashInfer's package of compiled kernels is there: never, nothing here needs it."""
    return False
