# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What nodes of JAX programs take: types, options, variants, several attentions; and vmap."""

from __future__ import annotations

import importlib
from typing import Any

import flashbsr
import numpy as np
import pytest
from flashbsr import Attention, AttentionSpec, Bounds, Paged, Ragged, TaskInfo
from harness import framework

jax = framework("jax")
jnp = jax.numpy
door = importlib.import_module("flashbsr.integrations.jax")

# Of a first call and of later ones, which JAX dispatches otherwise.
RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)


def _random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _attention(spec: AttentionSpec | None = None, **task: Any) -> Attention:
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "num_threads": 1} | task
    return Attention(spec or AttentionSpec(causal=True), TaskInfo(**sizes))


def test_later_plans_of_one_attention_are_followed_without_a_trace() -> None:
    attention, traces = _attention(), 0

    @jax.jit
    def program(q: Any, k: Any, v: Any) -> Any:
        nonlocal traces
        traces += 1
        return door.run(attention, q, (k, v))

    q, k, v = _random(3, 4, 64), _random(40, 2, 64, seed=1), _random(40, 2, 64, seed=2)
    for n in range(3, 23):
        attention.plan(Ragged(np.array([0, 3]), np.array([0, n])))
        poisoned = k.copy()
        poisoned[n:] = np.nan
        np.testing.assert_array_equal(program(q, poisoned, v), attention.run(q, (k, v)))
    assert traces == 1


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_paged_caches_of_every_type(kv_dtype: str, kv_layout: str) -> None:
    attention = _attention(kv_layout=kv_layout)
    attention.plan(Paged(None, [0, 2], [3, 1], kv_lens=[7], page_size=4))
    dtype = jnp.dtype(kv_dtype)
    q = jnp.asarray(_random(1, 4, 64), "bfloat16" if dtype.itemsize == 1 else dtype)
    shape = (5, 4, 2, 64) if kv_layout == "NHD" else (5, 2, 4, 64)
    stacked = jnp.asarray(_random(5, 2, *shape[1:], seed=1), dtype)
    scales = {"k_scale": 0.5, "v_scale": np.array([2, 3], np.float32), "q_scale": np.float32(1.5)}
    made, lse = jax.jit(lambda q, kv: door.run(attention, q, kv, return_lse=True, **scales))(
        q, stacked
    )
    want, want_lse = attention.run(np.asarray(q), np.asarray(stacked), return_lse=True, **scales)
    assert made.dtype == q.dtype
    np.testing.assert_array_equal(np.asarray(made, np.float32), want.astype(np.float32))
    np.testing.assert_array_equal(lse, want_lse)
    halves = door.run(attention, q, (stacked[:, 0], stacked[:, 1]), **scales)
    np.testing.assert_array_equal(np.asarray(halves, np.float32), want.astype(np.float32))


def test_scales_sinks_and_slopes_are_operands() -> None:
    attention = _attention(AttentionSpec(pos_encoding_mode="ALIBI"))
    attention.plan(Ragged(np.array([0, 2]), np.array([0, 9])))
    q, k, v = _random(2, 4, 64), _random(9, 2, 64, seed=1), _random(9, 2, 64, seed=2)
    arrays = {
        "sinks": _random(4, seed=3),
        "alibi_slopes": np.abs(_random(4, seed=4)),
        "q_scale": np.abs(_random(4, seed=5)),
    }
    made = jax.jit(lambda q, k, v, a: door.run(attention, q, (k, v), **a))(q, k, v, arrays)
    np.testing.assert_array_equal(made, attention.run(q, (k, v), **arrays))
    # A scale without a dimension is read where the program runs.
    half = jax.jit(lambda q, k, v, s: door.run(attention, q, (k, v), k_scale=s))
    made = half(q, k, v, jnp.float32(0.5))
    np.testing.assert_array_equal(made, attention.run(q, (k, v), k_scale=0.5))


def test_output_types_and_dims_of_the_task() -> None:
    attention = _attention(head_dim_qk=64, head_dim_vo=32, o_dtype="float32")
    attention.plan(Ragged(np.array([0, 2]), np.array([0, 9])))
    q, k, v = (jnp.asarray(_random(*s), "float16") for s in ((2, 4, 64), (9, 2, 64), (9, 2, 32)))
    made = jax.jit(lambda q, k, v: door.run(attention, q, (k, v)))(q, k, v)
    assert (made.shape, made.dtype) == ((2, 4, 32), np.float32)
    np.testing.assert_array_equal(made, attention.run(*map(np.asarray, (q,)), (k, v)))
    named = door.run(door.handle(attention), q, (k, v), head_dim_vo=32, o_dtype=np.float32)
    np.testing.assert_array_equal(made, named)


