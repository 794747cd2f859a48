# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The named workloads of ``flashbsr bench``: shapes and goals, no code that runs them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from flashbsr.errors import FlashbsrError

__all__ = [
    "KINDS",
    "LATENT",
    "WORKLOADS",
    "Goal",
    "Workload",
    "attention_flops",
    "kv_bytes",
    "select",
]

#: kind -> the heading of its block in the table.
KINDS = {
    "prefill": "Prefill, causal, ragged",
    "chunk": "Chunks of prompts behind a context, causal, ragged, against a whole prompt",
    "latent": "Decode, paged, latents of 512 + 64 dims, against a whole prompt",
    "decode": "Decode, paged, equal lengths",
    "skew": "Decode, paged, Zipf lengths against equal ones of the same total",
    "balance": "Decode, paged, one very long request",
    "codes": "Decode, paged, caches of 8 and 4 bits against bf16",
    "plan": "plan()",
    "overhead": "run() above the kernel",
}

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}

#: Codes -> scales of a row of so many dims, and bytes of each.
SCALES: dict[str, Callable[[int], tuple[int, int]]] = {
    "int8": lambda _: (1, 4),
    "int4": lambda dim: (max(1, dim // 64), 4),
    "nvfp4": lambda dim: (dim // 16, 1),
}

#: Dims of a latent; what is behind them is the rotated key.
LATENT = 512

# 16 lengths, Zipf with exponent 1, mean about 1024.
ZIPF_1024 = (808, 4846, 373, 485, 1212, 303, 606, 2423, 441, 323, 1615, 538, 346, 692, 404, 969)


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound that a metric of the workload must keep.

    Attributes
    ----------
    metric : str
        Key into the result's ``metrics``.
    bound : float
    at_least : bool
        True: the metric must be >= bound. False: <= bound.
    """

    metric: str
    bound: float
    at_least: bool = True

    def met(self, value: float) -> bool:
        """Whether `value` keeps the bound."""
        return value >= self.bound if self.at_least else value <= self.bound


@dataclass(frozen=True, slots=True)
class Workload:
    """One named measurement.

    Attributes
    ----------
    name : str
        Unique; what ``--only`` takes.
    kind : str
        A key of `KINDS`: which runner measures it.
    dtype : str
        Of q, K, V and the output.
    kv_dtype : str, optional
        Of K and V if it is another.
    q_lens, kv_lens : tuple[int, ...]
        Tokens per request.
    page_size : int or None
        None: ragged K/V.
    kv_layout : str
        "NHD" or "HND", of the paged cache.
    causal : bool
    window_left : int
        Keys kept behind the query, inclusive; -1: all.
    variant : str
        "plain", or what else is asked for: "soft-cap", "alibi", "sinks", "mask" (the causal mask,
        said in bits), "sigmoid", "tree" (of drafts: the queries see the context and their
        ancestors).
    fp8_accumulation : str
        "default" or "fast", for float8 q.
    num_qo_heads, num_kv_heads, head_dim : int
    peer : bool
        Also run PyTorch's ``scaled_dot_product_attention``.
    arrays : str
        The framework whose arrays are passed: "numpy" or "torch".
    states : int
        States that are merged per row, where merging is what is measured.
    block : (int, int), optional
        Queries and keys of a block of a block-sparse pattern.
    kept : float
        Part of the blocks that are in it.
    prefixes : tuple[(int, int), ...]
        Levels of KV that requests share: into how many groups, tokens of each.
    chosen_from : (int, int), optional
        A request's KV tokens are chosen at random: of how many caches, tokens of each.
    quick : bool
        Part of ``--quick``.
    goals : tuple[Goal, ...]
    """

    name: str
    kind: str
    dtype: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_size: int | None = None
    kv_layout: str = "NHD"
    causal: bool = False
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    peer: bool = False
    arrays: str = "numpy"
    kv_dtype: str | None = None
    states: int = 0
    window_left: int = -1
    variant: str = "plain"
    fp8_accumulation: str = "default"
    block: tuple[int, int] | None = None
    kept: float = 0.25
    prefixes: tuple[tuple[int, int], ...] = ()
    chosen_from: tuple[int, int] | None = None
    quick: bool = False
    goals: tuple[Goal, ...] = field(default=())

    def describe(self) -> str:
        """One line for ``bench --list``."""
        kv = sorted(self.kv_lens)
        lengths = f"{kv[0]}" if kv[0] == kv[-1] else f"{kv[0]} to {kv[-1]}"
        layout = "ragged" if self.page_size is None else f"page size {self.page_size}"
        q = sorted(self.q_lens)
        several = any(1 < q < kv for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
        queries = f"{q[0]} queries on " if q[0] == q[-1] else f"{q[0]} to {q[-1]} queries on "
        types = f"{self.dtype} q, {self.kv_dtype} K/V" if self.kv_dtype else self.dtype
        extras = [
            *(["causal"] if self.causal else []),
            *(
                [f"{self.kept:.0%} of blocks of {self.block[0]} x {self.block[1]}"]
                if self.block
                else []
            ),
            *([f"window_left {self.window_left}"] if self.window_left >= 0 else []),
            *(
                [f"chosen from {self.chosen_from[0]} x {self.chosen_from[1]}"]
                if self.chosen_from
                else []
            ),
            *([self.variant] if self.variant != "plain" else []),
            *(["fast accumulation"] if self.fp8_accumulation == "fast" else []),
            *(["against torch"] if self.peer else []),
        ]
        return (
            f"batch {len(kv)}, {queries if several else ''}{lengths} KV tokens, "
            f"{self.num_qo_heads}/{self.num_kv_heads} heads, head dim {self.head_dim}, "
            f"{', '.join([types, layout, *extras])}"
        )


def attention_flops(workload: Workload) -> int:
    """Operations of a workload: ``2 * pairs * (head_dim_qk + head_dim_vo) * num_qo_heads``.

    `pairs` counts the (query, key) pairs that the bottom-right aligned causal mask and the window
    keep; 2 is a multiply and an add.
    """
    dims = 2 * workload.head_dim
    if workload.kind == "latent":
        dims = workload.head_dim + LATENT
    pairs = 0
    for q, kv in zip(workload.q_lens, workload.kv_lens, strict=True):
        position = np.arange(kv - q, kv)
        end = np.maximum(position + 1, 0) if workload.causal else kv
        begin = np.maximum(position - workload.window_left, 0) if workload.window_left >= 0 else 0
        pairs += int(np.broadcast_to(end - begin, position.shape).clip(0).sum())
    return 2 * pairs * dims * workload.num_qo_heads


def kv_bytes(workload: Workload, kv_lens: tuple[int, ...] | None = None) -> int:
    """Bytes of K and V and of scales of every token, each element once."""
    tokens = sum(workload.kv_lens if kv_lens is None else kv_lens)
    if workload.kind == "latent":  # whose values are a part of the keys
        return tokens * workload.head_dim * ITEMSIZE[workload.dtype]
    kv_dtype = workload.kv_dtype or workload.dtype
    if kv_dtype in SCALES:
        count, size = SCALES[kv_dtype](workload.head_dim)
        row = workload.head_dim // (1 if kv_dtype == "int8" else 2) + count * size
    elif "codes" in workload.kind:  # float8, which elsewhere has one scale for all tokens
        row = workload.head_dim + 4
    else:
        row = workload.head_dim * ITEMSIZE[kv_dtype]
    return 2 * tokens * workload.num_kv_heads * row


def equal_lengths(kv_lens: tuple[int, ...]) -> tuple[int, ...]:
    """As many lengths with the same total, as equal as integers allow."""
    base, extra = divmod(sum(kv_lens), len(kv_lens))
    return tuple(base + (i < extra) for i in range(len(kv_lens)))


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def _prefill(length: int, dtype: str) -> Workload:
    speedup = {"float32": 1.3, "bfloat16": 2.5}.get(dtype)
    return Workload(
        name=f"prefill-{length}-{_SHORT[dtype]}",
        kind="prefill",
        dtype=dtype,
        q_lens=(length,),
        kv_lens=(length,),
        causal=True,
        peer=speedup is not None,
        quick=length in (512, 1024) and dtype != "float16",
        goals=() if speedup is None else (Goal("speedup", speedup),),
    )


def _chunk(dtype: str) -> Workload:
    return Workload(
        name=f"chunk-4x256-8192-{_SHORT[dtype]}",
        kind="chunk",
        dtype=dtype,
        q_lens=(256,) * 4,
        kv_lens=(8192,) * 4,
        causal=True,
        goals=(Goal("prefill_fraction", 0.9),),
    )


def _latent() -> Workload:
    return Workload(
        name="mla-16x4096-bf16",
        kind="latent",
        dtype="bfloat16",
        q_lens=(1,) * 16,
        kv_lens=(4096,) * 16,
        page_size=64,
        num_qo_heads=128,
        num_kv_heads=1,
        head_dim=LATENT + 64,
        peer=True,
        goals=(Goal("speedup", 5.0), Goal("prefill_fraction", 0.7)),
    )


def _decode(length: int, dtype: str) -> Workload:
    return Workload(
        name=f"decode-{length}-{_SHORT[dtype]}",
        kind="decode",
        dtype=dtype,
        q_lens=(1,) * 16,
        kv_lens=(length,) * 16,
        page_size=16,
        peer=True,
        quick=length == 1024,
        goals=(Goal("triad_fraction", 0.8), Goal("speedup", 2.0)),
    )


def _codes(kv_dtype: str, goal: float | None) -> Workload:
    prefix = {"int8": "kv8", "int4": "kv4"}.get(kv_dtype, kv_dtype)
    return Workload(
        name=f"{prefix}-4096-{kv_dtype}" if prefix != kv_dtype else f"{kv_dtype}-4096",
        kind="codes",
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        q_lens=(1,) * 16,
        kv_lens=(4096,) * 16,
        page_size=16,
        goals=() if goal is None else (Goal("over_bf16", goal),),
    )


def _skew(scale: int, dtype: str) -> Workload:
    return Workload(
        name=f"zipf-{1024 * scale}-{_SHORT[dtype]}",
        kind="skew",
        dtype=dtype,
        q_lens=(1,) * 16,
        kv_lens=tuple(n * scale for n in ZIPF_1024),
        page_size=16,
        peer=scale == 1,
        quick=scale == 1 and dtype == "bfloat16",
        goals=(Goal("skew_penalty", 0.10, at_least=False),),
    )


def _balance(dtype: str) -> Workload:
    return Workload(
        name=f"one64k-{_SHORT[dtype]}",
        kind="balance",
        dtype=dtype,
        q_lens=(1,) * 64,
        kv_lens=(512,) * 31 + (65536,) + (512,) * 32,
        page_size=16,
        quick=dtype == "bfloat16",
        goals=(Goal("busy_gap", 0.05, at_least=False),),
    )


def _plan(batch: int, bound_us: float) -> Workload:
    # 512 to 1536 tokens in an order without structure, mean about 1024.
    lengths = tuple(512 + (i * 397 + 101) % 1025 for i in range(batch))
    return Workload(
        name=f"plan-{batch}",
        kind="plan",
        dtype="bfloat16",
        q_lens=(1,) * batch,
        kv_lens=lengths,
        page_size=16,
        quick=True,
        goals=(Goal("plan_us", bound_us, at_least=False),),
    )


def _plan_ragged(bound_us: float) -> Workload:
    """256 causal prefills of 64 to 1024 new tokens, some behind up to 999 that were there."""
    q_lens = tuple(64 + (i * 397 + 101) % 961 for i in range(256))
    return Workload(
        name="plan-ragged-256",
        kind="plan",
        dtype="bfloat16",
        q_lens=q_lens,
        kv_lens=tuple(n + (i * 211) % 1000 for i, n in enumerate(q_lens)),
        page_size=16,
        causal=True,
        goals=(Goal("plan_us", bound_us, at_least=False),),
    )


def _plan_shared(bound_us: float) -> Workload:
    """1024 decodes that begin with the same 2048 tokens, which plan() finds."""
    return Workload(
        name="plan-shared-1024",
        kind="plan",
        dtype="bfloat16",
        q_lens=(1,) * 1024,
        kv_lens=tuple(2064 + (i * 397 + 101) % 1025 for i in range(1024)),
        page_size=16,
        prefixes=((1, 2048),),
        goals=(Goal("plan_us", bound_us, at_least=False),),
    )


def _overhead(arrays: str) -> Workload:
    return Workload(
        name=f"run-overhead-{arrays}",
        kind="overhead",
        dtype="float32",
        q_lens=(1,),
        kv_lens=(1,),
        page_size=16,
        arrays=arrays,
        quick=True,
        goals=(Goal("overhead_us", 15.0, at_least=False),),
    )


_LENGTHS = (512, 1024, 2048, 4096, 8192)

WORKLOADS: tuple[Workload, ...] = (
    *(_prefill(n, dtype) for dtype in ("float32", "bfloat16") for n in _LENGTHS),
    _prefill(2048, "float16"),
    _chunk("float32"),
    _chunk("bfloat16"),
    _latent(),
    *(_decode(n, dtype) for dtype in ("bfloat16", "float32") for n in _LENGTHS[1:]),
    *(_skew(scale, dtype) for dtype in ("bfloat16", "float32") for scale in (1, 4)),
    _codes("int8", 1.7),
    _codes("int4", 2.6),
    _codes("nvfp4", None),
    _balance("bfloat16"),
    _balance("float32"),
    _plan(16, 30.0),
    _plan(1024, 300.0),
    _plan(4096, 700.0),
    _plan_ragged(400.0),
    _plan_shared(400.0),
    _overhead("numpy"),
    _overhead("torch"),
)


def select(
    patterns: str | None = None,
    *,
    quick: bool = False,
    workloads: tuple[Workload, ...] = WORKLOADS,
) -> tuple[Workload, ...]:
    """Choose the workloads that ``--only`` and ``--quick`` leave, in table order.

    Parameters
    ----------
    patterns : str, optional
        Names, kinds or shell patterns (``decode-*-bf16``), separated by commas. None: all.
    quick : bool
        Keep only the short list. Ignored for workloads that `patterns` names.
    workloads : tuple of Workload
        To choose from.

    Raises
    ------
    FlashbsrError
        A pattern matches no workload.
    """
    if patterns is None:
        return tuple(w for w in workloads if w.quick or not quick)
    chosen: set[str] = set()
    for pattern in filter(None, (p.strip() for p in patterns.split(","))):
        hits = [w.name for w in workloads if w.kind == pattern or fnmatch.fnmatch(w.name, pattern)]
        if not hits:
            raise FlashbsrError("--only", repr(pattern), "a name of 'flashbsr bench --list'")
        chosen.update(hits)
    return tuple(w for w in workloads if w.name in chosen)
