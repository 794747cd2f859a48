# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Compares every sequence that the engine served with the dense float64 forward.

The tolerance is not a constant. The same dense formulas in float32 differ from float64 by some
`e32`, measured here on the same sequences; the engine computes in float32 too, only in another
order, and may differ by `FACTOR * e32`. Over 5688 small random models the engine's error was 0.96
`e32` in the median and 5.1 `e32` at worst. (At one such position, rounding the weights to float32
changed the float64 logits as much: a single float32 forward can be lucky.) Mistakes are of another
size: one key less in decode, or one position off by one, moves the logits of the model here by 2e5
`e32` and more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from . import dense
from .engine import Sequence
from .model import Model
from .weights import Config

FACTOR = 8.0


@dataclass(slots=True)
class Report:
    """What the comparison found; errors are absolute, of logits."""

    sequences: int = 0
    positions: int = 0  # rows of logits compared
    reused: int = 0  # positions that came out of shared pages and were compared where computed
    max_error: float = 0.0
    float32_error: float = 0.0  # of the dense forward in float32
    tokens: int = 0  # greedy tokens compared
    close: int = 0  # greedy tokens whose two best logits are too close to tell
    wrong: list[str] = field(default_factory=list)
    errors: list[tuple[int, float]] = field(default_factory=list)  # request, its largest error
    choices: list[tuple[int, int, float, bool]] = field(default_factory=list)

    @property
    def tolerance(self) -> float:
        return FACTOR * self.float32_error

    @property
    def passed(self) -> bool:
        return not self.wrong

    def verdict(self) -> None:
        """Fills in `wrong`, `tokens` and `close`, once the tolerance is known."""
        for number, error in self.errors:
            if not error <= self.tolerance:  # NaN fails too
                self.wrong.append(
                    f"request {number}: logits differ by {error:.2e}; "
                    f"expected at most {self.tolerance:.2e}"
                )
        for number, index, margin, equal in self.choices:
            if margin <= self.tolerance:
                self.close += 1
                continue
            self.tokens += 1
            if not equal:
                self.wrong.append(
                    f"request {number}: greedy token {index} differs although the two best "
                    f"logits are {margin:.2e} apart"
                )


def compare(
    config: Config,
    tensors: Mapping[str, NDArray[np.floating]],
    model: Model,
    sequences: Iterable[Sequence],
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Checks finished sequences that an engine with `record=True` served.

    Every position that a request computed is compared: those of generated tokens by the logits that
    were sampled from, those of prompts by their final hidden states.
    """
    report = Report()
    for sequence in sequences:
        tokens = sequence.tokens[:-1]  # the last one was never an input
        exact = dense.forward(config, tensors, tokens)
        single = dense.forward(config, tensors, tokens, np.float32)
        report.float32_error = max(report.float32_error, float(np.abs(single - exact).max()))
        first = len(sequence.request.prompt) - 1
        positions = sorted(sequence.states)
        computed = model.logits(np.stack([sequence.states[p] for p in positions]))
        sampled = np.stack(sequence.logits)
        error = np.abs(computed - exact[positions]).max()
        error = np.maximum(error, np.abs(sampled - exact[first:]).max())  # propagates NaN
        report.errors.append((sequence.request.number, float(error)))
        report.max_error = float(np.maximum(report.max_error, error))
        report.positions += len(positions)
        report.reused += len(tokens) - len(positions)
        if sequence.request.temperature == 0:
            best = np.sort(np.partition(exact[first:], -2, axis=1)[:, -2:], axis=1)
            for i, token in enumerate(sequence.generated):
                equal = token == int(np.argmax(exact[first + i]))
                margin = float(best[i, 1] - best[i, 0])
                report.choices.append((sequence.request.number, i, margin, equal))
        report.sequences += 1
        if progress is not None:
            progress(report.sequences)
    report.verdict()
    return report
