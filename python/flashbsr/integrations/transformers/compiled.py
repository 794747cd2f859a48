# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over dense caches as one operator of programs that PyTorch compiles.

What it does is decided when the program runs: lengths are the host's, and so are plans. A compiler
goes on behind it, and puts it into no CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ...errors import UnsupportedError
from .common import as_autocast, refuse
from .dense import attention

__all__ = ["in_programs"]

# What an operator asks of a layer, by whether that is causal.
_LAYERS = tuple(SimpleNamespace(training=False, is_causal=causal) for causal in (False, True))


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    sinks: torch.Tensor | None, scaling: float | None, sliding_window: int | None,
    softcap: float | None, is_causal: bool | None, causal_layer: bool,
) -> torch.Tensor:  # fmt: skip
    return attention(
        _LAYERS[causal_layer], query, key, value, mask, scaling, 0.0, sliding_window, softcap,
        is_causal, sinks,
    )[0]  # fmt: skip


def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    rows = key.shape[0] if query.shape[0] == 1 else query.shape[0]
    return query.new_empty((rows, query.shape[2], query.shape[1], value.shape[3]))


@functools.cache
def _operator() -> Any:
    """Make the operator; None: this PyTorch is older than 2.10."""
    try:
        from ..torch.library import operator
    except UnsupportedError:
        return None
    operator(
        "transformers_dense(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? sinks, "
        "float? scaling, SymInt? sliding_window, float? softcap, bool? is_causal, "
        "bool causal_layer) -> Tensor",
        fake=_fake,
        on_gpu=_dense,
        plans=True,
    )(_dense)
    return torch.ops.flashbsr.transformers_dense.default


def in_programs() -> Callable[..., Any]:
    """Give `dense.attention`, which is an operator where a compiler reads a program."""
    stopped: Callable[..., Any] = torch.compiler.disable(attention)
    made = _operator()
    if made is None:
        return stopped
    from ..torch.calls import detached, forward_only

    @functools.wraps(attention)
    def called(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        # To compilers a constant. Outside of programs they must not look into it either, which
        # they do where they gave up a caller. What an index chose is read on the host.
        if not torch.compiler.is_compiling() or options.get("indices") is not None:
            result: tuple[torch.Tensor, None] = stopped(
                module, query, key, value, attention_mask, scaling, dropout, **options
            )
            return result
        names = "sliding_window", "softcap", "is_causal", "s_aux"
        window, softcap, is_causal, sinks = (options.pop(name, None) for name in names)
        refuse(module, (query, key, value, sinks), dropout, options)
        asked = query, key, value, sinks
        query, key, value = as_autocast(query, key, value)
        out = made(
            detached(query), detached(key), detached(value), attention_mask, detached(sinks),
            scaling, window, softcap, is_causal, bool(getattr(module, "is_causal", True)),
        )  # fmt: skip
        return forward_only((out,), *asked)[0], None

    return called
