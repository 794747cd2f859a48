# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A block of a model as one JAX program, and how a process ends that runs one."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from flashbsr import Attention, AttentionSpec, Bounds, Paged, TaskInfo
from harness import framework

jax = framework("jax")
jnp = jax.numpy
door = importlib.import_module("flashbsr.integrations.jax")

HIDDEN, HEADS, KV_HEADS, DIM, PAGE, PAGES = 64, 4, 2, 16, 4, 24


def _weights(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed).standard_normal
    shapes = {
        "q": (HIDDEN, HEADS * DIM), "k": (HIDDEN, KV_HEADS * DIM), "v": (HIDDEN, KV_HEADS * DIM),
        "o": (HEADS * DIM, HIDDEN), "gate": (HIDDEN, 96), "up": (HIDDEN, 96), "down": (96, HIDDEN),
    }  # fmt: skip
    weights = {name: (draw(shape) / 8).astype(np.float32) for name, shape in shapes.items()}
    return weights | {name: 1 + draw(HIDDEN).astype(np.float32) / 8 for name in ("n1", "n2")}


def _norm(x: Any, weight: Any) -> Any:
    return x * weight / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def _block(w: Any, x: Any, cache: Any, positions: Any, slots: Any, attend: Any) -> Any:
    """RMSNorm, QKV, RoPE, append, attention, projection, SwiGLU."""
    y = _norm(x, w["n1"])
    q, k, v = ((y @ w[n]).reshape(len(x), -1, DIM) for n in "qkv")
    q, k = door.apply_rope_pos_ids(q, k, positions)
    cache = door.append_paged_kv_cache(k, v, *cache, slots)
    x = x + attend(q, cache).reshape(len(x), -1) @ w["o"]
    y = _norm(x, w["n2"])
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], cache


