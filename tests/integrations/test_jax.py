# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Nodes of JAX programs: jit, scan with a carried cache, shard_map, handles that have gone."""

from __future__ import annotations

import importlib
import subprocess
import sys

import flashbsr
import numpy as np
import pytest
from flashbsr import Attention, AttentionSpec, Bounds, Ragged, TaskInfo
from harness import framework

jax = framework("jax")
jnp = jax.numpy
door = importlib.import_module("flashbsr.integrations.jax")

TASK = TaskInfo(num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, num_threads=1)


def _planned(q_lens: list[int], kv_lens: list[int]) -> Attention:
    attention = Attention(AttentionSpec(causal=True), TASK)
    attention.plan(Ragged(np.cumsum([0, *q_lens]), np.cumsum([0, *kv_lens])))
    return attention


def _random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One causal request in float64; query heads in groups over KV heads."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, 1) for x in (k, v))
    logits = np.einsum("qhd,khd->hqk", q.astype(np.float64), k) / np.sqrt(q.shape[2])
    logits[:, ~np.tri(len(q), len(k), len(k) - len(q), dtype=bool)] = -np.inf
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)


def test_twenty_plans_are_traced_once() -> None:
    traces = 0

    @jax.jit
    def program(handle, q, k, v):
        nonlocal traces
        traces += 1
        return door.run(handle, q * 1, (k, v), return_lse=True)

    q, k, v = _random(3, 4, 64), _random(40, 2, 64, seed=1), _random(40, 2, 64, seed=2)
    for n in range(3, 23):
        k_nan, v_nan = k.copy(), v.copy()
        k_nan[n:] = v_nan[n:] = np.nan
        attention = _planned([3], [n])
        out, lse = program(door.handle(attention), q, k_nan, v_nan)
        np.testing.assert_allclose(out, _exact(q, k[:n], v[:n]), atol=2e-5)
        eager = attention.run(q, (k, v), return_lse=True)
        np.testing.assert_array_equal(out, eager[0])
        np.testing.assert_array_equal(lse, eager[1])
    assert traces == 1


def test_a_handle_whose_attention_has_gone_raises() -> None:
    q, kv = _random(1, 4, 64), _random(5, 2, 64)
    attention = _planned([1], [5])
    handle = door.handle(attention)
    del attention
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"PlanError: .*which is gone.* alive"):
        jax.block_until_ready(jax.jit(door.run)(handle, q, (kv, kv)))


def test_wrong_arrays_raise_with_the_text() -> None:
    attention = _planned([1], [5])
    handle, kv = door.handle(attention), _random(5, 2, 64)
    with pytest.raises(flashbsr.ShapeError, match="num_q_tokens"):
        jax.jit(door.run)(handle, _random(4, 64), (kv, kv))
    with pytest.raises(jax.errors.JaxRuntimeError, match="PlanError: q: got 2 query rows"):
        jax.block_until_ready(jax.jit(door.run)(handle, _random(2, 4, 64), (kv, kv)))
    q = _random(1, 4, 64).astype(np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="DTypeError: q: got"):
        jax.block_until_ready(jax.jit(door.run)(handle, q, (kv, kv)))


