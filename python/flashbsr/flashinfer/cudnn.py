# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Attention from block tables in the form that FlashInfer gives cuDNN.

What `trtllm_batch_decode_with_kv_cache` says of engines and GPUs holds too; cuDNN is not called.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._check import check_name
from ..arrays import to_values
from ..arrays.types import Array, DType, Scale
from ..errors import FlashbsrError, ShapeError, UnsupportedError
from ._arguments import Workspace, described, refuse
from ._functions import attend_requests, check_most, lengths

__all__ = ["cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache"]

_SPELLING = {
    "kv": "k_cache", "k": "k_cache", "v": "v_cache", "workspace": "workspace_buffer",
    "kv_lens": "actual_seq_lens_kv", "kv_indptr": "actual_seq_lens_kv",
    "qo_indptr": "actual_seq_lens_q", "sm_scale": "scale", "o_dtype": "o_data_type",
}  # fmt: skip


def _check_offsets(name: str, offsets: Array, rows: Any, row: tuple[int, ...], units: str) -> None:
    """Raise unless requests follow one another without gaps, which is what the engine reads."""
    if offsets is None:
        return
    found = to_values(offsets, name).reshape(-1)
    steps = int(np.prod(row)) if units == "elements" else 1
    if not np.array_equal(found[: len(rows)], np.asarray(rows) * steps):
        times = f" times {steps}" if steps > 1 else ""
        expected = f"None, or offsets without gaps: cumulative lengths{times}"
        raise UnsupportedError(name, f"{found[:9].tolist()}", expected)


@described("tables", "cudnn")
def cudnn_batch_decode_with_kv_cache(
    q: Array, k_cache: Array, v_cache: Array, scale: float, workspace_buffer: Workspace, *,
    max_sequence_kv: int, actual_seq_lens_kv: Array = None, block_tables: Array = None,
    is_cuda_graph_compatible: bool = False, batch_offsets_q: Array = None,
    batch_offsets_o: Array = None, batch_offsets_k: Array = None, batch_offsets_v: Array = None,
    out: Array = None,
) -> Array:  # fmt: skip
    """Attention of one token of each request against a paged cache given by a block table.

    Returns
    -------
    array [B, num_qo_heads, head_dim]
    """
    refuse(is_cuda_graph_compatible=is_cuda_graph_compatible)
    if block_tables is None:
        raise FlashbsrError("block_tables", None, "an array")
    kv_lens = lengths(actual_seq_lens_kv, "actual_seq_lens_kv")
    check_most("max_sequence_kv", max_sequence_kv, kv_lens)
    rows = np.arange(len(kv_lens) + 1)
    _check_offsets("batch_offsets_q", batch_offsets_q, rows, tuple(q.shape[1:]), "elements")
    o_row = q.shape[1], v_cache.shape[-1]
    _check_offsets("batch_offsets_o", batch_offsets_o, rows, o_row, "elements")
    refuse("cudnn", batch_offsets_k=batch_offsets_k, batch_offsets_v=batch_offsets_v)
    result: Array = attend_requests(
        q, (k_cache, v_cache), block_tables, kv_lens, None, _SPELLING, (None, None, None),
        causal=False, sm_scale=scale, workspace=workspace_buffer, out=out,
    )  # fmt: skip
    return result


@described("tables", "cudnn")
def cudnn_batch_prefill_with_kv_cache(
    q: Array, k_cache: Array, v_cache: Array, scale: float, workspace_buffer: Workspace, *,
    max_token_per_sequence: int, max_sequence_kv: int, actual_seq_lens_q: Array = None,
    actual_seq_lens_kv: Array = None, block_tables: Array = None, causal: bool, return_lse: bool,
    q_scale: Scale = None, k_scale: Scale = None, v_scale: Scale = None,
    batch_offsets_q: Array = None, batch_offsets_o: Array = None, batch_offsets_k: Array = None,
    batch_offsets_v: Array = None, batch_offsets_stats: Array = None,
    batch_offsets_units: str = "elements", out: Array = None, lse: Array = None,
    is_cuda_graph_compatible: bool = False, backend: str | None = None, o_data_type: DType = None,
    lse_base: str = "2",
) -> tuple[Array, Array]:  # fmt: skip
    """Attention of the new tokens of prompts, paged or ragged.

    Returns
    -------
    out : array [tokens, num_qo_heads, head_dim_vo]
    lse : float32 array [tokens, num_qo_heads], or None
        None unless `return_lse` or `lse`.
    """
    refuse(is_cuda_graph_compatible=is_cuda_graph_compatible)
    check_name("batch_offsets_units", batch_offsets_units, ("elements", "tokens"))
    kv_lens = lengths(actual_seq_lens_kv, "actual_seq_lens_kv")
    q_lens = lengths(actual_seq_lens_q, "actual_seq_lens_q", len(kv_lens))
    check_most("max_token_per_sequence", max_token_per_sequence, q_lens)
    check_most("max_sequence_kv", max_sequence_kv, kv_lens)
    qo_indptr = np.concatenate([[0], np.cumsum(q_lens)])
    o_row = q.shape[1], v_cache.shape[-1]
    for name, offsets, row in (
        ("batch_offsets_q", batch_offsets_q, tuple(q.shape[1:])),
        ("batch_offsets_o", batch_offsets_o, o_row),
        ("batch_offsets_stats", batch_offsets_stats, (q.shape[1],)),
    ):
        _check_offsets(name, offsets, qo_indptr, row, batch_offsets_units)
    if block_tables is not None:
        refuse("cudnn", batch_offsets_k=batch_offsets_k, batch_offsets_v=batch_offsets_v)
        layout = "HND"
    else:
        layout = "NHD"
        kv_indptr = np.concatenate([[0], np.cumsum(kv_lens)])
        for name, offsets, x in (
            ("batch_offsets_k", batch_offsets_k, k_cache),
            ("batch_offsets_v", batch_offsets_v, v_cache),
        ):
            if len(x.shape) != 3:
                kind = "[kv_tokens, num_kv_heads, head_dim] without block_tables"
                raise ShapeError(name[-1] + "_cache", f"shape {tuple(x.shape)}", kind)
            _check_offsets(name, offsets, kv_indptr, tuple(x.shape[1:]), batch_offsets_units)
    wanted = return_lse or lse is not None
    found = attend_requests(
        q, (k_cache, v_cache), block_tables, kv_lens, qo_indptr, _SPELLING,
        (q_scale, k_scale, v_scale), causal=causal, sm_scale=scale, kv_layout=layout,
        workspace=workspace_buffer, backend=backend or "auto", o_dtype=o_data_type,
        lse_base=lse_base, out=out, lse=lse, return_lse=wanted,
    )  # fmt: skip
    return found if wanted else (found, None)
