# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What attention over several GPUs takes: bytes that each reads, computes and sends."""

from __future__ import annotations

from dataclasses import dataclass

from .._check import check_int, check_name

__all__ = ["Cost", "Link"]


@dataclass(frozen=True, slots=True)
class Link:
    """The way between two GPUs, and what a collective costs before its first byte.

    Parameters
    ----------
    bandwidth : float
        Bytes per second of one GPU in one direction. Default: NVLink 4, 450e9.
    latency_us : float
        Microseconds of a collective of no bytes, in a CUDA graph. Default: 15, NCCL's between two
        H200s.
    peer_us : float
        Microseconds of a merge of no bytes by `PeerMerge`, its launch and what the ranks wait for
        each other included. Default: 6, between two H200s.
    """

    bandwidth: float = 450e9
    latency_us: float = 15.0
    peer_us: float = 6.0

    def exchange_us(self, sent: float) -> float:
        """Microseconds of a collective in which each GPU sends so many bytes."""
        return self.latency_us + sent / self.bandwidth * 1e6


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of one layer's attention on `ranks` GPUs that share the keys.

    Parameters
    ----------
    num_qo_heads, num_kv_heads, head_dim : int
        Of all ranks together.
    kv_bytes, q_bytes : int
        Of an element of the cache; of one of q, and of what partial outputs travel in.
    head_dim_kv : int, optional
        Elements of the cache per token and KV head. Default: K and V, ``2 * head_dim``; latent
        attention has 576.
    bandwidth : float
        Bytes per second that decode reads. Default: 4.57e12, H200.
    flops, decode_flops : float
        Per second, of prefill and of decode. Default: 730e12 and 560e12, H200, bfloat16. Latent
        attention has so many heads for each key that its decode is limited by them.
    launch_us : float
        What a kernel takes beside its bytes.
    link : Link
    """

    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    kv_bytes: int = 2
    q_bytes: int = 2
    head_dim_kv: int | None = None
    bandwidth: float = 4.57e12
    flops: float = 730e12
    decode_flops: float = 560e12
    launch_us: float = 3.5
    link: Link = Link()

    def decode_us(
        self,
        batch: int,
        kv_len: int,
        ranks: int = 1,
        *,
        q_len: int = 1,
        method: str = "reduce_scatter",
        all_heads: bool = True,
        travel_bytes: int = 4,
    ) -> float:
        """Decode over a cache of which each rank has one part in `ranks`.

        Parameters
        ----------
        batch, kv_len : int
            Requests, and tokens of each on all ranks.
        ranks : int
        q_len : int
            Query tokens of each request.
        method : {"reduce_scatter", "all_to_all", "peers"}
            As of `merge_over_ranks`; "peers" is `PeerMerge`, for GPUs of one host.
        all_heads : bool
            Whether every rank gets all heads in the end.
        travel_bytes : int
            Of an element of partial outputs.
        """
        check_name("method", method, ("reduce_scatter", "all_to_all", "peers"))
        for name, value in (("batch", batch), ("kv_len", kv_len), ("ranks", ranks)):
            check_int(name, value, 1)
        per_token = (self.head_dim_kv or 2 * self.head_dim) * self.num_kv_heads * self.kv_bytes
        local = -(-kv_len // ranks)
        dims = (self.head_dim_kv or self.head_dim) + self.head_dim
        products = 2 * q_len * self.num_qo_heads * dims
        slower = max(per_token / self.bandwidth, products / self.decode_flops)
        attend = self.launch_us + batch * local * slower * 1e6
        if ranks == 1:
            return attend
        rows = batch * q_len * self.num_qo_heads
        state = rows * self.head_dim * travel_bytes
        others = (ranks - 1) / ranks
        lses = rows * 4
        if method == "peers":  # everything to everybody, or their heads, and nothing else
            sent = (state + lses) * (ranks - 1) / (1 if all_heads else ranks)
            return attend + self.link.peer_us + sent / self.link.bandwidth * 1e6
        if method == "all_to_all":
            merge = self.link.exchange_us(state * others) + self.link.exchange_us(lses * others)
        else:
            merge = self.link.exchange_us(lses * (ranks - 1)) + self.link.exchange_us(
                state * others
            )
        if all_heads:
            merge += self.link.exchange_us(rows * self.head_dim * self.q_bytes * others)
            merge += self.link.exchange_us(lses * others)
        # What is weighed, added and cast between the collectives: two passes over the states.
        passes = 2 * self.launch_us + 3 * state / self.bandwidth * 1e6
        return attend + merge + passes

    def prefill_us(self, tokens: int, ranks: int = 1, *, method: str = "ring") -> float:
        """Causal prefill of one prompt in zig-zag order.

        Parameters
        ----------
        tokens : int
            Of the prompt, on all ranks.
        ranks : int
        method : {"ring", "all_gather"}
            As of `PrefillOverRanks`. Of a ring what travels is hidden behind what is computed, as
            far as that takes as long.
        """
        check_name("method", method, ("ring", "all_gather"))
        pairs = tokens * tokens / 2 / ranks
        compute = 4 * pairs * self.num_qo_heads * self.head_dim / self.flops * 1e6
        if ranks == 1:
            return self.launch_us + compute
        share = tokens / ranks
        per_token = (self.head_dim_kv or 2 * self.head_dim) * self.num_kv_heads * self.kv_bytes
        if method == "all_gather":
            travel = self.link.exchange_us(share * (ranks - 1) * per_token)
            return travel + 2 * self.launch_us + compute
        # Each of 2 ranks + 1 pairs of chunks leaves a state of half of the rank's rows, which the
        # merge reads with the one so far, and writes.
        state = share / 2 * self.num_qo_heads * self.head_dim * 4
        merges = (2 * ranks + 1) * (4 * state / self.bandwidth * 1e6 + 2 * self.launch_us)
        step = compute / ranks
        hop = self.link.exchange_us(share * per_token)
        return step + (ranks - 1) * max(step, hop) + merges
