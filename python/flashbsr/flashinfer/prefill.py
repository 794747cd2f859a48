# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Prefill and append: any number of query tokens per request, over pages or ragged K and V."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, ClassVar

import numpy as np

from .._check import check_backend
from ..arrays import to_indices
from ..arrays.types import Array, DType, Scale
from ..errors import FlashbsrError, ShapeError, UnsupportedError
from ..layout.joined import paged_layout
from ..layout.layouts import Layout, Ragged
from ..variant.items import items, sees_items
from ._arguments import FLOAT16, Number, Workspace, described, refuse_given
from ._base import Wrapper
from ._functions import attend_one, attend_requests, check_most, lengths
from ._values import pages_to_tokens
from .cudnn import cudnn_batch_prefill_with_kv_cache
from .decode import SPELLING, PagedWrapper, one_sink

__all__ = ["BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper",
           "cudnn_batch_prefill_with_kv_cache", "single_prefill_with_kv_cache",
           "single_prefill_with_kv_cache_return_lse",
           "trtllm_batch_context_with_kv_cache"]  # fmt: skip


class _Prefill(Wrapper):
    """What both wrappers share: masks, items, what replaces causality."""

    def _check(self, given: dict[str, Any]) -> None:
        masked = not (given["custom_mask"] is given["packed_custom_mask"] is None)
        if masked or given.get("tree_parents") is not None:
            given["causal"] = False
        self._variant.arrays = {}
        length = given["token_pos_in_items_len"]
        if given["prefix_len_ptr"] is given["token_pos_in_items_ptr"] is None and not length:
            return
        if masked or self._graph is not None:
            expected = "None with a mask, and in graph mode, where arrays are those of the capture"
            raise UnsupportedError("prefix_len_ptr", "an array", expected)
        arrays = given["prefix_len_ptr"], given["token_pos_in_items_ptr"]
        found = items(*arrays, length, len(given["qo_indptr"]) - 1)
        if all(0 not in x.shape for x in found.values()):  # nobody asks an array without elements
            self._variant.arrays = found
        given["causal"] = True

    def _complete(self, given: dict[str, Any], spec: dict[str, Any], task: dict[str, Any]) -> None:
        self._variant.complete(spec)
        if self._variant.arrays:
            spec["variant"] = sees_items()
        if self._graph is not None:
            ends = (given["qo_indptr"], given.get("kv_indptr"))
            rows = (0 if x is None else int(to_indices(x)[-1:].sum()) for x in ends)
            task |= self._graph.capacity(*rows)


