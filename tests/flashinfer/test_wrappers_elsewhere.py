# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What rooms below promise, through the wrappers: errors, float8, families, trees, explain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import flashbsr
import flashbsr.flashinfer as flashinfer
import numpy as np
import pytest
from bad_calls import BSR, F32, PAGED, RAGGED, Bad, World, check_bad, check_good, i32
from base2 import compare
from cases import BF16, FP8, Case
from flashbsr import _core, errors
from flashbsr.engine.explain import Explanation
from harness import Device, attention_for
from reference import Variant


def single_prefill(w: World, **changes: Any) -> Any:
    arguments = {"q": w.q, "k": w.k, "v": w.v}
    return w.call(flashinfer.single_prefill_with_kv_cache, **{**arguments, **changes})


def single_decode(w: World, **changes: Any) -> Any:
    arguments = {"q": w.q[0], "k": w.k, "v": w.v}
    return w.call(flashinfer.single_decode_with_kv_cache, **{**arguments, **changes})


def decode_wrapper(
    w: World, make: dict[str, Any] | None = None, run: dict[str, Any] | None = None, **changes: Any
) -> Any:
    wrapper = w.call(flashinfer.BatchDecodeWithPagedKVCacheWrapper, None, **(make or {}))
    arguments = {
        "indptr": PAGED["kv_indptr"],
        "indices": PAGED["kv_indices"],
        "last_page_len": PAGED["last_page_len"],
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "page_size": 4,
    }
    w.call(wrapper.plan, **{**arguments, **changes})
    return w.call(wrapper.run, **{"q": w.q[:3], "paged_kv_cache": w.cache, **(run or {})})


def prefill_wrapper(
    w: World, make: dict[str, Any] | None = None, run: dict[str, Any] | None = None, **changes: Any
) -> Any:
    wrapper = w.call(flashinfer.BatchPrefillWithPagedKVCacheWrapper, None, **(make or {}))
    arguments = {
        "qo_indptr": PAGED["qo_indptr"],
        "paged_kv_indptr": PAGED["kv_indptr"],
        "paged_kv_indices": PAGED["kv_indices"],
        "paged_kv_last_page_len": PAGED["last_page_len"],
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 16,
        "page_size": 4,
    }
    w.call(wrapper.plan, **{**arguments, **changes})
    return w.call(wrapper.run, **{"q": w.q, "paged_kv_cache": w.cache, **(run or {})})


def ragged_wrapper(
    w: World, make: dict[str, Any] | None = None, run: dict[str, Any] | None = None, **changes: Any
) -> Any:
    wrapper = w.call(flashinfer.BatchPrefillWithRaggedKVCacheWrapper, None, **(make or {}))
    arguments = {**RAGGED, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 16}
    w.call(wrapper.plan, **{**arguments, **changes})
    return w.call(wrapper.run, **{"q": w.q, "k": w.k, "v": w.v, **(run or {})})


def batch_attention(
    w: World, make: dict[str, Any] | None = None, run: dict[str, Any] | None = None, **changes: Any
) -> Any:
    wrapper = flashinfer.BatchAttention(**(make or {}))
    arguments = {
        "qo_indptr": PAGED["qo_indptr"],
        "kv_indptr": PAGED["kv_indptr"],
        "kv_indices": PAGED["kv_indices"],
        "kv_len_arr": i32(10, 4, 3),
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 16,
        "head_dim_vo": 16,
        "page_size": 4,
    }
    w.call(wrapper.plan, **{**arguments, **changes})
    return w.call(wrapper.run, **{"q": w.q, "kv_cache": w.cache, **(run or {})})


def sparse_wrapper(w: World, run: dict[str, Any] | None = None, **changes: Any) -> Any:
    wrapper = flashinfer.BlockSparseAttentionWrapper(None)
    arguments = {
        "indptr": BSR["indptr"],
        "indices": BSR["indices"],
        "M": 6,
        "N": 16,
        "R": 3,
        "C": 4,
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
    }
    w.call(wrapper.plan, **{**arguments, **changes})
    return w.call(wrapper.run, **{"q": w.q, "k": w.k[:16], "v": w.v[:16], **(run or {})})


GOOD: list[Callable[..., Any]] = [
    single_prefill,
    single_decode,
    decode_wrapper,
    prefill_wrapper,
    ragged_wrapper,
    batch_attention,
    sparse_wrapper,
]