def test_a_scan_of_steps_appends_and_merges() -> None:
    steps, k, v = 20, _random(20, 2, 64, seed=3), _random(20, 2, 64, seed=4)
    q = _random(20, 4, 64, seed=5)
    plans = [_planned([1], [n + 1]) for n in range(steps)]
    handles = np.stack([door.handle(x) for x in plans])

    def step(cache, x):
        handle, q, k, v, slot = x
        q, k = door.apply_rope_pos_ids(q[None], k[None], slot[None])
        cache = door.append_paged_kv_cache(k, v[None], *cache, slot[None])
        out, lse = door.run(handle, q, [c.reshape(-1, 2, 64) for c in cache], return_lse=True)
        alone = jnp.repeat(v[None], 2, axis=1), jnp.full((1, 4), 2.0)  # a key more, logit 2
        return cache, (out, lse, *door.merge_state(out, lse, *alone))

    empty = jnp.full((5, 4, 2, 64), jnp.nan)
    xs = (handles, q, k, v, np.arange(steps, dtype=np.int32))
    program = jax.jit(lambda c, xs: jax.lax.scan(step, c, xs), donate_argnums=0)
    (k_cache, _), (out, lse, merged, _) = program((empty, empty + 0), xs)
    rq, rk = flashbsr.apply_rope_pos_ids(q, k, np.arange(steps, dtype=np.int32))
    np.testing.assert_allclose(k_cache.reshape(-1, 2, 64), rk, atol=1e-6)
    np.testing.assert_allclose(out[:, 0], _exact(rq, rk, v), atol=2e-5)
    weight = 1 / (1 + np.exp(2 - np.asarray(lse, np.float64)))[..., None]
    expected = weight * out + (1 - weight) * np.repeat(v, 2, axis=1)[:, None]
    np.testing.assert_allclose(merged, expected, atol=2e-5)


def test_a_scan_whose_lengths_the_program_counts() -> None:
    """One plan of bounds, lengths and tables as operands; slots of -1 are written nowhere."""
    k, v, q = _random(12, 2, 64, seed=3), _random(12, 2, 64, seed=4), _random(12, 4, 64, seed=5)
    attention = Attention(AttentionSpec(), TASK)
    attention.plan(Bounds(None, [12, 12], page_size=4))
    tables = jnp.array([[5, 0, 3], [1, 2, 4]])
    number = door.handle(attention)

    def step(carry, x):
        cache, lens = carry
        q, k, v = (jnp.stack([a, a]) for a in x)
        slots = tables[jnp.arange(2), lens // 4] * 4 + lens % 4
        slots = slots.at[1].set(jnp.where(lens[1] < 7, slots[1], -1))  # the second one stops at 7
        cache = door.append_paged_kv_cache(k, v, *cache, slots)
        lens = jnp.minimum(lens + 1, jnp.array([12, 7]))
        out = door.run(number, q, cache, kv_lens=lens, block_tables=tables)
        return (cache, lens), out

    empty = jnp.full((6, 4, 2, 64), jnp.nan)
    start = (empty, empty + 0), jnp.zeros(2, jnp.int32)
    _, out = jax.jit(lambda start, x: jax.lax.scan(step, start, x))(start, (q, k, v))
    np.testing.assert_allclose(out[:, 0], _exact(q, k, v), atol=2e-5)
    np.testing.assert_allclose(out[:7, 1], _exact(q[:7], k[:7], v[:7]), atol=2e-5)
    for t in range(7, 12):
        np.testing.assert_allclose(out[t : t + 1, 1], _exact(q[t : t + 1], k[:7], v[:7]), atol=2e-5)


SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from flashbsr import Attention, AttentionSpec, Ragged, TaskInfo
from flashbsr.integrations import jax as door
draw = np.random.default_rng(0).standard_normal
q, k, v = (draw((n, h, 64)).astype(np.float32) for n, h in ((3, 4), (9, 2), (9, 2)))
def planned(share):
    a = Attention(AttentionSpec(causal=True), TaskInfo(4 // share, 2 // share, 64, num_threads=1))
    a.plan(Ragged(np.array([0, 3]), np.array([0, 9])))
    return a
half, whole = planned(2), planned(1)
mesh = Mesh(np.array(jax.devices()), ("h",))
assert mesh.size == 2
heads = P(None, "h")
f = jax.shard_map(lambda n, q, k, v: door.run(n, q, (k, v)), mesh=mesh,
                  in_specs=(P(), heads, heads, heads), out_specs=heads, check_vma=False)
out = jax.jit(f)(door.handle(half), q, k, v)
np.testing.assert_allclose(out, whole.run(q, (k, v)), atol=1e-6)
"""


def test_shard_map_over_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
