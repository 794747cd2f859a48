# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Steps of a token for each row over a static cache on a GPU, of which the host reads nothing.

What a query sees is a mask on the device, a boolean for each slot of the cache. The slots that it
keeps are a list of pages of one token, whatever their pattern is: padding, holes, a ring. The
engine is planned once, from the number of slots as a bound, and told lists and lengths where they
are. So a step is launches alone, and a CUDA graph can hold it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch

from ...arrays import torch as adapter
from ...engine.attention import Attention
from ...engine.task import TaskInfo
from ...errors import ShapeError
from ...layout.bounds import Bounds
from ...variant.spec import AttentionSpec
from .common import sinks_of, version_of

__all__ = [
    "Shape", "Told", "is_marked", "listed", "marked", "rows_alike", "step", "step_over", "tell",
]  # fmt: skip

# Strides of a mask's two dimensions of size 1, where they are nobody's business.
_MARK = 1, 2

# Each holds memory for the lists of its rows. Graphs keep what they run, whoever else lets go, but
# one that inductor captures again, since another cache lies elsewhere, needs an engine that is
# planned: none can be in a capture.
_MOST_ENGINES = 32
_MOST_MASKS = 4  # kinds of layers of a step


class Told(NamedTuple):
    """Lengths ``(B,)`` and slots ``(B, S)`` of a step, int32, on the device.

    Slots count tokens from the first one of the first row. Behind a row's length they mean nothing.
    """

    lens: torch.Tensor
    slots: torch.Tensor


class Shape(NamedTuple):
    """What an engine is made and planned for, once."""

    rows: int
    slots: int
    heads: tuple[int, int]  # of queries and of keys
    dims: tuple[int, int]  # of keys and of values
    dtypes: tuple[str, str]
    scaling: float | None
    softcap: float | None
    window: int | None  # which is the mask's, but tells kinds of layers apart that take turns


class _Engine:
    """An engine that is never planned again: graphs that were captured follow its one plan."""

    def __init__(self, shape: Shape, like: torch.Tensor) -> None:
        rows, slots = shape.rows, shape.slots
        task = TaskInfo(
            *shape.heads,
            shape.dims[0],
            head_dim_vo=shape.dims[1],
            kv_layout="HND",
            q_dtype=shape.dtypes[0],
            kv_dtype=shape.dtypes[1],
            max_batch_size=rows,
            max_q_tokens=rows,
            max_kv_pages=rows * slots,
        )
        spec = AttentionSpec(sm_scale=shape.scaling, logits_soft_cap=shape.softcap)
        self.attention = Attention(spec, task)
        self.attention.settle(like)
        self.attention.plan(Bounds(None, np.full(rows, slots), page_size=1))
        self._knows: tuple[int, bool] | None = None

    def tell(self, told: Told) -> None:
        """Say how long rows are, and where their tokens lie."""
        self._knows = None  # stays so if it raises
        self.attention.update(told.lens, told.slots)
        # Kept for a run that must plan anew, which this engine's need not. They are in the memory
        # of a graph, where inductor finds and refuses what lives on.
        self.attention._lengths = ()
        self._knows = told.lens.data_ptr(), _capturing(told.lens)

    def know(self, told: Told) -> None:
        """Tell what `tell`, the operator, did not tell last.

        Its lengths are an array of their own which lives as long as somebody asks by it: another
        one at the same address came after it, and was told when it was made. A capture has a
        launch of its own: what was told before is not in the graph.
        """
        if self._knows != (told.lens.data_ptr(), _capturing(told.lens)):
            self.tell(told)


class _Steps(threading.local):
    """A thread's engines, the one used last at the end, and the last masks outside of programs."""

    def __init__(self) -> None:
        self.engines: OrderedDict[tuple[Shape, torch.device, bool], _Engine] = OrderedDict()
        self.told: list[tuple[torch.Tensor, int, dict[tuple[Shape, int], Told]]] = []

    def find(self, shape: Shape, like: torch.Tensor, eager: bool) -> _Engine:
        """Find the engine of these shapes where `like` is, or make it.

        Eager calls have their own: a replay of a graph tells without a word to the host, and what
        was told to an eager call may be asked for again, whatever ran in between.
        """
        key = shape, like.device, eager
        engine = self.engines.pop(key, None) or _Engine(shape, like)
        self.engines[key] = engine
        if len(self.engines) > _MOST_ENGINES:
            self.engines.popitem(last=False)
        return engine


_steps = _Steps()


def _capturing(x: torch.Tensor) -> bool:
    return adapter.device(x) is not None and bool(torch.cuda.is_current_stream_capturing())


def marked(mask: torch.Tensor) -> torch.Tensor:
    """Mark a boolean mask ``(B, 1, 1, S)`` as one of a step over a static cache.

    Its strides say so. To models that compute with it, it is the mask that `sdpa` gets, and what
    they make of it is none of ours; compilers know strides of what a program is given.
    """
    mask = mask.contiguous()
    return mask.as_strided(mask.shape, (mask.shape[3], *_MARK, 1), mask.storage_offset())


def is_marked(mask: torch.Tensor | None) -> bool:
    """Tell whether `marked` made it. Whatever else should look so is understood as well."""
    if mask is None or mask.dtype != torch.bool or mask.ndim != 4:
        return False
    return bool(mask.shape[1] == mask.shape[2] == 1 and mask.stride()[1:3] == _MARK)


