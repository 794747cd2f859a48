# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Each batch wrapper, called as the ecosystem calls it: names, order of arguments, options."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import flashbsr
import numpy as np
import pytest
import reference
from cases import BF16, F16, F32, Case, Problem, build
from harness import compare
from reference import Variant

DECODE = Case("decode", 4 * (1,), (1, 130, 40, 64), layout="paged", decode=True, heads=(8, 2))
PREFILL = Case("prefill", (3, 0, 40, 1), (30, 5, 40, 200), layout="paged", heads=(8, 2))
RAGGED = Case("ragged", (3, 0, 40, 1), (30, 5, 40, 200), heads=(8, 2), dims=(48, 32))

SPEC = {
    "plain": {},
    "soft_cap": {"logits_soft_cap": 2.0},
    "window": {"window_left": 7},
    "scale": {"sm_scale": 0.2},
    "alibi": {"pos_encoding_mode": "ALIBI"},
    "rope": {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 1e5},
}
by_spec = pytest.mark.parametrize("options", SPEC.values(), ids=SPEC.keys())
by_dtypes = pytest.mark.parametrize(
    "dtypes",
    [F32, BF16, F16, ("bfloat16", "float8_e4m3fn", "bfloat16")],
    ids=lambda dtypes: "-".join(dtypes[:2]),
)


def check(problem: Problem, result: Any, causal: bool = False, **options: Any) -> None:
    """`result` is (out, lse) of the problem under other options of the computation."""
    problem.case = problem.case.but("options", variant=Variant(causal=causal, **options), task={})
    compare(problem, *result)


def decode_args(problem: Problem) -> tuple[Any, ...]:
    case = problem.case
    return (
        problem.kv_indptr,
        problem.kv_indices,
        problem.last_page_len,
        *case.heads,
        case.dims[0],
        case.page_size,
    )


def prefill_args(problem: Problem) -> tuple[Any, ...]:
    return (problem.qo_indptr, *decode_args(problem))


def ragged_args(problem: Problem) -> tuple[Any, ...]:
    case = problem.case
    return (problem.qo_indptr, problem.kv_indptr, *case.heads, *case.dims)


# --- batches


@by_spec
@by_dtypes
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_batch_decode(options: dict[str, Any], dtypes: tuple[str, ...], kv_layout: str) -> None:
    problem = build(DECODE.but("", dtypes=dtypes, kv_layout=kv_layout))
    wrapper = flashbsr.BatchDecodeWithPagedKVCacheWrapper(None, kv_layout)
    wrapper.plan(*decode_args(problem), **options)
    check(problem, wrapper.run(problem.q, problem.kv, return_lse=True), **options)


def test_batch_decode_positional_options() -> None:
    """The order in which serving engines pass the options positionally."""
    problem = build(DECODE.but("", dtypes=BF16))
    wrapper = flashbsr.BatchDecodeWithPagedKVCacheWrapper(np.zeros(1 << 20, np.uint8), "NHD")
    wrapper.plan(
        *decode_args(problem),
        "NONE",
        20,
        3.0,
        "bfloat16",
        "bfloat16",
        "bfloat16",
        None,
        0.3,
        None,
        None,
    )
    result = wrapper.run(problem.q, problem.kv, return_lse=True)
    check(problem, result, window_left=20, logits_soft_cap=3.0, sm_scale=0.3)


def test_batch_decode_run_options() -> None:
    problem = build(DECODE.but("", sinks=True, scales="number"))
    wrapper = flashbsr.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*decode_args(problem), window_left=33)
    out, lse = problem.new_outputs()
    result = wrapper.run(
        problem.q,
        problem.kv,
        out=out,
        lse=lse,
        return_lse=True,
        window_left=33,
        **problem.run_options,
    )
    assert result[0] is out
    assert result[1] is lse
    check(problem, result, window_left=33)
    assert wrapper.run(problem.q, problem.kv, out=out) is out


@pytest.mark.parametrize("source", ["seq_lens", "block_tables", "both"])
def test_batch_decode_other_tables(source: str) -> None:
    problem = build(DECODE)
    wrapper = flashbsr.BatchDecodeWithPagedKVCacheWrapper(None)
    indptr, indices, last, *rest = decode_args(problem)
    if source == "seq_lens":
        wrapper.plan(indptr, indices, None, *rest, seq_lens=problem.kv_lens)
    elif source == "both":
        wrapper.plan(indptr, indices, last, *rest, seq_lens=problem.kv_lens)
    else:
        wrapper.plan(
            None, None, None, *rest, block_tables=problem.block_tables, seq_lens=problem.kv_lens
        )
    check(problem, wrapper.run(problem.q, problem.kv, return_lse=True))


