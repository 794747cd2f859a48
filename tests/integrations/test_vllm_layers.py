# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's backend without vLLM: layers and plans of steps, over metadata that is made by hand."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flashbsr import errors
from harness import framework

torch = framework("torch")
kinds = importlib.import_module("flashbsr.integrations.vllm.kinds")
layer = importlib.import_module("flashbsr.integrations.vllm.layer")
steps = importlib.import_module("flashbsr.integrations.vllm.steps")
world = importlib.import_module("vllm_world")
Serving = world.Serving

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16)
SLOPES = [0.5, 0.25, 0.125, 0.0625]
SCALES = SimpleNamespace(_k_scale_float=0.5, _v_scale_float=2.0)
LAYERS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one head of keys": {"heads": (4, 1)},
    "as many as queries": {"heads": (4, 4)},
    "window": {"options": {"sliding_window": 9}},
    "window of one": {"options": {"sliding_window": 1}},
    "soft cap": {"options": {"logits_soft_cap": 2.0}},
    "slopes": {"options": {"alibi_slopes": SLOPES}},
    "sinks": {"options": {"sinks": SINKS}},
    "gpt-oss": {"options": {"sinks": SINKS, "sliding_window": 16}, "dtype": "bfloat16"},
    "not causal": {"causal": False},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "e4m3": {"options": {"kv_cache_dtype": "fp8"}, "scales": SCALES, "dtype": "bfloat16"},
    "e5m2": {"options": {"kv_cache_dtype": "fp8_e5m2"}, "scales": SCALES},
    "int8": {"options": {"kv_cache_dtype": "int8_per_token_head"}, "dtype": "bfloat16"},
    "int8, padded": {
        "options": {"kv_cache_dtype": "int8_per_token_head", "sliding_window": 9},
        "padding": 8,
        "order": "NHD",
    },
    "e4m3 per token": {
        "options": {"kv_cache_dtype": "fp8_per_token_head", "logits_soft_cap": 2.0},
        "dtype": "bfloat16",
        "order": "layers",
    },
    "int4": {"options": {"kv_cache_dtype": "int4_per_token_head"}, "dtype": "bfloat16"},
    "int4 of one head": {"options": {"kv_cache_dtype": "int4_per_token_head"}, "heads": (4, 1)},
    "head dim 80": {"dim": 80},
    "head dim 256": {"dim": 256, "dtype": "bfloat16"},
    "head dim 512": {"dim": 512},
    "NHD in memory": {"order": "NHD"},
    "layers in blocks": {"order": "layers"},
    "blocks of 48": {"block": 48},
    "batch invariant": {"place": {"fixed_split_size": 32}},
    "batch invariant, window": {
        "place": {"fixed_split_size": 32},
        "options": {"sliding_window": 9},
    },
}


@pytest.mark.parametrize("name", LAYERS)
def test_steps_of_a_server(name: str) -> None:
    """Chunks of prompts, decodes, drafts of several tokens, requests that wait; padding behind."""
    serving = Serving(**LAYERS[name])
    for _ in range(3):
        serving.add()
    serving.layer.process_weights_after_loading(torch.bfloat16)
    for q_lens, pad in (
        ([33, 1, 5], 0),
        ([20, 1, 1], 2),
        ([1, 1, 1], 0),
        ([4, 1, 4], 7),
        ([0, 3, 0], 1),
    ):
        serving.step(q_lens, pad)


def test_requests_that_begin_alike_share_blocks() -> None:
    """Prefix caching: the same blocks in several tables, only what is new is computed."""
    serving = Serving()
    first = serving.add()
    serving.step([50])
    serving.add(first, 48)
    serving.add(first, 32)
    serving.step([1, 7, 20])
    serving.step([1, 1, 1])


def test_a_layer_that_reads_the_cache_of_another() -> None:
    """It never writes, and has queries of its own; both go by one plan."""
    serving = Serving()
    serving.add(), serving.add()
    k, v, slots = serving.grow([18, 3])
    step = serving.steps.plan(serving.batch([18, 3]), slots, 21, None)
    serving.layer.do_kv_cache_update(world.NO_SCALES, k, v, serving.cache, slots)
    serving.options["kv_sharing_target_layer_name"] = "layers.0"
    reader = serving.make_layer()
    assert reader.kind is serving.layer.kind
    for served in (serving.layer, reader):
        serving.layer = served
        serving.attend(step, serving.rows(21, 4), [18, 3])


@pytest.mark.parametrize("attn_type", ["encoder_only", "encoder"])
def test_encoders_attend_to_the_step_alone(attn_type: str) -> None:
    serving = Serving(causal=False, options={"attn_type": attn_type, "logits_soft_cap": 3.0})
    q_lens = [5, 1, 30]
    for _ in q_lens:
        serving.add()
    k, v, slots = serving.grow(q_lens, 2)
    step = serving.steps.plan(serving.batch(q_lens), slots, 36, None)
    q = serving.rows(38, 4)
    out = torch.full(q.shape, float("nan"))
    serving.layer.do_kv_cache_update(world.NO_SCALES, k, v, serving.cache, slots)
    assert serving.cache.isnan().all(), "encoders have no cache"
    serving.layer.forward(world.NO_SCALES, serving.tensor(q), k, v, torch.tensor([]), step, out)
    serving.check(out, q, q_lens)


