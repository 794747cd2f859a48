# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over caches of eight and four bits with scales of every token and head.

Held to float64 over what the codes mean, as tightly as a bfloat16 cache.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import flashbsr
import numpy as np
import pytest
import reference
from cases import BF16, DECODE, F16, F32, MIXED, Case, Problem
from compare import MismatchError, assert_attention
from flashbsr import warm
from flashbsr.errors import DTypeError, FlashbsrError, ShapeError, UnsupportedError
from harness import assert_poison_survived, attention_for, needs_cxx
from kv_codes import (
    E5M2,
    FP8,
    INT4,
    INT4_32,
    INT4_64,
    INT8,
    KINDS,
    NVFP4,
    Kind,
    assert_attends,
    build,
    decode,
    encode,
)
from reference import Hooks, Variant

PAIRS = [*((kind, kind) for kind in KINDS), (INT8, INT4_64), (NVFP4, FP8), (FP8, E5M2)]
LEVELS = list(flashbsr._core.isa_levels())
PREFILL = Case("prefill", (70, 33), (200, 33), variant=Variant(causal=True), dtypes=BF16)


# Weights are integers there: what is below 2^-32 of a row's largest in a KV tile counts as zero.
FLOOR = 2.0**-31 if flashbsr._core.isa() == "avx512_amx" else 0.0


def compare(problem: Problem, out: np.ndarray, lse: np.ndarray | None) -> None:
    work = problem.case.work
    exact, working = problem.reference(), problem.reference(work)
    assert_attention(out, lse, exact, working, work, problem.case.name, floor=FLOOR)


def run(case: Case, k_kind: Kind, v_kind: Kind, **task: Any) -> tuple[np.ndarray, Any]:
    coded = build(case, k_kind, v_kind)
    problem = coded.problem
    attention = attention_for(problem, kv_dtype=coded.kv_dtype, **task)
    problem.plan(attention)
    out, lse = problem.new_outputs()
    if case.variant.activation == "sigmoid":
        attention.run(problem.q, coded.kv, out=out, **coded.options)
        lse = None
    else:
        attention.run(problem.q, coded.kv, out=out, lse=lse, **coded.options)
    compare(problem, out, lse)
    assert_poison_survived(out, case.name)
    return out, lse


@pytest.mark.parametrize("kinds", PAIRS, ids=lambda x: "-".join(map(str, x)))
@pytest.mark.parametrize("dtypes", [BF16, F16, F32], ids=lambda x: x[0])
@pytest.mark.parametrize("case", [DECODE, MIXED, PREFILL], ids=lambda x: x.name)
def test_every_type_is_exact_to_what_its_codes_mean(
    case: Case, dtypes: tuple[str, str, str], kinds: tuple[Kind, Kind]
) -> None:
    run(dataclasses.replace(case, dtypes=dtypes), *kinds)


@pytest.mark.parametrize("dims", [(128, 64), (32, 96), (256, 256), (192, 128)])
@pytest.mark.parametrize("kinds", [(INT8, INT8), (INT4_32, INT4_32)], ids=str)
def test_head_dims(dims: tuple[int, int], kinds: tuple[Kind, Kind]) -> None:
    for case in (DECODE, PREFILL):
        run(dataclasses.replace(case, dims=dims), *kinds)


