# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Engines of functions, which have no object to keep them in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from ..arrays import device_of
from ..arrays.types import Array
from ..engine.attention import Attention
from ..engine.task import TaskInfo
from ..variant.spec import AttentionSpec

__all__ = ["Engine", "Engines"]

# Engines differ per option, not per batch: a model has one or two.
MAX_ENGINES = 16


@dataclass
class Engine:
    """An engine, and what its plan was made of; None: there is none that could serve again."""

    attention: Attention
    planned: Any = None


class Engines(threading.local):
    """The last `MAX_ENGINES` engines of a thread by their options, oldest first."""

    def __init__(self) -> None:
        self.by_key: dict[Hashable, Engine] = {}

    def find(
        self,
        key: tuple[Any, ...],
        spec: dict[str, Any],
        task: dict[str, Any],
        q: Array,
        workspace: Array | int | None = None,
    ) -> Engine:
        """Find the engine of these options, on the device of `q`, or make it."""
        engine = None
        key = (*key, device_of(q, "q"), workspace if isinstance(workspace, int) else id(workspace))
        with contextlib.suppress(TypeError):  # a number given as an array is not hashable
            engine = self.by_key.get(key)
        if engine is None:
            for name, default in (("rope_scale", 1.0), ("rope_theta", 1e4)):
                if spec.get(name, 0) is None:
                    spec[name] = default
            engine = Engine(Attention(AttentionSpec(**spec), TaskInfo(**task), workspace))
            engine.attention.settle(q, "q")
            if len(self.by_key) >= MAX_ENGINES:
                del self.by_key[next(iter(self.by_key))]
            with contextlib.suppress(TypeError):
                self.by_key[key] = engine  # which keeps the workspace, and so its id
        return engine
