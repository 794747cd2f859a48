# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Outputs in NVFP4: codes of two in a byte, a scale of each 16, and a number of the tensor.

Wanted are the codes that NumPy makes, by the formulas of docs/kv-quantization.md, of the float32
output of the same plan, which is the same to the bit.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashbsr import (
    Attention,
    AttentionSpec,
    Paged,
    Ragged,
    TaskInfo,
    dequantize_kv_cache,
    flashinfer,
)
from flashbsr.errors import DTypeError, FlashbsrError, ShapeError, UnsupportedError
from harness import Device, framework
from kv_codes import NVFP4, decode, encode
from reference import DTYPES

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
HEADS, KV_HEADS, DIM = 4, 2, 64
LENGTHS = ([5, 0, 1, 2, 40], [33, 7, 0, 700, 60])  # without rows, without keys, split, a chunk


def problem(dtype: str, dim: int = DIM, size: float = 1.0) -> tuple[Ragged, Any, tuple[Any, Any]]:
    rng = np.random.default_rng(3)
    q_len, kv_len = (np.concatenate([[0], np.cumsum(x)]) for x in LENGTHS)
    shapes = (q_len[-1], HEADS, dim), *[(kv_len[-1], KV_HEADS, dim)] * 2
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    v *= size * np.exp2(rng.integers(-6, 6, dim))  # groups of 16 whose dims differ in size
    q, k, v = (x.astype(DTYPES[dtype]) for x in (q, k, v))
    return Ragged(q_len, kv_len), q, (k, v)


def planned(layout: Any, dtype: str, o_dtype: str = "nvfp4", dim: int = DIM, **task: Any) -> Any:
    attention = Attention(
        AttentionSpec(causal=True),
        TaskInfo(HEADS, KV_HEADS, dim, q_dtype=dtype, kv_dtype=dtype, o_dtype=o_dtype, **task),
    )
    attention.plan(layout)
    return attention


