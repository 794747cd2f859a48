# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What tests of NVFP4 under FlashInfer's names share: a paged batch of codes, and exact answers.

Slots that no request owns hold codes of 6 and -6 and scales of NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flashbsr
import flashbsr.flashinfer as flashinfer
import ml_dtypes
import numpy as np
import pytest
import reference
import torch_device
from harness import DEVICES, Device, framework
from kv_codes import NVFP4, encode
from reference import State, Variant

__all__ = [
    "E4M3", "E5M2", "HEADS", "KV_HEADS", "KV_LENS", "K_NUMBER", "LAYOUTS", "NUMBERS", "PAGE",
    "Q_LENS", "V_NUMBER", "WORLDS", "Batch", "build", "given", "near", "planned",
]  # fmt: skip

torch = framework("torch")

TENSORS = Device("torch", "cpu", torch_device.putter(torch, "cpu"), torch_device.getter(torch))
WORLDS = pytest.mark.parametrize("device", [*DEVICES, TENSORS], ids=lambda x: x.name)
LAYOUTS = pytest.mark.parametrize("layout", ["NHD", "HND"])

HEADS, KV_HEADS, PAGE = 6, 2, 4
Q_LENS, KV_LENS = (1, 5, 3), (9, 130, 3)
K_NUMBER, V_NUMBER = 0.5, 1.75
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)


@dataclasses.dataclass
class Batch:
    """Codes, block scales and what they mean, in pages and in rows."""

    q: np.ndarray
    codes: list[np.ndarray]  # of K and of V, [pages, PAGE, KV_HEADS, dim / 2]
    scales: list[np.ndarray]  # [pages, PAGE, KV_HEADS, dim / 16]
    rows: list[list[np.ndarray]]  # of K and of V, of each request, in float64
    table: list[np.ndarray]  # indptr, indices, tokens in the last pages

    def exact(self, q_lens: tuple[int, ...] = Q_LENS, causal: bool = True, **options: Any) -> State:
        """Attention of the requests one by one."""
        ends = np.cumsum([0, *q_lens])
        states = [
            reference.attend(self.q[a:b], k, v, Variant(causal=causal), **options)
            for a, b, k, v in zip(ends, ends[1:], *self.rows, strict=False)
        ]
        return State.concatenate(states, HEADS, self.q.shape[2])

    def blocks(self) -> np.ndarray:
        """Dense block table, filled up with page 0."""
        indptr, indices, _ = self.table
        own = [indices[a:b] for a, b in zip(indptr, indptr[1:], strict=False)]
        found = np.full((len(own), max(map(len, own))), 0, np.int32)
        for row, pages in zip(found, own, strict=True):
            row[: len(pages)] = pages
        return found


def build(dim: int = 64, dtype: Any = np.float16) -> Batch:
    rng = np.random.default_rng(dim)
    counts = [-(-n // PAGE) for n in KV_LENS]
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    pages = int(indptr[-1]) + 3
    indices = rng.permutation(pages)[: indptr[-1]].astype(np.int32)
    codes = [np.full((pages, PAGE, KV_HEADS, dim // 2), 0x7F, np.uint8) for _ in "KV"]
    scales = [np.full((pages, PAGE, KV_HEADS, dim // 16), np.nan, E4M3) for _ in "KV"]
    rows: list[list[np.ndarray]] = [[], []]
    for begin, count in zip(indptr, KV_LENS, strict=False):
        at = np.arange(count)
        slots = indices[begin + at // PAGE], at % PAGE
        for half, number in ((0, K_NUMBER), (1, V_NUMBER)):
            x = rng.standard_normal((count, KV_HEADS, dim)) * 2.0 ** rng.integers(
                -3, 2, (count, 1, 1)
            )
            codes[half][slots], scales[half][slots] = encode(x.astype(np.float32), NVFP4)
            meant = flashbsr.dequantize_kv_cache(
                codes[half][slots], scales[half][slots], kv_dtype="nvfp4"
            )
            rows[half].append(meant.astype(np.float64) * number)
    last = np.array([(n - 1) % PAGE + 1 for n in KV_LENS], np.int32)
    q = rng.standard_normal((sum(Q_LENS), HEADS, dim)).astype(dtype)
    return Batch(q, codes, scales, rows, [indptr, indices, last])


def given(device: Device, halves: list[np.ndarray], layout: str, form: str) -> Any:
    """Hand K and V over as programs do."""
    if layout == "HND":
        halves = [x.swapaxes(-3, -2).copy() for x in halves]
    if form == "stacked":
        return device.put(np.stack(halves, 1))
    if form == "bytes":
        return [device.put(x.view(np.uint8)) for x in halves]
    return tuple(map(device.put, halves))


def near(device: Device, found: Any, exact: State, lse: Any = None) -> None:
    out = np.asarray(device.get(found), np.float64)
    np.testing.assert_allclose(out, exact.out.reshape(out.shape), atol=6e-3, rtol=6e-3)
    if lse is not None:
        expected = exact.lse.reshape(out.shape[:2]) / np.log(2)
        np.testing.assert_allclose(device.get(lse), expected, atol=4e-3, rtol=1e-3)


def planned(kind: str, device: Device, batch: Batch, layout: str, **options: Any) -> Any:
    """A wrapper with the batch's plan, and the rows of q that it takes."""
    table = [device.put(x) for x in batch.table]
    ends = device.put(np.cumsum([0, *Q_LENS]).astype(np.int32))
    dim = batch.q.shape[2]
    options = {"q_data_type": str(batch.q.dtype), "kv_data_type": torch.uint8, **options}
    if kind == "decode":
        wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, layout)
        wrapper.plan(*table, HEADS, KV_HEADS, dim, PAGE, **options)
    elif kind == "prefill":
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(None, layout)
        wrapper.plan(ends, *table, HEADS, KV_HEADS, dim, PAGE, causal=True, **options)
    else:
        wrapper = flashinfer.BatchAttention(layout, "cuda" if device.is_cuda else "cpu")
        lens = device.put(np.array(KV_LENS, np.int32))
        wrapper.plan(ends, *table[:2], lens, HEADS, KV_HEADS, dim, dim, PAGE, True, **options)
    return wrapper


NUMBERS = {"k_scale": K_NUMBER, "v_scale": V_NUMBER}
