# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings run as printed."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import flashbsr
import pytest
from harness import framework

MODULES = [
    module.name
    for module in pkgutil.walk_packages(flashbsr.__path__, "flashbsr.", onerror=lambda name: None)
    # CuPy needs a GPU; __main__ is the command itself.
    if module.name not in {"flashbsr.arrays.cupy", "flashbsr.__main__"}
]
OF_TORCH = {
    "flashbsr.arrays.traced",
    "flashbsr.distributed",
    "flashbsr.integrations.flex_attention",
}
OF_ENGINES = {
    f"flashbsr.integrations.vllm.{name}" for name in ("backend", "current", "mla", "v0_26", "v0_32")
}


@pytest.mark.parametrize("name", ["flashbsr", *MODULES])
def test_examples(name: str) -> None:
    needed = [kind for kind in ("jax", "torch") if kind in name.split(".")]
    if name in OF_TORCH or ".vllm." in name or ".sglang." in name:
        needed = ["torch"]
    if "transformers" in name.split("."):
        pytest.importorskip("transformers", reason="transformers is not installed")
    for kind in needed:
        framework(kind)
    if name in OF_ENGINES:
        pytest.importorskip("vllm")  # not in CI: tools/engines.py has a record
    if name in ("flashbsr.integrations.sglang.backend", "flashbsr.integrations.sglang.pools"):
        pytest.importorskip("sglang")  # likewise
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_public_names_have_examples() -> None:
    """Each public function and class shows how it is called; twins refer to their first."""
    finder = doctest.DocTestFinder(recurse=False)
    without = [
        name
        for name in flashbsr.__all__
        if callable(getattr(flashbsr, name))
        and not name.endswith(("Error", "_inplace"))
        and "llama31" not in name
        and not any(test.examples for test in finder.find(getattr(flashbsr, name), name))
    ]
    assert not without
