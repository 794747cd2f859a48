# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Partial results of several GPUs, or of processes that share one, merged through their memory."""

from __future__ import annotations

from pathlib import Path

import flashbsr
import flashbsr._core as _core
import numpy as np
import pytest

pytest.importorskip("torch", reason="process groups are PyTorch's")
import harness
import peer_ranks
import ranks
import torch

needs_cuda = pytest.mark.skipif(len(harness.DEVICES) == 1, reason="no GPU here")
needs_two = pytest.mark.skipif(
    len(harness.DEVICES) == 1 or torch.cuda.device_count() < 2, reason="fewer than two GPUs here"
)


def test_what_it_is_not_made_of(tmp_path: Path) -> None:
    names = ["max_tokens", "num_qo_heads", "head_dim", "dtype", "timeout", "memory", "PeerMerge"]
    for said in ranks.on_ranks(2, peer_ranks.bad_arguments, tmp_path):
        assert said == names[: len(names) - torch.cuda.is_available()]


def test_the_core_refuses_arrays_in_host_memory() -> None:
    out, lse = np.zeros((2, 4, 64), np.float32), np.zeros((2, 4), np.float32)
    peers = _core.Peers([1 << 20, 2 << 20], 0, 8, 256, 0, 0, 1000)
    with pytest.raises(flashbsr.UnsupportedError, match="reduce_scatter"):
        _core.merge_peers(out, lse, out, lse, peers, "float32", False, 0)


def test_inboxes_hold_two_halves_of_rows_and_lses() -> None:
    assert _core.inbox_bytes(2, 32, 512) == 2 * 2 * (32 * 512 + 32 * 4)
    assert _core.inbox_bytes(3, 1, 16) == 2 * 3 * (128 + 128)


@needs_cuda
@pytest.mark.parametrize("size", [2, 4])
def test_cuda_merges_have_the_bits_of_merge_states(size: int, tmp_path: Path) -> None:
    assert ranks.on_ranks(size, peer_ranks.merges, tmp_path, "ipc") == [288] * size


@needs_two
def test_cuda_symmetric_memory(tmp_path: Path) -> None:
    assert ranks.on_ranks(2, peer_ranks.merges, tmp_path, "symmetric") == [288] * 2


@needs_cuda
def test_cuda_nan_of_all_ones(tmp_path: Path) -> None:
    assert ranks.on_ranks(2, peer_ranks.words_that_mean_nothing_came, tmp_path) == [4, 4]


@needs_cuda
def test_cuda_graphs(tmp_path: Path) -> None:
    assert ranks.on_ranks(2, peer_ranks.graphs, tmp_path) == [7, 7]


@needs_cuda
@pytest.mark.parametrize("size", [2, 8])
def test_cuda_back_to_back(size: int, tmp_path: Path) -> None:
    assert ranks.on_ranks(size, peer_ranks.back_to_back, tmp_path) == [200] * size


@needs_cuda
@pytest.mark.parametrize("what", ["dead", "late"])
def test_cuda_ranks_do_not_wait_for_ever(what: str, tmp_path: Path) -> None:
    found = ranks.on_ranks(4, peer_ranks.missing, tmp_path, what)
    assert (found[3] is None) == (what == "dead")
    for text, seconds in found[: 4 if what == "late" else 3]:
        assert "nothing from rank" in text
        assert seconds < 5
    assert "nothing from rank 3" in found[0][0]


@needs_cuda
def test_cuda_what_cannot_be_merged(tmp_path: Path) -> None:
    names = ["out", "out", "lse", "out", "out", "out", "lse_base"]
    for said in ranks.on_ranks(2, peer_ranks.bad_calls, tmp_path):
        assert said == names
