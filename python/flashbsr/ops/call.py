# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Where a call of a function around attention runs: with its first array."""

from __future__ import annotations

import os
from typing import Any

import flashbsr._core as _core

from ..arrays import adapter_for, to_values

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
    operators : module or None
        What the call is in a program that a compiler reads; None: arrays have values.
    """

    def __init__(self, x: Any, argument: str) -> None:
        self._adapter = adapter_for(x, argument)
        self.operators = self._adapter.OPERATORS
        self._device = self._adapter.device(x)
        self.on_device = self._device is not None
        self.stream = 0 if self._device is None else self._adapter.stream(self._device)
        self._waits = self.on_device and self._adapter.WAITS

    def export(self, x: Any, argument: str, writable: bool = False) -> Any:
        """Hand over an array of any framework; see `Adapter.export`."""
        adapter = adapter_for(x, argument)
        exported = adapter.export(x, writable, argument)
        if self.on_device and adapter.WAITS and adapter is not self._adapter:
            x.block_until_ready()  # its export is ordered on another stream than this call's
            self._waits = True
        return exported

    def values(self, x: Any, argument: str) -> Any:
        """Hand over indices or flags: as they are on a GPU, contiguous on the host."""
        return self.export(x, argument) if self.on_device else to_values(x, argument)

    def done(self) -> None:
        """Wait for the call, where the framework must not see its arrays before it is done."""
        if self._waits and self._device is not None:
            _core.synchronize(self._device, self.stream)
