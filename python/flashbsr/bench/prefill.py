# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Prefill on the CPU: of whole prompts, of chunks behind a context; and decode over latents.

The last two are judged by how much of a whole prefill's rate of products they reach, which is
timed beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import flashbsr

from .data import Arrays, Pages, check_rows, page_table, task_info
from .peers import as_torch, torch_latent, torch_prefill
from .results import Result
from .session import Session
from .timing import Side, interleave
from .workloads import LATENT, Workload, attention_flops, kv_bytes

__all__ = ["run_chunk", "run_latent", "run_prefill"]

#: Tokens of the prompt that others are compared with.
WHOLE = 2048
#: Latents that calls rotate over, more than the CPU's caches hold.
ROTATE_BYTES = 256 << 20


def _scale(w: Workload) -> Any:
    return np.float64(w.head_dim**-0.5)


@dataclass(slots=True)
class _Prefill:
    """Planned requests over ragged K and V, each of whose queries are its last tokens."""

    workload: Workload
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    attention: flashbsr.Attention

    @classmethod
    def make(cls, w: Workload) -> _Prefill:
        arrays = Arrays(w.dtype)
        q = arrays.normal((sum(w.q_lens), w.num_qo_heads, w.head_dim))
        k = arrays.normal((sum(w.kv_lens), w.num_kv_heads, w.head_dim))
        attention = flashbsr.Attention(flashbsr.AttentionSpec(causal=w.causal), task_info(w))
        starts = (np.cumsum([0, *lens]).astype(np.int32) for lens in (w.q_lens, w.kv_lens))
        attention.plan(flashbsr.Ragged(*starts))
        made = cls(w, q, k, k[::-1].copy(), np.empty_like(q), attention)
        made.call(0)
        check_rows("flashbsr", np.stack([made.out[p] for p in made.picks()]), made.rows(), w.dtype)
        return made

    def call(self, _: int) -> Any:
        return self.attention.run(self.q, (self.k, self.v), out=self.out)

    def picks(self) -> list[tuple[int, int]]:
        """Choose rows of the last request."""
        first, count = sum(self.workload.q_lens[:-1]), self.workload.q_lens[-1]
        tokens = (first, first + count // 2, first + count - 1)
        return [(t, h) for t in tokens for h in (0, self.workload.num_qo_heads - 1)]

    def rows(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        w = self.workload
        group, end = w.num_qo_heads // w.num_kv_heads, len(self.q)
        first = sum(w.kv_lens[:-1])
        found = []
        for t, h in self.picks():
            seen = slice(first, len(self.k) - (end - 1 - t) if w.causal else None)
            k, v = self.k[seen, h // group], self.v[seen, h // group]
            found.append((self.q[t, h], k, v, _scale(w)))
        return found


def _rate(result: Result, side: str, w: Workload) -> float:
    return attention_flops(w) / result.times[side].median * 1e-9


def run_prefill(w: Workload, session: Session) -> Result:
    """Time a prompt, in turns with PyTorch."""
    mine = _Prefill.make(w)
    sides = {"flashbsr": Side(mine.call)}
    result = Result(w)
    if session.torch(w):
        # (1, heads, tokens, dim), contiguous: what torch's kernel reads best.
        q, k, v = (as_torch(x.transpose(1, 0, 2).copy())[None] for x in (mine.q, mine.k, mine.v))
        peer = torch_prefill(q, k, v, session.threads)
        got = peer.output()
        check_rows("torch", np.stack([got[p] for p in mine.picks()]), mine.rows(), w.dtype)
        sides["torch"] = Side(peer.call)
        result.note = f"torch: {peer.form}"
    result.times = interleave(sides, session.budget(4.0), tick=session.tick)
    metrics = result.metrics
    metrics["gflops"] = _rate(result, "flashbsr", w)
    if "torch" in result.times:
        metrics["torch_gflops"] = _rate(result, "torch", w)
        metrics["speedup"] = metrics["gflops"] / metrics["torch_gflops"]
    return result


def _whole(w: Workload) -> _Prefill:
    """Make a whole prompt of the same type."""
    whole = replace(w, kind="prefill", q_lens=(WHOLE,), kv_lens=(WHOLE,), page_size=None)
    return _Prefill.make(replace(whole, causal=True, num_qo_heads=32, num_kv_heads=8, head_dim=128))


def _beside_whole(w: Workload, session: Session, sides: dict[str, Side]) -> Result:
    whole = _whole(w)
    sides["whole"] = Side(whole.call)
    result = Result(w, interleave(sides, session.budget(3.0), tick=session.tick))
    result.metrics["gflops"] = _rate(result, "flashbsr", w)
    whole_rate = _rate(result, "whole", whole.workload)
    result.metrics["prefill_fraction"] = result.metrics["gflops"] / whole_rate
    return result


def run_chunk(w: Workload, session: Session) -> Result:
    """Time chunks of prompts behind a context, in turns with a whole prompt."""
    return _beside_whole(w, session, {"flashbsr": Side(_Prefill.make(w).call)})


def _latents(w: Workload, pages: Pages, cache: np.ndarray, request: int) -> np.ndarray:
    page, slot = pages.tokens(request, w.kv_lens[request])
    rows: np.ndarray = cache[page, slot]
    return rows


def run_latent(w: Workload, session: Session) -> Result:
    """Time decode over latents, in turns with a whole prompt.

    PyTorch attends to one request with all heads expanded: all of them would take minutes.
    """
    assert w.page_size is not None
    arrays, pages = Arrays(w.dtype), page_table(w.kv_lens, w.page_size)
    q = arrays.normal((len(w.kv_lens), w.num_qo_heads, w.head_dim))
    count = -(-ROTATE_BYTES // kv_bytes(w))
    caches = [arrays.normal((pages.count, w.page_size, w.head_dim)) for _ in range(count)]
    out = np.empty_like(q[..., :LATENT]).copy()
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(sm_scale=float(_scale(w))),
        flashbsr.TaskInfo(
            w.num_qo_heads, 1, w.head_dim, head_dim_vo=LATENT, latent=True, q_dtype=w.dtype,
            kv_dtype=w.dtype, backend="cpu",
        ),
    )  # fmt: skip
    attention.plan(pages.layout())

    def call(i: int) -> Any:
        return attention.run(q, caches[i % count], out=out)

    call(0)
    last = len(w.kv_lens) - 1
    latents = _latents(w, pages, caches[0], last)
    heads = (0, w.num_qo_heads - 1)
    rows = [(q[last, h], latents, latents[:, :LATENT], _scale(w)) for h in heads]
    check_rows("flashbsr", np.stack([out[last, h] for h in heads]), rows, w.dtype)
    sides, note = {"flashbsr": Side(call)}, ""
    if session.torch(w):
        peer = torch_latent(
            as_torch(q[last]), as_torch(latents), LATENT, float(_scale(w)), session.threads
        )
        check_rows("torch", peer.output()[list(heads)], rows, w.dtype)
        sides["torch"] = Side(peer.call)
        note = "torch: one request"
    result = _beside_whole(w, session, sides)
    if "torch" in result.times:
        each = result.times["flashbsr"].median / len(w.kv_lens)
        result.metrics["speedup"] = result.times["torch"].median / each
    result.note = note
    return result
