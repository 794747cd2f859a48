# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`Explanation`: what a plan does and why, what it costs at least, how near a run came to that."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ..arrays.dtypes import PACKED_LATENTS, elements_of, output_dtype
from ..errors import FlashbsrError
from ..ops.latent import PACKED_BYTES
from .plan import Plan
from .plan_parts import shared_text
from .planning import Planned

__all__ = ["Explanation", "explain"]

# Dense 16-bit products with float32 accumulation, operations per second by the maker's data sheets.
_PRODUCTS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "T4": 65e12,
}

_ITEMSIZE: dict[str, float] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "int4": 1 / 2,  # scales of every token are not counted
    "nvfp4": 1 / 2 + 1 / 16,
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `Attention.explain` found; ``print`` it.

    Attributes
    ----------
    plan : Plan
        The plan that is explained.
    kernel, device : str
        Name of the kernel and of what runs it.
    reason : str
        Why the KV ranges were cut as they are: `Plan.reason`.
    tiles : int
        Row tiles of all KV heads, those of shared parts too.
    most_items : int
        Of any worker's queue.
    kv_bytes : int
        K and V that some query sees, every element once: pages that requests share count once.
    qo_bytes : int
        Queries and outputs, once.
    pairs : int
        (query token, KV token) pairs that causality and window leave, of one head; of all KV heads
        where each has blocks of its own. A custom mask is taken as if it kept everything.
    operations : int
        Of both products: ``2 * (head_dim_qk + head_dim_vo)`` for a pair and query head.
    dtypes : str
        Types of q, KV and the output that the bytes count; assumed ones in brackets.
    bandwidth, flops : float or None
        Bytes and operations per second that the floor is for; None: unknown.
    time_s : float or None
        Of a run; None: none was timed.
    """

    plan: Plan
    kernel: str
    device: str
    reason: str
    tiles: int
    most_items: int
    kv_bytes: int
    qo_bytes: int
    pairs: int
    operations: int
    dtypes: str
    bandwidth: float | None
    flops: float | None
    time_s: float | None

    @property
    def workers(self) -> int:
        """Queues."""
        return self.plan.header.num_workers

    @property
    def splits(self) -> int:
        """Parts of tiles whose KV range was split."""
        count = self.plan.tiles.items
        return int(count[count > 1].sum()) * self.plan.heads_per_request

    @property
    def merges(self) -> int:
        """Tiles whose KV range was split."""
        return int((self.plan.tiles.items > 1).sum()) * self.plan.heads_per_request

    @property
    def balance(self) -> float:
        """`Plan.balance`: mean over longest queue by the scheduler's model."""
        return self.plan.balance

    @property
    def num_bytes(self) -> int:
        """Bytes that memory has to move at least."""
        return self.kv_bytes + self.qo_bytes

    @property
    def memory_s(self) -> float | None:
        """Least seconds for the bytes."""
        return self.num_bytes / self.bandwidth if self.bandwidth else None

    @property
    def product_s(self) -> float | None:
        """Least seconds for the operations."""
        return self.operations / self.flops if self.flops else None

    @property
    def floor_s(self) -> float | None:
        """Least seconds by what is known of the device; None: nothing is."""
        known = [s for s in (self.memory_s, self.product_s) if s is not None]
        return max(known, default=None)

    @property
    def limit(self) -> str | None:
        """``"memory"`` or ``"products"``, whichever makes the floor."""
        if self.floor_s is None:
            return None
        return "memory" if self.floor_s == self.memory_s else "products"

    @property
    def fraction(self) -> float | None:
        """The floor over the time: 1.0 is as fast as the device allows."""
        if self.floor_s is None or not self.time_s:
            return None
        return self.floor_s / self.time_s

    def __str__(self) -> str:
        h = self.plan.header
        split = f"{self.merges} split into {self.splits} parts" if self.merges else "none split"
        kv_tokens = int(self.plan.requests["kv_len"].sum(dtype=np.int64))
        rows = {
            "kernel": f"{self.kernel} on {self.device}",
            "batch": f"{h.num_requests} requests, {h.num_q_tokens} query tokens, {kv_tokens} KV "
            f"tokens, longest {h.max_kv_len}; {h.num_qo_heads} query / "
            f"{self.plan.kv_head_count} KV heads",
            "tiles": f"{self.tiles} of at most {h.max_rows} packed rows (kernel: {h.tile_rows}), "
            + split,
            "shared": shared_text(self.plan),
            "cut": self.reason,
            "workers": f"{self.workers}, balance {self.balance:.3f}, {h.num_items} items, at most "
            f"{self.most_items} in a queue",
            "bytes": f"{_unit(self.kv_bytes, 'B')} of K and V once, {_unit(self.qo_bytes, 'B')} of "
            f"q and out ({self.dtypes})",
            "products": f"{_unit(self.operations, 'FLOP')}: {self.pairs} visible pairs",
            "floor": self._floor(),
        }
        if not h.num_shared:
            del rows["shared"]
        if self.time_s:
            reached = "" if self.fraction is None else f", {self.fraction:.2f} of what is possible"
            rows["time"] = _time(self.time_s) + reached
        return "\n".join(f"{name:<9} {text}" for name, text in rows.items())

    def _floor(self) -> str:
        if self.floor_s is None:
            return "unknown here: pass bandwidth= and flops="
        parts = []
        if self.memory_s is not None and self.bandwidth:
            parts.append(f"memory {_time(self.memory_s)} at {_unit(self.bandwidth, 'B/s')}")
        if self.product_s is not None and self.flops:
            parts.append(f"products {_time(self.product_s)} at {_unit(self.flops, 'FLOP/s')}")
        return f"{_time(self.floor_s)} ({', '.join(parts)})"


