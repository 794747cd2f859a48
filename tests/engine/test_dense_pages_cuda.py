# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""NVFP4 that is written as 16 bits before attention: values are exact, bounds those of codes.

Slots of no request have garbage, their scales are NaN.
"""

from __future__ import annotations

import dataclasses

import flashbsr
import numpy as np
import pytest
from cases import BF16, F16, Case
from harness import Device, attention_for
from kv_codes import INT4_64, INT8, NVFP4, build
from reference import Variant
from test_kv_codes_cuda import gpu, run

__all__ = ["gpu"]

#: So many rows that the pass is worth it; requests end inside of pages, one has no queries.
APPEND = Case(
    "append", (300, 0, 260), (1543, 77, 1001), heads=(8, 2), dims=(128, 128), dtypes=BF16,
    layout="paged", page_size=16, variant=Variant(causal=True),
)  # fmt: skip


@pytest.mark.parametrize("dtypes", [BF16, F16], ids=lambda x: x[0])
@pytest.mark.parametrize("layout", ["ragged", "paged", "table", "bounds"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_layouts(gpu: Device, kv_layout: str, layout: str, dtypes: tuple[str, str, str]) -> None:
    case = dataclasses.replace(APPEND, kv_layout=kv_layout, layout=layout, dtypes=dtypes)
    assert "scaled" not in run(gpu, case, NVFP4)[2]


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("backend", ["cuda", "fa2"])
def test_pages(gpu: Device, backend: str, page_size: int) -> None:
    case = dataclasses.replace(APPEND, page_size=page_size)
    run(gpu, case, NVFP4, backend=backend)


@pytest.mark.parametrize("change", [
    {"variant": Variant(causal=True, window_left=200)}, {"gain": 100.0}, {"scales": "head"},
    {"sinks": "extreme"}, {"dims": (64, 64)},
], ids=["window", "large", "per head", "sinks", "64"])  # fmt: skip
def test_variants(gpu: Device, change: dict[str, object]) -> None:
    run(gpu, dataclasses.replace(APPEND, **change), NVFP4)  # type: ignore[arg-type]


def test_without_room_codes_are_read_as_they_are(gpu: Device) -> None:
    assert "scaled" in run(gpu, APPEND, NVFP4, dequantize_bytes=0)[2]


@pytest.mark.parametrize("kind", [INT8, INT4_64], ids=str)
def test_other_types_stay_codes(gpu: Device, kind: object) -> None:
    assert "scaled" in run(gpu, APPEND, kind)[2]  # type: ignore[arg-type]


def test_a_captured_run_keeps_its_own_pages(gpu: Device) -> None:
    """A replay after another plan has been made and run reads the cache as it is then."""
    torch = pytest.importorskip("torch")
    coded = build(gpu.adapt(APPEND), NVFP4, NVFP4)
    problem = coded.problem
    attention = attention_for(problem, gpu.backend, kv_dtype=coded.kv_dtype)
    codes = [torch.from_numpy(np.ascontiguousarray(x)).cuda() for x in coded.kv]
    scales = {
        name: torch.from_numpy(np.ascontiguousarray(x).view(np.uint8)).cuda()
        .view(torch.float8_e4m3fn)
        for name, x in coded.options.items()
    }  # fmt: skip
    q = torch.from_numpy(problem.q.astype(np.float32)).cuda().to(torch.bfloat16)
    out = torch.empty(*q.shape[:2], 128, dtype=q.dtype, device="cuda")
    problem.plan(attention)
    attention.run(q, tuple(codes), out=out, **scales)
    assert "scaled" not in attention.explain().kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(q, tuple(codes), out=out, **scales)
    attention.plan(flashbsr.Ragged(np.array([0, 900]), np.array([0, 900])))
    attention.run(
        q[:1].expand(900, -1, -1).contiguous(), tuple(x.flatten(0, 1)[:900] for x in codes),
        **{name: x.flatten(0, 1)[:900] for name, x in scales.items()},
    )  # fmt: skip
    codes[1] ^= 0x88  # every value of V changes its sign
    wanted = -out
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