@pytest.mark.parametrize("name", ["bfloat16", "e4m3", "sinks"])
def test_outputs_in_float8(name: str) -> None:
    """What vLLM's fusion asks for: divided, rounded once; the layer never sees the number."""
    serving = Serving(**LAYERS[name])
    serving.add(), serving.add()
    serving.layer.process_weights_after_loading(torch.bfloat16)
    k, v, slots = serving.grow([18, 3])
    step = serving.steps.plan(serving.batch([18, 3]), slots, 21, None)
    serving.layer.do_kv_cache_update(serving.scales, k, v, serving.cache, slots)
    q = serving.tensor(serving.rows(23, 4))  # two rows of padding

    def run(dtype: torch.dtype, **options: Any) -> torch.Tensor:
        out = torch.full(q.shape, 7.0).to(dtype)
        serving.layer.forward(serving.scales, q, None, None, serving.cache, step, out, **options)
        return out.float()

    wide = run(q.dtype)
    for scale in (0.03125, 2.0):  # powers of two: nothing but the rounding differs
        number = torch.full((1, 1), scale)
        for _ in range(2):  # computed, and kept
            got = run(torch.float8_e4m3fn, output_scale=number)
            exact = wide / scale
            bound = exact.abs() * 2.0**-4 + 2.0**-10
            # `wide` is a number of eight or more bits.
            assert ((got - exact).abs() <= bound + exact.abs() * 2.0**-8).all()
        assert not got[21:].any()
        serving.layer.process_weights_after_loading(torch.bfloat16)  # other weights
    with pytest.raises(errors.DTypeError, match="out"):
        run(torch.float8_e5m2, output_scale=number)


def test_outputs_in_float8_over_scales_of_tokens_are_refused() -> None:
    serving = Serving(**LAYERS["int8"])
    assert not serving.layer.divides_outputs
    serving.add()
    step = serving.steps.plan(serving.batch([0]), torch.zeros(0), 0, None)
    q = torch.zeros(0, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(errors.UnsupportedError, match="output_scale"):
        serving.layer.forward(
            None, q, None, None, serving.cache, step, q.to(torch.float8_e4m3fn), torch.ones(1)
        )


def test_layers_of_two_kinds_in_one_group() -> None:
    """Another soft cap: its own plan, the same cache."""
    serving = Serving()
    serving.add(), serving.add()
    other = Serving(options={"logits_soft_cap": 1.0})
    assert other.layer.kind is not serving.layer.kind
    serving.steps = steps.Steps([serving.layer.kind, other.layer.kind], steps.Place("float32", 16))
    k, v, slots = serving.grow([18, 3])
    step = serving.steps.plan(serving.batch([18, 3]), slots, 21, None)
    serving.layer.do_kv_cache_update(world.NO_SCALES, k, v, serving.cache, slots)
    q = serving.rows(21, 4)
    serving.attend(step, q, [18, 3])
    serving.layer, serving.options = other.layer, other.options
    serving.attend(step, q, [18, 3])


def test_two_steps_in_flight() -> None:
    """The next is planned while one is still to run; a third would take the plan of the first."""
    serving = Serving()
    serving.add(), serving.add()
    built = []
    for _ in range(2):
        k, v, slots = serving.grow([3, 1])
        built.append((serving.steps.plan(serving.batch([3, 1]), slots, 4, None), k, v, slots))
    seen = [(r.k, r.v) for r in serving.requests]
    for n, (step, k, v, slots) in enumerate(built):
        serving.layer.do_kv_cache_update(world.NO_SCALES, k, v, serving.cache, slots)
        for request, (all_k, all_v), new in zip(serving.requests, seen, (3, 1), strict=True):
            request.k, request.v = all_k[: new * (n + 1)], all_v[: new * (n + 1)]
        serving.attend(step, serving.rows(4, 4), [3, 1])
    serving.steps.plan(serving.batch([3, 1]), slots, 4, None)
    with pytest.raises(errors.PlanError, match="replaced 1 times"):
        built[0][0].attention(serving.layer.kind)


def test_a_request_alone_and_in_a_batch_are_equal_bit_for_bit() -> None:
    """Batch-invariant mode: neither other requests nor how they share blocks decide about bits."""

    def last(companions: int) -> torch.Tensor:
        # So long that the scheduler's own splits differ: 8 parts alone, 5 in company of six.
        serving = Serving(heads=(4, 1), block=64, place={"fixed_split_size": 256})
        request = serving.add()
        k, v, slots = serving.grow([4000])
        serving.layer.do_kv_cache_update(world.NO_SCALES, k, v, serving.cache, slots)
        for _ in range(companions):
            serving.add(request, 3968)
        q = serving.rows(1, 4)
        q_lens = [1] + [5] * companions
        serving.rng = np.random.default_rng(7)
        k, v, slots = serving.grow(q_lens)
        step = serving.steps.plan(serving.batch(q_lens), slots, sum(q_lens), None)
        serving.layer.do_kv_cache_update(world.NO_SCALES, k, v, serving.cache, slots)
        q = np.concatenate([q, serving.rows(5 * companions, 4)])
        return serving.attend(step, q, q_lens)[0]

    alone = last(0)
    assert torch.equal(alone, last(1)) and torch.equal(alone, last(6))


def test_a_cache_that_is_bound_anew_is_the_one_that_is_read() -> None:
    """vLLM measures graphs over a cache, frees it, and serves over another."""
    serving = Serving()
    serving.add()
    serving.step([20])
    earlier, serving.cache = serving.cache, serving.cache.clone()
    earlier.fill_(float("nan"))
    serving.step([3])


def test_measuring_memory_computes_nothing() -> None:
    """vLLM profiles without metadata, before there is a cache."""
    out = torch.full((5, 4, 64), float("nan"))
    made = Serving().layer.forward(None, None, None, None, torch.tensor([]), None, out)
    assert made is out and not out.any()


def test_sinks_come_in_the_type_of_weights_and_may_be_parameters() -> None:
    sinks = torch.nn.Parameter(SINKS.clone())
    made = layer.Layer(4, 64, 0.1, 2, sinks=sinks)
    made.process_weights_after_loading(torch.bfloat16)
    assert made.sinks.dtype == torch.float32 and not made.sinks.requires_grad


def test_a_cache_of_one_block_or_head_has_usual_strides() -> None:
    """vLLM gives dimensions of one element any stride; a copy engine takes multiples of 16."""
    odd = torch.zeros(4 * 16 * 128).as_strided((4, 1, 16, 128), (16 * 128, 7, 128, 1))
    k, v = layer.halves(odd, 64, "auto")
    assert k.stride() == v.stride() == (2048, 2048, 128, 1)
    assert v.data_ptr() - k.data_ptr() == 64 * 4


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"attn_type": "encoder_only", "sliding_window": 8}, "sliding_window"),
        ({"attn_type": "mixed"}, "attn_type"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt"),
        ({"chunk_lookback": 2}, "chunk_lookback"),
        ({"q_lora_rank": 512}, "q_lora_rank"),
    ],
)
def test_what_is_not_there_is_refused_by_its_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=named):
        layer.Layer(4, 64, 0.1, 2, **options)


