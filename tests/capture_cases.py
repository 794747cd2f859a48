# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Captured calls and what must not change them: each case runs on the fake driver and on a GPU.

fp16, compared with float64; a replay that computes other keys is wrong by 0.3 to 1.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import flashbsr
import flashbsr.flashinfer as flashinfer
import numpy as np
import pytest
import reference
from captures import Rig, in_a_thread

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 64, 16, 64


class Call:
    """A function of FlashInfer's, of a number of keys: what it takes, does and should give."""

    def __init__(self, rig: Rig, name: str) -> None:
        numbers = np.random.default_rng(3)
        self.rig, self.name = rig, name
        self.q = numbers.standard_normal((2, HEADS, DIM)).astype(np.float16)
        self.k, self.v = numbers.standard_normal((2, 512, KV_HEADS, DIM)).astype(np.float16)
        self.pages = numbers.permutation(PAGES)
        cache = np.zeros((PAGES, 2, PAGE, KV_HEADS, DIM), np.float16)
        for i, page in enumerate(self.pages[:32]):
            cache[page, 0] = self.k[i * PAGE : (i + 1) * PAGE]
            cache[page, 1] = self.v[i * PAGE : (i + 1) * PAGE]
        self.on_device = [rig.put(x) for x in (self.q, self.k, self.v, cache)]

    def __call__(self, keys: int, **options: Any) -> Any:
        """Call it; the output."""
        q, k, v, cache = self.on_device
        if self.name == "single_decode":
            return flashinfer.single_decode_with_kv_cache(q[0], k[:keys], v[:keys], **options)
        if self.name == "single_prefill":
            return flashinfer.single_prefill_with_kv_cache(
                q, k[:keys], v[:keys], causal=True, **options
            )
        return flashinfer.trtllm_batch_decode_with_kv_cache(
            q[:1], cache, None, self.pages[None, :32].astype(np.int32), np.array([keys], np.int32),
            512, bmm1_scale=DIM**-0.5, kv_layout="NHD", **options,
        )  # fmt: skip

    def check(self, out: Any, keys: int) -> None:
        """Compare with float64."""
        rows = 2 if self.name == "single_prefill" else 1
        want = reference.attend(
            self.q[:rows], self.k[:keys], self.v[:keys],
            reference.Variant(causal=self.name == "single_prefill"),
        ).out  # fmt: skip
        got = self.rig.get(out).reshape(rows, HEADS, DIM)
        np.testing.assert_allclose(got, want, atol=2e-3, rtol=2e-3)

    def captured(self, keys: int) -> tuple[Any, Any]:
        """A graph of a call, and where it writes."""
        with self.rig.use(self.rig.streams[0]):
            self(keys)  # kernels are loaded, as every guide to CUDA graphs asks for
        with self.rig.capture(self.rig.streams[0]) as graph:
            out = self(keys)
        return graph, out

    def replayed(self, graph: Any, out: Any, keys: int) -> None:
        self.rig.poison(out)
        self.rig.replay(graph, self.rig.streams[0])
        self.check(out, keys)


def eager_calls_after(rig: Rig, name: str) -> None:
    """Defects 1 and 2: calls of other lengths, also longer ones, also when the graph is gone."""
    call = Call(rig, name)
    graph, out = call.captured(256)
    for keys in (100, 512, 16):
        call.check(call(keys), keys)
        call.replayed(graph, out, 256)
    rig.destroy(graph)
    call.check(call(500), 500)


def two_graphs(rig: Rig, name: str) -> None:
    """Defect 1: graphs of one function with different lengths."""
    call = Call(rig, name)
    first, second = call.captured(500), call.captured(300)
    call.replayed(*first, 500)
    call.replayed(*second, 300)
    call.replayed(*first, 500)


def other_options(rig: Rig, name: str) -> None:
    """Defect 4: as many sets of options as evict every engine."""
    call = Call(rig, name)
    graph, out = call.captured(256)
    for i in range(40):
        call(64, window_left=30 + i)
    gc.collect()
    call(400)
    call.replayed(graph, out, 256)


