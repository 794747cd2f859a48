# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts and decodes with queries apart as one plan."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import flashbsr
import numpy as np
import pytest
import reference
from base2 import compare, natural
from cases import Case, Problem, build, strided
from flashbsr.layout.joined import join_rows
from harness import CPU, Device
from kinds import Kind, by_kind
from reference import State, Variant

F16 = 3 * ("float16",)
# Two prompts, one of them a chunk behind a context, and decodes, one of them of an empty request.
MIXED = Case(
    "pod", (7, 33, 1, 1, 1), (60, 33, 300, 0, 17), (8, 2), dtypes=F16, layout="paged", page_size=8
)
PROMPTS = 2


def plan_batch(
    wrapper: flashbsr.flashinfer.BatchPODWithPagedKVCacheWrapper, p: Problem, **options: Any
) -> None:
    """The case's first requests are prompts."""
    tables = []
    for part in (slice(0, PROMPTS), slice(PROMPTS, None)):
        lens = np.diff(p.qo_indptr)[part]
        pages = [p.kv_indices[a:b] for a, b in list(itertools.pairwise(p.kv_indptr.tolist()))[part]]
        tables += [
            np.cumsum([0, *lens]).astype(np.int32),
            np.cumsum([0, *map(len, pages)]).astype(np.int32),
            np.concatenate(pages),
            p.last_page_len[part],
        ]
    (num_qo, num_kv), variant = p.case.heads, p.case.variant
    fields = {
        name: getattr(variant, name)
        for name in ("window_left", "sm_scale", "logits_soft_cap", "pos_encoding_mode")
    }
    wrapper.plan(*tables, num_qo, num_kv, p.case.dims[0], p.case.page_size, **fields, **options)


def split(p: Problem) -> int:
    return int(p.qo_indptr[PROMPTS])


def check_parts(p: Problem, device: Device, found: Any) -> None:
    (out_p, out_d), (lse_p, lse_d) = found
    pairs = (out_p, out_d), (lse_p, lse_d)
    compare(p, *(np.concatenate([device.get(a), device.get(b)]) for a, b in pairs))


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize(
    "variant",
    [
        Variant(causal=True),
        Variant(),
        Variant(causal=True, window_left=20, logits_soft_cap=9.0),
        Variant(causal=True, pos_encoding_mode="ROPE_LLAMA"),
    ],
    ids=str,
)
def test_batch(variant: Variant, adjacent: bool, device: Device) -> None:
    problem = device.build(dataclasses.replace(MIXED, variant=variant))
    wrapper = flashbsr.flashinfer.BatchPODWithPagedKVCacheWrapper(backend=device.backend)
    plan_batch(wrapper, problem)
    sent, cut = device.upload(problem), split(problem)
    q = sent.q[:cut], sent.q[cut:]
    if not adjacent:
        q = device.put(problem.q[:cut]), device.put(problem.q[cut:])
    options = {"causal_p": variant.causal, "return_lse": True}
    check_parts(problem, device, wrapper.run(q[0], sent.kv, q[1], sent.kv, **options))
    out_p, out_d = wrapper.run(q[0], sent.kv, q[1], sent.kv, causal_p=variant.causal)
    assert (out_p.shape[0], out_d.shape[0]) == (cut, problem.q.shape[0] - cut)


@pytest.mark.parametrize("kind", ["custom_mask_p", "packed_custom_mask_p"])
def test_masked_prompts(kind: str, device: Device) -> None:
    """The decodes' bits are made; the mask replaces causality."""
    problem = device.build(dataclasses.replace(MIXED, mask="bool"))
    cells = sum(len(q) * len(k) for q, k, _, _ in problem.requests[:PROMPTS])
    requests = [
        (q, k, v, mask if b < PROMPTS else None)
        for b, (q, k, v, mask) in enumerate(problem.requests)
    ]
    problem = dataclasses.replace(problem, requests=requests)
    mask = problem.custom_mask[:cells]
    if kind.startswith("packed"):
        sizes = np.cumsum([0, *(len(q) * len(k) for q, k, _, _ in requests[:PROMPTS])])
        mask, _ = reference.segment_packbits(mask, sizes, "little")
    wrapper = flashbsr.flashinfer.BatchPODWithPagedKVCacheWrapper(backend=device.backend)
    plan_batch(wrapper, problem)
    sent, cut = device.upload(problem), split(problem)
    for causal in (True, False):
        found = wrapper.run(
            sent.q[:cut], sent.kv, sent.q[cut:], sent.kv, causal_p=causal, return_lse=True,
            **{kind: device.put(mask)},
        )  # fmt: skip
        check_parts(problem, device, found)


