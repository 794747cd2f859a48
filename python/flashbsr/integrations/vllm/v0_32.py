# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM from 0.29 on: the engine decides how the cache lies. Tested with 0.32.0."""

from __future__ import annotations

import dataclasses
from typing import Any

from .backend import FlashbsrBackend
from .kinds import ALIGNMENT, bytes_of_slot, scales_of_tokens

__all__ = ["Backend"]


class Backend(FlashbsrBackend):
    """The backend of these versions."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Leave room for scales where every token has some, and begin rows aligned."""
        name = str(spec.kv_quant_mode.name).lower()
        if not scales_of_tokens(name) or spec.state_content_bytes is not None:
            return spec
        least = bytes_of_slot(name, spec.head_size)
        return dataclasses.replace(spec, state_content_bytes=-(-least // ALIGNMENT) * ALIGNMENT)

    @classmethod
    def supported_kv_cache_layouts(cls) -> None:
        """Any: kernels go by strides."""
        return
