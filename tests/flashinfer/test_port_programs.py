# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Programs as FlashInfer's users write them: older names, attributes, texts of errors, items."""

from __future__ import annotations

from typing import Any

import flashbsr.flashinfer as flashinfer
import numpy as np
import pytest
import reference
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
from reference import State, Variant

torch = framework("torch")

# --- older names


def test_begin_forward_and_forward(device: Device) -> None:
    """As SGLang calls it: options come with forward, whose defaults hold there."""
    where = place(device)
    batch = Batch(where, LENS, Q_LENS)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(where), "NHD")
    wrapper.begin_forward(batch.qo_indptr, *batch.table, *SIZES, q_data_type=torch.float16)
    options = {"causal": True, "sm_scale": 0.2, "window_left": 12, "logits_soft_cap": 5.0}
    for _ in range(2):  # two layers of a step
        out = wrapper.forward(batch.q, batch.cache, **options, k_scale=1.5, v_scale=0.5)
        near(out, batch.exact(Variant(**options), k_scale=1.5, v_scale=0.5))
    out, lse = wrapper.forward_return_lse(batch.q, batch.cache)  # causal False and so on
    near(out, batch.exact(), lse)
    wrapper.end_forward()
    # The next step plans for what the last forward asked; a run gets what it was given itself.
    wrapper.forward(batch.q, batch.cache, True)
    wrapper.begin_forward(batch.qo_indptr, *batch.table, *SIZES)
    engine = wrapper.attention if wrapper._asked is None else wrapper._attention
    near(wrapper.forward(batch.q, batch.cache, True), batch.exact(Variant(causal=True)))
    assert wrapper.attention is engine
    wrapper.begin_forward(batch.qo_indptr, *batch.table, *SIZES)
    near(wrapper.run(batch.q, batch.cache), batch.exact())


def test_forward_of_decodes_and_ragged(device: Device) -> None:
    where = place(device)
    batch = Batch(where, LENS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(where), "NHD")
    wrapper.begin_forward(*batch.table, *SIZES, "NONE", window_left=3, data_type=torch.float16)
    near(wrapper.forward(batch.q, batch.cache, "NONE", 0.5), batch.exact(q_scale=0.5))
    near(wrapper.run_return_lse(batch.q, batch.cache)[0], batch.exact())
    with pytest.raises(TypeError, match="causal"):
        wrapper.forward(batch.q, batch.cache, causal=True)
    k, v = (torch.cat([torch.tensor(kv[i]) for kv in batch.exact_kv]).half() for i in (0, 1))
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(where), "NHD")
    ragged.begin_forward(batch.qo_indptr, batch.ints(np.cumsum([0, *LENS])), HEADS, KV_HEADS, DIM)
    out, lse = ragged.forward_return_lse(batch.q, k.to(where), v.to(where), window_left=9)
    near(out, batch.exact(Variant(window_left=9)), lse)


def test_fast_decode_plan(device: Device) -> None:
    """SGLang puts it in the place of begin_forward."""
    where = place(device)
    batch, other = Batch(where, LENS), Batch(where, LENS[::-1], seed=1)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(where), "NHD")
    with pytest.raises(ValueError, match="prior plan"):
        flashinfer.fast_decode_plan(wrapper, *batch.table, *SIZES)
    wrapper.plan(*batch.table, *SIZES, data_type=torch.float16)
    wrapper.begin_forward = lambda *args, **kwargs: flashinfer.fast_decode_plan(
        wrapper, *args, **kwargs
    )
    wrapper.begin_forward(
        None, other.indices, other.last, *SIZES, global_override_indptr_cpu=other.indptr.cpu()
    )
    near(wrapper.forward(other.q, other.cache, sm_scale=0.2), other.exact(Variant(sm_scale=0.2)))


def test_cascades_by_older_names(device: Device) -> None:
    where = place(device)
    batch = Batch(where, (40, 70))
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(1, workspace(where), "NHD")
    wrapper.begin_forward([batch.qo_indptr], [batch.indptr], [batch.indices], [batch.last], *SIZES)
    near(wrapper.forward(batch.q, batch.cache), batch.exact())
    wrapper.reset_workspace_buffer(workspace(where), [workspace(where, 1)])


# --- attributes


def test_attributes(device: Device) -> None:
    where = place(device)
    batch = Batch(where, LENS, Q_LENS)
    buffer = workspace(where)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD", backend="auto")
    assert wrapper._plan_info is None
    wrapper.plan(batch.qo_indptr, *batch.table, *SIZES, causal=True, window_left=9, sm_scale=0.3)
    assert wrapper._plan_info is not None
    assert wrapper._backend == "auto" and not wrapper.is_cuda_graph_enabled
    assert wrapper._float_workspace_buffer is buffer
    assert wrapper._int_workspace_buffer.dtype == torch.uint8
    assert wrapper._qo_indptr_buf is batch.qo_indptr
    assert wrapper._paged_kv_indptr_buf is batch.indptr
    assert wrapper._paged_kv_indices_buf is batch.indices
    assert wrapper._paged_kv_last_page_len_buf is batch.last
    assert (wrapper._window_left, wrapper._causal, wrapper._sm_scale) == (9, True, 0.3)
    assert wrapper._logits_soft_cap == 0.0 and wrapper._pos_encoding_mode == "NONE"
    decoder = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, use_tensor_cores=True)
    assert decoder.use_tensor_cores
    tokens = Batch(where, LENS)
    decoder.plan(*tokens.table, *SIZES)
    assert decoder._paged_kv_indices_buf is tokens.indices


