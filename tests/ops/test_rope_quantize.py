# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`rope_quantize`: the rotation's formula, rounded once to float8."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
from flashbsr.errors import DTypeError, FlashbsrError, IndexRangeError, ShapeError
from harness import Device, framework
from kv_codes import hostile
from reference import DTYPES, rope_frequencies, rotate
from test_rope_append import assert_near

ROWS, MOST = 19, {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def table_of(rotary_dim: int, rows: int = 300) -> np.ndarray:
    """Cosines, then sines."""
    angles = np.arange(rows)[:, None] * rope_frequencies(rotary_dim)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("to", list(MOST))
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (128, 32), (24, 8), (576, 64), (64, 0)])
def test_against_float64(
    dtype: str,
    to: str,
    is_neox: bool,
    dim: int,
    rotary_dim: int,
    rng: np.random.Generator,
    device: Device,
) -> None:
    """Some elements are beyond the range of e4m3: they are its largest."""
    q, k = (
        hostile((rng.standard_normal((ROWS, heads, dim)) * 100).astype(DTYPES[dtype]))
        for heads in (5, 1)
    )
    positions = rng.integers(0, 300, ROWS).astype(np.int32)
    outs = [device.put(hostile(np.zeros(x.shape, DTYPES[to]))) for x in (q, k)]
    table = device.put(table_of(rotary_dim)) if rotary_dim else None
    got = flashbsr.rope_quantize(
        device.put(q), device.put(k), device.put(positions), table, is_neox,
        q_scale=0.5, k_scale=4.0, q_out=outs[0], k_out=outs[1],
    )  # fmt: skip
    made = flashbsr.rope_quantize(
        device.put(q), device.put(k), device.put(positions.astype(np.int64)), table, is_neox,
        dtype=to, q_scale=0.5, k_scale=4.0,
    )  # fmt: skip
    for x, scale, result, again, out in zip((q, k), (0.5, 4.0), got, made, outs, strict=True):
        exact = x.astype(np.float64)
        if rotary_dim:
            freq = rope_frequencies(rotary_dim)
            exact = rotate(exact, positions, freq, interleave=not is_neox)
        assert result is out
        assert_near(device.get(result), np.clip(exact / scale, -MOST[to], MOST[to]))
        bits = [np.ascontiguousarray(device.get(y)).view(np.uint8) for y in (result, again)]
        np.testing.assert_array_equal(*bits)


def test_nan_stays_and_nothing_is_nothing(device: Device) -> None:
    x = np.ones((2, 1, 16), np.float16)
    x[1, 0, 3] = np.nan
    q, _ = flashbsr.rope_quantize(
        device.put(x), device.put(x), device.put(np.zeros(2, np.int32)), device.put(table_of(16))
    )
    got = device.get(q).astype(np.float32)
    assert np.isnan(got[1, 0, [3, 11]]).all()
    assert np.isnan(got).sum() == 2
    none = device.put(np.ones((0, 1, 16), np.float16))
    q, k = flashbsr.rope_quantize(none, none, device.put(np.zeros(0, np.int32)))
    assert tuple(q.shape) == tuple(k.shape) == (0, 1, 16)


def test_torch() -> None:
    torch = framework("torch")
    x = torch.randn(4, 2, 64, dtype=torch.bfloat16)
    positions, table = torch.arange(4), torch.from_numpy(table_of(64))
    q, k = flashbsr.rope_quantize(x, x[:, :1], positions, table, dtype=torch.float8_e5m2)
    assert q.dtype == k.dtype == torch.float8_e5m2
    turned, _ = flashbsr.apply_rope_with_cos_sin_cache(
        positions, x.float().reshape(4, -1), x.float().reshape(4, -1), 64, table
    )
    assert torch.equal(q, turned.reshape(x.shape).to(torch.float8_e5m2))


def test_mistakes_are_named(device: Device) -> None:
    x, where = device.put(np.ones((2, 1, 16), np.float32)), device.put(np.zeros(2, np.int32))
    table = device.put(table_of(16))

    def refused(error: type[FlashbsrError], pattern: str, *args: Any, **options: Any) -> None:
        with pytest.raises(error, match=pattern):
            flashbsr.rope_quantize(*args, **options)

    refused(ShapeError, r"^q: got shape", x[:, 0], x, where)
    refused(ShapeError, r"^cos_sin_cache", x, x, where, device.put(table_of(18)))
    refused(DTypeError, r"^dtype", x, x, where, dtype="float16")
    refused(DTypeError, r"^q_out", x, x, where, q_out=device.put(np.ones((2, 1, 16), np.float32)))
    e4m3, e5m2 = (device.put(np.zeros((2, 1, 16), DTYPES[t])) for t in MOST)
    refused(DTypeError, r"^k_out", x, x, where, dtype="float8_e4m3fn", q_out=e4m3, k_out=e5m2)
    refused(ShapeError, r"^[qk]", x, x[:1], where)
    refused(FlashbsrError, r"^k_scale", x, x, where, k_scale=-1.0)
    refused(FlashbsrError, r"^q_scale", x, x, where, q_scale=float("nan"))
    if not device.is_cuda:
        refused(IndexRangeError, r"^pos_ids", x, x, where + 300, table)
