# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: attention of its models by flashbsr.

    flashbsr.integrations.transformers.register()
    model.set_attn_implementation("fbsr")

``generate`` runs as before, with dynamic and static caches; `continuous` is for ``generate_batch``.
docs/transformers.md says what is supported.
"""

from .register import NAME, continuous, register

__all__ = ["NAME", "continuous", "register"]
