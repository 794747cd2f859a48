# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""How a run is put on a GPU: stream, overlap with the kernel ahead, checks."""

from __future__ import annotations

import os
from typing import Any

from ..arrays import Adapter, adapter_for, stream_handle
from ..errors import FlashbsrError, UnsupportedError

__all__ = ["always", "launch_options", "refuse_on_host", "wait_for"]

# The bits of `how` in Engine.run.
OVERLAP_PROLOGUE, OVERLAP_KV, CHECK, WAIT = 1, 2, 4, 8


def always(check: bool) -> int:
    """Bits of every run of an `Attention`."""
    return CHECK if check or os.environ.get("FLASHBSR_CHECK", "0") not in ("", "0") else 0


def launch_options(
    adapter: Adapter,
    device: int,
    how: int,
    enable_pdl: bool | None,
    kv_ready: bool,
    stream: Any,
) -> tuple[int, int]:
    """Stream and bits of a run whose q belongs to `adapter`, on a CUDA device.

    Raises
    ------
    FlashbsrError, DTypeError, UnsupportedError
        Options that exclude each other; no stream; a stream for arrays that have none.
    """
    if kv_ready:
        if enable_pdl is False:
            raise FlashbsrError("kv_ready", True, "False with enable_pdl=False")
        how |= OVERLAP_KV
    elif enable_pdl is not False:
        how |= OVERLAP_PROLOGUE
    if adapter.WAITS:
        how |= WAIT
        if stream is not None:
            raise UnsupportedError("stream", repr(stream), f"None for {adapter.name} arrays")
    return adapter.stream(device) if stream is None else stream_handle(stream), how


def wait_for(adapter: Adapter, *arrays: Any) -> int:
    """Wait for arrays of other frameworks than q's; the bits of a run that has such arrays."""
    how = 0
    for x in arrays:
        other = adapter_for(x, "kv")
        if other.WAITS and other is not adapter:
            how = WAIT
            x.block_until_ready()  # its export is ordered on another stream than q's
    return how


def refuse_on_host(**options: Any) -> None:
    """Raise for the first option that is not at its default: they are a GPU's."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise UnsupportedError(
                name, repr(value), "the default: q is in host memory, where nothing is launched"
            )
