# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Programs as FlashInfer's users write them: wrappers, against float64."""

from __future__ import annotations

import math
from typing import Any

import flashbsr.flashinfer as flashinfer
import numpy as np
import pytest
from harness import Device, framework
from port import (
    DIM,
    HEADS,
    KV_HEADS,
    LENS,
    PAGE,
    Q_LENS,
    SIZES,
    Batch,
    decode,
    near,
    place,
    prefill,
    read,
    workspace,
)
from reference import Variant

torch = framework("torch")

# --- types and defaults


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("named", [None, "text", "torch", "data_type"])
def test_types(dtype: Any, named: str | None, device: Device) -> None:
    """float16 unless another is named; arrays of another type than the default are taken."""
    batch = Batch(place(device), LENS, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    options = {
        None: {}, "text": {"q_data_type": name}, "torch": {"q_data_type": dtype},
        "data_type": {"data_type": dtype},
    }[named]  # fmt: skip
    wrapper = decode(place(device), batch, **options)
    out, lse = wrapper.run(batch.q, batch.cache, return_lse=True)
    assert out.dtype == dtype
    near(out, batch.exact(), lse, atol=4e-3 if dtype == torch.float16 else 3e-2)


def test_given_types_hold(device: Device) -> None:
    batch = Batch(place(device), LENS)
    wrapper = decode(place(device), batch, q_data_type=torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16"):
        wrapper.run(batch.q, batch.cache)
    mixed = flashinfer.BatchAttention("NHD", device.name)
    mixed.plan(
        batch.qo_indptr, batch.indptr, batch.indices, batch.lens, HEADS, KV_HEADS, DIM, DIM, PAGE
    )
    near(*mixed.run(batch.q, batch.cache)[:1], batch.exact())  # its default is bfloat16


def test_block_sparse_output_type(device: Device) -> None:
    """float16 where q's type is named, as FlashInfer has it; q's own type otherwise."""
    where = place(device)
    x = torch.randn(32, 2, 64, device=where).to(torch.bfloat16)
    for options, expected in (
        ({"q_data_type": torch.bfloat16}, torch.float16),
        ({"q_data_type": torch.bfloat16, "o_data_type": torch.bfloat16}, torch.bfloat16),
        ({}, torch.bfloat16),
    ):
        wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(where))
        ends, blocks = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [0, 1]))
        wrapper.plan(ends, blocks, 32, 32, 16, 16, 2, 2, 64, **options)
        assert wrapper.run(x, x, x).dtype == expected


# --- workspaces


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float32])
def test_workspaces_of_any_type(dtype: Any, device: Device) -> None:
    where = place(device)
    batch = Batch(where, (3000, 10, 500, 10))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(where, dtype=dtype))
    wrapper.plan(*batch.table, *SIZES)
    near(wrapper.run(batch.q, batch.cache), batch.exact())
    assert wrapper._float_workspace_buffer.dtype == dtype


@pytest.mark.parametrize(
    "kind",
    [
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
        flashinfer.BlockSparseAttentionWrapper,
        flashinfer.PODWithPagedKVCacheWrapper,
    ],
)
def test_workspaces_are_aligned(kind: Any, device: Device) -> None:
    buffer = workspace(place(device), 1)
    with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
        kind(buffer[8:])
    wrapper = kind(buffer)
    with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
        wrapper.reset_workspace_buffer(buffer[1:], wrapper._int_workspace_buffer)
    with pytest.raises(ValueError, match="int_workspace_buffer must be 16-byte aligned"):
        wrapper.reset_workspace_buffer(buffer, buffer[8:])
    wrapper.reset_workspace_buffer(buffer, workspace(place(device), 1))
    assert wrapper._float_workspace_buffer is buffer


def test_another_workspace(device: Device) -> None:
    batch = Batch(place(device), LENS)
    wrapper = decode(place(device), batch)
    wrapper.reset_workspace_buffer(workspace(place(device)), wrapper._int_workspace_buffer)
    with pytest.raises(ValueError, match="plan"):
        wrapper.run(batch.q, batch.cache)
    wrapper.plan(*batch.table, *SIZES)
    near(wrapper.run(batch.q, batch.cache), batch.exact())


