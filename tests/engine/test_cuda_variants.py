# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Users' variants on a GPU: every kernel family, head dim and type, compiled by NVRTC.

The other files of variants run their cases on every device too; here is what kernels differ in.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import flashbsr
import numpy as np
import pytest
import reference
from cases import Case
from flashbsr import AttentionSpec, errors
from flashbsr.jit import cache
from harness import DEVICES, check_variant, framework
from reference import Hooks, Variant

GPU = next((device for device in DEVICES if device.is_cuda), None)
if GPU is None:
    pytest.skip("no GPU, or a build or a PyTorch without CUDA", allow_module_level=True)

torch = framework("torch")

CAUSAL = Variant(causal=True)
FP8_KV = ("float16", "float8_e4m3fn", "float16")
BF16_FP8_KV = ("bfloat16", "float8_e4m3fn", "bfloat16")
HEADS = (8, 2)

SIGMOID = """
struct FlashSigmoid : VariantBase {
  static constexpr bool use_softmax = false;
  template <class M> auto activation(typename M::Float x) const { return M::sigmoid(x + bias); }
};
"""
# Weights beyond what fp16 holds once it is scaled up, and negative ones.
LINEAR = """
struct Linear : VariantBase {
  static constexpr bool use_softmax = false;
  template <class M> auto activation(typename M::Float x) const { return slope * x; }
};
"""
SOFT_CAP = """
struct SoftCap : VariantBase {
  template <class M>
  typename M::Float logits_transform(typename M::Float x, const LogitsAt<M>& at) const {
    return cap * M::tanh(x / cap);
  }
};
"""
TABLE = """
struct Table : VariantBase {
  template <class M>
  typename M::Float logits_transform(typename M::Float x, const LogitsAt<M>& at) const {
    return x + M::gather(bias, at.q_head, M::min(M::abs(at.kv_position - at.q_position),
                                                 M::splat(63)));
  }
  template <class M>
  typename M::Bool logits_mask(const LogitsAt<M>& at) const {
    return M::logical_not(M::gather(hidden, at.kv_position));
  }
};
"""
SLOPES = (0.3 * np.random.default_rng(5).random(16)).astype(np.float32)
BIAS = np.random.default_rng(6).standard_normal((16, 64)).astype(np.float32)
HIDDEN = np.random.default_rng(7).random(5000) < 0.3


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHBSR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("FLASHBSR_QUIET", "1")
        yield


@functools.cache
def variant(name: str, causal: bool, window: int) -> tuple[AttentionSpec, Hooks, dict[str, Any]]:
    """Spec, its meaning in NumPy, and its extras on the GPU."""
    fields = {"causal": causal, "window_left": window}
    if name == "sigmoid":
        spec = AttentionSpec.from_source(SIGMOID, extras={"bias": "float32"}, **fields)

        def sigmoid(x: np.ndarray) -> np.ndarray:
            with np.errstate(over="ignore"):
                return 1 / (1 + np.exp(-(x - x.dtype.type(1.5))))

        return spec, Hooks(activation=sigmoid), {"bias": -1.5}
    if name == "linear":
        spec = AttentionSpec.from_source(LINEAR, extras={"slope": "float32"}, **fields)
        return spec, Hooks(activation=lambda x: x * x.dtype.type(3)), {"slope": 3.0}
    if name == "soft_cap":
        spec = AttentionSpec.from_source(SOFT_CAP, extras={"cap": "float32"}, **fields)
        return spec, Hooks(score=lambda x, *_: 5 * np.tanh(x / 5)), {"cap": 5.0}
    if name == "table":
        extras = {"bias": ("float32", 2), "hidden": ("bool", 1)}
        spec = AttentionSpec.from_source(TABLE, extras=extras, **fields)
        on_gpu = {"bias": torch.from_numpy(BIAS).cuda(), "hidden": torch.from_numpy(HIDDEN).cuda()}
        return spec, Hooks(), on_gpu
    assert name == "alibi"
    slopes = torch.from_numpy(SLOPES).cuda()

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, q_position: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_position)

    return AttentionSpec.from_functions(score_mod=alibi, **fields), Hooks(), {}


