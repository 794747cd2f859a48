# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Each batch wrapper, called as the ecosystem calls it: names, order of arguments, options."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import cases
import flashbsr
import numpy as np
import pytest
import reference
from cases import BF16, F16, F32, FP8, Case, Problem
from harness import Device, compare, send
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
    wrapper = flashbsr.BatchDecodeWithPagedKVCacheWrapper(None, kv_layout)
    wrapper.plan(*decode_args(there), **options)
    check(device, problem, wrapper.run(there.q, there.kv, return_lse=True), **options)


def test_batch_decode_positional_options(device: Device) -> None:
    """The order in which serving engines pass the options positionally."""
    problem, there = send(device, DECODE.but("", dtypes=BF16))
    wrapper = flashbsr.BatchDecodeWithPagedKVCacheWrapper(
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
    wrapper = flashbsr.BatchDecodeWithPagedKVCacheWrapper(None)
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
    wrapper = flashbsr.BatchDecodeWithPagedKVCacheWrapper(None)
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
    wrapper = flashbsr.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*decode_args(there), q_len_per_req=3)
    check(device, problem, wrapper.run(there.q, there.kv, return_lse=True, q_len_per_req=3), True)


@by_spec
@by_dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_batch_prefill_paged(
    options: dict[str, Any], dtypes: tuple[str, ...], causal: bool, device: Device
) -> None:
    problem, there = send(device, PREFILL.but("", dtypes=dtypes, variant=Variant(**options)))
    wrapper = flashbsr.BatchPrefillWithPagedKVCacheWrapper(None)
    wrapper.plan(*prefill_args(there), causal=causal, **options)
    check(device, problem, wrapper.run(there.q, there.kv, return_lse=True), causal, **options)


def test_batch_prefill_paged_positional_options(device: Device) -> None:
    problem, there = send(device, PREFILL.but("", stacked=False, dims=(48, 24), dtypes=F16))
    wrapper = flashbsr.BatchPrefillWithPagedKVCacheWrapper(1 << 20)
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
            wrapper: Any = flashbsr.BatchPrefillWithPagedKVCacheWrapper(None)
            wrapper.plan(*prefill_args(there), causal=causal, **masks)
            result = wrapper.run(there.q, there.kv, return_lse=True)
        else:
            wrapper = flashbsr.BatchPrefillWithRaggedKVCacheWrapper(None)
            wrapper.plan(*ragged_args(there), causal=causal, **masks)
            result = wrapper.run(there.q, *there.kv, return_lse=True)
        compare(problem, *map(device.get, result))


def test_batch_prefill_run_options(device: Device) -> None:
    for base in (PREFILL, RAGGED):
        problem, there = send(device, base.but("", sinks=True, scales="head", slopes=True))
        out, lse = map(device.put, problem.new_outputs())
        options = {"out": out, "lse": lse, "return_lse": True, **there.run_options}
        if base is PREFILL:
            wrapper: Any = flashbsr.BatchPrefillWithPagedKVCacheWrapper(None)
            wrapper.plan(*prefill_args(there), causal=True, pos_encoding_mode="ALIBI")
            result = wrapper.run(there.q, there.kv, **options)
        else:
            wrapper = flashbsr.BatchPrefillWithRaggedKVCacheWrapper(None)
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
    wrapper = flashbsr.BatchPrefillWithRaggedKVCacheWrapper(None, kv_layout)
    wrapper.plan(*ragged_args(there), causal=True, **options)
    check(device, problem, wrapper.run(there.q, *there.kv, return_lse=True), True, **options)


def test_batch_prefill_ragged_positional_options(device: Device) -> None:
    """Here `window_left, logits_soft_cap, sm_scale`, unlike the paged wrapper."""
    problem, there = send(device, RAGGED)
    wrapper = flashbsr.BatchPrefillWithRaggedKVCacheWrapper(None)
    wrapper.plan(*ragged_args(there), None, None, True, "NONE", False, 20, 3.0, 0.3)
    result = wrapper.run(there.q, *there.kv, return_lse=True)
    check(device, problem, result, True, sm_scale=0.3, window_left=20, logits_soft_cap=3.0)


@by_dtypes
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_batch_attention(dtypes: tuple[str, ...], kv_layout: str, device: Device) -> None:
    """Prefill, decode and idle requests in one plan; always (out, lse)."""
    problem, there = send(device, PREFILL.but("", dtypes=dtypes, kv_layout=kv_layout))
    case = problem.case
    wrapper = flashbsr.BatchAttention(kv_layout)
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
    wrapper = flashbsr.BlockSparseAttentionWrapper(None)
    indptr, indices = device.put(indptr), device.put(indices)
    masks = {name: device.put(x) for name, x in masks.items()}
    wrapper.plan(indptr, indices, m, n, r, c, 6, 2, 32, causal=causal, logits_soft_cap=5.0, **masks)
    check(device, problem, wrapper.run(there.q, *there.kv, return_lse=True), logits_soft_cap=5.0)
    problem.run_options = {"q_scale": 0.5, "k_scale": 3.0, "v_scale": 0.7}
    out, lse = map(device.put, problem.new_outputs())
    result = wrapper.run(there.q, *there.kv, 0.5, 3.0, 0.7, out, lse, True)
    assert result[0] is out
    check(device, problem, result, logits_soft_cap=5.0)


