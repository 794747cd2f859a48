# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What a user sees while something is compiled: one line on stderr.

``flashbsr: compiling decode_sm90_d128_f16_r8_Mine for sm_90 ... 0.8 s``. On a terminal the line is
there at once and the seconds count up; elsewhere it is written when it is complete, in one piece,
so that many processes' lines stay whole. ``FLASHBSR_QUIET=1`` leaves it out.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

__all__ = ["compiling"]


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Say that `what` is being compiled, and for how long.

    Parameters
    ----------
    what : str
        ``"<kernel> for <architecture>"``.
    """
    if os.environ.get("FLASHBSR_QUIET", "0") not in ("", "0") or sys.stderr is None:
        yield
        return
    line = f"flashbsr: compiling {what} ..."
    begin, done = time.perf_counter(), threading.Event()
    terminal = sys.stderr.isatty()

    def count() -> None:
        while not done.wait(0.1):
            print(
                f"\r{line} {time.perf_counter() - begin:.1f} s", end="", file=sys.stderr, flush=True
            )

    thread = threading.Thread(target=count, daemon=True) if terminal else None
    if thread:
        print(line, end="", file=sys.stderr, flush=True)
        thread.start()
    end = "failed"
    try:
        yield
        end = f"{time.perf_counter() - begin:.1f} s"
    finally:
        done.set()
        if thread:
            thread.join()
        print(("\r" if terminal else "") + f"{line} {end}", file=sys.stderr, flush=True)
