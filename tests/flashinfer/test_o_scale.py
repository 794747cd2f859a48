# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`o_scale` of the wrappers that have it, and outputs in float8."""

from __future__ import annotations

import itertools
from typing import Any

import flashbsr
import flashbsr.flashinfer as flashinfer
import ml_dtypes
import numpy as np
import pytest
import reference
from harness import Device
from reference import Variant

HEADS, KV_HEADS, DIM = 4, 2, 64
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def ragged(device: Device, **options: Any) -> tuple[Any, Any, list[Any]]:
    """A wrapper with a plan, the exact output of its batch, and the arrays."""
    rng = np.random.default_rng(1)
    ends = [np.array(x, np.int32) for x in ([0, 3, 8], [0, 40, 45])]
    q, k, v = (
        rng.standard_normal((rows, heads, DIM)).astype(np.float16)
        for rows, heads in ((8, HEADS), (45, KV_HEADS), (45, KV_HEADS))
    )
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper()
    wrapper.plan(
        *map(device.put, ends), HEADS, KV_HEADS, DIM, causal=True, q_data_type="float16", **options
    )
    exact = [
        reference.attend(q[a:b], k[c:d], v[c:d], Variant(causal=True)).out
        for (a, c), (b, d) in itertools.pairwise(zip(*ends, strict=True))
    ]
    exact = [x.reshape(-1, HEADS, DIM) for x in exact]
    return wrapper, np.concatenate(exact), [device.put(x) for x in (q, k, v)]


def test_of_an_output_in_float8(device: Device) -> None:
    """Of the ragged wrapper the factor is V's."""
    wrapper, exact, arrays = ragged(device, o_data_type="float8_e4m3fn")
    o_scale = float(abs(exact).max()) / 448
    out = device.get(wrapper.run(*arrays, v_scale=1 / o_scale))
    assert out.dtype == E4M3
    # Half a step of three bits, and what is below the smallest step.
    np.testing.assert_allclose(out.astype(np.float64) * o_scale, exact, rtol=0.07, atol=2e-3)
    with pytest.raises(flashbsr.UnsupportedError, match=r"^o_scale: .*v_scale"):
        wrapper.run(*arrays, o_scale=o_scale)


def test_of_the_latent_wrapper(device: Device) -> None:
    rng = np.random.default_rng(2)
    latent = rng.standard_normal((1, 64, 512)).astype(np.float16)
    q = rng.standard_normal((1, 16, 512)).astype(np.float16) / 8
    nothing = np.zeros((1, 64, 64), np.float16), np.zeros((1, 16, 64), np.float16)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper()
    lens = [np.array(x, np.int32) for x in ([0, 1], [0, 1], [0], [50])]
    wrapper.plan(*map(device.put, lens), 16, 512, 64, 64, False, 0.1, "float16", "float16")
    arrays = [device.put(x) for x in (q, nothing[1], latent, nothing[0])]
    plain = device.get(wrapper.run(*arrays)).astype(np.float64)
    divided = device.get(wrapper.run(*arrays, o_scale=0.5)).astype(np.float64)
    np.testing.assert_allclose(divided, plain * 2, rtol=2e-3, atol=2e-3)
    out = device.put(np.zeros((1, 16, 512), E4M3))
    narrow = device.get(wrapper.run(*arrays, out=out, o_scale=0.01)).astype(np.float64)
    np.testing.assert_allclose(narrow * 0.01, plain, rtol=0.07, atol=2e-3)
    for wrong in (0.0, -1.0, float("inf"), float("nan"), "1"):
        with pytest.raises(flashbsr.FlashbsrError, match="^o_scale"):
            wrapper.run(*arrays, o_scale=wrong)
