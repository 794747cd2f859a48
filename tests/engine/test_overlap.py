# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Outputs that are somebody's input: only q itself, whole."""

from __future__ import annotations

import random
from typing import Any

import flashbsr
import numpy as np
import pytest
from flashbsr import Attention, AttentionSpec, FlashbsrError, Paged, Ragged, TaskInfo

ROWS = np.array([0, 2])


def attention(heads: int = 2, dim: int = 8) -> Attention:
    made = Attention(AttentionSpec(), TaskInfo(heads, 1, dim))
    made.plan(Ragged(ROWS, np.array([0, 4])))
    return made


def test_a_part_of_q_raises(rng: np.random.Generator) -> None:
    b = rng.standard_normal((3, 2, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 4, 1, 8)).astype(np.float32)
    before = b.copy()
    with pytest.raises(FlashbsrError, match=r"^out: got memory that q has too"):
        attention().run(b[:2], (k, v), out=b[1:3])
    np.testing.assert_array_equal(b, before)


def test_q_itself_is_allowed(rng: np.random.Generator) -> None:
    q = rng.standard_normal((2, 2, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 4, 1, 8)).astype(np.float32)
    want = attention().run(q.copy(), (k, v))
    out = attention().run(q, (k, v), out=q)
    assert out is q
    np.testing.assert_array_equal(q, want)


def test_inside_the_cache_raises(rng: np.random.Generator) -> None:
    cache = rng.standard_normal((4, 2, 4, 1, 8)).astype(np.float32)
    made = Attention(AttentionSpec(), TaskInfo(2, 1, 8))
    made.plan(Paged(ROWS, np.array([0, 1]), np.array([2]), kv_lens=np.array([4]), page_size=4))
    q = np.ones((2, 2, 8), np.float32)
    out = cache[1, 1].reshape(2, 2, 8)  # of page 1, which the plan does not name
    with pytest.raises(FlashbsrError, match=r"^out: got memory that kv has too"):
        made.run(q, cache, out=out)
    with pytest.raises(FlashbsrError, match=r"^out: got memory that v has too"):
        made.run(q, (cache[:, 0], cache[:, 1]), out=out)


def test_the_lse_has_memory_of_its_own(rng: np.random.Generator) -> None:
    q = rng.standard_normal((2, 2, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 4, 1, 8)).astype(np.float32)
    out = np.empty_like(q)
    for name, other in (("out", out), ("q", q), ("v", v)):
        with pytest.raises(FlashbsrError, match=rf"^lse: got memory that {name} has too"):
            attention().run(q, (k, v), out=out, lse=other.reshape(-1)[:4].reshape(2, 2))


def test_views_that_interleave_are_apart(rng: np.random.Generator) -> None:
    """Fused projections: q, k, v and the output are columns of one array."""
    fused = rng.standard_normal((4, 6, 8)).astype(np.float32)
    q, out, k, v = fused[:, :2], fused[:, 2:4], fused[:, 4:5], fused[:, 5:]
    made = Attention(AttentionSpec(), TaskInfo(2, 1, 8))
    made.plan(Ragged(np.array([0, 4]), np.array([0, 4])))
    want = made.run(q.copy(), (k.copy(), v.copy()))
    made.run(q, (k, v), out=out)
    np.testing.assert_array_equal(out, want)


def _view(base: np.ndarray, shape: tuple[int, int, int], numbers: random.Random) -> np.ndarray:
    """Rows of 8 at random steps, some of them backwards, whose elements are all different."""
    steps, extent = [0, 0, 1], shape[2]
    for dim in numbers.sample((0, 1), 2):
        steps[dim] = extent + numbers.choice((0, 0, 1, 3, 8, 16, 24))
        extent += steps[dim] * (shape[dim] - 1)
    at = numbers.randrange(max(1, 700 - extent))
    view = np.lib.stride_tricks.as_strided(base[at:], shape, [4 * step for step in steps])
    return view[::-1] if numbers.random() < 0.3 else view