def test_a_run_after_another(device: Device) -> None:
    """Masks, causality and the next plan leave nothing behind."""
    causal = device.build(dataclasses.replace(MIXED, variant=Variant(causal=True)))
    open_ = device.build(MIXED)
    wrapper = flashbsr.flashinfer.BatchPODWithPagedKVCacheWrapper(backend=device.backend)
    plan_batch(wrapper, causal)
    cut = split(causal)
    for problem in (causal, open_, causal, open_):
        sent = device.upload(problem)
        found = wrapper.run(
            sent.q[:cut], sent.kv, sent.q[cut:], sent.kv, return_lse=True,
            causal_p=problem.case.variant.causal,
        )  # fmt: skip
        check_parts(problem, device, found)
    # The same plan, run by run: nothing is planned again, bits are equal.
    before = wrapper.attention
    again = wrapper.run(sent.q[:cut], sent.kv, sent.q[cut:], sent.kv, return_lse=True)
    assert wrapper.attention is before
    assert device.get(again[0][0]).tobytes() == device.get(found[0][0]).tobytes()


@pytest.mark.parametrize("causal", [True, False])
def test_decodes_of_several_tokens(causal: bool, device: Device) -> None:
    """Without causality they are rows like others; with it prompts are a launch of their own."""
    case = dataclasses.replace(MIXED, q_lens=(7, 33, 2, 1, 1), variant=Variant(causal=causal))
    p = device.build(case)
    wrapper = flashbsr.flashinfer.BatchPODWithPagedKVCacheWrapper(backend=device.backend)
    plan_batch(wrapper, p)
    sent, cut = device.upload(p), split(p)
    run = {"causal_p": causal, "return_lse": True}
    found = wrapper.run(sent.q[:cut], sent.kv, sent.q[cut:], sent.kv, **run)
    if causal:  # of the prompts only: decodes see everything
        kept = [None, None, *(np.ones((len(q), len(k)), bool) for q, k, _, _ in p.requests[2:])]
        requests = [(*x[:3], mask) for x, mask in zip(p.requests, kept, strict=True)]
        p = dataclasses.replace(p, requests=requests)
    check_parts(p, device, found)


def test_two_caches(device: Device) -> None:
    """Parts with caches of their own are two launches."""
    p = device.build(dataclasses.replace(MIXED, variant=Variant(causal=True)))
    wrapper = flashbsr.flashinfer.BatchPODWithPagedKVCacheWrapper(backend=device.backend)
    plan_batch(wrapper, p)
    sent, cut = device.upload(p), split(p)
    other = device.put_kv(p.kv)
    q = sent.q[:cut], sent.q[cut:]
    check_parts(p, device, wrapper.run(q[0], other, q[1], sent.kv, causal_p=True, return_lse=True))
    out = wrapper.run(q[0], sent.kv, q[1], other, causal_p=True)
    both = wrapper.run(q[0], sent.kv, q[1], sent.kv, causal_p=True)
    for one, two in zip(both, out, strict=True):
        np.testing.assert_allclose(
            device.get(one).astype(float), device.get(two).astype(float), atol=2e-2
        )