class BatchPrefillWithPagedKVCacheWrapper(_Prefill, PagedWrapper):
    """Attention of several tokens per request against a paged KV cache.

    Prefill, chunked prefill, speculative verification: any number of query tokens, 0 and 1 too.
    """

    _context: ClassVar[tuple[str, ...]] = ("paged",)
    _table = itemgetter(
        "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "seq_lens",
        "block_tables", "page_size",
    )  # fmt: skip
    _FORWARD = (
        "q", "paged_kv_cache", "causal", "pos_encoding_mode", "use_fp16_qk_reduction", "k_scale",
        "v_scale", "window_left", "logits_soft_cap", "sm_scale", "rope_scale", "rope_theta",
    )  # fmt: skip
    _spelling: ClassVar[dict[str, str]] = {
        "kv_indptr": "paged_kv_indptr", "kv_indices": "paged_kv_indices",
        "last_page_len": "paged_kv_last_page_len", "kv_lens": "seq_lens", "kv": "paged_kv_cache",
    }  # fmt: skip

    def __init__(
        self, float_workspace_buffer: Workspace = None, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf: Array = None,
        paged_kv_indptr_buf: Array = None, paged_kv_indices_buf: Array = None,
        paged_kv_last_page_len_buf: Array = None, custom_mask_buf: Array = None,
        mask_indptr_buf: Array = None, backend: str = "auto", jit_args: Any = None,
        jit_kwargs: Any = None, *, lse_base: str = "2", num_threads: int | None = None,
        max_q_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self._set_up(locals())

    def plan(
        self, qo_indptr: Array, paged_kv_indptr: Array, paged_kv_indices: Array,
        paged_kv_last_page_len: Array, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, head_dim_vo: int | None = None, custom_mask: Array = None,
        packed_custom_mask: Array = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, sm_scale: Number = None, window_left: int = -1,
        logits_soft_cap: Number = None, rope_scale: Number = None, rope_theta: Number = None,
        q_data_type: DType = FLOAT16, kv_data_type: DType = None, o_data_type: DType = None,
        non_blocking: bool = True, prefix_len_ptr: Array = None,
        token_pos_in_items_ptr: Array = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: Array = None, seq_lens: Array = None, seq_lens_q: Array = None,
        block_tables: Array = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, fixed_split_size: int | None = None,
        disable_split_kv: bool = False, *, tree_parents: Array = None, share_prefixes: str = "auto",
        fp8_accumulation: str = "default", stream: Any = None,
    ) -> None:  # fmt: skip
        """Schedule the batch. Checks indptrs, page table and mask completely."""
        self._plan(locals())

    def _complete(self, given: dict[str, Any], spec: dict[str, Any], task: dict[str, Any]) -> None:
        super()._complete(given, spec, task)
        task["fixed_split_size"] = pages_to_tokens(task["fixed_split_size"], given["page_size"])

    def _layout(self, given: dict[str, Any]) -> Layout:
        return paged_layout(*self._table(given))


class BatchPrefillWithRaggedKVCacheWrapper(_Prefill):
    """Attention of ragged queries against ragged keys and values: no cache, or an encoder."""

    _context = ("ragged",)
    _ARRAYS = ("q", "k", "v")
    _FORWARD = (
        "q", "k", "v", "causal", "pos_encoding_mode", "use_fp16_qk_reduction", "window_left",
        "logits_soft_cap", "sm_scale", "rope_scale", "rope_theta",
    )  # fmt: skip

    def __init__(
        self, float_workspace_buffer: Workspace = None, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf: Array = None, kv_indptr_buf: Array = None,
        custom_mask_buf: Array = None, mask_indptr_buf: Array = None, backend: str = "auto",
        jit_args: Any = None, jit_kwargs: Any = None, *, lse_base: str = "2",
        num_threads: int | None = None, max_q_tokens: int | None = None,
        max_kv_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self._set_up(locals())

    def plan(
        self, qo_indptr: Array, kv_indptr: Array, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int, head_dim_vo: int | None = None, custom_mask: Array = None,
        packed_custom_mask: Array = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, window_left: int = -1, logits_soft_cap: Number = None,
        sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None,
        q_data_type: DType = FLOAT16, kv_data_type: DType = None, o_data_type: DType = None,
        non_blocking: bool = True, prefix_len_ptr: Array = None,
        token_pos_in_items_ptr: Array = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: Array = None, fixed_split_size: int | None = None,
        disable_split_kv: bool = False, seq_lens: Array = None, seq_lens_q: Array = None,
        max_token_per_sequence: int | None = None, max_sequence_kv: int | None = None,
        v_indptr: Array = None, o_indptr: Array = None, *, fp8_accumulation: str = "default",
        stream: Any = None,
    ) -> None:  # fmt: skip
        """Schedule the batch. Checks indptrs and mask completely.

        The order of `sm_scale` among the arguments differs from the paged wrapper's, as it does in
        FlashInfer.

        Raises
        ------
        ShapeError, DTypeError, IndexRangeError, CapacityError, UnsupportedError, FlashbsrError
            The argument, what it was, what is allowed. There is no plan afterwards.
        PlanError
            Other options than those of a captured run; nothing has changed.
        """
        self._plan(locals())

    def _check(self, given: dict[str, Any]) -> None:
        super()._check(given)
        for name, same in (("v_indptr", "kv_indptr"), ("o_indptr", "qo_indptr")):
            if given[name] is not None and (
                to_indices(given[name], name).tolist() != to_indices(given[same], same).tolist()
            ):
                raise FlashbsrError(name, "other offsets", f"those of {same}, or None")

    def _layout(self, given: dict[str, Any]) -> Layout:
        return Ragged(given["qo_indptr"], given["kv_indptr"])

    def run(
        self, q: Array, k: Array, v: Array, *args: Any, q_scale: Scale = None,
        k_scale: Scale = None, v_scale: Scale = None, o_scale: Number = None, out: Array = None,
        lse: Array = None, return_lse: bool = False, enable_pdl: bool | None = None,
        kv_cache_sf: Array = None, sinks: Array = None, alibi_slopes: Array = None,
        kv_ready: bool = False, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Compute the planned batch."""
        if o_scale is not None:
            refuse_given(locals(), "run", *self._context)
        if args:
            q_scale, k_scale, v_scale, sinks = self._extra(args, q_scale, k_scale, v_scale, sinks)
        return self._run(
            q, (k, v), out, lse, return_lse, q_scale, k_scale, v_scale, sinks, alibi_slopes,
            enable_pdl, kv_ready, stream, kv_cache_sf,
        )  # fmt: skip


@described("single")
def single_prefill_with_kv_cache(
    q: Array, k: Array, v: Array, scale_q: Scale = None, scale_k: Scale = None,
    scale_v: Scale = None, o_dtype: DType = None, custom_mask: Array = None,
    packed_custom_mask: Array = None, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,  # noqa: ARG001
    sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
    rope_scale: float | None = None, rope_theta: float | None = None, backend: str = "auto",
    return_lse: bool = False, kv_cache_sf: Any = None, k_scale: Scale = None,
    v_scale: Scale = None, *, sinks: Array = None, alibi_slopes: Array = None,
    lse_base: str = "2", fp8_accumulation: str = "default",
) -> Any:  # fmt: skip
    """Attention of several query tokens, the last of their sequence.

    Returns
    -------
    out [qo_len, num_qo_heads, head_dim_vo], or (out, lse [qo_len, num_qo_heads])
        Of the caller's kind. A row that sees no key gives 0, and -inf.
    """
    check_backend(backend)
    scales = scale_q, _either("k_scale", k_scale, scale_k), _either("v_scale", v_scale, scale_v)
    if len(getattr(q, "shape", (0, 0, 0))) != 3:
        raise ShapeError("q", f"shape {tuple(q.shape)}", "[qo_len, num_qo_heads, head_dim]")
    causal = causal and custom_mask is None and packed_custom_mask is None
    return attend_one(
        q, k, v, {"custom_mask": custom_mask, "packed_custom_mask": packed_custom_mask}, scales,
        (causal, window_left, sm_scale, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
        (kv_layout, lse_base, backend, fp8_accumulation, o_dtype), return_lse, sinks, alibi_slopes,
        kv_cache_sf,
    )  # fmt: skip


@described("single")
def single_prefill_with_kv_cache_return_lse(*args: Any, **kwargs: Any) -> Any:
    """`single_prefill_with_kv_cache` with ``return_lse=True``."""
    return single_prefill_with_kv_cache(*args, **(kwargs | {"return_lse": True}))


def _either(name: str, value: Scale, other: Scale) -> Scale:
    if value is not None and other is not None:
        raise FlashbsrError(name, type(value).__name__, "None next to its other name")
    return other if value is None else value


@described("tables")
def trtllm_batch_context_with_kv_cache(
    query: Array, kv_cache: Any, workspace_buffer: Workspace, block_tables: Array, seq_lens: Array,
    max_q_len: int, max_kv_len: int, bmm1_scale: Scale, bmm2_scale: Scale, batch_size: int,
    cum_seq_lens_q: Array, cum_seq_lens_kv: Array, window_left: int = -1, out: Array = None,
    out_dtype: DType = None, o_sf_scale: Any = None, o_sf_vec_size: Any = None,
    kv_layout: str = "HND", enable_pdl: bool | None = None, sinks: Any = None,
    kv_cache_sf: Any = None, skip_softmax_threshold_scale_factor: Any = None,
    uses_shared_paged_kv_idx: bool = True, causal: bool = True, lse: Array = None,
    return_lse: bool = False, multi_ctas_kv_counter_buffer: Any = None,
    use_fp16_softmax: Any = None, uses_spcompress: Any = None, *, backend: str = "auto",
    lse_base: str = "2", fp8_accumulation: str = "default",
) -> Any:  # fmt: skip
    """Attention of the new tokens of prompts against a paged cache given by a block table.

    Returns
    -------
    out, or (out, lse)
    """
    refuse_given(locals(), "tables")
    kv_lens = lengths(seq_lens, "seq_lens", batch_size)
    qo_indptr = to_indices(cum_seq_lens_q, "cum_seq_lens_q")
    check_most("max_kv_len", max_kv_len, kv_lens)
    check_most("max_q_len", max_q_len, np.diff(qo_indptr))
    return attend_requests(
        query, kv_cache, block_tables, kv_lens, qo_indptr,
        SPELLING | {"qo_indptr": "cum_seq_lens_q"}, (bmm1_scale, None, bmm2_scale), causal=causal,
        kv_layout=kv_layout, window_left=window_left, workspace=workspace_buffer, backend=backend,
        o_dtype=out_dtype, lse_base=lse_base, fp8_accumulation=fp8_accumulation, out=out, lse=lse,
        return_lse=return_lse, sinks=one_sink(sinks), enable_pdl=enable_pdl,
        kv_cache_sf=kv_cache_sf,
    )  # fmt: skip
