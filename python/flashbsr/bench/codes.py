# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Decode over caches of codes with scales of every token and head, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import flashbsr

from .data import Pages, aligned_empty, check_rows, page_table, task_info
from .workloads import SCALES, Workload

__all__ = ["CodedDecode", "code_scale"]

# Codes of any bits are numbers; scales that make them about as large as the other workloads' are.
SCALE = {"int8": np.float32(0.01), "int4": np.float32(0.25), "nvfp4": np.uint8(0x28)}  # e4m3: 0.25
ZERO = 8


def code_scale(kv_dtype: str) -> np.generic:
    """Give every row's scale; int4's has the zero point in its last four bits."""
    scale: np.generic = SCALE[kv_dtype]
    if kv_dtype == "int4":
        scale = ((scale.view(np.uint32) & ~np.uint32(15)) | np.uint32(ZERO)).view(np.float32)
    return scale


@dataclass(slots=True)
class CodedDecode:
    """A planned decode batch over a rotation of caches: K, V and their scales."""

    workload: Workload
    q: np.ndarray
    caches: list[tuple[np.ndarray, ...]]
    pages: Pages
    attention: flashbsr.Attention
    out: np.ndarray

    @classmethod
    def make(cls, w: Workload, q: np.ndarray, count: int) -> CodedDecode:
        """Plan it over `count` caches."""
        assert w.page_size is not None
        assert w.kv_dtype is not None
        pages = page_table(w.kv_lens, w.page_size)
        attention = flashbsr.Attention(flashbsr.AttentionSpec(), task_info(w))
        attention.plan(pages.layout())
        shape = (pages.count, w.page_size, w.num_kv_heads)
        caches = [_cache(w, shape, seed) for seed in range(count)]
        return cls(w, q, caches, pages, attention, np.empty_like(q))

    def call(self, index: int) -> Any:
        """Run over the next cache."""
        k, v, k_scale, v_scale = self.caches[index % len(self.caches)]
        return self.attention.run(self.q, (k, v), out=self.out, k_scale=k_scale, v_scale=v_scale)

    def check(self) -> None:
        """Compare two heads of a request with float64 attention over what the codes mean."""
        w = self.workload
        self.call(0)
        page, slot = self.pages.tokens(0, w.kv_lens[0])
        picks, rows = [], []
        for head in (0, w.num_qo_heads - 1):
            at = page, slot, slice(None)
            kv_head = head * w.num_kv_heads // w.num_qo_heads
            k, v = (
                flashbsr.dequantize_kv_cache(
                    self.caches[0][side][at], self.caches[0][2 + side][at], kv_dtype=w.kv_dtype
                )[:, kv_head]
                for side in (0, 1)
            )
            picks.append(self.out[0, head])
            rows.append((self.q[0, head], k, v, np.float64(w.head_dim**-0.5)))
        check_rows("flashbsr", np.stack(picks), rows, w.dtype)


def _cache(w: Workload, shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, ...]:
    """K and V of random bytes, and their scales."""
    assert w.kv_dtype is not None
    packed = w.kv_dtype != "int8"
    bits = np.random.default_rng(seed).integers(0, 256, 1_500_007, np.uint8)
    groups = SCALES[w.kv_dtype](w.head_dim)[0]
    scale = code_scale(w.kv_dtype)
    codes = []
    for _ in range(2):
        x = aligned_empty((*shape, w.head_dim // (2 if packed else 1)), np.dtype(np.uint8))
        flat = x.reshape(-1)
        for start in range(0, flat.size, bits.size):
            flat[start : start + bits.size] = bits[: flat.size - start]
        codes.append(x if packed else x.view(np.int8))
    scales = (shape if groups == 1 else (*shape, groups)) if packed else shape
    return (*codes, np.full(scales, scale), np.full(scales, scale))