# --- options that change nothing


def same(first: Any, second: Any) -> None:
    np.testing.assert_array_equal(read(first), read(second))


def test_options_without_effect(device: Device) -> None:
    where = place(device)
    batch = Batch(where, LENS, Q_LENS)
    expected = prefill(where, batch, causal=True).run(batch.q, batch.cache)
    near(expected, batch.exact(Variant(causal=True)))
    buffers = {
        name: torch.zeros(9, dtype=torch.int32, device=where)
        for name in ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf",
                     "paged_kv_last_page_len_buf", "mask_indptr_buf")
    }  # fmt: skip
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(where), "NHD", custom_mask_buf=torch.zeros(9, dtype=torch.uint8, device=where),
        jit_kwargs={"use_sliding_window": True}, **buffers,
    )  # fmt: skip
    assert not wrapper.is_cuda_graph_enabled
    wrapper.plan(
        batch.qo_indptr, *batch.table, *SIZES, causal=True, use_fp16_qk_reduction=True,
        non_blocking=False, seq_lens=batch.lens, seq_lens_q=batch.ints(Q_LENS),
        block_tables=batch.blocks, max_token_per_sequence=30, max_sequence_kv=130,
    )  # fmt: skip
    same(wrapper.run(batch.q, batch.cache, enable_pdl=True), expected)


def test_ragged_options_without_effect(device: Device) -> None:
    where = place(device)
    batch = Batch(where, LENS, Q_LENS)
    k, v = (torch.cat([torch.tensor(kv[i]) for kv in batch.exact_kv]) for i in (0, 1))
    k, v = k.half().to(where), v.half().to(where)
    indptr = batch.ints(np.cumsum([0, *LENS]))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(where), "NHD")
    wrapper.plan(batch.qo_indptr, indptr, HEADS, KV_HEADS, DIM, causal=True)
    out, lse = wrapper.run_return_lse(batch.q, k, v)
    near(out, batch.exact(Variant(causal=True)), lse)
    wrapper.plan(
        batch.qo_indptr, indptr, HEADS, KV_HEADS, DIM, causal=True, seq_lens=batch.lens,
        seq_lens_q=batch.ints(Q_LENS), max_token_per_sequence=30, max_sequence_kv=130,
        v_indptr=indptr, o_indptr=batch.qo_indptr, use_fp16_qk_reduction=True,
    )  # fmt: skip
    same(wrapper.run(batch.q, k, v), out)
    with pytest.raises(ValueError, match="v_indptr"):
        wrapper.plan(
            batch.qo_indptr, indptr, HEADS, KV_HEADS, DIM, v_indptr=indptr.flip(0).contiguous()
        )


# --- arguments


def test_caches_as_lists(device: Device) -> None:
    batch = Batch(place(device), LENS, layout="HND")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(place(device)), "HND")
    wrapper.plan(*batch.table, *SIZES)
    near(wrapper.run(batch.q, [batch.cache[:, 0], batch.cache[:, 1]]), batch.exact())


def test_index_arrays_of_two_places(device: Device) -> None:
    """Indptr on the host, indices and lengths where the cache is."""
    batch = Batch(place(device), LENS, Q_LENS)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(place(device)))
    wrapper.plan(
        batch.qo_indptr.cpu(), batch.indptr.cpu(), batch.indices, batch.last.cpu(), *SIZES,
        seq_lens=batch.lens, causal=True,
    )  # fmt: skip
    near(wrapper.run(batch.q, batch.cache), batch.exact(Variant(causal=True)))
    decoder = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(place(device)))
    tokens = Batch(place(device), LENS)
    decoder.plan(tokens.indptr.cpu(), tokens.indices, tokens.last.cpu(), *SIZES)
    near(decoder.run(tokens.q, tokens.cache), tokens.exact())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_of_one_element(shape: tuple[int, ...], device: Device) -> None:
    where = place(device)
    batch = Batch(where, LENS)
    wrapper = decode(where, batch)
    values = {"q_scale": 0.5, "k_scale": 1.5, "v_scale": 2.0}
    scales = {name: torch.full(shape, x, device=where) for name, x in values.items()}
    out, lse = wrapper.run(batch.q, batch.cache, return_lse=True, **scales)
    near(out, batch.exact(**values), lse, atol=8e-3)


