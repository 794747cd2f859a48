# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Options of RoPE inside attention: where frequencies come from, which dims turn, what is refused.

The formulas are in the matrix (`rotary_cases`); here is what it has no arrays for.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flashbsr
import matrix
import ml_dtypes
import numpy as np
import pytest
from cases import F16, Case
from compare import assert_attention
from flashbsr import AttentionSpec, YarnScaling, errors
from harness import DEVICES, Device, attention_for, check_case
from reference import Hooks, State, Variant, attend, rope_frequencies, rotate, yarn_frequencies

ROPE = {"pos_encoding_mode": "ROPE_LLAMA"}
CASE = Case("rotary", (70, 1, 9), (300, 129, 4), dims=(64, 64), layout="paged")
GPU = next((device for device in DEVICES if device.is_cuda), None)
needs_gpu = pytest.mark.skipif(GPU is None, reason="no GPU, or a build or PyTorch without CUDA")


def table_of(frequencies: np.ndarray, positions: int, factor: float = 1.0) -> np.ndarray:
    """Row p: cosines, then sines."""
    angles = np.arange(positions)[:, None] * frequencies
    return factor * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def run(device: Device, case: Case, spec: AttentionSpec) -> tuple[Any, np.ndarray, np.ndarray]:
    problem = device.build(case)
    task = flashbsr.TaskInfo(**{**problem.task_fields(), "backend": device.backend})
    attention = flashbsr.Attention(spec, task)
    problem.plan(attention)
    there = device.upload(problem)
    out, lse = attention.run(there.q, there.kv, return_lse=True)
    return problem, device.get(out), device.get(lse)


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("rotary_dim", [64, 32])
@pytest.mark.parametrize("made_in", [np.float64, np.float32])
def test_cos_sin_cache(made_in: type, rotary_dim: int, interleave: bool, device: Device) -> None:
    """Against rotation by the table's own rows, in float64."""
    frequencies = 1.1 * rope_frequencies(rotary_dim, 5e3, 2.0)
    table = table_of(frequencies.astype(made_in), 300, made_in(1.2)).astype(np.float32)
    fields = {"causal": True, "rope_interleave": interleave, **ROPE}
    spec = AttentionSpec(rope_cos_sin_cache=device.put(table), **fields)
    problem, out, lse = run(device, CASE.but("table", variant=Variant(causal=True)), spec)
    case = problem.case
    half = rotary_dim // 2
    first, second = slice(0, half), slice(half, rotary_dim)
    if interleave:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)

    def turned(x: np.ndarray, at: np.ndarray) -> np.ndarray:
        rows, sign = table[np.abs(at)].astype(np.float64), np.sign(at)[:, None, None]
        cos, sin = rows[:, None, :half], rows[:, None, half:] * np.where(sign < 0, -1, 1)
        y = x.astype(np.float64)
        a, b = y[..., first].copy(), y[..., second].copy()
        y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
        return y

    hooks = Hooks(query=turned, key=turned)  # the rotation
    exact, working = (
        State.concatenate(
            [
                attend(q, k, v, case.variant, hooks=hooks, work=work)
                for q, k, v, _ in problem.requests
            ],
            case.heads[0],
            case.dims[1],
        )
        for work in (None, case.work)
    )
    assert_attention(out, lse, exact, working, case.work, case.name)


def test_a_table_says_its_frequencies_and_factor() -> None:
    frequencies = rope_frequencies(128, 5e5, 1.0, (1.0, 4.0, 8192.0)) * 1.7  # above half a turn
    for made_in in (np.float64, np.float32):
        table = table_of(frequencies.astype(made_in), 20_001, made_in(1.25))
        spec = AttentionSpec(rope_cos_sin_cache=table.astype(np.float32), **ROPE)
        found = spec.rope_cos_sin_cache
        assert found.max_positions == 20_001
        assert math.isclose(found.magnitude, 1.25, rel_tol=1e-6)
        error = np.abs(np.array(found.frequencies) - frequencies)
        assert (20_000 * error < 3e-7 + 2.0**-23 * 20_000 * frequencies).all()
    copy = dataclasses.replace(spec, causal=True)
    assert copy.rope_cos_sin_cache is found
    assert hash(dataclasses.replace(copy, causal=False)) == hash(spec)


def test_positions_beyond_the_table(device: Device) -> None:
    """The last key and the query furthest before the first key count; 300 rows are enough."""
    frequencies = rope_frequencies(64)
    fields = {"causal": True, **ROPE}
    for rows in (300, 299):
        spec = AttentionSpec(rope_cos_sin_cache=table_of(frequencies, rows), **fields)
        if rows == 300:
            _, out, _ = run(device, CASE, spec)
            assert np.isfinite(out.astype(np.float32)).all()
            continue
        with pytest.raises(errors.IndexRangeError, match="^rope_cos_sin_cache.*299.*300"):
            run(device, CASE, spec)


def test_tables_that_are_none() -> None:
    frequencies = rope_frequencies(16)
    table = table_of(frequencies, 200)
    bent = table.copy()
    bent[150:] = table_of(frequencies / 2, 200)[150:]  # another scaling from there on
    uneven = table.copy()
    uneven[:, [3, 11]] *= 1.5  # one pair is larger
    for wrong, text in (
        (bent, "row 150"),
        (uneven, "pair 0"),
        (table[1:], "row 0"),
        (table.astype(ml_dtypes.bfloat16).astype(np.float32), "no rotation"),
        (np.zeros_like(table), "zeros"),
        (np.where(table > 0.99, np.nan, table), "NaN"),
    ):
        with pytest.raises(errors.FlashbsrError, match=rf"^rope_cos_sin_cache.*{text}"):
            AttentionSpec(rope_cos_sin_cache=wrong, **ROPE)