def test_workspace_sizes(device: Device) -> None:
    batch = Batch(place(device), (3000, 10))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(place(device)))
    floats, ints = wrapper.workspace_size(*batch.table, *SIZES, q_data_type=torch.float16)
    assert floats >= 0 and ints > 0
    assert wrapper._plan_info is None


# --- parts beside each other


@pytest.mark.parametrize("within", [True, False])
def test_pod(within: bool, device: Device) -> None:
    where = place(device)
    batch = Batch(where, LENS)
    k, v = batch.cache[:, 0], batch.cache[:, 1]
    page = int(batch.indices[3])  # a prompt of one page of the cache, or a copy of it
    k_p, v_p = k[page], v[page]
    if not within:
        k_p, v_p = k_p.clone(), v_p.clone()
    q_p = torch.randn(5, HEADS, DIM, device=where).half()
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(where), "NHD")
    wrapper.plan(*batch.table, *SIZES, q_data_type=torch.float16)
    out_p, out_d = wrapper.run(q_p, k_p, v_p, batch.q, batch.cache, causal_p=True)
    exact = (x.double().cpu().numpy() for x in (q_p, k_p, v_p))
    near(out_p, reference.attend(*exact, Variant(causal=True)))
    near(out_d, batch.exact())


@pytest.mark.parametrize("within", [True, False])
def test_batch_pod(within: bool, device: Device) -> None:
    where = place(device)
    prompts, decodes = Batch(where, (40, 33), (20, 33)), Batch(where, LENS, seed=2)
    cache_p, cache_d, table_d = prompts.cache, decodes.cache, decodes.table
    if within:
        cache_p = cache_d = torch.cat([cache_p, cache_d])
        table_d = (table_d[0], table_d[1] + len(prompts.cache), table_d[2])
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(where), "NHD")
    wrapper.plan(
        prompts.qo_indptr, *prompts.table, decodes.qo_indptr, *table_d, *SIZES,
        data_type=torch.float16,
    )  # fmt: skip
    (out_p, out_d), (lse_p, lse_d) = wrapper.run(
        prompts.q, cache_p, decodes.q, cache_d, causal_p=True, return_lse=True
    )
    near(out_p, prompts.exact(Variant(causal=True)), lse_p)
    near(out_d, decodes.exact(), lse_d)


def test_shared_prefix_beside_the_cache(device: Device) -> None:
    where = place(device)
    batch = Batch(where, (40, 70))
    k, v = (torch.randn(48, KV_HEADS, DIM, device=where).half() for _ in "kv")
    wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(where), "NHD")
    wrapper.begin_forward(*batch.table, *SIZES, data_type=torch.float16)
    out = wrapper.forward(batch.q, k, v, batch.cache)
    assert out.dtype == torch.float16
    prefix = [x.double().cpu().numpy() for x in (k, v)]
    batch.exact_kv = [
        tuple(np.concatenate([p, x]) for p, x in zip(prefix, kv, strict=True))
        for kv in batch.exact_kv
    ]
    near(out, batch.exact(), atol=2e-3)


# --- error texts


def test_several_tokens_per_request(device: Device) -> None:
    where = place(device)
    batch = Batch(where, LENS, (3, 3, 3, 3))
    plain = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(where))
    with pytest.raises(ValueError, match="use_tensor_cores"):
        plain.plan(*batch.table, *SIZES, q_len_per_req=3)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(where), use_tensor_cores=True)
    with pytest.raises(ValueError, match="empty KV range"):  # the first request has one token
        wrapper.plan(*batch.table, *SIZES, q_len_per_req=3)
    batch = Batch(where, (3, 130, 40, 64), (3, 3, 3, 3))
    wrapper.plan(*batch.table, *SIZES, q_len_per_req=3)
    out, lse = wrapper.run(batch.q, batch.cache, return_lse=True, q_len_per_req=3)
    near(out, batch.exact(Variant(causal=True)), lse)
    with pytest.raises(ValueError, match="q_len_per_req"):
        wrapper.run(batch.q[:4], batch.cache)


def test_several_tokens_with_fa3(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """NotImplementedError, which says who has it."""
    batch = Batch(place(device), (3, 130), (3, 3))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, use_tensor_cores=True)
    monkeypatch.setattr(wrapper, "_backend", "fa3")  # which no CPU has
    with pytest.raises(NotImplementedError, match="fa2"):
        wrapper.plan(*batch.table, *SIZES, q_len_per_req=3)
    with pytest.raises(ValueError, match="fa2"):
        wrapper.plan(*batch.table, *SIZES, q_len_per_req=3)


