# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What a user sees while something is compiled: one line on stderr.

``flashbsr: compiling decode_sm90_d128_f16_r8_Mine for sm_90 ... 0.8 s``. On a terminal the line is
there at once and the seconds count up; elsewhere it is written when it is complete, in one piece,
so that many processes' lines stay whole. Who waits for another process's compiler says so after a
second. ``FLASHBSR_QUIET=1`` leaves both out.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["compiling", "waiting"]

_PATIENCE_S = 1.0


def _quiet() -> bool:
    return os.environ.get("FLASHBSR_QUIET", "0") not in ("", "0") or sys.stderr is None


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Say that `what` is being compiled, and for how long.

    Parameters
    ----------
    what : str
        ``"<kernel> for <architecture>"``.
    """
    if _quiet():
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


@contextlib.contextmanager
def waiting(holder: Callable[[], str]) -> Iterator[None]:
    """Say after a second what is waited for, and again where that changes.

    Parameters
    ----------
    holder : callable
        Returns ``"process 4711, which compiles ..."``, or nothing: then nothing is said.
    """
    if _quiet():
        yield
        return
    done = threading.Event()

    def watch() -> None:
        said = ""
        while not done.wait(_PATIENCE_S):
            who = holder()
            if who not in ("", said):
                print(f"flashbsr: waiting for {who}", file=sys.stderr, flush=True)
                said = who

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
