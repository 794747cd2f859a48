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
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    if top_p < 1:
        ranked = np.sort(weights)[::-1]
        mass = np.cumsum(ranked)
        weights[weights < ranked[np.searchsorted(mass, top_p * mass[-1])]] = 0
    mass = np.cumsum(weights)
    return int(np.searchsorted(mass, rng.random() * mass[-1], side="right"))
