# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""SGLang's caches: which of them the engine reads, and where in them a layer's tokens lie."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from ...errors import UnsupportedError
from ..vllm.kinds import combination_problem, latent_problem

__all__ = ["Pools"]

# Types of a cache beside the model's own -> vLLM's names of them.
EIGHT_BITS = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


class Pools:
    """The cache of a model's layers, in one pool, or in two where some layers have windows.

    Parameters
    ----------
    pool : MHATokenToKVPool, MLATokenToKVPool or SWAKVPool
        Keys and values, latents, or keys and values of full and of sliding layers, whose slots are
        found by a map from those of full layers.
    page_size : int
    dtype : torch.dtype
        Of the model; the cache has it too, or is float8.

    Attributes
    ----------
    latent : int
        Dims of the latents in the cache; 0: it has keys and values.
    kv_cache_dtype : str
        ``auto``, ``fp8_e4m3`` or ``fp8_e5m2``.

    Raises
    ------
    UnsupportedError
        Another pool or another type.
    """

    def __init__(self, pool: Any, page_size: int, dtype: torch.dtype) -> None:
        self.pool, self.page_size = pool, page_size
        parts = [pool]
        if type(pool) is SWAKVPool:
            parts = [pool.full_kv_pool, pool.swa_kv_pool]
        self.latent = int(pool.kv_lora_rank) if type(pool) is MLATokenToKVPool else 0
        for part in parts:
            plain = type(part) is MHATokenToKVPool and part.kv_cache_layout == "nhd"
            if not (plain or self.latent):
                wanted = "MHATokenToKVPool in NHD, two of them in a SWAKVPool, or MLATokenToKVPool"
                raise UnsupportedError("token_to_kv_pool", type(part).__name__, wanted)
        names = {dtype: "auto", **EIGHT_BITS}
        if pool.dtype not in names:
            wanted = f"{dtype}, that of the model, or float8: --kv-cache-dtype auto"
            raise UnsupportedError("kv_cache_dtype", pool.dtype, wanted)
        self.kv_cache_dtype = names[pool.dtype]

    def check(self, head_dim: int, dtype: str, capability: int | None) -> None:
        """Raise `UnsupportedError` where head dim, types and GPU do not go together."""
        kv = self.kv_cache_dtype
        if self.latent:
            problem = latent_problem(dtype, kv, capability)
            if kv == "fp8_e5m2":
                problem = "latents in float8_e5m2"
        else:
            problem = combination_problem(head_dim, dtype, kv, capability)
        if problem and kv == "auto":
            raise UnsupportedError("attention_backend", problem, "another backend")
        if problem:
            raise UnsupportedError("kv_cache_dtype", problem, "--kv-cache-dtype auto")

    def windowed(self, layer_id: int) -> bool:
        """Tell whether a layer's tokens are in the second pool."""
        return type(self.pool) is SWAKVPool and bool(self.pool.layers_mapping[layer_id][1])

    def tables_of_windows(self, tables: torch.Tensor) -> torch.Tensor:
        """Give the pages of the second pool, of tokens whose pages in the first are given.

        What windows have passed is nowhere; its pages are 0, and nobody reads them.
        """
        if self.page_size == 1:
            return self.slots_of_windows(tables)
        return self.slots_of_windows(tables * self.page_size) // self.page_size

    def slots_of_windows(self, slots: torch.Tensor) -> torch.Tensor:
        """Likewise, of slots."""
        found: torch.Tensor = self.pool.translate_loc_from_full_to_swa(slots)
        return found

    def write(self, layer: Any, slots: Any, of_windows: Any, k: Any, v: Any) -> None:
        """Write keys and values of new tokens, divided by the layer's scales if that is asked."""
        scales: tuple[Any, ...] = ()
        if self.kv_cache_dtype != "auto" and not self.latent:
            scales = layer.k_scale, layer.v_scale
        self.pool.set_kv_buffer(layer, KVWriteLoc(slots, of_windows), k, v, *scales)

    def scales(self, layer: Any) -> dict[str, Any]:
        """Give the numbers that the layer's keys and values in the cache are multiplied by."""
        if self.kv_cache_dtype == "auto" or self.latent:
            return {}
        numbers = {"k_scale": layer.k_scale_float, "v_scale": layer.v_scale_float}
        return {name: float(x) for name, x in numbers.items() if x is not None}

    def cache(self, layer_id: int, *, latent: bool) -> Any:
        """Keys and values as ``(pages, heads, page, dim)``, views of the slots.

        Latents with their rotated keys are one array, ``(pages, page, dims)``.
        """
        k, shape = self.pool.get_key_buffer(layer_id), (-1, self.page_size)
        if latent:
            return k[:, 0].unflatten(0, shape)
        v = self.pool.get_value_buffer(layer_id)
        return k.unflatten(0, shape).transpose(1, 2), v.unflatten(0, shape).transpose(1, 2)
