# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's classes for latent attention (DeepSeek V2, V3, V3.2), dense and over chosen tokens."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import MLAAttentionImpl, MultipleOf

from ...engine.context import ContextParallel
from ...errors import UnsupportedError
from ...ops.latent import PACKED_BYTES
from . import MERGE
from .backend import MERGES, FlashbsrBuilder, dtype_name
from .chosen import ChosenLayer, ChosenStep, requests_of_rows
from .kinds import BLOCK_MULTIPLE, LATENT_CACHE_DTYPES, latent_problem
from .latent import LatentLayer, LatentStep
from .spread import SpreadRows

__all__ = [
    "ChosenBackend",
    "ChosenBuilder",
    "ChosenImpl",
    "LatentBackend",
    "LatentBuilder",
    "LatentImpl",
]

# Kernels over codes on a GPU have row tiles of so many heads.
HEADS_OF_CODES = 64
# A tile of keys: blocks of as many are copied by one instruction (H200, 64 x 8192: one of a token
# each takes 1.12 times as long).
PREFERRED_BLOCK = 64


class LatentImpl(LatentLayer, MLAAttentionImpl):  # type: ignore[misc]
    """A layer of vLLM."""


class ChosenImpl(ChosenLayer, MLAAttentionImpl):  # type: ignore[misc]
    """A layer of vLLM whose tokens an indexer chooses."""


class LatentBuilder(FlashbsrBuilder):
    """Plans each step for the layers of a group.

    Raises
    ------
    UnsupportedError
        A number of heads that kernels over eight bits do not have.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        layers = vllm_config.compilation_config.static_forward_context
        ranks = FlashbsrBuilder._ranks(vllm_config.parallel_config, kv_cache_spec)
        for name in layer_names:
            layers[name].impl.layer = layers[name]
            layers[name].impl.spread_over(1 if ranks is None else ranks.share.size)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._spread = None if ranks is None else self._rows_of(ranks.share, device)
        for kind in self.steps.kinds:
            odd = kind.num_qo_heads > HEADS_OF_CODES and kind.num_qo_heads % HEADS_OF_CODES
            if kind.kv_dtype and odd and self.steps.place.device is not None:
                wanted = f"up to {HEADS_OF_CODES} or a multiple of it with a cache of eight bits"
                raise UnsupportedError("num_heads", kind.num_qo_heads, wanted)

    @staticmethod
    def _ranks(parallel: Any, kv_cache_spec: Any) -> None:  # noqa: ARG004
        """Nobody: vLLM's layer brings heads together, and merges."""
        return

    def _rows_of(self, share: ContextParallel, device: Any) -> SpreadRows:
        if os.environ.get(MERGE, MERGES[0]) != MERGES[0]:
            raise UnsupportedError(MERGE, os.environ[MERGE], f"{MERGES[0]} with latent attention")
        most = self.vllm_config.scheduler_config.max_num_batched_tokens
        return SpreadRows(share, most, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Plan a step, of which all rows are absorbed."""
        m = common_attn_metadata
        if self._spread is None:
            step = super().build(common_prefix_len, m, fast_build)
            return LatentStep(step, int(m.num_reqs))
        rows = int(m.num_actual_tokens)
        batch = self._spread.batch(self.batch(m), rows, drafts=self.steps.drafts)
        step = self.steps.plan(batch, m.slot_mapping, rows, self._stream())
        return self._spread.step(step, rows)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Plan a step whose runs are captured. Where rows are requests one graph is for all."""
        if self._spread is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        m = common_attn_metadata
        self._capture_rows(m, int(m.block_table_tensor.shape[1]))
        return self.build(0, m)

    def _capture_rows(self, m: Any, pages: int) -> None:
        """Make engines for rows that are requests, of so many pages each."""
        rows = int(m.num_actual_tokens)
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or [0]
        most = max(rows, *sizes)
        self.steps.captures(1, False, rows, requests=most, tokens=most, pages=most * pages)

    def use_cascade_attention(self, *told: Any, **more: Any) -> bool:  # noqa: ARG002
        """Never: prefixes of latents that are told have not been measured."""
        return False


class ChosenBuilder(LatentBuilder):
    """Plans steps whose rows have lists of tokens: each row is a request of its own."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self._spread is not None:
            raise UnsupportedError(
                "decode_context_parallel_size", self._spread.share.size, "1 with chosen tokens"
            )
        layers = vllm_config.compilation_config.static_forward_context
        most, self.topk = layers[layer_names[0]].impl.topk_indices_buffer.shape
        self._requests = torch.empty(most, dtype=torch.int32, device=device)

    def build(
        self,
        common_prefix_len: int,  # noqa: ARG002
        common_attn_metadata: Any,
        fast_build: bool = False,  # noqa: ARG002
    ) -> Any:
        """Plan a step by its number of rows and the lengths that they may have."""
        m = common_attn_metadata
        requests, rows = int(m.num_reqs), int(m.num_actual_tokens)
        batch = self.batch(m).of_rows(self.topk, rows)
        step = self.steps.plan(batch, m.slot_mapping, rows, self._stream())
        of_rows = requests_of_rows(m.query_start_loc[: requests + 1], rows, self._requests)
        block = self.steps.place.page_size
        return ChosenStep(step, requests, of_rows, m.block_table_tensor, block, self.topk)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Plan a step whose runs are captured: one graph for decode steps and for others."""
        self._capture_rows(common_attn_metadata, self.topk)
        return self.build(0, common_attn_metadata)


class LatentBackend(MLACommonBackend):  # type: ignore[misc]
    """What there is."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(LATENT_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """Give the name that vLLM's enumeration has for backends of others."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Give the class of layers."""
        return LatentImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """Give the class that plans."""
        return LatentBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,  # noqa: ARG004
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Latents with their rotated keys, or rows of bytes (vLLM up to 0.28 asks for it)."""
        packed = cache_dtype_str == "fp8_ds_mla"
        return num_blocks, block_size, PACKED_BYTES if packed else head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Blocks first: they may be padded, or hold several layers (likewise)."""
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:  # noqa: ARG004
        """Give the block sizes that vLLM may choose from."""
        return [MultipleOf(BLOCK_MULTIPLE)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Give the block size where the user names none."""
        return max(default_block_size, PREFERRED_BLOCK)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Latent and rotated key together."""
        return [576]

    @classmethod
    def supports_combination(
        cls,
        head_size: int,  # noqa: ARG003
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        *others: Any,
    ) -> str | None:
        """Say why options that are there one by one do not go together."""
        capability = others[-1] if others else None
        found = None if capability is None else int(capability.to_int())
        return latent_problem(dtype_name(dtype), kv_cache_dtype, found)


class ChosenBackend(LatentBackend):
    """What there is where an indexer chooses tokens."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Give the class of layers."""
        return ChosenImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """Give the class that plans."""
        return ChosenBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        """Rows read tokens of a list."""
        return True