# --- multi-item scoring


def items_mask(q_len: int, kv_len: int, prefix: int, position: list[int]) -> np.ndarray:
    """The mask, pair by pair."""
    mask = np.zeros((q_len, kv_len), bool)
    for row in range(q_len):
        i = kv_len - q_len + row
        for j in range(i + 1):
            own = i >= prefix and i < j + position[i - prefix]
            mask[row, j] = i < prefix or j < prefix or own
    return mask


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("paged", [True, False])
def test_multi_item_scoring(paged: bool, whole: bool, device: Device, kernel_cache: None) -> None:
    """Items behind a prefix do not see each other; uint16 and uint32 arrays, with padding."""
    where = place(device)
    prefixes, items = (9, 4), ((5, 3, 7), (2, 8))
    positions = [[x for n in own for x in range(n + 1)] + [0] for own in items]
    kv_lens = [p + len(own) for p, own in zip(prefixes, positions, strict=True)]
    q_lens = kv_lens if whole else [len(own) - 3 for own in positions]
    stride = max(map(len, positions)) + 2
    flat = [own + [0] * (stride - len(own)) for own in positions]
    batch = Batch(where, kv_lens, q_lens)
    options = {
        "prefix_len_ptr": torch.tensor(prefixes).to(torch.uint32).to(where),
        "token_pos_in_items_ptr": torch.tensor(flat).flatten().to(torch.uint16).to(where),
        "token_pos_in_items_len": stride,
        "max_item_len_ptr": torch.tensor([7, 8]).to(torch.uint16).to(where),
    }
    if paged:
        wrapper = prefill(where, batch, causal=True, **options)
        out, lse = wrapper.run(batch.q, batch.cache, return_lse=True)
    else:
        k, v = (torch.cat([torch.tensor(kv[i]) for kv in batch.exact_kv]).half() for i in (0, 1))
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(where), "NHD")
        indptr = batch.ints(np.cumsum([0, *kv_lens]))
        wrapper.plan(batch.qo_indptr, indptr, HEADS, KV_HEADS, DIM, causal=True, **options)
        out, lse = wrapper.run(batch.q, k.to(where), v.to(where), return_lse=True)
    masks = [items_mask(*sizes) for sizes in zip(q_lens, kv_lens, prefixes, positions, strict=True)]
    near(out, batch.exact(masks=masks), lse)
    if paged:  # the next plan has none
        wrapper.plan(batch.qo_indptr, *batch.table, *SIZES, causal=True)
        near(wrapper.run(batch.q, batch.cache), batch.exact(Variant(causal=True)))


def test_custom_masks(device: Device) -> None:
    where = place(device)
    batch = Batch(where, LENS, Q_LENS)
    rng = np.random.default_rng(3)
    masks = [rng.random(sizes) < 0.7 for sizes in zip(Q_LENS, LENS, strict=True)]
    flat = torch.tensor(np.concatenate([m.ravel() for m in masks]), device=where)
    sizes = batch.ints(np.cumsum([0, *(m.size for m in masks)]))
    packed, _ = flashinfer.segment_packbits(flat, sizes, bitorder="little")
    exact = batch.exact(masks=masks)
    for mask in ({"custom_mask": flat}, {"packed_custom_mask": packed}):
        out, lse = prefill(where, batch, causal=True, **mask).run(
            batch.q, batch.cache, return_lse=True
        )
        near(out, exact, lse)


def test_batch_invariance(device: Device) -> None:
    """`fixed_split_size` in pages: a request's bits do not depend on the others."""
    where = place(device)
    batch = Batch(where, (700, 40, 300))
    alone = [x[:2] for x in (batch.indptr, batch.last)]
    wrapper = decode(where, batch, fixed_split_size=4)
    both = wrapper.run(batch.q, batch.cache)
    near(both, batch.exact())
    wrapper.plan(alone[0], batch.indices, batch.last[:1], *SIZES, fixed_split_size=4)
    np.testing.assert_array_equal(read(wrapper.run(batch.q[:1], batch.cache)), read(both[:1]))


def test_states_are_merged(device: Device) -> None:
    """Two halves of the KV, by their base-2 LSE."""
    where = place(device)
    batch = Batch(where, (64, 96))
    halves: list[tuple[Any, Any]] = []
    for part in (slice(0, 2), slice(2, None)):
        pages = [own[part] for own in batch.pages]
        ends = batch.ints(np.cumsum([0, *map(len, pages)]))
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(where))
        last = batch.ints([PAGE, PAGE])
        wrapper.plan(ends, batch.ints(np.concatenate(pages)), last, *SIZES)
        halves.append(wrapper.run(batch.q, batch.cache, return_lse=True))
    (v_a, s_a), (v_b, s_b) = halves
    exact: State = batch.exact()
    near(*(x := flashinfer.merge_state(v_a, s_a, v_b, s_b))[:1], exact, x[1])
    v, s = flashinfer.merge_states(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))
    near(v, exact, s)
    flashinfer.merge_state_in_place(v_a, s_a, v_b, s_b)
    near(v_a, exact, s_a)
