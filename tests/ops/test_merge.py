# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The operator on attention states: `merge_state`, `merge_state_in_place`, `merge_states`."""

from __future__ import annotations

from typing import Any

import cases
import flashbsr
import numpy as np
import pytest
import reference
from compare import SINGLE, assert_close, assert_rounded
from harness import Device, attention_for, compare
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import DTYPES, Variant, rounded

TYPES = ["float32", "float16", "bfloat16"]


def some_states(
    seed: int, count: int, rows: int, heads: int, dim: int, dtype: str
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """States of which some are empty: LSE = -inf with O = 0."""
    rng = np.random.default_rng(seed)
    outs = [rng.standard_normal((rows, heads, dim)).astype(DTYPES[dtype]) for _ in range(count)]
    lses = [
        (rng.standard_normal((rows, heads)) * rng.choice([0.1, 3, 200], (rows, heads))).astype(
            np.float32
        )
        for _ in range(count)
    ]
    for o, s in zip(outs, lses, strict=True):
        empty = rng.random((rows, heads)) < 0.2
        s[empty], o[empty] = -np.inf, 0
    return outs, lses


def check(
    out: np.ndarray, lse: np.ndarray, outs: list[np.ndarray], lses: list[np.ndarray], label: str
) -> None:
    exact, exact_lse = reference.merge(outs, lses)
    working = rounded(exact, str(out.dtype))
    size = np.max([np.abs(o.astype(np.float64)) for o in outs], axis=0)
    # A weight exp(LSE_i - LSE) has the rounding error of its argument.
    spread = np.max([np.where(np.isfinite(s), np.abs(s), 0) for s in lses], axis=0)
    assert_rounded(out, exact, working, size * (1 + spread)[..., None], label)
    assert_close(lse, exact_lse, exact_lse, 4 * SINGLE * (1 + spread), f"{label} lse")


def call(device: Device, function: Any, *arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`function` of the arrays on the device; the state that it returns."""
    out, lse = function(*map(device.put, arrays))
    return device.get(out), device.get(lse)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 1, 8), (5, 3, 64), (33, 4, 128), (0, 2, 16), (7, 2, 24)])
def test_merge_state(dtype: str, shape: tuple[int, int, int], device: Device) -> None:
    outs, lses = some_states(sum(shape), 2, *shape, dtype)
    out, lse = call(device, flashbsr.merge_state, outs[0], lses[0], outs[1], lses[1])
    assert out.dtype == DTYPES[dtype]
    assert lse.dtype == np.float32
    check(out, lse, outs, lses, "merge_state")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_merge_states(dtype: str, count: int, device: Device) -> None:
    outs, lses = some_states(count, count, 11, 3, 40, dtype)
    out, lse = call(device, flashbsr.merge_states, np.stack(outs, axis=1), np.stack(lses, axis=1))
    assert out.shape == (11, 3, 40)
    check(out, lse, outs, lses, "merge_states")


@pytest.mark.parametrize("dtype", TYPES)
def test_merge_state_in_place(dtype: str, device: Device) -> None:
    (v, other), (s, s_other) = some_states(0, 2, 13, 2, 32, dtype)
    out, lse = device.put(v.copy()), device.put(s.copy())
    assert flashbsr.merge_state_in_place(out, lse, device.put(other), device.put(s_other)) is None
    check(device.get(out), device.get(lse), [v, other], [s, s_other], "in place")


@pytest.mark.parametrize("mask_type", [bool, np.uint8])
def test_merge_state_in_place_skips_masked_rows(mask_type: type, device: Device) -> None:
    (v, other), (s, s_other) = some_states(1, 2, 13, 2, 32, "float32")
    mask = (np.arange(13) % 3 > 0).astype(mask_type)
    keep = mask.astype(bool)
    other[~keep], s_other[~keep] = np.nan, np.nan  # must not be looked at
    state = device.put(v.copy()), device.put(s.copy())
    flashbsr.merge_state_in_place(*state, *map(device.put, (other, s_other, mask)))
    out, lse = map(device.get, state)
    np.testing.assert_array_equal(out[~keep], v[~keep])
    np.testing.assert_array_equal(lse[~keep], s[~keep])
    check(out[keep], lse[keep], [v[keep], other[keep]], [s[keep], s_other[keep]], "masked")


def test_identity_and_both_empty(device: Device) -> None:
    """(0, -inf) is the identity, bit for bit; two of them give it again, without NaN."""
    (v, _), (s, _) = some_states(2, 2, 6, 2, 16, "float32")
    zero, never = np.zeros_like(v), np.full_like(s, -np.inf)
    for pair in ((v, s, zero, never), (zero, never, v, s)):
        out, lse = call(device, flashbsr.merge_state, *pair)
        np.testing.assert_array_equal(out, v)
        # The LSE passes through base 2, as the kernels keep it.
        check(out, lse, [v], [s], "identity")
    out, lse = call(device, flashbsr.merge_state, zero, never, zero, never)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_nan_is_not_hidden(device: Device) -> None:
    """A NaN in either state reaches the result: it is a bug upstream that must show."""
    (v, w), (s, t) = some_states(3, 2, 4, 1, 8, "float32")
    s[:], t[:] = 0.5, 0.25
    for which in (0, 1):
        broken = [v.copy(), w.copy()]
        broken[which][1, 0, 3] = np.nan
        out, _ = call(device, flashbsr.merge_state, broken[0], s, broken[1], t)
        assert np.isnan(out[1, 0, 3])
        assert np.isnan(out).sum() == 1
        lses = [s.copy(), t.copy()]
        lses[which][2, 0] = np.nan
        out, lse = call(device, flashbsr.merge_state, v, lses[0], w, lses[1])
        assert np.isnan(lse[2, 0])
        assert np.isnan(out[2]).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # one device for all
@given(st.integers(0, 2**32), st.permutations(range(4)))
def test_commutative_and_associative(device: Device, seed: int, order: list[int]) -> None:
    outs, lses = some_states(seed, 4, 5, 2, 8, "float32")
    stacked = (np.stack([x[i] for i in order], axis=1) for x in (outs, lses))
    out, lse = call(device, flashbsr.merge_states, *stacked)
    check(out, lse, outs, lses, "any order")
    left = (outs[order[0]], lses[order[0]])
    for i in order[1:]:
        left = call(device, flashbsr.merge_state, *left, outs[i], lses[i])
    check(*left, outs, lses, "one after the other")


def test_states_of_kv_parts_merge_to_the_whole(device: Device) -> None:
    """Attention over two halves of the KV, merged, is attention over all of it."""
    case = cases.Case("halves", (3, 1), (50, 9), variant=Variant())
    whole = device.build(case)
    k, v = whole.kv
    parts = []
    # One request at a time: the halves of a ragged array are not consecutive for two.
    for request in range(2):
        q0, q1 = whole.qo_indptr[request : request + 2]
        k0, k1 = whole.kv_indptr[request : request + 2]
        half = (k0 + k1) // 2
        states = []
        for a, b in ((k0, half), (half, k1)):
            attention = attention_for(whole, device.backend)
            attention.plan(flashbsr.Ragged(np.array([0, q1 - q0]), np.array([0, b - a])))
            q, *kv = map(device.put, (whole.q[q0:q1], k[a:b], v[a:b]))
            states.append(attention.run(q, tuple(kv), return_lse=True))
        parts.append(flashbsr.merge_state(*states[0], *states[1]))
    compare(whole, *(np.concatenate([device.get(part[i]) for part in parts]) for i in (0, 1)))


def test_strided_states(device: Device) -> None:
    """States as engines hold them: slices along the state dimension of a larger array."""
    outs, lses = some_states(5, 3, 6, 2, 16, "bfloat16")
    v, s = device.put(np.stack(outs, axis=1)), device.put(np.stack(lses, axis=1))
    out, lse = call(device, flashbsr.merge_state, v[:, 0], s[:, 0], v[:, 2], s[:, 2])
    check(out, lse, [outs[0], outs[2]], [lses[0], lses[2]], "slices")
    out, lse = call(device, flashbsr.merge_states, v[:, ::2], s[:, ::2])
    check(out, lse, [outs[0], outs[2]], [lses[0], lses[2]], "every other")