# fmt: off
BAD = [
    # --- single requests
    Bad(single_prefill, "q", "rank 2", lambda w: {"q": w.q[0]}),
    Bad(single_prefill, "k", "head dim", lambda w: {"k": w.k[..., :8]}),
    Bad(single_prefill, "v", "rows", lambda w: {"v": w.v[:16]}),
    Bad(single_prefill, "num_qo_heads|q", "not a multiple", lambda w: {"q": w.q[:, :3]}),
    Bad(single_prefill, "custom_mask", "shape", {"custom_mask": np.ones((6, 16), bool)}),
    Bad(single_prefill, "packed_custom_mask", "length",
        {"packed_custom_mask": np.ones(3, np.uint8)}),
    Bad(single_prefill, "kv_layout", "unknown name", {"kv_layout": "HDN"}),
    Bad(single_prefill, "backend", "unsupported", {"backend": "cudnn"}),
    Bad(single_prefill, "kv_cache_sf", "unsupported", {"kv_cache_sf": np.ones(3, F32)}),
    Bad(single_decode, "q", "rank 3", lambda w: {"q": w.q}),
    Bad(single_decode, "window_left", "text", {"window_left": "all"}),
    # --- wrappers: options that exist elsewhere
    Bad(decode_wrapper, "use_cuda_graph", "unsupported", {"make": {"use_cuda_graph": True}},
        cpu_only=True),
    Bad(decode_wrapper, "backend", "unsupported", {"make": {"backend": "trtllm-gen"}}),
    Bad(decode_wrapper, "jit_args", "unsupported", {"make": {"jit_args": ["uri"]}}),
    Bad(decode_wrapper, "window_right", "unsupported", {"window_right": 4}),
    Bad(decode_wrapper, "q_len_per_req", "zero", {"q_len_per_req": 0}),
    Bad(decode_wrapper, "seq_lens", "contradicts", {"seq_lens": i32(10, 4, 4)}, cpu_only=True),
    Bad(decode_wrapper, "window_left", "not planned", {"run": {"window_left": 3}}),
    Bad(decode_wrapper, "q_len_per_req", "without tensor cores", {"q_len_per_req": 2}),
    Bad(decode_wrapper, "skip_softmax_threshold_scale_factor", "unsupported",
        {"run": {"skip_softmax_threshold_scale_factor": 0.5}}),
    Bad(decode_wrapper, "q_data_type|q_dtype", "unknown", {"q_data_type": "floaty"}),
    Bad(prefill_wrapper, "prefix_len_ptr", "missing", {"token_pos_in_items_len": 3}),
    Bad(prefill_wrapper, "token_pos_in_items_ptr", "too short",
        {"token_pos_in_items_len": 3, "prefix_len_ptr": i32(1, 1, 1),
         "token_pos_in_items_ptr": i32(0, 0)}),
    Bad(prefill_wrapper, "prefix_len_ptr", "with a mask",
        {"token_pos_in_items_len": 1, "prefix_len_ptr": i32(1, 1, 1),
         "token_pos_in_items_ptr": i32(0, 0, 0), "custom_mask": np.ones(40, bool)}),
    Bad(prefill_wrapper, "paged_kv_last_page_len|last_page_len", "zero",
        {"paged_kv_last_page_len": i32(2, 0, 3)}),
    Bad(prefill_wrapper, "use_fp16_softmax", "unsupported", {"run": {"use_fp16_softmax": True}}),
    Bad(ragged_wrapper, "v_indptr", "other offsets", {"v_indptr": i32(0, 10, 15, 17)}),
    Bad(ragged_wrapper, "o_indptr", "other offsets", {"o_indptr": i32(0, 2, 4, 6)}),
    Bad(ragged_wrapper, "o_scale", "unsupported", {"run": {"o_scale": 2.0}}),
    Bad(ragged_wrapper, "kv_layout", "unknown name", {"make": {"kv_layout": "DHN"}}),
    Bad(batch_attention, "device", "unsupported", {"make": {"device": "cuda"}}, cpu_only=True),
    Bad(batch_attention, "use_profiler", "unsupported", {"use_profiler": True}),
    Bad(batch_attention, "logits_soft_cap", "not planned", {"run": {"logits_soft_cap": 3.0}}),
    Bad(sparse_wrapper, "pos_encoding_mode", "unsupported", {"pos_encoding_mode": "ALIBI"}),
    Bad(sparse_wrapper, "k", "another N than planned", {"N": 18}),
    Bad(sparse_wrapper, "indptr", "of one head", {"per_head": True}),
    Bad(sparse_wrapper, "indices", "out of range", {"indices": i32(0, 4, 1)}),
    Bad(sparse_wrapper, "indices", "out of range, causal",
        {"indices": i32(0, 4, 1), "causal": True}),
]
# fmt: on


