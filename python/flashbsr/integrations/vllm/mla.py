# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's classes for latent attention (DeepSeek V2 and V3): in place of its CPU backends for it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import AttentionCGSupport, MLAAttentionImpl, MultipleOf

from ...errors import UnsupportedError
from .backend import FlashbsrBuilder
from .kinds import BLOCK_MULTIPLE
from .latent import LatentLayer, LatentStep

__all__ = ["LatentBackend", "LatentBuilder", "LatentImpl"]


class LatentImpl(LatentLayer, MLAAttentionImpl):  # type: ignore[misc]
    """A layer of vLLM."""


class LatentBuilder(FlashbsrBuilder):
    """Plans each step for the layers of a group.

    Raises
    ------
    UnsupportedError
        A GPU: vLLM's layer and its graphs have not been tried there with these classes.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        if torch.device(device).type != "cpu":
            raise UnsupportedError("device", device, "the CPU, or another backend with MLA")
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:  # noqa: ARG003
        """None: there is no GPU."""
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Plan a step, of which all rows are absorbed."""
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return LatentStep(step, int(common_attn_metadata.num_reqs))


class LatentBackend(MLACommonBackend):  # type: ignore[misc]
    """What there is."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Give the name that vLLM's enumeration has for backends of others."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[LatentImpl]:
        """Give the class of layers."""
        return LatentImpl

    @staticmethod
    def get_builder_cls() -> type[LatentBuilder]:
        """Give the class that plans."""
        return LatentBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:  # noqa: ARG004
        """Give the block sizes that vLLM may choose from."""
        return [MultipleOf(BLOCK_MULTIPLE)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Latent and rotated key together."""
        return [576]
