# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A wrapper that planned before computes as a new one does; what is said twice is not forgotten.

All of this was wrong until a random walk on reused wrappers found it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashbsr
import pytest
from harness import framework

torch = framework("torch")

import flashbsr.flashinfer as fi  # noqa: E402
from flashbsr.flashinfer.decode import (  # noqa: E402
    fast_decode_plan,
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from flashbsr.flashinfer.mla import BatchMLAPagedAttentionWrapper  # noqa: E402

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 16, 4


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def table() -> tuple[Any, ...]:
    return ints(0, 2), ints(1, 3), ints(2), HEADS, KV_HEADS, DIM, SIZE


def problem(dtype: Any = torch.float32) -> tuple[Any, Any]:
    torch.manual_seed(0)
    q, cache = torch.randn(1, HEADS, DIM), torch.randn(6, 2, SIZE, KV_HEADS, DIM)
    return q.to(dtype), cache.to(dtype)


def decode(*plans: dict[str, Any]) -> Any:
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper()
    for options in plans:
        wrapper.plan(*table(), **options)
    return wrapper


def test_a_type_that_was_left_out_is_not_that_type() -> None:
    q, cache = problem(torch.bfloat16)
    assert decode({"q_data_type": "float16"}, {}).run(q, cache).dtype == torch.bfloat16
    with pytest.raises(flashbsr.DTypeError):
        decode({}, {"q_data_type": "float16"}).run(q, cache)
    found = []
    for plans in ({}, {"o_data_type": "float16"}), ({"o_data_type": "float16"}, {}):
        wrapper = fi.BlockSparseAttentionWrapper()
        for options in plans:
            wrapper.plan(ints(0, 1), ints(0), 4, 4, 4, 4, HEADS, KV_HEADS, DIM, **options)
        x = (torch.randn(4, n, DIM).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS))
        found.append(wrapper.run(*x).dtype)
    assert found == [torch.float16, torch.bfloat16]


def test_a_scale_that_changed_in_its_tensor() -> None:
    q, cache = problem()
    scale = torch.tensor(0.1)
    wrapper = decode({"sm_scale": scale})
    wrapper.run(q, cache)
    first = fi.single_decode_with_kv_cache(q[0], cache[0, 0], cache[0, 1], sm_scale=scale)
    scale.fill_(2.0)
    wrapper.plan(*table(), sm_scale=scale)
    assert torch.equal(wrapper.run(q, cache), decode({"sm_scale": 2.0}).run(q, cache))
    second = fi.single_decode_with_kv_cache(q[0], cache[0, 0], cache[0, 1], sm_scale=scale)
    assert not torch.equal(first, second)