def test_bad_batches() -> None:
    p = build(dataclasses.replace(MIXED, dtypes=3 * ("float32",)))
    cut = split(p)
    wrapper = flashbsr.flashinfer.BatchPODWithPagedKVCacheWrapper()
    with pytest.raises(flashbsr.PlanError):
        wrapper.run(p.q[:cut], p.kv, p.q[cut:], p.kv)
    plan_batch(wrapper, p)
    wrapper.run(p.q[:cut], p.kv, p.q[cut:], p.kv[:])  # another view of the same
    with pytest.raises(flashbsr.PlanError, match="q_d"):
        wrapper.run(p.q[:cut], p.kv, p.q[cut + 1 :], p.kv)
    with pytest.raises(flashbsr.PlanError, match="q_p"):
        wrapper.run(p.q[: cut - 1], p.kv, p.q[cut:], p.kv)
    with pytest.raises(flashbsr.DTypeError, match="q_d"):
        wrapper.run(p.q[:cut], p.kv, p.q[cut:].astype(np.float16), p.kv)
    with pytest.raises(flashbsr.ShapeError, match="custom_mask_p"):
        wrapper.run(p.q[:cut], p.kv, p.q[cut:], p.kv, custom_mask_p=np.ones(7, bool))
    with pytest.raises(flashbsr.ShapeError, match="packed_custom_mask_p"):
        wrapper.run(p.q[:cut], p.kv, p.q[cut:], p.kv, packed_custom_mask_p=np.ones(7, np.uint8))
    wrapper.run(p.q[:cut], p.kv, p.q[cut:], p.kv, use_fp16_qk_reduction=True)
    one = np.array([0, 1])
    good = [one, one, np.array([0]), np.array([3]), one, one, np.array([1]), np.array([8])]
    for at, value, name in (
        (0, np.array([0, 1, 2]), "qo_indptr_p"),
        (0, np.array([1, 2]), "qo_indptr_p"),
        (1, np.array([0, 2]), "kv_indices_p"),
        (3, np.array([9]), "last_page_len_p"),
        (5, np.array([2, 1]), "kv_indptr_d"),
        (7, np.array([0]), "last_page_len_d"),
        (7, np.array([1, 1]), "last_page_len_d"),
    ):
        arrays = [*good]
        arrays[at] = value
        with pytest.raises(flashbsr.FlashbsrError) as caught:
            wrapper.plan(*arrays, 8, 2, 64, 8)
        assert caught.value.argument.startswith(name)
        with pytest.raises(flashbsr.PlanError):  # nor is the one of before left
            wrapper.run(p.q[:cut], p.kv, p.q[cut:], p.kv)


@by_kind
def test_adjacent_rows_are_not_copied(kind: Kind) -> None:
    base = np.arange(9 * 2 * 8, dtype=np.float32).reshape(9, 2, 8)
    x = kind.put(base)
    whole = join_rows(x[1:4], x[4:9], ("q_p", "q_d"))
    np.testing.assert_array_equal(kind.get(whole), base[1:9])
    if kind.name != "jax":  # whose slices are copies
        assert kind.address(whole) == kind.address(x[1:4])
    for first, second in ((x[4:9], x[1:4]), (x[1:3], x[4:9]), (x[1:4, ::1], x[5:9])):
        joined = join_rows(first, second, ("q_p", "q_d"))
        expected = np.concatenate([kind.get(first), kind.get(second)])
        np.testing.assert_array_equal(kind.get(joined), expected)
    assert join_rows(x[:0], x, ("q_p", "q_d")) is x
    assert join_rows(x, x[:0], ("q_p", "q_d")) is x


def test_strided_rows_are_not_copied() -> None:
    """Q as part of a fused projection."""
    fused = strided(np.zeros((9, 6, 8), np.float32), "float32")
    fused[:] = np.arange(fused.size).reshape(fused.shape)
    q = fused[:, :2]
    whole = join_rows(q[:4], q[4:], ("q_p", "q_d"))
    np.testing.assert_array_equal(whole, q)
    assert np.shares_memory(whole, q)
    other = join_rows(q[:4], fused[4:, 2:4], ("q_p", "q_d"))
    assert not np.shares_memory(other, q)
    np.testing.assert_array_equal(other, np.concatenate([q[:4], fused[4:, 2:4]]))


