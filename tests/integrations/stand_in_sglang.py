# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Where SGLang is not installed: the names of it that the backend imports, what they promise."""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

INSTALLED = importlib.util.find_spec("sglang") is not None


class ForwardMode(enum.Enum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5
    DRAFT_EXTEND_V2 = 6

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_extend(self) -> bool:
        return self.name in ("EXTEND", "MIXED", "TARGET_VERIFY")


class AttentionType(enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionBackend:
    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)  # type: ignore[attr-defined]


class RadixAttention(torch.nn.Module):
    def __init__(self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int,
                 layer_id: int, logit_cap: float = 0.0, v_head_dim: int = -1,
                 sliding_window_size: int = -1, is_cross_attention: bool = False,
                 pos_encoding_mode: str = "NONE", logit_capping_method: str = "tanh",
                 attn_type: AttentionType = AttentionType.DECODER,
                 use_irope: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.qk_head_dim = num_heads, num_kv_heads, head_dim
        self.v_head_dim = v_head_dim if v_head_dim != -1 else head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        self.sliding_window_size, self.attn_type = sliding_window_size or -1, attn_type
        self.is_cross_attention, self.use_irope = is_cross_attention, use_irope
        self.pos_encoding_mode = pos_encoding_mode
        self.logit_capping_method, self.xai_temperature_len = logit_capping_method, -1
        self.k_scale = self.v_scale = self.k_scale_float = self.v_scale_float = None


class KVWriteLoc:
    def __init__(self, loc: Any, swa_loc: Any = None) -> None:
        self.loc, self.swa_loc = loc, swa_loc


class MHATokenToKVPool:
    kv_cache_layout = "nhd"

    def __init__(self, size: int, page_size: int, dtype: torch.dtype, head_num: int, head_dim: int,
                 layer_num: int, device: str, enable_memory_saver: bool) -> None:  # fmt: skip
        assert not enable_memory_saver
        self.dtype = dtype
        shape = layer_num, size + page_size, head_num, head_dim
        self.k_buffer, self.v_buffer = (
            list(torch.zeros(shape, dtype=dtype, device=device)) for _ in range(2)
        )

    def set_kv_buffer(self, layer: Any, where: Any, k: Any, v: Any, k_scale: Any = None,
                      v_scale: Any = None, layer_id_override: Any = None) -> None:  # fmt: skip
        number = layer.layer_id if layer_id_override is None else layer_id_override
        slots = getattr(where, "loc", where)
        both = (self.k_buffer, k, k_scale), (self.v_buffer, v, v_scale)
        for buffer, x, scale in both:
            if x.dtype != self.dtype and scale is not None:
                x.div_(scale)
            buffer[number].view(torch.uint8)[slots] = x.to(self.dtype).view(torch.uint8)

    def get_key_buffer(self, layer_id: int) -> Any:
        return self.k_buffer[layer_id]

    def get_value_buffer(self, layer_id: int) -> Any:
        return self.v_buffer[layer_id]


class SWAKVPool:
    """Two pools; a map finds the slots of the second by those of the first."""

    def __init__(self, size: int, size_swa: int, page_size: int, dtype: torch.dtype, head_num: int,
                 head_dim: int, swa_attention_layer_ids: list[int],
                 full_attention_layer_ids: list[int], device: str) -> None:  # fmt: skip
        self.dtype = dtype
        layers = full_attention_layer_ids, swa_attention_layer_ids
        self.full_kv_pool, self.swa_kv_pool = (
            MHATokenToKVPool(n, page_size, dtype, head_num, head_dim, len(ids), device, False)
            for n, ids in zip((size, size_swa), layers, strict=True)
        )
        self.layers_mapping = {
            layer: (i, windowed)
            for windowed, ids in zip((False, True), layers, strict=True)
            for i, layer in enumerate(ids)
        }

    def register_mapping(self, full_to_swa_index_mapping: Any) -> None:
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices: Any) -> Any:
        return self.full_to_swa_index_mapping[kv_indices]

    def set_kv_buffer(self, layer: Any, where: KVWriteLoc, k: Any, v: Any, k_scale: Any = 1.0,
                      v_scale: Any = 1.0) -> None:  # fmt: skip
        number, windowed = self.layers_mapping[layer.layer_id]
        pool, slots = (self.swa_kv_pool, where.swa_loc) if windowed else (
            self.full_kv_pool, where.loc
        )  # fmt: skip
        assert slots is not None
        pool.set_kv_buffer(None, slots, k, v, k_scale, v_scale, layer_id_override=number)

    def get_key_buffer(self, layer_id: int) -> Any:
        number, windowed = self.layers_mapping[layer_id]
        return (self.swa_kv_pool if windowed else self.full_kv_pool).get_key_buffer(number)

    def get_value_buffer(self, layer_id: int) -> Any:
        number, windowed = self.layers_mapping[layer_id]
        return (self.swa_kv_pool if windowed else self.full_kv_pool).get_value_buffer(number)


class MLATokenToKVPool:
    def __init__(self, size: int, page_size: int, dtype: torch.dtype, kv_lora_rank: int,
                 qk_rope_head_dim: int, layer_num: int, device: str,
                 enable_memory_saver: bool) -> None:  # fmt: skip
        assert not enable_memory_saver
        self.dtype, self.kv_lora_rank = dtype, kv_lora_rank
        shape = layer_num, size + page_size, 1, kv_lora_rank + qk_rope_head_dim
        self.kv_buffer = list(torch.zeros(shape, dtype=dtype, device=device))

    def set_kv_buffer(self, layer: Any, where: KVWriteLoc, k: Any, v: Any) -> None:
        assert v.shape[-1] == self.kv_lora_rank
        buffer = self.kv_buffer[layer.layer_id].view(torch.uint8)
        buffer[where.loc] = k.to(self.dtype).view(torch.uint8)

    def get_key_buffer(self, layer_id: int) -> Any:
        return self.kv_buffer[layer_id]


class AttnForwardMethod(enum.Enum):
    MHA = 1
    MLA = 2


class AttentionBackendRegistry:
    _handlers: dict[str, Any] = {}  # noqa: RUF012 as SGLang has it

    @classmethod
    def register(cls, name: str, handler: Any) -> None:
        cls._handlers[name] = handler

    @classmethod
    def get_handler(cls, name: str) -> Any:
        return cls._handlers[name]


ATTENTION_BACKENDS: dict[str, Any] = {}
ATTENTION_BACKEND_CHOICES = ["torch_native"]


def register_attention_backend(name: str) -> Callable[[Any], Any]:
    def keep(make: Any) -> Any:
        ATTENTION_BACKENDS[name] = make
        return make

    return keep


CONTENT: dict[str, list[str]] = {
    "sglang": [],
    "sglang.srt": [],
    "sglang.srt.arg_groups": [],
    "sglang.srt.arg_groups.choices": ["ATTENTION_BACKEND_CHOICES"],
    "sglang.srt.layers": [],
    "sglang.srt.layers.attention": [],
    "sglang.srt.layers.attention.attention_registry": [
        "ATTENTION_BACKENDS",
        "register_attention_backend",
    ],
    "sglang.srt.layers.attention.base_attn_backend": ["AttentionBackend"],
    "sglang.srt.layers.radix_attention": ["AttentionType", "RadixAttention"],
    "sglang.srt.mem_cache": [],
    "sglang.srt.mem_cache.memory_pool": [
        "KVWriteLoc",
        "MHATokenToKVPool",
        "MLATokenToKVPool",
    ],
    "sglang.srt.mem_cache.swa_memory_pool": ["SWAKVPool"],
    "sglang.srt.model_executor": [],
    "sglang.srt.model_executor.forward_batch_info": ["ForwardMode"],
    "sglang.srt.models": [],
    "sglang.srt.models.deepseek_common": [],
    "sglang.srt.models.deepseek_common.attention_backend_handler": [
        "AttentionBackendRegistry",
        "AttnForwardMethod",
    ],
}


def install() -> None:
    """Put the names where SGLang has them, unless it is there itself."""
    if INSTALLED:
        return
    for name, members in CONTENT.items():
        module = sys.modules[name] = ModuleType(name)
        for member in members:
            setattr(module, member, globals()[member])
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


def uninstall() -> None:
    """Leave no trace for the tests of other modules."""
    if not INSTALLED:
        ours = [f"flashbsr.integrations.sglang.{name}" for name in ("backend", "pools")]
        for name in [*CONTENT, *ours]:
            sys.modules.pop(name, None)
