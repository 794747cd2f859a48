# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What dense and paged attention have in common: options, and plans that layers share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...arrays import float_dtype
from ...arrays.dtypes import KV_DTYPES, Q_DTYPES
from ...engine.attention import Attention
from ...engine.task import TaskInfo
from ...errors import UnsupportedError
from ...layout.layouts import Layout
from ...variant.spec import AttentionSpec

__all__ = [
    "Engine", "Kind", "as_autocast", "refuse", "refuse_capture", "sinks_of", "version_of",
]  # fmt: skip

# A step has a few kinds of layers; each engine that is kept has threads and memory of its own.
_MOST_ENGINES = 16


@dataclass(eq=False)
class Engine:
    """An engine, its layout, and what that was made of; None: nothing that could serve again."""

    attention: Attention
    layout: Any = None
    batch: tuple[Any, ...] | None = None


class _Kept(threading.local):
    """A thread's engines, the one used last at the end."""

    def __init__(self) -> None:
        self.engines: OrderedDict[Hashable, Engine] = OrderedDict()


_kept = _Kept()


@dataclass(frozen=True)
class Kind:
    """A kind of layer: those with the same one share a plan in every step."""

    causal: bool
    window_left: int
    scaling: float | None
    softcap: float | None
    kv_layout: str
    group: int = 0  # of layers that have a page table of their own

    def planned(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        heads_and_dim: tuple[int, int],
        batch: tuple[Any, ...],
        layout: Callable[[], Layout],
        options: Callable[[], dict[str, Any]] = dict,
    ) -> Engine:
        """Find the engine of this kind of layer, planned for `batch`.

        Parameters
        ----------
        q : tensor, shape (tokens, heads, head_dim)
        k : tensor
            For its type.
        heads_and_dim : (int, int)
            KV heads, and the head dim of V.
        batch : tuple
            What the layout and the options are made of: numbers, NumPy arrays, objects that are
            others for another mask.
        layout : callable
            Makes the layout.
        options : callable, optional
            Makes the masks for ``Attention.plan``, and what else that is told.
        """
        types = float_dtype(q, "query", Q_DTYPES), float_dtype(k, "key", KV_DTYPES)
        key = self, tuple(q.shape[1:]), heads_and_dim, types, q.device
        engine = _kept.engines.pop(key, None)
        if engine is None:
            spec = AttentionSpec(self.causal, self.window_left, self.scaling, self.softcap)
            task = TaskInfo(
                int(q.shape[1]),
                heads_and_dim[0],
                int(q.shape[2]),
                head_dim_vo=heads_and_dim[1],
                kv_layout=self.kv_layout,
                q_dtype=types[0],
                kv_dtype=types[1],
            )
            engine = Engine(Attention(spec, task))
            engine.attention.settle(q, "query")
        if not _same(engine.batch, batch):
            engine.batch = None  # stays so if plan raises
            engine.layout = layout()
            engine.attention.plan(engine.layout, **options())
            engine.batch = batch
        _kept.engines[key] = engine
        if len(_kept.engines) > _MOST_ENGINES:
            _kept.engines.popitem(last=False)
        return engine


def _same(a: tuple[Any, ...] | None, b: tuple[Any, ...]) -> bool:
    """Whether two batches are: arrays by value, and what is no number by identity."""
    if a is None or len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
            if not np.array_equal(x, y):
                return False
        elif x is not y and x != y:
            return False
    return True


def as_autocast(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast to what autocast has products in, as `sdpa` does there; elsewhere nothing."""
    kind = "cuda" if x[0].is_cuda else x[0].device.type
    if not torch.is_autocast_enabled(kind):
        return x
    return tuple(t.to(torch.get_autocast_dtype(kind)) for t in x)


# What models ask for and this does not do.
_REFUSED = "output_attentions", "position_bias", "head_mask", "sinks", "indices", "block_indices"
_NOT_HERE = frozenset(_REFUSED)


def refuse(
    module: Any, inputs: tuple[torch.Tensor | None, ...], dropout: float, options: dict[str, Any]
) -> None:
    """Raise for what an engine of forward passes does not do.

    Raises
    ------
    UnsupportedError
        Training, dropout, weights as an output, a position bias, sinks of every token, keys that an
        index chose (but `dense` takes those of all heads).
    """
    if dropout:
        raise UnsupportedError(
            "dropout", dropout, "0: call model.eval(), flashbsr is for inference"
        )
    if module.training and torch.is_grad_enabled() and any(map(_asks_for_gradient, inputs)):
        raise UnsupportedError(
            "requires_grad",
            True,
            "inference: model.eval() or torch.no_grad(); train with attn_implementation='sdpa'",
        )
    if not _NOT_HERE.isdisjoint(options):
        _refuse_options(options)


def refuse_capture(query: torch.Tensor) -> None:
    """Raise in a CUDA graph that is captured, for plans are made on the host."""
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "query",
            "a tensor of a CUDA graph that is being captured",
            "no capture, since every step is planned on the host: "
            "ContinuousBatchingConfig(use_cuda_graph=False)",
        )


def _asks_for_gradient(x: torch.Tensor | None) -> bool:
    return x is not None and x.requires_grad


def _refuse_options(options: dict[str, Any]) -> None:
    for name in _REFUSED:
        found = options.get(name)
        if found is not None and found is not False:
            what = "True" if found is True else "a tensor"
            raise UnsupportedError(name, what, "none: attn_implementation='eager' has it")


def sinks_of(s_aux: torch.Tensor | None) -> torch.Tensor | None:
    """Sinks as the engine takes them."""
    return None if s_aux is None else s_aux.detach().float()


def version_of(x: torch.Tensor) -> int | None:
    """How often a mask was written; None: nobody counts, under ``torch.inference_mode()``."""
    return None if x.is_inference() else x._version
