# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Wrappers made of wrappers, which ``run`` plans where the batch is another than before."""

from __future__ import annotations

from typing import Any

from ._arguments import Workspace
from ._base import Wrapper

__all__ = ["Composed"]


class Composed(Wrapper):
    """Base of these: parts by their names and layouts, all over one workspace."""

    _plans_in_run = True

    def __init__(
        self, float_workspace_buffer: Workspace = None, kv_layout: str = "NHD", *,
        backend: str = "auto", lse_base: str = "2", num_threads: int | None = None,
    ) -> None:  # fmt: skip
        self._set_up(locals())

    def _set_up(self, given: dict[str, Any]) -> None:
        super()._set_up({**given, "use_cuda_graph": False})
        self._wrappers: dict[Any, Any] = {}
        self._planned: dict[str, Any] = {}  # what they were planned for

    def _on(
        self, name: str, kind: Any, layout: str, key: Any, *arrays: Any, **options: Any,
    ) -> Any:  # fmt: skip
        """Return a wrapper planned for these; not again where `key` is that of its plan."""
        wrapper = self._wrappers.get((name, layout))
        if wrapper is None:
            kept = {x: self._task_options[x] for x in ("backend", "lse_base", "num_threads")}
            wrapper = self._wrappers[name, layout] = kind(self._workspace, layout, **kept)
        if key is None or self._planned.get(name) != (key, layout):
            self._planned[name] = None
            wrapper.plan(*arrays, **options)
            self._planned[name] = key, layout
        self._attention = wrapper.attention
        return wrapper

    def _forget(self) -> None:
        """Leave no plan."""
        self._attention = None
        self._planned.clear()

    def reset_workspace_buffer(
        self, float_workspace_buffer: Workspace, int_workspace_buffer: Any = None
    ) -> None:
        """Replace the workspace. The next call must be ``plan``."""
        super().reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._wrappers.clear()
        self._forget()
