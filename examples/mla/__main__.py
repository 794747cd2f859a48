# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m examples.mla`: prefill, decode and sparse decode, each against float64."""

from __future__ import annotations

import sys

import flashbsr
import numpy as np

from .layer import HIDDEN, SM_SCALE, Cache, Layer, Projected, attention

PROMPTS = {0: 300, 1: 70, 2: 129}
STEPS = 5
TOLERANCE = 1e-5  # float32 products of up to 576 numbers; measured 1.4e-6


def reference(layer: Layer, x: np.ndarray, keep: np.ndarray | None = None) -> np.ndarray:
    """The last token's output in float64, unabsorbed; over the tokens of `keep` alone."""
    p = layer.project(x, np.arange(len(x)))
    k, v = (a.astype(np.float64) for a in layer.expand(p))
    q = np.concatenate([p.q_nope[-1], p.q_rope[-1]], -1).astype(np.float64)
    keep = np.arange(len(x)) if keep is None else keep
    logits = np.einsum("hd,khd->hk", q, k[keep]) * SM_SCALE
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hk,khv->hv", weights / weights.sum(-1, keepdims=True), v[keep])


def main() -> int:
    """Run; 1 if anything is off."""
    rng = np.random.default_rng(7)
    layer, cache = Layer(), Cache()
    texts = {r: rng.standard_normal((n, HIDDEN)).astype(np.float32) for r, n in PROMPTS.items()}
    errors: dict[str, float] = {}

    def compare(name: str, got: np.ndarray, expected: np.ndarray) -> None:
        errors[name] = max(errors.get(name, 0.0), float(np.abs(got - expected).max()))

    # Prefill: nothing is absorbed. Keys of 192 dims and values of 128 take a third of the products.
    for request, x in texts.items():
        p = layer.project(x, np.arange(len(x)))
        k, v = layer.expand(p)
        q = np.concatenate([p.q_nope, p.q_rope], -1)
        ends = np.array([0, len(x)])
        out = flashbsr.attention(q, k, v, cu_seqlens_q=ends, causal=True, sm_scale=SM_SCALE)
        compare("prefill", out[-1], reference(layer, x))
        cache.append(request, p)

    # Decode: absorbed, all requests in one launch, one plan per step.
    decode, requests = attention(), list(texts)
    last: list[Projected] = []
    for _ in range(STEPS):
        last = []
        for request in requests:
            new = rng.standard_normal((1, HIDDEN)).astype(np.float32)
            p = layer.project(new, np.array([len(texts[request])]))
            texts[request] = np.concatenate([texts[request], new])
            cache.append(request, p)
            last.append(p)
        decode.plan(cache.layout(requests, [1] * len(requests)))
        q = np.concatenate([layer.absorb(p) for p in last])
        out = layer.unabsorb(decode.run(q, cache.rows))
        for request, row in zip(requests, out, strict=True):
            compare("decode", row, reference(layer, texts[request]))

    # Sparse: each query attends to the tokens that the indexer chose, as pages of one token.
    for topk in (32, 512):  # 512: all that there are
        sparse = attention()
        sparse.plan(flashbsr.Bounds(None, np.full(len(requests), topk), page_size=1))
        best = [cache.best(r, p.index[0], topk) for r, p in zip(requests, last, strict=True)]
        tables, counts = np.stack([t for t, _ in best]), np.array([n for _, n in best])
        rows = cache.rows.reshape(-1, cache.rows.shape[-1])
        out = layer.unabsorb(sparse.run(q, rows, kv_lens=counts, block_tables=tables))
        for request, row, p in zip(requests, out, last, strict=True):
            x = texts[request]
            index = x @ layer.index
            keep = np.argsort(-(index @ p.index[0]))[:topk]
            compare(f"sparse, top {topk}", row, reference(layer, x, keep))

    for name, error in errors.items():
        verdict = "ok" if error < TOLERANCE else "WRONG"
        print(f"{name:16} largest error against float64 {error:.1e}  {verdict}")
    cached = cache.rows.shape[-1] * 4
    expanded = 4 * sum(a[0].size for a in layer.expand(last[0]))
    print(f"a token takes {cached} bytes of cache; its expanded keys and values {expanded}")
    return int(max(errors.values()) >= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
