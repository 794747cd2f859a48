# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""From logits to one token: greedy, temperature, top-p."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def sample(
    logits: NDArray[np.float32], temperature: float, top_p: float, rng: np.random.Generator
) -> int:
    """One token id.

    Parameters
    ----------
    logits : (vocab,) float32
    temperature : float
        0 is greedy and draws nothing from `rng`.
    top_p : float
        In (0, 1]: the smallest set of most likely tokens that has this mass is drawn from.
    rng : numpy.random.Generator
        The request's own, so that its draws do not depend on the batch.
    """
    if temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")
    scaled = logits[order].astype(np.float64) / temperature
    mass = np.cumsum(np.exp(scaled - scaled[0]))
    kept = int(np.searchsorted(mass, top_p * mass[-1])) + 1
    drawn = np.searchsorted(mass[:kept], rng.random() * mass[kept - 1], side="right")
    return int(order[min(int(drawn), kept - 1)])
