# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM from 0.29 on: the engine decides how the cache lies. Tested with 0.32.0."""

from __future__ import annotations

from .backend import FlashbsrBackend

__all__ = ["Backend"]


class Backend(FlashbsrBackend):
    """The backend of these versions."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> None:
        """Any: kernels go by strides."""
        return
