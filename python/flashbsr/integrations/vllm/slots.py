# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Engines of a kind of layers, and what each is planned for. Knows no vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...engine.attention import Attention
from ...layout.bounds import Bounds
from .kinds import Kind
from .rows import Rows

__all__ = ["ROOM", "Graph", "Slot"]

# A decode step's bounds leave room for so many tokens more: the plan serves as many steps, each of
# which is one small launch (`update`) instead of 0.1 ms of planning.
ROOM = 128


@dataclass(slots=True)
class Slot:
    """An engine, what it is planned for, and how often it was."""

    attention: Attention
    rows: Rows | None = None
    bounds: np.ndarray[Any, Any] | None = None
    common_prefix: int = 0
    turn: int = 0
    rests: int = -1  # requests without a row that it is planned for

    def holds(self, rows: Rows, bounds: np.ndarray[Any, Any], common_prefix: int) -> bool:
        """Tell whether the plan serves such a batch, and about as well as one of its own would."""
        if self.rows is not rows or self.bounds is None or self.common_prefix != common_prefix:
            return False
        # Seen as unsigned, what is below 0 is above all.
        room = (self.bounds - bounds).view(np.uint64)
        return bool(np.maximum.reduce(room, initial=0) <= 2 * ROOM)

    def forget(self) -> None:
        """Know of no plan: a new one may raise."""
        self.rows = self.bounds = None
        self.rests = -1

    def rest(self, requests: int, page_size: int, stream: Any) -> bool:
        """Plan no rows, so that captured runs have nothing to do. Returns whether it planned."""
        if self.rests == requests:
            return False
        self.forget()
        nobody = np.zeros(requests + 1, np.int64)
        self.attention.plan(Bounds(nobody, nobody[1:], page_size=page_size), stream=stream)
        self.rests = requests
        return True


@dataclass(slots=True)
class Graph:
    """What captured runs hold: engines with a capacity, which replays follow.

    `mixed`: requests may have any number of query rows. `rows` are those of the largest captured
    run, which ends where its queries do. `sharing` are engines beside those of `slots` for steps
    that share a prefix: of the two captured launches one has nothing to do.
    """

    requests: int
    mixed: bool
    rows: int = 0
    slots: dict[Kind, Slot] = field(default_factory=dict)
    sharing: dict[Kind, Slot] = field(default_factory=dict)
