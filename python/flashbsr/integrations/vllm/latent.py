# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of latent attention (MLA): absorbed queries over vLLM's latent cache. Knows no vLLM."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UnsupportedError
from ...ops.page import append_paged_kv_cache
from .kinds import Kind, latent_kind
from .steps import Step

__all__ = ["LatentLayer", "LatentStep"]


class LatentStep:
    """A step, as vLLM's layer of latent attention reads it: all rows are those of decoding.

    That layer absorbs the queries of such rows, whatever number of them a request has, so that one
    plan serves chunks of prompts over what earlier chunks left, drafts and decodes.

    Parameters
    ----------
    step : Step
    requests : int
    """

    def __init__(self, step: Step, requests: int) -> None:
        self.step = step
        self.slot_mapping = step.slot_mapping
        self.num_actual_tokens = self.num_decode_tokens = step.num_actual_tokens
        self.num_decodes, self.num_prefills = requests, 0
        self.decode, self.prefill = step, None


class LatentLayer:
    """What vLLM calls an implementation of latent attention; its arguments are vLLM's.

    Raises
    ------
    UnsupportedError
        Options that the engine does not have here, named as vLLM names them.
    """

    is_sparse = False
    can_return_lse_for_decode = False
    supports_dcp = False
    supports_pcp = False
    supports_quant_query_input = False
    attn_type = "decoder"

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        indexer: Any = None,
        q_pad_num_heads: int | None = None,
        **dims: Any,
    ) -> None:
        refused = {
            "num_kv_heads": None if num_kv_heads == 1 else num_kv_heads,
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap or None,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "indexer": indexer,
            "q_pad_num_heads": q_pad_num_heads,
        }
        for name, value in refused.items():
            if value is not None:
                raise UnsupportedError(name, repr(value), "a model without it, or another backend")
        if str(getattr(attn_type, "value", attn_type)) != self.attn_type:
            raise UnsupportedError("attn_type", attn_type, self.attn_type)
        if kv_cache_dtype not in ("auto", "float16", "bfloat16"):
            raise UnsupportedError("kv_cache_dtype", kv_cache_dtype, "'auto': the model's own type")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        # vLLM's layer reads the dims of the heads before absorption, and the projection.
        for name, value in dims.items():
            setattr(self, name, value)
        self.kind: Kind = latent_kind(num_heads, head_size, kv_lora_rank, self.scale)

    def do_kv_cache_update(
        self,
        kv_c_normed: Any,
        k_pe: Any,
        kv_cache: Any,
        slot_mapping: Any,
        kv_cache_dtype: str = "auto",  # noqa: ARG002
        k_scale: Any = None,  # noqa: ARG002
    ) -> None:
        """Write latents and rotated keys into their slots; those of slot -1 go nowhere.

        Parameters
        ----------
        kv_c_normed : tensor, shape (tokens, kv_lora_rank)
        k_pe : tensor, shape (tokens, 1, rotated dims)
        kv_cache : tensor, shape (blocks, block, head_size)
            Empty while vLLM measures memory.
        slot_mapping : int64 tensor, shape (rows,)
        """
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten()
        rows, heads = slots.shape[0], kv_cache.unsqueeze(2)
        append_paged_kv_cache(
            kv_c_normed[:rows].unsqueeze(1),
            k_pe[:rows].reshape(-1, 1, k_pe.shape[-1]),
            paged_kv_cache=(heads[..., : self.kv_lora_rank], heads[..., self.kv_lora_rank :]),
            kv_layout="NHD",
            slot_mapping=slots,
        )

    def forward_mqa(
        self,
        q: Any,
        kv_c_and_k_pe_cache: Any,
        attn_metadata: LatentStep,
        layer: Any,  # noqa: ARG002
    ) -> tuple[Any, None]:
        """Attention of absorbed queries; no LSE, which only caches over several ranks need.

        Parameters
        ----------
        q : tensor, shape (tokens, num_heads, head_size), or two: of the latent and the rotated part
        kv_c_and_k_pe_cache : tensor, shape (blocks, block, head_size)
        attn_metadata : LatentStep
        """
        if isinstance(q, tuple):
            q = torch.cat(q, -1)
        step = attn_metadata.step
        out = q.new_empty(q.shape[0], self.num_heads, self.kv_lora_rank)
        out[step.rows :].zero_()
        rows = slice(step.rows)
        step.attention(self.kind).run(q[rows], kv_c_and_k_pe_cache, out=out[rows])
        return out, None
