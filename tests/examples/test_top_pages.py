# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Pages that KV heads choose on the device: the choice, and attention over it, against float64."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from flashbsr import Attention, AttentionSpec, Bounds, FlashbsrError, TaskInfo
from harness import Device, framework

torch = framework("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from variants.top_pages import top_pages  # noqa: E402

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
LENS = [131, 0, 16, 64, 97, 1]
SLOTS, PAGES = 9, 60


def step(seed: int) -> dict[str, np.ndarray]:
    """One batch: pages in any order, NaN and garbage wherever nothing is held."""
    rng = np.random.default_rng(seed)
    cache = np.full((PAGES, 2, PAGE, KV_HEADS, DIM), np.nan, np.float32)
    tables = np.full((len(LENS), SLOTS), -(2**30), np.int64)
    pool = iter(rng.permutation(PAGES))
    for row, length in zip(tables, LENS, strict=True):
        for slot in range(-(-length // PAGE)):
            row[slot] = next(pool)
            tokens = min(PAGE, length - slot * PAGE)
            cache[row[slot], :, :tokens] = rng.standard_normal((2, tokens, KV_HEADS, DIM))
    q = rng.standard_normal((len(LENS), HEADS, DIM)).astype(np.float32)
    return {"q": q, "cache": cache, "tables": tables, "lens": np.array(LENS)}


def expected(x: dict[str, np.ndarray], b: int, h: int, keep: int) -> np.ndarray:
    """Attention of query head h in float64, over pages chosen one by one."""
    kv_head, length = h // (HEADS // KV_HEADS), int(x["lens"][b])
    if not length:
        return np.zeros(DIM)
    pages = x["tables"][b, : -(-length // PAGE)]
    k, v = (x["cache"][pages, i, :, kv_head].astype(np.float64) for i in (0, 1))
    group = x["q"][b].reshape(KV_HEADS, -1, DIM)[kv_head].astype(np.float64)
    importance = [
        max(np.maximum(one * page.min(0), one * page.max(0)).sum() for one in group)
        for page in k[:-1]
    ]
    best = sorted(np.argsort(importance)[::-1][: keep - 1]) + [len(pages) - 1]
    rows = [(slot, t) for slot in best for t in range(min(PAGE, length - slot * PAGE))]
    slot, token = np.array(rows).T
    logits = k[slot, token] @ x["q"][b, h] / np.sqrt(DIM)
    weights = np.exp(logits - logits.max())
    return weights @ v[slot, token] / weights.sum()


@pytest.mark.parametrize("keep", [1, 3, SLOTS])
def test_chosen_on_the_device(device: Device, keep: int) -> None:
    where = "cuda" if device.is_cuda else "cpu"
    dtype = torch.float16 if device.is_cuda else torch.float32
    attention = Attention(AttentionSpec(), TaskInfo(HEADS, KV_HEADS, DIM, backend=device.backend))
    attention.plan(Bounds(None, [[keep * PAGE] * KV_HEADS] * len(LENS), page_size=PAGE))
    for seed in range(3):  # one plan
        x = step(seed)
        for name in ("q", "cache"):  # what the device computes with
            x[name] = torch.from_numpy(x[name]).to(dtype).float().numpy()
        q, cache = (torch.from_numpy(x[name]).to(where, dtype) for name in ("q", "cache"))
        tables, lens = (torch.from_numpy(x[name]).to(where) for name in ("tables", "lens"))
        bounds = cache[:, 0].amin(dim=1), cache[:, 0].amax(dim=1)
        chosen, kept = top_pages(q, bounds, tables, lens, page_size=PAGE, keep=keep)
        found = attention.run(q, cache, kv_lens=kept, block_tables=chosen).double().cpu().numpy()
        for b in range(len(LENS)):
            for h in range(HEADS):
                error = np.abs(found[b, h] - expected(x, b, h, keep)).max()
                assert error < (2e-3 if device.is_cuda else 2e-5), (seed, b, h)


@pytest.mark.parametrize("keep", [0, SLOTS + 1])
def test_how_many(keep: int) -> None:
    x = {name: torch.from_numpy(array) for name, array in step(0).items()}
    with pytest.raises(FlashbsrError, match="keep"):
        top_pages(x["q"], (x["cache"][:, 0, 0],) * 2, x["tables"], x["lens"],
                  page_size=PAGE, keep=keep)  # fmt: skip