def the_thread_ends(rig: Rig, name: str) -> None:
    """Defect 5: the engines of a thread end with it."""
    call, captured = Call(rig, name), []
    in_a_thread(lambda: captured.append(call.captured(256)))
    gc.collect()
    call(400)
    call.replayed(*captured[0], 256)


def _wrapper(**options: Any) -> Any:
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, "NHD", **options)


def _plan(wrapper: Any, call: Call, keys: int, first: int = 0, **options: Any) -> None:
    pages = -(-keys // PAGE)
    wrapper.plan(
        np.array([0, pages], np.int32), call.pages[first : first + pages].astype(np.int32),
        np.array([keys - (pages - 1) * PAGE], np.int32), HEADS, KV_HEADS, DIM, PAGE, **options,
    )  # fmt: skip


def a_wrapper_without_graph_mode(rig: Rig) -> None:
    """Defect 6: eight and more other sets of options in the wrapper that was captured."""
    call = Call(rig, "wrapper")
    q, _, _, cache = call.on_device
    wrapper = _wrapper()
    with rig.use(rig.streams[0]):
        _plan(wrapper, call, 256)
        wrapper.run(q[:1], cache)
    out = rig.put(np.zeros((1, HEADS, DIM), np.float16))
    with rig.capture(rig.streams[0]) as graph:
        wrapper.run(q[:1], cache, out=out)
    with rig.use(rig.streams[0]):
        for i in range(12):
            _plan(wrapper, call, 100, window_left=20 + i)
            wrapper.run(q[:1], cache)
        _plan(wrapper, call, 500)
        call.check(wrapper.run(q[:1], cache), 500)
    gc.collect()
    call.replayed(graph, out, 256)


def options_spelled_otherwise(rig: Rig) -> None:
    """Defect 7: in graph mode the same options are the same engine, and others raise."""
    call = Call(rig, "wrapper")
    q, _, _, cache = call.on_device
    buffers = [rig.put(np.zeros(n, np.int32)) for n in (2, 32, 1)]
    wrapper = _wrapper(
        use_cuda_graph=True, paged_kv_indptr_buffer=buffers[0],
        paged_kv_indices_buffer=buffers[1], paged_kv_last_page_len_buffer=buffers[2],
    )  # fmt: skip
    out = rig.put(np.zeros((1, HEADS, DIM), np.float16))
    with rig.use(rig.streams[0]):
        _plan(wrapper, call, 256)
        wrapper.run(q[:1], cache)
    with rig.capture(rig.streams[0]) as graph:
        wrapper.run(q[:1], cache, out=out)
    call.replayed(graph, out, 256)
    same: list[dict[str, Any]] = [
        {"logits_soft_cap": 0.0},
        {"logits_soft_cap": None},
        {"q_data_type": "float16"},
        {"q_data_type": np.float16, "kv_data_type": "float16"},
        {"sm_scale": DIM**-0.5},
        {"sm_scale": None, "rope_scale": 1.0, "rope_theta": 1e4},
        {"window_left": -1},
    ]
    with rig.use(rig.streams[0]):
        for i, options in enumerate(same):
            _plan(wrapper, call, 100 + 16 * i, **options)
            call.replayed(graph, out, 100 + 16 * i)
        for options in ({"window_left": 30}, {"logits_soft_cap": 5.0}, {"sm_scale": 1.0}):
            with pytest.raises(flashbsr.PlanError, match=next(iter(options))):
                _plan(wrapper, call, 100, **options)
            call.replayed(graph, out, 196)
        _plan(wrapper, call, 64)
        call.replayed(graph, out, 64)
    rig.destroy(graph)


FUNCTIONS = ("single_decode", "single_prefill", "trtllm_decode")
OF_FUNCTIONS: tuple[Callable[[Rig, str], None], ...] = (
    eager_calls_after, two_graphs, other_options, the_thread_ends,
)  # fmt: skip
OF_WRAPPERS: tuple[Callable[[Rig], None], ...] = (
    a_wrapper_without_graph_mode, options_spelled_otherwise,
)  # fmt: skip
