# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Decode over a cache that several devices share, as one JAX program under `jax.shard_map`.

    pip install flashbsr 'jax>=0.7'
    python examples/context_parallel/jax.py --ranks 2

The devices are XLA's CPU devices of this process. Each has its query heads and a share of every
request's tokens. In a step queries are gathered, new keys are written where they belong, every
device attends with all heads to its share, and outputs are weighed by their LSEs and added, of
which each device gets its heads. A `scan` goes over the steps. Compared with float64.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import Any

# Not from this folder, where this file is named as JAX is.
sys.path[:] = [p for p in sys.path if not p.endswith("context_parallel")]

import numpy as np  # noqa: E402

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
MOST, STEPS = 128, 40
FIRST = np.array([60, 0, 1])  # tokens of each request before the first step
TOLERANCE = 1e-5  # float32; measured 5.4e-7


def program(ranks: int, interleave: int) -> tuple[Any, Any]:
    """The compiled loop, and the attention that it follows."""
    import flashbsr
    import jax
    import jax.numpy as jnp
    from flashbsr.integrations import jax as nodes
    from jax.sharding import Mesh, PartitionSpec

    pages = MOST // PAGE + 1
    # A decode step's query is behind all keys, so that it needs no mask and no positions.
    task = flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, num_threads=1)
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), task)
    attention.plan(flashbsr.Bounds(None, [MOST] * len(FIRST), page_size=PAGE))
    tables = jnp.arange(len(FIRST) * pages).reshape(len(FIRST), pages)

    def local(positions: Any) -> Any:
        """How many of so many tokens are here: `ContextParallel.local_lens`."""
        whole = positions // (ranks * interleave)
        rest = positions - whole * ranks * interleave - jax.lax.axis_index("ranks") * interleave
        return whole * interleave + jnp.clip(rest, 0, interleave)

    def step(number: Any, carry: Any, token: Any) -> Any:
        cache, lens = carry
        q, k, v = token
        at = local(lens)  # if the new token is here, it is this key
        mine = lens // interleave % ranks == jax.lax.axis_index("ranks")
        slots = tables[jnp.arange(len(FIRST)), at // PAGE] * PAGE + at % PAGE
        cache = nodes.append_paged_kv_cache(k, v, *cache, jnp.where(mine, slots, -1))
        lens = lens + 1
        q = jax.lax.all_gather(q, "ranks", axis=1, tiled=True)
        out, lse = nodes.run(
            number, q, cache, return_lse=True, kv_lens=local(lens), block_tables=tables
        )
        everyones = jax.lax.all_gather(lse, "ranks")
        weight = jnp.exp(lse - jax.nn.logsumexp(everyones, axis=0))[..., None]  # -inf weighs 0
        out = jax.lax.psum_scatter(out * weight, "ranks", scatter_dimension=1, tiled=True)
        return (cache, lens), out

    def decode(number: Any, cache: Any, tokens: Any) -> Any:
        """Of a device: its part of the cache, its query heads, all new keys and values."""
        own = tuple(x[0] for x in cache)
        _, outs = jax.lax.scan(partial(step, number), (own, jnp.asarray(FIRST)), tokens)
        return outs

    mesh = Mesh(np.array(jax.devices()[:ranks]), ("ranks",))
    heads, whole, parts = (
        PartitionSpec(None, None, "ranks"),
        PartitionSpec(),
        PartitionSpec("ranks"),
    )
    spread = jax.shard_map(
        decode, mesh=mesh, in_specs=(whole, (parts, parts), (heads, whole, whole)),
        out_specs=heads, check_vma=False,
    )  # fmt: skip
    return jax.jit(partial(spread, nodes.handle(attention))), attention


def caches(keys: list[np.ndarray], ranks: int, interleave: int) -> tuple[list[Any], list[Any]]:
    """The first tokens on their devices, NaN elsewhere, ``(ranks, pages, PAGE, KV_HEADS, DIM)``."""
    from flashbsr import ContextParallel

    pages = MOST // PAGE + 1
    cache = np.full((2, ranks, len(FIRST) * pages, PAGE, KV_HEADS, DIM), np.nan, np.float32)
    shares = [ContextParallel(ranks, rank, interleave) for rank in range(ranks)]
    for rank, share in enumerate(shares):
        for request, (x, n) in enumerate(zip(keys, FIRST, strict=True)):
            at = share.key_positions(share.local_lens(int(n)))
            flat = cache[:, rank, request * pages : (request + 1) * pages].reshape(2, -1, KV_HEADS,
                                                                                   DIM)  # fmt: skip
            flat[:, : len(at)] = x[:, at]
    held = [share.local_lens(FIRST + STEPS).tolist() for share in shares]
    return [cache[0], cache[1]], held


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of one query, (heads, dim), in float64."""
    group = HEADS // KV_HEADS
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    logits = np.einsum("hd,khd->hk", q.astype(np.float64), k) / np.sqrt(DIM)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hk,khd->hd", weights / weights.sum(-1, keepdims=True), v)


def main(argv: list[str] | None = None) -> int:
    """Run; 1 if anything is off."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="a divisor of the 8 heads")
    parser.add_argument("--interleave", type=int, default=4, help="tokens in a row on a device")
    args = parser.parse_args(argv)
    flags = f"--xla_force_host_platform_device_count={args.ranks}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    os.environ["JAX_PLATFORMS"] = "cpu"

    rng = np.random.default_rng(0)
    keys = [rng.standard_normal((2, n + STEPS, KV_HEADS, DIM)).astype(np.float32) for n in FIRST]
    q = rng.standard_normal((STEPS, len(FIRST), HEADS, DIM)).astype(np.float32)
    new = [np.stack([x[kv, n:] for x, n in zip(keys, FIRST, strict=True)], axis=1) for kv in (0, 1)]
    cache, held = caches(keys, args.ranks, args.interleave)
    decode, _attention = program(args.ranks, args.interleave)
    out = np.asarray(decode(tuple(cache), (q, *new)))

    error = max(
        float(np.abs(out[t, b] - exact(q[t, b], *keys[b][:, : n + t + 1])).max())
        for t in range(STEPS)
        for b, n in enumerate(FIRST)
    )
    sent = len(FIRST) * HEADS * (args.ranks - 1) * (DIM * 4 // args.ranks * 2 + 4)
    print(f"{len(FIRST)} requests, {STEPS} decode steps, {args.ranks} devices")
    for rank, lens in enumerate(held):
        print(f"device {rank}: has {lens} keys; sends {sent} bytes a step")
    print(f"largest error {error:.1e}")
    good = error < TOLERANCE
    print("as one device would have it" if good else "WRONG")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
