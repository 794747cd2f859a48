# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of latent attention (MLA): absorbed queries over vLLM's latent cache. Knows no vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...arrays.dtypes import PACKED_LATENTS
from ...errors import UnsupportedError
from ...ops.latent import append_packed_latents
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

    gives_lse = False  #: whether vLLM's layer merges what ranks have found

    def __init__(self, step: Step, requests: int) -> None:
        self.step = step
        self.slot_mapping = step.slot_mapping
        self.num_actual_tokens = self.num_decode_tokens = step.num_actual_tokens
        self.num_decodes, self.num_prefills = requests, 0
        self.decode: Any = step
        self.prefill = None


class LatentLayer:
    """What vLLM calls an implementation of latent attention; its arguments are vLLM's.

    Raises
    ------
    UnsupportedError
        Options that the engine does not have here, named as vLLM names them.
    """

    is_sparse = False
    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True
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
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        # vLLM's layer reads the dims of the heads before absorption, and the projection.
        for name, value in dims.items():
            setattr(self, name, value)
        self.kind: Kind = latent_kind(
            num_heads, head_size, kv_lora_rank, self.scale, kv_cache_dtype
        )
        self.ranks = 1
        # vLLM's layer, of which the builder tells. It has the cache's scale on the host; what an
        # update is given of it lies on the GPU.
        self.layer: Any = None

    def spread_over(self, ranks: int) -> None:
        """Attend with the heads of so many ranks, which share the tokens of each request."""
        self.ranks = ranks
        self.kind = replace(self.kind, num_qo_heads=self.num_heads * ranks)

    def do_kv_cache_update(
        self,
        kv_c_normed: Any,
        k_pe: Any,
        kv_cache: Any,
        slot_mapping: Any,
        kv_cache_dtype: str = "auto",  # noqa: ARG002
        k_scale: Any = None,  # noqa: ARG002
        skip_scale: bool = False,  # noqa: ARG002
    ) -> None:
        """Write latents and rotated keys into their slots; those of slot -1 go nowhere.

        Parameters
        ----------
        kv_c_normed : tensor, shape (tokens, kv_lora_rank)
        k_pe : tensor, shape (tokens, 1, rotated dims)
        kv_cache : tensor, shape (blocks, block, head_size), or (blocks, block, 656) of bytes
            Empty while vLLM measures memory. An fp8 cache comes as bytes.
        slot_mapping : int64 tensor, shape (rows,)
        """
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten()
        rows = slots.shape[0]
        latents, rotated = kv_c_normed[:rows], k_pe[:rows].reshape(-1, k_pe.shape[-1])
        if self.kind.kv_dtype == PACKED_LATENTS:
            append_packed_latents(latents, rotated, cache=kv_cache, slot_mapping=slots)
            return
        scales = self._scales(self.layer)
        heads = self._cache(kv_cache).unsqueeze(2)
        append_paged_kv_cache(
            latents.unsqueeze(1),
            rotated.unsqueeze(1),
            paged_kv_cache=(heads[..., : self.kv_lora_rank], heads[..., self.kv_lora_rank :]),
            kv_layout="NHD",
            slot_mapping=slots,
            **scales,
        )

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: LatentStep, layer: Any
    ) -> tuple[Any, Any]:
        """Attention of absorbed queries, and where ranks share tokens its LSE, natural; else None.

        Parameters
        ----------
        q : tensor, shape (tokens, num_heads, head_size), or two: of the latent and the rotated part
            Heads are those of all ranks that share tokens.
        kv_c_and_k_pe_cache : tensor, as `do_kv_cache_update` has it
        attn_metadata : LatentStep
        layer : vLLM's layer
            It has the scale of an fp8 cache.
        """
        return self._attend(q, self._cache(kv_c_and_k_pe_cache), attn_metadata, layer)

    def _attend(
        self, q: Any, cache: Any, given: LatentStep, layer: Any, counts: Any = None,
        places: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Run the plan, over lengths and tables of its own if given.

        Rows of padding are zeros, and their LSEs -inf.
        """
        if isinstance(q, tuple):
            q = torch.cat(q, -1)
        step = given.step
        out = q.new_empty(q.shape[0], self.num_heads * self.ranks, self.kv_lora_rank)
        out[step.rows :].zero_()
        rows, lse = slice(step.rows), None
        if given.gives_lse:
            lse = out.new_empty(out.shape[:2], dtype=torch.float32)
            lse[step.rows :] = -torch.inf
        step.attention(self.kind).run(
            q[rows],
            cache,
            out=out[rows],
            lse=None if lse is None else lse[rows],
            kv_lens=counts,
            block_tables=places,
            **self._scales(layer),
        )
        return out, lse

    def _cache(self, kv_cache: Any) -> Any:
        """Give the cache its type: a layer hands it over with it, a step's update as bytes."""
        if self.kind.kv_dtype == "float8_e4m3fn":
            return kv_cache.view(torch.float8_e4m3fn)
        return kv_cache

    def _scales(self, layer: Any) -> dict[str, Any]:
        """Give the one number of an fp8 cache, of its latents as of its rotated keys."""
        if self.kind.kv_dtype != "float8_e4m3fn":
            return {}
        scale = float(layer._k_scale_float)
        return {"k_scale": scale, "v_scale": scale}