@pytest.mark.usefixtures("kernel_cache")
class TestVariants:
    """Numbers of a variant are the program's, arrays its operands."""

    def attention(self) -> Attention:
        spec = AttentionSpec.from_functions(
            score_mod=lambda score, b, h, q_idx, kv_idx, shift, add, first: flashbsr.where(
                kv_idx < first, score, score * shift + add[h]
            ),
            extras={"shift": "float32", "add": ("float32", 1), "first": "int32"},
        )
        attention = _attention(spec)
        attention.plan(Ragged(np.array([0, 2]), np.array([0, 9])))
        return attention

    def test_values(self) -> None:
        attention = self.attention()
        q, k, v = _random(2, 4, 64), _random(9, 2, 64, seed=1), _random(9, 2, 64, seed=2)
        numbers = {"shift": 0.25, "first": 3}
        add = _random(4, seed=3)
        made = jax.jit(lambda add: door.run(attention, q, (k, v), add=add, **numbers))(add)
        np.testing.assert_array_equal(made, attention.run(q, (k, v), add=add, **numbers))

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"shift": None}, "FlashbsrError: shift: got nothing; expected a number"),
            ({"add": 2.0}, "FlashbsrError: add: got another kind; expected an array"),
            ({"first": 2.5}, "FlashbsrError: first: got 2.5.*integer"),
            ({"sift": 1.0}, "FlashbsrError: sift: got a value; expected no such.*shift,add,first"),
        ],
    )
    def test_wrong_ones(self, change: dict[str, Any], text: str) -> None:
        attention = self.attention()
        values = {"shift": 0.25, "first": 3, "add": _random(4)} | change
        with pytest.raises(RUNTIME_ERRORS, match=text):
            door.run(attention, _random(2, 4, 64), (_random(9, 2, 64),) * 2, **values)


def test_caches_are_appended_to_by_layout_and_scale() -> None:
    k, v = (jnp.asarray(_random(3, 2, 64, seed=s), "bfloat16") for s in (1, 2))
    slots = np.array([9, -1, 2])
    for layout, shape in (("NHD", (4, 4, 2, 64)), ("HND", (4, 2, 4, 64))):
        empty = np.zeros(shape, jnp.float8_e4m3fn)
        options = {"kv_layout": layout, "k_scale": 0.5, "v_scale": 4.0}
        want = empty.copy(), empty.copy()
        flashbsr.append_paged_kv_cache(
            np.asarray(k), np.asarray(v), paged_kv_cache=want, slot_mapping=slots, **options
        )
        made = door.append_paged_kv_cache(k, v, empty, empty, slots, **options)
        for a, b in zip(made, want, strict=True):
            np.testing.assert_array_equal(np.asarray(a).view(np.uint8), b.view(np.uint8))
        assert not np.asarray(empty, np.float32).any()  # what the program does not own is copied
    with pytest.raises(RUNTIME_ERRORS, match="slot_mapping.*got 16"):
        door.append_paged_kv_cache(k, v, empty, empty, np.array([0, 1, 16]), kv_layout="HND")


def test_rotations_are_those_outside() -> None:
    q, k = _random(5, 4, 64), _random(5, 2, 64, seed=1)
    positions = np.array([0, 7, 100_000, 3, 3])
    options = {"rotary_dim": 32, "interleave": True, "rope_theta": 5e5, "rope_scale": 2.0}
    for name, more in (("apply_rope_pos_ids", {}), ("apply_llama31_rope_pos_ids", {}),
                       ("apply_llama31_rope_pos_ids", {"old_context_len": 64})):  # fmt: skip
        given = options | more
        made = jax.jit(lambda q, k, p, n=name, o=given: getattr(door, n)(q, k, p, **o))(
            q, k, positions
        )
        for a, b in zip(made, getattr(flashbsr, name)(q, k, positions, **given), strict=True):
            np.testing.assert_array_equal(a, b)


