# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""How `_core.merge_peers` launches, and what it refuses, on the fake driver."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flashbsr import _core, errors
from flashbsr.arrays import torch as adapter

from fake_cuda.fake import Driver

pytestmark = pytest.mark.usefixtures("fake_torch")
ROWS, ROW_BYTES = 40000, 512


def launch(
    tokens: int, heads: int = 4, mine: int = 4, *, ranks: int = 2, dim: int = 64, travel: str = ""
) -> None:
    """Merge zeros; the fake driver does not run the kernel, and says so."""
    peers = _core.Peers([n << 30 for n in range(1, ranks + 1)], 1, ROWS, ROW_BYTES, 0, 0, 1000)
    arrays: list[Any] = [torch.zeros(tokens, n, dim) for n in (heads, mine)]
    arrays[1:1] = [torch.zeros(tokens, heads)]
    arrays.append(torch.zeros(tokens, mine))
    exported = [adapter.export(x, n > 1) for n, x in enumerate(arrays)]
    _core.merge_peers(*exported, peers, travel or "float32", False, 0)


@pytest.mark.parametrize(
    ("tokens", "dim", "travel", "blocks"),
    [
        (1, 64, "float32", 1),  # 4 rows of 16 units
        (16, 128, "bfloat16", 4),  # 64 rows of 16: a lane has one
        (512, 128, "float32", 256),  # 65,536 units
        (513, 128, "bfloat16", 129),  # a lane has one of 32,832
        (1025, 128, "bfloat16", 129),  # two of 65,600
        (9999, 128, "float32", 264),  # as many as 132 SMs run at once
    ],
)
def test_the_grid(driver: Driver, tokens: int, dim: int, travel: str, blocks: int) -> None:
    with pytest.raises(errors.CudaError, match="merge_peers"):
        launch(tokens, dim=dim, travel=travel)
    kinds = {"float32": "f32", "bfloat16": "f32xbf16"}
    assert driver.kernel == f"merge_peers_sm75_{kinds[travel]}"
    assert driver.grid == blocks
    assert driver.block == (256, 0)
    assert driver.programmatic


def test_nothing_is_launched_for_no_rows(driver: Driver) -> None:
    before = driver.calls("cuLaunchKernelEx")
    launch(0)
    assert driver.calls("cuLaunchKernelEx") == before


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"tokens": 10001}, errors.CapacityError, "40004 rows of 256 bytes"),
        ({"tokens": 1, "dim": 136}, errors.CapacityError, "4 rows of 544 bytes"),
        ({"tokens": 1, "heads": 5, "mine": 5}, errors.UnsupportedError, "divide the 5 heads"),
        ({"tokens": 1, "heads": 34, "mine": 34, "ranks": 17}, errors.UnsupportedError, "most 16"),
        ({"tokens": 1, "heads": 4, "mine": 3}, errors.ShapeError, r"\(1, 2, 64\)"),
        ({"tokens": 2, "dim": 66}, errors.ShapeError, "rows of whole 16 bytes"),
    ],
)
def test_what_it_refuses(
    driver: Driver, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    before = driver.calls("cuLaunchKernelEx")
    with pytest.raises(error, match=text):
        launch(**given)
    assert driver.calls("cuLaunchKernelEx") == before
