# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What layers compute, and what of it the engine has. Knows vLLM's names and imports nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ...arrays.dtypes import PACKED_LATENTS
from ...engine.attention import Attention
from ...engine.task import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, TaskInfo
from ...errors import UnsupportedError
from ...variant.spec import AttentionSpec

__all__ = [
    "ATTN_TYPES",
    "BLOCK_MULTIPLE",
    "FIXED_SPLIT",
    "KV_CACHE_DTYPES",
    "LATENT_CACHE_DTYPES",
    "Kind",
    "bytes_of_slot",
    "combination_problem",
    "kind_of",
    "latent_kind",
    "latent_problem",
    "scales_of_tokens",
    "takes_head_size",
]

# vLLM's name of a cache's type -> the engine's; None: the model's own.
KV_CACHE_DTYPES: dict[str, str | None] = {
    "auto": None,
    "float16": None,
    "bfloat16": None,
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8_per_token_head": "int8",
    "fp8_per_token_head": "float8_e4m3fn",
    "int4_per_token_head": "int4",
}
# Likewise, of a cache of latents. Rows of 656 bytes have scales of their own.
LATENT_CACHE_DTYPES: dict[str, str | None] = {
    "auto": None,
    "float16": None,
    "bfloat16": None,
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_ds_mla": PACKED_LATENTS,
}
# A copy of rows on a GPU begins at a multiple of so many bytes.
ALIGNMENT = 16
# Over a cache, and over the keys of the step alone.
CACHED = ("decoder", "encoder_decoder")
RAGGED = ("encoder", "encoder_only")
ATTN_TYPES = CACHED + RAGGED
# Any page would do. But vLLM takes the least that is offered for layers with a window, and pages of
# one token are read one by one.
BLOCK_MULTIPLE = 16
# Packed query rows (of a KV head) that the tiles of decode kernels hold, the lowest first; more
# take tiles of 64 and more.
DECODE_TILES = (8, 16)
MIXED_DIM = 128  # most dims of a head in kernels for mixed batches
# Tokens of a part in batch-invariant mode: 32 000 tokens are 16 parts for each KV head.
FIXED_SPLIT = 2048


