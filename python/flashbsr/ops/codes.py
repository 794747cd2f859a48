# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Caches of codes with scales of every token and head: arguments of appends, and reading back."""

from __future__ import annotations

from typing import Any

import flashbsr._core as _core

from .._check import check_float
from ..arrays import adapter_for
from ..arrays.dtypes import O_DTYPES, PACKED, kv_dtypes, normalize_dtype
from ..arrays.types import Array
from ..errors import FlashbsrError, UnsupportedError
from .call import Call

__all__ = ["NO_CODES", "Scales", "dequantize_kv_cache", "take_scales"]

Scales = tuple[Any, Any, str, str]
"""Scales of K and of V as they are handed over, and what bytes of both are."""

NO_CODES: Scales = (None, None, "", "")


def take_scales(
    call: Call, k_scale: Any, v_scale: Any, kv_dtype: Any
) -> tuple[float, float, Scales]:
    """Split the scales of an append into numbers and the arrays that it writes."""
    numbers, arrays = [], []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        number: Any = scale
        array = None
        if isinstance(scale, tuple):
            if len(scale) != 2:
                raise FlashbsrError(name, f"a tuple of {len(scale)}", "(scales, a number)")
            array, number = scale
        # Numbers first: of one that PyTorch traces it can be asked nothing else.
        elif not isinstance(scale, (int, float)) and len(getattr(scale, "shape", ())) > 1:
            array, number = scale, 1.0
        if array is not None and call.operators is not None:
            raise UnsupportedError(
                name,
                "an array of scales, in a compiled program",
                "a call outside of it (torch.compiler.disable)",
            )
        numbers.append(check_float(name, number))
        arrays.append(None if array is None else call.export(array, name, True))
    k, v = kv_dtypes(kv_dtype)
    return numbers[0], numbers[1], (*arrays, k or "", v or "")  # type: ignore[return-value]


def dequantize_kv_cache(
    cache: Array,
    scale: Array | tuple[Array, float],
    *,
    kv_dtype: Any = None,
    dtype: Any = "float32",
    out: Array | None = None,
) -> Array:
    """Read a cache of codes back: codes times the scales of every token and head.

    For tests and inspection; attention reads the codes themselves.

    Parameters
    ----------
    cache : array [pages, page_size, heads, D] or [tokens, heads, D]
        Of K or of V alone, tokens and heads in either order: int8, float8_e4m3fn or float8_e5m2, or
        uint8 with ``D / 2`` bytes for codes of four bits.
    scale : array, or tuple of an array and a number
        Scales of every token and head, as ``Attention.run`` takes them.
    kv_dtype : {"int4", "nvfp4"}, optional
        What bytes are. None: `cache` says it.
    dtype : data type
        float32, float16 or bfloat16, of the result.
    out : array, optional
        Written and returned, in a type of its own. Not a JAX array.

    Returns
    -------
    array of the shape of `cache`, with D for ``D / 2``
        NaN where the scale is NaN: slots that nobody wrote are read like others.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, FlashbsrError
    UnsupportedError
        Tensors of a compiled program.

    Examples
    --------
    >>> import numpy as np
    >>> codes = np.array([[[127, -64]]], np.int8)
    >>> dequantize_kv_cache(codes, np.array([[0.5]], np.float32)).tolist()
    [[[63.5, -32.0]]]
    >>> packed = np.array([[[0x2F] * 16]], np.uint8)  # 15 and 2, by turns
    >>> zero = np.array([[0.5]], np.float32).view(np.uint32) | 2
    >>> dequantize_kv_cache(packed, zero.view(np.float32), kv_dtype="int4")[0, 0, :4].tolist()
    [6.5, 0.0, 6.5, 0.0]
    """
    call = Call(cache, "cache")
    if call.operators is not None:
        raise UnsupportedError("cache", "a tensor of a compiled program", "a call outside of it")
    a = adapter_for(cache, "cache")
    number = 1.0
    if isinstance(scale, tuple):
        if len(scale) != 2:
            raise FlashbsrError("scale", f"a tuple of {len(scale)}", "(scales, a number)")
        number = check_float("scale", scale[1])
        scale = scale[0]
    name = kv_dtypes(kv_dtype)[0] or ""
    shape = tuple(cache.shape)
    if name in PACKED and shape:
        shape = (*shape[:-1], 2 * shape[-1])
    wanted = normalize_dtype(dtype, "dtype", O_DTYPES) or "float32"
    result = a.empty(cache, shape, wanted) if out is None else out
    to = a if out is None else adapter_for(out, "out")
    _core.dequantize_kv_cache(
        a.export(cache, False, "cache"),
        call.export(scale, "scale"),
        name,
        number,
        to.export(result, True, "out"),
        call.stream,
    )
    call.done()
    return to.finish(result)
