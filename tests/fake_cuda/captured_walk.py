# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Captured calls and a random walk over them, on the fake driver; test_fake_cuda.py runs it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import capture_cases
import captures
import flashbsr
import numpy as np
import pytest
import torch

from fake_cuda.fake import Driver, FakeTorch


class FakeRig:
    """The fake driver as what `captures.Walk` needs."""

    def __init__(self, driver: Driver, fake_torch: FakeTorch) -> None:
        self.driver, self.torch = driver, fake_torch
        self.streams = [driver.stream() for _ in range(3)]

    def put(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x.copy())

    def get(self, x: torch.Tensor) -> np.ndarray:
        self.driver.drain()
        return x.float().numpy()

    def poison(self, x: torch.Tensor) -> None:
        self.driver.drain()
        x.fill_(float("nan"))

    @contextlib.contextmanager
    def use(self, stream: int) -> Iterator[None]:
        before, self.torch.current = self.torch.current, stream
        try:
            yield
        finally:
            self.torch.current = before

    @contextlib.contextmanager
    def capture(self, stream: int) -> Iterator[Any]:
        with self.use(stream), self.driver.capture(stream) as graph:
            yield graph

    def replay(self, graph: Any, stream: int) -> None:
        self.driver.replay(graph, stream)

    def destroy(self, graph: Any) -> None:
        self.driver.destroy_graph(graph)


@pytest.fixture
def rig(driver: Driver, fake_torch: FakeTorch) -> FakeRig:
    return FakeRig(driver, fake_torch)


@pytest.mark.parametrize("name", capture_cases.FUNCTIONS)
@pytest.mark.parametrize("case", capture_cases.OF_FUNCTIONS, ids=lambda case: case.__name__)
def test_functions(rig: FakeRig, case: Any, name: str) -> None:
    case(rig, name)


@pytest.mark.parametrize("case", capture_cases.OF_WRAPPERS, ids=lambda case: case.__name__)
def test_wrappers(rig: FakeRig, case: Any) -> None:
    case(rig)


@pytest.mark.parametrize("seed", range(3))
def test_a_replay_computes_what_the_model_says(rig: FakeRig, seed: int) -> None:
    """And when everything is gone, so is its memory, at the next plan."""

    def plan_something() -> None:  # which lets go of what graphs held that are gone
        gc.collect()
        attention = flashbsr.Attention(
            flashbsr.AttentionSpec(), flashbsr.TaskInfo(1, 1, 64, backend="cpu")
        )
        attention.plan(flashbsr.Ragged(None, np.array([0, 1])))

    plan_something()
    before = rig.driver.allocations

    def body() -> None:  # in a thread, whose engines of functions end with it
        walk = captures.Walk(rig, seed)
        for _ in range(200):
            walk.step()
        walk.finish()
        assert walk.counts["replay"] > 30
        assert walk.counts["capture"] > 10

    captures.in_a_thread(body)
    plan_something()
    assert rig.driver.allocations == before
