# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Variants from Python functions: what they compute, and what cannot be traced."""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import subprocess
import sys

import cases
import flashbsr
import numpy as np
import pytest
from cases import Case
from flashbsr import AttentionSpec, DTypeError, FlashbsrError, UnsupportedError
from harness import DEVICES, check_variant, framework
from random_variants import HEADS, KEYS, QUERIES, random_functions, tables
from reference import Hooks, Variant

SMALL = Case("small", (5, 70, 0, 1), (37, 150, 3, 64), heads=(HEADS, 2), dims=(32, 32))
PAGED = SMALL.but("paged", layout="paged", variant=Variant(causal=True), dtypes=cases.F16)


pytestmark = pytest.mark.usefixtures("kernel_cache")


on_devices = pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)


# Ten functions are one kernel, which a number of the run chooses from: a compilation takes seconds.
@functools.cache
def ten(first: int, device) -> tuple[AttentionSpec, list]:
    host = tables(first)
    there = {name: device.put(array) for name, array in host.items()}
    pairs = [random_functions(first + i, there) for i in range(10)]

    def score_mod(score, b, h, q_idx, kv_idx, which):
        result = score
        for i, (f, _) in enumerate(pairs):
            result = flashbsr.where(which == i, f(score, b, h, q_idx, kv_idx), result)
        return result

    def mask_mod(b, h, q_idx, kv_idx, which):
        result = True
        for i, (_, f) in enumerate(pairs):
            result = flashbsr.where(which == i, f(b, h, q_idx, kv_idx), result)
        return result

    spec = AttentionSpec.from_functions(
        score_mod=score_mod, mask_mod=mask_mod, extras={"which": "int32"}
    )
    wide = {
        name: a if a.dtype == bool else a.astype(np.float64 if a.dtype.kind == "f" else np.int64)
        for name, a in host.items()
    }
    return spec, [random_functions(first + i, wide) for i in range(10)]


