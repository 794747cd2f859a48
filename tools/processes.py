# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Processes that engines run in, for tools/engines_vllm.py and its kin."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from contextlib import suppress


def to_its_end(command: list[str], environment: dict[str, str], seconds: float) -> tuple[int, str]:
    """Run a process to its own end; give its status, and what it and its workers said.

    Not to the end of its workers, which hold its output: those of vLLM's second model runner may
    wait for each other for ever when the engine has gone. What is left of them is killed.
    """
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return status, said.read()