@dataclass(frozen=True, eq=False, slots=True)
class Kind:
    """What a layer computes. Layers of one kind share a plan; equal ones are the same object."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    window_left: int
    logits_soft_cap: float
    alibi: bool
    kv_dtype: str | None
    ragged: bool
    latent: int = 0  # dims of the latent, which are the values; 0: keys and values apart

    def graphs_share(self, tokens: int) -> bool:
        """Tell whether a captured run of so many query tokens of a request can share a prefix.

        Its kernel was chosen for the rows of one request, and has to have room for two in a tile.
        """
        rows = tokens * (self.num_qo_heads // self.num_kv_heads)
        return next((2 * rows <= tile for tile in DECODE_TILES if rows <= tile), True)

    def mixes(self, tokens: int) -> bool:
        """Tell whether the kernel for mixed batches has such layers, and requests of its low tiles.

        To decode alone it takes longer than the kernel for that, 77 us in place of 61 for 64
        requests of 1000 tokens (H200); 64 that share 8000 take 43 us in place of 162.
        """
        plain = not (self.alibi or self.logits_soft_cap or self.kv_dtype or self.latent)
        rows = tokens * (self.num_qo_heads // self.num_kv_heads)
        whole = self.window_left < 0 and not self.ragged
        return plain and whole and rows <= DECODE_TILES[0] and self.head_dim <= MIXED_DIM

    def attention(self, causal: bool, q_dtype: str, **task: Any) -> Attention:
        """Make an engine for arrays of `q_dtype`; `task` has what else `TaskInfo` takes.

        Where ranks share the keys of a request, it has the query heads of all of them, and what it
        finds is a part of a sum: float32.
        """
        share = task.get("context_parallel")
        if share is not None:
            task["o_dtype"] = "float32"
        spec = AttentionSpec(
            causal=causal,
            window_left=self.window_left,
            sm_scale=self.sm_scale,
            logits_soft_cap=self.logits_soft_cap or None,
            pos_encoding_mode="ALIBI" if self.alibi else "NONE",
        )
        info = TaskInfo(
            self.num_qo_heads * (1 if share is None else share.size),
            self.num_kv_heads,
            self.head_dim,
            kv_layout="NHD" if self.ragged or self.latent else "HND",
            head_dim_vo=self.latent or None,
            latent=bool(self.latent),
            q_dtype=q_dtype,
            kv_dtype=self.kv_dtype or q_dtype,
            **task,
        )
        return Attention(spec, info)


@functools.cache
def kind_of(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float,
    alibi: bool,
    kv_cache_dtype: str,
    attn_type: str,
) -> Kind:
    """Translate a layer's options, of hashable types.

    Raises
    ------
    UnsupportedError
        A head size, a type of the cache or a kind of attention that the engine does not have.
    """
    if not takes_head_size(head_size):
        wanted = f"a multiple of {HEAD_DIM_MULTIPLE}, at most {MAX_HEAD_DIM}"
        raise UnsupportedError("head_size", head_size, wanted)
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        wanted = f"one of {', '.join(KV_CACHE_DTYPES)}"
        raise UnsupportedError("kv_cache_dtype", kv_cache_dtype, wanted)
    if attn_type not in ATTN_TYPES:
        raise UnsupportedError("attn_type", attn_type, f"one of {', '.join(ATTN_TYPES)}")
    ragged = attn_type in RAGGED
    if ragged and sliding_window is not None:
        wanted = "None: windows of an encoder are open on both sides, the engine's on the left"
        raise UnsupportedError("sliding_window", sliding_window, wanted)
    return Kind(
        num_heads,
        num_kv_heads,
        head_size,
        scale,
        # vLLM counts the query itself.
        -1 if sliding_window is None else sliding_window - 1,
        logits_soft_cap,
        alibi,
        None if ragged else KV_CACHE_DTYPES[kv_cache_dtype],
        ragged,
    )


@functools.cache
def latent_kind(
    num_heads: int, head_size: int, latent: int, scale: float, kv_cache_dtype: str = "auto"
) -> Kind:
    """Give the kind of layers that read one latent, of `head_size` dims with its rotated key.

    Queries are absorbed; `scale` follows from the head dim before that.

    Raises
    ------
    UnsupportedError
        A type of the cache that latents do not have.
    """
    if kv_cache_dtype not in LATENT_CACHE_DTYPES:
        wanted = f"one of {', '.join(LATENT_CACHE_DTYPES)}"
        raise UnsupportedError("kv_cache_dtype", kv_cache_dtype, wanted)
    stored = LATENT_CACHE_DTYPES[kv_cache_dtype]
    return Kind(num_heads, 1, head_size, scale, -1, 0.0, False, stored, False, latent)


def takes_head_size(head_size: int) -> bool:
    """Tell whether the engine has the head dim."""
    return 0 < head_size <= MAX_HEAD_DIM and head_size % HEAD_DIM_MULTIPLE == 0


def scales_of_tokens(kv_cache_dtype: str | None) -> bool:
    """Tell whether the cache has a scale of every token and head, which it makes by itself."""
    return (kv_cache_dtype or "").endswith("_per_token_head")


def bytes_of_slot(kv_cache_dtype: str, head_size: int) -> int:
    """Give the bytes of a token and head where `scales_of_tokens`: codes of K and V, their scales.

    Without what pads them.
    """
    codes = head_size if kv_cache_dtype == "int4_per_token_head" else 2 * head_size
    return codes + 2 * 4  # float32


def combination_problem(
    head_size: int, dtype: str, kv_cache_dtype: str | None, capability: int | None
) -> str | None:
    """Say why options that are there one by one do not go together, or None.

    Parameters
    ----------
    head_size : int
    dtype : str
        Of queries: float32, float16 or bfloat16.
    kv_cache_dtype : str, optional
        vLLM's name.
    capability : int, optional
        Ten times the compute capability of the GPU, as 90; None: the CPU.
    """
    kv = kv_cache_dtype or "auto"
    if (common := _type_problem(dtype, kv, capability)) or capability is None:
        return common
    if capability < 75:
        return f"compute capability {capability / 10}: kernels begin at 7.5"
    if capability < 80 and dtype != "float16":
        return f"{dtype} needs compute capability 8.0, the GPU has {capability / 10}: 'float16'"
    if scales_of_tokens(kv):
        if kv != "int8_per_token_head" or dtype != "bfloat16" or head_size not in (64, 128):
            return (
                f"a {kv} KV cache of head size {head_size} with {dtype} queries on a GPU: there is "
                "int8_per_token_head with bfloat16, of 64 or 128"
            )
        return None if capability >= 80 else "int8_per_token_head needs compute capability 8.0"
    if KV_CACHE_DTYPES.get(kv) and head_size % 16:
        return f"an fp8 KV cache needs a head size that is a multiple of 16, not {head_size}"
    return None


def latent_problem(dtype: str, kv_cache_dtype: str | None, capability: int | None) -> str | None:
    """Say the same of latent attention; the arguments are those of `combination_problem`."""
    kv = kv_cache_dtype or "auto"
    if (common := _type_problem(dtype, kv, capability)) or capability is None:
        return common
    if capability < 80:
        return f"latent attention needs compute capability 8.0, the GPU has {capability / 10}"
    if LATENT_CACHE_DTYPES.get(kv) and capability // 10 != 9:
        return (
            f"a {kv} cache of latents needs compute capability 9.0, the GPU has {capability / 10}: "
            "'auto'"
        )
    return None


def _type_problem(dtype: str, kv: str, capability: int | None) -> str | None:
    if kv in ("float16", "bfloat16") and kv != dtype:
        return f"a {kv} KV cache needs {kv} queries, not {dtype} (kv_cache_dtype='auto')"
    if capability is not None and dtype == "float32":
        return "float32 is computed on the CPU only: dtype='bfloat16' or 'float16'"
    return None