@on_devices
@pytest.mark.parametrize("seed", range(50))
def test_fifty_random_functions(seed, device):
    spec, functions = ten(seed // 10 * 10, device)
    score, mask = functions[seed % 10]

    def working(x, b, h, q, k):
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(score(x, b, h, q, k)).astype(x.dtype)

    case = SMALL.but(str(seed))
    check_variant(spec, Hooks(score=working, mask=mask), case, device, which=seed % 10)


@on_devices
@pytest.mark.parametrize("case", [SMALL, PAGED, cases.DECODE], ids=lambda c: c.name)
def test_alibi(case, device):
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    there = device.put(slopes)

    def alibi(score, b, h, q_idx, kv_idx, q_position):
        return score + there[h] * (kv_idx - q_position)

    def expected(x, b, h, q, k):
        return x + x.dtype.type(slopes[h]) * (k - (case.kv_lens[b] - case.q_lens[b] + q))

    spec = AttentionSpec.from_functions(score_mod=alibi, causal=case.variant.causal)
    assert "row_value" in spec.source  # looked up once per row
    check_variant(spec, Hooks(score=expected), case, device)


@on_devices
def test_functions_of_flex_attention_work_unchanged(device):
    """Soft-cap, relative bias from a table, documents, sliding window, as its docs do."""
    torch = framework("torch")
    cap = 20
    where = "cuda" if device.is_cuda else "cpu"
    document_id = torch.arange(160, device=where) // 40  # int64
    relative = torch.linspace(-1, 1, 301, device=where, dtype=torch.float16)
    weight = torch.tensor(0.5)

    def score_mod(score, b, h, q_idx, kv_idx):
        score = cap * torch.tanh(score / cap)
        score = score + weight * relative[q_idx - kv_idx + 150]
        return torch.where(q_idx >= kv_idx, score, score - torch.exp2(-(h + 1.0)))

    def document(b, h, q_idx, kv_idx):
        return document_id[q_idx] == document_id[kv_idx]

    def window(b, h, q_idx, kv_idx):
        return torch.abs(q_idx - kv_idx) <= 60

    masks = (document, window)

    def mask_mod(b, h, q_idx, kv_idx):
        result = torch.logical_or(masks[0](b, h, q_idx, kv_idx), kv_idx.new_zeros(()).bool())
        return result & masks[1](b, h, q_idx, kv_idx)

    with pytest.raises(UnsupportedError, match="new_zeros"):
        AttentionSpec.from_functions(mask_mod=mask_mod)

    def both(b, h, q_idx, kv_idx):
        return torch.logical_and(*[mask(b, h, q_idx, kv_idx) for mask in masks])

    table = relative.cpu().numpy()

    def score(x, b, h, q, k):
        x = 20 * np.tanh(x / 20) + x.dtype.type(0.5) * table[q - k + 150].astype(x.dtype)
        return np.where(q >= k, x, x - x.dtype.type(2.0 ** -(h + 1)))

    spec = AttentionSpec.from_functions(score_mod=score_mod, mask_mod=both)
    hooks = Hooks(score=score, mask=lambda b, h, q, k: (q // 40 == k // 40) & (abs(q - k) <= 60))
    check_variant(spec, hooks, SMALL.but("flex", dtypes=cases.BF16), device)


@on_devices
def test_numpy_functions(device):
    def score_mod(score, b, h, q_idx, kv_idx):
        x = np.maximum(np.clip(score, -2.0, 2.0), np.float32(-1.5)) * np.float32(1.25)
        x = np.where(np.logical_not(np.equal(kv_idx % 5, 0)), x, np.negative(x))
        return np.tanh(x) + np.sqrt(np.abs(x)) + np.square(x) / np.exp(np.floor(x))

    def expected(x, b, h, q, k):
        x = np.maximum(np.clip(x, -2, 2), -1.5) * 1.25
        x = np.where(k % 5 != 0, x, -x)
        return np.tanh(x) + np.sqrt(abs(x)) + np.square(x) / np.exp(np.floor(x))

    # Away from the steps of floor() and clip(), or roundings of the score would show.
    spec = AttentionSpec.from_functions(score_mod=score_mod)
    hooks = Hooks(score=expected)
    check_variant(spec, hooks, SMALL.but("numpy", gain=0.0), device)


@on_devices
def test_integers_follow_python(device):
    """Floor division and remainders of negative numbers, shifts, exact products of 31 bits."""

    def score_mod(score, b, h, q_idx, kv_idx):
        d = q_idx - kv_idx
        big = (kv_idx * 65537 + 12345) % 46337
        x = d // 7 + d % 7 + d // -7 + d % -7 + 100 // (kv_idx + 1) + d // 4 + d % 8
        x = x + (d >> 2) + (d & 6) + (~d | 3) + (kv_idx ^ q_idx) + (1 << (kv_idx % 5))
        return score + x / 16 + (big * 46337 // 46336 % 1000) * 0.001 + 0.25 * (d < 0) + -d % 3

    def expected(x, b, h, q, k):
        return x + score_mod(0.0, b, h, q, k).astype(x.dtype)

    spec = AttentionSpec.from_functions(score_mod=score_mod)
    check_variant(spec, Hooks(score=expected), SMALL.but("integers"), device)


@pytest.mark.parametrize("level", list(flashbsr._core.isa_levels())[:-1])
def test_other_simd_levels(level):
    """The level is fixed when the module is loaded: a process of its own, a few tests of above."""
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__),
            *(
                "-k",
                "(integers or special or numpy_functions or (random_functions and 33)) and cpu",
            ),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "FLASHBSR_ISA": level, "PYTEST_ADDOPTS": ""},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) == 4


@on_devices
def test_special_numbers(device):
    """log at and below 0, division by zero, infinities: the keys whose score is -inf are hidden."""

    def score_mod(score, b, h, q_idx, kv_idx):
        x = flashbsr.log((kv_idx % 4) * 0.5)  # -inf for every fourth key
        return (
            score + x + flashbsr.where(kv_idx % 7 == 3, -math.inf, 0.0) - 1 / (1 + 0 * x * x + 1e30)
        )

    def hidden(k):
        return (k % 4 == 0) | (k % 7 == 3)

    def expected(x, b, h, q, k):
        with np.errstate(divide="ignore"):
            return np.where(hidden(k), -np.inf, x + np.log((k % 4) * 0.5).astype(x.dtype)) + 0 * q

    spec = AttentionSpec.from_functions(
        score_mod=lambda s, b, h, q, k: flashbsr.where(
            k % 4 == 0, -math.inf, score_mod(s, b, h, q, k)
        )
    )
    check_variant(spec, Hooks(score=expected), SMALL.but("special"), device)


@on_devices
def test_the_request_and_its_lengths(device):
    weights = np.arange(4, dtype=np.float32)
    there = device.put(weights)

    def score_mod(score, b, h, q_idx, kv_idx, *, kv_len, q_len, kv_head):
        return score + there[b] * kv_idx / kv_len + q_len * 0.01 * kv_head

    def expected(x, b, h, q, k):
        return x + weights[b] * k / SMALL.kv_lens[b] + SMALL.q_lens[b] * 0.01 * (h // 2) + 0 * q

    spec = AttentionSpec.from_functions(score_mod=score_mod)
    check_variant(spec, Hooks(score=expected), SMALL.but("lengths"), device)


@on_devices
def test_named_extras_and_captured_ones(device):
    captured = device.put(np.array([1.0, -1.0, 0.5, 0.0], np.float32))
    table = np.random.default_rng(0).standard_normal((3, KEYS)).astype(np.float32)

    def score_mod(score, b, h, q_idx, kv_idx, factor, table, shift):
        row = table[-2]
        return score * factor + row[kv_idx] * captured[h] + table[h % 3][(kv_idx + shift) % KEYS]

    def expected(x, b, h, q, k):
        c = captured_host[h]
        return x * 1.5 + table[1][k] * c + table[h % 3][(k + 7) % KEYS] + 0 * q

    captured_host = device.get(captured)
    extras = {"factor": "float32", "table": ("float32", 2), "shift": "int32"}
    spec = AttentionSpec.from_functions(score_mod=score_mod, extras=extras)
    check_variant(
        spec, Hooks(score=expected), SMALL, device, factor=1.5, table=device.put(table), shift=7
    )


def test_elements_far_apart_and_every_step_between_keys():
    """Rows of a table 2^30 elements apart, and indices that go up, down, by two and not at all."""
    memory = np.frombuffer(cases.sparse_memory(2**31 + 2**20), np.uint8)
    far = np.lib.stride_tricks.as_strided(memory, (3, KEYS), (2**30, 1), writeable=False)
    for row in range(3):
        memory[row * 2**30 :][:KEYS] = np.arange(KEYS) // 2 + 10 * row
    kinds = (np.float32, np.float16, np.int32, np.int64, np.uint8)
    lines = [np.arange(400).astype(kind) % 97 for kind in kinds]

    def score_mod(score, b, h, q_idx, kv_idx):
        x = far[kv_idx % 3, kv_idx] * 0.05
        for i, line in enumerate(lines):
            x = x + (line[kv_idx + i] + line[q_idx - kv_idx + 160]) * 0.01
            x = x + (line[2 * kv_idx] + line[q_idx + i + 0 * kv_idx]) * 0.02
        return score + x

    def expected(x, b, h, q, k):
        y = far[k % 3, k] * 0.05 + 0.0 * q
        for i, line in enumerate(lines):
            wide = line.astype(np.float64)
            y = y + (wide[k + i] + wide[q - k + 160]) * 0.01
            y = y + (wide[2 * k] + wide[q + i]) * 0.02
        return x + y.astype(x.dtype)

    spec = AttentionSpec.from_functions(score_mod=score_mod)
    check_variant(spec, Hooks(score=expected), SMALL.but("far"))


def test_runs_read_captured_arrays_as_they_are_then():
    bias = np.zeros(KEYS, np.float32)
    spec = AttentionSpec.from_functions(score_mod=lambda s, b, h, q, k: s + bias[k])
    check_variant(spec, Hooks(score=lambda x, *_: x), SMALL)
    bias[:] = np.linspace(0, 3, KEYS)
    check_variant(spec, Hooks(score=lambda x, *at: x + bias[at[3]]), SMALL)


def helper(score, kv_idx):
    return score + GLOBAL[kv_idx]


GLOBAL = np.linspace(0, 2, KEYS, dtype=np.float32)


def test_arrays_of_helpers_defaults_and_partials():
    local = np.linspace(1, 0, KEYS).astype(np.float32)

    def score_mod(score, b, h, q_idx, kv_idx, table=local, scale=None):
        return helper(score, kv_idx) + table[kv_idx] * scale[0]

    partial = functools.partial(score_mod, scale=np.array([2.0, 3.0], np.float32))
    partial.__name__ = "partial"
    spec = AttentionSpec.from_functions(score_mod=partial)
    hooks = Hooks(score=lambda x, *at: x + (GLOBAL + 2 * local)[at[3]])
    check_variant(spec, hooks, SMALL)


UNUSED = {str(i): np.zeros(3, np.float64 if i % 2 else np.float32) for i in range(20)}


def test_only_arrays_that_are_looked_into_are_extras():
    """Of the twenty of a dictionary, and of those that are named and not indexed."""
    other = np.zeros((1,) * 6, np.float32)

    def score_mod(score, b, h, q_idx, kv_idx):
        assert other is not None
        return score + UNUSED["4"][h] + UNUSED["6"][kv_idx]

    spec = AttentionSpec.from_functions(score_mod=score_mod)
    assert [extra.name for extra in spec.variant.extras] == ["UNUSED_4", "UNUSED_6"]
    with pytest.raises(DTypeError, match="UNUSED_5: got float64"):
        AttentionSpec.from_functions(score_mod=lambda s, b, h, q, k: s + UNUSED["5"][k])
    with pytest.raises(UnsupportedError, match="other: got 6 dimensions"):
        AttentionSpec.from_functions(score_mod=lambda s, b, h, q, k: s + other[(k,) * 6])
    with pytest.raises(UnsupportedError, match="9 arrays"):
        AttentionSpec.from_functions(
            score_mod=lambda s, b, h, q, k: sum(UNUSED[str(2 * i)][k] for i in range(9))
        )


def test_equal_expressions_are_written_once():
    def score_mod(score, b, h, q_idx, kv_idx):
        x = score
        for _ in range(40):  # of 2^40 nodes, if it were a tree
            x = (x + x) * 0.5
        return x + (kv_idx - q_idx) * 0.5 + (kv_idx - q_idx) * 0.25

    source = AttentionSpec.from_functions(score_mod=score_mod).source
    assert source.count("at.kv_position - ") == 1 and source.count("const") < 100


def here(lines_up: int) -> str:
    return f"test_variant_trace.py:{inspect.currentframe().f_back.f_lineno - lines_up}"


def test_decisions_name_the_line():
    def branch(score, b, h, q_idx, kv_idx):
        if q_idx > kv_idx:
            return score
        return -score

    with pytest.raises(UnsupportedError) as caught:
        AttentionSpec.from_functions(score_mod=branch)
    text = str(caught.value)
    assert "branch: got" in text and here(7) in text and "(if q_idx > kv_idx:)" in text
    assert "where(condition, a, b)" in text


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s, b, h, q, k: s if q > k else -s, "Python decision"),
        (lambda s, b, h, q, k: (q > k and s) or s, "& | ~"),
        (lambda s, b, h, q, k: s * (0 <= k < 5), "chain of comparisons"),
        (lambda s, b, h, q, k: max(s, 0.0), "Python decision"),
        (lambda s, b, h, q, k: s + math.exp(k), "flashbsr.exp"),
        (lambda s, b, h, q, k: s + int(k), "x.to"),
        (lambda s, b, h, q, k: s + sum(k), "loop"),
        (lambda s, b, h, q, k: s + len(k), "len"),
        (lambda s, b, h, q, k: s & 1, "bit operation"),
        (lambda s, b, h, q, k: s**k, "exp\\(y"),
        (lambda s, b, h, q, k: s + 2**40 * k, "32 bits"),
        (lambda s, b, h, q, k: s + GLOBAL[s], "a float as index"),
        (lambda s, b, h, q, k: s + GLOBAL[1:], "one index"),
        (lambda s, b, h, q, k: s + GLOBAL, "arithmetic on the array GLOBAL|element of an array"),
        (lambda s, b, h, q, k: s + GLOBAL.sum(), "GLOBAL.sum"),
        (lambda s, b, h, q, k: s + GLOBAL[q, k], "2 indices"),
        (lambda s, b, h, q, k: s + [1.0, 2.0][h], "an extra"),
        (lambda s, b, h, q, k: np.sin(s), "sin"),
        (lambda s, b, h, q, k: np.add.reduce(s), "reduce"),
        (lambda s, b, h, q, k: s + "1", "str in arithmetic"),
    ],
)
def test_what_cannot_be_traced(function, message):
    with pytest.raises(UnsupportedError) as caught:
        AttentionSpec.from_functions(score_mod=function)
    what, _, where = caught.value.actual.partition(" at ")
    assert "test_variant_trace.py" in where
    assert re.search(message, f"{what}; {caught.value.expected}")  # not in the line, which is above