def hooks_for(name: str, hooks: Hooks, case: Case) -> Hooks:
    """Those that need a request's lengths."""

    def distance(b: int, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        return kv - (case.kv_lens[b] - case.q_lens[b] + q)

    if name == "alibi":
        return Hooks(score=lambda x, b, h, q, kv: x + SLOPES[h] * distance(b, q, kv))
    if name == "table":
        return Hooks(
            score=lambda x, b, h, q, kv: x + BIAS[h, np.minimum(np.abs(distance(b, q, kv)), 63)],
            mask=lambda *at: ~HIDDEN[at[-1]],
        )
    return hooks


def check(name: str, case: Case, backend: str = "cuda") -> None:
    spec, hooks, extras = variant(name, case.variant.causal, case.variant.window_left)
    device = dataclasses.replace(GPU, backend=backend)
    check_variant(spec, hooks_for(name, hooks, case), case, device, **extras)


NAMES = ("sigmoid", "linear", "soft_cap", "table", "alibi")
SPLIT = {"fixed_split_size": 32}
DECODE = cases.DECODE.but("gqa", heads=HEADS)
PREFILL = cases.PREFILL.but("gqa", heads=HEADS)
SHAPES = [
    DECODE.but("bf16"),
    DECODE.but("f16-128", dims=(128, 128), dtypes=cases.F16),
    DECODE.but("split", dims=(128, 128), task={"fixed_split_size": 64}),
    PREFILL.but("bf16-128", dims=(128, 128), dtypes=cases.BF16),
    PREFILL.but("f16-128", dims=(128, 128), dtypes=cases.F16),
    PREFILL.but("split", dims=(128, 128), dtypes=cases.BF16, task=SPLIT),
    cases.MIXED.but("empty", dtypes=cases.BF16),
]


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.name)
@pytest.mark.parametrize("name", NAMES)
def test_variants(name: str, case: Case) -> None:
    check(name, case)


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("dims", [(64, 64), (72, 40), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("name", ["sigmoid", "alibi"])
def test_families_and_head_dims(name: str, dims: tuple[int, int], backend: str) -> None:
    """192x128 has a template of its own in one of them."""
    if backend == "fa3" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma kernels need compute capability 9.0")
    check(name, PREFILL.but(f"{dims}", dims=dims, dtypes=cases.BF16), backend)


@pytest.mark.parametrize("dtypes", [cases.F16, cases.BF16, FP8_KV], ids=["f16", "bf16", "fp8"])
@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=lambda c: c.name)
@pytest.mark.parametrize("dims", [(512, 512), (320, 264)], ids=str)
def test_wide_heads(dims: tuple[int, int], case: Case, dtypes: tuple[str, str, str]) -> None:
    """Two warps share rows, each with its half of the output's columns."""
    stacked = dims[0] == dims[1]
    case = case.but(f"{dims}", dims=dims, dtypes=dtypes, layout="paged", stacked=stacked)
    check("soft_cap", case)
    check("soft_cap", case.but("split", task={"fixed_split_size": 64}))


@pytest.mark.parametrize("dtypes", [FP8_KV, BF16_FP8_KV], ids=["f16", "bf16"])
@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=lambda c: c.name)
@pytest.mark.parametrize("name", ["soft_cap", "table", "linear"])
def test_float8_cache(name: str, case: Case, dtypes: tuple[str, str, str]) -> None:
    check(name, case.but("fp8", dims=(128, 128), dtypes=dtypes, layout="paged"))


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=lambda c: c.name)
@pytest.mark.parametrize("name", ["soft_cap", "table"])
def test_masks_sinks_scales_and_windows_go_with_it(name: str, case: Case) -> None:
    case = case.but("all", dims=(128, 128), dtypes=cases.BF16, sinks="extreme", scales="head")
    check(name, case.but("window", variant=Variant(causal=True, window_left=40)))
    if not case.decode:
        check(name, case.but("mask", mask="bool", variant=Variant()))


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=lambda c: c.name)
@pytest.mark.parametrize("name", ["soft_cap", "sigmoid"])
def test_logits_of_thousands(name: str, case: Case) -> None:
    check(name, case.but("steep", dims=(128, 128), dtypes=cases.BF16, gain=300.0))


