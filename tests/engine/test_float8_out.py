# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Outputs in float8_e4m3fn with a scale of theirs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashbsr import Attention, AttentionSpec, Ragged, TaskInfo, flashinfer
from flashbsr.errors import DTypeError, FlashbsrError, UnsupportedError
from harness import framework
from reference import DTYPES

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
HEADS, KV_HEADS, DIM = 4, 2, 40
LENGTHS = ([5, 0, 1, 2], [33, 7, 0, 700])  # one without rows, one without keys, one that is split


def problem(dtype: str, size: float = 1.0) -> tuple[Ragged, np.ndarray, tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(3)
    q_len, kv_len = (np.concatenate([[0], np.cumsum(x)]) for x in LENGTHS)
    q = rng.standard_normal((q_len[-1], HEADS, DIM)).astype(np.float32).astype(DTYPES[dtype])
    k, v = (
        (rng.standard_normal((kv_len[-1], KV_HEADS, DIM)) * x).astype(np.float32) for x in (1, size)
    )
    return Ragged(q_len, kv_len), q, (k.astype(q.dtype), v.astype(q.dtype))


def attend(
    dtype: str, layout: Ragged, q: Any, kv: Any, spec: AttentionSpec | None = None, **options: Any
) -> Any:
    task = TaskInfo(HEADS, KV_HEADS, DIM, q_dtype=dtype, o_dtype=options.pop("o_dtype", E4M3),
                    num_workers=3)  # fmt: skip
    attention = Attention(spec or AttentionSpec(), task)
    attention.plan(layout)
    return attention.run(q, kv, **options)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("o_scale", [1.0, 0.01, 37])
def test_is_the_float32_output_divided_and_rounded_once(dtype: str, o_scale: float) -> None:
    layout, q, kv = problem(dtype)
    sinks = np.linspace(-1, 1, HEADS, dtype=np.float32)
    v_scale = np.array([0.5, 3], np.float32)
    exact, lse = attend(
        dtype, layout, q, kv, o_dtype="float32", v_scale=v_scale, sinks=sinks, return_lse=True
    )
    got, same_lse = attend(
        dtype, layout, q, kv, v_scale=v_scale, sinks=sinks, return_lse=True, o_scale=o_scale
    )
    assert got.dtype == E4M3
    np.testing.assert_array_equal(same_lse, lse)
    divided = exact.astype(np.float64) / o_scale
    # Half a unit of three bits, or of the smallest number; and that 1 / scale is a float32.
    error = np.abs(got.astype(np.float64) - np.clip(divided, -448, 448))
    assert (error <= np.maximum(np.abs(divided) * 2.0**-4, 2.0**-10) * (1 + 1e-6)).all()
    assert not got[5:6].astype(np.float32).any()  # nothing visible


def test_saturates_and_keeps_nan() -> None:
    layout, q, kv = problem("float32", size=1e5)
    got = attend("float32", layout, q, kv).astype(np.float32)
    assert np.isfinite(got).all()
    assert np.abs(got).max() == 448
    scaled = attend("float32", layout, q, kv, o_scale=1e5 / 64).astype(np.float32)
    assert 0 < np.abs(scaled).max() < 448
    kv[1][3, 0, 2] = np.nan
    bad = np.isnan(attend("float32", layout, q, kv).astype(np.float32))
    assert bad[:5, :2, 2].all()
    assert bad.sum() == 10


def test_into_a_strided_array_and_with_float8_queries() -> None:
    layout, q, kv = problem("bfloat16")
    wanted = attend("bfloat16", layout, q, kv, o_scale=0.5)
    base = np.full((len(q), HEADS + 1, DIM + 8), 0x55, np.uint8).view(E4M3)
    out = base[:, :HEADS, :DIM]
    assert attend("bfloat16", layout, q, kv, out=out, o_scale=0.5) is out
    np.testing.assert_array_equal(out.view(np.uint8), wanted.view(np.uint8))
    assert (base.view(np.uint8)[:, HEADS:] == 0x55).all()
    assert (base.view(np.uint8)[..., DIM:] == 0x55).all()
    q, kv = q.astype(E4M3), tuple(x.astype(E4M3) for x in kv)
    exact = attend("float8_e4m3fn", layout, q, kv, o_dtype="float32")
    got = attend("float8_e4m3fn", layout, q, kv)
    np.testing.assert_array_equal(got.view(np.uint8), exact.astype(E4M3).view(np.uint8))
    # In the memory of q.
    assert attend("float8_e4m3fn", layout, q, kv, out=q) is q
    np.testing.assert_array_equal(q.view(np.uint8), got.view(np.uint8))


def test_scales_every_type_of_output() -> None:
    layout, q, kv = problem("float32")
    got = attend("float32", layout, q, kv, o_dtype="float32", o_scale=4.0)
    exact = attend("float32", layout, q, kv, o_dtype="float32")
    np.testing.assert_array_equal(got, exact / 4)


def test_torch_and_what_explain_says() -> None:
    torch = framework("torch")
    layout, q, kv = problem("bfloat16")
    wanted = attend("bfloat16", layout, q, kv, o_scale=0.25)
    q, *kv = (torch.from_numpy(x.astype(np.float32)).bfloat16() for x in (q, *kv))
    task = TaskInfo(HEADS, KV_HEADS, DIM, q_dtype="bfloat16", o_dtype=torch.float8_e4m3fn,
                    num_workers=3)  # fmt: skip
    attention = Attention(AttentionSpec(), task)
    attention.plan(layout)
    got = attention.run(q, tuple(kv), o_scale=0.25)
    assert got.dtype == torch.float8_e4m3fn
    np.testing.assert_array_equal(got.view(torch.uint8).numpy(), wanted.view(np.uint8))
    assert "out float8_e4m3fn" in str(attention.explain())


def test_mistakes_are_named() -> None:
    layout, q, kv = problem("float16")
    for o_scale in (0.0, -1.0, 1e-60):
        with pytest.raises(FlashbsrError, match="o_scale: got .* expected a positive number"):
            attend("float16", layout, q, kv, o_scale=o_scale)
    with pytest.raises(FlashbsrError, match="o_scale"):
        attend("float16", layout, q, kv, o_scale=np.nan)
    with pytest.raises(FlashbsrError, match="o_scale: got .* with v_scale"):
        attend("float16", layout, q, kv, o_scale=1e-30, v_scale=1e30)
    with pytest.raises(DTypeError, match="o_scale"):
        attend("float16", layout, q, kv, o_scale=np.ones(HEADS))
    with pytest.raises(DTypeError, match="out"):
        attend("float16", layout, q, kv, out=np.empty(q.shape, ml_dtypes.float8_e5m2))
    with pytest.raises(DTypeError, match="out: got float16; expected float8_e4m3fn"):
        attend("float16", layout, q, kv, out=np.empty(q.shape, np.float16))
    with pytest.raises(DTypeError, match="o_dtype"):
        TaskInfo(HEADS, KV_HEADS, DIM, o_dtype="float8_e5m2")


def test_a_hook_of_outputs_divides_itself() -> None:
    """Refused before the variant is compiled, which needs a compiler."""
    spec = AttentionSpec.from_source("""
struct Halved : public flashbsr::VariantBase {
  template <class Row> void output_transform(Row x, const RowAt& at) const {
    for (int d = 0; d < at.dim; ++d) x[d] = x[d] * 0.5f;
  }
};
""")
    layout, q, kv = problem("float32")
    with pytest.raises(UnsupportedError, match=r"o_scale: got 2\.0"):
        attend("float32", layout, q, kv, spec, o_scale=2.0)


def test_flashinfers_door() -> None:
    """Its `o_dtype`; the scale is folded into that of the values, as its refusal says."""
    _, q, (k, v) = problem("bfloat16")
    function = flashinfer.single_prefill_with_kv_cache
    exact = function(q, k, v, o_dtype="float32").astype(np.float64) / 0.25
    got = function(q, k, v, scale_v=1 / 0.25, o_dtype=E4M3)
    assert got.dtype == E4M3
    error = np.abs(got.astype(np.float64) - exact)
    assert (error <= np.maximum(np.abs(exact) * 2.0**-4, 2.0**-10) * (1 + 1e-6)).all()


def test_jax() -> None:
    jax = framework("jax")
    layout, q, kv = problem("bfloat16")
    wanted = attend("bfloat16", layout, q, kv, o_scale=0.25)
    got = attend("bfloat16", layout, *jax.tree.map(jax.numpy.asarray, (q, kv)), o_scale=0.25)
    assert got.dtype == jax.numpy.float8_e4m3fn
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), wanted.view(np.uint8))