# --- what wrappers have in common


def planned(kind: str, there: Problem, **constructor: Any) -> tuple[Any, Any]:
    """A planned wrapper of a kind, and its run."""
    if kind == "decode":
        wrapper: Any = flashbsr.BatchDecodeWithPagedKVCacheWrapper(**constructor)
        wrapper.plan(*decode_args(there))
    elif kind == "paged":
        wrapper = flashbsr.BatchPrefillWithPagedKVCacheWrapper(**constructor)
        wrapper.plan(*prefill_args(there))
    else:
        wrapper = flashbsr.BatchPrefillWithRaggedKVCacheWrapper(**constructor)
        wrapper.plan(*ragged_args(there))
        return wrapper, lambda **options: wrapper.run(there.q, *there.kv, **options)
    return wrapper, lambda **options: wrapper.run(there.q, there.kv, **options)


KINDS = {"decode": DECODE, "paged": PREFILL, "ragged": RAGGED}
by_kind = pytest.mark.parametrize("kind", KINDS)


@by_kind
def test_lse_base(kind: str, device: Device) -> None:
    """Natural unless base 2 is asked for."""
    problem, there = send(device, KINDS[kind])
    _, run = planned(kind, there)
    natural = run(return_lse=True)
    compare(problem, *map(device.get, natural))
    _, run = planned(kind, there, lse_base="2")
    (out, lse), (natural_out, natural_lse) = (
        map(device.get, x) for x in (run(return_lse=True), natural)
    )
    np.testing.assert_array_equal(out, natural_out)
    np.testing.assert_allclose(lse * np.log(2), natural_lse, rtol=1e-6, atol=1e-6)


@by_kind
def test_workspaces(kind: str, device: Device) -> None:
    """`workspace_size` is what an array must have; one byte less is refused."""
    _, there = send(device, KINDS[kind].but("", kv_lens=(3000, 10, 500, 10)))
    wrapper, run = planned(kind, there)
    expected = run(return_lse=True)
    args = {"decode": decode_args, "paged": prefill_args, "ragged": ragged_args}[kind](there)
    if kind == "ragged":
        scratch, plan = wrapper.workspace_size(*args[:-1], head_dim_vo=args[-1])
    else:
        scratch, plan = wrapper.workspace_size(*args)
    assert plan == wrapper.plan_info.buffer.nbytes
    assert scratch > 0
    for workspace in (device.put(np.full(scratch, 0xFF, np.uint8)), scratch):
        _, run = planned(kind, there, float_workspace_buffer=workspace)
        for a, b in zip(run(return_lse=True), expected, strict=True):
            np.testing.assert_array_equal(device.get(a), device.get(b))
    for workspace in (device.put(np.zeros(scratch - 1, np.uint8)), scratch - 1):
        with pytest.raises(flashbsr.errors.CapacityError, match="workspace"):
            planned(kind, there, float_workspace_buffer=workspace)


@by_kind
def test_reset_workspace_buffer(kind: str, device: Device) -> None:
    _, there = send(device, KINDS[kind])
    wrapper, run = planned(kind, there)
    run()
    wrapper.reset_workspace_buffer(device.put(np.zeros(1 << 22, np.uint8)))
    with pytest.raises(flashbsr.errors.PlanError, match="plan"):
        run()
    wrapper.reset_workspace_buffer(None)
    assert not wrapper.is_cuda_graph_enabled


@by_kind
def test_failed_plan_leaves_no_plan(kind: str, device: Device) -> None:
    """A `run` after a `plan` that raised does not use the plan before it."""
    _, there = send(device, KINDS[kind])
    wrapper, run = planned(kind, there)
    with pytest.raises(flashbsr.FlashbsrError):
        wrapper.plan(
            *(
                {
                    "decode": decode_args,
                    "paged": prefill_args,
                    "ragged": ragged_args,
                }[kind](there)
            ),
            sm_scale=float("nan"),
        )
    with pytest.raises(flashbsr.errors.PlanError, match="plan"):
        run()


