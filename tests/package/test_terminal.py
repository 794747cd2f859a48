# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Tables, progress and colours: by rich on a terminal, plain lines elsewhere and without it."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from contextlib import closing, redirect_stdout

import pytest
from flashbsr.cli import main
from flashbsr.terminal import Progress, print_table, rich_console, show

HEADING, ROWS = ("name", "us"), (("short", "1.5"), ("a longer name", "120.0"))
PLAIN = ["  name              us", "  short            1.5", "  a longer name  120.0"]
PLAN = ["plan", "--kv-lens", "100,300", "--num-kv-heads", "1"]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 40 columns with 16 million colours."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (
        ("COLUMNS", "40"), ("LINES", "24"), ("TERM", "xterm"), ("COLORTERM", "truecolor"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    return Terminal()


@pytest.fixture
def no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n: None if n == "rich" else find(n))


def test_a_pipe_has_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(HEADING, ROWS, right=(1,))
    show("\x1b[31mred\x1b[0m")  # who colours has asked for a terminal before
    out = capsys.readouterr().out
    assert out.splitlines() == [*PLAIN, "\x1b[31mred\x1b[0m"]
    assert rich_console(sys.stdout) is None


@pytest.mark.usefixtures("no_rich")
def test_without_rich_a_terminal_has_plain_lines(terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        print_table(HEADING, ROWS, right=(1,))
    assert terminal.getvalue().splitlines() == PLAIN
    with redirect_stdout(terminal):
        assert main(PLAN) == 0
    assert "worker 0" in terminal.getvalue()
    assert "\x1b" not in terminal.getvalue()


def test_a_terminal_has_tables_in_its_width(terminal: Terminal) -> None:
    pytest.importorskip("rich")
    with redirect_stdout(terminal):
        print_table(HEADING, [*ROWS, ("[bold]word[/bold] " * 9, "3")], right=(1,))
    shown = terminal.getvalue()
    assert "\x1b[1m" in shown  # the heading
    lines = ESCAPES.sub("", shown).splitlines()
    assert max(map(len, lines)) <= 40
    assert "[bold]" in shown  # text is text, not markup
    assert any(line.strip().endswith("120.0") for line in lines)


def test_lanes_have_colours_on_a_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    with redirect_stdout(terminal):
        assert main(PLAN) == 0
    assert ";2;" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    with redirect_stdout(Terminal()) as plain:
        assert main(PLAN) == 0
    assert ";2;" not in plain.getvalue()
    assert "worker 0" in plain.getvalue()


def test_progress_is_a_bar_that_goes_away(terminal: Terminal) -> None:
    pytest.importorskip("rich")
    with closing(Progress(terminal, 2)) as progress:
        progress.begin(0, "first")
        progress.tick(0.5)
        progress.begin(1, "second")
    shown = terminal.getvalue()
    assert "second" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is back
    assert shown.rstrip().endswith("\x1b[2K")


@pytest.mark.usefixtures("no_rich")
def test_progress_without_rich_is_lines_on_a_terminal_alone() -> None:
    for stream, shown in ((Terminal(), "1/2 first\n2/2 second\n"), (io.StringIO(), "")):
        with closing(Progress(stream, 2)) as progress:
            progress.begin(0, "first")
            progress.tick(0.5)
            progress.begin(1, "second")
        assert stream.getvalue() == shown