def shape_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any) -> Shape:
    """Give what a layer's engine is made for: query ``(B, H_q, 1, D)``, key ``(B, H_kv, S, D)``."""
    rows, kv_heads, slots, dim = key.shape
    # By their names: compilers read this.
    types = str(query.dtype).removeprefix("torch."), str(key.dtype).removeprefix("torch.")
    heads, dims = (query.shape[1], kv_heads), (dim, value.shape[3])
    return Shape(rows, slots, heads, dims, types, *options)


def rows_alike(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether rows of both are the same whole number of tokens apart."""
    (a, _, b, _), (c, _, d, _) = key.stride(), value.stride()
    return len(key) == 1 or (a % b == 0 and c % d == 0 and a // b == c // d)


def pitch_of(key: torch.Tensor) -> int:
    """Tokens from one row to the next in memory; 0: there is none."""
    return 0 if key.shape[0] == 1 else key.stride(0) // key.stride(2)


def listed(mask: torch.Tensor, pitch: int) -> Told:
    """List the slots that a mask ``(B, 1, 1, S)`` keeps, of rows `pitch` tokens apart."""
    rows, slots = mask.shape[0], mask.shape[3]
    kept = mask[:, 0, 0].cumsum(-1, dtype=torch.int32)
    wanted = torch.arange(1, slots + 1, dtype=torch.int32, device=mask.device)
    found = torch.searchsorted(kept, wanted.expand(rows, slots).contiguous(), out_int32=True)
    if pitch:
        first = torch.arange(0, rows * pitch, pitch, dtype=torch.int32, device=mask.device)
        found += first[:, None]
    return Told(kept[:, -1].clone(), found)


def tell(mask: torch.Tensor, pitch: int, shape: Shape, *, eager: bool = False) -> Told:
    """List the slots that a mask keeps and tell them to the engine of such layers."""
    told = listed(mask, pitch)
    _steps.find(shape, mask, eager).tell(told)
    return told


def step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    told: Told,
    sinks: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    window: int | None,
    *,
    eager: bool = False,
) -> torch.Tensor:
    """Attention of a layer over slots that were told, ``(B, 1, H_q, D_v)``."""
    shape = shape_of(query, key, value, scaling, softcap, window)
    engine = _steps.find(shape, query, eager)
    engine.know(told)
    pages = tuple(_pages(x, shape) for x in (key, value))
    out = engine.attention.run(query.squeeze(2), pages, sinks=sinks_of(sinks))
    return out.unsqueeze(1)


def _pages(x: torch.Tensor, shape: Shape) -> torch.Tensor:
    """View rows ``(B, H_kv, S, D)`` as pages of a token, ``(B * pitch, H_kv, 1, D)`` about."""
    _, head, token, element = x.stride()
    count = (shape.rows - 1) * pitch_of(x) + shape.slots
    size = count, x.shape[1], 1, x.shape[3]
    return x.detach().as_strided(size, (token, head, token, element), x.storage_offset())


def step_over(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    window: int | None,
    operators: Any = None,
) -> torch.Tensor:
    """Attention of a layer, ``(B, 1, H_q, D_v)``, by a mask ``(B, 1, 1, S)`` that is `marked`.

    Parameters
    ----------
    query : tensor, shape (B, H_q, 1, D)
    key, value : tensors, shapes (B, H_kv, S, D) and (B, H_kv, S, D_v)
    mask : tensor
        A boolean for each slot.
    sinks : tensor, shape (H_q,), optional
    scaling, softcap : float, optional
    window : int, optional
        The layer's, which the mask has already.
    operators : tuple of two, optional
        What `tell` and `step` are in a program that a compiler reads.
    """
    if mask.shape != (key.shape[0], 1, 1, key.shape[2]):
        wanted = f"({key.shape[0]}, 1, 1, {key.shape[2]}), as key"
        raise ShapeError("attention_mask", f"shape {tuple(mask.shape)}", wanted)
    if query.shape[0] != key.shape[0]:
        raise ShapeError("query", f"{query.shape[0]} rows", f"{key.shape[0]}, as key")
    if not rows_alike(key, value):
        key, value = key.contiguous(), value.contiguous()
    shape = shape_of(query, key, value, scaling, softcap, window)
    pitch = pitch_of(key)
    if operators is not None:
        lens, slots = operators[0](mask, pitch, *shape[2:])
        return operators[1](query, key, value, lens, slots, sinks, scaling, softcap, window)
    # What a capture holds is made within: the lists of before may be gone when it is replayed.
    eager = not _capturing(mask)
    told = (_told if eager else tell)(mask, pitch, shape)
    return step(query, key, value, told, sinks, scaling, softcap, window, eager=eager)


def _told(mask: torch.Tensor, pitch: int, shape: Shape) -> Told:
    """List the slots of a step once for all of its layers, outside of programs.

    Where nobody counts how often a mask is written each layer lists them.
    """
    version = version_of(mask)
    if version is None:
        return tell(mask, pitch, shape, eager=True)
    known = next((x for held, at, x in _steps.told if held is mask and at == version), None)
    if known is None:
        known = {}
        _steps.told = [(mask, version, known), *_steps.told[: _MOST_MASKS - 1]]
    told = known.get((shape, pitch))
    if told is None:
        told = known[shape, pitch] = tell(mask, pitch, shape, eager=True)
    return told
