# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles of latent attention by a GPU's shared memory. test_fake_cuda.py runs this file.

With ``FAKE_CUDA_CAPABILITY`` of 80 and of 89, whose blocks have 163 and 99 KB.
"""

from __future__ import annotations

import os

import flashbsr
import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("fake_torch")
CAPABILITY = os.environ["FAKE_CUDA_CAPABILITY"]
MOST = {"80": 64, "89": 16}[CAPABILITY]


@pytest.mark.parametrize("backend", ["cuda", "fa2"])
@pytest.mark.parametrize(("heads", "rows"), [(8, 16), (16, 16), (24, 32), (40, 64), (128, 64)])
def test_the_smallest_that_holds_the_rows(backend: str, heads: int, rows: int) -> None:
    if not any("sm_80" in row["targets"].split() for row in flashbsr._core.cuda_kernels()):
        pytest.skip("this build has no kernels for 8.0")
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(sm_scale=0.1),
        flashbsr.TaskInfo(
            heads, 1, 576, head_dim_vo=512, latent=True, backend=backend, q_dtype="float16",
            kv_dtype="float16",
        ),
    )  # fmt: skip
    attention.plan(flashbsr.Ragged(None, np.array([0, 100, 300], np.int32)))
    name = f"latent_mma_sm80_d576x512_f16_r{min(rows, MOST)}_plain"
    assert attention._engine.kernel_name() == name


def test_hopper_has_kernels_of_its_own() -> None:
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(sm_scale=0.1),
        flashbsr.TaskInfo(64, 1, 576, head_dim_vo=512, latent=True, backend="fa3"),
    )
    with pytest.raises(flashbsr.UnsupportedError, match="backend='fa3'"):
        attention.plan(flashbsr.Ragged(None, np.array([0, 100], np.int32)))
