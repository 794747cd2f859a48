# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`flashbsr.attention`: dense and ragged against the reference, what it keeps, what it refuses."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import cases
import flashbsr
import numpy as np
import pytest
import reference
from cases import BF16, F16, F32, FP8
from compare import assert_attention
from flashbsr.engine import call
from harness import CPU, Device, assert_poison_survived
from kinds import KINDS, Kind
from reference import DTYPES, State, Variant

VARIANTS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_left": 7},
    "scale and cap": {"sm_scale": 0.3, "logits_soft_cap": 2.0},
}


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    """Each test begins as a new thread does."""
    call._KEPT.engines.clear()


def normal(shape: tuple[int, ...], dtype: str, seed: int, order: Any = None) -> np.ndarray:
    """Random numbers as a view into NaN, dims in memory as `order` says."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])
    if order is None:
        return cases.strided(x, dtype)
    return cases.strided(x.transpose(order).copy(), dtype).transpose(np.argsort(order))


def answer(
    parts: list[tuple[np.ndarray, ...]], work: str | None, dtype: str, **fields: Any
) -> State:
    """Attention of every sequence on its own."""
    found = [
        reference.attend(
            q, k, v, Variant(**fields), work=work, out_dtype=None if work is None else dtype
        )
        for q, k, v in parts
    ]
    return State.concatenate(found, parts[0][0].shape[1], parts[0][2].shape[2])


def compare(
    out: np.ndarray,
    lse: np.ndarray,
    parts: list[tuple[np.ndarray, ...]],
    dtypes: Any,
    device: Device,
    **fields: Any,
) -> None:
    """With both references; `out` and `lse` are as dense or ragged as they came."""
    # The CPU widens float8, tensor cores multiply it.
    work = device.adapt(cases.Case("dense", (1,), (1,), dims=(64, 64), dtypes=dtypes)).work
    exact, working = (
        answer(parts, None, dtypes[2], **fields),
        answer(parts, work, dtypes[2], **fields),
    )
    flat = out.reshape(-1, *out.shape[-2:]), lse.reshape(-1, lse.shape[-1])
    assert_attention(*flat, exact, working, work, "attention")


ORDERS = {"strided": None, "heads first": (0, 2, 1, 3), "tokens first": (1, 0, 2, 3)}


@pytest.mark.parametrize("dtypes", [F32, F16, BF16, FP8], ids=lambda dtypes: dtypes[0])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", VARIANTS)
def test_dense(name: str, order: str, dtypes: tuple[str, str, str], device: Device) -> None:
    """GQA, other dims of values, any strides, NaN around; K and V of any order are not copied."""
    if device.is_cuda and dtypes[0] == "float32":
        pytest.skip("float32 queries are the CPU's")
    shapes = [(3, 9, 4, 64), (3, 40, 2, 64), (3, 40, 2, 64)]
    arrays = [
        normal(shape, dtype, seed, ORDERS[order])
        for seed, (shape, dtype) in enumerate(
            zip(shapes, dtypes[:1] + 2 * dtypes[1:2], strict=True)
        )
    ]
    there = [device.put(x) for x in arrays]
    out, lse = flashbsr.attention(*there, return_lse=True, **VARIANTS[name])
    assert tuple(out.shape) == (3, 9, 4, 64)
    assert tuple(lse.shape) == (3, 9, 4)
    parts = list(zip(*arrays, strict=True))
    compare(device.get(out), device.get(lse), parts, dtypes, device, **VARIANTS[name])
    alone = flashbsr.attention(*there, **VARIANTS[name])
    np.testing.assert_array_equal(device.get(alone), device.get(out))


LENGTHS = [
    ((5, 1, 0, 33, 2), (37, 130, 7, 33, 0)),
    ((4, 4), None),
    ((0, 0), (3, 0)),
    ((), ()),
]


@pytest.mark.parametrize(("q_lens", "kv_lens"), LENGTHS, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("index", [np.int32, np.int64, list])
def test_ragged(
    index: Any, name: str, q_lens: tuple[int, ...], kv_lens: tuple[int, ...] | None, device: Device
) -> None:
    """Empty sequences among others; lengths of keys default to those of queries."""
    dtypes = BF16 if device.is_cuda else F32
    lens = q_lens, q_lens if kv_lens is None else kv_lens
    cu = [
        cases.indptr(n).tolist() if index is list else cases.indptr(n).astype(index) for n in lens
    ]
    q, k, v = (
        normal((sum(lens[i > 0]), heads, dim), dtypes[0], i)
        for i, (heads, dim) in enumerate(((4, 64), (2, 64), (2, 32)))
    )
    named = {"cu_seqlens_q": cu[0]} | ({} if kv_lens is None else {"cu_seqlens_k": cu[1]})
    out, lse = flashbsr.attention(
        *map(device.put, (q, k, v)), **named, **VARIANTS[name], return_lse=True
    )
    assert tuple(out.shape) == (sum(q_lens), 4, 32)
    assert tuple(lse.shape) == (sum(q_lens), 4)
    if not q_lens:
        return
    bounds = [list(itertools.pairwise(cases.indptr(n))) for n in lens]
    parts = [(q[a:b], k[c:d], v[c:d]) for (a, b), (c, d) in zip(*bounds, strict=True)]
    compare(device.get(out), device.get(lse), parts, dtypes, device, **VARIANTS[name])


@pytest.mark.parametrize("shape", [(0, 5, 9), (3, 0, 9), (3, 5, 0), (1, 1, 1)], ids=str)
def test_dense_edges(shape: tuple[int, int, int], device: Device) -> None:
    """No sequences, no queries, no keys."""
    batch, q_len, kv_len = shape
    q, k = np.ones((batch, q_len, 4, 64)), np.ones((batch, kv_len, 2, 64))
    q, k = (device.put(x.astype(np.float16)) for x in (q, k))
    out, lse = flashbsr.attention(q, k, k, return_lse=True)
    assert tuple(out.shape) == (batch, q_len, 4, 64)
    assert (device.get(out) == (kv_len > 0)).all()
    assert np.isneginf(device.get(lse)).all() or kv_len


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kinds(kind: Kind) -> None:
    """Results are of the caller's kind, `out` and lengths may be."""
    q, k = (np.random.default_rng(i).random((2, 7, 2, 16), np.float32) for i in range(2))
    expected = flashbsr.attention(q, k, k, causal=True)
    there = [kind.put(x) for x in (q, k, k)]
    out = flashbsr.attention(*there, causal=True)
    assert isinstance(out, kind.array)
    np.testing.assert_array_equal(kind.get(out), expected)
    rows = [kind.put(x.reshape(14, 2, 16)) for x in (q, k, k)]
    cu = kind.put(np.array([0, 7, 14], np.int32))
    ragged = flashbsr.attention(*rows, causal=True, cu_seqlens_q=cu)
    assert isinstance(ragged, kind.array)
    np.testing.assert_array_equal(kind.get(ragged).reshape(expected.shape), expected)
    if kind.name != "jax":
        target = kind.put(np.full(q.shape, np.nan, np.float32))
        assert flashbsr.attention(*there, causal=True, out=target) is target
        np.testing.assert_array_equal(kind.get(target), expected)
    else:
        with pytest.raises(flashbsr.UnsupportedError, match=r"^out\b.*immutable"):
            flashbsr.attention(*there, out=there[0])