def test_options_that_say_nothing_are_taken() -> None:
    layer.Layer(4, 64, 0.1, 2, use_alibi_sqrt=False, chunk_lookback=-1)


def test_head_sizes() -> None:
    assert [n for n in (8, 60, 64, 72, 80, 512, 520, 576) if kinds.takes_head_size(n)] == [
        8, 64, 72, 80, 512,
    ]  # fmt: skip
    with pytest.raises(errors.UnsupportedError, match="head_size"):
        layer.Layer(4, 60, 0.1)


def test_values_of_another_size_and_quantised_outputs_are_refused() -> None:
    serving = Serving()
    serving.add()
    step = serving.steps.plan(serving.batch([0]), torch.zeros(0), 0, None)
    out = torch.zeros(1, 4, 64)
    with pytest.raises(errors.UnsupportedError, match="kv_cache"):
        serving.layer.forward(None, out, None, None, torch.zeros(9, 2, 16, 96), step, out)
    with pytest.raises(errors.UnsupportedError, match="output_block_scale"):
        serving.layer.forward(None, out, None, None, serving.cache, step, out, None, torch.ones(1))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((64, "bfloat16", "auto", 90), None),
        ((64, "float32", "auto", None), None),
        ((64, "bfloat16", "fp8", 80), None),
        ((64, "float16", None, 75), None),
        ((64, "float16", "bfloat16", 90), "needs bfloat16 queries"),
        ((64, "float32", "auto", 90), "CPU only"),
        ((64, "float16", "auto", 70), "begin at 7.5"),
        ((64, "bfloat16", "auto", 75), "needs compute capability 8.0"),
        ((72, "bfloat16", "fp8", 90), "multiple of 16"),
        ((128, "bfloat16", "int8_per_token_head", 90), None),
        ((128, "bfloat16", "int8_per_token_head", 75), "8.0"),
        ((128, "float16", "int8_per_token_head", 90), "with bfloat16"),
        ((256, "bfloat16", "int8_per_token_head", 90), "64 or 128"),
        ((128, "bfloat16", "fp8_per_token_head", 90), "there is int8_per_token_head"),
        ((80, "float32", "int4_per_token_head", None), None),
        ((72, "bfloat16", "auto", 90), None),
    ],
)
def test_combinations(asked: tuple[Any, ...], said: str | None) -> None:
    reason = kinds.combination_problem(*asked)
    assert reason is None if said is None else said in (reason or "")
