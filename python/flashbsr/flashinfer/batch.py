# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed prefill and decode in one plan."""

from __future__ import annotations

from typing import Any, ClassVar

import flashbsr._core as _core

from ..arrays.types import Array, DType, Scale
from ..errors import PlanError, UnsupportedError
from .base import Wrapper, reject

__all__ = ["BatchAttention"]


class BatchAttention(Wrapper):
    """Requests with any number of query tokens, prefill and decode mixed, over a paged KV cache.

    The step of a continuously batching engine: one plan balances both kinds over the workers.
    FlashInfer, MLSys 2025, algorithm 1.

    Parameters
    ----------
    kv_layout : {"NHD", "HND"}
        Order of tokens and heads in a page.
    device : str or torch.device, optional
        ``"cpu"``, ``"cuda"`` or ``"cuda:1"`` and the like. None: where the arrays are.
    float_workspace_buffer : None, int or uint8 array
        Scratch memory for partial results: None (owned by the wrapper and sized by ``plan``), a
        size in bytes, or an array.
    lse_base : {"e", "2"}
        Base of the LSE. FlashInfer's is 2.
    num_threads : int, optional
        Threads that compute. Default: the machine's cores.

    Raises
    ------
    UnsupportedError
        A device that this build or machine does not have.

    Examples
    --------
    A prompt of 3 tokens and a request that decodes at length 2, in pages of 4. Keys are zero, so
    that attention is the mean of the visible values, which are the positions.

    >>> import numpy as np
    >>> import flashbsr
    >>> cache = np.zeros((2, 2, 4, 1, 64), np.float32)
    >>> cache[:, 1] = np.arange(4, dtype=np.float32)[:, None, None]
    >>> wrapper = flashbsr.flashinfer.BatchAttention()
    >>> wrapper.plan(
    ...     np.array([0, 3, 4]), np.array([0, 1, 2]), np.array([1, 0]), np.array([3, 2]),
    ...     num_qo_heads=1, num_kv_heads=1, head_dim_qk=64, head_dim_vo=64, page_size=4,
    ...     causal=True,
    ... )
    >>> out, lse = wrapper.run(np.ones((4, 1, 64), np.float32), cache)
    >>> out[:, 0, 0].tolist()
    [0.0, 0.5, 1.0, 0.5]
    >>> np.allclose(lse[:, 0], np.log([1, 2, 3, 2]))
    True
    """

    _spelling: ClassVar[dict[str, str]] = {
        **Wrapper._spelling,
        "kv_lens": "kv_len_arr",
        "kv": "kv_cache",
    }

    def __init__(
        self,
        kv_layout: str = "NHD",
        device: Any = None,
        *,
        float_workspace_buffer: Array | int | None = None,
        lse_base: str = "e",
        num_threads: int | None = None,
    ) -> None:
        backend, ordinal = _backend_of(device)
        super().__init__(float_workspace_buffer, kv_layout, backend, lse_base, num_threads)
        self._task_options["device"] = ordinal
        self._logits_soft_cap: float | None = None

    def plan(
        self,
        qo_indptr: Array,
        kv_indptr: Array,
        kv_indices: Array,
        kv_len_arr: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: DType = None,
        kv_data_type: DType = None,
        use_profiler: bool = False,
        *,
        o_data_type: DType = None,
        fp8_accumulation: str = "default",
        share_prefixes: str = "auto",
        stream: Any = None,
    ) -> None:
        """Schedule the batch. Checks indptrs and page table completely.

        Parameters
        ----------
        qo_indptr : int32 or int64 array [B + 1]
            Request *i* has the query rows ``q[qo_indptr[i]:qo_indptr[i + 1]]``.
        kv_indptr : int32 or int64 array [B + 1]
            And the pages ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]``.
        kv_indices : int32 or int64 array [>= kv_indptr[-1]]
            Page ids.
        kv_len_arr : int32 or int64 array [B]
            KV tokens of each request, the new ones included.
        num_qo_heads, num_kv_heads : int
            The first is a multiple of the second.
        head_dim_qk, head_dim_vo : int
            Multiples of 8, at most 512.
        page_size : int
        causal : bool
            Bottom-right aligned: key *j* is visible to query *i* iff
            ``j <= i + kv_len - q_len``.
        sm_scale : float, optional
            Default ``1 / sqrt(head_dim_qk)``.
        logits_soft_cap : float, optional
            ``cap * tanh(x / cap)`` on the scaled logits. None or 0: off.
        q_data_type, kv_data_type, o_data_type : data type, optional
            None: the arrays'. The output's is that of q, or of a given `out` and otherwise bfloat16
            where q is float8_e4m3fn, which needs a KV of that type. FlashInfer's default is
            bfloat16.
        use_profiler : bool
            Only False.
        fp8_accumulation : {"default", "fast"}
            As in `TaskInfo`.
        share_prefixes : {"auto", "off"}
            Whether pages that requests begin with are loaded once where that pays: see
            `Attention.plan`.
        stream : CUDA stream or int, optional
            Where the plan is copied to the GPU. Default: the framework's current stream.

        Raises
        ------
        ShapeError, DTypeError, IndexRangeError, CapacityError, UnsupportedError, FlashbsrError
            The argument, what it was, what is allowed. There is no plan afterwards.
        """
        self._attention = None
        if use_profiler:
            reject(use_profiler=use_profiler)
        key = (
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size, causal, sm_scale,
            logits_soft_cap, q_data_type, kv_data_type, o_data_type, fp8_accumulation,
        )  # fmt: skip
        attention = self._find(key) or self._engine(
            key,
            {"causal": causal, "sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap},
            {
                "num_qo_heads": num_qo_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim_qk": head_dim_qk,
                "head_dim_vo": head_dim_vo,
                "page_size": page_size,
                "q_dtype": q_data_type,
                "kv_dtype": kv_data_type,
                "o_dtype": o_data_type,
                "fp8_accumulation": fp8_accumulation,
            },
        )
        self._plan(
            attention, qo_indptr, kv_indptr, kv_indices, kv_lens=kv_len_arr, stream=stream,
            share_prefixes=share_prefixes,
        )  # fmt: skip
        self._logits_soft_cap = logits_soft_cap

    def run(
        self,
        q: Array,
        kv_cache: Array | tuple[Array, Array],
        out: Array = None,
        lse: Array = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        logits_soft_cap: float | None = None,
        profiler_buffer: Any = None,
        kv_cache_sf: Any = None,
        *,
        q_scale: Scale = None,
        sinks: Array = None,
        enable_pdl: bool | None = None,
        kv_ready: bool = False,
        stream: Any = None,
    ) -> tuple[Array, Array]:
        """Compute the planned batch for one layer.

        Parameters
        ----------
        q : array [qo_indptr[-1], num_qo_heads, head_dim_qk]
            float32, float16, bfloat16 or float8_e4m3fn.
        kv_cache : array or tuple of two
            Stacked ``[pages, 2, page_size, num_kv_heads, head_dim]`` (HND: ``page_size`` and
            ``num_kv_heads`` swapped), or ``(k, v)`` without the 2; the type of `q`, or unless
            that is float8 also float8_e4m3fn / float8_e5m2. Any strides but the last.
        out : array [qo_indptr[-1], num_qo_heads, head_dim_vo], optional
            Written and returned.
        lse : float32 array [qo_indptr[-1], num_qo_heads], optional
            Written and returned.
        k_scale, v_scale, q_scale : float or float32 array, optional
            Per tensor or per head (q: ``[num_qo_heads]``, k and v: ``[num_kv_heads]``). Those of
            q and k multiply the logits, that of v the output.
        logits_soft_cap : float, optional
            Only the planned one; None or 0: as planned.
        profiler_buffer, kv_cache_sf : None
        sinks : float32 array [num_qo_heads], optional
            Learned logit per head that takes part in the softmax (and the LSE) and has no value.
        enable_pdl : bool, optional
            GPUs of compute capability 9.0 and later: start before the kernel ahead in the stream
            has finished. None and True: reading ahead no more than the plan, which is always safe.
            False: never.
        kv_ready : bool
            The caller promises that the kernel ahead in the stream does not write the KV cache.
        stream : CUDA stream or int, optional
            Default: the current stream of q's framework.

        Returns
        -------
        out : array [qo_indptr[-1], num_qo_heads, head_dim_vo]
            Of the caller's kind. A row that sees no key gives 0.
        lse : float32 array [qo_indptr[-1], num_qo_heads]
            ``-inf`` for a row that sees no key.

        Raises
        ------
        PlanError
            No plan, or the arrays do not match it.
        ShapeError, DTypeError, DeviceError, UnsupportedError
        """
        if not (profiler_buffer is kv_cache_sf is None):
            reject(profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        if logits_soft_cap and logits_soft_cap != self._logits_soft_cap:
            raise PlanError(
                "logits_soft_cap", logits_soft_cap, f"the planned {self._logits_soft_cap}"
            )
        result: tuple[Array, Array] = self._run(
            q, kv_cache, out, lse, True, q_scale, k_scale, v_scale, sinks, None,
            enable_pdl, kv_ready, stream,
        )  # fmt: skip
        return result


def _backend_of(device: Any) -> tuple[str, int | None]:
    """Backend and CUDA ordinal of a device as PyTorch writes it."""
    if device is None:
        return "auto", None
    kind, _, ordinal = str(device).partition(":")
    if kind == "cpu":
        return "cpu", None
    if kind != "cuda" or (ordinal and not ordinal.isdecimal()):
        raise UnsupportedError("device", repr(device), "None, 'cpu', 'cuda' or 'cuda:N'")
    problem = _core.cuda_problem()
    if problem:
        raise UnsupportedError("device", repr(device), f"None or 'cpu' here: {problem}")
    return "cuda", int(ordinal) if ordinal else None
