# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A layer: runs the step's plan over vLLM's arrays, and writes its cache. Knows no vLLM."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UnsupportedError
from ...ops.page import append_paged_kv_cache
from .kinds import KV_CACHE_DTYPES, Kind, kind_of
from .steps import Step

__all__ = ["Layer", "halves"]

# Options of other backends, and what of them changes nothing.
OFF: dict[str, Any] = {"use_alibi_sqrt": False, "chunk_lookback": -1}
FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


class Layer:
    """What vLLM calls an attention implementation; its arguments are vLLM's.

    Raises
    ------
    UnsupportedError
        Options that the engine does not have, named as vLLM names them.
    """

    # What vLLM asks implementations for. LSE is natural; nothing here computes over several ranks.
    can_return_lse_for_decode = False
    supports_dcp = False
    supports_pcp = False
    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Any = None,
        **options: Any,
    ) -> None:
        for name, value in options.items():
            if name not in OFF or (value is not None and value != OFF[name]):
                raise UnsupportedError(name, repr(value), "a model without it, or another backend")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        # A layer that reads another's cache has that cache given to it, and never writes.
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi_slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        )
        self.sinks = sinks
        self.kind: Kind = kind_of(
            num_heads,
            self.num_kv_heads,
            head_size,
            self.scale,
            sliding_window,
            float(logits_soft_cap or 0),
            alibi_slopes is not None,
            kv_cache_dtype,
            str(getattr(attn_type, "value", attn_type)),
        )
        self._quantized = self.kind.kv_dtype in FLOAT8
        self._known: tuple[Any, ...] = (None, None, None)

    def process_weights_after_loading(self, act_dtype: Any) -> None:  # noqa: ARG002
        """Sinks come in the type of the weights; the engine adds them in float32."""
        if self.sinks is not None:
            self.sinks = self.sinks.detach().float().contiguous()

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        """Write new keys and values into their slots; those of slot -1 go nowhere."""
        if self.kind.ragged:
            return
        rows = slot_mapping.shape[0]
        append_paged_kv_cache(
            key[:rows],
            value[:rows],
            paged_kv_cache=self._halves(kv_cache),
            kv_layout="HND",
            slot_mapping=slot_mapping,
            k_scale=layer._k_scale_float if self._quantized else 1.0,
            v_scale=layer._v_scale_float if self._quantized else 1.0,
        )

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Step | None,
        output: Any,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        """Attention of the step; rows of padding become zeros.

        Parameters
        ----------
        layer : vLLM's Attention
            Its scales are those of an fp8 cache.
        query, output : tensors, shape (tokens, num_heads, head_size)
            `output` is written and returned.
        key, value : tensors, shape (tokens, num_kv_heads, head_size), or None
            Read by encoders only: what is over a cache was written into it before.
        kv_cache : tensor, shape (blocks, num_kv_heads, block, 2 * head_size)
            Keys, then values; any strides but the last.
        attn_metadata : Step, optional
            None: vLLM measures memory, nothing is to be computed.
        output_scale, output_block_scale : optional
            Refused: outputs are not quantised here, nor does vLLM ask for it unless offered.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output_scale", "a scale", "None: outputs are not quantised")
        if attn_metadata is None:
            return output.zero_()
        step = attn_metadata
        out = output
        # Also of steps that graphs are for and that vLLM runs in compiled pieces, with padding.
        if output.shape[0] != step.rows:
            query, out = query[: step.rows], output[: step.rows]
            output[step.rows :].zero_()
        kv = (key[: step.rows], value[: step.rows]) if self.kind.ragged else self._halves(kv_cache)
        step.attention(self.kind).run(
            query,
            kv,
            out=out,
            k_scale=layer._k_scale_float if self._quantized else None,
            v_scale=layer._v_scale_float if self._quantized else None,
            sinks=self._on(query, "sinks"),
            alibi_slopes=self._on(query, "alibi_slopes"),
        )
        return output

    def _on(self, like: Any, name: str) -> Any:
        """Give an array of one number per head, in float32 where the computation is."""
        x = getattr(self, name)
        if x is not None and (x.device != like.device or x.dtype != torch.float32):
            x = x.detach().to(device=like.device, dtype=torch.float32)
            setattr(self, name, x)
        return x

    def _halves(self, kv_cache: Any) -> tuple[Any, Any]:
        """Keys and values of the cache; views cost more than a look whether it is the last one."""
        address, shape, views = self._known
        if address != kv_cache.data_ptr() or shape != kv_cache.shape:
            views = halves(kv_cache, self.head_size, KV_CACHE_DTYPES[self.kv_cache_dtype])
            self._known = kv_cache.data_ptr(), kv_cache.shape, views
        pair: tuple[Any, Any] = views
        return pair


def halves(kv_cache: Any, head_size: int, float8: str | None) -> tuple[Any, Any]:
    """Split a packed cache into keys and values, ``(blocks, heads, block, head_size)`` each.

    An fp8 cache comes as bytes. Dimensions of one element may have any stride, which a copy engine
    does not take: they get the one that they would have in a contiguous array.
    """
    if kv_cache.ndim != 4 or kv_cache.shape[-1] != 2 * head_size:
        raise UnsupportedError(
            "kv_cache",
            f"shape {tuple(kv_cache.shape)}",
            f"(blocks, heads, block, {2 * head_size}): keys and values of one head size",
        )
    if float8 is not None:
        kv_cache = kv_cache.view(FLOAT8[float8])
    if 1 in kv_cache.shape:
        strides = list(kv_cache.stride())
        for i in (2, 1, 0):
            if kv_cache.shape[i] == 1:
                strides[i] = strides[i + 1] * kv_cache.shape[i + 1]
        kv_cache = kv_cache.as_strided(kv_cache.shape, strides)
    return kv_cache[..., :head_size], kv_cache[..., head_size:]