def _exact(w: Any, x: np.ndarray) -> np.ndarray:
    """The same over one whole sequence, in float64, without pages."""
    w = {name: a.astype(np.float64) for name, a in w.items()}
    x, n = x.astype(np.float64), len(x)

    def norm(x: Any, weight: Any) -> Any:
        return x * weight / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    def turned(a: Any) -> Any:
        angles = np.arange(n)[:, None] * 1e4 ** (-np.arange(DIM // 2) / (DIM // 2))
        c, s = (f(angles)[:, None] for f in (np.cos, np.sin))
        first, second = np.split(a, 2, -1)
        return np.concatenate([first * c - second * s, second * c + first * s], -1)

    y = norm(x, w["n1"])
    q, k, v = ((y @ w[name]).reshape(n, -1, DIM) for name in "qkv")
    k, v = (np.repeat(a, HEADS // KV_HEADS, 1) for a in (turned(k), v))
    logits = np.einsum("qhd,khd->hqk", turned(q), k) / np.sqrt(DIM)
    logits[:, ~np.tri(n, dtype=bool)] = -np.inf
    p = np.exp(logits - logits.max(-1, keepdims=True))
    out = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)
    x = x + out.reshape(n, -1) @ w["o"]
    y = norm(x, w["n2"])
    gate = y @ w["gate"]
    return x + (gate / (1 + np.exp(-gate)) * (y @ w["up"])) @ w["down"]


def _attention() -> Attention:
    task = TaskInfo(HEADS, KV_HEADS, DIM, num_threads=1)
    return Attention(AttentionSpec(causal=True), task)


def _empty() -> tuple[Any, Any]:
    cache = jnp.full((PAGES, PAGE, KV_HEADS, DIM), jnp.nan)
    return cache, cache + 0


def test_a_block_over_twenty_plans_is_compiled_once() -> None:
    """Prefill, prefill again, decode: other batches under the same shapes."""
    w, attention, traces = _weights(), _attention(), 0

    def step(w: Any, x: Any, cache: Any, positions: Any, slots: Any) -> Any:
        nonlocal traces
        traces += 1
        return _block(w, x, cache, positions, slots, lambda q, kv: door.run(attention, q, kv))

    program = jax.jit(step, donate_argnums=2)
    rng = np.random.default_rng(1)
    for _ in range(20):
        first = int(rng.integers(1, 12))
        lens = np.array([first, 12 - first])
        counts = -(-lens // PAGE)
        pages = rng.permutation(PAGES)[:6]  # of both, three each
        attention.plan(
            Paged(
                np.array([0, first, 12]), np.concatenate([[0], np.cumsum(counts)]),
                np.concatenate([pages[: counts[0]], pages[3 : 3 + counts[1]]]),
                kv_lens=lens, page_size=PAGE,
            )
        )  # fmt: skip
        positions = np.concatenate([np.arange(n) for n in lens]).astype(np.int32)
        own = np.repeat([0, 3], lens)
        slots = (pages[own + positions // PAGE] * PAGE + positions % PAGE).astype(np.int32)
        x = rng.standard_normal((12, HIDDEN)).astype(np.float32)
        out, cache = program(w, x, _empty(), positions, slots)
        eager, _ = step(w, jnp.asarray(x), _empty(), positions, slots)
        traces -= 1
        np.testing.assert_allclose(out, eager, atol=1e-5)
        want = np.concatenate([_exact(w, x[:first]), _exact(w, x[first:])])
        np.testing.assert_allclose(out, want, atol=2e-5)
        assert int(np.isnan(cache[0]).sum()) == (PAGES * PAGE - 12) * KV_HEADS * DIM
    assert traces == 1


def test_twenty_decode_steps_are_one_scan_over_a_donated_cache() -> None:
    """Positions, slots and lengths are counted by the program; one plan of bounds."""
    w, attention, steps = _weights(), _attention(), 20
    attention.plan(Bounds(None, [steps, steps], page_size=PAGE))
    tables = np.random.default_rng(2).permutation(PAGES)[:10].reshape(2, 5).astype(np.int32)

    def step(carry: Any, x: Any) -> Any:
        cache, lens = carry
        slots = jnp.asarray(tables)[jnp.arange(2), lens // PAGE] * PAGE + lens % PAGE
        attend = functools.partial(door.run, attention, kv_lens=lens + 1, block_tables=tables)
        out, cache = _block(w, x, cache, lens, slots, lambda q, kv: attend(q, kv))
        return (cache, lens + 1), out

    program = jax.jit(lambda carry, x: jax.lax.scan(step, carry, x), donate_argnums=0)
    x = np.random.default_rng(3).standard_normal((steps, 2, HIDDEN)).astype(np.float32)
    start = _empty(), jnp.zeros(2, jnp.int32)
    where = [a.unsafe_buffer_pointer() for a in start[0]]
    (cache, lens), out = program(start, x)
    assert start[0][0].is_deleted()
    assert [a.unsafe_buffer_pointer() for a in cache] == where  # nothing was copied
    np.testing.assert_array_equal(lens, [steps, steps])
    for b in range(2):
        np.testing.assert_allclose(out[:, b], _exact(w, x[:, b]), atol=3e-5)


PROGRAM = """
import gc, sys, threading, time
import jax, numpy as np
from flashbsr import Attention, AttentionSpec, Ragged, TaskInfo
from flashbsr.integrations import jax as door
attention = Attention(AttentionSpec(causal=True), TaskInfo(4, 2, 64, num_threads=2))
attention.plan(Ragged(np.array([0, 64]), np.array([0, 512])))
q, kv = np.ones((64, 4, 64), np.float32), np.ones((512, 2, 64), np.float32)
handle = door.handle(attention)
@jax.jit
def program(handle, q, kv):
    return jax.lax.fori_loop(0, 10_000, lambda i, q: door.run(handle, q, (kv, kv)), q)
def later():
    try:
        jax.block_until_ready(program(handle, q, kv))
        ended.append("done")
    except Exception as error:
        ended.append(str(error))
ended = []
"""
ENDS = {
    "after a run": "jax.block_until_ready(door.run(attention, q, (kv, kv)))",
    # Dispatched, not waited for. (A thread of Python's in a program aborts JAX alone, too.)
    "while a program runs": """
result = program(handle, q, kv)
time.sleep(0.2)
""",
    "in a process forked from one": """
import os, warnings
warnings.simplefilter("ignore")
thread = threading.Thread(target=later)
thread.start()
time.sleep(0.5)
assert not ended, ended
child = os.fork()
if child == 0:
    import flashbsr.engine.live
    flashbsr.engine.live._end()  # JAX's own end waits for its threads
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
thread.join()
assert ended == ["done"], ended
""",
    "after its attention went": """
thread = threading.Thread(target=later)
thread.start()
time.sleep(0.5)
assert not ended, ended
del attention
gc.collect()
thread.join()
assert "PlanError: attention: got number" in ended[0] and "which is gone" in ended[0], ended
""",
}


@pytest.mark.parametrize("how", list(ENDS))
def test_a_process_ends_without_a_word(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + ENDS[how]],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
