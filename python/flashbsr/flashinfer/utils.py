# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What programs ask about the machine, and FlashInfer's enumerations."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import flashbsr._core as _core

from ._arguments import described

__all__ = ["GPUArchitectureError", "MaskMode", "PosEncodingMode", "TensorLayout",
           "device_support_pdl", "get_compute_capability", "has_flashinfer_jit_cache",
           "is_fa3_backend_supported", "is_sm12x_supported", "is_sm90a_supported",
           "is_sm100a_supported", "is_sm100f_supported", "is_sm110a_supported",
           "is_sm120a_supported", "is_sm120f_supported", "is_sm121a_supported"]  # fmt: skip

MaskMode = Enum("MaskMode", ["NON_CAUSAL", "CAUSAL", "CUSTOM", "MULTIITEMSCORING"], start=0)
PosEncodingMode = Enum("PosEncodingMode", ["NONE", "ROPE_LLAMA", "ALIBI"], start=0)
TensorLayout = Enum("TensorLayout", ["NHD", "HND"], start=0)


class GPUArchitectureError(Exception):
    """FlashInfer's, for programs that catch it. flashbsr raises `flashbsr.UnsupportedError`."""


@described("cuda")
def get_compute_capability(device: Any) -> tuple[int, int]:
    """Tell the compute capability of a GPU; `ValueError` where there is none."""
    kind, _, ordinal = str(device).partition(":")
    kind, ordinal = ("cuda", kind) if kind.isdecimal() else (kind, ordinal)
    devices = _core.cuda_devices()
    if kind != "cuda":
        raise ValueError(f"device must be a cuda device, not {device!r}")
    if int(ordinal or 0) >= len(devices):
        raise ValueError(f"there is no device {device!r}: {_core.cuda_problem() or 'too few GPUs'}")
    major, minor = devices[int(ordinal or 0)]["compute_capability"]
    return major, minor


def _supported(major: int, minor: int | None = None) -> Callable[[Any], bool]:
    def supported(device: Any) -> bool:
        if str(device).partition(":")[0] == "cpu":
            return False
        found = get_compute_capability(device)
        return found[0] == major and minor in (None, found[1])

    capability = f"{major}.{'x' if minor is None else minor}"
    supported.__doc__ = f"Whether a GPU is of compute capability {capability}."
    return described("cuda")(supported)


is_sm90a_supported = _supported(9, 0)
is_sm100a_supported = is_sm100f_supported = _supported(10)
is_sm110a_supported = _supported(11)
is_sm120a_supported, is_sm121a_supported = _supported(12, 0), _supported(12, 1)
is_sm12x_supported = is_sm120f_supported = _supported(12)


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
