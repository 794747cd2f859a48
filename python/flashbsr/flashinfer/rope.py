# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings: those of `flashbsr`, whose names, order and defaults are FlashInfer's.

And those that write float8, over `flashbsr.rope_quantize`. FlashInfer multiplies by its
``quant_scale``: what attention is given is 1 / quant_scale.
"""

from __future__ import annotations

from typing import Any

from .._check import check_float, check_name
from ..arrays import adapter_for, float_dtype
from ..arrays.dtypes import FLOAT8, normalize_dtype
from ..arrays.types import Array, DType
from ..errors import DTypeError, FlashbsrError, ShapeError, renamed
from ..ops import rope
from ..ops.latent import append_latents
from ..ops.page import append_paged_kv_cache
from ..ops.rope import *  # noqa: F403
from ..ops.rope_quantize import rope_quantize

__all__ = [*rope.__all__, "mla_rope_quantize_fp8", "rope_quantize_fp8",
           "rope_quantize_fp8_append_paged_kv_cache"]  # fmt: skip


def _inverse(name: str, scale: Any) -> float:
    number = check_float(name, scale)
    if number <= 0:
        raise FlashbsrError(name, number, "a positive number, which rows are multiplied by")
    return 1 / number


def _element(dtype: DType, **outs: Array) -> str:
    """Name the float8 type: as said, or that of the first output that is given."""
    said = normalize_dtype(dtype, "quantize_dtype", FLOAT8)
    given = (float_dtype(x, name, FLOAT8) for name, x in outs.items() if x is not None)
    return said or next(given, FLOAT8[0])


def rope_quantize_fp8(
    q_rope: Array, k_rope: Array, q_nope: Array, k_nope: Array, cos_sin_cache: Array,
    pos_ids: Array, is_neox: bool = True, quantize_dtype: DType = None,
    quant_scale_q: float = 1.0, quant_scale_kv: float = 1.0, q_rope_out: Array = None,
    k_rope_out: Array = None, q_nope_out: Array = None, k_nope_out: Array = None,
    enable_pdl: bool = False,  # noqa: ARG001
    backend: str = "cuda",
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Rotate the parts of queries and keys that have positions, and round all parts to float8.

    One launch for the rotated parts, one for the others where they are.

    Parameters
    ----------
    q_rope, q_nope : array [nnz, num_qo_heads, dim]
        float16 or bfloat16, and float32, which FlashInfer does not take. Without a part that is not
        rotated both of `q_nope` and `k_nope` are None.
    k_rope, k_nope : array [nnz, num_kv_heads, dim] or [nnz, dim]
        Likewise.
    cos_sin_cache : float32 array [max_position, dim of q_rope]
        Cosines, then sines.
    pos_ids : int32 or int64 array [nnz]
        Rows of the table.
    is_neox : bool
        Pairs ``(i, i + dim / 2)``; False: ``(2 i, 2 i + 1)``.
    quantize_dtype : data type, optional
        float8_e4m3fn or float8_e5m2. Default: that of the outputs given, otherwise the first.
    quant_scale_q, quant_scale_kv : float
        Positive. Rows are multiplied by them before they are rounded, once, and saturated.
    q_rope_out, k_rope_out, q_nope_out, k_nope_out : arrays, optional
        Written and returned, in the shapes of the inputs.
    enable_pdl, backend : bool, {"cuda", "cutile"}
        Without effect: there is one kernel.

    Returns
    -------
    q_rope, k_rope, q_nope, k_nope : arrays
        In float8, as the inputs; those of parts that are None have no dims.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, UnsupportedError, FlashbsrError
    """
    check_name("backend", backend, ("cuda", "cutile"))
    dtype = _element(
        quantize_dtype, q_rope_out=q_rope_out, k_rope_out=k_rope_out, q_nope_out=q_nope_out,
        k_nope_out=k_nope_out,
    )  # fmt: skip
    q_scale = _inverse("quant_scale_q", quant_scale_q)
    k_scale = _inverse("quant_scale_kv", quant_scale_kv)
    for name, x in (("q_rope", q_rope), ("k_rope", k_rope), ("cos_sin_cache", cos_sin_cache)):
        adapter_for(x, name)
    if len(q_rope.shape) == 3 and tuple(cos_sin_cache.shape)[1:] != (q_rope.shape[2],):
        expected = f"[max_position, {q_rope.shape[2]}], the dims of q_rope"
        raise ShapeError("cos_sin_cache", f"shape {tuple(cos_sin_cache.shape)}", expected)
    if (q_nope is None) != (k_nope is None):
        name, other = ("k_nope", "q_nope") if k_nope is None else ("q_nope", "k_nope")
        raise ShapeError(name, "None", f"an array beside {other}, or None for both")

    def convert(part: str, q: Array, k: Array, table: Array, outs: tuple[Array, Array]) -> Any:
        names = {x: f"{x[0]}_{part}{x[1:]}" for x in ("q", "k", "q_out", "k_out")}
        flat = len(k.shape) == 2
        k, k_out = (x[:, None] if flat and x is not None else x for x in (k, outs[1]))
        with renamed(names):
            found = rope_quantize(
                q, k, pos_ids, table, is_neox, dtype=dtype, q_scale=q_scale, k_scale=k_scale,
                q_out=outs[0], k_out=k_out,
            )  # fmt: skip
        return found[0], (outs[1] if outs[1] is not None else found[1][:, 0]) if flat else found[1]

    q, k = convert("rope", q_rope, k_rope, cos_sin_cache, (q_rope_out, k_rope_out))
    if q_nope is None:
        return q, k, q[..., :0], k[..., :0]
    return q, k, *convert("nope", q_nope, k_nope, None, (q_nope_out, k_nope_out))


