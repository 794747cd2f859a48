# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Where a call of a function around attention runs: with its first array."""

from __future__ import annotations

import os
from typing import Any

from . import _core
from .adapters import adapter_for, export, to_values

__all__ = ["Call", "checking"]


def checking() -> bool:
    """Tell whether ``FLASHBSR_CHECK`` asks for checks of values that are on a device."""
    return os.environ.get("FLASHBSR_CHECK", "0") not in ("", "0")


class Call:
    """The place of a call's first array, and the current stream there.

    Parameters
    ----------
    x : array
        The first one.
    argument : str
        Its name.

    Attributes
    ----------
    on_device : bool
        Whether `x` is on a GPU. All arrays must be then; the core checks it.
    stream : int
        Current stream of the framework of `x`; 0 on the host.
    """

    def __init__(self, x: Any, argument: str) -> None:
        adapter = adapter_for(x, argument)
        device = adapter.device(x)
        self.on_device = device is not None
        self.stream = 0
        self._waits = None
        if device is not None:
            self.stream = adapter.stream(device)
            if adapter.WAITS:
                self._waits = device

    def values(self, x: Any, argument: str) -> Any:
        """Hand over indices or flags: as they are on a GPU, contiguous on the host."""
        return export(x, argument) if self.on_device else to_values(x, argument)

    def done(self) -> None:
        """Wait for the call, where the framework must not see its arrays before it is done."""
        if self._waits is not None:
            _core.synchronize(self._waits, self.stream)
