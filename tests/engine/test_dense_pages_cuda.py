# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Codes that are written as 16 bits before attention: NVFP4 as its values, others as codes of K,
whose scales go along, and values of V. Bounds are those of codes.

Slots of no request have garbage, their scales are NaN.
"""

from __future__ import annotations

import dataclasses

import cases
import flashbsr
import numpy as np
import pytest
from cases import BF16, F16, Case
from harness import Device, attention_for
from kv_codes import E5M2, FP8, INT4, INT4_32, INT4_64, INT8, INT8_HALF, NVFP4, Kind, build
from reference import Variant
from test_kv_codes_cuda import FP8_HALF, gpu, moved, run

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


#: Eight bits have a kernel of Hopper's of their own: the pass is worth more rows and keys.
WIDE = dataclasses.replace(
    APPEND, name="wide", q_lens=(2500, 0, 260), kv_lens=(2543, 77, 1001), heads=(16, 2),
    variant=Variant(),
)  # fmt: skip
SHORT = {"float16": "f16", "bfloat16": "bf16"}


@pytest.fixture
def hopper(gpu: Device) -> Device:
    """The pass of keys that stay codes has a kernel of sm_90a."""
    if "sm90a" not in run(gpu, APPEND, NVFP4)[2]:
        pytest.skip("a Hopper GPU has the kernel")
    return gpu


def check(gpu: Device, kind: Kind, **changes: object) -> None:
    base = APPEND if kind.dtype == "int4" else WIDE
    case = dataclasses.replace(base, **changes)  # type: ignore[arg-type]
    dim = 64 if max(case.dims) <= 64 else 128
    rows = (128, 192) if dim == 128 else (192,)
    family = "hopper_halves" if kind.dtype == "int4" and kind.group else "hopper_scaled"
    names = [f"{family}_sm90a_d{dim}_{SHORT[case.dtypes[0]]}_r{n}_plain" for n in rows]
    assert run(gpu, case, kind)[2] in names


@pytest.mark.parametrize("kind", [INT4, INT4_64], ids=str)
@pytest.mark.parametrize("dtypes", [BF16, F16], ids=lambda x: x[0])
@pytest.mark.parametrize("layout", ["ragged", "paged", "table", "bounds"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_keys_that_stay_codes(
    hopper: Device, kv_layout: str, layout: str, dtypes: tuple[str, str, str], kind: Kind
) -> None:
    check(hopper, kind, layout=layout, dtypes=dtypes, kv_layout=kv_layout)


@pytest.mark.parametrize(("kind", "dtypes", "layout"), [
    (INT8, BF16, "paged"), (INT8_HALF, F16, "ragged"), (FP8, F16, "table"),
    (FP8_HALF, BF16, "paged"),
], ids=str)  # fmt: skip
def test_keys_of_eight_bits(
    hopper: Device, kind: Kind, dtypes: tuple[str, str, str], layout: str
) -> None:
    check(hopper, kind, dtypes=dtypes, layout=layout)


@pytest.mark.parametrize(("kind", "dims"), [
    (INT4_32, (64, 64)), (INT4, (64, 64)), (INT8, (112, 112)),
], ids=str)  # fmt: skip
def test_coded_head_dims(hopper: Device, dims: tuple[int, int], kind: Kind) -> None:
    check(hopper, kind, dims=dims)


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_coded_pages(hopper: Device, page_size: int) -> None:
    check(hopper, INT4_64, page_size=page_size)


@pytest.mark.parametrize("change", [
    {"variant": Variant(window_left=1500)}, {"gain": 100.0}, {"scales": "head"},
    {"scales": "number"}, {"sinks": "extreme"}, {"variant": Variant(sm_scale=-0.1)},
], ids=["window", "large", "per head", "numbers", "sinks", "negative"])  # fmt: skip
def test_coded_variants(hopper: Device, change: dict[str, object]) -> None:
    check(hopper, INT4_64, **change)


@pytest.mark.parametrize("halves", [
    (1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (1.0, 1e-30), (1e-30, 1.0), (1.0, 1e-12), (1e-12, 1.0),
    (1e-25, 1e-38),
], ids=str)  # fmt: skip
def test_halves_of_any_size(
    hopper: Device, monkeypatch: pytest.MonkeyPatch, halves: tuple[float, float]
) -> None:
    """The second half's scale divides the first's, unless it is nothing beside it."""
    of_dims = np.repeat(np.array(halves, np.float32), 64)
    usual = cases.build

    def shrunk(case: Case) -> cases.Problem:
        problem = usual(case)
        return dataclasses.replace(
            problem,
            kv=(problem.kv[0] * of_dims, problem.kv[1]),
            requests=[(q, k * of_dims, v, mask) for q, k, v, mask in problem.requests],
        )

    monkeypatch.setattr(cases, "build", shrunk)
    check(hopper, INT4_64)


@pytest.mark.parametrize(("kind", "change"), [
    (E5M2, {}), (INT4_32, {}), (INT8, {"variant": Variant(causal=True, logits_soft_cap=20.0)}),
    (INT4_64, {"variant": Variant(causal=True, pos_encoding_mode="ALIBI")}),
], ids=str)  # fmt: skip
def test_what_is_read_as_codes(gpu: Device, kind: Kind, change: dict[str, object]) -> None:
    """Types, groups of scales and hooks that codes in 16 bits have no kernel for."""
    kernel = run(gpu, dataclasses.replace(APPEND, **change), kind)[2]  # type: ignore[arg-type]
    assert "scaled" in kernel
    assert not any(f"_{short}_r" in kernel for short in SHORT.values())


def test_one_scale_of_a_row_and_two_in_turn(hopper: Device) -> None:
    """One has a kernel of its own, until two have come: theirs is right for both."""
    coded = [build(hopper.adapt(APPEND), kind, kind) for kind in (INT4, INT4_64)]
    attention = attention_for(coded[0].problem, hopper.backend, kv_dtype="int4")
    coded[0].problem.plan(attention)
    families, found = [], []
    for which in (0, 0, 1, 0, 1):
        x = coded[which]
        options = {name: moved(hopper, y) for name, y in x.options.items()}
        out = attention.run(hopper.put(x.problem.q), moved(hopper, x.kv), **options)
        families.append(attention.explain().kernel.split("_sm90a")[0])
        found.append(hopper.get(out).astype(np.float32))
    assert families == ["hopper_scaled"] * 2 + ["hopper_halves"] * 3
    for which, out in zip((0, 0, 1, 0, 1), found, strict=True):
        alone = run(hopper, APPEND, (INT4, INT4_64)[which])[0].astype(np.float32)
        np.testing.assert_allclose(out, alone, rtol=2**-7, atol=2**-9)


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
