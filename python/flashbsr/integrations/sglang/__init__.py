# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""SGLang: flashbsr as an attention backend.

SGLang finds `register` by an entry point and calls it in every process, so that one option is all::

    python -m sglang.launch_server --model-path MODEL --attention-backend flashbsr

docs/sglang.md has what is supported.
"""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["NAME", "register"]

NAME = "flashbsr"


def register() -> None:
    """Make the backend known to SGLang as ``flashbsr``.

    The backend is imported when SGLang makes one. May be called any number of times. A SGLang
    without such a registry is left alone, with a warning.
    """
    try:
        from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError as error:
        warnings.warn(f"flashbsr is no backend of this SGLang: {error}", stacklevel=2)
        return
    register_attention_backend(NAME)(_make)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(NAME)


def _make(runner: Any) -> Any:
    from .backend import FlashbsrAttnBackend

    backend = FlashbsrAttnBackend(runner)
    if backend.pools.latent:
        _absorb_all()
    return backend


def _absorb_all() -> None:
    """Have SGLang's models of latent attention absorb the queries of all steps.

    They would expand the keys of prompts otherwise, and ask for attention beside the cache.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    method = handler.AttnForwardMethod.MLA
    handler.AttentionBackendRegistry.register(NAME, lambda *_: method)
