# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Random score and mask functions: Python that runs on a trace and on NumPy arrays alike.

Scores are not compared with anything: a rounding that changes a branch would change the answer.
Integers stay small by remainders, floats by functions that are bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashbsr
import numpy as np

HEADS, KEYS, QUERIES = 4, 160, 80


def tables(seed: int) -> dict[str, np.ndarray]:
    """Arrays that random functions capture."""
    rng = np.random.default_rng(seed)
    return {
        "slopes": rng.standard_normal(HEADS).astype(np.float32),
        "bias": rng.standard_normal((QUERIES, KEYS)).astype(np.float16),
        "document": rng.integers(0, 3, KEYS),
        "kept": rng.random((HEADS, KEYS)) < 0.8,
        "counts": rng.integers(0, 200, (KEYS, HEADS)).astype(np.uint8).T,
    }


class Maker:
    """Builds nested closures; each is called with the five arguments of a score function."""

    def __init__(self, seed: int, arrays: dict[str, Any]) -> None:
        self.rng = np.random.default_rng(seed)
        self.arrays = arrays

    def pick(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high))

    def integer(self, depth: int) -> Callable[..., Any]:
        document, counts = self.arrays["document"], self.arrays["counts"]
        if depth == 0:
            c = self.number(-9, 10)
            return self.pick(
                lambda s, b, h, q, k: q,
                lambda s, b, h, q, k: k,
                lambda s, b, h, q, k: h,
                lambda s, b, h, q, k: b,
                lambda s, b, h, q, k: c,
                lambda s, b, h, q, k: q - k,
                lambda s, b, h, q, k: document[k],
                lambda s, b, h, q, k: counts[h, k],
                lambda s, b, h, q, k: document[-1 - k],
            )
        x, y = self.integer(depth - 1), self.integer(depth - 1)
        positive, power = self.number(2, 30), 2 ** self.number(0, 5)
        shift, condition = self.number(0, 4), self.condition(depth - 1)
        return self.pick(
            lambda *a: (x(*a) + y(*a)) % 61,
            lambda *a: x(*a) - y(*a),
            lambda *a: (x(*a) * y(*a)) % positive,
            lambda *a: x(*a) // positive,
            lambda *a: x(*a) % positive,
            lambda *a: x(*a) // -positive,
            lambda *a: x(*a) % -positive,
            lambda *a: x(*a) // power,
            lambda *a: x(*a) % power,
            lambda *a: (x(*a) & y(*a)) ^ 5,
            lambda *a: x(*a) | (y(*a) & 31),
            lambda *a: ~x(*a) >> shift,
            lambda *a: (x(*a) % 17) << shift,
            lambda *a: abs(x(*a)) - (-y(*a)),
            lambda *a: flashbsr.minimum(x(*a), y(*a)),
            lambda *a: flashbsr.maximum(x(*a), y(*a)),
            lambda *a: flashbsr.where(condition(*a), x(*a), y(*a)),
        )

    def condition(self, depth: int) -> Callable[..., Any]:
        x, y, c = self.integer(max(depth - 1, 0)), self.integer(0), self.number(-5, 40)
        kept = self.arrays["kept"]
        simple = self.pick(
            lambda *a: x(*a) < y(*a),
            lambda *a: x(*a) >= y(*a),
            lambda *a: x(*a) != c,
            lambda *a: c < x(*a),
            lambda *a: x(*a) % 3 == 0,
            lambda s, b, h, q, k: kept[h, k],
        )
        if depth == 0:
            return simple
        other = self.condition(depth - 1)
        return self.pick(
            simple,
            lambda *a: simple(*a) & other(*a),
            lambda *a: simple(*a) | other(*a),
            # Of a traced value or an array: ~True of Python is -2.
            lambda *a: ~(simple(*a) & (a[4] >= 0)) ^ other(*a),
        )

    def floating(self, depth: int) -> Callable[..., Any]:
        slopes, bias = self.arrays["slopes"], self.arrays["bias"]
        c = round(float(self.rng.uniform(-2, 2)), 3)
        if depth == 0:
            return self.pick(
                lambda s, b, h, q, k: s,
                lambda s, b, h, q, k: s * c,
                lambda s, b, h, q, k: slopes[h],
                lambda s, b, h, q, k: slopes[h] * 2 ** (-h / 4),
                lambda s, b, h, q, k: bias[q, k],
                lambda s, b, h, q, k: c,
            )
        x, y = self.floating(depth - 1), self.floating(depth - 1)
        i, condition = self.integer(depth - 1), self.condition(depth - 1)
        return self.pick(
            lambda *a: x(*a) + y(*a),
            lambda *a: x(*a) - y(*a) * c,
            lambda *a: 3 * flashbsr.tanh(x(*a) / 3) * flashbsr.sigmoid(y(*a)),
            lambda *a: flashbsr.exp(-abs(x(*a))) + y(*a),
            lambda *a: flashbsr.log(1 + abs(x(*a))) - y(*a),
            lambda *a: flashbsr.sqrt(1 + x(*a) ** 2) + c,
            lambda *a: flashbsr.exp2(-abs(y(*a))) * 2,
            lambda *a: x(*a) / (1 + abs(y(*a))),
            lambda *a: flashbsr.minimum(x(*a), 2 + y(*a)),
            lambda *a: flashbsr.maximum(x(*a), c),
            lambda *a: x(*a) + i(*a) / 64,
            lambda *a: x(*a) + (i(*a) % 7) * 0.25,
            lambda *a: flashbsr.where(condition(*a), x(*a), -y(*a)),
        )


def random_functions(seed: int, arrays: dict[str, Any]) -> tuple[Callable[..., Any], ...]:
    """A score function and a mask function, which keeps what is on the query's own place."""
    maker = Maker(seed, arrays)
    score, condition = maker.floating(3), maker.condition(2)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        # Bounded: logits of thousands would leave one key, and test nothing.
        return 8 * flashbsr.tanh(score(s, b, h, q, k) / 8) + 0 * s

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return condition(0, b, h, q, k) | (q == k)

    return score_mod, mask_mod
