# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The backend for the vLLM that is installed, and the model that is being made.

vLLM asks for ``Backend`` by its name when it has chosen it, and has one name for the backends of
others: models of latent attention get theirs by it, too.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend

__all__ = ["GENERATION", "chosen"]


def _generation() -> Any:
    """By what the class has, not by a version: builds from source have odd ones."""
    if hasattr(AttentionBackend, "get_kv_cache_shape"):
        from . import v0_26 as generation
    else:
        from . import v0_32 as generation  # type: ignore[no-redef]
    return generation.Backend


GENERATION = _generation()


def chosen(model: Any) -> Any:
    """Give the backend for a model's configuration: of latent attention, sparse or not, or not."""
    if model is None or not model.use_mla:
        return GENERATION
    from . import mla

    sparse = hasattr(model.hf_text_config, "index_topk")
    return mla.ChosenBackend if sparse else mla.LatentBackend


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    config = get_current_vllm_config_or_none()
    return chosen(None if config is None else config.model_config)
