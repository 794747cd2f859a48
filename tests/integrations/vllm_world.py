# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler and model runner hand to a backend, made by hand: no vLLM needed.

`Serving` keeps requests, blocks and a cache as vLLM does; a step gives each request some new
tokens, writes them through the layer, runs it, and compares with float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import kv_codes
import numpy as np
import torch
from compare import assert_attention
from flashbsr.integrations.vllm.kinds import KV_CACHE_DTYPES, bytes_of_slot, scales_of_tokens
from flashbsr.integrations.vllm.layer import Layer
from flashbsr.integrations.vllm.steps import Batch, Place, Step, Steps
from reference import DTYPES, Variant, attend, rounded

TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NO_SCALES = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0)


def packed_cache(
    blocks: int, heads: int, block: int, width: int, dtype: torch.dtype, order: str = "HND"
) -> torch.Tensor:
    """NaN in every slot, ``(blocks, heads, block, width)`` whatever the order in memory."""
    if order == "HND":
        cache = torch.empty(blocks, heads, block, width, dtype=dtype)
    elif order == "NHD":
        cache = torch.empty(blocks, block, heads, width, dtype=dtype).transpose(1, 2)
    else:  # three layers inside of each block, this is the second, and blocks are padded
        room = torch.empty(blocks, heads, 3, block + 1, width, dtype=dtype)
        cache = room[:, :, 1, :block]
    if dtype == torch.uint8:
        return cache.fill_(0xFF)  # NaN in e4m3, in e5m2 and, four of them, in float32
    return cache.fill_(float("nan"))


@dataclass
class Request:
    """Keys and values as the model gave them, and the blocks that they are in."""

    k: np.ndarray[Any, Any]
    v: np.ndarray[Any, Any]
    blocks: list[int]


