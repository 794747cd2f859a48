# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Batch decode over a paged KV cache, under the names the ecosystem knows."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from .._check import check_int
from ..arrays import to_numpy
from ..arrays.types import Array, DType, Scale
from ..errors import PlanError
from .base import Wrapper, fold_data_type, pages_to_tokens, reject
from .graphs import graph_mode

__all__ = ["BatchDecodeWithPagedKVCacheWrapper"]


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """Attention of one new token per request (or a few) against a paged KV cache.

    ``plan`` once per step, ``run`` once per layer. FlashInfer, MLSys 2025, section 3.

    Parameters
    ----------
    float_workspace_buffer : None, int or uint8 array
        Scratch memory for partial results: None (owned by the wrapper and sized by ``plan``), a
        size in bytes, or an array. `CapacityError` in ``plan`` if it is too small.
    kv_layout : {"NHD", "HND"}
        Order of tokens and heads in a page.
    use_cuda_graph : bool
        A captured ``run`` may be replayed over later plans: memory, kernel and grid stay. Needs the
        buffers below on a GPU, and fixes the computation to it.
    use_tensor_cores : bool
        Only False: one kernel serves every head ratio.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : array, optional
        With `use_cuda_graph`: their lengths are the most requests + 1 and the most pages of a
        batch. (The last is not needed.) They are neither read nor written.
    backend : {"auto", "cpu", "cuda", "fa2", "fa3"}
        As in `TaskInfo`.
    jit_args : None
    lse_base : {"e", "2"}
        Base of the LSE. FlashInfer's is 2.
    num_threads : int, optional
        Threads that compute. Default: the machine's cores.

    Raises
    ------
    UnsupportedError
        An option of FlashInfer's that has no meaning here, with the way out.

    Examples
    --------
    Two requests of 5 and 3 tokens in pages of 4; the values are the token positions, the keys are
    zero, so that attention is the mean.

    >>> import numpy as np
    >>> import flashbsr
    >>> cache = np.zeros((3, 2, 4, 1, 64), np.float32)  # pages, K and V, slots, heads, dim
    >>> cache[[0, 2], 1] = np.arange(8, dtype=np.float32).reshape(2, 4, 1, 1)
    >>> cache[1, 1] = np.arange(4, dtype=np.float32)[:, None, None]
    >>> wrapper = flashbsr.flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
    >>> wrapper.plan(
    ...     np.array([0, 2, 3], np.int32),  # indptr: request 0 has 2 pages, request 1 one
    ...     np.array([0, 2, 1], np.int32),  # indices: pages 0 and 2; page 1
    ...     np.array([1, 3], np.int32),  # last_page_len
    ...     num_qo_heads=2, num_kv_heads=1, head_dim=64, page_size=4,
    ... )
    >>> wrapper.run(np.ones((2, 2, 64), np.float32), cache)[:, 0, 0].tolist()
    [2.0, 1.0]
    """

    _spelling: ClassVar[dict[str, str]] = {
        **Wrapper._spelling,
        "kv_indptr": "indptr",
        "kv_indices": "indices",
        "kv_lens": "seq_lens",
        "kv": "paged_kv_cache",
        "head_dim_qk": "head_dim",
    }

    def __init__(
        self,
        float_workspace_buffer: Array | int | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        *,
        lse_base: str = "e",
        num_threads: int | None = None,
    ) -> None:
        reject(use_tensor_cores=use_tensor_cores, jit_args=jit_args)
        graph = graph_mode(
            use_cuda_graph,
            {"paged_kv_indptr_buffer": paged_kv_indptr_buffer},
            {"paged_kv_indices_buffer": paged_kv_indices_buffer},
            {"paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer},
        )
        super().__init__(float_workspace_buffer, kv_layout, backend, lse_base, num_threads, graph)
        self._window_left = -1
        self._q_len_per_req = 1

    @property
    def use_tensor_cores(self) -> bool:
        """Always False: ``plan`` chooses the kernel."""
        return False

    def plan(
        self,
        indptr: Array,
        indices: Array,
        last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DType = None,
        kv_data_type: DType = None,
        o_data_type: DType = None,
        data_type: DType = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,  # noqa: ARG002
        block_tables: Array = None,
        seq_lens: Array = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        share_prefixes: str = "auto",
        fp8_accumulation: str = "default",
        stream: Any = None,
    ) -> None:
        """Schedule the batch. Checks the page table completely.

        Parameters
        ----------
        indptr : int32 or int64 array [B + 1]
            Request *i* has the pages ``indices[indptr[i]:indptr[i + 1]]``.
        indices : int32 or int64 array [>= indptr[-1]]
            Page ids.
        last_page_len : int32 or int64 array [B]
            Tokens in each request's last page, 1 to `page_size`. None: `seq_lens` instead.
        num_qo_heads, num_kv_heads : int
            The first is a multiple of the second.
        head_dim : int
            Multiple of 8, at most 512.
        page_size : int
        pos_encoding_mode : {"NONE", "ROPE_LLAMA", "ALIBI"}
        window_left : int
            Keys kept behind the query, inclusive. -1: all.
        logits_soft_cap : float, optional
            ``cap * tanh(x / cap)`` on the scaled logits. None or 0: off.
        q_data_type, kv_data_type, o_data_type : data type, optional
            None: the arrays'. The output's is that of q, or of a given `out` and otherwise bfloat16
            where q is float8_e4m3fn, which needs a KV of that type. FlashInfer's default is
            float16.
        data_type : data type, optional
            Query and KV type where they are not given.
        sm_scale : float, optional
            Default ``1 / sqrt(head_dim)``.
        rope_scale, rope_theta : float, optional
            Default 1 and 10000.
        non_blocking : bool
            Without effect: host arrays are never waited for, arrays on a GPU are copied back once.
        block_tables : int32 or int64 array [B, max_pages], optional
            Page ids per request, instead of `indptr` and `indices`, which must then be None;
            needs `seq_lens`.
        seq_lens : int32 or int64 array [B], optional
            KV length per request. Next to `last_page_len` it must say the same.
        fixed_split_size : int, optional
            Split every KV range at multiples of this many *pages*: a request's result then does
            not depend on the rest of the batch.
        disable_split_kv : bool
            Never split a KV range.
        q_len_per_req : int
            Query tokens per request, the same for all; causal among themselves.
        window_right : int
            Only 0.
        share_prefixes : {"auto", "off"}
            Whether pages that requests begin with are loaded once where that pays: see
            `Attention.plan`.
        fp8_accumulation : {"default", "fast"}
            As in `TaskInfo`.
        stream : CUDA stream or int, optional
            Where the plan is copied to the GPU. Default: the framework's current stream.

        Raises
        ------
        ShapeError, DTypeError, IndexRangeError, CapacityError, UnsupportedError, FlashbsrError
            The argument, what it was, what is allowed. There is no plan afterwards.
        """
        self._attention = None
        if window_right:
            reject(window_right=window_right)
        key = (
            num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left,
            logits_soft_cap, q_data_type, kv_data_type, o_data_type, data_type, sm_scale,
            rope_scale, rope_theta, fixed_split_size, disable_split_kv, q_len_per_req,
            fp8_accumulation,
        )  # fmt: skip
        attention = self._find(key)
        if attention is None:
            q_data_type, kv_data_type = fold_data_type(data_type, q_data_type, kv_data_type)
            check_int("q_len_per_req", q_len_per_req, 1)
            attention = self._engine(
                key,
                {
                    # The tokens of one request are causal among themselves; a single one sees all.
                    "causal": q_len_per_req > 1,
                    "window_left": window_left,
                    "sm_scale": sm_scale,
                    "logits_soft_cap": logits_soft_cap,
                    "pos_encoding_mode": pos_encoding_mode,
                    "rope_scale": rope_scale,
                    "rope_theta": rope_theta,
                },
                {
                    "num_qo_heads": num_qo_heads,
                    "num_kv_heads": num_kv_heads,
                    "head_dim_qk": head_dim,
                    "page_size": page_size,
                    "q_dtype": q_data_type,
                    "kv_dtype": kv_data_type,
                    "o_dtype": o_data_type,
                    "fixed_split_size": pages_to_tokens(fixed_split_size, page_size),
                    "disable_split_kv": disable_split_kv,
                    "fp8_accumulation": fp8_accumulation,
                    **(self._graph.capacity_of_decode(q_len_per_req) if self._graph else {}),
                },
            )
        qo_indptr = None
        if q_len_per_req > 1:
            if block_tables is None:
                rows = len(to_numpy(indptr, "indptr"))
            else:
                rows = len(to_numpy(block_tables, "block_tables")) + 1
            qo_indptr = np.arange(rows, dtype=np.int64) * q_len_per_req
        self._plan(
            attention, qo_indptr, indptr, indices, last_page_len, seq_lens, block_tables,
            stream=stream, share_prefixes=share_prefixes,
        )  # fmt: skip
        self._window_left = window_left
        self._q_len_per_req = q_len_per_req

    def run(
        self,
        q: Array,
        paged_kv_cache: Array | tuple[Array, Array],
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Array = None,
        lse: Array = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Array = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Array = None,
        alibi_slopes: Array = None,
        kv_ready: bool = False,
        stream: Any = None,
    ) -> Any:
        """Compute the planned batch for one layer.

        Parameters
        ----------
        q : array [B * q_len_per_req, num_qo_heads, head_dim]
            float32, float16, bfloat16 or float8_e4m3fn.
        paged_kv_cache : array or tuple of two
            Stacked ``[pages, 2, page_size, num_kv_heads, head_dim]`` (HND: ``page_size`` and
            ``num_kv_heads`` swapped), or ``(k, v)`` without the 2; the type of `q`, or unless
            that is float8 also float8_e4m3fn / float8_e5m2. Any strides but the last.
        *args
            Not supported: extras have names here.
        q_scale, k_scale, v_scale : float or float32 array, optional
            Per tensor or per head (q: ``[num_qo_heads]``, k and v: ``[num_kv_heads]``). The first
            two multiply the logits, the third the output.
        out : array [B * q_len_per_req, num_qo_heads, head_dim], optional
            Written and returned.
        lse : float32 array [B * q_len_per_req, num_qo_heads], optional
            Written and returned.
        return_lse : bool
            Return ``(out, lse)``.
        enable_pdl : bool, optional
            GPUs of compute capability 9.0 and later: start before the kernel ahead in the stream
            has finished. None and True: reading ahead no more than the plan, which is always safe.
            False: never.
        window_left : int, optional
            Only the planned one.
        sinks : float32 array [num_qo_heads], optional
            Learned logit per head that takes part in the softmax (and the LSE) and has no value.
        q_len_per_req : int, optional
            Only the planned one.
        skip_softmax_threshold_scale_factor, kv_cache_sf : None
        alibi_slopes : float32 array [num_qo_heads], optional
            For ``pos_encoding_mode="ALIBI"``. Default: the standard ones for `num_qo_heads` heads;
            under tensor parallelism pass this rank's part.
        kv_ready : bool
            The caller promises that the kernel ahead in the stream does not write the KV cache.
        stream : CUDA stream or int, optional
            Default: the current stream of q's framework.

        Returns
        -------
        out : array [B * q_len_per_req, num_qo_heads, head_dim]
            Of the caller's kind. A request without KV gives 0.
        lse : float32 array [B * q_len_per_req, num_qo_heads]
            Only with ``return_lse=True``. ``-inf`` for a request without KV.

        Raises
        ------
        PlanError
            No plan, or the arrays do not match it.
        ShapeError, DTypeError, DeviceError, UnsupportedError
        """
        if args or kv_cache_sf is not None or skip_softmax_threshold_scale_factor is not None:
            reject(
                args=args,
                kv_cache_sf=kv_cache_sf,
                skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            )
        if window_left is not None and window_left != self._window_left:
            raise PlanError("window_left", window_left, f"the planned {self._window_left}")
        if q_len_per_req is not None and q_len_per_req != self._q_len_per_req:
            raise PlanError("q_len_per_req", q_len_per_req, f"the planned {self._q_len_per_req}")
        return self._run(
            q, paged_kv_cache, out, lse, return_lse, q_scale, k_scale, v_scale, sinks, alibi_slopes,
            enable_pdl, kv_ready, stream,
        )  # fmt: skip

    def workspace_size(
        self,
        indptr: Array,
        indices: Array,
        last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> tuple[int, int]:
        """Bytes that a plan needs, without touching the current one.

        On the GPU of `backend`, the workspace or the current plan, otherwise on that of the index
        arrays, otherwise on the CPU.

        Parameters
        ----------
        indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size
            As for ``plan``.
        **options
            The further arguments of ``plan``, by name.

        Returns
        -------
        tuple of two int
            Workspace (partial results), and plan.
        """
        probe = self._probe()
        probe.plan(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            **options,
        )  # fmt: skip
        return probe._sizes()
