# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What vLLM hands to layers of latent attention, made by hand: no vLLM needed.

`Serving` keeps requests and a cache as vLLM does. A step gives each request some new tokens, writes
them through the layer, runs it, and compares with float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import flashbsr
import numpy as np
import torch
from compare import assert_attention
from flashbsr.integrations.vllm.chosen import ChosenLayer, ChosenStep, requests_of_rows
from flashbsr.integrations.vllm.latent import LatentLayer, LatentStep
from flashbsr.integrations.vllm.spread import SpreadRows
from flashbsr.integrations.vllm.steps import Batch, Place, Steps
from reference import DTYPES, Variant, attend, rounded

LATENT, DIM, SCALE, WIDTH = 512, 576, 192**-0.5, 12
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
E4M3 = "float8_e4m3fn"


def make(chosen: bool = False, kind: Any = None, **options: Any) -> Any:
    """Make a layer as vLLM does, of a class of its own: ten arguments by position, dims by name."""
    asked: dict[str, Any] = {
        "num_heads": 16,
        "head_size": DIM,
        "scale": SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
    }
    named: dict[str, Any] = {"kv_lora_rank": LATENT, "v_head_dim": 128, "q_lora_rank": None}
    for name, value in options.items():
        (asked if name in asked else named)[name] = value
    kind = kind or (ChosenLayer if chosen else LatentLayer)
    return kind(*asked.values(), **named)


