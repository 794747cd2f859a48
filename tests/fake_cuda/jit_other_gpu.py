# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A GPU that the build has no kernels for: all are compiled. test_fake_cuda.py runs this file.

With ``FAKE_CUDA_CAPABILITY=89`` and a build for 9.0 alone.
"""

from __future__ import annotations

from typing import Any

import flashbsr
import pytest
from flashbsr.jit import cuda as jit_cuda
from flashbsr.jit.kernel_source import Wish

from fake_cuda.fake import Driver
from fake_cuda.world import DECODE, PREFILL, World, check, planned

pytestmark = pytest.mark.usefixtures("fake_torch")


@pytest.mark.parametrize(
    ("shape", "options", "kernel"),
    [
        (DECODE, {}, "decode_sm80_d64_f16_r8_plain"),
        (DECODE, {"logits_soft_cap": 5.0}, "decode_sm80_d64_f16_r8_standard"),
        (DECODE, {"activation": "sigmoid"}, "decode_sm80_d64_f16_r8_sigmoid_alone"),
        (PREFILL, {}, "prefill_sm80_d64_f16_r64_plain"),
        (PREFILL, {"pos_encoding_mode": "ROPE_LLAMA"}, "prefill_sm80_d64_f16_r64_standard"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_built_in_variants_are_compiled(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, shape: Any, options: Any, kernel: str
) -> None:
    if any(row["family"] == "decode" for row in flashbsr._core.cuda_kernels() if _runs(row)):
        pytest.skip("this build has kernels for 8.9")
    wishes: list[Wish] = []

    def compile_nothing(wish: Wish, text: str, struct: str) -> bytes:
        assert text == struct == ""
        wishes.append(wish)
        return b"not empty"

    monkeypatch.setattr(jit_cuda, "cuda_kernel", compile_nothing)
    world = World()
    attention, batch, rows = planned(world, shape, kv_dtype="float16", **options)
    out = attention.run(world.q[:rows], world.cache)
    driver.drain()
    check(world, out, batch, rows, **options)
    assert driver.kernel == kernel
    assert [(wish.name, wish.target) for wish in wishes] in ([], [(kernel, "sm_89")])


def _runs(row: dict[str, Any]) -> bool:
    return any(target in row["targets"].split() for target in ("sm_80", "sm_86", "sm_89"))
