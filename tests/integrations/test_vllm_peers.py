# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's ranks that merge through each other's memory: who does, and what a missed one leads to.

What they compute is compared in test_vllm_ranks.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from flashbsr import ContextParallel, errors
from harness import framework

framework("torch")
import torch  # noqa: E402
from flashbsr.distributed import PeerError  # noqa: E402
from flashbsr.integrations.vllm import MERGE, context  # noqa: E402
from flashbsr.integrations.vllm.kinds import kind_of  # noqa: E402
from test_vllm_backend import QUIET, beside_vllm, dcp_group, metadata, spread_builder  # noqa: E402

__all__ = ["dcp_group"]
pytestmark = QUIET


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    """The module of the classes."""
    yield from beside_vllm("backend")


class Silent:
    """A `PeerMerge` that has missed a rank, or not; it says what it was made of."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.given, self.options, self.max_tokens = given, options, given[0]
        self.device, self.missed = torch.device("cpu"), False

    def check(self, *, wait: bool) -> None:
        assert not wait, "the host waits for the GPU"
        if self.missed:
            raise PeerError("PeerMerge", "nothing from rank 1", "an answer")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "PeerMerge", Silent)


@pytest.mark.parametrize(
    ("value", "on_gpu", "halves", "found"),
    [
        (None, True, False, False),
        (None, False, True, False),
        ("collectives", True, True, False),
        ("peers", True, False, True),
        ("peers", False, False, "on the CPU"),
        ("peers", True, True, "micro-batching"),
        ("nvlink", True, False, "collectives, peers"),
    ],
)
def test_who_merges_through_peers_memory(
    backend: Any,
    monkeypatch: pytest.MonkeyPatch,
    value: Any,
    on_gpu: bool,
    halves: bool,
    found: Any,
) -> None:
    monkeypatch.delenv(MERGE, raising=False)
    if value is not None:
        monkeypatch.setenv(MERGE, value)
    if isinstance(found, bool):
        assert backend.through_peers(on_gpu=on_gpu, halves=halves) == found
        return
    with pytest.raises(errors.UnsupportedError, match=f"{MERGE}.*{found}"):
        backend.through_peers(on_gpu=on_gpu, halves=halves)


def test_a_builder_that_is_asked_to(
    backend: Any, dcp_group: Any, silent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MERGE, "peers")
    with pytest.raises(errors.UnsupportedError, match="on the CPU"):
        spread_builder(backend)
    monkeypatch.setattr(backend, "through_peers", lambda **_: True)
    monkeypatch.setattr(
        importlib.import_module("vllm.envs"),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        300,
        raising=False,
    )
    made = spread_builder(backend)
    ((shape, peers),) = made.steps.place.ranks.peers.items()
    assert shape == (12, 64)  # heads of three ranks
    assert peers.merge.given == (256, 12, 64, dcp_group.device_group)
    assert peers.merge.options["memory"] == "symmetric"
    assert peers.merge.options["timeout"] > 300, "vLLM gives up first, and no token is drawn"
    assert made.build(0, metadata()).ranks.peers
    peers.merge.missed = True
    with pytest.raises(PeerError):
        made.build(0, metadata())


@pytest.mark.parametrize(("size", "heads", "most"), [(2, 32, 1016), (8, 128, 63), (2, 2, 8192)])
def test_the_inbox_is_small(silent: None, size: int, heads: int, most: int) -> None:
    peers = context.Peers(ContextParallel(size, 1), None, heads, 128, 8192, 5.0)
    assert peers.merge.max_tokens == most
    assert 2 * size * most * heads * (128 * 4 + 4) <= context.INBOX
    assert peers.takes(most) and not peers.takes(most + 1)


def test_layers_of_one_shape_share_an_inbox(silent: None) -> None:
    kinds = [
        kind_of(4, 1, d, s, None, 0.0, False, "auto", "decoder") for d in (64, 80) for s in (1, 2)
    ]
    ranks = context.Ranks(ContextParallel(2, 1), None).through_peers(kinds, 10, 5.0)
    assert list(ranks.peers) == [(8, 64), (8, 80)]
    assert ranks.share.rank == 1 and ranks.method == "reduce_scatter"


def test_few_queries_go_through_it() -> None:
    peers = SimpleNamespace(share=ContextParallel(4, 1))
    for tokens, brings in ((42, True), (43, False)):
        query = torch.zeros(tokens, 16, 128, dtype=torch.float32)  # of 64 heads, to three others
        assert context.Peers.brings(peers, query) == brings
