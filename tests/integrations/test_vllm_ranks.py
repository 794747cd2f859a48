# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's caches that are spread over ranks, in processes of a gloo group; no vLLM needed."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest
from flashbsr import ContextParallel, errors
from harness import framework

framework("torch")
import ranks  # noqa: E402
import vllm_ranks  # noqa: E402
from flashbsr.integrations.vllm.context import Ranks  # noqa: E402
from flashbsr.integrations.vllm.kinds import kind_of  # noqa: E402


@pytest.mark.parametrize(
    ("size", "interleave", "method", "late"),
    [
        (2, 1, "reduce_scatter", False),
        (2, 16, "all_to_all", True),
        (3, 4, "reduce_scatter", True),
        (4, 2, "all_to_all", False),
        (2, 16, "peers", True),
        (3, 1, "peers", False),
    ],
)
def test_steps_of_a_server(
    size: int, interleave: int, method: str, late: bool, tmp_path: Path
) -> None:
    found = ranks.on_ranks(size, vllm_ranks.serve, tmp_path, interleave, method, late)
    assert found == [len(vllm_ranks.CASES)] * size


@pytest.mark.skipif(len(harness.DEVICES) == 1, reason="no GPU here")
def test_cuda_steps_through_peers_memory(tmp_path: Path) -> None:
    """In eager steps and in CUDA graphs; ranks share a GPU where there is one."""
    found = ranks.on_ranks(2, vllm_ranks.serve_on_gpus, tmp_path)
    assert found == [len(vllm_ranks.ON_GPUS)] * 2


def kind(kv_heads: int = 1, attn_type: str = "decoder") -> object:
    return kind_of(4, kv_heads, 64, 0.1, None, 0.0, False, "auto", attn_type)


@pytest.mark.parametrize(
    ("of", "named"),
    [
        (kind(kv_heads=2), "num_kv_heads"),
        (kind(attn_type="encoder_only"), "encoder"),
    ],
)
def test_layers_that_are_not_spread(of: object, named: str) -> None:
    over = Ranks(ContextParallel(2, 1), None)
    over.check([kind()])
    with pytest.raises(errors.UnsupportedError, match=named):
        over.check([kind(), of])
