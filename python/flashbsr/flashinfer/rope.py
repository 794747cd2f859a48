# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings: those of `flashbsr`, whose names, order and defaults are FlashInfer's."""

from __future__ import annotations

from ..ops import rope
from ..ops.rope import *  # noqa: F403

__all__ = rope.__all__
