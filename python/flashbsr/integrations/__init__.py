# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Doors for who works inside a framework or has a program for another library.

Those of a framework import it, and nothing else does.

They rename, fill in defaults and pass on; what computes is `flashbsr`.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["flash_attn", "flash_mla", "flex_attention", "jax", "torch", "transformers", "vllm"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
