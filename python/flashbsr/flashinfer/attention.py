# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed prefill and decode in one plan, and attention with sinks."""

from __future__ import annotations

from typing import Any, ClassVar

from .._check import backend_of
from ..arrays.types import Array, DType, Scale
from ..layout.layouts import Layout, Paged
from ._arguments import BFLOAT16, Default, Number, refuse_given
from ._base import Wrapper
from ._values import SINK
from .prefill import BatchPrefillWithPagedKVCacheWrapper

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]


class BatchAttention(Wrapper):
    """Requests with any number of query tokens, prefill and decode mixed, over a paged KV cache.

    The step of a continuously batching engine: one plan balances both kinds over the workers.
    """

    _context = ("batch",)
    _spelling: ClassVar[dict[str, str]] = {"kv_lens": "kv_len_arr", "kv": "kv_cache"}

    def __init__(
        self, kv_layout: str = "NHD", device: Any = Default("cuda"), *,  # noqa: B008
        float_workspace_buffer: Array | int | None = None, lse_base: str = "2",
        num_threads: int | None = None,
    ) -> None:  # fmt: skip
        backend, ordinal = backend_of(None if isinstance(device, Default) else device)
        self._set_up({**locals(), "backend": backend})
        self._task_options["device"] = ordinal

    def plan(
        self, qo_indptr: Array, kv_indptr: Array, kv_indices: Array, kv_len_arr: Array,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, head_dim_vo: int, page_size: int,
        causal: bool = False, sm_scale: Number = None, logits_soft_cap: Number = None,
        q_data_type: DType = BFLOAT16, kv_data_type: DType = BFLOAT16, use_profiler: bool = False,
        *, o_data_type: DType = None, fp8_accumulation: str = "default",
        share_prefixes: str = "auto", stream: Any = None,
    ) -> None:  # fmt: skip
        """Schedule the batch. Checks indptrs and page table completely."""
        self._plan(locals())

    def _layout(self, given: dict[str, Any]) -> Layout:
        return Paged(
            given["qo_indptr"], given["kv_indptr"], given["kv_indices"],
            kv_lens=given["kv_len_arr"], page_size=given["page_size"],
        )  # fmt: skip

    def run(
        self, q: Array, kv_cache: Any, out: Array = None, lse: Array = None, k_scale: Scale = None,
        v_scale: Scale = None, logits_soft_cap: Number = 0.0, profiler_buffer: Any = None,
        kv_cache_sf: Any = None, *, q_scale: Scale = None, sinks: Array = None,
        enable_pdl: bool | None = None, kv_ready: bool = False, stream: Any = None,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Compute the planned batch for one layer; always ``(out, lse)``."""
        if profiler_buffer is not None:
            refuse_given(locals(), "run")
        if logits_soft_cap:
            self._agrees("logits_soft_cap", logits_soft_cap)
        result: tuple[Array, Array] = self._run(
            q, kv_cache, out, lse, True, q_scale, k_scale, v_scale, sinks, None, enable_pdl,
            kv_ready, stream, kv_cache_sf,
        )  # fmt: skip
        return result


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """`BatchPrefillWithPagedKVCacheWrapper` whose runs take a sink per head."""

    _context = ("sinks", "paged")

    def __init__(
        self, float_workspace_buffer: Array | int | None = None, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf: Array = None,
        paged_kv_indptr_buf: Array = None, paged_kv_indices_buf: Array = None,
        paged_kv_last_page_len_buf: Array = None, custom_mask_buf: Array = None,
        mask_indptr_buf: Array = None, backend: str = "auto", pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, q_data_type: DType = BFLOAT16,
        kv_data_type: DType = BFLOAT16, head_dim_qk: int = 128, head_dim_vo: int = 128,
        window_left: int = -1, *, lse_base: str = "2", num_threads: int | None = None,
    ) -> None:  # fmt: skip
        self._set_up({**locals(), "jit_args": (SINK,)})

    def run(  # type: ignore[override]
        self, q: Array, paged_kv_cache: Any, sink: Array, sm_scale: float | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Compute the planned batch for one layer; `options` as the base class has them."""
        return super().run(q, paged_kv_cache, sink, sm_scale, **options)
