# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles of latent attention by a GPU's shared memory. test_fake_cuda.py runs this file.

With ``FAKE_CUDA_CAPABILITY`` of 80, 89, 90 and 120, whose blocks have 163, 99, 227 and 99 KB.
"""

from __future__ import annotations

import os

import flashbsr
import numpy as np
import pytest
import torch
from flashbsr.jit import cuda as jit_cuda

from fake_cuda.fake import Driver

pytestmark = pytest.mark.usefixtures("fake_torch")
CAPABILITY = os.environ["FAKE_CUDA_CAPABILITY"]
ROOMY = CAPABILITY in ("80", "90")


def kernel(
    heads: int, latent: int, tail: int, backend: str, count: int = 128, kv_len: int = 2000,
    kv: str = "bfloat16",
) -> str:  # fmt: skip
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(sm_scale=0.1),
        flashbsr.TaskInfo(
            heads, 1, latent + tail, head_dim_vo=latent, latent=True, backend=backend,
            q_dtype="bfloat16", kv_dtype=kv,
        ),
    )  # fmt: skip
    attention.plan(flashbsr.Ragged(None, np.arange(count + 1, dtype=np.int32) * kv_len))
    return str(attention._engine.kernel_name())


@pytest.mark.parametrize("backend", ["cuda", "fa2"])
@pytest.mark.parametrize(("heads", "rows"), [(8, 16), (16, 16), (24, 32), (40, 64), (128, 64)])
def test_the_smallest_that_holds_the_rows(backend: str, heads: int, rows: int) -> None:
    target = "sm_80" if CAPABILITY in ("80", "89") else "sm_90"
    if not any(target in row["targets"].split() for row in flashbsr._core.cuda_kernels()):
        pytest.skip(f"this build has no kernels for {target}")
    name = kernel(heads, 512, 64, backend)
    if CAPABILITY == "90" and backend == "cuda":
        assert name == "latent_sm90a_d576x512_bf16_r64_plain"
        return
    rows = rows if ROOMY else 16
    assert name == f"latent_mma_{target.replace('_', '')}_d576x512_bf16_r{rows}_plain"


@pytest.mark.parametrize("backend", ["cuda", "fa2"])
@pytest.mark.parametrize("tail", [0, 64])
@pytest.mark.parametrize("latent", [256, 320, 384])
@pytest.mark.parametrize(("heads", "rows"), [(8, 16), (32, 32), (64, 64)])
def test_other_dims_are_compiled(
    backend: str, tail: int, latent: int, heads: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit_cuda, "cuda_kernel", lambda *_: b"not empty")
    if not ROOMY:
        rows = min(rows, 64 if latent + tail <= 320 else 32)
    arch = "sm90" if CAPABILITY == "90" else "sm80"
    dims = f"{latent + tail}x{latent}" if tail else str(latent)
    assert kernel(heads, latent, tail, backend) == f"latent_mma_{arch}_d{dims}_bf16_r{rows}_plain"


@pytest.mark.parametrize("backend", ["cuda", "fa2"])
@pytest.mark.parametrize("heads", [8, 16, 40, 128])
@pytest.mark.parametrize(
    ("kv", "family"), [("float8_e4m3fn", "latent_mma"), ("fp8_ds_mla", "latent_mma_packed")]
)
def test_codes_have_16_rows(
    backend: str, heads: int, kv: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every GPU; Hopper has kernels of its own, for few rows of bf16 and for more."""
    monkeypatch.setattr(jit_cuda, "cuda_kernel", lambda *_: b"not empty")
    name = kernel(heads, 512, 64, backend, kv=kv)
    arch = "sm80" if CAPABILITY in ("80", "89") else "sm90"
    if CAPABILITY == "90" and backend == "cuda":
        many = {"latent_mma": "latent_codes", "latent_mma_packed": "latent_packed"}[family]
        few = family.replace("mma", "few")
        assert name.startswith(f"{few if heads <= 16 else many}_sm90a_")
    else:
        assert name == f"{family}_{arch}_d576x512_e4m3_r16_plain"


@pytest.mark.parametrize(("count", "kv_len", "rows"), [
    (1, 1024, 32), (1, 8192, 32), (16, 1024, 64), (16, 8192, 64), (64, 1024, 64),
])  # fmt: skip
def test_the_price_decides(count: int, kv_len: int, rows: int) -> None:
    if CAPABILITY != "90":
        pytest.skip("measured on an H200")
    assert f"_r{rows}_" in kernel(128, 512, 64, "fa2", count, kv_len)


@pytest.mark.parametrize(("kv", "names"), [
    ("bfloat16", ("latent_few_sm90a_d576x512_bf16_r16", "latent_sm90a_d576x512_bf16_r64")),
    ("fp8_ds_mla", ("latent_few_packed_sm90a", "latent_packed_sm90a")),
])  # fmt: skip
def test_few_short_requests_have_few_rows(kv: str, names: tuple[str, str]) -> None:
    if CAPABILITY != "90":
        pytest.skip("of Hopper's kernels")
    few, many = names
    for count, kv_len, name in (1, 1024, few), (2, 1024, few), (16, 1024, many), (64, 8192, many):
        assert kernel(128, 512, 64, "cuda", count, kv_len, kv).startswith(name)
    for heads in (8, 16):
        assert kernel(heads, 512, 64, "cuda", 1, 1024, kv).startswith(few)


@pytest.mark.parametrize(("count", "blocks"), [(16, 4), (17, 3), (20, 3), (30, 2)])
def test_clusters_of_three(driver: Driver, count: int, blocks: int) -> None:
    """The driver says that 33 of four run at once, 41 of three, 66 of two."""
    if CAPABILITY != "90":
        pytest.skip("of Hopper's kernels")
    task = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16", "head_dim_vo": 512, "latent": True}
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(sm_scale=0.1), flashbsr.TaskInfo(64, 1, 576, backend="cuda", **task)
    )
    attention.plan(flashbsr.Ragged(None, np.arange(2 * count + 1, dtype=np.int32) * 1000))
    attention.run(
        torch.zeros(2 * count, 64, 576, dtype=torch.bfloat16),
        torch.zeros(2000 * count, 576, dtype=torch.bfloat16),
    )
    driver.drain()
    assert driver.kernel == "latent_sm90a_d576x512_bf16_r64_plain"
    assert (driver.cluster, attention.plan_info.policy) == (blocks, "cluster")


def test_hopper_has_kernels_of_its_own() -> None:
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(sm_scale=0.1),
        flashbsr.TaskInfo(64, 1, 320, head_dim_vo=256, latent=True, backend="fa3"),
    )
    with pytest.raises(flashbsr.UnsupportedError, match="backend='fa3'"):
        attention.plan(flashbsr.Ragged(None, np.array([0, 100], np.int32)))