def test_bad_functions():
    with pytest.raises(FlashbsrError, match="score_mod"):
        AttentionSpec.from_functions()
    with pytest.raises(DTypeError, match="mask_mod"):
        AttentionSpec.from_functions(mask_mod=3)
    with pytest.raises(FlashbsrError, match="2 parameters"):
        AttentionSpec.from_functions(mask_mod=lambda q, k: q >= k)
    with pytest.raises(FlashbsrError, match="a parameter 'window'"):
        AttentionSpec.from_functions(mask_mod=lambda b, h, q, k, window: q - k < window)
    with pytest.raises(FlashbsrError, match="returns None"):
        AttentionSpec.from_functions(score_mod=lambda s, b, h, q, k: None)
    with pytest.raises(FlashbsrError, match="'kv_len'"):
        AttentionSpec.from_functions(
            score_mod=lambda s, b, h, q, k, kv_len: s, extras={"kv_len": "int32"}
        )
    table = np.zeros(4, np.float64)
    with pytest.raises(DTypeError, match="table: got float64"):
        AttentionSpec.from_functions(score_mod=lambda s, b, h, q, k: s + table[h])


def test_attribute_of_a_captured_object_names_the_way_out():
    class Model:
        bias = np.zeros(8, np.float32)

    model = Model()
    with pytest.raises(UnsupportedError) as caught:
        AttentionSpec.from_functions(score_mod=lambda s, b, h, q, k: s + model.bias[h])
    assert "attribute" in str(caught.value)


def test_constants_of_shapes_and_captured_numbers():
    table = np.zeros((QUERIES, KEYS), np.float32)
    spec = AttentionSpec.from_functions(
        score_mod=lambda s, b, h, q, k: s + table[q % table.shape[0], k] * len(table)
    )
    assert "80" in spec.source


def test_functions_work_on_numbers_too():
    x = np.linspace(0.5, 2, 5)
    for name in ("exp", "exp2", "log", "tanh", "sqrt", "floor"):
        np.testing.assert_array_equal(getattr(flashbsr, name)(x), getattr(np, name)(x))
    np.testing.assert_allclose(flashbsr.sigmoid(x), 1 / (1 + np.exp(-x)))
    np.testing.assert_array_equal(flashbsr.where(x > 1, x, 0), np.where(x > 1, x, 0))
    assert flashbsr.minimum(1, 2) == 1 and flashbsr.maximum(1, 2) == 2
