# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A layer: runs the step's plan over vLLM's arrays, and writes its cache. Knows no vLLM."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UnsupportedError
from ...ops.page import append_paged_kv_cache
from .context import Ranks
from .kinds import (
    KV_CACHE_DTYPES,
    Kind,
    bytes_of_slot,
    kind_of,
    scales_of_tokens,
)
from .steps import Step

__all__ = ["Layer", "halves", "scaled_halves"]

# Options of other backends, and what of them changes nothing.
OFF: dict[str, Any] = {"use_alibi_sqrt": False, "chunk_lookback": -1}
# What a cache of bytes is viewed as; codes of four bits stay bytes.
STORED = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int4": torch.uint8,
}


class Layer:
    """What vLLM calls an attention implementation; its arguments are vLLM's.

    Raises
    ------
    UnsupportedError
        Options that the engine does not have, named as vLLM names them.
    """

    # What vLLM asks implementations for. Caches may be spread over ranks, with several query tokens
    # of a request and any interleave: `Ranks` merges, not vLLM's layer.
    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True
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
        self._per_token = scales_of_tokens(kv_cache_dtype)
        self._per_tensor = self.kind.kv_dtype in STORED and not self._per_token
        self._known: tuple[Any, ...] = (None, None, None)
        self._everyones: dict[str, Any] = {}
        self._quotient: tuple[Any, Any] | None = None

    @property
    def divides_outputs(self) -> bool:
        """Whether outputs may have a scale: it is folded into that of all values."""
        return not self._per_token

    def process_weights_after_loading(self, act_dtype: Any) -> None:  # noqa: ARG002
        """Sinks come in the type of the weights; the engine adds them in float32."""
        self._quotient = None
        if self.sinks is not None:
            self.sinks = self.sinks.detach().float().contiguous()

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        """Write new keys and values into their slots; those of slot -1 go nowhere."""
        if self.kind.ragged:
            return
        rows = slot_mapping.shape[0]
        kv, k_scale, v_scale = self._cache(layer, kv_cache)
        append_paged_kv_cache(
            key[:rows],
            value[:rows],
            paged_kv_cache=kv,
            kv_layout="HND",
            slot_mapping=slot_mapping,
            k_scale=1.0 if k_scale is None else k_scale,
            v_scale=1.0 if v_scale is None else v_scale,
            kv_dtype=self.kind.kv_dtype if self._per_token else None,
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
            Its scales are those of an fp8 cache with a scale for each tensor.
        query, output : tensors, shape (tokens, num_heads, head_size)
            `output` is written and returned.
        key, value : tensors, shape (tokens, num_kv_heads, head_size), or None
            Read by encoders only: what is over a cache was written into it before.
        kv_cache : tensor, shape (blocks, num_kv_heads, block, 2 * head_size)
            Keys, then values; any strides but the last. With scales of tokens it is bytes: codes of
            keys, of values, a float32 of each, and what pads them.
        attn_metadata : Step, optional
            None: vLLM measures memory, nothing is to be computed.
        output_scale : float32 tensor of one element, optional
            Outputs are divided by it; `output` is float8_e4m3fn.
        output_block_scale : optional
            Refused: there is one scale, nor does vLLM ask for more unless offered.
        """
        if output_block_scale is not None:
            raise UnsupportedError("output_block_scale", "a tensor", "None: outputs have one scale")
        if attn_metadata is None:
            return output.zero_()
        step = attn_metadata
        out = output
        # Also of steps that graphs are for and that vLLM runs in compiled pieces, with padding.
        if output.shape[0] != step.rows:
            query, out = query[: step.rows], output[: step.rows]
            output[step.rows :].zero_()
        if self.kind.ragged:
            kv, k_scale, v_scale = (key[: step.rows], value[: step.rows]), None, None
        else:
            kv, k_scale, v_scale = self._cache(layer, kv_cache)
        if output_scale is not None:
            v_scale = self._divided(v_scale, output_scale)
        scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
        of_heads: dict[str, Any] = {
            name: self._on(query, name) for name in ("sinks", "alibi_slopes")
        }
        if step.ranks is None:
            for attention in step.engines(self.kind):
                attention.run(query, kv, out=out, **scales, **of_heads)
        elif output_scale is not None:
            raise UnsupportedError("output_scale", "a tensor", "None where ranks share keys")
        else:
            of_heads = {name: self._of_all(step.ranks, name, x) for name, x in of_heads.items()}
            step.ranks.attend(step.attention(self.kind), query, kv, out, **scales, **of_heads)
        return output

    def _of_all(self, ranks: Ranks, name: str, x: Any) -> Any:
        """Give an array of one number per head for the heads of all ranks, asked for once."""
        if x is not None and name not in self._everyones:
            self._everyones[name] = ranks.all_heads(x, dim=0)
        return self._everyones.get(name)

    def _on(self, like: Any, name: str) -> Any:
        """Give an array of one number per head, in float32 where the computation is."""
        x = getattr(self, name)
        if x is not None and (x.device != like.device or x.dtype != torch.float32):
            x = x.detach().to(device=like.device, dtype=torch.float32)
            setattr(self, name, x)
        return x

    def _divided(self, v_scale: float | None, output_scale: Any) -> Any:
        """Give the values' scale over the outputs' for each KV head, without a look at the number.

        Kept from step to step, since it comes with the weights; but not what is computed while a
        graph is captured, whose memory is the graph's.
        """
        if not self.divides_outputs:
            raise UnsupportedError("output_scale", "a tensor", "None: values have scales of tokens")
        known = self._quotient
        if known is not None and known[0].data_ptr() == output_scale.data_ptr():
            return known[1]
        one = (1.0 if v_scale is None else v_scale) / output_scale.reshape(1).float()
        quotient = one.expand(self.num_kv_heads).contiguous()
        if not (quotient.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._quotient = output_scale, quotient
        return quotient

    def _cache(self, layer: Any, kv_cache: Any) -> tuple[tuple[Any, Any], Any, Any]:
        """Keys and values of the cache, and their scales, if it has any.

        Views cost more than a look whether it is the last one.
        """
        address, shape, views = self._known
        if address != kv_cache.data_ptr() or shape != kv_cache.shape:
            split = scaled_halves if self._per_token else halves
            views = split(kv_cache, self.head_size, self.kv_cache_dtype)
            self._known = kv_cache.data_ptr(), kv_cache.shape, views
        if self._per_token:
            return views[0], views[1], views[2]
        if self._per_tensor:
            return views, layer._k_scale_float, layer._v_scale_float
        return views, None, None


def halves(kv_cache: Any, head_size: int, kv_cache_dtype: str) -> tuple[Any, Any]:
    """Split a packed cache into keys and values, ``(blocks, heads, block, head_size)`` each.

    An fp8 cache comes as bytes.
    """
    if kv_cache.ndim != 4 or kv_cache.shape[-1] != 2 * head_size:
        raise UnsupportedError(
            "kv_cache",
            f"shape {tuple(kv_cache.shape)}",
            f"(blocks, heads, block, {2 * head_size}): keys and values of one head size",
        )
    stored = KV_CACHE_DTYPES[kv_cache_dtype]
    if stored in STORED:
        kv_cache = kv_cache.view(STORED[stored])
    kv_cache = _usual(kv_cache)
    return kv_cache[..., :head_size], kv_cache[..., head_size:]


def scaled_halves(
    kv_cache: Any, head_size: int, kv_cache_dtype: str
) -> tuple[tuple[Any, Any], Any, Any]:
    """Split a cache of codes into those of keys and values, and scales ``(blocks, heads, block)``.

    Codes lie in front, so that rows begin where a copy engine takes them.
    """
    least = bytes_of_slot(kv_cache_dtype, head_size)
    if kv_cache.ndim != 4 or kv_cache.shape[-1] < least or kv_cache.element_size() != 1:
        raise UnsupportedError(
            "kv_cache",
            f"shape {tuple(kv_cache.shape)} of {kv_cache.dtype}",
            f"(blocks, heads, block, {least} or more) bytes: codes and scales",
        )
    codes = _usual(kv_cache.view(STORED[KV_CACHE_DTYPES[kv_cache_dtype] or ""]))
    end, row = least - 8, (least - 8) // 2
    scales = kv_cache[..., end:least].view(torch.float32)
    return (codes[..., :row], codes[..., row:end]), scales[..., 0], scales[..., 1]


def _usual(kv_cache: Any) -> Any:
    """Give dimensions of one element the stride that they would have in a contiguous array.

    They may have any, which a copy engine does not take.
    """
    if 1 in kv_cache.shape:
        strides = list(kv_cache.stride())
        for i in (2, 1, 0):
            if kv_cache.shape[i] == 1:
                strides[i] = strides[i + 1] * kv_cache.shape[i + 1]
        kv_cache = kv_cache.as_strided(kv_cache.shape, strides)
    return kv_cache