@pytest.mark.parametrize("good", GOOD, ids=lambda call: call.__name__)
def test_good_call(good: Callable[..., Any], device: Device) -> None:
    check_good(good, device)


@pytest.mark.parametrize(
    "bad", BAD, ids=lambda bad: f"{bad.call.__name__}-{bad.names.split('|')[0]}-{bad.why}"
)
def test_bad_call(bad: Bad, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    check_bad(bad, device, monkeypatch)


def test_explain() -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, "NHD")
    wrapper.plan(np.array([0, 2]), np.array([1, 0]), np.array([3]), 4, 2, 64, 16)
    e = wrapper.explain(bandwidth=1e9)
    assert isinstance(e, Explanation)
    assert e.limit == "memory"
    with pytest.raises(flashbsr.PlanError):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper().explain()


LOW = Case(
    "float8_q",
    (5, 40, 1),
    (37, 40, 300),
    heads=(8, 2),
    dims=(128, 128),
    dtypes=FP8,
    layout="paged",
    variant=Variant(causal=True),
)


def test_float8_options() -> None:
    problem = cases.build(LOW)
    tables = problem.kv_indptr, problem.kv_indices, problem.last_page_len
    sizes = *LOW.heads, LOW.dims[0]
    types = {"q_data_type": FP8[0], "kv_data_type": FP8[1], "o_data_type": np.float16}
    options = {**types, "fp8_accumulation": "fast"}
    attention = attention_for(problem, o_dtype="float16")
    problem.plan(attention)
    expected = attention.run(problem.q, problem.kv)

    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(None)
    prefill.plan(problem.qo_indptr, *tables, *sizes, LOW.page_size, causal=True, **options)
    mixed = flashinfer.BatchAttention()
    mixed.plan(
        problem.qo_indptr, *tables[:2], problem.kv_lens, *sizes, LOW.dims[1], LOW.page_size,
        causal=True, **options,
    )  # fmt: skip
    for out in (prefill.run(problem.q, problem.kv), mixed.run(problem.q, problem.kv)[0]):
        assert out.dtype == np.float16
        np.testing.assert_array_equal(out, expected)
    with pytest.raises(flashbsr.FlashbsrError, match=r"^fp8_accumulation\b.*'fast'"):
        prefill.plan(problem.qo_indptr, *tables, *sizes, LOW.page_size, fp8_accumulation="slow")


@pytest.mark.parametrize("family", ["fa2", "fa3"])
def test_kernel_families_are_cuda(family: str) -> None:
    """They are names of the CUDA engine: refused where that is, taken where it is."""
    x = np.zeros((1, 1, 64), np.float16)
    calls = [
        lambda: flashinfer.single_prefill_with_kv_cache(x, x, x, backend=family),
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, backend=family),
        lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(None, backend=family),
        lambda: flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None, backend=family),
        lambda: flashinfer.BlockSparseAttentionWrapper(None, backend=family),
    ]
    if not _core.cuda_problem():
        with pytest.raises(errors.DeviceError, match=rf"^q\b.*backend='{family}'"):
            calls.pop(0)()
        for call in calls:
            call()
        return
    for call in calls:
        with pytest.raises(errors.UnsupportedError, match=rf"^backend: got '{family}'; .*'cpu'"):
            call()


TREES = Case("tree", (8, 1, 0, 5, 16), (300, 40, 9, 5, 129), dtypes=BF16, layout="paged")


def test_trees(device: Device) -> None:
    rng = np.random.default_rng(5)
    trees = flashbsr.draft_trees(
        [[-1, *(int(rng.integers(-1, i)) for i in range(1, n))][:n] for n in TREES.q_lens]
    )
    problem = device.build(TREES)
    sizes = [q * kv for q, kv in zip(TREES.q_lens, TREES.kv_lens, strict=True)]
    masks = np.split(trees.mask(problem.kv_lens), np.cumsum(sizes)[:-1])
    problem.requests = [
        (q, k, v, mask.reshape(len(q), len(k)))
        for (q, k, v, _), mask in zip(problem.requests, masks, strict=True)
    ]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(backend=device.backend)
    (num_qo, num_kv), p = TREES.heads, problem
    wrapper.plan(
        trees.qo_indptr, p.kv_indptr, p.kv_indices, p.last_page_len, num_qo, num_kv, 64,
        TREES.page_size, causal=True, tree_parents=device.put(trees.parents),
    )  # fmt: skip
    sent = device.upload(problem)
    out, lse = wrapper.run(sent.q, sent.kv, return_lse=True)
    compare(problem, device.get(out), device.get(lse))