def test_batch_decode_several_tokens() -> None:
    """`q_len_per_req` tokens each, causal among themselves (speculative verification)."""
    problem = build(DECODE.but("", q_lens=4 * (3,), kv_lens=(3, 130, 40, 64)))
    wrapper = flashbsr.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*decode_args(problem), q_len_per_req=3)
    check(problem, wrapper.run(problem.q, problem.kv, return_lse=True, q_len_per_req=3), True)


@by_spec
@by_dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_batch_prefill_paged(
    options: dict[str, Any], dtypes: tuple[str, ...], causal: bool
) -> None:
    problem = build(PREFILL.but("", dtypes=dtypes))
    wrapper = flashbsr.BatchPrefillWithPagedKVCacheWrapper(None)
    wrapper.plan(*prefill_args(problem), causal=causal, **options)
    check(problem, wrapper.run(problem.q, problem.kv, return_lse=True), causal, **options)


def test_batch_prefill_paged_positional_options() -> None:
    problem = build(PREFILL.but("", stacked=False, dims=(48, 24), dtypes=F16))
    wrapper = flashbsr.BatchPrefillWithPagedKVCacheWrapper(1 << 20)
    wrapper.plan(
        *prefill_args(problem),
        24,
        None,
        None,
        True,
        "NONE",
        False,
        0.3,
        20,
        3.0,
        None,
        None,
        "float16",
        "float16",
        "float32",
    )
    result = wrapper.run(problem.q, problem.kv, return_lse=True)
    problem.case = problem.case.but("", dtypes=("float16", "float16", "float32"))
    check(problem, result, True, sm_scale=0.3, window_left=20, logits_soft_cap=3.0)


@pytest.mark.parametrize("kind", ["bool", "packed"])
@pytest.mark.parametrize("causal", [False, True])
def test_batch_prefill_masks(kind: str, causal: bool) -> None:
    for base in (PREFILL, RAGGED):
        problem = build(base.but("", mask=kind))
        masks = (
            {"custom_mask": problem.custom_mask}
            if kind == "bool"
            else {"packed_custom_mask": problem.packed_mask}
        )
        if base is PREFILL:
            wrapper: Any = flashbsr.BatchPrefillWithPagedKVCacheWrapper(None)
            wrapper.plan(*prefill_args(problem), causal=causal, **masks)
            result = wrapper.run(problem.q, problem.kv, return_lse=True)
        else:
            wrapper = flashbsr.BatchPrefillWithRaggedKVCacheWrapper(None)
            wrapper.plan(*ragged_args(problem), causal=causal, **masks)
            result = wrapper.run(problem.q, *problem.kv, return_lse=True)
        compare(problem, *result)


def test_batch_prefill_run_options() -> None:
    for base in (PREFILL, RAGGED):
        problem = build(base.but("", sinks=True, scales="head", slopes=True))
        out, lse = problem.new_outputs()
        options = {"out": out, "lse": lse, "return_lse": True, **problem.run_options}
        if base is PREFILL:
            wrapper: Any = flashbsr.BatchPrefillWithPagedKVCacheWrapper(None)
            wrapper.plan(*prefill_args(problem), causal=True, pos_encoding_mode="ALIBI")
            result = wrapper.run(problem.q, problem.kv, **options)
        else:
            wrapper = flashbsr.BatchPrefillWithRaggedKVCacheWrapper(None)
            wrapper.plan(*ragged_args(problem), causal=True, pos_encoding_mode="ALIBI")
            result = wrapper.run(problem.q, *problem.kv, **options)
        assert result[0] is out
        assert result[1] is lse
        check(problem, result, True, pos_encoding_mode="ALIBI")


@by_spec
@by_dtypes
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_batch_prefill_ragged(
    options: dict[str, Any], dtypes: tuple[str, ...], kv_layout: str
) -> None:
    problem = build(RAGGED.but("", dtypes=dtypes, kv_layout=kv_layout))
    wrapper = flashbsr.BatchPrefillWithRaggedKVCacheWrapper(None, kv_layout)
    wrapper.plan(*ragged_args(problem), causal=True, **options)
    check(problem, wrapper.run(problem.q, *problem.kv, return_lse=True), True, **options)


