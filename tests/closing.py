# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The last line of a test run: how many tests were skipped, for want of what; that it is fine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

#: In this order: the first that a reason matches is what was missing.
KINDS = (
    ("a GPU", r"GPU|CUDA kernels|CuPy|compute capability|sm_90a|code for sm_|cuda\.h"),
    ("PyTorch", r"torch|process groups"),
    ("JAX", r"jax|shard_map"),
    ("an engine (vLLM, SGLang, transformers)", r"vllm|sglang|transformers"),
    ("a compiler or its tools", r"compiler|pkg-config|tvm|dlpack"),
    ("a browser", r"Chromium"),
    ("FLASHBSR_SLOW=1", r"FLASHBSR_SLOW"),
)


def closing_line(reasons: Iterable[str]) -> str:
    """Give one sentence for the reasons of all skipped tests; empty where there are none."""
    counts: Counter[str] = Counter()
    for reason in reasons:
        found = (kind for kind, text in KINDS if re.search(text, reason, re.IGNORECASE))
        counts[next(found, "what this machine is not")] += 1
    if not counts:
        return ""
    parts = [f"{count} for want of {kind}" for kind, count in counts.most_common()]
    return (
        f"{sum(counts.values())} skipped: {', '.join(parts)}. That is fine: what this machine can "
        "run was run."
    )
