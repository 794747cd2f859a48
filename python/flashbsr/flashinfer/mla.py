# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over MLA's compressed cache is not here yet; its cache writes are."""

from __future__ import annotations

from .page import append_paged_mla_kv_cache

__all__ = ["append_paged_mla_kv_cache"]


def __getattr__(name: str) -> None:
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}: attention over a compressed cache (MLA) "
        "is not in flashbsr; up-project to keys and values, whose head dims may differ "
        "(head_dim_qk, head_dim_vo)"
    )