@pytest.mark.parametrize(
    ("dim", "theta", "scale", "yarn", "low", "high"),
    [
        # Of published checkpoints: what stays below `low` and is divided from `high` on.
        (128, 1e6, 4.0, YarnScaling(32768), 23, 40),
        (64, 1e4, 40.0, YarnScaling(4096), 10, 23),
        (64, 150_000.0, 32.0, YarnScaling(4096, truncate=False), 8.0928, 17.3979),
    ],
)
def test_yarn(
    dim: int, theta: float, scale: float, yarn: YarnScaling, low: float, high: float
) -> None:
    found = yarn.frequencies(dim, scale, theta)
    plain = rope_frequencies(dim, theta)
    pair = np.arange(dim // 2)
    np.testing.assert_array_equal(found[pair <= low], plain[pair <= low])
    np.testing.assert_allclose(found[pair >= high], plain[pair >= high] / scale, rtol=1e-15)
    between = (pair > low) & (pair < high)
    share = (pair - low) / (high - low)
    expected = plain * (1 - share + share / scale)
    np.testing.assert_allclose(found[between], expected[between], rtol=1e-3)  # digits of low
    np.testing.assert_allclose(found, yarn_frequencies(dim, theta, scale, yarn), rtol=1e-13)
    assert math.isclose(yarn.magnitude(scale), 0.1 * math.log(scale) + 1)
    assert yarn.magnitude(0.5) == 1
    assert YarnScaling(4096, attention_factor=0.7).magnitude(scale) == 0.7


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 32, 64])
def test_the_same_as_rotating_first(
    rotary_dim: int | None, interleave: bool, rng: np.random.Generator
) -> None:
    """`apply_rope` and attention after it, in float32, where nothing is rounded between."""
    q, k, v = (rng.standard_normal((90, heads, 128)).astype(np.float32) for heads in (4, 2, 2))
    task = flashbsr.TaskInfo(4, 2, 128)
    indptr = np.array([0, 90], np.int32)
    zero = np.zeros(1, np.int32)
    rotated = flashbsr.apply_rope(q, k, indptr, zero, rotary_dim, interleave, 2.0, 1e5)
    results = []
    for fields, (a, b) in (
        ({"rotary_dim": rotary_dim, "rope_interleave": interleave, **ROPE}, (q, k)),
        ({"pos_encoding_mode": "NONE"}, rotated),
    ):
        scaling = {"rope_scale": 2.0, "rope_theta": 1e5}
        attention = flashbsr.Attention(AttentionSpec(causal=True, **scaling, **fields), task)
        attention.plan(flashbsr.Ragged(indptr, indptr))
        results.append(attention.run(a, (b, v)))
    np.testing.assert_allclose(*results, atol=3e-6)


def test_infinite_dims_that_stay_are_their_own(rng: np.random.Generator) -> None:
    """A key with -inf where nothing turns hides itself, and nothing becomes NaN."""
    q, k, v = (rng.random((5, 1, 64)).astype(np.float32) for _ in range(3))
    k[2, 0, 40] = -np.inf
    fields = {"rotary_dim": 32, **ROPE}
    attention = flashbsr.Attention(AttentionSpec(**fields), flashbsr.TaskInfo(1, 1, 64))
    attention.plan(flashbsr.Ragged([0, 5], [0, 5]))
    out = attention.run(q, (k, v))
    at = np.arange(5)
    x = rotate(q, at, rope_frequencies(32))[:, 0] @ rotate(k, at, rope_frequencies(32))[:, 0].T / 8
    p = np.exp(x - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(out[:, 0], p / p.sum(axis=1, keepdims=True) @ v[:, 0], rtol=1e-5)


def test_more_rotated_dims_than_a_head_has() -> None:
    task = flashbsr.TaskInfo(4, 2, 64)
    table = table_of(rope_frequencies(128), 9)
    for name, fields in (
        ("rotary_dim", {"rotary_dim": 66}),
        ("rope_frequencies", {"rope_frequencies": [0.5] * 33}),
        ("rope_cos_sin_cache", {"rope_cos_sin_cache": table}),
        ("rope_frequencies", {"rope_frequencies": [0.5] * 8, "rotary_dim": 32}),
    ):
        with pytest.raises(errors.FlashbsrError, match=f"^{name}"):
            flashbsr.Attention(AttentionSpec(**fields, **ROPE), task)


ROTARY = [
    case for case in matrix.rotary_cases() if "float8" not in case.dtypes[1] and case.dims[0] <= 256
]


@needs_gpu
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("case", ROTARY, ids=lambda case: case.name)
def test_cuda_families(case: Case, backend: str) -> None:
    """Every kernel that rotates, not only the one that is preferred."""
    torch = pytest.importorskip("torch")
    if backend == "fa3" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma kernels are of compute capability 9.0")
    check_case(case, dataclasses.replace(GPU, backend=backend))


@needs_gpu
def test_cuda_wants_whole_groups_of_dims() -> None:
    case = CASE.but("gpu", dtypes=F16, variant=Variant(rotary_dim=16, **ROPE))
    problem = GPU.build(case)
    attention = attention_for(problem, "cuda")
    with pytest.raises(errors.UnsupportedError, match=r"^rotary_dim: got 16 .*multiple of 32"):
        problem.plan(attention)
    check_case(case.but("pairs", variant=Variant(rotary_dim=16, rope_interleave=True, **ROPE)), GPU)
