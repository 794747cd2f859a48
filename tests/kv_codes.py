# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Caches of codes from the formulas of docs/kv-quantization.md, in NumPy, and problems with them.

Nothing here imports flashbsr's quantisers: codes and scales are made by `encode`, in float32.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import cases
import ml_dtypes
import numpy as np
import reference
from cases import Case, Problem
from reference import Variant

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
MOST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344, "nvfp4": 6}


@dataclass(frozen=True)
class Kind:
    """A type of codes; `group` 0: one scale for all dims."""

    dtype: str
    group: int = 0
    scale: str = "float32"

    def __str__(self) -> str:
        """Name a test's parameter."""
        return f"{self.dtype}{self.group or ''}{'' if self.scale == 'float32' else 'half'}"


INT8 = Kind("int8")
INT8_HALF = Kind("int8", scale="float16")
FP8, E5M2 = Kind("float8_e4m3fn"), Kind("float8_e5m2")
INT4, INT4_64, INT4_32 = Kind("int4"), Kind("int4", 64), Kind("int4", 32)
NVFP4 = Kind("nvfp4", 16)
KINDS = (INT8, INT8_HALF, FP8, E5M2, INT4, INT4_64, INT4_32, NVFP4)


def pack(codes: np.ndarray) -> np.ndarray:
    """Two codes in a byte, the first in the lower half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: np.ndarray) -> np.ndarray:
    """The codes of bytes."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(
        *packed.shape[:-1], 2 * packed.shape[-1]
    )


def _divided(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    return (x * inverse).astype(np.float32)


def encode(x: np.ndarray, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of rows `x` [..., D] in float32."""
    size = kind.group or x.shape[-1]
    g = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // size, size)
    low, high = np.minimum(g.min(-1, keepdims=True), 0), np.maximum(g.max(-1, keepdims=True), 0)
    bad = ~np.isfinite(g).all(-1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        if kind.dtype == "int4":
            scale = (((high - low) / np.float32(15)).view(np.uint32) & ~np.uint32(15)).view("f4")
            zero = np.clip(np.rint(_divided(-low, scale)), 0, 15)
            zero = np.where(bad, 0, zero).astype(np.float32)
            codes = np.clip(np.rint((_divided(g, scale) + zero).astype(np.float32)), 0, 15)
            scale = (scale.view(np.uint32) | zero.astype(np.uint32)).view(np.float32)
        else:
            # NumPy may take the negative zero of two; a row of zeros has a scale of +0.
            scale = (np.maximum(high, -low) + np.float32(0)) / np.float32(MOST[kind.dtype])
            if kind.dtype == "nvfp4":
                scale = np.minimum(scale, 448).astype(E4M3).astype(np.float32)
            elif kind.scale == "float16":
                scale = np.minimum(scale, 65504).astype(np.float16).astype(np.float32)
            codes = _divided(g, scale)
    scale = np.where(bad, np.float32(np.nan), scale)[..., 0]
    codes = np.where(bad, 0, codes).reshape(x.shape)
    if not kind.group:
        scale = scale[..., 0]
    if kind.dtype == "int4":
        return pack(codes.astype(np.uint8)), scale
    if kind.dtype == "nvfp4":
        # The nearest; of two that are as near the even code.
        order = np.array([0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15])
        distance = np.abs(codes[..., None].astype(np.float64) - E2M1[order])
        distance += np.where(np.signbit(codes)[..., None] != np.signbit(E2M1[order]), 100.0, 0)
        return pack(order[distance.argmin(-1)].astype(np.uint8)), scale.astype(E4M3)
    if kind.dtype == "int8":
        codes = np.clip(np.rint(codes), -127, 127).astype(np.int8)
    else:
        most = MOST[kind.dtype]
        codes = np.clip(codes, -most, most).astype(getattr(ml_dtypes, kind.dtype))
    return codes, scale.astype(kind.scale)


def decode(codes: np.ndarray, scale: np.ndarray, kind: Kind) -> np.ndarray:
    """What codes and scales mean, in float64."""
    if kind.dtype in ("int4", "nvfp4"):
        codes = unpack(codes)
    size = kind.group or codes.shape[-1]
    g = codes.reshape(*codes.shape[:-1], codes.shape[-1] // size, size)
    scale = scale.reshape(*g.shape[:-1], 1)
    if kind.dtype == "int4":
        bits = scale.view(np.uint32)
        real = (bits & ~np.uint32(15)).view(np.float32).astype(np.float64)
        values = (g.astype(np.float64) - (bits & 15)) * real
    elif kind.dtype == "nvfp4":
        values = E2M1[g] * scale.astype(np.float64)
    else:
        values = g.astype(np.float64) * scale.astype(np.float64)
    return values.reshape(codes.shape)


def hostile(x: np.ndarray) -> np.ndarray:
    """`x` as a view with strides of its own; what lies around are NaNs, or 0xff."""
    base = np.full((*(n + 1 for n in x.shape[:-1]), x.shape[-1] + 3), 0xFF, np.uint8)
    base = np.repeat(base, x.itemsize, axis=-1).view(x.dtype)
    view = base[(*(slice(0, n) for n in x.shape[:-1]), slice(1, 1 + x.shape[-1]))]
    view[...] = x
    return view


@dataclass
class Coded:
    """A problem whose cache is codes, and how it is given to ``Attention``."""

    problem: Problem
    kv: Any
    kv_dtype: tuple[str, str]
    options: dict[str, Any]


def build(case: Case, k_kind: Kind, v_kind: Kind) -> Coded:
    """The case in floats, encoded: slots that no request owns have garbage and scales of NaN."""
    case = dataclasses.replace(
        case, dtypes=(case.dtypes[0], "float32", case.dtypes[2]), stacked=False
    )
    problem = cases.build(case)
    (k, k_scale), (v, v_scale) = (
        encode(x, kind) for x, kind in zip(problem.kv, (k_kind, v_kind), strict=True)
    )
    requests = [
        (q, decode(*encode(keys, k_kind), k_kind), decode(*encode(values, v_kind), v_kind), mask)
        for q, keys, values, mask in problem.requests
    ]
    options = dict(problem.run_options)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        options[name] = (hostile(scale), options[name]) if name in options else hostile(scale)
    return Coded(
        dataclasses.replace(problem, requests=requests),
        (hostile(k), hostile(v)),
        (k_kind.dtype, v_kind.dtype),
        options,
    )


def assert_attends(
    out: np.ndarray,
    q: np.ndarray,
    kv: tuple[np.ndarray, np.ndarray],
    page_lists: list[np.ndarray],
    length: int,
) -> None:
    """Hold a token of each request to float64 over `length` tokens of its pages [..., H, D]."""
    for i, pages in enumerate(page_lists):
        keys, values = (x[pages].reshape(-1, *x.shape[2:])[:length] for x in kv)
        state = reference.attend(q[i : i + 1], keys, values, Variant())
        np.testing.assert_allclose(out[i].astype(np.float64), state.out[0], atol=2e-2)