def test_random_views_are_told_apart_exactly() -> None:
    numbers, base = random.Random(1), np.zeros(4096, np.float32)
    made, refused = Attention(AttentionSpec(), TaskInfo(2, 1, 8)), 0
    for _ in range(4000):
        tokens = numbers.choice((1, 2, 3, 5))
        q, out, k, v = (_view(base, s, numbers) for s in [(tokens, 2, 8)] * 2 + [(4, 1, 8)] * 2)
        same = q.ctypes.data == out.ctypes.data and q.strides == out.strides
        shared = any(np.shares_memory(out, x) for x in ((k, v) if same else (q, k, v)))
        made.plan(Ragged(np.array([0, tokens]), np.array([0, 4])))
        if shared:
            refused += 1
            with pytest.raises(FlashbsrError, match="memory that"):
                made.run(q, (k, v), out=out)
        else:
            made.run(q, (k, v), out=out)
    assert 1000 < refused < 3000


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_scales_are_finite(name: str, scale: float) -> None:
    q, k = np.ones((2, 2, 8), np.float32), np.ones((4, 1, 8), np.float32)
    for value in (scale, np.float64(scale), np.array(scale)):
        with pytest.raises(FlashbsrError, match=rf"^{name}: got -?(nan|inf); expected a finite"):
            attention().run(q, (k, k), **{name: value})


def test_scales_whose_product_is_not_finite() -> None:
    q, k = np.ones((2, 2, 8), np.float32), np.ones((4, 1, 8), np.float32)
    with pytest.raises(FlashbsrError, match=r"^q_scale: got inf with k_scale"):
        attention().run(q, (k, k), q_scale=1e30, k_scale=1e30)


# --- types: what is expected there


def _types() -> list[tuple[str, Any, str, str]]:
    rows, keys = ROWS.astype(np.int32), np.array([0, 4], np.int32)
    q, k = np.ones((2, 2, 8), np.float32), np.ones((4, 1, 8), np.float32)

    def plan(layout: Any, **masks: Any) -> Any:
        return lambda: attention().plan(layout, **masks)

    def run(**changes: Any) -> Any:
        arrays = {"q": q, "kv": (k, k)} | changes
        return lambda: attention().run(arrays.pop("q"), arrays.pop("kv"), **arrays)

    heads = np.ones(2)
    index, number = "int32, int64", "float32, float16, bfloat16, float8_e4m3fn"
    return [
        ("uint32 rows", plan(Ragged(rows.astype(np.uint32), keys)), "uint32", index),
        ("float rows", plan(Ragged([0, 2.5], keys)), "float64", index),
        ("swapped rows", plan(Ragged(rows.astype(">i4"), keys)), ">i4", index),
        ("complex rows", plan(Ragged(rows.astype(complex), keys)), "complex128", index),
        ("int8 mask", plan(Ragged(rows, keys), custom_mask=np.ones(8, np.int8)), "int8",
         "bool, uint8"),
        ("float64 scale", run(q_scale=heads), "float64", "float32"),
        ("swapped scale", run(q_scale=heads.astype(">f4")), ">f4", "float32"),
        ("complex q", run(q=q.astype(complex)), "complex128", number),
        ("swapped q", run(q=q.astype(">f4")), ">f4", number),
        ("swapped k", run(kv=(k.astype(">f4"), k)), ">f4", f"{number}, float8_e5m2, int8"),
        ("float64 lse", run(lse=np.ones((2, 2))), "float64", "float32"),
        ("float64 sinks", run(sinks=heads), "float64", "float32"),
        ("int8 workspace",
         lambda: Attention(AttentionSpec(), TaskInfo(2, 1, 8), np.zeros(64, np.int8)),
         "int8", "uint8"),
    ]  # fmt: skip


@pytest.mark.parametrize(("call", "got", "expected"), [t[1:] for t in _types()],
                         ids=[t[0] for t in _types()])  # fmt: skip
def test_a_wrong_type_names_what_is_expected_there(call: Any, got: str, expected: str) -> None:
    with pytest.raises(flashbsr.DTypeError, match=rf": got {got}; expected {expected}$"):
        call()


def test_masked_arrays_are_refused() -> None:
    q, k = np.ones((2, 2, 8), np.float32), np.ones((4, 1, 8), np.float32)
    with pytest.raises(flashbsr.DTypeError, match=r"^q: got a masked array.*filled"):
        attention().run(np.ma.masked_array(q, q > 0), (k, k))
    with pytest.raises(flashbsr.DTypeError, match=r"^kv_indptr: got a masked array"):
        attention().plan(Ragged(ROWS, np.ma.masked_array([0, 4], [False, True])))


def test_arguments_of_the_constructor_name_the_class() -> None:
    with pytest.raises(TypeError, match=r"^Attention\.__init__"):
        Attention(AttentionSpec())  # type: ignore[call-arg]
