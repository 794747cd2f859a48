# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A random walk over captures, replays, plans, eager calls, threads and deletions.

A model says what every replay must compute: outside of graph mode what was captured, in graph mode
(a capacity) what the last plan of the same object says that did not raise. The walk runs on the
fake driver and on a GPU; a `Rig` is what differs.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import flashbsr
import numpy as np
import pytest

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 64, 4, 256
ROWS = 32  # of q, the most that a batch has
CAPACITY = {"max_batch_size": 6, "max_q_tokens": ROWS, "max_kv_pages": 200}
# Few, so that objects and engines of functions meet again and again.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "window_left": 9},
    {"causal": True, "logits_soft_cap": 20.0},
    {"causal": True, "sm_scale": 0.3},
)
MOST = 5  # objects, and graphs, that are there at a time


class Rig(Protocol):
    """A GPU, or what stands in for one."""

    streams: list[Any]

    def put(self, x: np.ndarray) -> Any:
        """Array on the device."""

    def get(self, x: Any) -> np.ndarray:
        """What a device array has when all work is done, float32."""

    def poison(self, x: Any) -> None:
        """Fill with NaN, on the first stream."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one of this thread."""

    def capture(self, stream: Any) -> AbstractContextManager[Any]:
        """Capture what is put on the stream, which is current then; gives the graph."""

    def replay(self, graph: Any, stream: Any) -> None: ...

    def destroy(self, graph: Any) -> None: ...


