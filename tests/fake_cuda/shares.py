# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Which kernels shares of keys take. test_fake_cuda.py runs this file."""

from __future__ import annotations

import os
from typing import Any

import flashbsr
import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("fake_torch")
HOPPER = os.environ["FAKE_CUDA_CAPABILITY"] == "90"


def kernel(tokens: int, dims: dict[str, Any], **spec: Any) -> str:
    """Of 64 requests with so many query tokens each, over the second of two ranks' keys."""
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(sm_scale=0.1, **spec),
        flashbsr.TaskInfo(
            **dims, backend="cuda", q_dtype="bfloat16", kv_dtype="bfloat16",
            context_parallel=(2, 1, 16),
        ),
    )  # fmt: skip
    lens = np.full(64, 1000)
    layout = flashbsr.Ragged(np.arange(65) * tokens, np.concatenate([[0], np.cumsum(lens)]))
    attention.plan(layout, q_positions=2 * lens - tokens)
    return str(attention._engine.kernel_name())


HEADS = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128}
LATENT = {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512,
          "latent": True}  # fmt: skip


@pytest.mark.parametrize("spec", [{"causal": True}, {"causal": True, "window_left": 300}])
def test_what_rows_see_every_kernel_knows(spec: dict[str, Any]) -> None:
    assert kernel(1, HEADS, **spec).startswith("decode")
    assert kernel(512, HEADS, **spec).startswith("hopper" if HOPPER else "prefill")
    assert kernel(3, LATENT, **spec).startswith("latent" if HOPPER else "latent_mma")


def test_where_keys_are_streaming_kernels_know() -> None:
    assert kernel(512, HEADS, causal=True, pos_encoding_mode="ALIBI").startswith("decode")
    with pytest.raises(flashbsr.UnsupportedError, match="context_parallel"):
        kernel(3, LATENT, causal=True, pos_encoding_mode="ALIBI")
