# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Tables, progress and colours of the commands: by ``rich`` on a terminal, plain lines elsewhere.

What is written into a pipe or a file, and anything where ``rich`` is missing, is text without
escapes, the same for every width.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Progress", "print_table", "rich_console", "show", "table_lines"]


def rich_console(stream: TextIO) -> Console | None:
    """Give the console of a terminal; None where `stream` is none or ``rich`` is missing."""
    if not stream.isatty() or importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False)


def table_lines(
    heading: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()
) -> list[str]:
    """Format a table as lines of text, columns two blanks apart.

    Parameters
    ----------
    heading : sequence of str
    rows : sequence of sequences of str
        Each as long as `heading`.
    right : collection of int
        Columns that are aligned to the right.
    """
    table = [heading, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def print_table(
    heading: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()
) -> None:
    """Print a table on the standard output: folded into the width of a terminal, or as lines.

    The arguments are those of `table_lines`.
    """
    console = rich_console(sys.stdout)
    if console is None:
        print("\n".join(table_lines(heading, rows, right)))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i, name in enumerate(heading):
        table.add_column(name, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def show(text: str) -> None:
    """Print text that may have ANSI colours, in those that the terminal has."""
    console = rich_console(sys.stdout)
    if console is None:
        print(text)
        return
    from rich.text import Text

    console.print(Text.from_ansi(text), soft_wrap=True)


class Progress:
    """The progress of named steps: a bar on a terminal, silence in a pipe.

    On a terminal without ``rich`` each step is a line. It is shown from `begin` to `close`.

    Parameters
    ----------
    stream : TextIO
    total : int
        Steps in all.
    """

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream, self._total, self._done = stream, total, 0
        self._bar = None
        console = rich_console(stream)
        if console is not None:
            from rich import progress

            self._bar = progress.Progress(
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.description}"),
                console=console,
                transient=True,
                redirect_stdout=False,
            )
            self._task = self._bar.add_task("", total=total)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def begin(self, index: int, name: str) -> None:
        """Say that step `index`, from 0, begins."""
        self._done = index
        if self._bar is not None:
            self._bar.update(self._task, completed=index, description=name)
            self._bar.start()
        elif self._stream.isatty():
            print(f"{index + 1}/{self._total} {name}", file=self._stream, flush=True)

    def tick(self, fraction: float) -> None:
        """Say how much of the step is done, from 0 to 1."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done + fraction)
