# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Requests whose keys lie on several ranks: prefill, then decode, by PyTorch's process groups.

    pip install flashbsr torch
    python examples/context_parallel/torch.py --ranks 2

Each rank is a process. They prefill prompts in zig-zag order (`PrefillOverRanks`: keys travel round
the ranks), send each token's key and value to the rank whose cache has it, and decode: every rank
attends to its share with all heads, and `merge_over_ranks` makes one result of the partial ones.
Each output is compared with one process that has everything. Where there is a GPU for each process
they are used, and decode merges through NVLink (`PeerMerge`); elsewhere the group is gloo's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

# Not from this folder, where this file is named as PyTorch is.
sys.path[:] = [p for p in sys.path if not p.endswith("context_parallel")]

import flashbsr  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from flashbsr.distributed import (  # noqa: E402
    PeerMerge,
    PrefillOverRanks,
    merge_over_ranks,
    zigzag,
)

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
PROMPTS, STEPS = [700, 33, 250], 6
# Of float32, measured 7.2e-7; of float16, which GPUs take, and partial results of which are merged.
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-2}
CAUSAL = flashbsr.AttentionSpec(causal=True)


@dataclass
class Share:
    """What a rank has of the requests: pages of its own tokens, in their order."""

    which: flashbsr.ContextParallel
    device: str

    def __post_init__(self) -> None:
        longest = max(PROMPTS) + STEPS
        width = -(-self.which.local_lens(longest) // PAGE) + 1
        self.table = np.arange(len(PROMPTS) * width).reshape(-1, width)
        self.cache = draw(None, self.device, self.table.size, 2, PAGE, KV_HEADS, DIM)
        self.lens = np.zeros(len(PROMPTS), np.int64)  # of the requests, on all ranks
        self.attention = flashbsr.Attention(
            CAUSAL, task_of(self.device, context_parallel=self.which)
        )

    def write(self, request: int, positions: np.ndarray, kv: torch.Tensor) -> None:
        """Keep keys and values, ``(tokens, 2, KV_HEADS, DIM)``, of tokens that are this rank's."""
        at = self.which.local_lens(positions)  # of a token that is here: its number among the keys
        self.cache[self.table[request][at // PAGE], :, at % PAGE] = kv

    def decode(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with a token of each request, the last one, to what is here."""
        local = self.which.local_lens(self.lens)
        layout = flashbsr.BlockTable(None, self.table, local, page_size=PAGE)
        self.attention.plan(layout, q_positions=self.lens - 1)
        return self.attention.run(q, self.cache, return_lse=True)


def draw(rng: np.random.Generator | None, device: str, *shape: int) -> torch.Tensor:
    """Normal numbers, or NaN where nothing may be read, as the device computes with them."""
    x = np.full(shape, np.nan) if rng is None else rng.standard_normal(shape)
    return torch.from_numpy(x).to(device, torch.float32 if device == "cpu" else torch.float16)


def task_of(device: str, **options: Any) -> flashbsr.TaskInfo:
    """Say what a rank computes, and where."""
    dtypes = {} if device == "cpu" else {"q_dtype": "float16", "kv_dtype": "float16"}
    return flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, backend=device, **dtypes, **options)


def exchange(share: Share, kv: torch.Tensor) -> int:
    """Send each prompt's keys and values from where they were computed to where they stay.

    Everybody knows what everybody has, so that nothing but keys and values is sent. Gives the
    bytes.
    """
    size, rank = share.which.size, share.which.rank
    shards = [zigzag(PROMPTS, size, r) for r in range(size)]
    starts = np.cumsum([0, *PROMPTS])
    owners = [shard.positions // share.which.interleave % size for shard in shards]
    sent = [np.flatnonzero(owners[rank] == r) for r in range(size)]
    got = [np.flatnonzero(owner == rank) for owner in owners]
    received = kv.new_empty((sum(map(len, got)), *kv.shape[1:]))
    dist.all_to_all_single(
        received, kv[np.concatenate(sent)], [len(x) for x in got], [len(x) for x in sent]
    )
    rows = np.concatenate([shard.rows[x] for shard, x in zip(shards, got, strict=True)])
    for request, (begin, n) in enumerate(zip(starts, PROMPTS, strict=False)):
        mine = np.flatnonzero((rows >= begin) & (rows < begin + n))
        share.write(request, rows[mine] - begin, received[mine])
    share.lens[:] = PROMPTS
    return kv[0].nbytes * sum(len(x) for r, x in enumerate(sent) if r != rank)


def serve(rank: int, size: int, interleave: int, device: str, store: str, results: Any) -> None:
    """One rank."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    share = Share(flashbsr.ContextParallel(size, rank, interleave), device)
    rng = np.random.default_rng(0)  # everybody draws the same, and uses what is its own
    merge: Any = merge_over_ranks
    if device == "cuda":
        merge = PeerMerge(len(PROMPTS), HEADS, DIM).merge

    error, sent = {}, {}

    shapes = (sum(PROMPTS), HEADS, DIM), (sum(PROMPTS), 2, KV_HEADS, DIM)
    prompts = [draw(rng, device, *shape) for shape in shapes]
    prefill = PrefillOverRanks(task_of(device), CAUSAL)
    rows = prefill.plan(PROMPTS).rows
    q, kv = (x[rows] for x in prompts)
    out, _ = prefill.run(q, kv[:, 0], kv[:, 1])
    everything = alone([0] * len(PROMPTS), PROMPTS, *prompts)
    error["prefill"] = float((out - everything[rows]).abs().max())
    shards = [len(zigzag(PROMPTS, size, r).rows) for r in range(size)]
    sent["prefill"] = kv[0].nbytes * (sum(shards) - shards[(rank + 1) % size])
    sent["to caches"] = exchange(share, kv)

    keys = list(torch.split(prompts[1], PROMPTS))
    for _ in range(STEPS):
        new = draw(rng, device, len(PROMPTS), 2, KV_HEADS, DIM)
        q = draw(rng, device, len(PROMPTS), HEADS, DIM)
        for request, position in enumerate(share.lens):
            keys[request] = torch.cat([keys[request], new[request][None]])
            if share.which.has(position):
                share.write(request, np.array([position]), new[request][None])
        share.lens += 1
        part, lse = share.decode(q)
        out, _ = merge(part, lse)
        expected = alone(share.lens - 1, share.lens, q, torch.cat(keys))
        error["decode"] = max(error.get("decode", 0), float((out - expected).abs().max()))
        state, others = part.nbytes + lse.nbytes, size - 1
        step = state * others  # everything to all others
        if device == "cpu":
            # LSEs to all; what others' heads are of the outputs; merged heads to all.
            step = lse.nbytes * others + part.nbytes * others // size + state // size * others
        sent["decode"] = sent.get("decode", 0) + step
    results.put((rank, share.which.local_lens(share.lens).tolist(), sent, error))
    dist.barrier()  # who ends first would take the others' connection along


def alone(past: Any, lens: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """The same from one process with all keys; `past` tokens of each request have no query."""
    attention = flashbsr.Attention(CAUSAL, task_of(q.device.type))
    q_lens = np.asarray(lens) - np.asarray(past)
    attention.plan(flashbsr.Ragged(np.cumsum([0, *q_lens]), np.cumsum([0, *lens])))
    return attention.run(q, (kv[:, 0], kv[:, 1]))


def main(argv: list[str] | None = None) -> int:
    """Run; 1 if anything is off."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="a divisor of the 8 heads")
    parser.add_argument("--interleave", type=int, default=PAGE, help="tokens in a row on a rank")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.device_count() >= args.ranks else "cpu"
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = args.ranks, args.interleave, device, f"{folder}/store", results
        ranks = [context.Process(target=serve, args=(r, *given)) for r in range(args.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        return 1
    found = sorted(results.get() for _ in ranks)
    print(f"prompts of {PROMPTS} tokens, {STEPS} decode steps, {args.ranks} ranks, {device}")
    for rank, lens, sent, error in found:
        what = ", ".join(f"{name} {count / 1000:.1f}" for name, count in sent.items())
        most = ", ".join(f"{name} {x:.1e}" for name, x in error.items())
        print(f"rank {rank}: has {lens} keys; sent KB: {what}; largest error: {most}")
    good = all(max(error.values()) < TOLERANCE[device] for *_, error in found)
    print("as one process has it" if good else "WRONG")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