def test_splits_are_in_pages_of_this_plan() -> None:
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper()
    for size in (4, 64):
        pages = torch.arange(256 // size, dtype=torch.int32)
        wrapper.plan(
            ints(0, len(pages)), pages, ints(size), HEADS, KV_HEADS, DIM, size, fixed_split_size=2
        )
        assert wrapper.attention.task.fixed_split_size == 2 * size


def test_a_fast_plan_keeps_the_output_s_type() -> None:
    q, cache = problem(torch.float16)
    wrapper = decode({"q_data_type": torch.float16, "o_data_type": torch.float32})
    fast_decode_plan(wrapper, *table())
    assert wrapper.run(q, cache).dtype == torch.float32


def test_no_plan_after_one_that_raised() -> None:
    q, cache = problem()
    wrapper = decode({})
    with pytest.raises(flashbsr.IndexRangeError):
        wrapper.plan(ints(0, 2), ints(1, -3), *table()[2:])
    for options in ({}, {"sm_scale": 0.5}):
        with pytest.raises(flashbsr.PlanError):
            wrapper.forward(q, cache, **options)


def test_extras_by_position_beside_keywords() -> None:
    q, cache = problem()
    sink = torch.randn(HEADS)
    wrapper = fi.BatchAttentionWithAttentionSinkWrapper()
    wrapper.plan(ints(0, 1), *table())
    once = wrapper.run(q, cache, sink, 0.25)
    torch.testing.assert_close(wrapper.run(q, cache, sink, 0.25, v_scale=2.0), 2 * once)
    plain = decode({})
    with_sink = plain.run(q, cache, 1.0, 1.0, 1.0, sinks=sink)
    torch.testing.assert_close(with_sink, plain.run(q, cache, sinks=sink))
    with pytest.raises(flashbsr.FlashbsrError, match=r"v_scale.*by position"):
        plain.run(q, cache, 1.0, 1.0, 1.0, v_scale=2.0)


def latents() -> tuple[Any, ...]:
    torch.manual_seed(0)
    shapes = (2, HEADS, 16), (2, HEADS, 8), (6, SIZE, 16), (6, SIZE, 8)
    return tuple(torch.randn(shape) for shape in shapes)


def test_the_other_base_of_a_plan_whose_arrays_went_on() -> None:
    wrapper = BatchMLAPagedAttentionWrapper()
    lens = ints(5, 7)
    wrapper.plan(
        ints(0, 1, 2), ints(0, 2, 4), ints(1, 2, 3, 4), lens, HEADS, 16, 8, SIZE, False, 0.2,
        torch.float32,
    )  # fmt: skip
    wanted, base_2 = wrapper.run(*latents(), return_lse=True)
    lens.copy_(ints(8, 2))  # the next step's, in the same buffer
    out, natural = wrapper.run(*latents(), return_lse=True, return_lse_base_on_e=True)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(natural, base_2 * 0.6931472)


def test_an_output_that_is_no_view_of_rows_is_refused() -> None:
    query, cache = torch.randn(2, 3, HEADS, 24), torch.randn(6, SIZE, 24)

    def attend(out: Any) -> Any:
        tables, lens = ints(0, 1, 2, 3).reshape(2, 2), ints(5, 7)
        return fi.mla.trtllm_batch_decode_with_kv_cache_mla(
            query, cache, None, 128, 16, 8, tables, lens, 7, out=out, bmm1_scale=0.2
        )

    wanted = attend(None)
    out = torch.full((2, 3, HEADS, 16), torch.nan)
    assert attend(out) is out
    assert torch.equal(out, wanted)
    with pytest.raises(flashbsr.ShapeError, match="requests and tokens apart"):
        attend(torch.full((2, 5, HEADS, 16), torch.nan)[:, :3])
    with pytest.raises(flashbsr.ShapeError, match="bmm1_scale"):
        fi.mla.trtllm_batch_decode_with_kv_cache_mla(
            query, cache, None, 128, 16, 8, ints(0, 1, 2, 3).reshape(2, 2), ints(5, 7), 7,
            bmm1_scale=torch.ones(2),
        )  # fmt: skip


def test_ragged_queries_as_flashinfer_asks_for_them() -> None:
    q, cache = torch.randn(5, HEADS, DIM).half(), torch.randn(6, 2, KV_HEADS, SIZE, DIM).half()
    given = q, cache, None, ints(1, 2, 3, 4).reshape(2, 2), ints(5, 7), 7
    rows = ints(0, 2, 5)
    ragged = trtllm_batch_decode_with_kv_cache(
        *given, q_len_per_req=None, max_q_len=3, cum_seq_lens_q=rows
    )
    longest = {"kv_layout": "HND", "q_len_per_req": 3}
    assert torch.equal(
        xqa_batch_decode_with_kv_cache(*given, **longest, q_cu_seq_lens=rows), ragged
    )
    with pytest.raises(flashbsr.FlashbsrError, match="q_len_per_req"):
        xqa_batch_decode_with_kv_cache(*given, kv_layout="HND", q_len_per_req=2, q_cu_seq_lens=rows)


@pytest.mark.parametrize(("rows", "items"), [((0,), ((), (), 3)), ((0, 3), ((3,), (), 0))])
def test_nothing_to_score(rows: tuple[int, ...], items: tuple[Any, ...]) -> None:
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper()
    prefix, positions, length = items
    wrapper.plan(
        ints(*rows), ints(*rows), HEADS, KV_HEADS, DIM, prefix_len_ptr=ints(*prefix),
        token_pos_in_items_ptr=ints(*positions), token_pos_in_items_len=length,
    )  # fmt: skip
    q, kv = torch.randn(rows[-1], HEADS, DIM), torch.randn(rows[-1], KV_HEADS, DIM)
    out = wrapper.run(q, kv, kv)
    assert out.shape == q.shape
    assert out.isfinite().all()


VIEWS: dict[str, Callable[[Any], Any]] = {
    "a head": lambda x: x[4][:, :1],
    "dims": lambda x: x[4][..., :8],
    "another type": lambda x: x[4].view(torch.bfloat16),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_parts_of_pages_are_not_whole_pages(view: Callable[[Any], Any]) -> None:
    cache = tuple(torch.randn(6, SIZE, KV_HEADS, DIM).half() for _ in range(2))
    k, v = (view(x) for x in cache)
    q, q_d = torch.randn(3, HEADS, DIM).half(), torch.randn(1, HEADS, DIM).half()
    pod = fi.PODWithPagedKVCacheWrapper()
    pod.plan(*table())
    with pytest.raises(flashbsr.FlashbsrError, match=r"^[kv]_p: "):
        pod.run(q, k, v, q_d, cache)
    shared = fi.BatchPrefillWithSharedPrefixPagedKVCacheWrapper()
    shared.begin_forward(ints(0, 3), *table())
    with pytest.raises(flashbsr.FlashbsrError, match=r"^[kv]_shared: "):
        shared.forward(q, k, v, cache)


def test_errors_name_what_the_caller_gave() -> None:
    cache = torch.randn(6, SIZE, KV_HEADS, DIM).half()
    q, q_d = torch.randn(3, HEADS, DIM).half(), torch.randn(1, HEADS, DIM).half()
    kv = torch.randn(5, KV_HEADS, DIM).half()
    pod = fi.PODWithPagedKVCacheWrapper()
    pod.plan(*table())
    with pytest.raises(flashbsr.FlashbsrError, match=r"^paged_kv_cache_d: "):
        pod.run(q, kv, kv, q_d, (cache,))
    with pytest.raises(flashbsr.FlashbsrError, match=r"^q_p: "):
        pod.run(None, kv, kv, q_d, (cache, cache))
    shared = fi.BatchPrefillWithSharedPrefixPagedKVCacheWrapper()
    shared.begin_forward(ints(0, 3), *table())
    with pytest.raises(flashbsr.FlashbsrError, match=r"^unique_kv_cache: "):
        shared.forward(q, kv, kv, (cache,))
    with pytest.raises(flashbsr.FlashbsrError, match=r"^q: "):
        fi.single_decode_with_kv_cache(None, kv, kv)
