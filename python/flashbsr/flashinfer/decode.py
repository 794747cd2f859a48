# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Decode: one new token per request, or a few, against a paged KV cache."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from .._check import check_int
from ..arrays import to_indices
from ..arrays.types import Array, DType, Scale
from ..errors import FlashbsrError, PlanError, ShapeError, UnsupportedError, renamed
from ..layout.joined import page_lens, paged_layout
from ..layout.layouts import Layout
from ._arguments import FLOAT16, Number, Workspace, described, refuse_given
from ._base import UnchangedError, Wrapper
from ._functions import attend_one, attend_requests, check_most, lengths
from ._values import pages_to_tokens
from .cudnn import cudnn_batch_decode_with_kv_cache

__all__ = ["BatchDecodeWithPagedKVCacheWrapper", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
           "cudnn_batch_decode_with_kv_cache", "fast_decode_plan", "single_decode_with_kv_cache",
           "trtllm_batch_decode_with_kv_cache", "xqa_batch_decode_with_kv_cache"]  # fmt: skip


class FewTokensUnsupportedError(UnsupportedError, NotImplementedError):
    """Several tokens per request with ``backend="fa3"``, as FlashInfer's programs catch it."""


class PagedWrapper(Wrapper):
    """A wrapper whose runs take a paged cache, as those of decodes and prompts do."""

    def run(
        self, q: Array, paged_kv_cache: Any, *args: Any, q_scale: Scale = None,
        k_scale: Scale = None, v_scale: Scale = None, out: Array = None, lse: Array = None,
        return_lse: bool = False, enable_pdl: bool | None = None, window_left: int | None = None,
        sinks: Array = None, q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: Number = None, kv_cache_sf: Array = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
        alibi_slopes: Array = None, kv_ready: bool = False, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Compute the planned batch for one layer."""
        if not (skip_softmax_threshold_scale_factor is use_fp16_softmax is uses_spcompress is None):
            refuse_given(locals(), "run", *self._context)
        if window_left is not None:
            self._agrees("window_left", window_left)
        if q_len_per_req is not None:
            self._agrees("q_len_per_req", q_len_per_req)
        if args:
            q_scale, k_scale, v_scale, sinks = self._extra(args, q_scale, k_scale, v_scale, sinks)
        return self._run(
            q, paged_kv_cache, out, lse, return_lse, q_scale, k_scale, v_scale, sinks, alibi_slopes,
            enable_pdl, kv_ready, stream, kv_cache_sf,
        )  # fmt: skip


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of one new token per request (or a few) against a paged KV cache.

    ``plan`` once per step, ``run`` once per layer.
    """

    _context = ("decode",)
    _FORWARD = (
        "q", "paged_kv_cache", "pos_encoding_mode", "q_scale", "k_scale", "v_scale", "window_left",
        "logits_soft_cap", "sm_scale", "rope_scale", "rope_theta",
    )  # fmt: skip
    _spelling: ClassVar[dict[str, str]] = {
        "kv_indptr": "indptr", "kv_indices": "indices", "kv_lens": "seq_lens",
        "kv": "paged_kv_cache", "max_q_tokens": "q_len_per_req",
    }  # fmt: skip

    def __init__(
        self, float_workspace_buffer: Workspace = None, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Array = None, paged_kv_indices_buffer: Array = None,
        paged_kv_last_page_len_buffer: Array = None, backend: str = "auto", jit_args: Any = None, *,
        lse_base: str = "2", num_threads: int | None = None,
    ) -> None:  # fmt: skip
        self._set_up(locals())
        self._use_tensor_cores = bool(use_tensor_cores)

    @property
    def use_tensor_cores(self) -> bool:
        """What the constructor was given. The plan chooses the kernel."""
        return self._use_tensor_cores

    def plan(
        self, indptr: Array, indices: Array, last_page_len: Array, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE",
        window_left: int = -1, logits_soft_cap: Number = None, q_data_type: DType = FLOAT16,
        kv_data_type: DType = None, o_data_type: DType = None, data_type: DType = None,
        sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None,
        non_blocking: bool = True, block_tables: Array = None, seq_lens: Array = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False, q_len_per_req: int = 1,
        *, window_right: int = 0, share_prefixes: str = "auto", fp8_accumulation: str = "default",
        stream: Any = None,
    ) -> None:  # fmt: skip
        """Schedule the batch. Checks the page table completely."""
        self._plan(locals())

    def _check(self, given: dict[str, Any]) -> None:
        count = given["q_len_per_req"]
        if count == 1 and self._graph is None:
            return
        if check_int("q_len_per_req", count, 1) > 1:
            if not self._use_tensor_cores:
                raise FlashbsrError(
                    "q_len_per_req", count, "1 without use_tensor_cores=True in the constructor"
                )
            if self._backend == "fa3":
                raise FewTokensUnsupportedError(
                    "q_len_per_req", count, "1 with backend='fa3': 'fa2' or 'auto' has several"
                )
        planned = (self._given or given)["q_len_per_req"]
        if self._graph is not None and count != planned:
            raise UnchangedError(
                "q_len_per_req", count, f"{planned}: it is frozen by the first plan of graph mode"
            )

    def _complete(self, given: dict[str, Any], spec: dict[str, Any], task: dict[str, Any]) -> None:
        # The tokens of one request are causal among themselves; a single one sees all.
        spec["causal"] = given["q_len_per_req"] > 1
        self._variant.complete(spec)
        task["fixed_split_size"] = pages_to_tokens(task["fixed_split_size"], given["page_size"])
        if self._graph is not None:
            task |= self._graph.capacity_of_decode(given["q_len_per_req"])

    def _layout(self, given: dict[str, Any]) -> Layout:
        indptr, last_page_len = given["indptr"], given["last_page_len"]
        tables, lens, page_size = given["block_tables"], given["seq_lens"], given["page_size"]
        count, qo_indptr = given["q_len_per_req"], None
        if count > 1:
            kv_lens = (
                to_indices(lens, "seq_lens") if last_page_len is None
                else page_lens(indptr, last_page_len, page_size)
            )  # fmt: skip
            if (kv_lens < count).any():
                at = int(np.argmax(kv_lens < count))
                raise FlashbsrError(
                    "q_len_per_req", count,
                    f"at most the {kv_lens[at]} tokens of request {at}: a query would have an "
                    "empty KV range",
                )  # fmt: skip
            qo_indptr = np.arange(len(kv_lens) + 1) * count
        table = indptr, given["indices"], last_page_len
        return paged_layout(qo_indptr, *table, lens, tables, page_size)

    def _explained(self, error: FlashbsrError) -> FlashbsrError:
        if error.argument == "q" and isinstance(error, PlanError):
            expected = f"{error.expected} (requests x q_len_per_req)"
            return PlanError("q", error.actual, expected)
        return error


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` in graph mode; an older name."""

    def __init__(
        self, workspace_buffer: Workspace, indptr_buffer: Array, indices_buffer: Array,
        last_page_len_buffer: Array, kv_layout: str = "NHD", use_tensor_cores: bool = False, *,
        backend: str = "auto", lse_base: str = "2",
    ) -> None:  # fmt: skip
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer,
            last_page_len_buffer, backend, lse_base=lse_base,
        )  # fmt: skip


@described("decode")
def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper, indptr: Array, indices: Array, last_page_len: Array,
    num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
    pos_encoding_mode: str = "NONE", window_left: int = -1, logits_soft_cap: Number = None,
    q_data_type: DType = None, kv_data_type: DType = None, data_type: DType = None,
    sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None,
    non_blocking: bool = True, fixed_split_size: int | None = None, disable_split_kv: bool = False,
    q_len_per_req: int = 1, global_override_indptr_cpu: Array = None,
) -> None:  # fmt: skip
    """Plan again, as ``begin_forward``: a function that engines put in the place of that method.

    Types that are not given are those of the prior plan.
    """
    given = locals()
    wrapper, indptr = given.pop("self"), given.pop("global_override_indptr_cpu")
    if wrapper._given is None:
        raise PlanError("fast_decode_plan", "no plan", "a prior plan() of this wrapper")
    if indptr is not None:
        given["indptr"] = indptr
    if q_data_type is None and data_type is None:
        for name in ("q_data_type", "kv_data_type", "data_type"):
            given[name] = given[name] or wrapper._given[name]
    given["o_data_type"] = wrapper._given["o_data_type"]
    BatchDecodeWithPagedKVCacheWrapper.begin_forward(wrapper, **given)


@described("one", "single")
def single_decode_with_kv_cache(
    q: Array, k: Array, v: Array, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,  # noqa: ARG001
    q_scale: Scale = None, k_scale: Scale = None, v_scale: Scale = None, window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, return_lse: bool = False, *, sinks: Array = None,
    alibi_slopes: Array = None, lse_base: str = "2",
) -> Any:  # fmt: skip
    """Attention of one query token, the last of its sequence.

    Returns
    -------
    out [num_qo_heads, head_dim], or (out, lse [num_qo_heads])
        Of the caller's kind; the type of `q`, bfloat16 for float8.
    """
    if len(getattr(q, "shape", ())) != 2:
        raise ShapeError("q", f"shape {getattr(q, 'shape', q)}", "[num_qo_heads, head_dim]")
    result = attend_one(
        q[None], k, v, {}, (q_scale, k_scale, v_scale),
        (False, window_left, sm_scale, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
        (kv_layout, lse_base, "auto", "default", None), return_lse, sinks, alibi_slopes,
    )  # fmt: skip
    return (result[0][0], result[1][0]) if return_lse else result[0]


SPELLING = {
    "q": "query", "kv": "kv_cache", "workspace": "workspace_buffer", "kv_lens": "seq_lens",
    "q_scale": "bmm1_scale", "v_scale": "bmm2_scale", "o_dtype": "out_dtype",
}  # fmt: skip


def one_sink(sinks: Any) -> Any:
    """TensorRT-LLM's functions take a list of one array."""
    if not isinstance(sinks, (list, tuple)):
        return sinks
    if len(sinks) != 1:
        raise ShapeError("sinks", f"{len(sinks)} arrays", "one, [num_qo_heads]")
    return sinks[0]


@described("tables")
def trtllm_batch_decode_with_kv_cache(
    query: Array, kv_cache: Any, workspace_buffer: Workspace, block_tables: Array, seq_lens: Array,
    max_seq_len: int, bmm1_scale: Scale = 1.0, bmm2_scale: Scale = 1.0, window_left: int = -1,
    out: Array = None, out_dtype: DType = None, o_sf_scale: Any = None, o_sf_vec_size: Any = None,
    sinks: Any = None, kv_layout: str = "HND", enable_pdl: bool | None = None,
    backend: str = "auto", q_len_per_req: int | None = 1, o_scale: float = 1.0, mask: Any = None,
    max_q_len: int | None = None, cum_seq_lens_q: Array = None,
    skip_softmax_threshold_scale_factor: Any = None, kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True, lse: Array = None, return_lse: bool = False,
    bmm1_scale_log2: Any = None, multi_ctas_kv_counter_buffer: Any = None,
    enable_block_sparse_attention: bool = False, bf16q_fp8kv_transform_mode: Any = None, *,
    lse_base: str = "2",
) -> Any:  # fmt: skip
    """Attention of the last tokens of each request against a paged cache given by a block table.

    Query tokens of a request, `q_len_per_req` or by `cum_seq_lens_q`, see each other causally.

    Returns
    -------
    out, or (out, lse)
    """
    refuse_given(locals(), "tables")
    kv_lens = lengths(seq_lens, "seq_lens")
    check_most("max_seq_len", max_seq_len, kv_lens)
    each = 1 if q_len_per_req is None else check_int("q_len_per_req", q_len_per_req, 1)
    counts = np.full(len(kv_lens), each)
    qo_indptr = None if each == 1 else np.arange(len(kv_lens) + 1) * each
    if cum_seq_lens_q is not None:
        qo_indptr = to_indices(cum_seq_lens_q, "cum_seq_lens_q")
        counts = np.diff(qo_indptr)
        if each > 1:  # FlashInfer's XQA is told the longest by this name
            check_most("q_len_per_req", each, counts)
    if max_q_len is not None:
        check_most("max_q_len", max_q_len, counts)
    return attend_requests(
        query, kv_cache, block_tables, kv_lens, qo_indptr,
        SPELLING | {"qo_indptr": "q_len_per_req" if cum_seq_lens_q is None else "cum_seq_lens_q"},
        (bmm1_scale, None, bmm2_scale), causal=qo_indptr is not None, kv_layout=kv_layout,
        window_left=window_left, workspace=workspace_buffer, backend=backend, o_dtype=out_dtype,
        lse_base=lse_base, out=out, lse=lse, return_lse=return_lse, sinks=one_sink(sinks),
        enable_pdl=enable_pdl, kv_cache_sf=kv_cache_sf,
    )  # fmt: skip


@described("tables")
def xqa_batch_decode_with_kv_cache(
    query: Array, kv_cache: Any, workspace_buffer: Workspace, block_tables: Array, seq_lens: Array,
    max_seq_len: int, bmm1_scale: Scale = 1.0, bmm2_scale: Scale = 1.0, window_left: int = -1,
    out: Array = None, sinks: Any = None, kv_layout: str = "NHD", enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1, o_scale: float = 1.0, mask: Any = None,
    kv_cache_sf: Any = None, q_cu_seq_lens: Array = None,
) -> Array:  # fmt: skip
    """Attention of the last tokens of each request: `trtllm_batch_decode_with_kv_cache`, NHD.

    Returns
    -------
    array [tokens, num_qo_heads, head_dim]
    """
    given = locals()
    given["cum_seq_lens_q"] = given.pop("q_cu_seq_lens")
    with renamed({"cum_seq_lens_q": "q_cu_seq_lens"}):
        result: Array = trtllm_batch_decode_with_kv_cache(**given)
    return result