def test_options_do_not_stick(device: Device) -> None:
    """One wrapper, planned with changing options, as layers of one model need it."""
    problem, there = send(device, PREFILL)
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
        for name in set(fields) - set(inspect.signature(wrapper.plan).parameters):
            assert fields.pop(name) == getattr(Variant(), name)
        wrapper.plan(*prefill_args(there), **fields)
        problem.case = problem.case.but("", variant=variant)
        compare(problem, *map(device.get, wrapper.run(there.q, there.kv, return_lse=True)))


def test_page_size_one_caches_without_the_slot_dimension(device: Device) -> None:
    """4-D stacked and 3-D separate caches are page size 1."""
    _, there = send(device, DECODE.but("", page_size=1))
    wrapper = flashbsr.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*decode_args(there))
    expected = device.get(wrapper.run(there.q, there.kv))
    stacked = there.kv[:, :, 0]
    assert stacked.ndim == 4
    for kv in (stacked, (stacked[:, 0], stacked[:, 1])):
        np.testing.assert_array_equal(device.get(wrapper.run(there.q, kv)), expected)


def test_graph_mode_needs_buffers_on_a_gpu() -> None:
    """Their lengths are the capacity; on the host there are no CUDA graphs."""
    n9, n5 = np.zeros(9, np.int32), np.zeros(5, np.int32)
    unsupported = flashbsr.errors.UnsupportedError
    decode, prefill = (
        flashbsr.BatchDecodeWithPagedKVCacheWrapper,
        flashbsr.BatchPrefillWithPagedKVCacheWrapper,
    )
    on_host = {
        "use_cuda_graph": True,
        "paged_kv_indptr_buffer": n9,
        "paged_kv_indices_buffer": n5,
    }
    for make, options, name in (
        (decode, {"use_cuda_graph": True}, "use_cuda_graph"),
        (decode, {"paged_kv_indptr_buffer": n9}, "paged_kv_indptr_buffer"),
        (decode, on_host, "paged_kv_indptr_buffer"),
        (prefill, {"use_cuda_graph": True, "paged_kv_indices_buf": n5}, "use_cuda_graph"),
        (prefill, {"max_q_tokens": 5}, "max_q_tokens"),
        (prefill, {"custom_mask_buf": n9}, "custom_mask_buf"),
    ):
        with pytest.raises(unsupported, match=rf"^{name}\b"):
            make(None, **options)


def test_options_of_gpus_are_refused_on_the_host() -> None:
    """They would be without effect."""
    problem = cases.build(DECODE)
    wrapper = flashbsr.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*decode_args(problem))
    for option in ({"enable_pdl": True}, {"kv_ready": True}, {"stream": 0}):
        with pytest.raises(flashbsr.errors.UnsupportedError, match=rf"^{next(iter(option))}\b"):
            wrapper.run(problem.q, problem.kv, **option)
    wrapper.run(problem.q, problem.kv, enable_pdl=False)
    for options in ({"device": 0}, {"device": 0, "backend": "cpu"}):
        with pytest.raises(flashbsr.FlashbsrError, match=r"^device\b"):
            flashbsr.TaskInfo(1, 1, 64, **options)


def test_share_prefixes() -> None:
    """Every paged wrapper passes the wish on, and refuses others."""
    pages, batch = 128, 32
    indices = np.concatenate(
        [np.r_[np.arange(pages), pages + i] for i in range(batch)], dtype=np.int32
    )
    indptr, last = np.arange(batch + 1) * (pages + 1), np.full(batch, 5)
    rows, lens = np.arange(batch + 1), np.full(batch, pages * 16 + 5)
    plans = (
        lambda **wish: flashbsr.BatchDecodeWithPagedKVCacheWrapper().plan(
            indptr, indices, last, 8, 2, 64, 16, **wish
        ),
        lambda **wish: flashbsr.BatchPrefillWithPagedKVCacheWrapper().plan(
            rows, indptr, indices, last, 8, 2, 64, 16, **wish
        ),
        lambda **wish: flashbsr.BatchAttention().plan(
            rows, indptr, indices, lens, 8, 2, 64, 64, 16, **wish
        ),
    )
    for plan in plans:
        with pytest.raises(flashbsr.FlashbsrError, match="share_prefixes"):
            plan(share_prefixes="on")
    for wish, shared in (("auto", 1), ("off", 0)):
        decode = flashbsr.BatchDecodeWithPagedKVCacheWrapper()
        prefill = flashbsr.BatchPrefillWithPagedKVCacheWrapper()
        mixed = flashbsr.BatchAttention()
        decode.plan(indptr, indices, last, 8, 2, 64, 16, share_prefixes=wish)
        prefill.plan(rows, indptr, indices, last, 8, 2, 64, 16, share_prefixes=wish)
        mixed.plan(rows, indptr, indices, lens, 8, 2, 64, 64, 16, share_prefixes=wish)
        for wrapper in (decode, prefill, mixed):
            assert len(wrapper.plan_info.shared) == shared
