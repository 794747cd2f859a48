# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM: flashbsr as an attention backend.

vLLM finds `register` by an entry point and calls it in every process, so that one option is all::

    vllm serve MODEL --attention-backend CUSTOM

Models of latent attention have theirs by the same name. On the CPU, where vLLM has no choice of
backends, the environment says whose place to take: ``FLASHBSR_VLLM_OVERRIDE=CPU_ATTN``; for latent
attention ``AMX_MLA`` or ``CPU_MLA``, too. With ``FLASHBSR_VLLM_MERGE=peers`` GPUs of one host that
share a cache (decode context parallelism) merge through each other's memory.
docs/vllm.md has what is supported.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence

__all__ = ["BACKEND", "CHOSEN_BACKEND", "LATENT_BACKEND", "MERGE", "OVERRIDE", "register"]

BACKEND = "flashbsr.integrations.vllm.current.Backend"
LATENT_BACKEND = "flashbsr.integrations.vllm.mla.LatentBackend"
CHOSEN_BACKEND = "flashbsr.integrations.vllm.mla.ChosenBackend"
OVERRIDE = "FLASHBSR_VLLM_OVERRIDE"
MERGE = "FLASHBSR_VLLM_MERGE"


def register(override: Sequence[str] | None = None) -> None:
    """Make the backend known to vLLM: as ``CUSTOM``, and in place of others.

    Nothing is imported but vLLM's list of backends; the backend is when vLLM chooses it. May be
    called any number of times. A vLLM without such a list is left alone, with a warning.

    Parameters
    ----------
    override : sequence of str, optional
        Names of vLLM's backends whose place to take too. Default: those in the environment's
        ``FLASHBSR_VLLM_OVERRIDE``, separated by commas. Those whose names end in ``MLA`` make
        place for the backend of latent attention, with ``_SPARSE`` for that of chosen tokens.
    """
    if override is None:
        override = os.environ.get(OVERRIDE, "").split(",")
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        warnings.warn(f"flashbsr is no backend of this vLLM: {error}", stacklevel=2)
        return
    known = AttentionBackendEnum.__members__
    for name in ("CUSTOM", *(name.strip() for name in override)):
        if name in known:
            register_backend(known[name], _path(name))
        elif name:
            warnings.warn(f"vLLM has no attention backend {name!r} to take the place of; it has "
                          f"{', '.join(known)}", stacklevel=2)  # fmt: skip


def _path(name: str) -> str:
    """Give the class that takes the place of a backend of vLLM."""
    if re.search(r"MLA_SPARSE(_SM\d+)?$", name):
        return CHOSEN_BACKEND
    return LATENT_BACKEND if name.endswith("MLA") else BACKEND
