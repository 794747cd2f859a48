# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Each batch wrapper, called as the ecosystem calls it: names, order of arguments, options."""

from __future__ import annotations

from typing import Any

import cases
import flashbsr
import numpy as np
import pytest
import reference
from base2 import compare
from cases import BF16, F16, F32, FP8, Case, Problem
from harness import Device, send
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
    [F32, BF16, F16, ("bfloat16", "float8_e4m3fn", "bfloat16"), FP8],
    ids=lambda dtypes: "-".join(dtypes[:2]),
)


def check(
    device: Device, problem: Problem, result: Any, causal: bool = False, **options: Any
) -> None:
    """`result` is (out, lse) of the problem under other options of the computation."""
    problem.case = problem.case.but("options", variant=Variant(causal=causal, **options), task={})
    compare(problem, *map(device.get, result))


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
def test_batch_decode(
    options: dict[str, Any], dtypes: tuple[str, ...], kv_layout: str, device: Device
) -> None:
    problem, there = send(
        device, DECODE.but("", dtypes=dtypes, kv_layout=kv_layout, variant=Variant(**options))
    )
    wrapper = flashbsr.flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, kv_layout)
    wrapper.plan(*decode_args(there), **options)
    check(device, problem, wrapper.run(there.q, there.kv, return_lse=True), **options)


def test_batch_decode_positional_options(device: Device) -> None:
    """The order in which serving engines pass the options positionally."""
    problem, there = send(device, DECODE.but("", dtypes=BF16))
    wrapper = flashbsr.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        device.put(np.zeros(1 << 20, np.uint8)), "NHD"
    )
    wrapper.plan(
        *decode_args(there),
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
    result = wrapper.run(there.q, there.kv, return_lse=True)
    check(device, problem, result, window_left=20, logits_soft_cap=3.0, sm_scale=0.3)


def test_batch_decode_run_options(device: Device) -> None:
    problem, there = send(device, DECODE.but("", sinks=True, scales="number"))
    wrapper = flashbsr.flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*decode_args(there), window_left=33)
    out, lse = map(device.put, problem.new_outputs())
    result = wrapper.run(
        there.q,
        there.kv,
        out=out,
        lse=lse,
        return_lse=True,
        window_left=33,
        **there.run_options,
    )
    assert result[0] is out
    assert result[1] is lse
    check(device, problem, result, window_left=33)
    assert wrapper.run(there.q, there.kv, out=out) is out


@pytest.mark.parametrize("source", ["seq_lens", "block_tables", "both"])
def test_batch_decode_other_tables(source: str, device: Device) -> None:
    problem, there = send(device, DECODE)
    wrapper = flashbsr.flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
    indptr, indices, last, *rest = decode_args(there)
    if source == "seq_lens":
        wrapper.plan(indptr, indices, None, *rest, seq_lens=there.kv_lens)
    elif source == "both":
        wrapper.plan(indptr, indices, last, *rest, seq_lens=there.kv_lens)
    else:
        wrapper.plan(
            None, None, None, *rest, block_tables=there.block_tables, seq_lens=there.kv_lens
        )
    check(device, problem, wrapper.run(there.q, there.kv, return_lse=True))


def test_batch_decode_several_tokens(device: Device) -> None:
    """`q_len_per_req` tokens each, causal among themselves (speculative verification)."""
    problem, there = send(device, DECODE.but("", q_lens=4 * (3,), kv_lens=(3, 130, 40, 64)))
    wrapper = flashbsr.flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, use_tensor_cores=True)
    wrapper.plan(*decode_args(there), q_len_per_req=3)
    check(device, problem, wrapper.run(there.q, there.kv, return_lse=True, q_len_per_req=3), True)


@by_spec
@by_dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_batch_prefill_paged(
    options: dict[str, Any], dtypes: tuple[str, ...], causal: bool, device: Device
) -> None:
    problem, there = send(device, PREFILL.but("", dtypes=dtypes, variant=Variant(**options)))
    wrapper = flashbsr.flashinfer.BatchPrefillWithPagedKVCacheWrapper(None)
    wrapper.plan(*prefill_args(there), causal=causal, **options)
    result = wrapper.run(there.q, there.kv, return_lse=True)
    problem.kernel = wrapper.explain().kernel
    check(device, problem, result, causal, **options)


def test_batch_prefill_paged_positional_options(device: Device) -> None:
    problem, there = send(device, PREFILL.but("", stacked=False, dims=(48, 24), dtypes=F16))
    wrapper = flashbsr.flashinfer.BatchPrefillWithPagedKVCacheWrapper(1 << 20)
    wrapper.plan(
        *prefill_args(there),
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
    result = wrapper.run(there.q, there.kv, return_lse=True)
    problem.case = problem.case.but("", dtypes=("float16", "float16", "float32"))
    check(device, problem, result, True, sm_scale=0.3, window_left=20, logits_soft_cap=3.0)


@pytest.mark.parametrize("kind", ["bool", "packed"])
@pytest.mark.parametrize("causal", [False, True])
def test_batch_prefill_masks(kind: str, causal: bool, device: Device) -> None:
    for base in (PREFILL, RAGGED):
        problem, there = send(device, base.but("", mask=kind))
        masks = (
            {"custom_mask": there.custom_mask}
            if kind == "bool"
            else {"packed_custom_mask": there.packed_mask}
        )
        if base is PREFILL:
            wrapper: Any = flashbsr.flashinfer.BatchPrefillWithPagedKVCacheWrapper(None)
            wrapper.plan(*prefill_args(there), causal=causal, **masks)
            result = wrapper.run(there.q, there.kv, return_lse=True)
        else:
            wrapper = flashbsr.flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None)
            wrapper.plan(*ragged_args(there), causal=causal, **masks)
            result = wrapper.run(there.q, *there.kv, return_lse=True)
        compare(problem, *map(device.get, result))


