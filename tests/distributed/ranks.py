# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Processes of a gloo group on this machine, and what they do in tests."""

from __future__ import annotations

import datetime as dt
import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashbsr
import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import indptr
from flashbsr import ContextParallel
from flashbsr.distributed import PeerError, PrefillOverRanks, merge_over_ranks
from shares import PAGE, VARIANTS, Batch, attention_of, paged

HEADS = (8, 8)


def on_ranks(size: int, work: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """What ``work(rank, size, *args)`` gives on every rank; None of a rank that ended before."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    ranks = [
        context.Process(target=_one, args=(results, rank, size, str(folder), work, args))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    found: list[Any] = [None] * size
    deadline = time.monotonic() + 200
    try:
        while time.monotonic() < deadline:
            alive = any(process.is_alive() for process in ranks)
            try:
                rank, result, error = results.get(timeout=0.2)
            except queue.Empty:
                if not alive:
                    return found
                continue
            assert error is None, f"rank {rank}: {error}"
            found[rank] = result
        raise TimeoutError("ranks hang")
    finally:
        for process in ranks:
            process.kill()


def _one(
    results: Any, rank: int, size: int, folder: str, work: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=dt.timedelta(seconds=100),
        )
        results.put((rank, work(rank, size, *args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    # Without the group's own end, which would wait for ranks that are gone.
    results.close()
    results.join_thread()
    os._exit(0)


def merge_shares(rank: int, size: int, seeds: range) -> int:
    """Each rank attends to its share and checks what all have merged."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        name = list(VARIANTS)[seed % len(VARIANTS)]
        batch = Batch.random(rng, heads=HEADS)
        interleave = int(rng.choice([1, PAGE, 5]))
        attention = attention_of(
            VARIANTS[name], ContextParallel(size, rank, interleave), heads=HEADS
        )
        share = attention.task.share
        cache, table = paged(batch.share(share), np.random.default_rng([seed, rank]))
        layout = flashbsr.BlockTable(
            indptr(batch.q_lens), table, share.local_lens(batch.kv_lens), page_size=PAGE
        )
        attention.plan(layout, q_positions=batch.positions)
        out, lse = attention.run(
            torch.from_numpy(batch.q), torch.from_numpy(cache), return_lse=True
        )
        results = {}
        for method in ("reduce_scatter", "all_to_all"):
            whole = merge_over_ranks(out, lse, method=method)
            batch.check(*(x.numpy() for x in whole), VARIANTS[name])
            results[method] = whole
            mine = merge_over_ranks(out, lse, method=method, scatter_heads=True)
            heads = slice(rank * HEADS[0] // size, (rank + 1) * HEADS[0] // size)
            for some, every in zip(mine, whole, strict=True):
                assert torch.equal(some, every[:, heads])
            base2 = merge_over_ranks(out, lse / np.log(2), method=method, lse_base="2")
            torch.testing.assert_close(base2[0], whole[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(base2[1] * np.log(2), whole[1], rtol=1e-5, atol=1e-5)
            half = merge_over_ranks(out.bfloat16(), lse, method=method, dtype=None)
            assert half[0].dtype == torch.bfloat16
            torch.testing.assert_close(half[0].float(), whole[0], rtol=2e-2, atol=2e-2)
    return len(seeds)


def bad_calls(rank: int, size: int) -> list[str]:
    """What merge_over_ranks says to arrays that do not fit; nobody sends anything."""
    good = torch.zeros(2, 4, 16), torch.zeros(2, 4)
    said = []
    for out, lse, options in (
        (torch.zeros(2, 3, 16), torch.zeros(2, 3), {}),
        (good[0][0], good[1], {}),
        (good[0], good[1][:1], {}),
        (good[0], good[1].double(), {}),
        (good[0].double(), good[1], {}),
        (*good, {"method": "ring"}),
        (*good, {"lse_base": "10"}),
    ):
        with pytest.raises(flashbsr.FlashbsrError) as raised:
            merge_over_ranks(out, lse, **options)
        said.append(raised.value.argument)
    return said


def merge_with(rank: int, size: int, what: str) -> tuple[str, float]:
    """The last rank is gone, or late: how long the others take to say so."""
    out, lse = torch.ones(3, 12, 16), torch.zeros(3, 12)
    merge_over_ranks(out, lse)  # all are there
    if rank == size - 1:
        if what == "dead":
            os._exit(1)
        time.sleep(6)
    begin = time.monotonic()
    try:
        merge_over_ranks(out, lse, timeout=1.0)
    except PeerError as error:
        return str(error), time.monotonic() - begin
    return "merged", time.monotonic() - begin


def prefill(rank: int, size: int, seeds: range) -> list[Any]:
    """What each rank has of prompts, for every variant that goes by positions, by both methods."""
    results = []
    for seed in seeds:
        name, lens, (q, k, v) = prompts(seed)
        for method in ("ring", "all_gather"):
            spec = attention_of(VARIANTS[name], ContextParallel(1, 0)).spec
            task = flashbsr.TaskInfo(4, 2, 16, backend="cpu")
            attention = PrefillOverRanks(task, spec, method=method)
            rows = torch.from_numpy(attention.plan(lens).rows)
            out, lse = attention.run(*(torch.from_numpy(x)[rows] for x in (q, k, v)))
            results.append((rows.numpy(), out.numpy(), lse.numpy()))
    return results


def prompts(seed: int) -> tuple[str, np.ndarray, list[np.ndarray]]:
    """A variant, lengths, and q, k, v of all prompts."""
    rng = np.random.default_rng(seed)
    name = [n for n, variant in VARIANTS.items() if variant.causal][seed % 5]
    lens = rng.choice([0, 1, 3, 64, 150, 301], int(rng.integers(1, 4)))
    shapes = ((int(lens.sum()), heads, 16) for heads in (4, 2, 2))
    return name, lens, [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def prefill_with_a_late_rank(rank: int, size: int) -> str:
    """The last rank comes when the others have gone."""
    attention = PrefillOverRanks(flashbsr.TaskInfo(4, 2, 16, backend="cpu"), timeout=1.0)
    count = len(attention.plan([64]).rows)
    q, k = torch.ones(count, 4, 16), torch.ones(count, 2, 16)
    attention.run(q, k, k)
    if rank == size - 1:
        time.sleep(5)
    try:
        attention.run(q, k, k)
    except PeerError as error:
        return str(error)
    return "ran"