def test_batch_prefill_ragged_positional_options() -> None:
    """Here `window_left, logits_soft_cap, sm_scale`, unlike the paged wrapper."""
    problem = build(RAGGED)
    wrapper = flashbsr.BatchPrefillWithRaggedKVCacheWrapper(None)
    wrapper.plan(*ragged_args(problem), None, None, True, "NONE", False, 20, 3.0, 0.3)
    result = wrapper.run(problem.q, *problem.kv, return_lse=True)
    check(problem, result, True, sm_scale=0.3, window_left=20, logits_soft_cap=3.0)


@by_dtypes
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_batch_attention(dtypes: tuple[str, ...], kv_layout: str) -> None:
    """Prefill, decode and idle requests in one plan; always (out, lse)."""
    problem = build(PREFILL.but("", dtypes=dtypes, kv_layout=kv_layout))
    case = problem.case
    wrapper = flashbsr.BatchAttention(kv_layout)
    wrapper.plan(
        problem.qo_indptr,
        problem.kv_indptr,
        problem.kv_indices,
        problem.kv_lens,
        *case.heads,
        *case.dims,
        case.page_size,
        True,
        0.2,
        4.0,
    )
    result = wrapper.run(problem.q, problem.kv)
    check(problem, result, True, sm_scale=0.2, logits_soft_cap=4.0)
    problem.run_options = {"k_scale": 0.5, "v_scale": 2.0}
    out, lse = problem.new_outputs()
    result = wrapper.run(problem.q, problem.kv, out, lse, 0.5, 2.0)
    assert result[0] is out
    assert result[1] is lse
    check(problem, result, True, sm_scale=0.2, logits_soft_cap=4.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [None, "mask", "packed_mask"])
