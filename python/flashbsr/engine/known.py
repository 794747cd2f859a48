# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Engines that are kept, by what they compute, however that was spelled."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np

from ..variant.spec import AttentionSpec
from .attention import Attention
from .task import TaskInfo

__all__ = ["Known", "Options", "captured_otherwise", "normal", "sm_scale_of"]

# Ways to spell that are remembered: what a program says every step is one of a few.
MAX_SPELLINGS = 64

E = TypeVar("E")
Options = tuple[tuple[str, Any], ...]
_SPEC = tuple(field.name for field in dataclasses.fields(AttentionSpec))
_TASK = tuple(field.name for field in dataclasses.fields(TaskInfo))


def sm_scale_of(sm_scale: float | None, head_dim: int) -> float:
    """Return the scale of the logits, its default put in."""
    return 1 / math.sqrt(head_dim) if sm_scale is None else sm_scale


def normal(spec: AttentionSpec, task: TaskInfo, open_types: bool = True) -> Options:
    """Name and value of every option, equal where the same is computed.

    With `open_types` a type that is not given is another option than float16, which is given.
    """
    values: dict[str, Any] = {name: getattr(spec, name) for name in _SPEC}
    # As kernels have it: a default spelled out may differ in the last bit of a double.
    values["sm_scale"] = float(np.float32(sm_scale_of(spec.sm_scale, task.head_dim_qk)))
    if spec.pos_encoding_mode != "ROPE_LLAMA":
        values["rope_scale"] = values["rope_theta"] = None
    values |= {name: getattr(task, name) for name in _TASK}
    if not open_types:
        values["q_dtype"] = values["q_dtype"] or "float16"
        values["kv_dtype"] = values["kv_dtype"] or "float16"
    return tuple(values.items())


class Known(Generic[E]):
    """The last engines, by their options: as they were spelled (quick), and what they mean.

    Parameters
    ----------
    limit : int, optional
        How many are kept. None: all.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._spelled: dict[Hashable, E] = {}
        self._by_options: dict[Hashable, E] = {}

    def __iter__(self) -> Iterator[tuple[Any, E]]:
        return iter(self._by_options.items())

    def find(self, spelling: tuple[Any, ...]) -> E | None:
        """Find what was spelled like this."""
        try:
            return self._spelled.get(spelling)
        except TypeError:  # a number given as an array is not hashable; its value may be known
            return None

    def get(self, options: Hashable) -> E | None:
        """Find what has these options."""
        return self._by_options.get(options)

    def add(self, spelling: tuple[Any, ...], options: Hashable, engine: E) -> None:
        """Remember an engine, or another spelling of one."""
        if options not in self._by_options:
            if self._limit is not None and len(self._by_options) >= self._limit:
                del self._by_options[next(iter(self._by_options))]  # the oldest
                self._spelled.clear()
            self._by_options[options] = engine
        if len(self._spelled) >= MAX_SPELLINGS:
            self._spelled.clear()
        # A number given as an array is hashed by its id in PyTorch: it may have another value then.
        if any(hasattr(x, "__dlpack__") for x in spelling):
            return
        with contextlib.suppress(TypeError):
            self._spelled[spelling] = engine


def captured_otherwise(known: Known[Attention], options: Options) -> tuple[str, Any, Any] | None:
    """Find what keeps graphs from following a plan with `options`: name, wanted, what they have.

    None where no run is captured, or one with these options is.
    """
    engine = known.get(options)
    if engine is not None and engine.captured:
        return None
    for held, other in known:
        if other.captured:
            pairs = zip(options, held, strict=True)
            return next((name, wanted, has) for (name, wanted), (_, has) in pairs if wanted != has)
    return None
