# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Plans and updates of all sorts, one after another: an engine remembers none of those before.

A new engine that sees only the last of them gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import flashbsr
import numpy as np
import pytest
from harness import Device

PAGE, DIM, MOST = 16, 64, 300
TASKS: tuple[dict[str, Any], ...] = (
    {},
    {"num_workers": 5},
    {"fixed_split_size": 64},
    {"max_batch_size": 6, "max_q_tokens": 200, "max_kv_pages": 6 * MOST},
)


@dataclass
class Step:
    """A layout, what comes after it, and what it is run on."""

    layout: flashbsr.Layout
    q: np.ndarray
    kv: Any
    options: dict[str, Any] = field(default_factory=dict)
    updates: list[dict[str, Any]] = field(default_factory=list)


def draw(rng: np.random.Generator, heads: tuple[int, int]) -> Step:
    """A batch as ragged arrays, by a block table, or by bounds whose lengths come later, twice."""
    count = int(rng.integers(1, 7))
    kv_lens = rng.choice([0, 1, 5, 17, 130, MOST], count)
    q_lens = rng.choice([0, 1, 1, 4, 30], count)
    indptr = np.concatenate([[0], np.cumsum(q_lens)])
    numbers = lambda *shape: rng.standard_normal(shape).astype(np.float16)
    q = numbers(int(indptr[-1]), heads[0], DIM)
    kind = rng.choice(["ragged", "table", "shared", "bounds", "bounds"])
    if kind == "ragged":
        kv = tuple(numbers(int(kv_lens.sum()), heads[1], DIM) for _ in range(2))
        return Step(flashbsr.Ragged(indptr, np.concatenate([[0], np.cumsum(kv_lens)])), q, kv)
    width = -(-MOST // PAGE)
    table = rng.permutation(count * width).reshape(count, width).astype(np.int32)
    kv = numbers(count * width, 2, PAGE, heads[1], DIM)
    if kind == "shared":
        table[:, : int(rng.integers(1, width))] = table[0, : int(rng.integers(1, 2))]
    if kind != "bounds":
        options = {"share_prefixes": str(rng.choice(["auto", "off"]))}
        return Step(flashbsr.BlockTable(indptr, table, kv_lens, page_size=PAGE), q, kv, options)
    updates: list[dict[str, Any]] = []
    for _ in range(2):
        lens = rng.integers(0, kv_lens + 1).astype(np.int32)
        updates.append({"kv_lens": lens, "block_tables": table})
        if rng.integers(2):
            fewer = rng.integers(0, q_lens + 1)
            updates[-1]["qo_indptr"] = np.concatenate([[0], np.cumsum(fewer)]).astype(np.int32)
    return Step(flashbsr.Bounds(indptr, kv_lens, page_size=PAGE), q, kv, updates=updates)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: "-".join(task) or "plain")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_left_of_what_came_before(
    seed: int, causal: bool, task: dict[str, Any], device: Device
) -> None:
    rng = np.random.default_rng(seed)
    heads = (8, int(rng.choice([1, 2, 8])))
    types = {"q_dtype": "float16", "kv_dtype": "float16", "backend": device.backend}

    def engine() -> flashbsr.Attention:
        spec = flashbsr.AttentionSpec(causal=causal)
        return flashbsr.Attention(spec, flashbsr.TaskInfo(*heads, DIM, **types, **task))

    def run(attention: flashbsr.Attention, step: Step, updates: list[dict[str, Any]]) -> Any:
        attention.plan(step.layout, **step.options)
        found: tuple[Any, ...] = ()
        for update in updates or [None]:
            if update is not None:
                attention.update(**{name: device.put(x) for name, x in update.items()})
            out = device.put(np.full(step.q.shape, np.nan, np.float16))
            lse = device.put(np.full(step.q.shape[:2], np.nan, np.float32))
            attention.run(device.put(step.q), device.put_kv(step.kv), out=out, lse=lse)
            found = device.get(out), device.get(lse)
        return found

    kept = engine()
    for _ in range(6):
        step = draw(rng, heads)
        for x, y in zip(
            run(kept, step, step.updates), run(engine(), step, step.updates[-1:]), strict=True
        ):
            assert not np.isnan(x.astype(np.float32)).any()
            np.testing.assert_array_equal(x, y)