@pytest.mark.parametrize(("m", "n", "r", "c"), [(50, 60, 16, 20), (32, 64, 1, 1), (7, 12, 3, 4)])
def test_block_sparse(causal: bool, kind: str | None, m: int, n: int, r: int, c: int) -> None:
    rng = np.random.default_rng(m)
    dense_blocks = rng.random((-(-m // r), n // c)) < 0.5
    indptr = cases.indptr(dense_blocks.sum(axis=1))
    indices = np.nonzero(dense_blocks)[1].astype(np.int32)
    mask = rng.random((len(indices), r, c)) < 0.6 if kind else None
    dense = reference.bsr_mask(indptr, indices, (m, n), (r, c), mask)
    if causal:
        dense &= np.tri(m, n, n - m, dtype=bool)
    masks: dict[str, Any] = {}
    if kind == "mask":
        masks = {"mask": mask}
    elif kind == "packed_mask":
        masks = {"packed_mask": flashbsr.packbits(mask.ravel(), "little")}
    problem = build(Case("bsr", (m,), (n,), heads=(6, 2), dims=(32, 32), dtypes=BF16))
    queries, keys, values, _ = problem.requests[0]
    problem.requests[0] = (queries, keys, values, dense)
    wrapper = flashbsr.BlockSparseAttentionWrapper(None)
    wrapper.plan(indptr, indices, m, n, r, c, 6, 2, 32, causal=causal, logits_soft_cap=5.0, **masks)
    check(problem, wrapper.run(problem.q, *problem.kv, return_lse=True), logits_soft_cap=5.0)
    problem.run_options = {"q_scale": 0.5, "k_scale": 3.0, "v_scale": 0.7}
    out, lse = problem.new_outputs()
    result = wrapper.run(problem.q, *problem.kv, 0.5, 3.0, 0.7, out, lse, True)
    assert result[0] is out
    check(problem, result, logits_soft_cap=5.0)


# --- what wrappers have in common


def planned(kind: str, problem: Problem, **constructor: Any) -> tuple[Any, Any]:
    """A planned wrapper of a kind, and its run."""
    if kind == "decode":
        wrapper: Any = flashbsr.BatchDecodeWithPagedKVCacheWrapper(**constructor)
        wrapper.plan(*decode_args(problem))
    elif kind == "paged":
        wrapper = flashbsr.BatchPrefillWithPagedKVCacheWrapper(**constructor)
        wrapper.plan(*prefill_args(problem))
    else:
        wrapper = flashbsr.BatchPrefillWithRaggedKVCacheWrapper(**constructor)
        wrapper.plan(*ragged_args(problem))
        return wrapper, lambda **options: wrapper.run(problem.q, *problem.kv, **options)
    return wrapper, lambda **options: wrapper.run(problem.q, problem.kv, **options)


KINDS = {"decode": DECODE, "paged": PREFILL, "ragged": RAGGED}
by_kind = pytest.mark.parametrize("kind", KINDS)


@by_kind
def test_lse_base(kind: str) -> None:
    """Natural unless base 2 is asked for."""
    problem = build(KINDS[kind])
    _, run = planned(kind, problem)
    natural = run(return_lse=True)
    compare(problem, *natural)
    _, run = planned(kind, problem, lse_base="2")
    out, lse = run(return_lse=True)
    np.testing.assert_array_equal(out, natural[0])
    np.testing.assert_allclose(lse * np.log(2), natural[1], rtol=1e-6, atol=1e-6)


@by_kind
def test_workspaces(kind: str) -> None:
    """`workspace_size` is what an array must have; one byte less is refused."""
    problem = build(KINDS[kind].but("", kv_lens=(3000, 10, 500, 10)))
    wrapper, run = planned(kind, problem)
    expected = run(return_lse=True)
    args = {"decode": decode_args, "paged": prefill_args, "ragged": ragged_args}[kind](problem)
    if kind == "ragged":
        scratch, plan = wrapper.workspace_size(*args[:-1], head_dim_vo=args[-1])
    else:
        scratch, plan = wrapper.workspace_size(*args)
    assert plan == wrapper.plan_info.buffer.nbytes
    assert scratch > 0
    for workspace in (np.full(scratch, 0xFF, np.uint8), scratch):
        _, run = planned(kind, problem, float_workspace_buffer=workspace)
        for a, b in zip(run(return_lse=True), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    for workspace in (np.zeros(scratch - 1, np.uint8), scratch - 1):
        with pytest.raises(flashbsr.errors.CapacityError, match="workspace"):
            planned(kind, problem, float_workspace_buffer=workspace)


@by_kind
def test_reset_workspace_buffer(kind: str) -> None:
    problem = build(KINDS[kind])
    wrapper, run = planned(kind, problem)
    run()
    wrapper.reset_workspace_buffer(np.zeros(1 << 22, np.uint8))
    with pytest.raises(flashbsr.errors.PlanError, match="plan"):
        run()
    wrapper.reset_workspace_buffer(None)
    assert not wrapper.is_cuda_graph_enabled


@by_kind
def test_failed_plan_leaves_no_plan(kind: str) -> None:
    """A `run` after a `plan` that raised does not use the plan before it."""
    problem = build(KINDS[kind])
    wrapper, run = planned(kind, problem)
    with pytest.raises(flashbsr.FlashbsrError):
        wrapper.plan(
            *(
                {
                    "decode": decode_args,
                    "paged": prefill_args,
                    "ragged": ragged_args,
                }[kind](problem)
            ),
            sm_scale=float("nan"),
        )
    with pytest.raises(flashbsr.errors.PlanError, match="plan"):
        run()


def test_options_do_not_stick() -> None:
    """One wrapper, planned with changing options, as layers of one model need it."""
    problem = build(PREFILL)
    wrapper = flashbsr.BatchPrefillWithPagedKVCacheWrapper(None)
    variants = [
        Variant(causal=True),
        Variant(window_left=5),
        Variant(causal=True, sm_scale=1.0),
        Variant(),
        Variant(sm_scale=1.0),
        Variant(logits_soft_cap=1.0),
        Variant(window_left=1),
        Variant(causal=True, pos_encoding_mode="ALIBI"),
        Variant(window_left=0),
    ]
    for variant in variants + variants[::-1] + variants:
        fields = dataclasses.asdict(variant)
        for name in ("rope_llama31", "activation", "sigmoid_bias"):
            del fields[name]
        wrapper.plan(*prefill_args(problem), **fields)
        problem.case = PREFILL.but("", variant=variant)
        compare(problem, *wrapper.run(problem.q, problem.kv, return_lse=True))


def test_page_size_one_caches_without_the_slot_dimension() -> None:
    """4-D stacked and 3-D separate caches are page size 1."""
    problem = build(DECODE.but("", page_size=1))
    wrapper = flashbsr.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*decode_args(problem))
    expected = wrapper.run(problem.q, problem.kv)
    stacked = problem.kv[:, :, 0]
    assert stacked.ndim == 4
    np.testing.assert_array_equal(wrapper.run(problem.q, stacked), expected)
    np.testing.assert_array_equal(wrapper.run(problem.q, (stacked[:, 0], stacked[:, 1])), expected)