def mla_rope_quantize_fp8(
    q_rope: Array, k_rope: Array, q_nope: Array, k_nope: Array, cos_sin_cache: Array,
    pos_ids: Array, is_neox: bool = True, quantize_dtype: DType = None,
    quant_scale_q: float = 1.0, quant_scale_kv: float = 1.0, q_rope_out: Array = None,
    k_rope_out: Array = None, q_nope_out: Array = None, k_nope_out: Array = None,
    enable_pdl: bool = False,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """`rope_quantize_fp8` under the name for latents, whose keys have no heads.

    Parameters
    ----------
    q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype
        As there.
    quant_scale_q, quant_scale_kv, q_rope_out, k_rope_out, q_nope_out, k_nope_out, enable_pdl
        Likewise.
    """
    return rope_quantize_fp8(**locals())


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: Array, k_rope: Array, q_nope: Array, k_nope: Array, v: Array, cos_sin_cache: Array,
    pos_ids: Array, paged_kv_cache: tuple[Array, Array], kv_indices: Array, kv_indptr: Array,
    batch_indices: Array, positions: Array, is_neox: bool = True, quantize_dtype: DType = None,
    quant_scale_q: float = 1.0, quant_scale_kv: float = 1.0, page_size: int = 16,
    kv_layout: str = "NHD", q_rope_out: Array = None, q_nope_out: Array = None,
    enable_pdl: bool = False,  # noqa: ARG001
) -> tuple[Array, Array]:  # fmt: skip
    """`rope_quantize_fp8`, and keys and values go to a paged cache of float8.

    The launches of that, and one that writes to the cache; keys are in float8 in between.

    Parameters
    ----------
    q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype
        As for `rope_quantize_fp8`.
    quant_scale_q, quant_scale_kv, q_rope_out, q_nope_out, enable_pdl
        Likewise; `quant_scale_kv` is that of the values too.
    v : array [nnz, num_kv_heads, head_dim_vo]
        Values; None with keys of two dimensions, which are latents.
    paged_kv_cache : tuple of float8 arrays
        Written: ``(k, v)``, [pages, page_size, num_kv_heads, head_dim] (HND: swapped), rotated dims
        first; or ``(ckv, kpe)``, [pages, page_size, dim], of `k_nope` and of `k_rope`.
    kv_indices, kv_indptr, batch_indices, positions, kv_layout
        As for `append_paged_kv_cache`; lengths of last pages are not asked for.
    page_size : int
        That of the caches.

    Returns
    -------
    q_rope, q_nope : arrays
        In float8.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, UnsupportedError, FlashbsrError
    """
    dtype = _element(quantize_dtype, q_rope_out=q_rope_out, q_nope_out=q_nope_out)
    check_name("kv_layout", kv_layout, ("NHD", "HND"))
    adapter = adapter_for(k_rope, "k_rope")
    latent = len(k_rope.shape) == 2
    if latent != (v is None):
        wanted = "None with keys of two dimensions, an array with keys of three"
        raise ShapeError("v", "None" if v is None else "an array", wanted)
    if not isinstance(paged_kv_cache, (tuple, list)) or len(paged_kv_cache) != 2:
        raise ShapeError("paged_kv_cache", type(paged_kv_cache).__name__, "a tuple of two arrays")
    rank, axis = (3, 1) if latent else (4, 1 if kv_layout == "NHD" else 2)
    for x in paged_kv_cache:
        found = adapter_for(x, "paged_kv_cache").dtype_name(x, "paged_kv_cache")
        if found != dtype:
            raise DTypeError("paged_kv_cache", found, f"{dtype}, the type of the queries")
        if len(x.shape) != rank:
            raise ShapeError("paged_kv_cache", f"shape {tuple(x.shape)}", f"{rank} dimensions")
        if x.shape[axis] != page_size:
            raise ShapeError("page_size", page_size, f"{x.shape[axis]}, that of the cache")
    adapter_for(kv_indptr, "kv_indptr")
    # Who appends is asked how full last pages are; here nobody knows, and whole ones take all.
    table = kv_indices, kv_indptr, kv_indptr[1:].clip(page_size, page_size)
    keys, outs = None, (None, None)
    if not latent:
        dim, rest = k_rope.shape[2], 0 if k_nope is None else k_nope.shape[2]
        keys = adapter.empty(k_rope, (*tuple(k_rope.shape)[:2], dim + rest), dtype)
        outs = keys[..., :dim], keys[..., dim:] if rest else None
    q, k, q_other, k_other = rope_quantize_fp8(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, dtype, quant_scale_q,
        quant_scale_kv, q_rope_out, outs[0], q_nope_out, outs[1],
    )  # fmt: skip
    if latent:
        append_latents(k_other, k, batch_indices, positions, tuple(paged_kv_cache), *table)
    else:
        append_paged_kv_cache(
            keys, v, batch_indices, positions, paged_kv_cache, *table, kv_layout,
            v_scale=_inverse("quant_scale_kv", quant_scale_kv),
        )  # fmt: skip
    return q, q_other
