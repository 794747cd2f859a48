# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over dense caches as one operator of programs that PyTorch compiles.

What it does is decided when the program runs: lengths are the host's, and so are plans. A compiler
goes on behind it, and puts it into no CUDA graph. Steps over a static cache on a GPU are other
operators, which plan nothing: graphs hold them (`steps`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ...errors import UnsupportedError
from .common import as_autocast, refuse
from .dense import attention
from .steps import Shape, Told, is_marked, step, step_over, tell

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


def _tell(
    mask: torch.Tensor, pitch: int, heads: list[int], dims: list[int], dtypes: list[str],
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    rows, slots = mask.shape[0], mask.shape[3]
    pairs = (heads[0], heads[1]), (dims[0], dims[1]), (dtypes[0], dtypes[1])
    return tell(mask, pitch, Shape(rows, slots, *pairs, *options))


def _fake_tell(mask: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _once_per_program()
    rows = mask.new_empty((mask.shape[0],), dtype=torch.int32)
    return rows, rows.new_empty((mask.shape[0], mask.shape[3]))


def _step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens: torch.Tensor,
    slots: torch.Tensor, sinks: torch.Tensor | None, scaling: float | None, softcap: float | None,
    sliding_window: int | None,
) -> torch.Tensor:  # fmt: skip
    return step(query, key, value, Told(lens, slots), sinks, scaling, softcap, sliding_window)


def _once_per_program() -> None:
    """Let inductor call `transformers_tell` once for all layers of a program that ask alike.

    It does not look for common subexpressions (PyTorch 2.14): of 16 layers 15 would list and tell
    in vain, ten small launches each. Other compilers, and an inductor with other insides, do so.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    op = torch.ops.flashbsr.transformers_tell.default
    if lowering is None or op in getattr(lowering, "lowerings", (op,)):
        return
    try:
        graph_of, make = lowering.V, lowering.fallback_handler(op, add_to_fallback_set=False)
        register = lowering.register_lowering(op, type_promotion_kind=None)
    except (AttributeError, TypeError):
        return

    def once(*args: Any) -> Any:
        # Names of values of the program, none of which is ever written, and numbers.
        node = graph_of.graph.current_node
        known = vars(graph_of.graph).setdefault("flashbsr_told", {})
        given = repr(node.args)
        if given not in known:
            known[given] = make(*args)
        return known[given]

    register(once)


@functools.cache
def _operator() -> Any:
    """Make the operators: of calls, and the two of steps. None: this PyTorch is older than 2.10."""
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
    operator(
        "transformers_tell(Tensor mask, SymInt pitch, SymInt[] heads, SymInt[] dims, "
        "str[] dtypes, float? scaling, float? softcap, SymInt? sliding_window) -> (Tensor, Tensor)",
        fake=_fake_tell,
        on_gpu=_tell,
    )(_tell)
    operator(
        "transformers_step(Tensor query, Tensor key, Tensor value, Tensor lens, Tensor slots, "
        "Tensor? sinks, float? scaling, float? softcap, SymInt? sliding_window) -> Tensor",
        fake=_fake,
        on_gpu=_step,
    )(_step)
    ops = torch.ops.flashbsr
    steps = ops.transformers_tell.default, ops.transformers_step.default
    return ops.transformers_dense.default, steps


def in_programs() -> Callable[..., Any]:
    """Give `dense.attention`, which is an operator where a compiler reads a program."""
    stopped: Callable[..., Any] = torch.compiler.disable(attention)
    made = _operator()
    if made is None:
        return stopped
    from ..torch.calls import detached, forward_only

    dense, steps = made

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
        given = detached(query), detached(key), detached(value), attention_mask, detached(sinks)
        if query.shape[2] == 1 and is_marked(attention_mask):
            out = step_over(*given, scaling, softcap, window, steps)
        else:
            causal = bool(getattr(module, "is_causal", True))
            out = dense(*given, scaling, window, softcap, is_causal, causal)
        return forward_only((out,), *asked)[0], None

    return called
