# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The one way of the functions, whose engines and plans are kept per thread (`engine.kept`).

Lengths and tables on a GPU are copied to the host in every call, which waits for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .._check import check_backend, check_int, check_name
from ..arrays import adapter_for, as_bytes, per_head, to_numpy, to_values
from ..arrays.types import Array, DType, Scale
from ..engine.kept import planned
from ..errors import DTypeError, FlashbsrError, ShapeError
from ..layout.layouts import BlockTable, Layout, Ragged
from ._arguments import Workspace
from ._values import as_tuple
from .quantized import block_scales, dtype_of, number

__all__ = ["attend_one", "attend_requests", "check_most", "lengths"]

Ints = npt.NDArray[Any]
_SPEC = ("causal", "window_left", "sm_scale", "logits_soft_cap", "pos_encoding_mode",
         "rope_scale", "rope_theta")  # fmt: skip
_TASK = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "kv_layout", "lse_base",
         "backend", "fp8_accumulation", "o_dtype", "kv_dtype")  # fmt: skip


def attend_one(
    q: Array, k: Array, v: Array, masks: dict[str, Array], scales: tuple[Scale, Scale, Scale],
    spec: tuple[Any, ...], task: tuple[Any, ...], return_lse: bool, sinks: Array,
    alibi_slopes: Array, kv_cache_sf: Any = None,
) -> Any:  # fmt: skip
    """Attention of one request with contiguous keys and values; q ``[qo_len, heads, dim]``."""
    check_name("kv_layout", task[0], ("NHD", "HND"))
    for name, x in (("q", q), ("k", k), ("v", v)):
        adapter_for(x, name)
    (q_len, heads, dim), k_shape, v_shape = q.shape, tuple(k.shape), tuple(v.shape)
    axes = "kv_len, num_kv_heads" if task[0] == "NHD" else "num_kv_heads, kv_len"
    for name, shape in (("k", k_shape), ("v", v_shape)):
        if len(shape) != 3:
            raise ShapeError(name, f"shape {shape}", f"[{axes}, head_dim]")
    if k_shape[:2] != v_shape[:2]:
        raise ShapeError("v", f"shape {v_shape}", f"tokens and heads of k, which has {k_shape}")
    kv_len, kv_heads = k_shape[:2] if task[0] == "NHD" else k_shape[1::-1]
    kv_dtype = dtype_of((k, v))
    k_dim, v_dim = (x[2] * (2 if kv_dtype else 1) for x in (k_shape, v_shape))
    if dim != k_dim:
        raise ShapeError("k", f"head_dim {k_dim}", f"that of q, {dim}")
    if masks:
        masks = {name: x for name, x in masks.items() if x is not None}
    if "custom_mask" in masks:
        mask = to_numpy(masks["custom_mask"], "custom_mask")
        if mask.size != q_len * kv_len:
            raise ShapeError("custom_mask", f"shape {mask.shape}", f"{q_len} x {kv_len} elements")
        masks["custom_mask"] = mask.reshape(-1)
    q_scale, k_scale, v_scale = scales
    if not (q_scale is k_scale is v_scale is None):
        q_scale = per_head(q_scale, heads)
        k_scale, v_scale = per_head(k_scale, kv_heads), per_head(v_scale, kv_heads)
    k_scale, v_scale = block_scales(kv_cache_sf, (k, v), kv_dtype, k_scale, v_scale)
    task = (heads, kv_heads, dim, v_dim, *task, kv_dtype)
    attention = planned(
        q, (*spec, *task),
        lambda: (dict(zip(_SPEC, spec, strict=True)), dict(zip(_TASK, task, strict=True))),
        (q_len, kv_len), lambda: Ragged(np.array((0, q_len)), np.array((0, kv_len))), masks,
    )  # fmt: skip
    return attention.run(
        q, (k, v), return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
        sinks=sinks, alibi_slopes=alibi_slopes,
    )  # fmt: skip


def lengths(x: Array, name: str, batch: int | None = None) -> Ints:
    """Host copy of sequence lengths, of any integer type and with axes of length 1."""
    values = to_values(x, name)
    if values.dtype.kind not in "iu":
        raise DTypeError(name, values.dtype, "int32, uint32 or int64")
    values = values.reshape(-1).astype(np.int64)
    if batch is not None and len(values) != batch:
        raise ShapeError(name, f"{len(values)} lengths", f"{batch}: one per request")
    return values


