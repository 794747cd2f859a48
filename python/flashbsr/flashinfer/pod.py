# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Prefill on decode of one prompt with contiguous keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._check import check_name
from ..arrays.types import Array, DType, Scale
from ..errors import PlanError, UnsupportedError
from .base import reject, reject_others
from .join import Part, pages_within
from .mixed import TWO_WRAPPERS, Mixed, both_masks, page_table

__all__ = ["PODWithPagedKVCacheWrapper"]


class PODWithPagedKVCacheWrapper(Mixed):
    """One prompt with contiguous keys and values, and decodes over a paged cache, as one plan.

    One plan has one cache: `k_p` and `v_p` must be views of consecutive pages of the decodes' cache
    (of a tuple of K and V, or of pages of one token; in a stacked cache a prompt within one page).
    Others raise `UnsupportedError`: write them into pages and take
    `BatchPODWithPagedKVCacheWrapper` or `BatchAttention`.

    ``run`` plans, since it is told what the prompt is. The plan is kept while that stays the same,
    as it does from layer to layer of a step.

    Parameters
    ----------
    float_workspace_buffer : None, int or uint8 array
        Scratch memory for partial results: None (owned by the wrapper and sized by ``run``), a
        size in bytes, or an array.
    kv_layout : {"NHD", "HND"}
        Order of tokens and heads in a page.
    use_cuda_graph : bool
        Only False: ``run`` plans.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer, jit_args : None
    backend : {"auto", "cpu", "cuda", "fa2", "fa3"}
        As in `TaskInfo`.
    lse_base : {"e", "2"}
        Base of the LSE. FlashInfer's is 2.
    num_threads : int, optional
        Threads that compute. Default: the machine's cores.

    Examples
    --------
    A prompt of two tokens in page 1 and a decode in page 0.

    >>> import numpy as np
    >>> import flashbsr
    >>> k = np.zeros((2, 4, 1, 64), np.float32)
    >>> v = k + np.arange(4, dtype=np.float32)[:, None, None]
    >>> wrapper = flashbsr.flashinfer.PODWithPagedKVCacheWrapper()
    >>> wrapper.plan(
    ...     np.array([0, 1]), np.array([0]), np.array([4]), num_qo_heads=1, num_kv_heads=1,
    ...     head_dim=64, page_size=4,
    ... )
    >>> q = np.ones((3, 1, 64), np.float32)
    >>> out_p, out_d = wrapper.run(q[:2], k[1, :2], v[1, :2], q[2:], (k, v), causal_p=True)
    >>> out_p[:, 0, 0].tolist(), out_d[:, 0, 0].tolist()
    ([0.0, 0.5], [1.5])
    """

    def __init__(
        self,
        float_workspace_buffer: Array | int | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        jit_args: Any = None,
        *,
        backend: str = "auto",
        lse_base: str = "e",
        num_threads: int | None = None,
    ) -> None:
        reject(jit_args=jit_args)
        reject_others(
            "run plans, which cannot be captured. "
            "BatchPrefillWithPagedKVCacheWrapper(use_cuda_graph=True) captures mixed batches",
            use_cuda_graph=use_cuda_graph,
            paged_kv_indptr_buffer=paged_kv_indptr_buffer,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
        )
        super().__init__(float_workspace_buffer, kv_layout, backend, lse_base, num_threads)
        self._prompt: tuple[int, int, int] | None = None  # first page, KV and query tokens
        self._decodes: tuple[Any, ...] = ()

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
        q_data_type: DType = None,
        kv_data_type: DType = None,
        data_type: DType = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,  # noqa: ARG002
        *,
        stream: Any = None,
    ) -> None:
        """Take the decodes' page table, and the options of both parts. ``run`` plans.

        Parameters
        ----------
        indptr, indices, last_page_len
            The decodes' page table, as in `BatchDecodeWithPagedKVCacheWrapper`.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
        pos_encoding_mode, window_left, q_data_type, kv_data_type, data_type, sm_scale, rope_scale
            As in `BatchPODWithPagedKVCacheWrapper.plan`; also `rope_theta`, `non_blocking` and
            `stream`.

        Raises
        ------
        ShapeError, DTypeError, IndexRangeError, UnsupportedError, FlashbsrError
        """
        self._forget()
        self._prompt = None
        pages, page_ids, kv_lens = page_table(indptr, indices, last_page_len, page_size, "")
        ones = np.ones(len(kv_lens), np.int64)
        self._decodes = Part("_d", ones, kv_lens), pages, page_ids
        self._take(
            {
                "window_left": window_left, "sm_scale": sm_scale,
                "pos_encoding_mode": pos_encoding_mode, "rope_scale": rope_scale,
                "rope_theta": rope_theta,
            },
            {
                "num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads,
                "head_dim_qk": head_dim, "page_size": page_size, "q_dtype": q_data_type,
                "kv_dtype": kv_data_type,
            },
            data_type,
            stream,
        )  # fmt: skip

    def run(
        self,
        q_p: Array,
        k_p: Array,
        v_p: Array,
        q_d: Array,
        paged_kv_cache_d: Array | tuple[Array, Array],
        custom_mask_p: Array = None,
        packed_custom_mask_p: Array = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: Array = None,
        packed_custom_mask_d: Array = None,
        causal_d: bool = False,  # noqa: ARG002
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: Any,
        kv_ready: bool = False,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Compute one layer.

        It plans where the prompt, its pages or `causal_p` are others than before, and wherever
        there is a mask.

        Parameters
        ----------
        q_p : array [q_len, num_qo_heads, head_dim]
            The prompt's queries, the last of its tokens. Joined with `q_d`, without a copy where
            that lies behind it in one array.
        k_p, v_p : array [kv_len, num_kv_heads, head_dim]
            HND: ``[num_kv_heads, kv_len, head_dim]``. Views of consecutive pages of the cache.
        q_d : array [B, num_qo_heads, head_dim]
        paged_kv_cache_d : array or tuple of two
            As in `BatchDecodeWithPagedKVCacheWrapper`.
        custom_mask_p, packed_custom_mask_p, custom_mask_d, packed_custom_mask_d : array, optional
            As in `BatchPrefillWithPagedKVCacheWrapper`, of their part. One part's mask makes bits
            of the other part too.
        causal_p : bool
            Of the prompt, bottom-right aligned.
        kv_layout_p : {"NHD", "HND"}
            Axes of `k_p` and `v_p`.
        pos_encoding_mode_p, sm_scale_p, window_left_p, rope_scale_p, rope_theta_p
            Only what was planned: one plan has one spec.
        return_lse_p, return_lse_d : bool
            Put ``(out, lse)`` in the output's place.
        causal_d : bool
            Without effect: the decodes' one token is the last.
        kv_layout_d, pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d
            The default, or what was planned.
        q_scale, k_scale, v_scale : float or float32 array, optional
            Per tensor or per head, of both parts.
        use_fp16_qk_reduction : bool
            Only False.
        *args
            Not supported: extras have names here.
        enable_pdl, kv_ready, stream
            As in `Attention.run`.

        Returns
        -------
        (out_p, out_d)
            Views of one array.

        Raises
        ------
        PlanError
            No plan, or the arrays do not match it.
        UnsupportedError
            `k_p` and `v_p` outside of the cache; options that differ between the parts.
        ShapeError, DTypeError, DeviceError, FlashbsrError
        """
        if use_fp16_qk_reduction or args:
            reject(use_fp16_qk_reduction=use_fp16_qk_reduction, args=args)
        check_name("kv_layout_p", kv_layout_p, ("NHD", "HND"))
        self._agree(
            kv_layout_d, pos_encoding_mode=(pos_encoding_mode_p, pos_encoding_mode_d),
            sm_scale=(sm_scale_p, sm_scale_d), window_left=(window_left_p, window_left_d),
            rope_scale=(rope_scale_p, rope_scale_d), rope_theta=(rope_theta_p, rope_theta_d),
        )  # fmt: skip
        self._take_prompt(q_p, k_p, v_p, kv_layout_p, paged_kv_cache_d)
        masks = custom_mask_p, packed_custom_mask_p, custom_mask_d, packed_custom_mask_d
        self._plan_parts(causal_p, both_masks(*masks))
        found = self._run_parts(
            (q_p, q_d), paged_kv_cache_d, (q_scale, k_scale, v_scale),
            return_lse_p or return_lse_d, enable_pdl=enable_pdl, kv_ready=kv_ready, stream=stream,
        )  # fmt: skip
        if len(found) == 1:
            return found[0]
        (out_p, out_d), (lse_p, lse_d) = found
        return (out_p, lse_p) if return_lse_p else out_p, (out_d, lse_d) if return_lse_d else out_d

    def _agree(self, kv_layout_d: str, **pairs: tuple[Any, Any]) -> None:
        """Raise unless the parts' options are those of the plan."""
        if self._options is None:
            raise PlanError("run", "no plan", "plan() first; a plan() that raised leaves none")
        spec, task = self._options
        defaults = {
            "pos_encoding_mode": "NONE", "sm_scale": task["head_dim_qk"] ** -0.5,
            "window_left": -1, "rope_scale": 1.0, "rope_theta": 1e4,
        }  # fmt: skip
        layout = self._task_options["kv_layout"]
        if kv_layout_d not in ("NHD", layout):
            raise PlanError("kv_layout_d", repr(kv_layout_d), f"the wrapper's {layout!r}")
        for name, (prompt, decode) in pairs.items():
            planned = defaults[name] if spec[name] is None else spec[name]
            prompt = defaults[name] if prompt is None else prompt
            if prompt != planned and not (name.startswith("rope") and self._without_rope()):
                raise UnsupportedError(
                    f"{name}_p",
                    repr(prompt),
                    f"{planned!r}, as planned for the decodes: one plan has one spec. "
                    + TWO_WRAPPERS,
                )
            if decode not in (None, defaults[name], planned):
                raise PlanError(f"{name}_d", repr(decode), f"the planned {planned!r}")

    def _without_rope(self) -> bool:
        assert self._options is not None
        return bool(self._options[0]["pos_encoding_mode"] != "ROPE_LLAMA")

    def _take_prompt(self, q: Array, k: Array, v: Array, layout: str, cache: Any) -> None:
        """Make the batch, unless the prompt is the one of before."""
        assert self._options is not None
        page_size = self._options[1]["page_size"]
        where = pages_within(
            {"k_p": k, "v_p": v}, layout, cache, page_size, self._task_options["kv_layout"]
        )
        prompt = (*where, int(q.shape[0]))
        if prompt == self._prompt:
            return
        first, tokens, rows = prompt
        count = -(-tokens // page_size)
        part = Part("_p", np.array([rows]), np.array([tokens]))
        pages = first + np.arange(count)
        self._join_batch([(part, np.array([0, count]), pages), self._decodes])
        self._prompt = prompt
