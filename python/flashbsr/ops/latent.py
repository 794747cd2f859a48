# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Latent caches in rows of 656 bytes: written by a quantiser, and read back.

A row is 512 codes of e4m3, four float32 scales of 128 codes each, and 64 bfloat16. As views of one
array of bytes these are four heads of 128 codes with a scale each, and a head of 64: what
`append_paged_kv_cache` writes.
"""

from __future__ import annotations

from typing import Any

from ..arrays import adapter_for, float_dtype
from ..arrays.types import Array
from ..errors import DTypeError, FlashbsrError, ShapeError
from .codes import dequantize_kv_cache
from .page import append_paged_kv_cache

__all__ = ["PACKED_BYTES", "append_latents", "append_packed_latents", "unpack_latents"]

LATENT, TAIL, GROUP = 512, 64, 128
SCALES = LATENT, LATENT + LATENT // GROUP * 4
PACKED_BYTES = SCALES[1] + 2 * TAIL

_SPELLING = {
    "append_key": "append_ckv", "append_value": "append_ckv", "paged_kv_cache[0]": "cache",
    "paged_kv_cache[1]": "cache", "k_scale": "cache", "v_scale": "cache",
}  # fmt: skip


def _views(cache: Array) -> tuple[Any, Any, Any]:
    """Codes [pages, page_size, 4, 128], scales [.., 4] and rotated keys [.., 64]."""
    adapter, shape = adapter_for(cache, "cache"), tuple(cache.shape)
    if len(shape) == 4 and shape[2] == 1:
        cache, shape = cache[:, :, 0], (*shape[:2], shape[3])
    if len(shape) != 3 or shape[2] != PACKED_BYTES:
        raise ShapeError("cache", f"shape {shape}", f"(pages, page_size, {PACKED_BYTES})")
    if adapter.dtype_name(cache, "cache") != "uint8":
        raise DTypeError("cache", adapter.dtype_name(cache, "cache"), "uint8: rows of bytes")
    codes = adapter.of_bytes(cache[..., :LATENT], "float8_e4m3fn")
    scales = adapter.of_bytes(cache[..., slice(*SCALES)], "float32")
    tails = adapter.of_bytes(cache[..., SCALES[1] :], "bfloat16")
    return codes.reshape(*shape[:2], LATENT // GROUP, GROUP), scales, tails


def append_packed_latents(
    append_ckv: Array,
    append_kpe: Array,
    batch_indices: Array = None,
    positions: Array = None,
    cache: Array = None,
    kv_indices: Array = None,
    kv_indptr: Array = None,
    kv_last_page_len: Array = None,
    *,
    slot_mapping: Array = None,
) -> None:
    """Quantise new latents and write them into their slots, in rows of 656 bytes.

    A scale is the largest absolute value of its 128 dims divided by 448, and 0 where those are
    zeros; rotated keys are rounded to bfloat16.

    Parameters
    ----------
    append_ckv : array [nnz, 512]
        float32, float16 or bfloat16.
    append_kpe : array [nnz, 64]
        Likewise: the rotated keys.
    cache : uint8 array [pages, page_size, 656] or [pages, page_size, 1, 656]
        Written. Not a JAX array: those are immutable.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, slot_mapping
        As for `append_paged_kv_cache`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError
    UnsupportedError
        An immutable cache.

    Examples
    --------
    >>> import ml_dtypes
    >>> import numpy as np
    >>> cache = np.zeros((2, 4, 656), np.uint8)
    >>> latent, rotated = np.full((1, 512), 2.0, np.float32), np.ones((1, 64), np.float32)
    >>> append_packed_latents(latent, rotated, cache=cache, slot_mapping=np.array([6]))
    >>> row = unpack_latents(cache)[1, 2]
    >>> float(row[0]), float(row[512])
    (2.0, 1.0)
    """
    # All that two appends would find out, before the first one writes.
    for name, x, dim in (("append_ckv", append_ckv, LATENT), ("append_kpe", append_kpe, TAIL)):
        float_dtype(x, name)
        if len(x.shape) != 2 or x.shape[1] != dim or x.shape[0] != append_ckv.shape[0]:
            raise ShapeError(name, f"shape {tuple(x.shape)}", f"(nnz, {dim})")
    codes, scales, tails = _views(cache)
    groups = append_ckv.reshape(-1, LATENT // GROUP, GROUP)
    table = kv_indices, kv_indptr, kv_last_page_len
    half = TAIL // 2
    try:
        append_paged_kv_cache(
            groups[:, :2], groups[:, 2:], batch_indices, positions,
            (codes[:, :, :2], codes[:, :, 2:]), *table, slot_mapping=slot_mapping,
            k_scale=scales[..., :2], v_scale=scales[..., 2:],
        )  # fmt: skip
        append_paged_kv_cache(
            append_kpe[:, None, :half], append_kpe[:, None, half:], batch_indices, positions,
            (tails[:, :, None, :half], tails[:, :, None, half:]), *table,
            slot_mapping=slot_mapping,
        )  # fmt: skip
    except FlashbsrError as error:
        raise error.respell(_SPELLING) from None


def append_latents(
    append_ckv: Array,
    append_kpe: Array,
    batch_indices: Array,
    positions: Array,
    caches: tuple[Array, Array],
    *table: Array,
) -> None:
    """Write latents and rotated keys into caches of their own, or both into packed rows.

    Errors name the caches ``ckv_cache`` and ``kpe_cache``; packed rows have no second one.
    """
    ckv, kpe = caches
    spelling = {
        "append_key": "append_ckv", "append_value": "append_kpe", "cache": "ckv_cache",
        "paged_kv_cache[0]": "ckv_cache", "paged_kv_cache[1]": "kpe_cache",
    }  # fmt: skip
    try:
        if kpe is None and ckv.shape[-1] == PACKED_BYTES:
            append_packed_latents(append_ckv, append_kpe, batch_indices, positions, ckv, *table)
            return
        both = ckv[:, :, None], kpe[:, :, None]
        append_paged_kv_cache(
            append_ckv[:, None], append_kpe[:, None], batch_indices, positions, both, *table
        )
    except FlashbsrError as error:
        raise error.respell(spelling) from None


def unpack_latents(cache: Array, dtype: Any = "float32") -> Array:
    """Read rows of 656 bytes back: codes times their scales, and the rotated keys behind them.

    For tests and inspection; attention reads the rows themselves.

    Parameters
    ----------
    cache : uint8 array [pages, page_size, 656] or [pages, page_size, 1, 656]
    dtype : data type
        float32, float16 or bfloat16, of the result.

    Returns
    -------
    array [pages, page_size, 576]
        Of the kind of `cache`.

    Raises
    ------
    ShapeError, DTypeError
        Other arrays.
    UnsupportedError
        Tensors of a compiled program.

    Examples
    --------
    >>> import numpy as np
    >>> rows = unpack_latents(np.zeros((2, 4, 656), np.uint8))
    >>> rows.shape, float(rows.max())
    ((2, 4, 576), 0.0)
    """
    codes, scales, tails = _views(cache)
    latent = dequantize_kv_cache(codes, scales, dtype=dtype)
    adapter = adapter_for(latent, "cache")
    rows = latent.reshape(*tuple(latent.shape)[:2], LATENT)
    return adapter.join([rows, adapter.cast(tails, adapter.dtype_name(rows, "cache"))], -1)