def test_batch_prefill_run_options(device: Device) -> None:
    for base in (PREFILL, RAGGED):
        problem, there = send(device, base.but("", sinks=True, scales="head", slopes=True))
        out, lse = map(device.put, problem.new_outputs())
        options = {"out": out, "lse": lse, "return_lse": True, **there.run_options}
        if base is PREFILL:
            wrapper: Any = flashbsr.flashinfer.BatchPrefillWithPagedKVCacheWrapper(None)
            wrapper.plan(*prefill_args(there), causal=True, pos_encoding_mode="ALIBI")
            result = wrapper.run(there.q, there.kv, **options)
        else:
            wrapper = flashbsr.flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None)
            wrapper.plan(*ragged_args(there), causal=True, pos_encoding_mode="ALIBI")
            result = wrapper.run(there.q, *there.kv, **options)
        assert result[0] is out
        assert result[1] is lse
        check(device, problem, result, True, pos_encoding_mode="ALIBI")


@by_spec
@by_dtypes
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_batch_prefill_ragged(
    options: dict[str, Any], dtypes: tuple[str, ...], kv_layout: str, device: Device
) -> None:
    problem, there = send(
        device, RAGGED.but("", dtypes=dtypes, kv_layout=kv_layout, variant=Variant(**options))
    )
    wrapper = flashbsr.flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None, kv_layout)
    wrapper.plan(*ragged_args(there), causal=True, **options)
    result = wrapper.run(there.q, *there.kv, return_lse=True)
    problem.kernel = wrapper.explain().kernel
    check(device, problem, result, True, **options)


def test_batch_prefill_ragged_positional_options(device: Device) -> None:
    """Here `window_left, logits_soft_cap, sm_scale`, unlike the paged wrapper."""
    problem, there = send(device, RAGGED)
    wrapper = flashbsr.flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None)
    wrapper.plan(*ragged_args(there), None, None, True, "NONE", False, 20, 3.0, 0.3)
    result = wrapper.run(there.q, *there.kv, return_lse=True)
    check(device, problem, result, True, sm_scale=0.3, window_left=20, logits_soft_cap=3.0)


@by_dtypes
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_batch_attention(dtypes: tuple[str, ...], kv_layout: str, device: Device) -> None:
    """Prefill, decode and idle requests in one plan; always (out, lse)."""
    problem, there = send(device, PREFILL.but("", dtypes=dtypes, kv_layout=kv_layout))
    case = problem.case
    wrapper = flashbsr.flashinfer.BatchAttention(kv_layout)
    wrapper.plan(
        problem.qo_indptr,
        problem.kv_indptr,
        problem.kv_indices,
        there.kv_lens,
        *case.heads,
        *case.dims,
        case.page_size,
        True,
        0.2,
        4.0,
    )
    result = wrapper.run(there.q, there.kv)
    problem.kernel = wrapper.explain().kernel
    check(device, problem, result, True, sm_scale=0.2, logits_soft_cap=4.0)
    problem.run_options = {"k_scale": 0.5, "v_scale": 2.0}
    out, lse = map(device.put, problem.new_outputs())
    result = wrapper.run(there.q, there.kv, out, lse, 0.5, 2.0)
    assert result[0] is out
    assert result[1] is lse
    check(device, problem, result, True, sm_scale=0.2, logits_soft_cap=4.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [None, "mask", "packed_mask"])
@pytest.mark.parametrize(
    ("m", "n", "r", "c"), [(50, 60, 16, 20), (32, 64, 1, 1), (7, 12, 3, 4), (50, 61, 16, 20)]
)
def test_block_sparse(
    causal: bool, kind: str | None, m: int, n: int, r: int, c: int, device: Device
) -> None:
    rng = np.random.default_rng(m)
    dense_blocks = rng.random((-(-m // r), -(-n // c))) < 0.5
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
    problem, there = send(device, Case("bsr", (m,), (n,), heads=(6, 2), dims=(32, 32), dtypes=BF16))
    queries, keys, values, _ = problem.requests[0]
    problem.requests[0] = (queries, keys, values, dense)
    wrapper = flashbsr.flashinfer.BlockSparseAttentionWrapper(None)
    indptr, indices = device.put(indptr), device.put(indices)
    masks = {name: device.put(x) for name, x in masks.items()}
    wrapper.plan(indptr, indices, m, n, r, c, 6, 2, 32, causal=causal, logits_soft_cap=5.0, **masks)
    check(device, problem, wrapper.run(there.q, *there.kv, return_lse=True), logits_soft_cap=5.0)
    problem.run_options = {"q_scale": 0.5, "k_scale": 3.0, "v_scale": 0.7}
    out, lse = map(device.put, problem.new_outputs())
    result = wrapper.run(there.q, *there.kv, 0.5, 3.0, 0.7, out, lse, True)
    assert result[0] is out
    check(device, problem, result, logits_soft_cap=5.0)
