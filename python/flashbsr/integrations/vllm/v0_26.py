# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.25 to 0.28: the backend names the shape of the cache. Tested with 0.26.0."""

from __future__ import annotations

from typing import Any

from .backend import FlashbsrBackend

__all__ = ["Backend"]


class Backend(FlashbsrBackend):
    """The backend of these versions."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",  # noqa: ARG004
    ) -> tuple[int, ...]:
        """Keys and values side by side."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Blocks first: they may be padded, or hold several layers."""
        return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """Tokens of a head side by side: a page is one box for the copy engine."""
        return "HND"

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:  # noqa: ARG004
        """Never told to: the plan shares what is worth it."""
        return False
