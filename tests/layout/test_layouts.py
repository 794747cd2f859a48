# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Front-ends build layouts of one computation: whichever is used, the result is the same."""

from __future__ import annotations

import dataclasses

import cases
import flashbsr
import numpy as np
import pytest
import reference
from cases import Case, indptr
from compare import assert_attention
from harness import Device, attention_for, compare, execute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Variant

# The device fixture is the same in every example.
per_device = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

VARIANTS = st.sampled_from(
    [
        {},
        {"variant": Variant(causal=True)},
        {"variant": Variant(window_left=5)},
        {"variant": Variant(causal=True, window_left=17, logits_soft_cap=2.0)},
        {"mask": "bool"},
        {"mask": "packed", "sinks": True},
        {"variant": Variant(causal=True, pos_encoding_mode="ALIBI")},
        {"variant": Variant(causal=True, pos_encoding_mode="ROPE_LLAMA")},
    ]
)
CASES = st.builds(
    lambda lens, heads, dims, dtypes, seed, changes: Case(
        "drawn",
        tuple(n for n, _ in lens),
        tuple(n for _, n in lens),
        heads=heads,
        dims=dims,
        dtypes=dtypes,
        seed=seed,
        **changes,
    ),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 150)), max_size=5),
    st.sampled_from([(1, 1), (4, 2), (3, 1), (6, 6)]),
    st.sampled_from([(16, 16), (64, 64), (40, 24)]),
    st.sampled_from([cases.F32, cases.BF16, cases.F16]),
    st.integers(0, 1000),
    VARIANTS,
)
LAYOUTS = st.builds(
    lambda layout, page_size, kv_layout: {
        "layout": layout,
        "page_size": page_size,
        "kv_layout": kv_layout,
        "stacked": False,
    },
    st.sampled_from(["paged", "paged_lens", "table"]),
    st.integers(1, 80),
    st.sampled_from(["NHD", "HND"]),
)


@per_device
@given(CASES, LAYOUTS, st.one_of(st.none(), st.integers(1, 9)))
def test_ragged_and_paged_are_equal(
    device: Device, case: Case, layout: dict[str, object], num_workers: int | None
) -> None:
    """Bit for bit: the layout only says where a token lies.

    But for windows on a GPU: a tile of Hopper's kernels begins where a box of pages does, so that
    a window's keys are added in another order.
    """
    case = device.adapt(case.but("workers", task={"num_workers": num_workers}))
    ragged = cases.build(case)
    out, lse = execute(ragged, attention_for(ragged, device.backend), device)
    compare(ragged, out, lse)
    paged = cases.build(case.but("paged", **layout))
    paged_out, paged_lse = execute(paged, attention_for(paged, device.backend), device)
    if device.is_cuda and case.variant.window_left >= 0:
        compare(paged, paged_out, paged_lse)
        return
    np.testing.assert_array_equal(paged_out, out)
    np.testing.assert_array_equal(paged_lse, lse)


@per_device
@given(CASES)
def test_dense_and_ragged_are_equal(device: Device, case: Case) -> None:
    """`flashbsr.attention`, request by request; with a mask, an engine for each request."""
    case = device.adapt(case)
    problem = cases.build(case)
    out, lse = execute(problem, attention_for(problem, device.backend), device)
    spec = flashbsr.AttentionSpec(**problem.spec_fields())
    k_all, v_all = problem.kv
    work = case.dtypes[0]
    for i, (*_, mask) in enumerate(problem.requests):
        rows = slice(*problem.qo_indptr[i : i + 2])
        keys = slice(*problem.kv_indptr[i : i + 2])
        options = {name: device.put(x) for name, x in problem.run_options.items()}
        options["return_lse"] = True
        arrays = [device.put(x) for x in (problem.q[rows], k_all[keys], v_all[keys])]
        if mask is None:
            both = flashbsr.attention(*(x[None] for x in arrays), spec=spec, **options)
            one, one_lse = (x[0] for x in both)
        else:
            attention = attention_for(problem, device.backend)
            attention.plan(
                flashbsr.Ragged([0, mask.shape[0]], [0, mask.shape[1]]), custom_mask=mask.ravel()
            )
            one, one_lse = attention.run(arrays[0], tuple(arrays[1:]), **options)
        alone = dataclasses.replace(problem, requests=[problem.requests[i]])
        exact, working = alone.reference(), alone.reference(work)
        one, one_lse = device.get(one), device.get(one_lse)
        assert_attention(one, one_lse, exact, working, work, f"single {i}")
        assert_attention(out[rows], lse[rows], exact, working, work, f"ragged {i}")


BSR = st.tuples(
    st.integers(1, 60),  # rows
    st.integers(1, 12),  # block columns
    st.integers(1, 17),  # R
    st.integers(1, 17),  # C
    st.integers(0, 2**32),
)


