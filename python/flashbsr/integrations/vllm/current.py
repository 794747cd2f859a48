# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The backend for the vLLM that is installed. vLLM imports it when it is chosen."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionBackend

__all__ = ["Backend"]


def _chosen() -> Any:
    """By what the class has, not by a version: builds from source have odd ones."""
    if hasattr(AttentionBackend, "get_kv_cache_shape"):
        from . import v0_26 as generation
    else:
        from . import v0_32 as generation  # type: ignore[no-redef]
    return generation.Backend


Backend = _chosen()
