# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Bits of masks: those of `flashbsr`."""

from __future__ import annotations

from ..ops.bits import packbits, segment_packbits

__all__ = ["packbits", "segment_packbits"]