# --- run


def test_lse_alone(device: Device) -> None:
    """`lse=` is filled; the output comes alone."""
    batch = Batch(place(device), LENS)
    wrapper = decode(place(device), batch)
    lse = torch.full((len(LENS), HEADS), math.nan, device=place(device))
    out = wrapper.run(batch.q, batch.cache, lse=lse)
    near(out, batch.exact(), lse)
    into = torch.empty_like(batch.q)
    found = wrapper.run(batch.q, batch.cache, out=into, lse=lse, return_lse=True)
    assert found[0] is into and found[1] is lse


def test_positional_scales(device: Device) -> None:
    batch = Batch(place(device), LENS, Q_LENS)
    wrapper = prefill(place(device), batch)
    q, k = torch.rand(HEADS, device=place(device)), torch.rand(KV_HEADS, device=place(device))
    out = wrapper.run(batch.q, batch.cache, q, k, 0.5)
    exact = batch.exact(q_scale=q.cpu().numpy(), k_scale=k.cpu().numpy(), v_scale=0.5)
    near(out, exact)
    with pytest.raises(ValueError, match="scale_q, scale_k, scale_v"):
        wrapper.run(batch.q, batch.cache, q, k)


SINK = (
    "uri", torch.float16, torch.float16, torch.float16, torch.int32, DIM, DIM, ["sink"], ["float"],
    ["sm_scale"], ["double"], "AttentionSink", "struct AttentionSink : AttentionVariantBase {};",
)  # fmt: skip
SIGMOID = (
    *SINK[:7], [], [], ["logits_scale", "sigmoid_bias"], ["double", "double"], "FlashSigmoid", "..",
)  # fmt: skip


@pytest.mark.parametrize("own", [True, False])
def test_sinks(own: bool, device: Device) -> None:
    """The variant by name, or its wrapper; the run's scale is not the planned one."""
    where = place(device)
    batch = Batch(where, LENS, Q_LENS)
    if own:
        wrapper: Any = flashinfer.BatchAttentionWithAttentionSinkWrapper(
            workspace(where), "NHD", q_data_type=torch.float16, kv_data_type=torch.float16,
            head_dim_qk=DIM, head_dim_vo=DIM, window_left=20,
        )  # fmt: skip
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace(where), "NHD", backend="auto", jit_args=SINK,
            jit_kwargs={"use_sliding_window": True},
        )  # fmt: skip
    wrapper.plan(
        batch.qo_indptr, *batch.table, *SIZES, causal=True, window_left=20,
        q_data_type=torch.float16, kv_data_type=torch.float16,
    )  # fmt: skip
    sink = torch.randn(HEADS, device=where)
    out, lse = wrapper.run(batch.q, batch.cache, sink, 0.2, return_lse=True)
    variant = Variant(causal=True, window_left=20, sm_scale=0.2)
    near(out, batch.exact(variant, sinks=sink.cpu().numpy()), lse)


def test_sigmoids(device: Device) -> None:
    """Scale and bias come with the run, which plans where the bias is another."""
    where = place(device)
    batch = Batch(where, LENS, Q_LENS)
    k, v = (torch.cat([torch.tensor(kv[i]) for kv in batch.exact_kv]) for i in (0, 1))
    k, v = k.half().to(where), v.half().to(where)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(where), "NHD", jit_args=SIGMOID
    )
    wrapper.plan(batch.qo_indptr, batch.ints(np.cumsum([0, *LENS])), HEADS, KV_HEADS, DIM)
    for scale, bias in ((0.1, -1.0), (0.3, 0.25), (0.3, 0.25)):
        out = wrapper.run(batch.q, k, v, scale, bias)
        variant = Variant(activation="sigmoid", sm_scale=scale, sigmoid_bias=bias)
        near(out, batch.exact(variant), atol=6e-2)


def test_unknown_variants() -> None:
    with pytest.raises(ValueError, match="AttentionSpec.from_source"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, jit_args=(*SINK[:-2], "Mine", "..."))
