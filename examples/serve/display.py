# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What the reader sees: progress, the texts as they are written, and the table at the end."""

from __future__ import annotations

import codecs
import importlib.util
import textwrap
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import TextIO

import numpy as np

from .check import Report
from .engine import Engine, Sequence, Step
from .tokenizer import Tokenizer

_LINE_SECONDS = 1.0  # between two progress lines where they cannot be rewritten
_REWRITE_SECONDS = 0.05
_BLOCK_CHARS = 200  # of a finished text are shown
WIDTH = 79  # columns of lines that stay
_LIVE_TEXTS = 8  # requests whose text is shown while it is written


def _printable(text: str) -> str:
    """`text` without what a terminal would obey: the model may write any byte."""
    return "".join(c if c == "\n" or (c.isprintable() and c != "\ufffd") else "?" for c in text)


class Display:
    """Writes to a terminal, by `rich`, or plain lines: to a file, a pipe, or without `rich`.

    Parameters
    ----------
    out : TextIO
    tokenizer : Tokenizer
    total : int
        Requests in all.
    stream : bool
        One request: write its text as it comes, without a progress line.
    """

    def __init__(self, out: TextIO, tokenizer: Tokenizer, total: int, stream: bool) -> None:
        self._out, self._tokenizer, self._total, self._stream = out, tokenizer, total, stream
        self._console = self._live = None
        if out.isatty() and importlib.util.find_spec("rich") is not None:
            from rich.console import Console
            from rich.live import Live

            self._console = Console(file=out, highlight=False, markup=False)
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._started = self._shown = time.perf_counter()
        self._finished = self._tokens = 0

    def _write(self, text: str, style: str | None = None, end: str = "\n") -> None:
        if self._console is None:
            self._out.write(text + end)
            self._out.flush()
        else:
            self._console.print(text, style=style, end=end, soft_wrap=True)

    def line(self, text: str = "") -> None:
        """One line that stays."""
        self._write(text)

    def close(self) -> None:
        """Takes the progress away, which the cursor is hidden for."""
        if self._live is not None:
            self._live.stop()

    def progress(self, text: str, writing: list[Sequence] | None = None) -> None:
        """A line that is rewritten on a terminal, above the ends of the texts of `writing`.

        Elsewhere it is a line from time to time.
        """
        now = time.perf_counter()
        if now - self._shown < (_LINE_SECONDS if self._live is None else _REWRITE_SECONDS):
            return
        self._shown = now
        if self._console is None or self._live is None:
            self.line(text)
            return
        from rich.text import Text

        columns, rows = self._console.size
        lines = Text(text[: columns - 1], "cyan", no_wrap=True)
        for sequence in (writing or [])[: max(min(_LIVE_TEXTS, rows - 3), 0)]:
            head = f"  #{sequence.request.number:<4}"
            lines.append("\n" + head + self._end(sequence, columns - 1 - len(head)), "default")
        self._live.start()
        self._live.update(lines, refresh=True)

    def _end(self, sequence: Sequence, width: int) -> str:
        """The last `width` characters that a request has written, on one line."""
        return self._text(sequence.generated[-width:]).replace("\n", " ")[-width:]

    def _text(self, tokens: Iterable[int]) -> str:
        return _printable(self._tokenizer.decode(tokens))

    def step(self, step: Step, engine: Engine) -> None:
        """Shows what a step brought: streamed text, finished texts, progress."""
        self._tokens += len(step.emitted)
        if self._stream:
            for sequence, token in step.emitted:
                if len(sequence.token_times) == 1:
                    self._write(self._prompt(sequence), "dim", end="")
                text = self._decoder.decode(self._tokenizer.token_bytes(token))
                self._write(_printable(text), end="")
            for sequence in step.finished:
                self._write(_printable(self._decoder.decode(b"", final=True)))
                self._write(self._caption(sequence), "cyan")
            return
        for sequence in step.finished:
            self._finished += 1
            self._block(sequence)
        self.progress(self._state(engine), [s for s in engine.running if s.generated])

    def _state(self, engine: Engine) -> str:
        pool, now = engine.pool, time.perf_counter()
        parts = [
            f"{now - self._started:5.1f} s",
            f"{self._finished}/{self._total} done",
            f"{len(engine.running)} running, {len(engine.waiting)} waiting",
            f"{pool.num_pages - pool.available}/{pool.num_pages} pages",
            f"{self._tokens / (now - self._started):.0f} tok/s",
        ]
        return "  ".join(parts)

    def _prompt(self, sequence: Sequence) -> str:
        return self._text(sequence.request.prompt)

    def _caption(self, sequence: Sequence) -> str:
        request, times = sequence.request, sequence.token_times
        kind = "greedy" if request.temperature == 0 else f"temperature {request.temperature:g}"
        parts = [
            f"-- request {request.number}: {kind}",
            f"{len(request.prompt)} prompt tokens ({sequence.shared_tokens} from shared pages)",
            f"{len(sequence.generated)} generated ({sequence.finish_reason})",
            f"first after {1e3 * (times[0] - sequence.arrived):.0f} ms",
        ]
        if len(times) > 1:
            parts.append(f"then {1e3 * (times[-1] - times[0]) / (len(times) - 1):.1f} ms/token")
        if sequence.preemptions:
            parts.append(f"preempted {sequence.preemptions}x")
        return textwrap.fill(", ".join(parts), WIDTH, subsequent_indent="   ")

    def _block(self, sequence: Sequence) -> None:
        """A finished text: the end of its prompt, and what the model wrote."""
        self._write(self._caption(sequence), "cyan")
        prompt = self._prompt(sequence).rsplit("\n", 1)[-1]
        prompt = prompt if len(prompt) <= 60 else "..." + prompt[-57:]
        written = self._text(sequence.generated)
        if len(written) > _BLOCK_CHARS:
            written = written[:_BLOCK_CHARS] + " [...]"
        lines = [
            row
            for paragraph in f"[{prompt}]{written}".splitlines()
            for row in textwrap.wrap(paragraph, WIDTH - 3) or [""]
        ]
        self.line("\n".join("   " + row for row in lines))

    def table(self, rows: dict[str, str]) -> None:
        """Names and values that stay."""
        if self._console is None:
            for name, value in rows.items():
                self.line(f"{name:<22}{value}")
            return
        from rich.table import Table

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="cyan", min_width=20)
        grid.add_column(overflow="fold")
        for name, value in rows.items():
            grid.add_row(name, value)
        self._console.print(grid)


