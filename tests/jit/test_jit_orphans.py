# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Compilers end with the process that started them, however that ends; who waits for one says so.

Most compilers here are a shell with children in the background and in the foreground, as a driver
has them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flashbsr.jit import cache, cxx
from flashbsr.jit.process import compile_text

# What builds, beside a thread or as one, and prints how that ended.
PROGRAM = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has them ignored
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
from pathlib import Path
from flashbsr.jit import cache
from flashbsr.jit.process import compile_text
script, how, text = sys.argv[1:]
def build(path):
    print(compile_text(["sh", "-c", script, "sh", str(path)], text, path.parent), flush=True)
def get():
    key = cache.key_of("a test")
    print(cache.get_or_build(key, ".bin", build, label="a label").read_text(), flush=True)
def started():
    while not list(cache.folder().glob("tmp/*")):
        time.sleep(0.01)
    time.sleep(0.2)
if how == "main":
    get()
else:
    thread = threading.Thread(target=get, daemon=how == "daemon")
    thread.start()
    started()
    if how == "fork" and os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    if how != "daemon":
        thread.join()
"""


class Programs:
    """Programs that share a cache. Their environment marks them and all that they start."""

    def __init__(self, folder: Path) -> None:
        self.environment = {**os.environ, "FLASHBSR_CACHE_DIR": str(folder), "FLASHBSR_QUIET": "0"}
        self.mark = f"FLASHBSR_CACHE_DIR={folder}".encode()
        self.started: list[subprocess.Popen[str]] = []

    def start(self, seconds: float, how: str = "main") -> subprocess.Popen[str]:
        return self.run(f'sleep {seconds} & sleep {seconds}; wait; cat > "$1"', how, "code")

    def run(self, script: str, how: str, text: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, script, how, text],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def alive(self) -> dict[int, str]:
        """Numbers and command lines of processes that live. A zombie has no environment."""
        found = {}
        for at in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark in (at / "environ").read_bytes().split(b"\0"):
                    found[int(at.name)] = (at / "cmdline").read_text().replace("\0", " ")
        return found

    def compiling(self) -> bool:
        """Whether both children of the compiler are there."""
        return sum(command.startswith("sleep ") for command in self.alive().values()) == 2


def until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    monkeypatch.setenv("FLASHBSR_CACHE_DIR", str(tmp_path / "cache"))
    here = Programs(tmp_path / "cache")
    yield here
    for pid in here.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in here.started:
        process.communicate()


@pytest.mark.parametrize(
    ("how", "number"),
    [
        *itertools.product(("main", "thread", "fork"), (signal.SIGKILL, signal.SIGTERM)),
        ("main", signal.SIGQUIT),
        ("main", signal.SIGINT),  # an interpreter waits for its threads before it ends of this one
    ],
)
def test_a_signal_ends_all(
    programs: Programs, tmp_path: Path, how: str, number: signal.Signals
) -> None:
    victim = programs.start(60, how)
    assert until(programs.compiling, 20), victim.communicate()
    forked: set[int] = set()  # who has what the victim had open
    if how == "fork":

        def children() -> set[int]:
            return {pid for pid, command in programs.alive().items() if "sys.argv" in command}

        assert until(lambda: len(children()) == 2, 5)
        forked = children() - {victim.pid}
    (left,) = (tmp_path / "cache" / "tmp").iterdir()
    victim.send_signal(number)
    assert until(lambda: set(programs.alive()) == forked, 2), programs.alive()
    victim.wait(5)
    assert left.exists() == (number != signal.SIGINT)  # which it could tidy up after
    begin = time.monotonic()
    cache.get_or_build(cache.key_of("b"), ".bin", lambda path: path.write_bytes(b"x") and None)
    assert not list((tmp_path / "cache" / "tmp").iterdir())
    # Nor does its child hold the lock.
    cache.get_or_build(cache.key_of("a test"), ".bin", lambda path: path.write_bytes(b"x") and None)
    assert time.monotonic() - begin < 5


def test_the_machine_s_own_compiler(programs: Programs, tmp_path: Path) -> None:
    """It is killed while a child of its driver works, and its own temporary files go too."""
    text = '#include <regex>\nbool f(const char* s) { return regex_match(s, std::regex("a+b")); }'
    command = f'exec {shlex.join(cxx.compiler())} -x c++ -O2 -shared -fPIC -o "$1" -'
    victim = programs.run(command, "main", text)

    def working() -> bool:
        return any(re.search("cc1plus|-cc1 ", command) for command in programs.alive().values())

    assert until(working, 20), victim.communicate()
    assert victim.poll() is None
    victim.kill()
    assert until(lambda: not programs.alive(), 0.5), programs.alive()  # of the two that it takes
    cache.get_or_build(cache.key_of("b"), ".bin", lambda path: path.write_bytes(b"x") and None)
    assert not list((tmp_path / "cache" / "tmp").iterdir())


def test_a_thread_that_is_left_behind(programs: Programs) -> None:
    """A program may end while a daemon thread compiles."""
    process = programs.start(60, "daemon")
    assert process.wait(30) == 0
    assert until(lambda: not programs.alive(), 2), programs.alive()


def test_a_compiler_that_nobody_kills(programs: Programs, tmp_path: Path) -> None:
    """Its watcher ends with it, and the text arrives."""
    process = programs.start(0.1)
    assert process.communicate(timeout=30)[0] == "(0, '')\ncode\n"
    assert not programs.alive()


@pytest.mark.parametrize(
    ("script", "status", "messages"),
    [
        ("cat >&2", 0, "text"),
        ("exit 3", 3, ""),
        ("kill -9 $$", -9, None),
        ("kill -11 $$", -11, None),
        ("echo $TMPDIR >&2; echo lost", 0, "{folder}\n"),
    ],
)
def test_status_and_messages(tmp_path: Path, script: str, status: int, messages: str) -> None:
    got = compile_text(["sh", "-c", script], "text", tmp_path)
    assert got[0] == status
    if messages is not None:
        assert got[1] == messages.format(folder=tmp_path)


def test_what_it_costs(tmp_path: Path) -> None:
    """0.9 ms for a process, 2.0 with its watcher (a virtual machine of two cores)."""

    def best(run: Callable[[], object]) -> float:
        times = []
        for _ in range(30):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return min(times)

    plain = best(lambda: subprocess.run(["true"], input=b"", capture_output=True, check=True))
    assert best(lambda: compile_text(["true"], "", tmp_path)) - plain < 0.010


def notices(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("flashbsr: waiting")]


def test_who_waits_says_for_whom(programs: Programs) -> None:
    first = programs.start(4)
    assert until(programs.compiling, 20)
    waiting = programs.start(0)
    programs.environment["FLASHBSR_QUIET"] = "1"
    quiet = programs.start(0)
    (code, errors), (_, silence) = waiting.communicate(timeout=30), quiet.communicate(timeout=30)
    assert code == "code\n"  # that of the first
    assert notices(errors) == [f"flashbsr: waiting for process {first.pid}, which compiles a label"]
    assert silence == ""
    assert notices(first.communicate(timeout=30)[1]) == []


def test_a_short_wait_is_not_worth_a_word(programs: Programs) -> None:
    first = programs.start(0.6)
    assert until(programs.compiling, 20)
    waiting = programs.start(0)
    assert notices(waiting.communicate(timeout=30)[1]) == []
    assert first.wait(10) == 0


def test_who_is_waited_for_may_change(programs: Programs) -> None:
    """One that is killed hands over to one of those that wait, and the others name that one."""
    first = programs.start(60)
    assert until(programs.compiling, 20)
    others = [programs.start(4), programs.start(4)]
    time.sleep(2.5)
    first.kill()
    said = {p.pid: notices(p.communicate(timeout=60)[1]) for p in others}
    one, two = sorted(said, key=lambda pid: len(said[pid]))
    text = "flashbsr: waiting for process {}, which compiles a label"
    assert said[one] == [text.format(first.pid)]
    assert said[two] == [text.format(first.pid), text.format(one)]
