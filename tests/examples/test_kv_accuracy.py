# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`tools/kv_accuracy.py`: it attends to the dequantised cache, and its tables are the docs'."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from kv_codes import Kind, decode, encode

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import kv_accuracy
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return kv_accuracy


def test_attention_reads_what_the_row_says(tool: ModuleType, rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((9, heads, 32)).astype(np.float32) for heads in (4, 2, 2))
    exact = tool.dense.causal_attention(*(x.astype(np.float64) for x in (q, k, v)))
    errors = {}
    for cache in tool.CACHES:
        attend = tool.CachedAttention(cache, (4, 2, 32), True)
        attend.plan([9])
        got = attend(q, k, v)
        errors[cache.name] = float(np.abs(got - exact).max())
        kinds = cache.k in ("int8", "int4") and cache.scale == "float32" and not cache.rotated
        if kinds:
            read = (decode(*encode(x, Kind(t)), Kind(t)) for x, t in ((k, cache.k), (v, cache.v)))
            expected = tool.dense.causal_attention(q.astype(np.float64), *read)
            np.testing.assert_allclose(got, expected, atol=2e-5)
    assert errors["float32"] < 1e-5 < errors["int8"] < 0.05 < errors["int4"] < 1


def test_a_row_of_the_language_model(tool: ModuleType) -> None:
    model = tool.LanguageModel(windows=1, prompts=1, answer=8)
    rows = {c.name: model.row(c) for c in tool.CACHES if c.name in ("float32", "int8", "int4")}
    assert rows["float32"]["equal"] == 1
    assert rows["float32"]["same"] == 8
    assert rows["float32"]["error"] < 1e-5
    assert abs(rows["float32"]["divergence"]) < 1e-9
    for name in ("error", "divergence"):
        assert rows["float32"][name] < rows["int8"][name] < rows["int4"][name] / 4
    assert rows["int4"]["equal"] < rows["int8"]["equal"] <= 1


def test_a_row_of_the_encoder(tool: ModuleType) -> None:
    try:
        encoder = tool.Encoder(12)
    except FileNotFoundError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    rows = {c.name: encoder.row(c) for c in tool.CACHES if c.name in ("float32", "int8", "int4")}
    assert rows["float32"]["worst"] < 1e-5
    assert rows["float32"]["nearest"] == 1
    assert rows["float32"]["distance"] < rows["int8"]["distance"] < rows["int4"]["distance"] / 4


def test_the_documentation_has_every_row(tool: ModuleType) -> None:
    text = tool.DOCS.read_text()
    tables = text.split(f"<!-- {tool.MARKER} -->")[1].split(f"<!-- /{tool.MARKER} -->")[0]
    names = re.findall(r"^\| ([^|]+?) \|", tables, re.M)
    expected = ["cache", "---", *(c.name for c in tool.CACHES)]
    assert names == 2 * expected
