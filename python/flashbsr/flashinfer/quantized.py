# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""NVFP4 caches in FlashInfer's form: codes of two in a byte, and block scales beside them.

A value is ``e2m1(code) * block scale * number``, there as here. Block scales are in the order of
the codes: the one that FlashInfer's kernels for compute capability 10 want of V, tokens by fours,
is not read.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays import adapter_for, to_numpy
from ..arrays.dtypes import normalize_dtype
from ..arrays.types import Array, Scale
from ..errors import DTypeError, FlashbsrError, ShapeError, UnsupportedError
from ..ops.page import append_paged_kv_cache

__all__ = [
    "as_nvfp4",
    "block_scales",
    "dtype_of",
    "number",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
]  # fmt: skip

BLOCK_BYTES = 8  # of 16 codes


def number(scale: Any) -> Any:
    """Read a scale that is one number in an array, on a GPU too."""
    shape = getattr(scale, "shape", None)
    if shape is None or math.prod(shape) != 1:
        return scale
    return float(to_numpy(scale, "scale").reshape(()).astype(np.float64))


def as_nvfp4(kv_data_type: Any) -> Any:
    """Name the type of a cache, where ``torch.uint8`` and its like say NVFP4."""
    plain = isinstance(kv_data_type, (str, tuple))
    name = kv_data_type if plain else normalize_dtype(kv_data_type, "kv_data_type")
    return "nvfp4" if name == "uint8" else kv_data_type


def dtype_of(kv: Any) -> str | None:
    """Tell NVFP4 by the bytes of a cache for which nobody planned; None: its arrays say it."""
    x = kv[0] if isinstance(kv, tuple) else kv
    return "nvfp4" if adapter_for(x, "kv").dtype_name(x, "kv") == "uint8" else None


def _halves(x: Any, name: str) -> list[tuple[Any, tuple[int, ...]]]:
    """Arrays and shapes of K and of V: of a tuple or list, or of one array that has both."""
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise ShapeError(name, f"{len(x)} arrays", "two, of K and of V")
        for y in x:
            adapter_for(y, name)
        return [(y, tuple(y.shape)) for y in x]
    adapter_for(x, name)
    shape = tuple(x.shape)
    if len(shape) < 4 or shape[1] != 2:
        raise ShapeError(name, f"shape {shape}", "(k, v), or both in [pages, 2, ...]")
    return [(x, (shape[0], *shape[2:]))] * 2


