# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What processes with GPUs do in tests of `PeerMerge`. With one GPU they share it."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import flashbsr
import pytest
import torch
from flashbsr.distributed import PeerError, PeerMerge

HEADS, DIM, TOKENS = 8, 64, 300
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Of the output, and `dtype`.
TRAVEL = (
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float32"),
)


def made(rank: int, size: int, **options: Any) -> PeerMerge:
    """A merge of this rank, which takes its GPU. Processes of other tests may be there too."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    options = {"max_tokens": TOKENS, "num_qo_heads": HEADS, "head_dim": DIM, **options}
    return PeerMerge(**{"timeout": 60.0, **options})


def states(
    seed: int, size: int, tokens: int, dtype: str, dim: int = DIM
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results of all ranks, ``[tokens, ranks, HEADS, dim]``, on this rank's GPU.

    Some rows see no key of a rank, and have NaN there; some see none of any.
    """
    rng = torch.Generator().manual_seed(seed)
    v = torch.randn(tokens, size, HEADS, dim, generator=rng).to(FLOATS[dtype])
    s = torch.randn(tokens, size, HEADS, generator=rng) * 20
    unseen = torch.rand(tokens, size, HEADS, generator=rng) < 0.2
    unseen |= torch.rand(tokens, 1, HEADS, generator=rng) < 0.1
    s[unseen] = -torch.inf
    v[unseen] = torch.nan
    return v.cuda(), s.cuda()