@dataclass(frozen=True)
class Batch:
    """Lengths of requests, and which pages they have."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    seed: int

    def layout(self) -> flashbsr.Paged:
        counts = [-(-n // PAGE) for n in self.kv_lens]
        ids = np.random.default_rng(self.seed).permutation(PAGES)[: sum(counts)]
        return flashbsr.Paged(
            np.cumsum([0, *self.q_lens]),
            np.cumsum([0, *counts]),
            ids,
            kv_lens=np.array(self.kv_lens),
            page_size=PAGE,
        )

    @property
    def rows(self) -> int:
        return sum(self.q_lens)


@dataclass
class Object:
    """An `Attention` with its last plan."""

    attention: Any
    options: int
    graph_mode: bool
    state: dict[str, Batch]  # "batch": the last plan; graphs keep it when the object is gone


@dataclass
class Launch:
    """A captured call: where it writes, and what a replay must write there."""

    out: Any
    expected: Callable[[], np.ndarray]


@dataclass
class Graph:
    handle: Any
    launches: list[Launch] = field(default_factory=list)


class Walk:
    """The objects and graphs that are there, and the steps that change them."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        numbers = np.random.default_rng(seed)
        self.q = numbers.standard_normal((ROWS, HEADS, DIM)).astype(np.float16)
        self.cache = numbers.standard_normal((PAGES, 2, PAGE, KV_HEADS, DIM)).astype(np.float16)
        self.k, self.v = numbers.standard_normal((2, 128, KV_HEADS, DIM)).astype(np.float16)
        self.on_device = {n: rig.put(getattr(self, n)) for n in ("q", "cache", "k", "v")}
        self.known: dict[Any, np.ndarray] = {}
        self.objects: list[Object] = []
        self.graphs: list[Graph] = []
        self.counts: dict[str, int] = {}

    # --- what is right

    def paged(self, options: int, batch: Batch) -> np.ndarray:
        """The CPU's answer, whose own tests are against float64."""
        key = options, batch
        if key not in self.known:
            attention = flashbsr.Attention(
                flashbsr.AttentionSpec(**OPTIONS[options]),
                flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, backend="cpu"),
            )
            attention.plan(batch.layout())
            out = attention.run(self.q[: batch.rows], self.cache)
            self.known[key] = out.astype(np.float32)
        return self.known[key]

    def dense(self, options: int, q_len: int, kv_len: int) -> np.ndarray:
        key = options, q_len, kv_len
        if key not in self.known:
            out = flashbsr.attention(
                self.q[:q_len], self.k[:kv_len], self.v[:kv_len], cu_seqlens_q=np.array([0, q_len]),
                cu_seqlens_k=np.array([0, kv_len]), **OPTIONS[options],
            )  # fmt: skip
            self.known[key] = out.astype(np.float32)
        return self.known[key]

    def check(self, launch: Launch) -> None:
        want = launch.expected()
        got = self.rig.get(launch.out)[: len(want)]
        np.testing.assert_allclose(got, want, atol=4e-3, rtol=4e-3)

    # --- steps

    def batch(self) -> Batch:
        requests = self.random.randint(1, CAPACITY["max_batch_size"])
        q_lens, left = [], ROWS
        for _ in range(requests):
            q_lens.append(min(self.random.choice((1, 1, 1, 2, 7)), left))
            left -= q_lens[-1]
        kv_lens = [self.random.randint(max(n, 1), 90) for n in q_lens]
        return Batch(tuple(q_lens), tuple(kv_lens), self.random.randrange(100))

    def stream(self, obj: Object | None = None) -> Any:
        """In graph mode all is on one stream, as the documentation asks for."""
        own = obj is not None and obj.graph_mode
        return self.rig.streams[0] if own else self.random.choice(self.rig.streams)

    def pick(self) -> Object:
        if not self.objects or (len(self.objects) < MOST and self.random.random() < 0.2):
            options, graph_mode = self.random.randrange(len(OPTIONS)), self.random.random() < 0.5
            attention = flashbsr.Attention(
                flashbsr.AttentionSpec(**OPTIONS[options]),
                flashbsr.TaskInfo(
                    HEADS, KV_HEADS, DIM, backend="cuda", kv_dtype="float16",
                    **(CAPACITY if graph_mode else {}),
                ),
            )  # fmt: skip
            obj = Object(attention, options, graph_mode, {})
            self.objects.append(obj)
            self.plan(obj)
        return self.random.choice(self.objects)

    def plan(self, obj: Object | None = None) -> None:
        obj = obj or self.pick()
        batch = self.batch()
        with self.rig.use(self.stream(obj)):
            obj.attention.plan(batch.layout())
        obj.state["batch"] = batch

    def bad_plan(self) -> None:
        """One that raises leaves graphs as they were; the object is planned again."""
        obj = self.pick()
        if not obj.graph_mode:
            return
        kinds: list[tuple[type, Any, dict[str, Any]]] = [
            (flashbsr.CapacityError, Batch((1,) * 7, (3,) * 7, 1).layout(), {}),
            (flashbsr.CapacityError, Batch((ROWS + 1,), (90,), 1).layout(), {}),
        ]
        if obj.attention.captured:
            mask = {"custom_mask": np.ones(5, bool)}
            kinds.append((flashbsr.PlanError, Batch((1,), (5,), 1).layout(), mask))
            ragged = flashbsr.Ragged(np.array([0, 2]), np.array([0, 9]))
            kinds.append((flashbsr.PlanError, ragged, {}))
        error, layout, options = self.random.choice(kinds)
        with self.rig.use(self.rig.streams[0]):
            with pytest.raises(error):
                obj.attention.plan(layout, **options)
            self.replay()
            obj.attention.plan(obj.state["batch"].layout())

    def out(self) -> Any:
        return self.rig.put(np.full((ROWS, HEADS, DIM), np.nan, np.float16))

    def launch(self, obj: Object, out: Any) -> Launch:
        """Run an object; in graph mode q has rows for any batch."""
        batch, options, state = obj.state["batch"], obj.options, obj.state
        rows = ROWS if obj.graph_mode else batch.rows
        obj.attention.run(self.on_device["q"][:rows], self.on_device["cache"], out=out[:rows])
        if obj.graph_mode:
            return Launch(out, lambda: self.paged(options, state["batch"]))
        return Launch(out, lambda: self.paged(options, batch))

    def call(self, out: Any) -> Launch:
        """Call a function, which keeps engines by its options."""
        options = self.random.randrange(len(OPTIONS))
        q_len, kv_len = self.random.choice((1, 1, 3)), self.random.randint(3, 128)
        flashbsr.attention(
            self.on_device["q"][:q_len], self.on_device["k"][:kv_len],
            self.on_device["v"][:kv_len], cu_seqlens_q=np.array([0, q_len]),
            cu_seqlens_k=np.array([0, kv_len]), out=out[:q_len], **OPTIONS[options],
        )  # fmt: skip
        return Launch(out, lambda: self.dense(options, q_len, kv_len))

    def run(self) -> None:
        obj = self.pick()
        out = self.out()
        with self.rig.use(self.stream(obj)):
            launch = self.launch(obj, out)
        self.check(launch)

    def eager_call(self) -> None:
        out = self.out()
        with self.rig.use(self.stream()):
            launch = self.call(out)
        self.check(launch)

    def capture(self) -> None:
        objects = [self.pick() for _ in range(self.random.randint(0, 2))]
        calls = self.random.randint(0 if objects else 1, 2)
        stream = self.rig.streams[0] if any(o.graph_mode for o in objects) else self.stream()
        outs = [self.out() for _ in range(len(objects) + calls)]
        with self.rig.capture(stream) as handle:
            graph = Graph(handle)
            for obj, out in zip(objects, outs, strict=False):
                if not obj.graph_mode and self.random.random() < 0.4:
                    batch = self.batch()
                    obj.attention.plan(batch.layout())
                    obj.state = {"batch": batch}
                graph.launches.append(self.launch(obj, out))
            graph.launches += [self.call(out) for out in outs[len(objects) :]]
        self.graphs.append(graph)
        if len(self.graphs) > MOST:
            self.destroy()

    def replay(self) -> None:
        if self.graphs:
            self.replay_and_check(self.random.choice(self.graphs))

    def replay_and_check(self, graph: Graph) -> None:
        for launch in graph.launches:
            self.rig.poison(launch.out)
        self.rig.replay(graph.handle, self.rig.streams[0])
        for launch in graph.launches:
            self.check(launch)

    def destroy(self) -> None:
        if self.graphs:
            graph = self.graphs.pop(self.random.randrange(len(self.graphs)))
            self.rig.destroy(graph.handle)

    def forget(self) -> None:
        if self.objects:
            self.objects.pop(self.random.randrange(len(self.objects)))
            gc.collect()

    def step(self) -> None:
        steps = {
            self.plan: 20, self.bad_plan: 4, self.run: 16, self.eager_call: 14, self.capture: 12,
            self.replay: 26, self.destroy: 3, self.forget: 5,
        }  # fmt: skip
        chosen = self.random.choices([*steps], [*steps.values()])[0]
        self.counts[chosen.__name__] = self.counts.get(chosen.__name__, 0) + 1
        if self.random.random() < 0.15:
            in_a_thread(chosen)  # which ends, and its engines with it
        else:
            chosen()

    def finish(self) -> None:
        """Replay what is left once more, without any object, and destroy it."""
        self.objects.clear()
        gc.collect()
        for graph in self.graphs:
            self.replay_and_check(graph)
        while self.graphs:
            self.destroy()


def in_a_thread(step: Callable[[], None]) -> None:
    """Do a step in a thread of its own; what it raises is raised here."""
    problems: list[BaseException] = []

    def body() -> None:
        try:
            step()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
