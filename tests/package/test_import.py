# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What `import flashbsr` costs and brings in, in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys

import flashbsr

FRAMEWORKS = ["torch", "jax", "jaxlib", "cupy", "ml_dtypes", "matplotlib", "scipy"]
SCRIPT = f"""
import json, sys, time
begin = time.thread_time()
import numpy
between = time.thread_time()
import flashbsr
end = time.thread_time()
times = [between - begin, end - between]
print(json.dumps([*times, [name for name in {FRAMEWORKS} if name in sys.modules]]))
"""
USE = f"""
import sys
import numpy as np, flashbsr
q, kv = np.ones((1, 1, 2, 8), np.float32), np.ones((1, 5, 1, 8), np.float32)
out = flashbsr.attention(q, kv, kv)
assert type(out) is np.ndarray and (out == 1).all(), out
print([name for name in {FRAMEWORKS} if name in sys.modules])
"""


def fresh(script: str) -> str:
    """What a new interpreter prints; it runs where no file shadows the installed package."""
    return subprocess.run(
        [sys.executable, "-I", "-c", script],
        check=True,
        capture_output=True,
        text=True,
        cwd="/",
        timeout=60,
    ).stdout


def test_import_is_fast_and_lean() -> None:
    """It takes half as long as NumPy's own (24 ms, 51): less than three quarters, in CPU time.

    A number of seconds would fail on a machine that is busy or slow, where NumPy is slow, too.
    """
    results = [json.loads(fresh(SCRIPT)) for _ in range(5)]
    assert all(frameworks == [] for *_, frameworks in results)
    assert min(own / numpy for numpy, own, _ in results) < 0.75


def test_use_with_numpy_imports_no_framework() -> None:
    assert fresh(USE).strip() == "[]"


def test_all_names_exist() -> None:
    """`__all__` is true, sorted out of duplicates, and holds the names that the field knows."""
    names = flashbsr.__all__
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(flashbsr, name) is not None
    assert set(names) >= {
        "Attention",
        "AttentionSpec",
        "TaskInfo",
        "Ragged",
        "Paged",
        "BlockTable",
        "Levels",
        "Bsr",
        "attention",
        "merge_state",
        "merge_state_in_place",
        "merge_states",
        "append_paged_kv_cache",
        "get_batch_indices_positions",
        "get_seq_lens",
        "packbits",
        "segment_packbits",
        "apply_rope",
        "apply_rope_inplace",
        "apply_rope_pos_ids",
        "apply_rope_pos_ids_inplace",
        "apply_llama31_rope",
        "apply_llama31_rope_inplace",
        "apply_llama31_rope_pos_ids",
        "apply_llama31_rope_pos_ids_inplace",
        "apply_rope_with_cos_sin_cache",
        "apply_rope_with_cos_sin_cache_inplace",
        "get_include",
        "get_cmake_dir",
    }
    for name in names:
        thing = getattr(flashbsr, name)
        if callable(thing):
            assert thing.__doc__, name


SUB_INTERPRETER = """
import sys
import flashbsr, numpy as np
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
there = interpreters.create()
try:  # an exception before Python 3.13, a description of it since
    found = interpreters.run_string(there, "import flashbsr._core")
except Exception as error:
    found = error
text = str(getattr(found, "formatted", found))
interpreters.destroy(there)
one = np.ones((1, 2, 2, 8), np.float32)
assert (flashbsr.attention(one, one, one) == 1).all()
print(text)
"""


def test_a_sub_interpreter_is_refused_and_leaves_the_main_one_as_it_was() -> None:
    text = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SUB_INTERPRETER],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    refusals = "flashbsr: got a sub-interpreter", "does not support loading in subinterpreters"
    # NumPy, which comes first in any other import, has a sentence of its own.
    assert any(words in text for words in (*refusals, "cannot load module more than once")), text