def wanted(exact: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = encode(np.asarray(exact), NVFP4)
    return codes, scales.view(np.uint8)


def check(device: Device, got: Any, exact: Any) -> None:
    """The bits of both arrays."""
    codes, scales = (np.array(device.get(x)) for x in got)
    assert scales.dtype == E4M3
    for x, y in zip((codes, scales.view(np.uint8)), wanted(device.get(exact)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dim", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("o_scale", [1.0, 0.01])
def test_is_the_float32_output_in_codes(device: Device, dim: int, o_scale: float) -> None:
    layout, q, kv = problem("float16", dim)
    arrays = device.put(q), tuple(map(device.put, kv))
    sinks, v_scale = (
        device.put(np.array(x, np.float32)) for x in (np.linspace(-1, 1, HEADS), [0.5, 3])
    )
    options = {"sinks": sinks, "v_scale": v_scale, "o_scale": o_scale, "return_lse": True}
    exact, lse = planned(layout, "float16", "float32", dim).run(*arrays, **options)
    got, same_lse = planned(layout, "float16", dim=dim).run(*arrays, **options)
    check(device, got, exact)
    np.testing.assert_array_equal(np.array(device.get(same_lse)), np.array(device.get(lse)))
    # What reads it multiplies the number of the tensor in.
    values = np.array(device.get(dequantize_kv_cache(got[0], (got[1], o_scale), kv_dtype="nvfp4")))
    codes, scales = (np.array(device.get(x)) for x in got)
    np.testing.assert_allclose(values, decode(codes, scales, NVFP4) * o_scale, rtol=1e-6)
    assert not codes[5:6].any()  # nothing visible
    assert not scales[5:6].view(np.uint8).any()


def test_into_parts_of_larger_arrays(device: Device) -> None:
    """Every second token's row of a wider array; nothing beside it is written."""
    layout, q, kv = problem("bfloat16")
    arrays = device.put(q), tuple(map(device.put, kv))
    exact = planned(layout, "bfloat16", "float32").run(*arrays)
    shapes = [(2 * len(q), HEADS + 1, n) for n in (DIM // 2 + 8, DIM // 16 + 3)]
    bases = [device.put(np.full(shape, 0x55, np.uint8)) for shape in shapes]
    codes = bases[0][::2, :HEADS, : DIM // 2]
    float8 = framework("torch").float8_e4m3fn if device.is_cuda else E4M3
    scales = bases[1].view(float8)[::2, :HEADS, : DIM // 16]
    out = codes, scales
    assert planned(layout, "bfloat16").run(*arrays, out=out) is out
    check(device, out, exact)
    for base, width in zip(bases, (DIM // 2, DIM // 16), strict=True):
        bits = np.array(device.get(base))
        bits[::2, :HEADS, :width] = 0x55
        assert (bits == 0x55).all()


def test_nan_and_sizes_beyond_the_scales(device: Device) -> None:
    layout, q, kv = problem("bfloat16", size=2.0**12)
    kv[1][3, 0, 20] = np.nan
    arrays = device.put(q), tuple(map(device.put, kv))
    exact = planned(layout, "bfloat16", "float32").run(*arrays)
    got = planned(layout, "bfloat16").run(*arrays)
    check(device, got, exact)
    codes, scales = (np.array(device.get(x)) for x in got)
    bad = np.isnan(scales.astype(np.float32))
    # Key 3 is seen by all rows of the first request; its dim 20 is one of the second group.
    assert bad[:5, :2, 1].all()
    assert bad.sum() == 10
    assert not codes.reshape(len(q), HEADS, DIM // 16, 8)[bad].any()
    assert scales[~bad].astype(np.float32).max() == 448


def test_latents(device: Device) -> None:
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((20, 16, 576)).astype(DTYPES["bfloat16"])
    q = rng.standard_normal((2, 16, 576)).astype(DTYPES["bfloat16"])
    pages = Paged(
        None, np.array([0, 10, 20]), np.arange(20), kv_lens=np.array([160, 147]), page_size=16
    )
    results = []
    for o_dtype in ("float32", "nvfp4"):
        task = TaskInfo(16, 1, 576, head_dim_vo=512, latent=True, q_dtype="bfloat16",
                        kv_dtype="bfloat16", o_dtype=o_dtype)  # fmt: skip
        attention = Attention(AttentionSpec(sm_scale=0.07), task)
        attention.plan(pages)
        results.append(attention.run(device.put(q), device.put(cache)))
    check(device, results[1], results[0])


def test_torch_jax_and_what_explain_says() -> None:
    layout, q, kv = problem("bfloat16")
    attention = planned(layout, "bfloat16")
    codes, scales = attention.run(q, kv)
    assert "out nvfp4" in str(attention.explain())
    torch, jax = framework("torch"), framework("jax")
    theirs = [torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) for x in (q, *kv)]
    got = planned(layout, "bfloat16").run(theirs[0], tuple(theirs[1:]))
    assert [x.dtype for x in got] == [torch.uint8, torch.float8_e4m3fn]
    np.testing.assert_array_equal(got[0].numpy(), codes)
    np.testing.assert_array_equal(got[1].view(torch.uint8).numpy(), scales.view(np.uint8))
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = jax.tree.map(jax.numpy.asarray, (q, kv))
    got = planned(layout, "bfloat16").run(*arrays)
    assert [x.dtype for x in got] == [np.uint8, E4M3]
    np.testing.assert_array_equal(got[0], codes)
    np.testing.assert_array_equal(np.asarray(got[1]).view(np.uint8), scales.view(np.uint8))


def empty(rows: int, **types: Any) -> tuple[np.ndarray, np.ndarray]:
    shapes = (rows, HEADS, DIM // 2), (rows, HEADS, DIM // 16)
    return np.zeros(shapes[0], types.get("codes", np.uint8)), np.zeros(
        shapes[1], types.get("scales", E4M3)
    )


def test_mistakes_are_named() -> None:
    layout, q, kv = problem("float16")
    run, rows = planned(layout, "float16").run, len(q)
    codes, scales = empty(rows)
    for out, error, text in [
        (codes, DTypeError, r"out: got ndarray; expected \(codes, scales\)"),
        ((codes,), DTypeError, "out: got a tuple of 1"),
        ((np.zeros_like(q), scales), DTypeError, "out: got float16; expected uint8"),
        (empty(rows, scales=np.uint8), DTypeError, "out: got uint8; expected float8_e4m3fn"),
        ((codes[:, :, 1:], scales), ShapeError, "out: got shape"),
        ((codes, scales[1:]), ShapeError, "out: got shape"),
        ((codes[:, :, ::-1], scales), ShapeError, "out: .* last dimension"),
        ((codes, np.broadcast_to(scales[:1], scales.shape)), FlashbsrError, "out"),
        ((codes, codes.view(E4M3)[:, :, : DIM // 16]), FlashbsrError, "memory that out has too"),
    ]:
        with pytest.raises(error, match=text):
            run(q, kv, out=out)
    with pytest.raises(DTypeError, match=r"out: got float16; expected float32 \(o_dtype"):
        planned(layout, "float16", "float32").run(q, kv, out=np.zeros_like(q))
    with pytest.raises(UnsupportedError, match="o_dtype: got 'nvfp4' with head_dim_vo=40"):
        TaskInfo(HEADS, KV_HEADS, 40, o_dtype="nvfp4")


def test_what_has_one_array_refuses() -> None:
    """Doors whose outputs are one array, or have their scales in another order."""
    layout, q, (k, v) = problem("bfloat16")
    torch, jax = framework("torch"), framework("jax")
    attention = planned(layout, "bfloat16")
    theirs = [torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) for x in (q, k, v)]
    compiled = torch.compile(lambda q, k, v: attention.run(q, (k, v)), fullgraph=True)
    with pytest.raises(Exception, match="UnsupportedError"):
        compiled(*theirs)
    from flashbsr.integrations import jax as programs

    arrays = jax.tree.map(jax.numpy.asarray, (q, (k, v)))
    with pytest.raises(UnsupportedError, match="o_dtype: got 'nvfp4'"):
        jax.jit(lambda q, kv: programs.run(attention, q, kv))(*arrays)
    with pytest.raises(UnsupportedError, match="o_dtype: got 'nvfp4'"):
        flashinfer.single_prefill_with_kv_cache(q, k, v, o_dtype="nvfp4")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(np.zeros(1 << 20, np.uint8))
    ends = np.array([0, len(q)]), np.array([0, len(k)])
    with pytest.raises(UnsupportedError, match="o_data_type: got 'nvfp4'"):
        wrapper.plan(*ends, HEADS, KV_HEADS, DIM, o_data_type="nvfp4")
