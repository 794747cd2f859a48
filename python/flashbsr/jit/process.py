# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What must not outlive this process: compilers that it starts, and locks that it holds.

The kernel closes a process's descriptors however it ends, SIGKILL included. A compiler runs beside
a watcher that sees the end of a pipe then. The signal that Linux sends at a parent's death would
not do: it comes when the *thread* that started the child ends, and only to the child, which for a
compiler is a driver that has processes of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["compile_text", "unshared"]

# The end of the pipe comes as descriptor 1, since a portable shell names ten. SIGKILL goes to the
# process group: the shell, the watcher, the compiler and all that it started. The shell takes its
# watcher with it, and waits for it, as the first process of a container may not.
_SUPERVISOR = """
exec 3<&1 >/dev/null
{ read -r _ <&3; kill -KILL 0; } 2>/dev/null &
"$@" 3<&-
status=$?
{ kill -KILL $!; wait; } 2>/dev/null
exit $status
"""
_SIGNALLED = 128  # what a shell adds to the number of the signal that ended a command

_gate = threading.RLock()
_unshared: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _unshared:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _unshared.clear()
    _gate.release()


# A process forked meanwhile, such as a data loader's worker, would keep locks and pipes open.
os.register_at_fork(
    before=_gate.acquire, after_in_parent=_gate.release, after_in_child=_close_in_child
)


@contextlib.contextmanager
def unshared(opens: Callable[[], tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Hold descriptors that neither processes forked nor programs started meanwhile have.

    Parameters
    ----------
    opens : callable
        Opens them, not inheritable; nothing forks meanwhile.
    """
    with _gate:
        descriptors = opens()
        _unshared.update(descriptors)
    try:
        yield descriptors
    finally:
        with _gate:
            for descriptor in _unshared.intersection(descriptors):  # none in a forked process
                _unshared.remove(descriptor)
                os.close(descriptor)


def compile_text(command: list[str], text: str, temporary: Path) -> tuple[int, str]:
    """Run a compiler that ends when this process does, whatever ends it.

    Parameters
    ----------
    command : list of str
        It reads the text from its standard input.
    text : str
        The source.
    temporary : Path
        Folder for its temporary files.

    Returns
    -------
    status : int
        As of `subprocess.Popen`: negative, a signal's number.
    messages : str
        What it wrote to stderr, in English.
    """
    with (
        unshared(os.pipe) as (end, _),
        subprocess.Popen(
            ["/bin/sh", "-c", _SUPERVISOR, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=end,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(temporary), "LC_ALL": "C"},
            start_new_session=True,
        ) as process,
    ):
        try:
            _, messages = process.communicate(text.encode())
        except BaseException:  # Ctrl-C does not reach the other session
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            raise
    status = process.returncode
    if status > _SIGNALLED:
        status = _SIGNALLED - status
    return status, messages.decode(errors="replace")
