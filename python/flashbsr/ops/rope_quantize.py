# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Queries and keys rotated and rounded to float8 in one pass."""

from __future__ import annotations

from .._check import check_float
from ..arrays import adapter_for, float_dtype
from ..arrays.dtypes import FLOAT8, normalize_dtype
from ..arrays.types import Array, DType
from ..errors import ShapeError, UnsupportedError
from .call import Call
from .rotate import check_table, rotate_exported

__all__ = ["rope_quantize"]


def rope_quantize(
    q: Array,
    k: Array,
    pos_ids: Array,
    cos_sin_cache: Array = None,
    is_neox: bool = True,
    *,
    dtype: DType = None,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    q_out: Array = None,
    k_out: Array = None,
) -> tuple[Array, Array]:
    """Rotate queries and keys by a table, and round them to float8, once.

    Attention takes the scales back: ``run(q_out, ..., q_scale=q_scale, k_scale=k_scale)``.

    Parameters
    ----------
    q : array [nnz, num_qo_heads, head_dim]
        float32, float16 or bfloat16. Any strides but the last.
    k : array [nnz, num_kv_heads, head_dim_k]
        Likewise.
    pos_ids : int32 or int64 array [nnz]
        Rows of the table.
    cos_sin_cache : float32 array [max_position, rotary_dim], optional
        As for `apply_rope_with_cos_sin_cache`; elements from `rotary_dim` on are not rotated.
        None: nothing is, for heads that have no position.
    is_neox : bool
        Pairs ``(i, i + rotary_dim / 2)``; False: ``(2 i, 2 i + 1)``.
    dtype : data type, optional
        "float8_e4m3fn", the default, or "float8_e5m2".
    q_scale, k_scale : float
        Positive. Rows are divided by them before they are rounded, to nearest even and saturated.
    q_out, k_out : arrays, optional
        Written and returned: of `dtype`, where that is given, in the shapes of `q` and `k`. Not JAX
        arrays.

    Returns
    -------
    q_out, k_out : arrays
        Of the kind of `q` and `k`, of `dtype`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError
    UnsupportedError
        A tensor of a compiled program.

    See Also
    --------
    rope_append_paged_kv_cache : with keys that go to a paged cache, and `q_out` of float8.

    Examples
    --------
    >>> import ml_dtypes
    >>> import numpy as np
    >>> table = np.array([[1, 0], [0, 1]], np.float32)  # no turn, and a quarter turn
    >>> x = np.array([[[1, 2]], [[1, 2]]], np.float32)
    >>> q, _ = rope_quantize(x, x, np.array([0, 1]), table, q_scale=0.5)
    >>> q.dtype, q[:, 0].tolist()
    (dtype(float8_e4m3fn), [[2.0, 4.0], [-4.0, 2.0]])
    """
    call = Call(q, "q")
    if call.operators is not None:
        raise UnsupportedError(
            "q",
            "a tensor of a compiled program",
            "a call outside of it (torch.compiler.disable), or apply_rope_with_cos_sin_cache",
        )
    shape = tuple(q.shape)
    if len(shape) != 3:
        raise ShapeError("q", f"shape {shape}", "[nnz, num_qo_heads, head_dim]")
    if cos_sin_cache is not None:
        check_table(cos_sin_cache, shape[2], "head_dim")
    scales = check_float("q_scale", q_scale), check_float("k_scale", k_scale)
    said = normalize_dtype(dtype, "dtype", FLOAT8)
    wanted = FLOAT8 if said is None else (said,)
    outs = []
    for name, x, given in (("q", q, q_out), ("k", k, k_out)):
        a, argument = adapter_for(x, name), f"{name}_out"
        float_dtype(x, name)
        if given is None:
            given = a.empty(x, tuple(x.shape), wanted[0])
        else:
            a = adapter_for(given, argument)
            float_dtype(given, argument, wanted)
        outs.append((a, given, a.export(given, True, argument)))
    rotate_exported(
        call.export(q, "q"),
        call.export(k, "k"),
        outs[0][2],
        outs[1][2],
        call.values(pos_ids, "pos_ids"),
        None,
        None,
        0,
        not is_neox,
        1.0,
        1e4,
        None,
        None if cos_sin_cache is None else call.export(cos_sin_cache, "cos_sin_cache"),
        call.stream,
        *scales,
    )
    call.done()
    (a, q_rope, _), (b, k_rope, _) = outs
    return a.finish(q_rope, q), b.finish(k_rope, k)
