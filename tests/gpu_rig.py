# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A GPU by way of PyTorch, for `captures.Walk`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from harness import framework


class GpuRig:
    """PyTorch's graphs and streams as what `captures.Walk` needs."""

    def __init__(self) -> None:
        self.torch = framework("torch")
        self.streams = [self.torch.cuda.Stream() for _ in range(3)]

    def put(self, x: np.ndarray) -> Any:
        on_device = self.torch.from_numpy(x.copy()).cuda()
        self.torch.cuda.synchronize()  # no stream of ours waits for it
        return on_device

    def get(self, x: Any) -> np.ndarray:
        self.torch.cuda.synchronize()
        return x.float().cpu().numpy()

    def poison(self, x: Any) -> None:
        self.torch.cuda.synchronize()
        x.fill_(float("nan"))
        self.torch.cuda.synchronize()

    def use(self, stream: Any) -> Any:
        return self.torch.cuda.stream(stream)

    @contextlib.contextmanager
    def capture(self, stream: Any) -> Iterator[Any]:
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=stream):
            yield graph

    def replay(self, graph: Any, stream: Any) -> None:
        with self.torch.cuda.stream(stream):
            graph.replay()

    def destroy(self, graph: Any) -> None:
        self.torch.cuda.synchronize()
        graph.reset()