def test_out_is_written_where_it_lies(device: Device) -> None:
    q, k = (device.put(np.ones((2, n, 2, 64), np.float16)) for n in (3, 5))
    memory = cases.strided(cases.poisoned((6, 2, 64), "float16"), "float16")
    target = device.put(memory)
    out = target.reshape(2, 3, 2, 64)
    found, lse = flashbsr.attention(q, k, k, out=out, return_lse=True)
    assert found is out
    assert tuple(lse.shape) == (2, 3, 2)
    result = device.get(target)
    assert (result == 1).all()
    assert_poison_survived(result, "out")
    apart = device.put(np.zeros((3, 2, 2, 64), np.float16)).swapaxes(0, 1)
    with pytest.raises(flashbsr.ShapeError, match=r"^out\b.*contiguous"):
        flashbsr.attention(q, k, k, out=apart)
    with pytest.raises(flashbsr.ShapeError, match=r"^out\b.*\(2, 3, 2, 64\)"):
        flashbsr.attention(q, k, k, out=target)


def test_a_spec_and_options_of_run(device: Device) -> None:
    """Whatever else there is: a spec, sinks, scales, slopes."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 9, h, 64)).astype(np.float16) for h in (4, 2, 2))
    sinks = rng.standard_normal(4).astype(np.float32)
    spec = flashbsr.AttentionSpec(causal=True, pos_encoding_mode="ALIBI")
    out, lse = flashbsr.attention(
        *map(device.put, (q, k, v)),
        spec=spec,
        sinks=device.put(sinks),
        q_scale=0.5,
        return_lse=True,
    )
    states = [
        reference.attend(
            q[0], k[0], v[0], Variant(causal=True, pos_encoding_mode="ALIBI"), sinks=sinks,
            q_scale=0.5, work=work, out_dtype=work,
        )
        for work in (None, "float16")
    ]  # fmt: skip
    assert_attention(device.get(out)[0], device.get(lse)[0], *states, "float16", "options")


def engines() -> list[flashbsr.Attention]:
    return [engine for engine, _ in call._KEPT.engines.values()]


def test_plans_only_when_lengths_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine for equal options however they are spelt; the same array with new lengths too."""
    plans = []
    plan = flashbsr.Attention.plan
    monkeypatch.setattr(
        flashbsr.Attention, "plan", lambda self, *a, **k: (plans.append(1), plan(self, *a, **k))
    )
    x = np.ones((2, 6, 2, 16), np.float32)
    for options in ({}, {"causal": False}, {"sm_scale": None}, {"logits_soft_cap": 0}):
        flashbsr.attention(x, x, x, **options)
    flashbsr.attention(x, x, x, spec=flashbsr.AttentionSpec())
    assert (len(plans), len(engines())) == (1, 1)
    flashbsr.attention(x[:, :3], x, x)
    flashbsr.attention(x, x, x)
    assert (len(plans), len(engines())) == (3, 1)
    rows, cu = x.reshape(12, 2, 16), np.array([0, 5, 12])
    for lens in ([0, 5, 12], [0, 5, 12], [0, 6, 12]):
        cu[:] = lens
        flashbsr.attention(rows, rows, rows, cu_seqlens_q=cu)
    assert (len(plans), len(engines())) == (5, 1)
    flashbsr.attention(x, x, x, causal=True)
    flashbsr.attention(x.astype(np.float16), x.astype(np.float16), x.astype(np.float16))
    assert (len(plans), len(engines())) == (7, 3)