def _percentiles(seconds: Iterable[float]) -> str:
    values = 1e3 * np.array([*seconds])
    if not len(values):
        return "-"
    p50, p95 = np.percentile(values, (50, 95))
    return f"p50 {p50:.1f} ms, p95 {p95:.1f} ms"


def table(
    engine: Engine, sequences: list[Sequence], wall: float, busy: float, report: Report | None
) -> dict[str, str]:
    """The rows of the final table; `busy` seconds of `wall` were spent in steps."""
    generated = sum(len(s.generated) for s in sequences)
    prompts = sum(len(s.request.prompt) for s in sequences)
    shared = sum(s.shared_tokens for s in sequences)
    timers, pool = engine.model.timers, engine.pool
    gaps = [b - a for s in sequences for a, b in pairwise(s.token_times)]
    waits = (s.token_times[0] - s.arrived for s in sequences)
    steps, speed = max(engine.steps, 1), generated / wall
    cache_share, attention_share = timers.cache / busy, timers.attention / busy
    page_use = f"peak {engine.peak_pages} of {pool.num_pages}, {pool.page_size} tokens each"
    restored = f" ({engine.restored_tokens} of {engine.lost_tokens} tokens were still cached)"
    rows = {
        "requests": f"{len(sequences)} in {wall:.1f} s, {engine.steps} steps",
        "tokens": f"{prompts} of prompts + {generated} generated",
        "throughput": f"{speed:.0f} generated tokens/s ({generated / busy:.0f} while busy)",
        "time to first token": _percentiles(waits),
        "inter-token latency": _percentiles(gaps),
        "pages": page_use,
        "pages shared": f"{engine.shared_pages} ({shared} tokens not computed again)",
        "preemptions": f"{engine.preemptions}" + (restored if engine.preemptions else ""),
        "step": f"{1e3 * busy / steps:.2f} ms mean",
        "plan per step": f"{1e6 * timers.plan / steps:.0f} us",
        "attention": f"{attention_share:.0%} of the time (RoPE and append {cache_share:.0%})",
    }
    if report is not None:
        rows |= _check_rows(report)
    return rows


def _check_rows(report: Report) -> dict[str, str]:
    where = f"{report.positions} positions, {report.reused} shared"
    return {
        "check": "passed" if report.passed else "FAILED",
        "  logits": f"max error {report.max_error:.2e} at {where}",
        "  tolerance": f"{report.tolerance:.2e} (float32 dense: {report.float32_error:.2e})",
        "  greedy tokens": f"{report.tokens} compared, {report.close} too close to call",
    }
