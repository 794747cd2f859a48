# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Where compilers' operators come from: they stand above every room, so they are handed down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["operators", "operators_by"]

_load: list[Callable[[], Any]] = []


def operators_by(load: Callable[[], Any]) -> None:
    """Say how to load the operators of compilers."""
    _load[:] = [load]


def operators() -> Any:
    """Load them."""
    return _load[0]()