@dataclass
class Serving:
    """One layer and three requests. With `topk` an indexer chooses as many tokens of each row.

    With `share` the cache has one rank's tokens, and `heads` are those of all ranks.
    """

    dtype: str = "float32"
    kv: str = "auto"
    topk: int = 0
    heads: int = 16
    device: str = "cpu"
    block: int = 16
    padding: int = 2  # rows behind those of a step
    gpu: bool = False
    stream: Any = None  # of the GPU
    share: Any = None
    drafts: bool = False

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(0)
        scale = 0.25 if self.kv == "fp8" else 1.0
        self.owner = SimpleNamespace(_k_scale_float=scale)
        size = 1 if self.share is None else self.share.size
        options: dict[str, Any] = {"kv_cache_dtype": self.kv, "num_heads": self.heads // size}
        if self.topk:
            self.buffer = torch.full((256, self.topk), 2**30, dtype=torch.int32, device=self.device)
            options["topk_indices_buffer"] = self.buffer
        self.layer = make(bool(self.topk), **options)
        self.layer.layer = self.owner
        self.layer.spread_over(size)
        if self.share is not None:
            self.spread = SpreadRows(self.share, 256, torch.device(self.device))
        place = {"device": 0} if self.gpu else {"num_threads": 1}
        self.steps = Steps(
            [self.layer.kind], Place(self.dtype, self.block, **place), drafts=self.drafts
        )
        # Blocks are padded by a row, and what no token has been written to is NaN.
        width = 656 if self.kv == "fp8_ds_mla" else DIM
        stored = TYPES[self.dtype] if self.kv == "auto" else torch.uint8
        room = torch.empty(40, self.block + 1, width, dtype=stored, device=self.device)
        self.cache = room.fill_(float("nan") if self.kv == "auto" else 255)[:, : self.block]
        self.tables = self.rng.permutation(39)[: 3 * WIDTH].reshape(3, WIDTH).astype(np.int32) + 1
        self.stored = [np.zeros((0, DIM)) for _ in range(3)]
        self.requests = self.on(np.zeros(256, np.int32))

    def on(self, x: Any, dtype: Any = None) -> Any:
        """Put an array where the layer computes."""
        return torch.tensor(np.asarray(x)).to(device=self.device, dtype=dtype)

    def rows(self, *shape: int) -> np.ndarray[Any, Any]:
        """Numbers that the type has."""
        return rounded(self.rng.standard_normal((*shape, DIM)), self.dtype)

    def grow(self, q_lens: list[int]) -> tuple[Any, Any]:
        """Give requests new tokens; them and their slots, NaN and -1 behind them."""
        slots, new = [], []
        for i, n in enumerate(q_lens):
            at = np.arange(len(self.stored[i]), len(self.stored[i]) + n)
            new.append(self.rows(n))
            self.stored[i] = np.concatenate([self.stored[i], new[-1]])
            here, at = self.places(at)
            found = self.tables[i][at // self.block].astype(np.int64) * self.block + at % self.block
            slots.append(np.where(here, found, -1))
        given = np.concatenate([*new, np.full((self.padding, DIM), np.nan)])
        x = self.on(given, TYPES[self.dtype])
        return x, self.on(np.concatenate([*slots, np.full(self.padding, -1)]))

    def places(self, at: np.ndarray[Any, Any]) -> tuple[Any, np.ndarray[Any, Any]]:
        """Which positions are of this rank, and which of its tokens they are."""
        if self.share is None:
            return True, at
        inner, turn = self.share.interleave, self.share.interleave * self.share.size
        here = at % turn // inner == self.share.rank
        return here, at // turn * inner + at % inner

    def write(self, x: Any, slots: Any) -> None:
        """Write new tokens through the layer."""
        last = "auto", None, False  # what versions up to 0.33 hand on
        self.layer.do_kv_cache_update(x[:, :LATENT], x[:, None, LATENT:], self.cache, slots, *last)

    def batch(self, q_lens: list[int]) -> Batch:
        """What the metadata says: on a GPU the host has bounds, some more than the lengths."""
        starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        lens = [len(x) if n else 0 for x, n in zip(self.stored, q_lens, strict=True)]
        if not self.gpu:
            return Batch(starts, np.array(lens, np.int32), torch.tensor(self.tables))
        bounds = np.array([n + 3 if n else 0 for n in lens], np.int32)
        return Batch(starts, bounds, self.on(self.tables), self.on(np.array(lens, np.int32)),
                     self.on(starts))  # fmt: skip

    def plan(self, q_lens: list[int], slots: Any) -> LatentStep:
        """Plan the step, as the builders do."""
        batch, rows = self.batch(q_lens), sum(q_lens)
        if self.share is not None:
            rows += self.padding
            batch = self.spread.batch(batch, rows, drafts=self.drafts)
            return self.spread.step(self.steps.plan(batch, slots, rows, self.stream), rows)
        if not self.topk:
            step = self.steps.plan(batch, slots, rows, self.stream)
            return LatentStep(step, 3)
        rows += self.padding
        step = self.steps.plan(batch.of_rows(self.topk, rows), slots, rows, self.stream)
        of_rows = requests_of_rows(self.on(batch.starts), rows, self.requests)
        tables = self.on(self.tables)
        return ChosenStep(step, 3, of_rows, tables, self.block, self.topk)

    def choose(self, q_lens: list[int]) -> list[np.ndarray[Any, Any]]:
        """Let the indexer choose, in any order and with gaps: at most topk of what a row sees."""
        found, wanted = [], np.full((sum(q_lens), self.topk), -1, np.int32)
        for i, n in enumerate(q_lens):
            for position in range(len(self.stored[i]) - n, len(self.stored[i])):
                count = min(position + 1, int(self.rng.integers(0, self.topk + 1)))
                chosen = self.rng.permutation(position + 1)[:count]
                places = self.rng.permutation(self.topk)[:count]
                wanted[len(found), places] = chosen
                found.append(chosen)
        self.buffer[: len(found)] = self.on(wanted)
        return found

    def step(self, q_lens: list[int]) -> Any:
        """Serve a step: its output, compared with float64."""
        x, slots = self.grow(q_lens)
        step = self.plan(q_lens, slots)
        self.write(x, slots)
        assert (step.num_decodes, step.num_prefills) == (3, 0)
        assert step.num_decode_tokens == step.num_actual_tokens
        chosen = self.choose(q_lens) if self.topk else None
        q = self.rows(sum(q_lens), self.heads)
        out = self.attend(step, q)
        self.check(out, q, q_lens, chosen)
        return out

    def attend(self, step: LatentStep, q: np.ndarray[Any, Any]) -> Any:
        """Run the layer, with NaN in rows that pad the step."""
        padding = np.full((self.padding, self.heads, DIM), np.nan)
        query = self.on(np.concatenate([q, padding]), TYPES[self.dtype])
        parts = query[..., :LATENT], query[..., LATENT:]
        if self.share is not None:
            return self.forward(query, step)
        out, again = (self.forward(x, step) for x in (parts, query))
        assert torch.equal(again, out), "the same bits of one array and of two, and again"
        return out

    def forward(self, q: Any, step: LatentStep) -> Any:
        """Call the layer as vLLM's does, which gives an fp8 cache its type.

        With `share` LSEs come with the output: what vLLM's layer merges.
        """
        out, lse = self.layer.forward_mqa(q, self.typed(), step, self.owner)
        if self.share is None:
            assert lse is None
            return out
        assert lse.dtype == torch.float32
        assert lse.shape == out.shape[:2] == (q.shape[0], self.heads)
        return out, lse

    def typed(self) -> Any:
        """The cache as the layer has it."""
        return self.cache.view(torch.float8_e4m3fn) if self.kv == "fp8" else self.cache

    def meant(self, request: int) -> np.ndarray[Any, Any]:
        """What the cache holds of a request's tokens."""
        given = self.stored[request]
        if self.kv == "fp8":
            scale = self.owner._k_scale_float
            return rounded(given / scale, E4M3) * scale
        if self.kv != "fp8_ds_mla" or not len(given):
            return given
        at = np.arange(len(given))
        page = self.tables[request][at // self.block]
        rows = self.cache.cpu().numpy()[page, at % self.block]
        means = flashbsr.unpack_latents(rows[:, None])[:, 0].astype(np.float64)
        np.testing.assert_allclose(means, given, atol=2.0**-4 * np.abs(given).max())
        return means

    def check(self, out: Any, q: np.ndarray[Any, Any], q_lens: list[int],
              chosen: list[np.ndarray[Any, Any]] | None) -> None:  # fmt: skip
        """Rows of requests against the formula, rows of padding against zero."""
        got = out.float().cpu().numpy()
        assert not got[len(q) :].any(), "rows of padding are zero"
        row, variant = 0, Variant(causal=chosen is None, sm_scale=SCALE)
        for i, n in enumerate(q_lens):
            if not n:
                continue
            means = self.meant(i)
            parts = [slice(row, row + n)] if chosen is None else [
                slice(at, at + 1) for at in range(row, row + n)
            ]  # fmt: skip
            for part in parts:
                k = means if chosen is None else means[chosen[part.start]]
                states = [
                    attend(q[part], x[:, None], x[:, None, :LATENT], variant, work=work,
                           out_dtype=work)
                    for work, x in ((None, k), (self.dtype, rounded(k, self.dtype)))
                ]  # fmt: skip
                array = got[part].astype(DTYPES[self.dtype])
                assert_attention(array, None, *states, self.dtype, f"request {i}, {part}")
            row += n


class Captured(Serving):
    """Decode steps of up to three requests in fixed memory, whose work a CUDA graph replays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.padding = 0
        rows = 3
        self.x = self.on(np.zeros((rows, DIM)), TYPES[self.dtype])
        self.slots = self.on(np.zeros(rows, np.int64))
        self.q = self.on(np.zeros((rows, self.heads, DIM)), TYPES[self.dtype])
        self.lens, self.starts = self.on(np.zeros(3, np.int32)), self.on(np.zeros(4, np.int32))
        self.blocks = self.on(np.zeros((3, WIDTH), np.int32))
        pages = rows * (self.topk or WIDTH)
        causal = not self.topk and self.share is None
        self.steps.captures(1, causal, rows, requests=rows, tokens=rows, pages=pages)

    def prefill(self, q_lens: list[int]) -> None:
        """Let requests have a past; nothing is attended to."""
        self.write(*self.grow(q_lens))

    def prepare(self, requests: int) -> tuple[LatentStep, np.ndarray[Any, Any], Any]:
        """Fill the arrays of a step of the first `requests`, one token each, and plan it."""
        q_lens = [1] * requests + [0] * (3 - requests)
        x, slots = self.grow(q_lens)
        self.x.fill_(float("nan"))
        self.x[:requests], self.slots[:] = x, -1
        self.slots[:requests] = slots
        q = self.rows(requests, self.heads)
        self.q.fill_(0)
        self.q[:requests] = self.on(q, TYPES[self.dtype])
        batch = self.batch(q_lens)
        self.lens[:], self.starts[:] = batch.lens, batch.query_starts
        self.blocks[:] = batch.tables
        chosen = self.choose(q_lens) if self.topk else None
        fixed = Batch(batch.starts, batch.bounds, self.blocks, self.lens, self.starts)
        if self.share is not None:
            spread = self.spread.batch(fixed, 3, drafts=self.drafts)
            step = self.steps.plan(spread, self.slots, 3, self.stream)
            return self.spread.step(step, 3), q, None
        if not self.topk:
            step = self.steps.plan(fixed, self.slots, 3, self.stream)
            return LatentStep(step, 3), q, chosen
        step = self.steps.plan(fixed.of_rows(self.topk, 3), self.slots, 3, self.stream)
        of_rows = requests_of_rows(self.starts, 3, self.requests)
        made = ChosenStep(step, 3, of_rows, self.blocks, self.block, self.topk)
        return made, q, chosen

    def work(self, step: LatentStep) -> Any:
        """What a layer does: its update, and attention."""
        self.write(self.x, self.slots)
        return self.forward(self.q, step)

    def replayed(self, out: Any, requests: int, q: np.ndarray[Any, Any], chosen: Any) -> None:
        """Rows against float64; those that pad the graph are zero."""
        self.check(out, q, [1] * requests + [0] * (3 - requests), chosen)


REPLAYS = (3, 3, 2, 1, 3)


def ranks(make: Any, size: int, interleave: int, **options: Any) -> list[Any]:
    """Give each rank's `Serving` or `Captured`; all draw the same numbers."""
    shares = [flashbsr.ContextParallel(size, rank, interleave) for rank in range(size)]
    return [make(share=share, heads=48, **options) for share in shares]


def merged(found: list[tuple[Any, Any]], steps: list[Any]) -> Any:
    """Merge what ranks have found, as vLLM's layer does: rows that it masks weigh nothing."""
    for (out, lse), step in zip(found, steps, strict=True):
        none = step.seq_lens == 0
        assert step.decode is step and len(step.query_start_loc) == len(none) + 1
        assert torch.equal(torch.isneginf(lse).all(1), none)
        assert not out[none].any()
    parts = (np.stack([x[i].float().cpu().numpy() for x in found], 1) for i in range(2))
    return torch.tensor(flashbsr.merge_states(*parts)[0]).to(found[0][0].dtype)