@per_device
@given(BSR, st.booleans(), st.sampled_from([cases.F32, cases.BF16]), st.booleans())
def test_bsr_equals_its_dense_mask(
    device: Device,
    shape: tuple[int, ...],
    with_mask: bool,
    dtypes: tuple[str, str, str],
    packed: bool,
) -> None:
    """Any block size, short last blocks, empty block rows, columns in any order."""
    m, block_columns, r, c, seed = shape
    n = block_columns * c - seed % c * (seed % 2)  # or a short last block column
    rng = np.random.default_rng(seed)
    picked = [
        rng.permutation(block_columns)[: rng.integers(0, block_columns + 1)]
        for _ in range(-(-m // r))
    ]
    bsr_indptr = indptr([len(p) for p in picked])
    indices = np.concatenate([np.zeros(0, np.int32), *picked]).astype(np.int32)
    mask = rng.random((len(indices), r, c)) < 0.7 if with_mask else None
    dense = reference.bsr_mask(bsr_indptr, indices, (m, n), (r, c), mask)

    case = Case("bsr", (m,), (n,), heads=(4, 2), dims=(16, 16), dtypes=dtypes)
    problem = device.build(case)
    if n % c == 0 and seed % 3:  # pages; otherwise tokens
        problem.kv = tuple(x.reshape(block_columns, c, 2, 16) for x in problem.kv)
    attention = attention_for(problem, device.backend)
    masks = {}
    if mask is not None and packed:
        masks = {"packed_mask": reference.packbits(mask.ravel(), "little")}
    elif mask is not None:
        masks = {"mask": mask}
    attention.plan(flashbsr.Bsr(bsr_indptr, indices, (m, n), (r, c), **masks))
    out, lse = execute(problem, attention, device, plan=False)
    queries, keys, values, _ = problem.requests[0]
    problem.requests[0] = (queries, keys, values, dense)
    compare(problem, out, lse)


@per_device
@given(CASES.filter(lambda case: case.mask is None), st.sampled_from(["bool", "packed"]))
def test_causal_and_window_as_masks(device: Device, case: Case, kind: str) -> None:
    """A custom mask that spells causality and the window out gives the same result."""
    case = device.adapt(case)
    problem = cases.build(case)
    out, lse = execute(problem, attention_for(problem, device.backend), device)
    compare(problem, out, lse)
    masks = [
        reference.visible(case.variant, *lens, None).ravel()
        for lens in zip(case.q_lens, case.kv_lens, strict=True)
    ]
    flat = np.concatenate([np.zeros(0, bool), *masks])
    masked = cases.build(case)
    masked.case = case.but(
        "as_mask",
        mask=kind,
        variant=dataclasses.replace(case.variant, causal=False, window_left=-1),
    )
    masked.custom_mask = flat
    masked.packed_mask, _ = flashbsr.segment_packbits(
        flat, indptr([len(x) for x in masks]), "little"
    )
    masked_out, masked_lse = execute(masked, attention_for(masked, device.backend), device)
    exact, working = problem.reference(), problem.reference(case.dtypes[0])
    assert_attention(masked_out, masked_lse, exact, working, case.dtypes[0], "as mask")


def test_mask_bits_do_not_shift_across_requests(device: Device) -> None:
    """Each request's packed mask starts at a byte: one bit set, found where it belongs."""
    q_lens, kv_lens = (3, 1, 5), (7, 3, 11)
    for request in range(3):
        for row, key in ((0, 0), (q_lens[request] - 1, kv_lens[request] - 1)):
            problem = device.build(Case("bit", q_lens, kv_lens, dims=(8, 8), mask="packed"))
            masks = [np.zeros(n, bool) for n in zip(q_lens, kv_lens, strict=True)]
            masks[request][row, key] = True
            problem.custom_mask = np.concatenate([mask.ravel() for mask in masks])
            problem.packed_mask, _ = reference.segment_packbits(
                problem.custom_mask, indptr([mask.size for mask in masks]), "little"
            )
            out, lse = execute(problem, attention_for(problem, device.backend), device)
            at = int(problem.qo_indptr[request]) + row
            assert np.isfinite(lse[at]).all()
            assert np.isneginf(np.delete(lse, at, axis=0)).all()
            assert (np.delete(out, at, axis=0) == 0).all()
            value = problem.requests[request][2][key].astype(np.float32)
            np.testing.assert_allclose(
                out[at].astype(np.float32), np.repeat(value, 2, axis=0), rtol=1e-6
            )


@pytest.mark.parametrize("index_type", [np.int32, np.int64])
def test_index_types(index_type: type, device: Device) -> None:
    """int64 is accepted, and checked into range."""
    for layout in ("ragged", "paged", "paged_lens", "table", "bounds"):
        problem = device.build(cases.MIXED.but("index", layout=layout))
        if problem.kv_indices is not None:
            problem.kv_indices = problem.kv_indices[: problem.kv_indptr[-1]]
        if problem.block_tables is not None:
            problem.block_tables = np.maximum(problem.block_tables, 0)
        for name in (
            "qo_indptr",
            "kv_indptr",
            "kv_indices",
            "last_page_len",
            "kv_lens",
            "block_tables",
        ):
            x = getattr(problem, name)
            if x is not None:
                setattr(problem, name, x.astype(index_type))
        compare(problem, *execute(problem, attention_for(problem, device.backend), device))


def test_index_arrays_may_be_strided_or_lists(device: Device) -> None:
    problem = device.build(cases.MIXED.but("strided", layout="paged"))
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len"):
        x = getattr(problem, name)
        wide = np.full((len(x), 3), cases.GARBAGE, np.int32)
        wide[:, 1] = x
        setattr(problem, name, wide[:, 1])
    compare(problem, *execute(problem, attention_for(problem, device.backend), device))
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len"):
        setattr(problem, name, getattr(problem, name).tolist())
    compare(problem, *execute(problem, attention_for(problem, device.backend), device))


def test_plan_keeps_no_reference_to_index_arrays(device: Device) -> None:
    """The caller may overwrite its index arrays and masks as soon as `plan` returns."""
    problem = device.build(cases.MIXED.but("reused", layout="paged", mask="packed"))
    attention = attention_for(problem, device.backend)
    problem.plan(attention)
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "packed_mask"):
        getattr(problem, name).fill(77)
    out, lse = execute(problem, attention, device, plan=False)
    compare(problem, out, lse)