ROWS = """
struct Rows : VariantBase {
  template <class Row>
  void normalise(Row x, int dim) const {
    float sum = 0;
    for (int d = 0; d < dim; ++d) sum += x[d] * x[d];
    const float scale = 1.0f / sqrt_of(sum / dim + 1e-6f);
    for (int d = 0; d < dim; ++d) x[d] = x[d] * scale * weight(d);
  }
  template <class Row> void query_transform(Row x, const RowAt& at) const { normalise(x, at.dim); }
  template <class Row> void key_transform(Row x, const RowAt& at) const { normalise(x, at.dim); }
  template <class Row> void value_transform(Row x, const RowAt& at) const {
    for (int d = 0; d < at.dim; ++d) x[d] = x[d] * (at.token % 2 == 0 ? 1.0f : -0.5f);
  }
  template <class Row> void output_transform(Row x, const RowAt& at) const {
    const float first = x[0];
    for (int d = 0; d < at.dim; ++d) x[d] = x[d] - first + 0.25f * at.position + at.head;
  }
};
"""


@pytest.mark.parametrize("rope", ["NONE", "ROPE_LLAMA"])
@pytest.mark.parametrize(
    "case",
    [
        DECODE.but("rows"),
        DECODE.but("rows-split", dims=(128, 128), task={"fixed_split_size": 64}),
        PREFILL.but("rows-f16", dims=(128, 128), dtypes=cases.F16),
        PREFILL.but("rows-256", dims=(256, 256), dtypes=cases.BF16),
        PREFILL.but("rows-512", dims=(512, 512), dtypes=cases.BF16),
        PREFILL.but(
            "rows-split", dims=(128, 128), dtypes=cases.BF16, task={"fixed_split_size": 32}
        ),
        cases.MIXED.but("rows-padded", dims=(72, 40), dtypes=cases.BF16),
    ],
    ids=lambda c: c.name,
)
def test_rows(case: Case, rope: str) -> None:
    """Hooks of rows of q, k, v and the output, in the family that has them; before RoPE."""
    case = GPU.adapt(case.but(rope, variant=Variant(causal=True, pos_encoding_mode=rope)))
    weight = np.random.default_rng(2).random(case.dims[0]).astype(np.float32)
    spec = AttentionSpec.from_source(
        ROWS, extras={"weight": ("float32", 1)}, causal=True, pos_encoding_mode=rope
    )

    def normalise(x: np.ndarray, _: Any) -> np.ndarray:
        scale = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)
        return x * scale * weight.astype(x.dtype)

    def output(x: np.ndarray, at: np.ndarray) -> np.ndarray:
        return x - x[..., :1] + 0.25 * at[:, None, None] + np.arange(x.shape[1])[:, None]

    hooks = Hooks(
        query=normalise,
        key=normalise,
        value=lambda x, at: x * np.where(at % 2 == 0, 1.0, -0.5)[:, None, None],
        output=output,
    )
    check_variant(spec, hooks, case, GPU, weight=torch.from_numpy(weight).cuda())


def test_nan_and_infinity_of_a_variant_are_where_it_put_them() -> None:
    """NaN of a hidden logit touches nothing; NaN of a seen one is its row's, and no other's."""
    text = """
    struct Bad : VariantBase {
      template <class M>
      typename M::Float logits_transform(typename M::Float x, const LogitsAt<M>& at) const {
        const auto nan = M::splat(not_a_number());
        const auto row = M::splat(at.q_token) == M::splat(3);
        return M::select(at.kv_position > at.q_position, nan, M::select(row, nan, x));
      }
    };
    """
    case = PREFILL.but("nan", dims=(128, 128), dtypes=cases.BF16, variant=CAUSAL)
    for backend in ("fa2", "cuda"):
        device = dataclasses.replace(GPU, backend=backend)
        problem = device.build(case)
        attention = flashbsr.Attention(
            AttentionSpec.from_source(text, causal=True),
            flashbsr.TaskInfo(**problem.task_fields(), backend=backend),
        )
        problem.plan(attention)
        there = device.upload(problem)
        out = device.get(attention.run(there.q, there.kv, **there.run_options)).astype(float)
        bad = [begin + 3 for begin in problem.qo_indptr[:-1]]
        assert np.isnan(out[bad]).all()
        want = problem.reference().out
        rest = np.delete(np.arange(len(out)), bad)
        np.testing.assert_allclose(out[rest], want[rest], atol=0.02, rtol=0.02)


