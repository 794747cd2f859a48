# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.25 to 0.28: the backend names the shape of the cache. Tested with 0.26.0."""

from __future__ import annotations

from typing import Any

from .backend import FlashbsrBackend
from .kinds import bytes_of_slot, scales_of_tokens

__all__ = ["Backend"]


class Backend(FlashbsrBackend):
    """The backend of these versions."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Keys and values side by side; and their scales, where every token has some."""
        width = 2 * head_size
        if scales_of_tokens(cache_dtype_str):
            width = bytes_of_slot(cache_dtype_str, head_size)
        return num_blocks, num_kv_heads, block_size, width

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Blocks first: they may be padded, or hold several layers."""
        return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """Tokens of a head side by side: a page is one box for the copy engine."""
        return "HND"

    @classmethod
    def validate_configuration(cls, **selected: Any) -> list[str]:
        """List the reasons against a configuration of a GPU; none: it can be had."""
        reasons = super().validate_configuration(**selected)
        if scales_of_tokens(selected.get("kv_cache_dtype")):
            reasons.append("scales of tokens on a GPU: this vLLM leaves no room to align codes")
        return reasons

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:  # noqa: ARG004
        """Never told to: the plan shares what is worth it."""
        return False