def check_most(name: str, most: Any, values: Ints) -> None:
    """Raise if a length is larger than the caller says."""
    longest = int(values.max(initial=0))
    if check_int(name, most, 0) < longest:
        raise FlashbsrError(name, most, f"at least {longest}, the longest")


def _shape_of_cache(cache: Any, kv_layout: str) -> tuple[int, int, int]:
    """Page size, KV heads and head_dim_vo."""
    check_name("kv_layout", kv_layout, ("NHD", "HND"))
    stacked = not isinstance(cache, tuple)
    shape = tuple(cache.shape if stacked else cache[-1].shape)
    if len(shape) != (5 if stacked else 4):
        axes = "page_size, num_kv_heads" if kv_layout == "NHD" else "num_kv_heads, page_size"
        expected = f"[pages, {'2, ' if stacked else ''}{axes}, head_dim]"
        raise ShapeError("kv", f"shape {shape}", expected)
    page_size, heads = shape[-3:-1] if kv_layout == "NHD" else shape[-2:-4:-1]
    return page_size, heads, shape[-1]


def attend_requests(
    q: Array, kv: Any, tables: Array | None, kv_lens: Ints, qo_indptr: Ints | None,
    spelling: dict[str, str], scales: tuple[Scale, Scale, Scale], *, causal: bool,
    sm_scale: float = 1.0, kv_layout: str = "HND", window_left: int = -1,
    workspace: Workspace = None, backend: str = "auto", o_dtype: DType = None,
    lse_base: str = "2", fp8_accumulation: str = "default", out: Array = None,
    lse: Array = None, return_lse: bool = False, sinks: Array = None,
    enable_pdl: bool | None = None, kv_cache_sf: Any = None,
) -> Any:  # fmt: skip
    """Attention over a block table, or ragged KV without; errors by the caller's `spelling`."""
    try:
        kv = as_tuple(kv)
        for name, x in (("q", q), *(("kv", x) for x in (kv if isinstance(kv, tuple) else (kv,)))):
            adapter_for(x, name)
        check_backend(backend)
        if len(q.shape) != 3:
            raise ShapeError("q", f"shape {tuple(q.shape)}", "[tokens, num_qo_heads, head_dim]")
        batch: tuple[Any, ...]
        page_size = 0
        if tables is None:
            heads, head_dim_vo = tuple(kv[1].shape)[-2:]
            batch = qo_indptr, np.concatenate([[0], np.cumsum(kv_lens)])
        else:
            page_size, heads, head_dim_vo = _shape_of_cache(kv, kv_layout)
            batch = qo_indptr, to_values(tables, "block_tables"), kv_lens, page_size
        if o_dtype is None and out is not None:
            o_dtype = adapter_for(out, "out").dtype_name(out, "out")
        spec = {"causal": causal, "window_left": window_left, "sm_scale": sm_scale}
        kv_dtype = dtype_of(kv)
        dims = q.shape[1], heads, q.shape[2], head_dim_vo * (2 if kv_dtype else 1)
        task = (*dims, kv_layout, lse_base, backend, fp8_accumulation, o_dtype, kv_dtype)

        def layout() -> Layout:
            if page_size:
                return BlockTable(*batch[:3], page_size=page_size)
            return Ragged(*batch[:2])

        attention = planned(
            q, (*spec.values(), *task), lambda: (spec, dict(zip(_TASK, task, strict=True))), batch,
            layout, {}, workspace, lambda x: as_bytes(x, "workspace"),
        )  # fmt: skip
        q_scale, k_scale, v_scale = map(number, scales)
        k_scale, v_scale = block_scales(kv_cache_sf, kv, kv_dtype, k_scale, v_scale)
        found = attention.run(
            q, kv, out=out, lse=lse, return_lse=return_lse, q_scale=q_scale, k_scale=k_scale,
            v_scale=v_scale, sinks=sinks, enable_pdl=enable_pdl and None,
        )  # fmt: skip
    except FlashbsrError as error:
        raise error.respell(spelling) from None
    return found if return_lse or lse is None else found[0]