def pod_problem(device: Device, layout: str, stacked: bool, page: int, prompt: int) -> Any:
    """A cache with a prompt in pages from 3 on and decodes in others; and the reference's rows."""
    rng = np.random.default_rng([page, prompt])
    lens, dtype = (19, 1, 8), np.float16
    first, behind = 3, 3 + -(-prompt // page)
    counts = [-(-n // page) for n in lens]
    pages = rng.permutation(np.arange(behind, behind + sum(counts))).astype(np.int32)
    total = behind + sum(counts) + 1
    k, v = (rng.standard_normal((total, page, 2, 64)).astype(dtype) for _ in range(2))
    q = rng.standard_normal((min(prompt, 5) + 3, 8, 64)).astype(dtype)
    flat = [x.reshape(-1, 2, 64) for x in (k, v)]
    prompts = [x[first * page : first * page + prompt] for x in flat]
    owned = np.split(pages, np.cumsum(counts)[:-1])
    decodes = [
        [x[own].reshape(-1, 2, 64)[:n] for x in (k, v)] for own, n in zip(owned, lens, strict=True)
    ]
    if layout == "HND":
        k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k, v))
    kv = device.put(np.stack([k, v], 1)) if stacked else (device.put(k), device.put(v))
    table = np.cumsum([0, *counts]), pages, np.array([(n - 1) % page + 1 for n in lens])
    return q, kv, first, table, prompts, decodes


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("layout", "stacked", "page", "prompt"),
    [
        ("NHD", False, 8, 40),
        ("NHD", False, 8, 37),
        ("NHD", True, 8, 8),
        ("NHD", True, 1, 21),
        ("HND", False, 16, 13),
        ("HND", True, 16, 16),
        ("HND", False, 1, 5),
    ],
)
def test_prompt_in_the_cache(
    layout: str, stacked: bool, page: int, prompt: int, causal: bool, device: Device
) -> None:
    q, kv, first, table, prompts, decodes = pod_problem(device, layout, stacked, page, prompt)
    wrapper = flashbsr.flashinfer.PODWithPagedKVCacheWrapper(
        kv_layout=layout, backend=device.backend
    )
    wrapper.plan(*table, 8, 2, 64, page)
    rows = len(q) - 3
    halves = (kv[:, 0], kv[:, 1]) if stacked else kv
    where = []
    for half in halves:
        if layout == "NHD" and not (stacked and page > 1):
            flat = half.reshape(-1, 2, 64) if not stacked else half[:, 0]
            where.append(flat[first * page : first * page + prompt])
        elif layout == "HND" and page == 1:
            where.append(half[first : first + prompt, :, 0].swapaxes(0, 1))
        else:
            token = half[first] if layout == "NHD" else half[first].swapaxes(0, 1)
            where.append(token[:prompt] if layout == "NHD" else half[first][:, :prompt])
    (out_p, lse_p), (out_d, lse_d) = wrapper.run(
        device.put(q[:rows]), *where, device.put(q[rows:]), kv, causal_p=causal,
        kv_layout_p=layout, return_lse_p=True, return_lse_d=True,
    )  # fmt: skip
    variant = Variant(causal=causal)
    state = reference.attend(q[:rows], *prompts, variant)
    states = [
        reference.attend(q[rows + i : rows + i + 1], *d, variant) for i, d in enumerate(decodes)
    ]
    np.testing.assert_allclose(device.get(out_p), state.out, atol=2e-3)
    np.testing.assert_allclose(natural(device.get(lse_p)), state.lse, atol=2e-3)
    np.testing.assert_allclose(
        device.get(out_d), np.concatenate([s.out for s in states]), atol=2e-3
    )
    np.testing.assert_allclose(
        natural(device.get(lse_d)), np.concatenate([s.lse for s in states]), atol=2e-3
    )