def test_few_engines_are_kept() -> None:
    """The last ones: a caller with many scales keeps no more."""
    x = np.ones((1, 2, 1, 8), np.float32)
    for i in range(1, 30):
        flashbsr.attention(x, x, x, sm_scale=float(i))
    assert [engine.spec.sm_scale for engine in engines()] == [float(i) for i in range(22, 30)]
    flashbsr.attention(x, x, x, sm_scale=22.0)  # used again: the next one goes
    flashbsr.attention(x, x, x, sm_scale=1.0)
    assert [engine.spec.sm_scale for engine in engines()] == [*range(24, 30), 22, 1]


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    """The next call is right, whatever the last one did to the plan."""
    x = np.arange(64, dtype=np.float32).reshape(8, 1, 8) / 64
    expected = flashbsr.attention(x, x, x, cu_seqlens_q=[0, 3, 8])
    for bad in ([0, 4, 3], [0, 3, 9], [1, 8]):
        with pytest.raises(flashbsr.FlashbsrError):
            flashbsr.attention(x, x, x, cu_seqlens_q=bad)
        again = flashbsr.attention(x, x, x, cu_seqlens_q=[0, 3, 8])
        np.testing.assert_array_equal(again, expected)


def test_threads() -> None:
    """Each thread has its own engines: no call sees another's lengths."""
    failures: list[BaseException] = []
    start = threading.Barrier(6)

    def work(seed: int) -> None:
        try:
            start.wait()
            rng = np.random.default_rng(seed)
            for _ in range(25):
                q_len, kv_len = (int(n) for n in rng.integers(1, 90, 2))
                q, k, v = (
                    rng.standard_normal((2, n, 2, 16)).astype(np.float32)
                    for n in (q_len, kv_len, kv_len)
                )
                out, lse = flashbsr.attention(q, k, v, causal=True, return_lse=True)
                compare(out, lse, list(zip(q, k, v, strict=True)), F32, CPU, causal=True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert not failures, failures
    assert not engines()


X = np.ones((2, 3, 4, 16), np.float32)
ROWS = np.ones((6, 4, 16), np.float32)
BAD: list[tuple[str, str, tuple[Any, Any, Any], dict[str, Any]]] = [
    ("q", "rank 2", (X[0, 0], X, X), {}),
    ("q", "rank 5", (X[None], X, X), {}),
    ("q", "a list", (X.tolist(), X, X), {}),
    ("q", "float64", (X.astype(float), X, X), {}),
    ("k", "another rank", (X, ROWS, X), {}),
    ("k", "another batch", (X, X[:1], X[:1]), {}),
    ("k", "integers", (X, X.astype(np.int32), X), {}),
    ("k", "another head dim", (X, X[..., :8], X), {}),
    ("v", "another length", (X, X, X[:, :2]), {}),
    ("v", "other heads", (X, X, X[:, :, :2]), {}),
    ("num_qo_heads", "no multiple", (X[:, :, :3], X[:, :, :2], X[:, :, :2]), {}),
    ("head_dim_qk", "no multiple of 8", (X[..., :12], X[..., :12], X), {}),
    ("v", "another type", (X, X, X.astype(np.float16)), {}),
    ("cu_seqlens_q", "missing", (ROWS, ROWS, ROWS), {}),
    ("cu_seqlens_q", "missing beside k's", (ROWS, ROWS, ROWS), {"cu_seqlens_k": [0, 6]}),
    ("cu_seqlens_q", "with a dense batch", (X, X, X), {"cu_seqlens_q": [0, 3, 6]}),
    ("cu_seqlens_q", "decreases", (ROWS, ROWS, ROWS), {"cu_seqlens_q": [0, 4, 3, 6]}),
    ("cu_seqlens_q", "does not start at 0", (ROWS, ROWS, ROWS), {"cu_seqlens_q": [1, 6]}),
    ("cu_seqlens_q", "floats", (ROWS, ROWS, ROWS), {"cu_seqlens_q": np.array([0.0, 6.0])}),
    ("cu_seqlens_q", "another batch", (ROWS, ROWS, ROWS),
     {"cu_seqlens_q": [0, 6], "cu_seqlens_k": [0, 3, 6]}),
    ("cu_seqlens_k", "decreases", (ROWS, ROWS, ROWS),
     {"cu_seqlens_q": [0, 3, 6], "cu_seqlens_k": [0, 6, 3]}),
    ("q", "fewer rows", (ROWS[:5], ROWS, ROWS), {"cu_seqlens_q": [0, 6]}),
    ("k", "fewer rows", (ROWS, ROWS[:5], ROWS[:5]), {"cu_seqlens_q": [0, 6]}),
    ("window_left", "below -1", (X, X, X), {"window_left": -2}),
    ("sm_scale", "nan", (X, X, X), {"sm_scale": float("nan")}),
    ("sm_scale", "an array", (X, X, X), {"sm_scale": np.ones(3)}),
    ("causal", "beside a spec", (X, X, X), {"spec": flashbsr.AttentionSpec(), "causal": True}),
    ("spec", "a dict", (X, X, X), {"spec": {"causal": True}}),
    ("lse", "to write into", (X, X, X), {"lse": np.zeros((2, 3, 4), np.float32)}),
    ("block_size", "an unknown name", (X, X, X), {"block_size": 3}),
    ("stream", "on the host", (X, X, X), {"stream": 0}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arrays", "options"),
    [pytest.param(*bad[:1], *bad[2:], id=f"{bad[0]}-{bad[1]}") for bad in BAD],
)
def test_bad_calls(name: str, arrays: tuple[Any, Any, Any], options: dict[str, Any]) -> None:
    """Errors name the arguments of this call."""
    with pytest.raises(flashbsr.FlashbsrError) as caught:
        flashbsr.attention(*arrays, **options)
    assert caught.value.argument.partition("[")[0] == name, caught.value
    assert "indptr" not in str(caught.value)
