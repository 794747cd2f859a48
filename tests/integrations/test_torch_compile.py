# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of the public API inside torch.compile: one program, the results of eager calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import flashbsr
import flashbsr.flashinfer as flashinfer
import numpy as np
import pytest
from harness import framework
from llama import Block, Step

torch = framework("torch")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No program of another test, nor its counts."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def counts() -> tuple[int, dict[str, int]]:
    """Programs that were made, and graph breaks."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def attention(**spec: Any) -> flashbsr.Attention:
    """Four heads over two, of 16 elements."""
    return flashbsr.Attention(flashbsr.AttentionSpec(**spec), flashbsr.TaskInfo(4, 2, 16))


def q_and_kv(rows: int = 3, tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 4, 16), torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)


def same(function: Callable[..., Any], *args: Any, backend: str = "aot_eager") -> None:
    """The same results, and the same writes into arguments, compiled as called."""
    eager, compiled = copy.deepcopy(args), copy.deepcopy(args)
    expected = function(*eager)
    actual = torch.compile(function, fullgraph=True, backend=backend)(*compiled)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


@pytest.mark.parametrize("step", ["fused", "apart"])
def test_a_llama_block_over_20_plans(step: Step) -> None:
    """No graph break, no second program, eager's results and eager's cache."""
    block = Block(step, hidden=64, heads=4, kv_heads=2, head_dim=16, inner=96)
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    rng = np.random.default_rng(0)
    with torch.inference_mode():
        for _ in range(20):
            q_lens = rng.integers(1, 5, size=rng.integers(2, 6))
            batch = block.plan(q_lens, q_lens + rng.integers(0, 30, size=len(q_lens)))
            x = torch.randn(int(q_lens.sum()), 64)
            caches = [torch.full((64, 2, 4, 2, 16), torch.nan) for _ in range(2)]
            past = torch.randn_like(caches[0])
            for cache in caches:  # what is written now is NaN before
                cache.copy_(past)
                block.poison(cache, batch)
            results = [
                f(x, cache, *batch) for f, cache in zip((block, compiled), caches, strict=True)
            ]
            assert torch.isfinite(results[0]).all()
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(*caches, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert counts() == (1, {})


def test_ten_attentions_are_one_program() -> None:
    many = [attention(causal=True) for _ in range(10)]

    def layer(q: Any, k: Any, v: Any, one: flashbsr.Attention) -> Any:
        return one.run(q * 2, (k, v)).relu()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, tokens in ((5, 12), (7, 30), (9, 41)):
        q, k, v = q_and_kv(rows, tokens)
        for i, one in enumerate(many):  # each has a plan of its own
            one.plan(flashbsr.Ragged([0, 2, rows], [0, 2 + i, tokens]))
        results = [compiled(q, k, v, one) for one in many]
        for one, result in zip(many, results, strict=True):
            torch.testing.assert_close(result, layer(q, k, v, one), rtol=0, atol=0)
        assert not torch.equal(results[0], results[-1])
    assert counts() == (1, {})


def test_ten_wrappers_are_one_program() -> None:
    cache, q = torch.randn(8, 2, 4, 2, 16), torch.randn(2, 4, 16)
    wrappers = [flashinfer.BatchDecodeWithPagedKVCacheWrapper() for _ in range(10)]

    def layer(q: Any, wrapper: Any) -> Any:
        return wrapper.run(q + 1, cache, return_lse=True)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for last in (1, 4):
        for i, wrapper in enumerate(wrappers):
            wrapper.plan(
                torch.tensor([0, 2, 3]), torch.tensor([i % 8, 0, 1]), torch.tensor([last, 3]),
                4, 2, 16, 4, q_data_type=torch.float32,
            )  # fmt: skip
            torch.testing.assert_close(compiled(q, wrapper), layer(q, wrapper), rtol=0, atol=0)
    assert counts() == (1, {})


def prefill_wrapper() -> tuple[Any, torch.Tensor]:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8)
    )
    wrapper.plan(
        torch.tensor([0, 2, 3]), torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1]),
        torch.tensor([1, 3]), 4, 2, 16, 4, causal=True, q_data_type=torch.float32,
    )  # fmt: skip
    return wrapper, torch.randn(3, 2, 4, 2, 16)


@pytest.mark.parametrize("halves", [tuple, list, None])
@pytest.mark.parametrize("scales", [{}, {"q_scale": 2.0, "k_scale": 0.5, "v_scale": 3.0}])
def test_a_paged_wrapper(halves: Any, scales: dict[str, float]) -> None:
    wrapper, cache = prefill_wrapper()

    def layer(q: Any, cache: Any) -> Any:
        kv = cache if halves is None else halves((cache[:, 0], cache[:, 1]))
        return wrapper.run(q + 0, kv, **scales) + 1

    same(layer, torch.randn(3, 4, 16), cache)


def test_a_ragged_wrapper_and_scales_in_tensors() -> None:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper()
    wrapper.plan(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 5]), 4, 2, 16,
                 q_data_type=torch.float32)  # fmt: skip
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([1.0, 2.0])}
    same(lambda q, k, v: wrapper.run(q, k, v, return_lse=True, **scales), *q_and_kv())


def test_outputs_are_written() -> None:
    one = attention()
    one.plan(flashbsr.Ragged([0, 2, 3], [0, 2, 5]))

    def into_new_ones(q: Any, k: Any, v: Any) -> Any:
        out, lse = torch.full_like(q, torch.nan), torch.full((3, 4), torch.nan)
        one.run(q, (k, v), out=out, lse=lse)
        return out * 2, lse

    same(into_new_ones, *q_and_kv())
    same(lambda q, k, v, out: one.run(q, (k, v), out=out), *q_and_kv(), torch.empty(3, 4, 16))
    same(lambda q, k, v: one.run(q * 1, (k, v), return_lse=True), *q_and_kv(), backend="inductor")


def test_strided_views_stay_views() -> None:
    """K and V as halves of the last dimension, as vLLM keeps them, and q as a slice."""
    one = attention()
    one.plan(flashbsr.Paged(None, [0, 2, 3], [4, 0, 2], kv_lens=[5, 2], page_size=4))

    def layer(qkv: Any, cache: Any) -> Any:
        q = qkv.view(2, 8, 16)[:, 2:6]
        return one.run(q, (cache[..., :16], cache[..., 16:]))

    same(layer, torch.randn(2, 128), torch.randn(5, 4, 2, 32), backend="inductor")


def test_sinks_slopes_and_extras() -> None:
    slopes = attention(pos_encoding_mode="ALIBI")
    slopes.plan(flashbsr.Ragged([0, 2, 3], [0, 2, 5]))
    more = {"sinks": torch.randn(4), "alibi_slopes": torch.rand(4)}
    same(lambda q, k, v: slopes.run(q, (k, v), **more), *q_and_kv())


@pytest.mark.usefixtures("kernel_cache")
def test_extras_of_a_variant() -> None:
    spec = flashbsr.AttentionSpec.from_functions(
        score_mod=lambda score, b, h, q_idx, kv_idx, bias, step: score + bias[h] * step,
        extras={"bias": ("float32", 1), "step": "int32"},
    )  # fmt: skip
    one = flashbsr.Attention(spec, flashbsr.TaskInfo(4, 2, 16))
    one.plan(flashbsr.Ragged([0, 2, 3], [0, 2, 5]))
    bias = torch.randn(4)
    same(lambda q, k, v: one.run(q, (k, v), bias=bias * 2, step=3), *q_and_kv())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_over_float8(dtype: str) -> None:
    one = attention(causal=True)
    one.plan(flashbsr.Ragged([0, 2, 3], [0, 2, 5]))
    q, k, v = (x.to(getattr(torch, dtype)) for x in q_and_kv())
    same(lambda q, k, v: one.run(q * 2, (k, v), k_scale=2.0), q,
         k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn))  # fmt: skip


TABLE = {
    "batch_indices": torch.tensor([0, 0, -1, 1]), "positions": torch.tensor([3, 4, 0, 0]),
    "kv_indices": torch.tensor([2, 0, 1]), "kv_indptr": torch.tensor([0, 2, 3]),
    "kv_last_page_len": torch.tensor([1, 1]),
}  # fmt: skip


def heads(count: int) -> torch.Tensor:
    return torch.randn(4, count, 16)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_append(backend: str, halves: bool, dtype: Any) -> None:
    def step(k: Any, v: Any, cache: Any) -> Any:
        into = (cache[:, 0], cache[:, 1]) if halves else cache
        flashbsr.append_paged_kv_cache(k + 1, v, paged_kv_cache=into, **TABLE, v_scale=2.0)
        return cache.float() * 2

    cache = torch.zeros(3, 2, 4, 2, 16).to(dtype)
    same(step, heads(2), heads(2), cache, backend=backend)


@pytest.mark.parametrize("rope", [False, True])
def test_append_by_slots(rope: bool) -> None:
    slots = torch.tensor([11, 0, -1, 4])

    def step(q: Any, k: Any, v: Any, cache: Any) -> Any:
        into = {"paged_kv_cache": cache, "slot_mapping": slots * 1}
        if rope:
            return flashbsr.rope_append_paged_kv_cache(q, k, v, positions=PLACES, **into)
        flashbsr.append_paged_kv_cache(k, v, **into)
        return cache * 2

    same(step, heads(4), heads(2), heads(2), torch.zeros(3, 2, 4, 2, 16), backend="inductor")


def test_lengths_and_tables_of_the_program() -> None:
    """A decode step whose lengths and pages the program computes: one program, one plan."""
    one = attention(causal=True)
    one.plan(flashbsr.Bounds(None, [9, 12, 4], page_size=4))
    cache = torch.randn(12, 2, 4, 2, 16)
    tables = torch.arange(9).view(3, 3)

    def step(q: Any, lens: Any, cache: Any) -> Any:
        return one.run(q * 2, cache, kv_lens=lens + 1, block_tables=tables + 1, return_lse=True)

    compiled = torch.compile(step, fullgraph=True)
    exact = flashbsr.Attention(one.spec, one.task)
    for lens in ([0, 5, 2], [8, 11, 3], [2, 0, 0]):
        q, kv_lens = torch.randn(3, 4, 16), torch.tensor(lens)
        exact.plan(flashbsr.BlockTable(None, tables + 1, kv_lens + 1, page_size=4))
        expected = exact.run(q * 2, cache, return_lse=True)
        torch.testing.assert_close(compiled(q, kv_lens, cache), expected, rtol=1e-5, atol=1e-5)
    assert counts() == (1, {})


def test_positions_of_the_program() -> None:
    """A share of the keys, whose lengths and positions the program computes."""
    share = flashbsr.ContextParallel(2, 1, 4)
    task = flashbsr.TaskInfo(4, 2, 16, context_parallel=share)
    one = flashbsr.Attention(flashbsr.AttentionSpec(causal=True), task)
    one.plan(flashbsr.Bounds([0, 2, 4, 6], [9, 12, 4], page_size=4), q_positions=[0, 0, 0])
    cache, tables = torch.randn(12, 2, 4, 2, 16), torch.arange(9).view(3, 3)

    def step(q: Any, lens: Any, cache: Any) -> Any:
        return one.run(
            q, cache, kv_lens=share.local_lens(lens), block_tables=tables, q_positions=lens - 2,
            return_lse=True,
        )  # fmt: skip

    compiled = torch.compile(step, fullgraph=True)
    exact = flashbsr.Attention(one.spec, task)
    for lens in ([16, 23, 7], [2, 9, 3]):
        q, kv_lens = torch.randn(6, 4, 16), torch.tensor(lens)
        local = share.local_lens(kv_lens)
        layout = flashbsr.BlockTable([0, 2, 4, 6], tables, local, page_size=4)
        exact.plan(layout, q_positions=kv_lens - 2)
        expected = exact.run(q, cache, return_lse=True)
        torch.testing.assert_close(compiled(q, kv_lens, cache), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(flashbsr.FlashbsrError, match="kv_lens"):
        one.run(q, cache, q_positions=kv_lens)


@pytest.mark.parametrize("options", [{}, {"interleave": True, "rotary_dim": 8},
                                     {"llama31": (1.0, 4.0, 8192.0)}])  # fmt: skip
def test_rope_append(options: dict[str, Any]) -> None:
    def step(q: Any, k: Any, v: Any, cache: Any) -> Any:
        return flashbsr.rope_append_paged_kv_cache(
            q, k, v, paged_kv_cache=cache, **TABLE, **options
        )

    same(step, heads(4), heads(2), heads(2), torch.zeros(3, 2, 4, 2, 16))


def test_rope_append_into_q_by_a_table() -> None:
    def step(q: Any, k: Any, v: Any, cache: Any, table: Any) -> Any:
        return flashbsr.rope_append_paged_kv_cache(
            q, k, v, paged_kv_cache=cache, **TABLE, cos_sin_cache=table, q_out=q
        )

    same(step, heads(4), heads(2), heads(2), torch.zeros(3, 2, 4, 2, 16), torch.randn(9, 16))


RAGGED = torch.tensor([0, 3, 4]), torch.tensor([4, 7])
PLACES = torch.tensor([1, 2, 9, 4])


@pytest.mark.parametrize("name", [name for name in flashbsr.__all__ if name.startswith("apply_")])
def test_rope(name: str) -> None:
    """Each of the ten, with dynamic shapes; in place the arguments are written."""
    function = getattr(flashbsr, name)

    def step(q: Any, k: Any, table: Any) -> Any:
        if "cos_sin" in name:
            found = function(PLACES, q.view(4, -1), k.view(4, -1), 16, table, False)
        else:
            found = function(q, k, *((PLACES,) if "pos_ids" in name else RAGGED))
        return (q + 0, k + 0) if found is None else found

    same(step, heads(4), heads(2), torch.randn(12, 16))


@pytest.mark.parametrize("base", ["e", "2"])
def test_merges(base: str) -> None:
    v, s = torch.randn(3, 5, 2, 8), torch.randn(3, 5, 2)

    def step(v: Any, s: Any, mask: Any) -> Any:
        one = flashbsr.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1], lse_base=base)
        many = flashbsr.merge_states(v, s, lse_base=base)
        a, b = v[:, 2].clone(), s[:, 2].clone()
        flashbsr.merge_state_in_place(a, b, v[:, 3], s[:, 3], mask, lse_base=base)
        return one, many, a, b

    same(step, v, s, torch.tensor([True, False, True]))
    same(flashinfer.merge_states, v, s)


def test_index_arithmetic() -> None:
    same(lambda a, b: flashbsr.get_batch_indices_positions(a, b, 4),
         torch.tensor([0, 1, 3]), torch.tensor([5, 2]))  # fmt: skip
    same(
        lambda a, b: flashbsr.get_seq_lens(a, b, 16), torch.tensor([0, 2, 2]), torch.tensor([3, 0])
    )


def test_the_one_call_plans_inside() -> None:
    """Dense shapes and ragged lengths change from call to call, the program does not."""

    def dense(q: Any, k: Any, v: Any) -> Any:
        return flashbsr.attention(q, k, v, causal=True, window_left=3, return_lse=True)

    def ragged(q: Any, k: Any, v: Any, ends: Any) -> Any:
        return (
            flashbsr.attention(
                q, k, v, cu_seqlens_q=ends, sm_scale=0.3, logits_soft_cap=5.0, sinks=torch.ones(4)
            )
            + 1
        )

    for function in (dense, ragged):
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
        for batch, tokens in ((5, 7), (6, 8), (3, 9)):
            lead = (batch, tokens) if function is dense else (tokens,)
            args = [torch.randn(*lead, n, 16) for n in (4, 2, 2)]
            if function is ragged:
                args.append(torch.tensor([0, batch, tokens]))
            torch.testing.assert_close(compiled(*args), function(*args), rtol=0, atol=0)
    assert counts() == (2, {})


def test_reduce_overhead() -> None:
    """On the CPU a mode without an effect; it must not fail."""
    one = attention()
    one.plan(flashbsr.Ragged([0, 2, 3], [0, 2, 5]))
    args = q_and_kv()
    compiled = torch.compile(lambda q, k, v: one.run(q, (k, v)), fullgraph=True,
                             mode="reduce-overhead")  # fmt: skip
    torch.testing.assert_close(compiled(*args), one.run(args[0], args[1:]), rtol=0, atol=0)


def test_the_way_back_raises_when_it_is_gone() -> None:
    one = attention()
    one.plan(flashbsr.Ragged([0, 2, 3], [0, 2, 5]))
    q, k, v = q_and_kv()
    functions = [
        lambda q: one.run(q * 2, (k, v)),
        lambda q: flashbsr.attention(q[None], k[None], v[None]),
        lambda q: flashbsr.apply_rope_pos_ids(q, q, PLACES[:3])[0],
    ]
    for function in functions:
        x = q.clone().requires_grad_()
        out = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(out.detach(), function(q), rtol=0, atol=0)
        with pytest.raises(flashbsr.UnsupportedError, match="backward.*no_grad"):
            out.sum().backward()
        assert x.grad is None


def test_plan_stays_outside() -> None:
    one = attention()
    wrapper, cache = prefill_wrapper()
    layout = flashbsr.Ragged([0, 2, 3], [0, 2, 5])
    again = dict(wrapper._given)

    def plans(q: Any, k: Any, v: Any) -> Any:
        one.plan(layout)
        return one.run(q * 2, (k, v))

    def wrapper_plans(q: Any, k: Any, v: Any) -> Any:
        wrapper._plan(again)
        return wrapper.run(q * 2, cache)

    args = q_and_kv()
    for function in (plans, wrapper_plans):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"call plan\(\) outside"):
            torch.compile(function, fullgraph=True, backend="aot_eager")(*args)
        broken = torch.compile(function, backend="aot_eager")(*args)
        torch.testing.assert_close(broken, function(*args), rtol=0, atol=0)
        assert any("plan() outside" in reason for reason in counts()[1])


def test_what_a_program_cannot_have() -> None:
    one = attention()
    q, k, v = q_and_kv()
    refused = [
        (lambda: one.run(q, (k, v)), "no plan"),
        (lambda: one.run(q, (k, v), stream=3), "a stream, in a compiled program"),
        (lambda: one.run(q, (k, v, v)), "3 arrays"),
        (lambda: flashbsr.attention(q[None], k[None], v[None], spec=one.spec), "'spec'"),
        (lambda: flashbsr.attention(q[None], k[None], v[None], out=q[None]), "'out'"),
        (lambda: flashbsr.attention(q[None], k[None], v[None], v_scale=2.0), "'v_scale'"),
    ]
    for function, match in refused:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=match):
            torch.compile(function, fullgraph=True, backend="aot_eager")()


def test_errors_when_it_runs() -> None:
    """The program has no values to check; its operators raise what calls raise."""
    one = attention()
    one.plan(flashbsr.Ragged([0, 2, 3], [0, 2, 5]))
    compiled = torch.compile(lambda q, k, v: one.run(q, (k, v)), fullgraph=True, dynamic=True,
                             backend="aot_eager")  # fmt: skip
    compiled(*q_and_kv())
    with pytest.raises(flashbsr.FlashbsrError, match="q"):
        compiled(*q_and_kv(rows=4))
    table = TABLE | {"positions": torch.tensor([3, 99, 0, 0])}
    append = torch.compile(lambda x, cache: flashbsr.append_paged_kv_cache(
        x, x, paged_kv_cache=cache, **table), fullgraph=True, backend="aot_eager")  # fmt: skip
    with pytest.raises(flashbsr.errors.IndexRangeError, match="positions"):
        append(heads(2), torch.zeros(3, 2, 4, 2, 16))


def test_a_latent_cache() -> None:
    """One array, or two."""
    task = flashbsr.TaskInfo(4, 1, 80, head_dim_vo=64, latent=True)
    latent = flashbsr.Attention(flashbsr.AttentionSpec(sm_scale=0.1), task)
    latent.plan(flashbsr.BlockTable(None, np.array([[1, 0]]), np.array([20]), page_size=16))
    q, cache = torch.randn(1, 4, 80), torch.randn(2, 16, 80)
    expected = latent.run(q, cache, return_lse=True)
    parts = cache[..., :64].contiguous(), cache[..., 64:].contiguous()
    whole = torch.compile(
        lambda q, c: latent.run(q, c, return_lse=True), fullgraph=True, backend="aot_eager"
    )
    two = torch.compile(
        lambda q, a, b: latent.run(q, (a, b), return_lse=True), fullgraph=True, backend="aot_eager"
    )
    for out, lse in (whole(q, cache), two(q, *parts)):
        torch.testing.assert_close(out, expected[0], rtol=0, atol=0)
        torch.testing.assert_close(lse, expected[1], rtol=0, atol=0)