@pytest.mark.parametrize("layout", ["ragged", "paged", "paged_lens", "table", "bounds"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_layouts(layout: str, kv_layout: str, page_size: int) -> None:
    case = dataclasses.replace(
        MIXED, dtypes=BF16, layout=layout, kv_layout=kv_layout, page_size=page_size
    )
    for kinds in ((INT8, INT8), (INT4_32, NVFP4)):
        run(case, *kinds)


VARIANTS = {
    "causal": {"variant": Variant(causal=True)},
    "window": {"variant": Variant(causal=True, window_left=20)},
    "soft_cap": {"variant": Variant(logits_soft_cap=5.0)},
    "alibi": {"variant": Variant(causal=True, pos_encoding_mode="ALIBI"), "slopes": True},
    "rope": {"variant": Variant(causal=True, pos_encoding_mode="ROPE_LLAMA")},
    "sigmoid": {"variant": Variant(activation="sigmoid", sigmoid_bias=-3.0)},
    "negative_scale": {"variant": Variant(sm_scale=-0.1)},
    "sinks": {"sinks": "extreme"},
    "mask": {"mask": "packed"},
    "numbers": {"scales": "number"},
    "per_head": {"scales": "head"},
    "large": {"gain": 100.0},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kinds", [(INT8, INT8), (INT4_32, INT4_64), (NVFP4, INT4)], ids=str)
def test_variants(name: str, kinds: tuple[Kind, Kind]) -> None:
    case = dataclasses.replace(MIXED, q_lens=(5, 1, 0, 33, 2, 0), dtypes=BF16, layout="paged")
    run(dataclasses.replace(case, **VARIANTS[name]), *kinds)


@needs_cxx
def test_hooks_of_rows_see_values_not_codes() -> None:
    """A key's hook that is not linear, and a value's: codes would give something else."""
    text = """
    struct Squares : flashbsr::VariantBase {
      template <class Row>
      void key_transform(Row row, const flashbsr::RowAt& at) const {
        for (int d = 0; d < at.dim; ++d) row[d] = row[d] * row[d];
      }
      template <class Row>
      void value_transform(Row row, const flashbsr::RowAt& at) const {
        for (int d = 0; d < at.dim; ++d) row[d] = row[d] * row[d];
      }
    };
    """
    for kinds in ((INT8, INT8), (INT4_32, INT4), (NVFP4, NVFP4)):
        coded = build(dataclasses.replace(DECODE, dtypes=F32), *kinds)
        problem = coded.problem
        spec = flashbsr.AttentionSpec.from_source(text)
        task = flashbsr.TaskInfo(**problem.task_fields(), kv_dtype=coded.kv_dtype)
        attention = flashbsr.Attention(spec, task)
        problem.plan(attention)
        out, lse = problem.new_outputs()
        attention.run(problem.q, coded.kv, out=out, lse=lse, **coded.options)
        hooks = Hooks(key=lambda x, _: x**2, value=lambda x, _: x**2)
        exact, working = problem.reference(hooks=hooks), problem.reference("float32", hooks)
        assert_attention(out, lse, exact, working, "float32", str(kinds))


def test_long_split_requests_and_bit_equal_repeats() -> None:
    case = Case("long", (1, 1), (5000, 3000), heads=(8, 2), layout="paged", decode=True,
                dtypes=BF16)  # fmt: skip
    for kinds in ((INT8, INT8), (INT4_64, INT4_64)):
        first = run(case, *kinds, num_threads=1)
        again = run(case, *kinds, num_threads=3)
        assert first[0].tobytes() == again[0].tobytes()
        assert first[1].tobytes() == again[1].tobytes()
        run(case, *kinds, fixed_split_size=512)


def test_shared_prefixes_and_levels() -> None:
    rng = np.random.default_rng(3)
    shared, own, size, heads, dim = 8, 2, 16, 2, 64
    count = 6
    pages = np.arange(shared + own * count, dtype=np.int32)
    lists = [np.r_[pages[:shared], pages[shared + own * i :][:own]] for i in range(count)]
    x = rng.standard_normal((2, len(pages), size, heads, dim)).astype(np.float32)
    (k, ks), (v, vs) = (encode(part, INT8) for part in x)
    q = rng.standard_normal((count, 8, dim)).astype(reference.DTYPES["bfloat16"])
    layout = flashbsr.Paged(
        None,
        np.arange(count + 1, dtype=np.int32) * (shared + own),
        np.concatenate(lists),
        page_size=size,
        kv_lens=np.full(count, (shared + own) * size - 3, np.int32),
    )
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(), flashbsr.TaskInfo(8, heads, dim, kv_dtype="int8")
    )
    attention.plan(layout)
    out = attention.run(q, (k, v), k_scale=ks, v_scale=vs)
    keys, values = decode(k, ks, INT8), decode(v, vs, INT8)
    length = (shared + own) * size - 3
    assert_attends(out, q, (keys, values), lists, length)
    assert attention.explain().kv_bytes == (shared * size + count * (own * size - 3)) * heads * 128


def test_scales_inside_the_pages_are_views() -> None:
    """Pages as vLLM packs them: the codes of a head and behind them its scale."""
    coded = build(dataclasses.replace(DECODE, kv_layout="HND"), INT8, INT8)
    problem = coded.problem
    pages, heads, size, dim = coded.kv[0].shape
    inline = np.full((pages, heads, size, 2 * (dim + 4)), 0xFF, np.uint8)
    k, v = inline[..., :dim].view(np.int8), inline[..., dim : 2 * dim].view(np.int8)
    scales = inline[..., 2 * dim :].view(np.float32)
    k[...], v[...] = coded.kv
    scales[..., 0], scales[..., 1] = coded.options["k_scale"], coded.options["v_scale"]
    attention = attention_for(problem, kv_dtype="int8")
    problem.plan(attention)
    out, lse = problem.new_outputs()
    options = {"k_scale": scales[..., 0], "v_scale": scales[..., 1]}
    attention.run(problem.q, (k, v), out=out, lse=lse, **options)
    compare(problem, out, lse)


def test_a_stacked_cache() -> None:
    coded = build(DECODE, INT8, INT8)
    problem = coded.problem
    attention = attention_for(problem, kv_dtype="int8")
    problem.plan(attention)
    out, lse = problem.new_outputs()
    attention.run(problem.q, np.stack(coded.kv, axis=1), out=out, lse=lse, **coded.options)
    compare(problem, out, lse)


def test_int8_with_a_number_for_its_scale() -> None:
    """Without scales of every token int8 is a type like float8."""
    coded = build(DECODE, INT8, INT8)
    problem = coded.problem
    attention = attention_for(problem)
    problem.plan(attention)
    codes = [x.astype(np.float32) for x in coded.kv]
    plain = attention.run(problem.q, tuple(coded.kv), k_scale=0.01, v_scale=0.02)
    wide = attention_for(problem)
    problem.plan(wide)
    bf16 = reference.DTYPES["bfloat16"]
    expected = wide.run(problem.q, tuple(x.astype(bf16) for x in codes), k_scale=0.01, v_scale=0.02)
    assert plain.tobytes() == expected.tobytes()


def test_wrong_scales_are_seen() -> None:
    """The comparison would notice a scale that is not used, or of another token."""
    for name in ("k_scale", "v_scale"):
        for change in (lambda s: s * 1.25, lambda s: np.roll(s, 1, axis=1)):
            coded = build(DECODE, INT8, INT8)
            problem = coded.problem
            coded.options[name] = change(np.array(coded.options[name]))
            attention = attention_for(problem, kv_dtype="int8")
            problem.plan(attention)
            out, lse = problem.new_outputs()
            attention.run(problem.q, coded.kv, out=out, lse=lse, **coded.options)
            with pytest.raises(MismatchError):
                compare(problem, out, lse)


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import flashbsr, test_kv_codes as t
assert flashbsr._core.isa() == {level!r}, flashbsr._core.isa()
for kinds in t.PAIRS:
    for case in (t.DECODE, t.PREFILL):
        t.run(case, *kinds)
"""


@pytest.mark.parametrize("level", [x for x in LEVELS if x != flashbsr._core.isa()])
def test_every_level(level: str) -> None:
    """One level is fixed when the module is loaded, so each has a process of its own."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(paths=[str(here), str(here.parent)], level=level)],
        env={**os.environ, "FLASHBSR_ISA": level, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "nvfp4", ("int8", "int4")])
def test_warm_takes_every_type(kv_dtype: Any) -> None:
    task = flashbsr.TaskInfo(4, 2, 64, q_dtype="bfloat16", kv_dtype=kv_dtype, backend="cpu")
    names = warm.warm(flashbsr.AttentionSpec(), task, page_size=16)
    assert names == [f"cpu_{flashbsr._core.isa()}"]


def bad(**changes: Any) -> None:
    coded = build(DECODE, changes.pop("k", INT8), changes.pop("v", INT8))
    problem = coded.problem
    attention = attention_for(problem, kv_dtype=changes.pop("kv_dtype", coded.kv_dtype))
    problem.plan(attention)
    kv = changes.pop("kv", coded.kv)
    attention.run(problem.q, kv, **{**coded.options, **changes})


def test_mistakes_are_named() -> None:
    good = build(DECODE, INT8, INT8).options["k_scale"]
    with pytest.raises(ShapeError, match="k_scale"):
        bad(k_scale=good[:, :-1])
    with pytest.raises(ShapeError, match="v_scale.*KV heads"):
        bad(v_scale=good[:, :, :1])
    with pytest.raises(ShapeError, match="one scale per token and head"):
        bad(k_scale=np.ones((*good.shape, 2), np.float32))
    with pytest.raises(DTypeError, match="k_scale"):
        bad(k_scale=good.astype(np.float64))
    with pytest.raises(DTypeError, match="float32"):
        bad(k=INT4, k_scale=good.astype(np.float16))
    with pytest.raises(FlashbsrError, match="int4 without scales"):
        bad(k=INT4, k_scale=None)
    with pytest.raises(DTypeError, match="uint8"):
        bad(k=INT4, v=INT4, kv_dtype=None)
    with pytest.raises(DTypeError, match="int8.*task's kv_dtype"):
        bad(kv_dtype="float8_e4m3fn")
    with pytest.raises(FlashbsrError, match="tuple of 3"):
        bad(k_scale=(good, 1.0, 2.0))
    with pytest.raises(DTypeError, match="one type, or those of K and of V"):
        flashbsr.TaskInfo(4, 2, 64, kv_dtype=("int8", "int8", "int8"))
    with pytest.raises(DTypeError, match="kv_dtype"):
        flashbsr.TaskInfo(4, 2, 64, kv_dtype=("int8", "bfloat16"))
    latent = flashbsr.TaskInfo(4, 1, 64, head_dim_vo=32, latent=True)
    attention = flashbsr.Attention(flashbsr.AttentionSpec(sm_scale=0.1), latent)
    attention.plan(flashbsr.Ragged(None, np.array([0, 3])))
    q = np.zeros((1, 4, 64), reference.DTYPES["bfloat16"])
    codes = np.zeros((3, 64), reference.DTYPES["float8_e4m3fn"])
    with pytest.raises(UnsupportedError, match="latent"):
        attention.run(q, codes, k_scale=np.ones((3, 1), np.float32))
