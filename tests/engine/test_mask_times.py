# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""tools/mask_times.py compares what says the same: here on the CPU, with FlexAttention as it is."""

from __future__ import annotations

import pytest
from harness import framework
from toolchain import load_tool

TOOL = load_tool("mask_times")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "problem", [TOOL.window(2, 256, 100), TOOL.documents(3, 128)], ids=lambda p: p.name
)
def test_all_ways_agree(problem) -> None:
    torch = framework("torch")
    from torch.nn.attention.flex_attention import flex_attention

    qkv = TOOL.arrays(torch, problem, "cpu")
    found = {name: run().float() for name, run in TOOL.ours(torch, problem, *qkv).items()}
    peer = TOOL.flex(torch, problem, *(x.float() for x in qkv), flex_attention)()
    exact = TOOL.as_rows(peer, qkv[0])
    assert len(found) == 3
    for name, out in found.items():
        torch.testing.assert_close(out, exact, atol=2e-2, rtol=2e-2, msg=name)


def test_what_cannot_run_is_said(monkeypatch) -> None:
    torch = framework("torch")

    def refuse(*_, **__):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(torch, "compile", refuse)
    gpu = type("Gpu", (), {"torch": torch})
    line = TOOL.time_flex(gpu, TOOL.window(1, 128, 10), (None,) * 3, False)
    assert line == "FlexAttention did not run: RuntimeError: Failed to find C compiler."