@dataclass
class Serving:
    """One layer of a model that serves. Options are those that vLLM gives to a layer."""

    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    dtype: str = "float32"
    block: int = 16
    order: str = "HND"
    options: dict[str, Any] = field(default_factory=dict)
    causal: bool = True
    scales: Any = field(default_factory=lambda: NO_SCALES)
    place: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    padding: int = 0  # bytes behind scales of tokens

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.scale = 0.9 / np.sqrt(self.dim)
        self.layer = self.make_layer()
        self.steps = Steps([self.layer.kind], Place(self.dtype, self.block, **self.place))
        name = self.layer.kv_cache_dtype
        self.stored = KV_CACHE_DTYPES[name]
        self.per_token = scales_of_tokens(name)
        width = bytes_of_slot(name, self.dim) + self.padding if self.per_token else 2 * self.dim
        stored = torch.uint8 if self.stored else TYPES[self.dtype]
        self.cache = packed_cache(96, self.heads[1], self.block, width, stored, self.order)
        self.free = list(self.rng.permutation(np.arange(1, 96)))  # block 0 is the null block
        self.requests: list[Request] = []

    def make_layer(self) -> Layer:
        heads, kv_heads = self.heads
        return Layer(heads, self.dim, float(self.scale), kv_heads, **self.options)

    def rows(self, n: int, heads: int) -> np.ndarray[Any, Any]:
        """Numbers that the type has."""
        return rounded(self.rng.standard_normal((n, heads, self.dim)), self.dtype)

    def tensor(self, x: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(TYPES[self.dtype])

    def add(self, prefix: Request | None = None, tokens: int = 0) -> Request:
        """A request; with a prefix that another has, in whole blocks."""
        shape = 0, self.heads[1], self.dim
        request = Request(np.zeros(shape), np.zeros(shape), [])
        if prefix is not None:
            request.k, request.v = prefix.k[:tokens], prefix.v[:tokens]
            request.blocks = prefix.blocks[: tokens // self.block]
        self.requests.append(request)
        return request

    def grow(self, q_lens: list[int], pad: int = 0) -> tuple[Any, ...]:
        """Give requests new tokens: k, v and slots of the step, -1 and NaN behind them."""
        new_k, new_v, slots = [], [], []
        for request, n in zip(self.requests, q_lens, strict=True):
            k, v = self.rows(n, self.heads[1]), self.rows(n, self.heads[1])
            begin = len(request.k)
            while len(request.blocks) * self.block < begin + n:
                request.blocks.append(int(self.free.pop()))
            at = np.arange(begin, begin + n)
            slots.append(np.array(request.blocks)[at // self.block] * self.block + at % self.block)
            request.k, request.v = np.concatenate([request.k, k]), np.concatenate([request.v, v])
            new_k.append(k), new_v.append(v)
        nothing = np.full((pad, self.heads[1], self.dim), np.nan)
        k, v = (self.tensor(np.concatenate([*x, nothing])) for x in (new_k, new_v))
        where = np.concatenate([*slots, np.full(pad, -1)]).astype(np.int64)
        return k, v, torch.from_numpy(where)

    def batch(self, q_lens: list[int], width: int = 70) -> Batch:
        """What the metadata says of the requests; garbage behind their blocks."""
        tables = torch.zeros(len(self.requests), width, dtype=torch.int32)
        for row, request in zip(tables, self.requests, strict=True):
            row[: len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        starts = np.cumsum([0, *q_lens]).astype(np.int32)
        lens = np.array([len(r.k) for r in self.requests], np.int32)
        return Batch(
            starts, lens, tables, torch.from_numpy(lens), torch.from_numpy(starts), self.causal
        )

    def step(self, q_lens: list[int], pad: int = 0) -> torch.Tensor:
        """Serve a step: its output, compared with float64."""
        k, v, slots = self.grow(q_lens, pad)
        step = self.steps.plan(self.batch(q_lens), slots, sum(q_lens), None)
        q = self.rows(sum(q_lens) + pad, self.heads[0])
        self.layer.do_kv_cache_update(self.scales, k, v, self.cache, slots)
        return self.attend(step, q, q_lens)

    def attend(self, step: Step, q: np.ndarray[Any, Any], q_lens: list[int]) -> torch.Tensor:
        """Run the layer over the cache."""
        out = torch.full(q.shape, float("nan"), dtype=TYPES[self.dtype])
        self.layer.forward(self.scales, self.tensor(q), None, None, self.cache, step, out)
        self.check(out, q, q_lens)
        return out

    def check(self, out: torch.Tensor, q: np.ndarray[Any, Any], q_lens: list[int]) -> None:
        """Rows of requests against the formula, rows of padding against zero."""
        window = self.options.get("sliding_window")
        variant = Variant(
            causal=self.causal,
            window_left=-1 if window is None else window - 1,
            sm_scale=float(self.scale),
            logits_soft_cap=self.options.get("logits_soft_cap"),
            pos_encoding_mode="ALIBI" if self.options.get("alibi_slopes") else "NONE",
        )
        sinks, slopes = (self.options.get(name) for name in ("sinks", "alibi_slopes"))
        given = {
            "sinks": None if sinks is None else sinks.float().numpy(),
            "slopes": None if slopes is None else np.array(slopes),
        }
        got, begin = out.float().numpy(), 0
        for i, (request, n) in enumerate(zip(self.requests, q_lens, strict=True)):
            k, v = request.k, request.v
            if self.per_token:
                code = kv_codes.Kind(str(self.stored))
                k, v = (kv_codes.decode(*kv_codes.encode(x, code), code) for x in (k, v))
            elif self.stored:
                k, v = (
                    rounded(x / s, self.stored)
                    for x, s in ((k, self.scales._k_scale_float), (v, self.scales._v_scale_float))
                )
                given |= {"k_scale": self.scales._k_scale_float}
                given |= {"v_scale": self.scales._v_scale_float}
            mine = q[begin : begin + n]
            states = [
                attend(mine, k, v, variant, **given, work=work, out_dtype=work)
                for work in (None, self.dtype)
            ]
            rows = out[begin : begin + n]
            array = rows.float().numpy().astype(DTYPES[self.dtype])
            assert_attention(array, None, *states, self.dtype, f"request {i}")
            begin += n
        assert not got[begin:].any(), "rows of padding are zero"
