# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Engines of functions, which have no object to keep a plan in: a thread's last 16.

Each plans when lengths, tables or masks are not those of its last call: a layer after the first of
a step only compares them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._check import check_one_array
from ..arrays import device_of
from ..arrays.types import Array
from ..layout.layouts import Layout
from ..variant.spec import AttentionSpec
from .attention import Attention
from .known import Known, normal
from .task import TaskInfo

__all__ = ["planned"]


@dataclass
class Engine:
    """An engine, and what its plan was made of; None: none that could serve again."""

    attention: Attention
    workspace: Any  # kept, so that its id stays its own
    planned: Any = None


class _Engines(threading.local):
    def __init__(self) -> None:
        self.known: Known[Engine] = Known(16)


_engines = _Engines()


def planned(
    q: Array, spelling: tuple[Any, ...], fields: Callable[[], tuple[Any, Any]],
    batch: tuple[Any, ...], layout: Callable[[], Layout], masks: dict[str, Array],
    workspace: Any = None, memory: Callable[[Any], Any] = lambda x: x,
) -> Attention:  # fmt: skip
    """Return the engine of `fields` (of the spec, of the task), planned for `batch` or with masks.

    It is known by their `spelling`, and planned unless its last batch was this one. The workspace
    is what `memory` makes of the caller's.
    """
    place = device_of(q, "q"), workspace if isinstance(workspace, int) else id(workspace)
    spelling = (*spelling, *place)
    engine = _engines.known.find(spelling)
    if engine is None:
        spec, task = fields()
        given = {name: x for name, x in spec.items() if x is not None}
        wanted = AttentionSpec(**given), TaskInfo(**task)
        check_one_array("o_dtype", wanted[1].o_dtype)
        options = (*normal(*wanted), place)
        engine = _engines.known.get(options)
        if engine is None:
            engine = Engine(Attention(*wanted, memory(workspace)), workspace)
            engine.attention.settle(q, "q")
        _engines.known.add(spelling, options, engine)
    if masks or not _same(engine.planned, batch):
        engine.planned = None  # stays so if plan raises
        engine.attention.plan(layout(), **masks)
        if not masks:
            engine.planned = tuple(x.copy() if isinstance(x, np.ndarray) else x for x in batch)
    return engine.attention


def _same(planned: Any, batch: tuple[Any, ...]) -> bool:
    if planned is None or len(planned) != len(batch):
        return False
    for a, b in zip(planned, batch, strict=True):
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            if not np.array_equal(a, b):
                return False
        elif a is not b and (a is None or b is None or a != b):
            return False
    return True
