# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What vLLM's builder makes of a prefix that all requests of a step have.

tests/fake_cuda/vllm_prefixes.py replays graphs over such steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

backends = importlib.import_module("test_vllm_backend")

pytestmark = backends.QUIET


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    """The module of the classes."""
    yield from backends.beside_vllm("backend")


PREFIX: dict[str, Any] = {
    "common_prefix_len": 8000, "query_lens": [1] * 16, "num_query_heads": 8, "num_kv_heads": 2,
    "use_alibi": False, "use_sliding_window": False, "use_local_attention": False,
    "num_sms": 132, "dcp_world_size": 1,
}  # fmt: skip


def told_to_build(made: Any) -> int:
    """The prefix that the next step is planned with, where vLLM tells none."""
    planned: list[Any] = []
    made.steps.plan = lambda batch, *_: planned.append(batch)
    made.build(0, backends.metadata())
    return planned[0].common_prefix


def test_a_prefix_that_vllm_tells(backend: Any) -> None:
    """To a plan on a GPU; on the CPU it is found."""
    batch, *_ = backends.builder(backend, device=0).build(32, backends.metadata())
    assert batch.common_prefix == 32
    made = backends.builder(backend)
    assert not made.use_cascade_attention(**PREFIX)
    assert told_to_build(made) == 0


def test_a_prefix_that_vllm_asks_about(backend: Any) -> None:
    """It hears of none, so that it replays graphs; one step has the prefix, and not the next."""
    made = backends.builder(backend, device=0)
    assert not made.use_cascade_attention(**PREFIX)
    assert told_to_build(made) == 8000
    assert told_to_build(made) == 0
    made.use_cascade_attention(**PREFIX)
    made.use_cascade_attention(**{**PREFIX, "common_prefix_len": 16})
    assert told_to_build(made) == 0


@pytest.mark.parametrize(
    ("tokens", "apart", "told"),
    [
        (1, True, False),  # 2 rows for each KV head, in a tile of 8
        (2, True, False),
        (3, True, True),  # 6: a tile holds one request
        (8, True, True),  # 16
        (9, True, False),  # 18, in a tile of 192
        (3, False, False),  # one graph for steps of all sorts
    ],
)
def test_a_prefix_that_graphs_have_no_room_for(
    backend: Any, tokens: int, apart: bool, told: bool
) -> None:
    """vLLM is told where that is, runs the step without a graph, and tells `build`."""
    made = backends.builder(backend, device=0)
    made.vllm_config.compilation_config.cudagraph_mode = backends.Mode(apart)
    assert made.use_cascade_attention(**{**PREFIX, "query_lens": [tokens] * 16}) is told
    assert told_to_build(made) == (0 if told else 8000)
    mixed = [tokens] * 15 + [tokens + 1]  # no graph of decode steps either way
    assert not made.use_cascade_attention(**{**PREFIX, "query_lens": mixed})


@pytest.mark.parametrize(("tokens", "options", "told"), [
    (3, {}, False),  # 6 rows for each KV head, which are low tiles of that kernel
    (5, {}, True),  # 10: they would be high ones
    (3, {"sliding_window": 100}, True),  # no prefixes there
    (3, {"logits_soft_cap": 30.0}, True),
    (3, {"kv_cache_dtype": "fp8"}, True),
])  # fmt: skip
def test_a_prefix_that_a_second_kernel_has_room_for(
    backend: Any, tokens: int, options: dict[str, Any], told: bool
) -> None:
    """Where graphs hold the kernel for mixed batches, too, they lose nothing by a prefix."""
    made = backends.builder(backend, device=0, **options)
    made.steps.cascades = True
    assert made.use_cascade_attention(**{**PREFIX, "query_lens": [tokens] * 16}) is told


def test_a_prefix_beside_drafts(backend: Any) -> None:
    """Graphs of theirs know no prefixes: vLLM is told, replays none, and tells `build`."""
    made = backends.builder(backend, device=0)
    made.steps.drafts = True
    assert made.use_cascade_attention(**PREFIX)
    assert told_to_build(made) == 0


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, True),
        ({"common_prefix_len": 1024}, False),
        ({"use_alibi": True}, False),
        ({"use_local_attention": True}, False),
        ({"dcp_world_size": 2}, False),
        ({"use_sliding_window": True}, True),
    ],
    ids=str,
)
def test_when_a_prefix_is_worth_telling(
    backend: Any, changes: dict[str, Any], wanted: bool
) -> None:
    made = backends.builder(backend, device=0)
    expected = 8000 if wanted else 0
    assert not made.use_cascade_attention(**{**PREFIX, **changes})
    assert told_to_build(made) == expected
    assert not made.use_cascade_attention(*{**PREFIX, **changes}.values())
    assert told_to_build(made) == expected
    made.steps.place.fixed_split_size = 2048
    made.use_cascade_attention(**PREFIX)
    assert told_to_build(made) == 0
