# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the build rounds outputs to float8_e4m3fn itself, once."""

from __future__ import annotations

import functools
from typing import Any

import flashbsr
import ml_dtypes
import numpy as np
import pytest
from flashbsr.info import engine_info
from harness import DEVICES, framework
from reference import DTYPES
from toolchain import load_tool

GPU = next((device for device in DEVICES if device.is_cuda), None)
if GPU is None:
    pytest.skip("no GPU, or a build or a PyTorch without CUDA", allow_module_level=True)

torch = framework("torch")
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
CASES = load_tool("sanitizer_cases")
CUDA = engine_info()["cuda"]
MAJOR, MINOR = CUDA["devices"][0]["compute_capability"]
KERNELS = [
    kernel
    for kernel in CASES.reachable(CUDA["kernels"], 10 * MAJOR + MINOR)
    if kernel["rows"] is not None
]
SCALE = 2.0**-9  # makes most of the outputs larger than 448 somewhere


def outputs(
    kernel: dict[str, Any], o_dtype: str, patch: pytest.MonkeyPatch
) -> list[np.ndarray[Any, Any]]:
    """What the problems of a row give in a type, and their LSE."""
    given: list[np.ndarray[Any, Any]] = []
    run, rng = flashbsr.Attention.run, np.random.default_rng(3)

    def kept(self: flashbsr.Attention, q: Any, kv: Any, **arrays: Any) -> Any:
        nothing = np.full((*q.shape[:2], self.task.head_dim_vo), np.nan).astype(DTYPES[o_dtype])
        arrays["out"] = GPU.put(nothing)
        result = run(self, q, kv, **arrays, o_scale=SCALE)
        both = result if isinstance(result, tuple) else (result,)
        given.extend(np.array(GPU.get(x)) for x in both)
        # For the problem itself, which looks whether its output is finite: a float8 one is.
        return (q.float(), q) if isinstance(result, tuple) else q.float()

    def normal(shape: tuple[int, ...], dtype: str) -> Any:
        return GPU.put(rng.standard_normal(shape, np.float32).astype(DTYPES[dtype]))

    patch.setattr(flashbsr.Attention, "run", kept)
    patch.setattr(flashbsr, "TaskInfo", functools.partial(flashbsr.TaskInfo, o_dtype=o_dtype))
    patch.setattr(CASES, "normal", normal)
    patch.setattr(CASES, "integers", lambda x: GPU.put(np.asarray(x)))
    torch.manual_seed(3)
    assert CASES.run_kernel(kernel) == []
    return given


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel["name"])
def test_kernels_round_the_float32_output_once(
    kernel: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole tiles, parts that are merged, and requests that share: the bits of a conversion."""
    # Half of the problems: what differs in masks only is left out.
    specs = {name: (some[0], *some[2:][-1:]) for name, some in CASES.SPECS.items()}
    monkeypatch.setattr(CASES, "SPECS", specs)
    with monkeypatch.context() as patch:
        exact = outputs(kernel, "float32", patch)
    with monkeypatch.context() as patch:
        got = outputs(kernel, "float8_e4m3fn", patch)
    assert len(got) == len(exact) > 0
    largest = 0.0
    for wide, narrow in zip(exact, got, strict=True):
        if narrow.dtype != E4M3:
            np.testing.assert_array_equal(narrow, wide)  # the LSE is of what is not rounded
            continue
        largest = max(largest, float(np.abs(wide).max()))
        wanted = np.clip(wide, -448, 448).astype(E4M3)
        np.testing.assert_array_equal(narrow.view(np.uint8), wanted.view(np.uint8))
    assert largest > 1


def planned(
    q_lens: tuple[int, ...], kv_len: int, dim: int, backend: str = "auto", o_dtype: Any = E4M3
) -> Any:
    """An engine with a plan, q, k and v."""
    starts, ends = (np.concatenate([[0], np.cumsum(n)]) for n in (q_lens, [kv_len] * len(q_lens)))
    task = flashbsr.TaskInfo(8, 2, dim, q_dtype="bfloat16", o_dtype=o_dtype, backend=backend)
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), task)
    attention.plan(flashbsr.Ragged(starts, ends))
    rng = np.random.default_rng(0)
    shapes = (starts[-1], 8, dim), *[(ends[-1], 2, dim)] * 2
    return attention, *(rng.standard_normal(x).astype(DTYPES["bfloat16"]) for x in shapes)


@pytest.mark.parametrize(
    ("backend", "q_lens"), [("auto", (1, 1, 1)), ("auto", (40, 3, 200)), ("fa2", (40, 3, 200))]
)
def test_rows_leave_what_lies_beside_them(backend: str, q_lens: tuple[int, ...]) -> None:
    """Head dim 72, which kernels pad, in rows that are 80 apart."""
    attention, q, k, v = planned(q_lens, 300, 72, backend)
    bits = GPU.put(np.full((len(q), 8, 80), 0x55, np.uint8))
    q, k, v = map(GPU.put, (q, k, v))
    attention.run(q, (k, v), out=bits.view(torch.float8_e4m3fn)[..., :72])
    written = np.array(GPU.get(bits))
    assert (written[..., 72:] == 0x55).all()
    exact, *_ = planned(q_lens, 300, 72, backend, "float32")
    rounded = np.array(GPU.get(exact.run(q, (k, v)))).astype(E4M3)
    np.testing.assert_array_equal(written[..., :72], rounded.view(np.uint8))


def test_nan_stays_nan() -> None:
    attention, q, k, v = planned((3,), 50, 64)
    v[7, 1, 5] = np.nan
    out = np.array(GPU.get(attention.run(GPU.put(q), (GPU.put(k), GPU.put(v)))))
    bad = np.isnan(out.astype(np.float32))
    assert bad[:, 4:, 5].all()
    assert bad.sum() == 12
