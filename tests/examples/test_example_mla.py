# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The latent attention example: the whole program, and that its check can fail."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.mla import __main__ as program
from examples.mla.layer import Layer


def test_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main() == 0
    text = capsys.readouterr().out
    assert [line.split(" largest")[0].strip() for line in text.splitlines()[:-1]] == [
        "prefill", "decode", "sparse, top 32", "sparse, top 512",
    ]  # fmt: skip
    assert "WRONG" not in text
    assert "2304 bytes of cache; its expanded keys and values 20480" in text


def test_a_wrong_layer_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def turned(self: Layer, out: np.ndarray) -> np.ndarray:
        return np.einsum("thc,hcv->thv", out, self.expand_v[::-1])

    monkeypatch.setattr(Layer, "unabsorb", turned)
    assert program.main() == 1
    assert "WRONG" in capsys.readouterr().out