def test_states_merge_in_either_base() -> None:
    v, s = _random(5, 4, 64), _random(5, 4, seed=1)
    s[2] = -np.inf
    for base in ("e", "2"):
        made = door.merge_state(v, s, v[::-1].copy(), s + 1, lse_base=base)
        want = flashbsr.merge_state(v, s, v[::-1].copy(), s + 1, lse_base=base)
        for a, b in zip(made, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_vmap_runs_a_node_for_every_element() -> None:
    attention = _attention()
    attention.plan(Ragged(np.array([0, 3]), np.array([0, 9])))
    q, k, v = _random(2, 3, 4, 64), _random(2, 9, 2, 64, seed=1), _random(9, 2, 64, seed=2)
    each = jax.vmap(lambda q, k: door.run(attention, q, (k, v)))(q, k)
    for i in range(2):
        np.testing.assert_array_equal(each[i], attention.run(q[i], (k[i], v)))


def test_there_is_no_derivative() -> None:
    attention = _attention()
    attention.plan(Ragged(np.array([0, 3]), np.array([0, 9])))
    kv = _random(9, 2, 64)
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda q: door.run(attention, q, (kv, kv)).sum())(_random(3, 4, 64))


def test_what_a_variant_captures_is_refused() -> None:
    add = np.zeros(4, np.float32)
    spec = AttentionSpec.from_functions(score_mod=lambda s, b, h, q, k: s + add[h])
    with pytest.raises(flashbsr.UnsupportedError, match="captured by the variant"):
        door.handle(_attention(spec))


def test_shares_of_keys_in_one_program() -> None:
    """Each share has lengths and positions of its own, and the program merges them."""
    q, k, v = _random(2, 4, 64), _random(4, 4, 2, 64, seed=1), _random(4, 4, 2, 64, seed=2)
    tables, ranks = np.array([[0, 1]]), []
    for rank in range(2):
        task = TaskInfo(4, 2, 64, backend="cpu", context_parallel=(2, rank, 4))
        ranks.append(flashbsr.Attention(AttentionSpec(causal=True), task))
        ranks[-1].plan(Bounds([0, 2], [8], page_size=4), q_positions=[0])
    whole = flashbsr.Attention(AttentionSpec(causal=True), TaskInfo(4, 2, 64, backend="cpu"))

    @jax.jit
    def program(q: Any, k: Any, v: Any, length: Any) -> Any:
        states = [
            door.run(
                attention, q, (k[2 * r : 2 * r + 2], v[2 * r : 2 * r + 2]), return_lse=True,
                kv_lens=attention.task.share.local_lens(length), block_tables=tables,
                q_positions=length - 2,
            )
            for r, attention in enumerate(ranks)
        ]  # fmt: skip
        return door.merge_state(*states[0], *states[1])[0]

    for n in (2, 5, 13, 16):
        # Blocks of four tokens lie on the ranks in turn.
        whole.plan(flashbsr.BlockTable([0, 2], [[0, 2, 1, 3]], [n], page_size=4))
        want = whole.run(q, (k, v))
        got = program(q, k, v, np.array([n], np.int32))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_lengths_of_two_runs_in_one_program_do_not_meet() -> None:
    """XLA runs nodes that do not depend on each other at the same time, over one attention."""
    attention = _attention(AttentionSpec())
    attention.plan(Bounds(None, [8], page_size=4))
    q, k, v = _random(1, 4, 64), _random(2, 4, 2, 64, seed=1), _random(2, 4, 2, 64, seed=2)
    tables = np.array([[0, 1]])

    @jax.jit
    def program(q: Any, k: Any, v: Any, lens: Any) -> Any:
        runs = [
            door.run(attention, q, (k, v), kv_lens=lens[i], block_tables=tables) for i in range(8)
        ]
        return jnp.stack(runs)

    lens = np.arange(1, 9, dtype=np.int32)[:, None]
    want = [attention.run(q, (k, v), kv_lens=n, block_tables=tables) for n in lens]
    for _ in range(20):
        np.testing.assert_array_equal(program(q, k, v, lens), np.stack(want))
    # Its arrays went with the program: later runs have lengths of their own.
    after = attention.run(q, (k, v), kv_lens=lens[2], block_tables=tables)
    np.testing.assert_array_equal(after, want[2])