def test_graphs_replay_kernels_compiled_at_run_time() -> None:
    spec, _, extras = variant("soft_cap", True, -1)
    task = flashbsr.TaskInfo(
        8, 2, 128, backend="cuda", kv_dtype="bfloat16",
        max_batch_size=4, max_q_tokens=4, max_kv_pages=64,
    )  # fmt: skip
    attention = flashbsr.Attention(spec, task)
    q = torch.randn(4, 8, 128, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(64, 2, 16, 2, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)

    def plan(pages: list[int]) -> None:
        indptr = np.cumsum([0, *pages]).astype(np.int32)
        lens = np.array([16 * n - 3 for n in pages], np.int32)
        ids = np.arange(indptr[-1], dtype=np.int32)
        attention.plan(flashbsr.Paged(None, indptr, ids, kv_lens=lens, page_size=16))

    plan([4, 3, 2, 1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(q, kv, out=out, **extras)
    for pages in ([1, 1, 1, 1], [20, 1, 30, 13]):
        plan(pages)
        graph.replay()
        torch.cuda.synchronize()
        begin = 0
        for row, n in enumerate(pages):
            keys = kv[begin : begin + n].float().cpu().numpy()
            k, v = (keys[:, i].reshape(-1, 2, 128)[: 16 * n - 3] for i in (0, 1))
            want = reference.attend(
                q[row : row + 1].float().cpu().numpy(), k, v, Variant(logits_soft_cap=5.0)
            )
            got = out[row : row + 1].float().cpu().numpy()
            np.testing.assert_allclose(got, want.out, atol=0.02, rtol=0.02)
            begin += n


def test_eight_processes_ask_at_once(tmp_path: Path) -> None:
    """One compiles, all are right."""
    script = textwrap.dedent("""
        import sys, numpy as np, torch, flashbsr
        spec = flashbsr.AttentionSpec.from_source(sys.argv[1], extras={"cap": "float32"})
        q = torch.ones(1, 8, 128, device="cuda", dtype=torch.bfloat16)
        kv = torch.ones(16, 2, 128, device="cuda", dtype=torch.bfloat16)
        a = flashbsr.Attention(spec, flashbsr.TaskInfo(8, 2, 128, kv_dtype="bfloat16"))
        a.plan(flashbsr.Ragged(None, np.array([0, 16], np.int32)))
        out = a.run(q, (kv, kv), cap=5.0)
        assert (out == 1).all()
        """)
    environment = {**os.environ, "FLASHBSR_CACHE_DIR": str(tmp_path), "FLASHBSR_QUIET": ""}
    command = [sys.executable, "-c", script, SOFT_CAP]
    processes = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    messages = "".join(process.communicate(timeout=200)[1] for process in processes)
    assert [process.returncode for process in processes] == 8 * [0], messages
    assert messages.count("flashbsr: compiling") == 1, messages


def test_an_error_names_the_users_line() -> None:
    spec = AttentionSpec.from_source(
        SOFT_CAP.replace("M::tanh", "M::tan"), extras={"cap": "float32"}
    )
    attention = flashbsr.Attention(
        spec, flashbsr.TaskInfo(8, 2, 128, backend="cuda", kv_dtype="bfloat16")
    )
    with pytest.raises(errors.FlashbsrError, match=r"SoftCap\(5\): error"):
        attention.plan(flashbsr.Ragged(None, np.array([0, 16], np.int32)))
    assert all("tan" not in entry.label for entry in cache.entries())
