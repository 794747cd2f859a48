# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What the batch wrappers have in common: workspaces, failed plans, options that do not stick."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import cases
import flashbsr
import numpy as np
import pytest
from base2 import compare
from cases import Problem
from harness import Device, send
from reference import Variant
from test_wrappers import (
    DECODE,
    PREFILL,
    RAGGED,
    decode_args,
    prefill_args,
    ragged_args,
)


def planned(kind: str, there: Problem, **constructor: Any) -> tuple[Any, Any]:
    """A planned wrapper of a kind, and its run."""
    if kind == "decode":
        wrapper: Any = flashbsr.flashinfer.BatchDecodeWithPagedKVCacheWrapper(**constructor)
        wrapper.plan(*decode_args(there))
    elif kind == "paged":
        wrapper = flashbsr.flashinfer.BatchPrefillWithPagedKVCacheWrapper(**constructor)
        wrapper.plan(*prefill_args(there))
    else:
        wrapper = flashbsr.flashinfer.BatchPrefillWithRaggedKVCacheWrapper(**constructor)
        wrapper.plan(*ragged_args(there))
        return wrapper, lambda **options: wrapper.run(there.q, *there.kv, **options)
    return wrapper, lambda **options: wrapper.run(there.q, there.kv, **options)


KINDS = {"decode": DECODE, "paged": PREFILL, "ragged": RAGGED}
by_kind = pytest.mark.parametrize("kind", KINDS)


@by_kind
def test_lse_base(kind: str, device: Device) -> None:
    """Base 2 unless the natural one is asked for."""
    problem, there = send(device, KINDS[kind])
    _, run = planned(kind, there)
    found = run(return_lse=True)
    compare(problem, *map(device.get, found))
    _, run = planned(kind, there, lse_base="e")
    (out, lse), (natural_out, natural_lse) = (
        map(device.get, x) for x in (found, run(return_lse=True))
    )
    np.testing.assert_array_equal(out, natural_out)
    np.testing.assert_allclose(lse * np.log(2), natural_lse, rtol=1e-6, atol=1e-6)


@by_kind
def test_workspaces(kind: str, device: Device) -> None:
    """`workspace_size` is what an array must have; one byte less is refused."""
    # Long enough to be split wherever it runs: partial states are what a workspace is for.
    _, there = send(device, KINDS[kind].but("", kv_lens=(9000, 10, 500, 10)))
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
    wrapper = flashbsr.flashinfer.BatchPrefillWithPagedKVCacheWrapper(None)
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
    wrapper = flashbsr.flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
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
        flashbsr.flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashbsr.flashinfer.BatchPrefillWithPagedKVCacheWrapper,
    )
    on_host = {
        "use_cuda_graph": True,
        "paged_kv_indptr_buffer": n9,
        "paged_kv_indices_buffer": n5,
    }
    for make, options, name in (
        (decode, {"use_cuda_graph": True}, "use_cuda_graph"),
        (decode, on_host, "paged_kv_indptr_buffer"),
        (prefill, {"use_cuda_graph": True, "paged_kv_indices_buf": n5}, "use_cuda_graph"),
    ):
        with pytest.raises(unsupported, match=rf"^{name}\b"):
            make(None, **options)
    for make, options in (
        (decode, {"paged_kv_indptr_buffer": n9}),
        (prefill, {"max_q_tokens": 5, "custom_mask_buf": n9, "mask_indptr_buf": n5}),
    ):
        assert not make(None, **options).is_cuda_graph_enabled  # without it they say nothing


def test_options_of_gpus_are_refused_on_the_host() -> None:
    """They would be without effect."""
    problem = cases.build(DECODE)
    wrapper = flashbsr.flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*decode_args(problem))
    for option in ({"kv_ready": True}, {"stream": 0}):
        with pytest.raises(flashbsr.errors.UnsupportedError, match=rf"^{next(iter(option))}\b"):
            wrapper.run(problem.q, problem.kv, **option)
    for wish in (True, False, None):  # whose default is on, where there is such a thing
        wrapper.run(problem.q, problem.kv, enable_pdl=wish)
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
        lambda **wish: flashbsr.flashinfer.BatchDecodeWithPagedKVCacheWrapper().plan(
            indptr, indices, last, 8, 2, 64, 16, **wish
        ),
        lambda **wish: flashbsr.flashinfer.BatchPrefillWithPagedKVCacheWrapper().plan(
            rows, indptr, indices, last, 8, 2, 64, 16, **wish
        ),
        lambda **wish: flashbsr.flashinfer.BatchAttention().plan(
            rows, indptr, indices, lens, 8, 2, 64, 64, 16, **wish
        ),
    )
    for plan in plans:
        with pytest.raises(flashbsr.FlashbsrError, match="share_prefixes"):
            plan(share_prefixes="on")
    for wish, shared in (("auto", 1), ("off", 0)):
        decode = flashbsr.flashinfer.BatchDecodeWithPagedKVCacheWrapper()
        prefill = flashbsr.flashinfer.BatchPrefillWithPagedKVCacheWrapper()
        mixed = flashbsr.flashinfer.BatchAttention()
        decode.plan(indptr, indices, last, 8, 2, 64, 16, share_prefixes=wish)
        prefill.plan(rows, indptr, indices, last, 8, 2, 64, 16, share_prefixes=wish)
        mixed.plan(rows, indptr, indices, lens, 8, 2, 64, 64, 16, share_prefixes=wish)
        for wrapper in (decode, prefill, mixed):
            assert len(wrapper.plan_info.shared) == shared