def explain(
    attention: Planned,
    *,
    bandwidth: float | None = None,
    flops: float | None = None,
    time_s: float | None = None,
) -> Explanation:
    """Explain the current plan of an `Attention`; `Attention.explain` documents the parameters.

    Parameters
    ----------
    attention : Attention
    bandwidth, flops, time_s : float, optional

    Returns
    -------
    Explanation

    Raises
    ------
    PlanError
        Before ``plan``.
    """
    for name, value in (("bandwidth", bandwidth), ("flops", flops), ("time_s", time_s)):
        if value is not None and not value > 0:
            raise FlashbsrError(name, value, "a number above 0")
    plan, engine, task = attention.plan_info, attention._engine, attention.task
    gpu = engine.place() is not None
    device = engine.device_name()
    if gpu and bandwidth is None:
        bandwidth = engine.bandwidth() or None
    if gpu and flops is None:
        flops = _products_of(device)
    if time_s is None and engine.run_dtypes():
        time_s = engine.run_stats().get("kernel_s") or None

    h = plan.header
    sizes, dtypes = _types(attention, gpu)
    dim_vo = task.head_dim_vo or task.head_dim_qk
    dims = task.head_dim_qk + dim_vo
    qo_row = int(task.head_dim_qk * sizes[0] + dim_vo * sizes[3])
    kv_row = int(task.head_dim_qk * sizes[1] + (0 if task.latent else dim_vo * sizes[2]))
    if task.kv_dtype == PACKED_LATENTS:
        kv_row = PACKED_BYTES
    pairs = _visible_pairs(plan)
    heads = plan.heads_per_request
    return Explanation(
        plan=plan,
        kernel=engine.kernel_name(),
        device=device,
        reason=plan.reason,
        tiles=len(plan.tiles.owner) * heads,
        most_items=int(np.diff(plan.queue_indptr).max(initial=0)),
        kv_bytes=_touched_tokens(plan) * heads * h.heads_of_item * kv_row,
        qo_bytes=h.num_q_tokens * h.num_qo_heads * qo_row,
        pairs=pairs,
        operations=2 * dims * pairs * heads * h.group_size,
        dtypes=dtypes,
        bandwidth=bandwidth,
        flops=flops,
        time_s=time_s,
    )


def _types(attention: Planned, gpu: bool) -> tuple[list[float], str]:
    """Item sizes and names of q, K, V and out: of the last run, of the task, or assumed."""
    task = attention.task
    ran = attention._engine.run_dtypes()
    names = ran or [task.q_dtype, *elements_of(task.kv_dtype), task.o_dtype]
    guess = names[0] or ("float16" if gpu else "float32")
    guesses = guess, guess, guess, output_dtype(guess)
    q, k, v, out = (name or f"[{other}]" for name, other in zip(names, guesses, strict=True))
    text = f"q {q}, KV {k}, out {out}" if k == v else f"q {q}, K {k}, V {v}, out {out}"
    sizes = [_ITEMSIZE[name or other] for name, other in zip(names, guesses, strict=True)]
    return sizes, text


def _products_of(device: str) -> float | None:
    for name, rate in _PRODUCTS.items():
        if re.search(rf"\b{name}\b", device):
            return rate
    return None


def _visible_pairs(plan: Plan) -> int:
    """Pairs of a query and a key that it sees; of a shared part every row sees all."""
    requests = plan.requests
    q_len = requests["q_len"].astype(np.int64)
    kv_len = np.repeat(requests["kv_len"].astype(np.int64), q_len)
    first = np.cumsum(q_len) - q_len
    position = np.repeat(plan.first_positions[: len(requests)] - first, q_len)
    begin, end = plan.visible(position + np.arange(len(position)), kv_len)
    own, shared = np.zeros(len(q_len), np.int64), 0
    for part in plan.parts:
        own[part.requests] = part.own_begin
        shared += (part.kv_end - part.kv_begin) * int(q_len[part.requests].sum())
    return shared + int(np.maximum(end - np.maximum(begin, np.repeat(own, q_len)), 0).sum())


def _touched_tokens(plan: Plan) -> int:
    """KV tokens that some item reads; those of a page that several requests share count once."""
    h, items = plan.header, plan.items[plan.items["kv_begin"] < plan.items["kv_end"]]
    count = len(plan.owners)
    begin, end = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    np.minimum.at(begin, items["request"], items["kv_begin"])
    np.maximum.at(end, items["request"], items["kv_end"])
    begin = np.minimum(begin, end)
    if not plan.paged:
        return int((end - begin).sum())
    # Entry by entry of the page table: which page, and how many of its tokens.
    size = h.page_size
    first = begin // size
    entries = np.where(end > begin, -(-end // size) - first, 0)
    owner = np.repeat(np.arange(count), entries)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(entries) - entries, entries)
    nth += first[owner]
    tokens = np.minimum(end[owner], (nth + 1) * size) - np.maximum(begin[owner], nth * size)
    pages = plan.kv_indices[plan.owners["kv_begin"][owner] + nth]
    if plan.per_head:
        pages = pages + plan.kv_heads[owner].astype(np.int64) * h.num_kv_rows
    _, which = np.unique(pages, return_inverse=True)
    most = np.zeros(which.max(initial=-1) + 1, np.int64)
    np.maximum.at(most, which, tokens)
    return int(most.sum())


def _unit(value: float, unit: str) -> str:
    """Three digits and a prefix: 67108864 bytes are 67.1 MB."""
    prefixes = ["", "k", "M", "G", "T", "P"]
    while value >= 999.5 and len(prefixes) > 1:
        value /= 1000
        del prefixes[0]
    return f"{value:.3g} {prefixes[0]}{unit}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