def check_pod(device: Device, found: Any, rows: Any, prompt: Any, decodes: Any) -> None:
    """`found` is ((out, lse), (out, lse)); `prompt` and `decodes` the exact states."""
    assert len(rows) == len(prompt.out)
    exact = [prompt, State.concatenate(decodes, 8, 64)]
    for (out, lse), state in zip(found, exact, strict=True):
        np.testing.assert_allclose(device.get(out), state.out, atol=2e-3)
        np.testing.assert_allclose(natural(device.get(lse)), state.lse, atol=2e-3)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_prompt_beside_the_cache(layout: str, device: Device) -> None:
    """Arrays of their own, of one page or of different ones: two launches."""
    q, kv, first, table, prompts, decodes = pod_problem(device, "NHD", False, 8, 40)
    wrapper = flashbsr.flashinfer.PODWithPagedKVCacheWrapper(backend=device.backend)
    sent = device.put(q[:5]), device.put(q[5:])
    k, v = (x.reshape(-1, 2, 64)[first * 8 : first * 8 + 40] for x in kv)
    with pytest.raises(flashbsr.PlanError, match="plan"):
        wrapper.run(sent[0], k, v, sent[1], kv)
    wrapper.plan(*table, 8, 2, 64, 8)
    exact = reference.attend(q[:5], *prompts, Variant(causal=True))
    states = [reference.attend(q[5 + i : 6 + i], *d, Variant()) for i, d in enumerate(decodes)]
    beside = [x if layout == "NHD" else x.swapaxes(0, 1) for x in prompts]
    beside = [device.put(np.ascontiguousarray(x)) for x in beside]
    pairs = [(beside[0], beside[1])]
    if layout == "NHD":
        pairs += [(beside[0], v), (k, beside[1]), (k, v)]
    for pair in pairs:
        found = wrapper.run(
            sent[0], *pair, sent[1], kv, causal_p=True, kv_layout_p=layout, return_lse_p=True,
            return_lse_d=True,
        )  # fmt: skip
        check_pod(device, found, q[:5], exact, states)


