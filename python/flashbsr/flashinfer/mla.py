# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over a compressed cache (DeepSeek-V2, 2024), absorbed."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from .._check import check_int
from ..arrays import adapter_for, device_of, to_values
from ..arrays.types import Array, DType, Scale
from ..engine.call import flat_rows
from ..engine.kept import planned
from ..errors import FlashbsrError, ShapeError, UnsupportedError
from ..layout.joined import paged_layout
from ..layout.layouts import BlockTable, Layout
from ._arguments import Workspace, described, refuse_given
from ._base import Wrapper
from ._functions import check_most, lengths
from .decode import SPELLING, one_sink
from .page import append_paged_mla_kv_cache

__all__ = ["BatchMLAPagedAttentionWrapper", "append_paged_mla_kv_cache",
           "trtllm_batch_decode_with_kv_cache_mla"]  # fmt: skip

_TABLE = "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"


class BatchMLAPagedAttentionWrapper(Wrapper):
    """Attention of absorbed queries over a paged cache of latents and rotated keys.

    One KV head, whose values are the latents: decode, verification and prefill alike.
    """

    _context = ("mla",)
    _ARRAYS = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    _spelling: ClassVar[dict[str, str]] = {
        "kv_lens": "kv_len_arr", "k": "ckv_cache", "v": "kpe_cache", "q": "q_nope",
    }  # fmt: skip

    def __init__(
        self, float_workspace_buffer: Workspace = None, use_cuda_graph: bool = False,
        qo_indptr: Array = None, kv_indptr: Array = None, kv_indices: Array = None,
        kv_len_arr: Array = None, backend: str = "auto", *, num_threads: int | None = None,
        max_q_tokens: int | None = None,
    ) -> None:  # fmt: skip
        given = locals()
        buffers = {f"{name}_buf": given[name] for name in ("qo_indptr", "kv_indptr")}
        self._set_up(given | buffers | {"paged_kv_indices_buf": kv_indices})
        del self._task_options["lse_base"]  # of each plan

    def plan(
        self, qo_indptr: Array, kv_indptr: Array, kv_indices: Array, kv_len_arr: Array,
        num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool,
        sm_scale: float, q_data_type: DType, kv_data_type: DType = None,
        use_profiler: bool = False, *, lse_base: str = "2", stream: Any = None,
    ) -> None:  # fmt: skip
        """Schedule the batch. Checks indptrs and page table completely."""
        given = locals()
        for name in _TABLE:  # a run with the other base plans again, by what they are now
            if device_of(given[name], name) is None:
                given[name] = to_values(given[name], name).copy()
        self._plan(given)

    def _complete(self, given: dict[str, Any], spec: dict[str, Any], task: dict[str, Any]) -> None:  # noqa: ARG002
        tail = check_int("head_dim_kpe", given["head_dim_kpe"], 0)
        task |= {"num_kv_heads": 1, "head_dim_qk": task["head_dim_vo"] + tail, "latent": True}
        if self._graph is not None:
            rows = int(to_values(given["qo_indptr"], "qo_indptr")[-1])
            task |= self._graph.capacity(rows, len(given["kv_indices"]))

    def _layout(self, given: dict[str, Any]) -> Layout:
        of = given.__getitem__
        table = of("qo_indptr"), of("kv_indptr"), of("kv_indices"), None, of("kv_len_arr")
        return paged_layout(*table, None, of("page_size"))

    def run(
        self, q_nope: Array, q_pe: Array, ckv_cache: Array, kpe_cache: Array, out: Array = None,
        lse: Array = None, return_lse: bool = False, profiler_buffer: Any = None,
        kv_len: Any = None, page_table: Any = None, return_lse_base_on_e: bool = False,
        o_scale: Any = None, *, ckv_scale: Any = None, ckv_scale_arr: Any = None,
        kpe_scale: Any = None, enable_pdl: bool | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Compute the planned batch for one layer."""
        refuse_given(locals(), "run", *self._context)
        task = self._ready().task
        if (return_lse or lse is not None) and (task.lse_base == "e") != return_lse_base_on_e:
            assert self._given is not None
            self._plan(self._given | {"lse_base": "e" if return_lse_base_on_e else "2"})
        tail = task.head_dim_qk - tuple(q_nope.shape)[-1]
        q = adapter_for(q_nope, "q_nope").join([q_nope, q_pe], -1) if tail else q_nope
        kv = (ckv_cache, kpe_cache) if tail else ckv_cache
        if kpe_scale is not None and kpe_scale != (1.0 if ckv_scale is None else ckv_scale):
            raise UnsupportedError("kpe_scale", kpe_scale, "ckv_scale: one number for both")
        return self._run(
            q, kv, out, lse, return_lse, None, ckv_scale, ckv_scale, None, enable_pdl=enable_pdl,
            stream=stream, o_scale=o_scale,
        )  # fmt: skip


def _rows_of(out: Array, shape: tuple[int, ...]) -> Array:
    """View an output with requests and their tokens as one axis; what is no view is refused."""
    rows = shape[0] * shape[1], *shape[2:]
    adapter = adapter_for(out, "out")
    if tuple(out.shape) == rows:
        return out
    if tuple(out.shape) != shape:
        raise ShapeError("out", f"shape {tuple(out.shape)}", f"{shape}")
    flat = flat_rows(adapter, out, "out")
    if flat is None:
        raise ShapeError(
            "out", "strides that keep requests and tokens apart", "those of a contiguous array"
        )
    return flat


@described("mla", "tables")
def trtllm_batch_decode_with_kv_cache_mla(
    query: Array, kv_cache: Array, workspace_buffer: Workspace,
    qk_nope_head_dim: int,
    kv_lora_rank: int, qk_rope_head_dim: int, block_tables: Array, seq_lens: Array,
    max_seq_len: int, sparse_mla_top_k: int = 0, out: Array = None, bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0, sinks: Any = None, skip_softmax_threshold_scale_factor: Any = None,
    enable_pdl: bool | None = None, backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True, lse: Array = None, return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Array = None, max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Any = None,
    sparse_mla_top_k_lens: Any = None,
) -> Any:  # fmt: skip
    """Attention of the last tokens of each request over a compressed cache in pages.

    `query` is [B, q_len, num_heads, kv_lora_rank + qk_rope_head_dim], `kv_cache` of the same dims,
    [pages, page_size, dims] or [pages, 1, page_size, dims]. Query tokens of a request see each
    other causally.

    Returns
    -------
    out [B, q_len, num_heads, kv_lora_rank], or (out, lse [B * q_len, num_heads])
        The LSE is in base 2.
    """
    refuse_given(locals(), "mla", "tables")
    if cum_seq_lens_q is not None or max_q_len is not None:
        raise UnsupportedError(
            "cum_seq_lens_q", "an array", "None: BatchMLAPagedAttentionWrapper takes ragged queries"
        )
    if len(query.shape) != 4:
        raise ShapeError("query", f"shape {tuple(query.shape)}", "[B, q_len, num_heads, dims]")
    batch, q_len, heads, dim = tuple(query.shape)
    if dim != kv_lora_rank + qk_rope_head_dim:
        raise ShapeError("query", f"{dim} dims", f"{kv_lora_rank} + {qk_rope_head_dim}")
    kv_lens = lengths(seq_lens, "seq_lens", batch)
    check_most("max_seq_len", max_seq_len, kv_lens)
    tables = to_values(block_tables, "block_tables")
    page_size = tuple(kv_cache.shape)[-2]
    qo_indptr = None if q_len == 1 else np.arange(batch + 1) * q_len
    if math.prod(getattr(bmm1_scale, "shape", ())) != 1:
        raise ShapeError("bmm1_scale", f"shape {tuple(bmm1_scale.shape)}", "one number")
    spec = {"causal": q_len > 1, "sm_scale": float(bmm1_scale)}
    task = {"num_qo_heads": heads, "num_kv_heads": 1, "head_dim_qk": dim, "latent": True,
            "head_dim_vo": kv_lora_rank, "kv_layout": "HND", "lse_base": "2",
            "backend": backend}  # fmt: skip
    rows = query.reshape(batch * q_len, heads, dim)
    try:
        attention = planned(
            query, (*spec.values(), *task.values()), lambda: (spec, task),
            (q_len, tables, kv_lens, page_size),
            lambda: BlockTable(qo_indptr, tables, kv_lens, page_size=page_size), {},
            workspace_buffer,
        )  # fmt: skip
        given = None if out is None else _rows_of(out, (batch, q_len, heads, kv_lora_rank))
        found = attention.run(
            rows, kv_cache, out=given, lse=lse, return_lse=return_lse, v_scale=bmm2_scale,
            sinks=one_sink(sinks), enable_pdl=enable_pdl and None,
        )  # fmt: skip
    except FlashbsrError as error:
        raise error.respell(SPELLING) from None
    result, found_lse = found if isinstance(found, tuple) else (found, None)
    result = result.reshape(batch, q_len, heads, kv_lora_rank) if out is None else out
    return (result, found_lse) if return_lse else result