def block_scales(
    kv_cache_sf: Any, kv: Any, kv_dtype: Any, k_scale: Any, v_scale: Any
) -> tuple[Any, Any]:
    """Put block scales beside the numbers of K and V, as ``Attention.run`` takes them.

    `kv_dtype` is what was planned. Without block scales `k_scale` and `v_scale` may have them.
    """
    if kv_cache_sf is None and kv_dtype != "nvfp4":
        return k_scale, v_scale
    if kv_dtype != "nvfp4":
        actual = f"block scales of a cache in {kv_dtype or 'the type of q'}"
        expected = "None, or a cache of uint8, which a plan has as kv_data_type=torch.uint8"
        raise UnsupportedError("kv_cache_sf", actual, expected)
    if kv_cache_sf is None:
        if all(x is None or isinstance(x, (int, float)) for x in (k_scale, v_scale)):
            expected = "(k_sf, v_sf) or a stacked array, which an NVFP4 cache needs"
            raise FlashbsrError("kv_cache_sf", None, expected)
        return k_scale, v_scale
    codes, scales = _halves(kv, "kv"), _halves(kv_cache_sf, "kv_cache_sf")
    for what, parts, allowed in (
        ("codes", codes, ("uint8",)), ("block scales", scales, ("float8_e4m3fn", "uint8")),
    ):  # fmt: skip
        for x, _ in parts:
            if (dtype := adapter_for(x, what).dtype_name(x, what)) not in allowed:
                raise DTypeError("kv_cache_sf", f"{what} in {dtype}", " or ".join(allowed))
    for (_, rows), (_, shape), half in zip(codes, scales, "KV", strict=True):
        if shape != (*rows[:-1], rows[-1] // BLOCK_BYTES):
            expected = f"{(*rows[:-1], rows[-1] // BLOCK_BYTES)}: one for each 16 dims"
            raise ShapeError("kv_cache_sf", f"shape {shape} of {half}", expected)
    stacked = not isinstance(kv_cache_sf, (tuple, list))
    k, v = (kv_cache_sf[:, 0], kv_cache_sf[:, 1]) if stacked else kv_cache_sf
    return (k, 1.0 if k_scale is None else k_scale), (v, 1.0 if v_scale is None else v_scale)


def nvfp4_quantize_append_paged_kv_cache(
    append_key: Array, append_value: Array, batch_indices: Array, positions: Array,
    paged_kv_cache: Any, kv_cache_sf: Any, kv_indices: Array, kv_indptr: Array,
    kv_last_page_len: Array, k_scale: float, v_scale: float, kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """Write new keys and values into their slots as NVFP4: `flashbsr.append_paged_kv_cache`.

    Parameters
    ----------
    append_key, append_value : array [nnz, num_kv_heads, head_dim]
        float16 or bfloat16, and float32, which FlashInfer does not take.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, kv_layout
        As for `append_paged_kv_cache`.
    paged_kv_cache : uint8 array [pages, 2, page_size, num_kv_heads, head_dim / 2], or two
        Written; HND: ``page_size`` and ``num_kv_heads`` swapped.
    kv_cache_sf : float8_e4m3fn or uint8 array, or two of them
        Written: the block scales, in the shape of the cache with ``head_dim / 16`` last.
    k_scale, v_scale : float
        Positive. Rows are divided by it before; ``run`` is given the same. One number in an array
        is read, which waits for a GPU and cannot be captured.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError
    """
    table = batch_indices, kv_indices, kv_indptr, kv_last_page_len
    _append(
        append_key, append_value, paged_kv_cache, kv_cache_sf, (k_scale, v_scale), kv_layout,
        batch_indices=table[0], positions=positions, kv_indices=table[1], kv_indptr=table[2],
        kv_last_page_len=table[3],
    )  # fmt: skip


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: Array, append_value: Array, slot_mapping: Array, paged_kv_cache: Any,
    kv_cache_sf: Any, k_scale: Scale, v_scale: Scale, kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """Write new keys and values into slots that are named, as NVFP4.

    Parameters
    ----------
    append_key, append_value : array [>= nnz, num_kv_heads, head_dim]
        Rows beyond those of `slot_mapping` are not read.
    slot_mapping : int32 or int64 array [nnz]
        ``page * page_size + offset`` of each row; -1: written nowhere, as on a GPU all that the
        cache does not have. On the CPU these raise.
    paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout
        As for `nvfp4_quantize_append_paged_kv_cache`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError
    """
    adapter_for(slot_mapping, "slot_mapping")
    rows = slot_mapping.shape[0] if len(slot_mapping.shape) else 0
    _append(
        append_key[:rows], append_value[:rows], paged_kv_cache, kv_cache_sf, (k_scale, v_scale),
        kv_layout, slot_mapping=slot_mapping,
    )  # fmt: skip


def _append(
    key: Array, value: Array, cache: Any, kv_cache_sf: Any, scales: tuple[Any, Any],
    kv_layout: str, **places: Array,
) -> None:  # fmt: skip
    _halves(cache, "paged_kv_cache")
    k_scale, v_scale = block_scales(kv_cache_sf, cache, "nvfp4", *map(number, scales))
    append_paged_kv_cache(
        key, value, paged_kv_cache=cache, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale,
        kv_dtype="nvfp4", **places,
    )  # fmt: skip