def test_bad_pods() -> None:
    q, kv, first, table, _, _ = pod_problem(CPU, "NHD", False, 8, 40)
    wrapper = flashbsr.flashinfer.PODWithPagedKVCacheWrapper()
    wrapper.plan(*table, 8, 2, 64, 8)
    k, v = (x.reshape(-1, 2, 64)[first * 8 : first * 8 + 40] for x in kv)
    beside = k.copy()
    for arrays, options, kind, name in (
        ((q[:5], beside, v[:30], q[5:], kv), {}, flashbsr.IndexRangeError, "v_p"),
        ((q[:5], beside[0], v, q[5:], kv), {}, flashbsr.ShapeError, "k_p"),
        ((q[:5], beside, v, q[6:], kv), {}, flashbsr.PlanError, "q_d"),
        ((q[:5], k, v, q[6:], kv), {}, flashbsr.PlanError, "q_d"),
        ((q[:5], k, v, q[5:], kv), {"window_left_d": 9}, flashbsr.PlanError, "window_left_d"),
        ((q[:5], k, v, q[5:], kv), {"sm_scale_d": 0.5}, flashbsr.PlanError, "sm_scale_d"),
        ((q[:5], k, v, q[5:], kv), {"kv_layout_d": "HND"}, flashbsr.PlanError, "kv_layout_d"),
        ((q[:5], k, v, q[5:], kv), {"kv_layout_p": "NDH"}, flashbsr.FlashbsrError, "kv_layout_p"),
        ((q[:5], k, v, q[5:], kv), {"custom_mask_p": np.ones(3, bool)}, flashbsr.ShapeError,
         "custom_mask_p"),
        ((q[:5], k, v, q[5:], kv), {"custom_mask_d": np.ones(3, bool)}, flashbsr.ShapeError,
         "custom_mask_d"),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            wrapper.run(*arrays, **options)
        assert caught.value.argument == name
    wrapper.run(q[:5], k, v, q[5:], kv, sm_scale_p=0.125, sm_scale_d=0.125, causal_d=True)


@pytest.mark.parametrize(
    "options",
    [{"window_left": 9}, {"sm_scale": 0.5}, {"pos_encoding_mode": "ALIBI"}, {}],
    ids=str,
)
@pytest.mark.parametrize("of", ["prompt", "decodes"])
def test_options_that_differ(of: str, options: dict[str, Any], device: Device) -> None:
    """The prompt's are those of run, the decodes' those of plan: two launches."""
    q, kv, first, table, prompts, decodes = pod_problem(device, "NHD", False, 8, 40)
    wrapper = flashbsr.flashinfer.PODWithPagedKVCacheWrapper(backend=device.backend)
    planned, given = (options, {}) if of == "decodes" else ({}, options)
    wrapper.plan(*table, 8, 2, 64, 8, **planned)
    k, v = (x.reshape(-1, 2, 64)[first * 8 : first * 8 + 40] for x in kv)
    found = wrapper.run(
        device.put(q[:5]), k, v, device.put(q[5:]), kv, causal_p=True, return_lse_p=True,
        return_lse_d=True, **{f"{name}_p": value for name, value in given.items()},
    )  # fmt: skip
    exact = reference.attend(q[:5], *prompts, Variant(causal=True, **given))
    states = [
        reference.attend(q[5 + i : 6 + i], *d, Variant(**planned)) for i, d in enumerate(decodes)
    ]
    check_pod(device, found, q[:5], exact, states)


@pytest.mark.parametrize("part", ["p", "d"])
@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_parts(part: str, packed: bool, device: Device) -> None:
    q, kv, first, table, prompts, decodes = pod_problem(device, "NHD", False, 8, 40)
    wrapper = flashbsr.flashinfer.PODWithPagedKVCacheWrapper(backend=device.backend)
    wrapper.plan(*table, 8, 2, 64, 8)
    k, v = (x.reshape(-1, 2, 64)[first * 8 : first * 8 + 40] for x in kv)
    rng = np.random.default_rng(0)
    lens = [40] if part == "p" else [len(d[0]) for d in decodes]
    masks = [rng.random((5 if part == "p" else 1, n)) < 0.6 for n in lens]
    flat = np.concatenate([m.ravel() for m in masks])
    bits, _ = reference.segment_packbits(flat, np.cumsum([0, *(m.size for m in masks)]), "little")
    mask = {f"packed_custom_mask_{part}": bits} if packed else {f"custom_mask_{part}": flat}
    found = wrapper.run(
        device.put(q[:5]), k, v, device.put(q[5:]), kv, causal_p=True, return_lse_p=True,
        return_lse_d=True, **{name: device.put(x) for name, x in mask.items()},
    )  # fmt: skip
    of_prompt = masks[0] if part == "p" else None
    of_decodes = masks if part == "d" else [None] * len(decodes)
    exact = reference.attend(q[:5], *prompts, Variant(causal=True), mask=of_prompt)
    states = [
        reference.attend(q[5 + i : 6 + i], *d, Variant(), mask=m)
        for i, (d, m) in enumerate(zip(decodes, of_decodes, strict=True))
    ]
    check_pod(device, found, q[:5], exact, states)


def test_prompts_change_between_runs() -> None:
    """The plan follows the prompt that run is given."""
    q, kv, first, table, prompts, _ = pod_problem(CPU, "NHD", False, 8, 40)
    wrapper = flashbsr.flashinfer.PODWithPagedKVCacheWrapper()
    wrapper.plan(*table, 8, 2, 64, 8)
    for tokens, rows, causal in ((40, 5, True), (40, 5, True), (24, 5, True), (24, 2, False)):
        k, v = (x.reshape(-1, 2, 64)[first * 8 : first * 8 + tokens] for x in kv)
        out, _ = wrapper.run(q[:rows], k, v, q[5:], kv, causal_p=causal)
        exact = reference.attend(
            q[:rows], *(x[:tokens] for x in prompts), Variant(causal=causal)
        ).out
        np.testing.assert_allclose(out, exact, atol=2e-3)


def test_no_graphs() -> None:
    with pytest.raises(flashbsr.UnsupportedError, match="use_cuda_graph"):
        flashbsr.flashinfer.PODWithPagedKVCacheWrapper(use_cuda_graph=True)
    with pytest.raises(flashbsr.UnsupportedError, match="jit_args"):
        flashbsr.flashinfer.PODWithPagedKVCacheWrapper(jit_args=["x"])