def expected(
    v: torch.Tensor, s: torch.Tensor, travel: str, base: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_states` over what travels."""
    if v.dtype == torch.float32:
        v = v.to(FLOATS[travel]).float()
    return flashbsr.merge_states(v, s, lse_base=base)


def same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    """Bit for bit, but for which NaN it is."""
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x.nan_to_num(7), y.nan_to_num(7))


def merges(rank: int, size: int, memory: str) -> int:
    """All types and shapes: the bits of merge_states."""
    count = 0
    for dim, (dtype, travel) in itertools.product((DIM, 72, 512), TRAVEL):
        peers = made(rank, size, head_dim=dim, dtype=FLOATS[travel], memory=memory)
        # Rows for few lanes and for all; more than run at once; odd numbers; none.
        for tokens, base, scatter in itertools.product((1, 37, 0, TOKENS), ("e", "2"), (0, 1)):
            v, s = states(1000 * tokens + dim, size, tokens, dtype, dim)
            # Rows that lie apart.
            out = torch.empty(tokens, 2 * HEADS, dim, dtype=v.dtype, device="cuda")[:, ::2]
            out.copy_(v[:, rank])
            got = peers.merge(out, s[:, rank], scatter_heads=bool(scatter), lse_base=base)
            want = expected(v, s, travel, base)
            if scatter:
                mine = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
                want = want[0][:, mine], want[1][:, mine]
            same(got, want)
            assert not got[0].isnan().any(), "an unseen row's NaN weighs nothing"
            count += 1
        peers.check()
    return count


def words_that_mean_nothing_came(rank: int, size: int) -> int:
    """NaN of all ones are sent as other NaN, and reach the result."""
    peers = made(rank, size)
    half = made(rank, size, dtype=torch.bfloat16)
    for seed, dtype in enumerate(("float32", "bfloat16")):
        v, s = states(seed, size, 13, dtype)
        s[s.isinf()] = 0
        v.nan_to_num_(0)
        words = v.view(torch.int32)
        words[3, :, 2, 5] = -1
        words[4, 0, 1] = -1
        s.view(torch.int32)[7, size - 1, 3] = -1
        for merge, travel in ((peers, "float32"), (half, "bfloat16")):
            got = merge.merge(v[:, rank], s[:, rank])
            same(got, expected(v, s, travel, "e"))
            assert got[0].isnan().any()
            merge.check()
    return 4


def graphs(rank: int, size: int) -> int:
    """An odd number of merges, replayed an odd number of times, of inputs that change."""
    peers = made(rank, size)
    other = made(rank, size, dtype=torch.bfloat16)
    drawn = [states(n, size, tokens, "float32") for n, tokens in enumerate((5, 5, 130))]
    inputs = [(v[:, rank].clone(), s[:, rank].clone()) for v, s in drawn]
    peers.merge(*inputs[0])
    peers.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = [peers.merge(*x) for x in inputs]
        results.append(other.merge(*inputs[1]))
    for step in range(7):
        every = [states(100 * step + n, size, len(x[0]), "float32") for n, x in enumerate(inputs)]
        for mine, (v, s) in zip(inputs, every, strict=True):
            mine[0].copy_(v[:, rank])
            mine[1].copy_(s[:, rank])
        graph.replay()
        peers.check()
        for got, (v, s) in zip(results, every, strict=False):
            same(got, expected(v, s, "float32", "e"))
        same(results[-1], expected(*every[1], "bfloat16", "e"))
        if step % 2:
            peers.merge(*inputs[2], scatter_heads=True)
    peers.check()
    return 7


def back_to_back(rank: int, size: int) -> int:
    """200 merges in a row, of which some come late on one rank or the other."""
    peers = made(rank, size)
    every = [states(n, size, 17 + 40 * (n % 2), "float32") for n in range(4)]
    wants = [expected(v, s, "float32", "e") for v, s in every]
    mine = [(v[:, rank].clone(), s[:, rank].clone()) for v, s in every]
    kept = []
    for step in range(200):
        if step % (7 + 4 * rank) == 0:
            torch.cuda._sleep(2_000_000)  # a millisecond
        kept.append(peers.merge(*mine[step % 4]))
    peers.check()
    for step, got in enumerate(kept):
        same(got, wants[step % 4])
    return len(kept)


def missing(rank: int, size: int, what: str) -> tuple[str, float]:
    """The last rank is dead or late: what the others say, and after how many seconds."""
    patient, peers = made(rank, size), made(rank, size, timeout=1.0)
    v, s = states(0, size, 5, "float32")
    mine = v[:, rank].clone(), s[:, rank].clone()
    for merge in (patient, peers, peers, peers):  # the first one loads kernels
        same(merge.merge(*mine), expected(v, s, "float32", "e"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        replayed = peers.merge(*mine)
    patient.merge(*mine)  # all are here
    patient.check()
    if rank == size - 1:
        if what == "dead":
            os._exit(1)
        time.sleep(6)
    begin = time.monotonic()
    out, lse = peers.merge(*mine)
    try:
        peers.check()
    except PeerError as error:
        seconds = time.monotonic() - begin
        assert out.isnan().all()
        assert lse.isnan().all()
        said = str(error)
    else:
        # It was late itself, and has what the others had sent; they do not go on.
        same((out, lse), expected(v, s, "float32", "e"))
        peers.merge(*mine)
        with pytest.raises(PeerError) as late:
            peers.check()
        said, seconds = str(late.value), 0.0
    with pytest.raises(PeerError):
        peers.merge(*mine)
    begin = time.monotonic()
    for _ in range(20):  # wait for nobody, and are not taken for right
        graph.replay()
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 2
    assert replayed[0].isnan().all()
    return said, seconds


def bad_calls(rank: int, size: int) -> list[str]:
    """What is wrong with them; nobody waits for anybody."""
    peers = made(rank, size)
    good = torch.zeros(2, HEADS, DIM, device="cuda"), torch.zeros(2, HEADS, device="cuda")
    said = []
    for out, lse, options in (
        (good[0][0], good[1], {}),
        (good[0][..., :32], good[1], {}),
        (good[0], good[1].double(), {}),
        (torch.zeros(TOKENS + 1, HEADS, DIM, device="cuda"), torch.zeros(TOKENS + 1, HEADS), {}),
        (good[0].cpu(), good[1].cpu(), {}),
        (torch.zeros(2, HEADS, DIM + 1, device="cuda")[..., :DIM], good[1], {}),
        (*good, {"lse_base": "10"}),
    ):
        with pytest.raises(flashbsr.FlashbsrError) as raised:
            peers.merge(out, lse, **options)
        said.append(raised.value.argument)
    with pytest.raises(flashbsr.FlashbsrError, match="the same on all of them"):
        made(rank, size, max_tokens=8 + rank)
    return said


def bad_arguments(rank: int, size: int) -> list[str]:
    """What no machine takes, and what one without a GPU says."""
    said = []
    for options in (
        {"max_tokens": 0},
        {"num_qo_heads": 2 * size + 1},
        {"head_dim": 60},
        {"dtype": torch.float64},
        {"timeout": 0.0},
        {"memory": "multicast"},
        {"group": None},
    ):
        given: dict[str, Any] = {"max_tokens": 4, "num_qo_heads": 4, "head_dim": 64, **options}
        if "group" in options and torch.cuda.is_available():
            continue
        with pytest.raises(flashbsr.FlashbsrError) as raised:
            PeerMerge(**given)
        said.append(raised.value.argument)
        if "group" in options:
            assert isinstance(raised.value, flashbsr.UnsupportedError)
            assert 'merge_over_ranks(method="reduce_scatter")' in str(raised.value)
    return said
