# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""transformers: its masks, its caches, its models. tools/engines.py records what more models of
several versions generate."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import flashbsr
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from flashbsr.integrations.transformers import NAME, continuous, register
from flashbsr.integrations.transformers.dense import attention, mask
from flashbsr.integrations.transformers.masks import Spans
from flashbsr.integrations.transformers.paged import paged_attention
from transformers import masking_utils
from transformers_world import small

HEADS, KV_HEADS, DIM, DIM_VO = 6, 2, 32, 16
LAYER = SimpleNamespace(is_causal=True, training=False, layer_idx=0)
CAUSAL = masking_utils.causal_mask_function
WHOLE = masking_utils.bidirectional_mask_function


def window(size: int) -> Any:
    """Causal, and at most `size` tokens with the query itself."""
    return masking_utils.sliding_window_causal_mask_function(size)


def blocks(count: int) -> Any:
    """Causal, but tokens of a block of three see each other, as those of an image do."""
    ids = (torch.arange(count) // 3).expand(3, -1)
    return masking_utils.or_masks(CAUSAL, masking_utils.blockwise_overlay(ids))


def exact(q: Any, k: Any, v: Any, keep: Any, softcap: float | None, sinks: Any) -> Any:
    """Attention in float64; rows without a key are 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.nan_to_num(0).double().repeat_interleave(group, 1) for x in (k, v))
    x = q.double() @ k.mT * 0.3
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    x = x.masked_fill(~keep, -torch.inf)
    if sinks is not None:
        x = torch.cat([x, sinks.double().view(1, -1, 1, 1).expand(*x.shape[:3], 1)], -1)
    p = torch.softmax(x, -1).nan_to_num(0)[..., : v.shape[2]]
    return (p @ v).transpose(1, 2)


def arrays(batch: int, q_len: int, kv_len: int) -> Any:
    """Random q, k and v, HND; of q as projections leave it."""
    torch.manual_seed(0)
    q = torch.randn(batch, q_len, HEADS, DIM).transpose(1, 2)
    return q, *(torch.randn(batch, KV_HEADS, kv_len, dim) for dim in (DIM, DIM_VO))


PADS = [None, [0, 0, 0], [4, 0, 7]]
CASES = [  # queries, tokens before them, capacity, first token of the cache
    (12, 0, 12, 0),
    (1, 11, 12, 0),
    (5, 7, 12, 0),
    (12, 0, 20, 0),  # a static cache
    (1, 11, 20, 0),
    (1, 30, 9, 22),  # a sliding one
]


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize(
    ("pattern", "case"),
    [
        *((x, y) for x in ("causal", "window", "blocks", "right", "holes") for y in CASES),
        *(("whole", y) for y in CASES if not y[1]),  # encoders have no past
    ],
)
def test_masks_and_attention(pattern: str, pads: Any, case: Any) -> None:
    """Whatever the mask says in spans or bits is what sdpa is told, with NaN in unused slots."""
    q_len, past, capacity, skipped = case
    total = past + q_len
    functions = {"window": window(6), "whole": WHOLE, "blocks": blocks(skipped + capacity)}
    how: dict[str, Any] = {
        "batch_size": 3, "q_length": q_len, "kv_length": capacity, "q_offset": past,
        "kv_offset": skipped, "mask_function": functions.get(pattern, CAUSAL),
        "attention_mask": None,
    }  # fmt: skip
    if pads is not None or pattern in ("right", "holes"):
        keep = torch.arange(total) >= skipped + torch.tensor(pads or [0, 0, 0])[:, None]
        if pattern == "right":
            keep[1, -2:] = False
        if pattern == "holes":
            keep[:, skipped + 5] = False
        how["attention_mask"] = keep
    wanted = masking_utils.sdpa_mask(
        **how, allow_is_causal_skip=False, use_vmap=False, device="cpu"
    ).expand(3, 1, q_len, capacity)
    if pattern == "whole" and pads is None:
        wanted = torch.ones(3, 1, q_len, capacity, dtype=torch.bool)
    found = mask(**how, dtype=torch.float32, config=None, device="cpu", use_vmap=False)
    spans = pattern in ("causal", "window", "whole")
    assert (found.dtype == torch.int32) == spans
    q, k, v = arrays(3, q_len, capacity)
    unused = ~wanted.any(2)[:, :, :, None].expand(-1, KV_HEADS, -1, 1)
    if spans:
        k, v = (x.masked_fill(unused, torch.nan) for x in (k, v))
    for softcap, sinks in ((None, None), (5.0, torch.randn(HEADS))):
        out, none = attention(LAYER, q, k, v, found, scaling=0.3, softcap=softcap, s_aux=sinks)
        assert none is None
        torch.testing.assert_close(out.double(), exact(q, k, v, wanted, softcap, sinks),
                                   atol=2e-6, rtol=2e-5)  # fmt: skip


def test_masks_of_four_dimensions() -> None:
    """Booleans, and numbers to add; one of them changed in place is another."""
    q, k, v = arrays(2, 4, 9)
    keep = torch.rand(1, 1, 4, 9) > 0.4
    low = torch.zeros(1, 1, 4, 9).masked_fill(~keep, torch.finfo(torch.float32).min)
    for given in (keep, low, low.expand(2, -1, -1, -1)):
        out = attention(LAYER, q, k, v, given, scaling=0.3)[0]
        torch.testing.assert_close(out.double(), exact(q, k, v, keep, None, None),
                                   atol=2e-6, rtol=2e-5)  # fmt: skip
    keep[0, 0, 2] = ~keep[0, 0, 2]
    out = attention(LAYER, q, k, v, keep, scaling=0.3)[0]
    torch.testing.assert_close(out.double(), exact(q, k, v, keep, None, None), atol=2e-6, rtol=2e-5)
    alike = torch.rand(2, 1, 1, 9) > 0.4  # for all queries, as LayoutLM has it
    for given in (alike, torch.zeros(2, 1, 1, 9).masked_fill(~alike, -torch.inf)):
        out = attention(LAYER, q, k, v, given, scaling=0.3)[0]
        torch.testing.assert_close(out.double(), exact(q, k, v, alike, None, None),
                                   atol=2e-6, rtol=2e-5)  # fmt: skip


@pytest.mark.parametrize("how", ["tokens first", "slice", "apart"])
def test_strides(how: str) -> None:
    """K and V as they come, K's rows and V's elsewhere too (a model with MLA, without a cache)."""
    q, k, v = arrays(3, 1, 12)
    if how == "tokens first":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    elif how == "slice":
        k, v = torch.cat([k, v], -1).split([DIM, DIM_VO], -1)
    else:
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    keep = torch.arange(12) >= torch.tensor([3, 0, 5])[:, None]
    found = mask(3, 1, 12, 11, attention_mask=keep)
    out = attention(LAYER, q, k, v, found, scaling=0.3)[0]
    wanted = exact(q, k, v, keep[:, None, None], None, None)
    torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=2e-5)


def test_without_a_mask() -> None:
    """The layer says whether it is causal; an encoder's windows have no meaning without a mask."""
    q, k, v = arrays(2, 7, 7)
    lower = torch.ones(7, 7, dtype=torch.bool).tril()
    band = lower & ~lower.tril(-3)
    for keep, options in (
        (lower, {}),
        (band, {"sliding_window": 3}),
        (torch.ones_like(lower), {"is_causal": False}),
    ):
        out = attention(LAYER, q, k, v, None, scaling=0.3, **options)[0]
        wanted = exact(q, k, v, keep, None, None)
        torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("count", [3, 4])
def test_learned_queries(count: int) -> None:
    """Queries or keys of one row are those of all, as `sdpa` broadcasts them."""
    q, k, v = arrays(2, count, 9)
    layer = SimpleNamespace(is_causal=False, training=False)
    keep = torch.rand(2, 1, 1, 9) > 0.4
    for given in (None, keep):
        for _ in range(2):
            out = attention(layer, q[:1], k, v, given, scaling=0.3)[0]
            wanted = exact(
                q[:1], k, v, torch.ones_like(keep) if given is None else keep, None, None
            )
            torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=2e-5)
            out = attention(layer, q, k[:1], v[:1], given, scaling=0.3)[0]
            wanted = exact(
                q, k[:1], v[:1], torch.ones_like(keep) if given is None else keep, None, None
            )
            torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=2e-5)
    with pytest.raises(flashbsr.ShapeError, match="^key: got 2 rows; expected 3"):
        attention(layer, torch.cat([q, q[:1]]), k, v, None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_padding_that_grows_and_changes(device: str) -> None:
    """A step's mask is that of the last step and a token more, or it is not."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")

    def begins(keep: Any, kv_len: int | None = None) -> Any:
        size = kv_len or keep.shape[1]
        given = keep.to(device)
        found = mask(len(keep), 1, size, keep.shape[1] - 1, attention_mask=given)
        return found[:, 0, 0, 0].tolist() if found.dtype == torch.int32 else None

    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[0, :3] = False
    assert begins(keep) == [3, 0]
    assert begins(keep) == [3, 0]
    longer = torch.cat([keep, torch.ones(2, 1, dtype=torch.bool)], 1)
    assert begins(longer) == [3, 0]
    assert begins(longer, 9) == [3, 0]  # a static cache
    longer[0, 2] = True  # the caller's own, written between two calls
    assert begins(longer) == [2, 0]
    again = torch.cat([longer, torch.ones(2, 1, dtype=torch.bool)], 1)
    again[1, 4] = False
    assert begins(again) is None  # a hole
    ended = torch.cat([longer, torch.tensor([[True], [False]])], 1)
    assert begins(ended) is None  # a query without its key
    assert begins(longer[:1]) == [2]
    assert begins(keep.long()) == [3, 0]
    for whole in (keep | True, torch.ones(2, 7).long()):  # nothing of the last batch is left
        assert begins(whole) == [0, 0]
        assert begins(whole, 9) == [0, 0]
        assert begins(keep) == [3, 0]


def test_layers_of_one_mask_lie_elsewhere() -> None:
    """The second layer's pages begin where its own cache does."""
    q, *_ = arrays(3, 1, 8)
    keep = torch.ones(3, 8, dtype=torch.long)
    keep[0, :4] = keep[2, :2] = 0
    given = mask(3, 1, 8, 7, attention_mask=keep)
    held = torch.randn(5, 2, 3, KV_HEADS, 8, DIM)
    visible = keep.bool()[:, None, None]
    for layer in range(5):
        key, value = held[layer, 0], held[layer, 1]
        out, _ = attention(LAYER, q, key, value, given, scaling=0.3)
        torch.testing.assert_close(out.double(), exact(q, key, value, visible, None, None),
                                   atol=2e-6, rtol=2e-5)  # fmt: skip


def test_spans_there_and_back() -> None:
    """A span is read from the tensor alone, even from a copy of it."""
    spans = Spans.of(mask(2, 1, 9, 8, mask_function=window(4)).clone())
    assert spans.begin.tolist() == [0, 0]
    assert spans.stop.tolist() == [9, 9]
    assert (spans.causal, spans.window_left) == (True, 3)


def test_spans_that_are_written() -> None:
    """Those of the last mask are known without a look at it, unless somebody wrote there."""
    given = mask(2, 1, 9, 8)
    assert Spans.of(given).stop.tolist() == [9, 9]
    given[1, 0, 0, 1] = 7
    assert Spans.of(given).stop.tolist() == [9, 7]


def test_refused() -> None:
    """Training, and what the engine does not do, by name."""
    q, k, v = arrays(2, 4, 9)
    training = SimpleNamespace(is_causal=True, training=True, layer_idx=0)
    some = torch.ones(2, 1, 4, 9, dtype=torch.bool)
    for name, layer, given, options in (
        ("requires_grad", training, q.clone().requires_grad_(), {}),
        ("dropout", LAYER, q, {"dropout": 0.1}),
        ("output_attentions", LAYER, q, {"output_attentions": True}),
        ("position_bias", LAYER, q, {"position_bias": some}),
        ("sinks", LAYER, q, {"sinks": some.float()}),
        ("block_indices", LAYER, q, {"block_indices": some.int()}),
    ):
        with pytest.raises(flashbsr.UnsupportedError, match=f"^{name}"):
            attention(layer, given, k, v, some, **options)
    for wrong in (some.float() * 0.5, some.expand(2, HEADS, 4, 9), None):
        with pytest.raises(flashbsr.UnsupportedError, match="^attention_mask"):
            attention(LAYER, q, k, v, wrong)
    for shape in (some[..., :8], some[:, 0], torch.zeros(2, 1, 4, 9, dtype=torch.int32)):
        with pytest.raises(flashbsr.ShapeError, match="^attention_mask"):
            attention(LAYER, q, k, v, shape)
    with pytest.raises(flashbsr.DTypeError, match="^attention_mask"):
        attention(LAYER, q, k, v, some.long())
    with pytest.raises(flashbsr.UnsupportedError, match="^cache"):
        paged_attention(LAYER, q, k, v, None)
    with pytest.raises(flashbsr.UnsupportedError, match="^attn_implementation.*'eager'"):
        mask(2, 4, 4, mask_function=WHOLE, config=transformers.BigBirdPegasusConfig())
    with pytest.raises(flashbsr.UnsupportedError, match="^indices"):
        paged_attention(LAYER, q, k, v, None, indices=some.int())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_one_plan_per_step_and_kind(cache: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers of two kinds, 12 steps with left padding: at most 24 plans, the same tokens."""
    ids = torch.arange(3 * 9).view(3, 9) % 61 + 3
    keep = torch.arange(9) >= torch.tensor([0, 4, 7])[:, None]
    how: dict[str, Any] = {
        "attention_mask": keep.long(), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 2
    }  # fmt: skip
    if cache == "static":
        how |= {"cache_implementation": "static", "disable_compile": True}
    wanted = small("sdpa").generate(ids, **how)
    plans, runs = [], []
    plan, run = flashbsr.Attention.plan, flashbsr.Attention.run
    monkeypatch.setattr(
        flashbsr.Attention, "plan", lambda *a, **b: plans.append(1) or plan(*a, **b)
    )
    monkeypatch.setattr(flashbsr.Attention, "run", lambda *a, **b: runs.append(1) or run(*a, **b))
    with mode():
        assert torch.equal(small(register()).generate(ids, **how), wanted)
    assert len(runs) == 12 * 4
    assert len(plans) <= 12 * 2


def test_two_models_by_turns() -> None:
    """Steps of two caches that grow, layer by layer: they have an engine in common."""
    torch.manual_seed(0)
    caches = [torch.randn(2, 3, KV_HEADS, n, DIM) for n in (40, 41)]
    for _ in range(5):
        masks: list[Any] = []
        for at, kv in enumerate(caches):
            caches[at] = torch.cat([kv, torch.randn(2, 3, KV_HEADS, 1, DIM)], 3)
            keep = torch.ones(3, caches[at].shape[3], dtype=torch.long)
            masks.append(mask(3, 1, keep.shape[1], keep.shape[1] - 1, attention_mask=keep))
        for layer in range(2):
            for given, kv in zip(masks, caches, strict=True):
                q = torch.randn(3, HEADS, 1, DIM)
                key, value = kv[layer], kv[1 - layer]
                out, _ = attention(LAYER, q, key, value, given, scaling=0.3)
                seen = torch.ones(3, 1, 1, kv.shape[3], dtype=torch.bool)
                torch.testing.assert_close(out.double(), exact(q, key, value, seen, None, None),
                                           atol=2e-6, rtol=2e-5)  # fmt: skip
    with pytest.raises(flashbsr.IndexRangeError, match=r"^kv_lens\[0\]: got 9"):
        attention(LAYER, q, key[:, :, :8], value[:, :, :8], mask(3, 1, 9, 8), scaling=0.3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_is_written_between_calls(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensor with other values is another mask; layers that find it as it was share a
    plan, in inference mode too, where tensors do not count how often they are written."""
    plans = []
    plan = flashbsr.Attention.plan
    monkeypatch.setattr(
        flashbsr.Attention, "plan", lambda *a, **b: plans.append(1) or plan(*a, **b)
    )
    with mode():
        q, k, v = arrays(2, 4, 9)
        keep = torch.ones(2, 1, 4, 9, dtype=torch.bool)
        for hidden in (8, 5, 2):
            keep[:, :, 1:, hidden] = False
            for _ in range(3):
                out, _ = attention(LAYER, q, k, v, keep, scaling=0.3)
                torch.testing.assert_close(
                    out.double(), exact(q, k, v, keep, None, None), atol=2e-6, rtol=2e-5
                )
    assert len(plans) == 3


def test_continuous_batching() -> None:
    """Prompts in chunks, rings of sliding layers among them; the model is as it was afterwards."""
    prompts = [[(i * n) % 61 + 3 for i in range(n)] for n in (3, 40, 17, 9)]
    model = small("sdpa")
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 2}
    wanted = [
        model.generate(torch.tensor([x]), attention_mask=torch.ones(1, len(x)), **how)[0, len(x) :]
        for x in prompts
    ]
    given = transformers.GenerationConfig(**how, eos_token_id=-1)
    batching = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=16)
    with continuous(model):
        assert NAME in model.config._attn_implementation
        found = model.generate_batch(
            prompts, generation_config=given, continuous_batching_config=batching,
            progress_bar=False,
        )  # fmt: skip
    assert model.config._attn_implementation == "sdpa"
    tokens = [list(found[name].generated_tokens) for name in sorted(found)]
    assert tokens == [x.tolist() for x in wanted]


@pytest.mark.parametrize(("asked", "found"), [(None, False), (False, False), (True, True)])
def test_graphs_are_off_unless_asked_for(
    asked: bool | None, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are planned on the host; transformers has graphs for all whose name has "flash"."""
    from transformers.generation.continuous_batching import continuous_api, initialization

    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "cuda", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    batching = transformers.ContinuousBatchingConfig(use_cuda_graph=asked, max_memory_percent=0.5)
    how: dict[str, Any] = {"workload_hints": None, "has_logit_processors": False}
    with continuous(small("sdpa")) as model:
        resolve = continuous_api.resolve_continuous_batching_config
        if "device" in inspect.signature(resolve).parameters:
            how["device"] = torch.device("cpu")
        got = resolve(config=model.config, cb_config=batching, **how)
    assert any(got.cuda_graph_booleans) is found
    assert batching.use_cuda_graph is asked


def test_a_cache_that_does_not_fit() -> None:
    """A model with MLA has two head dims, the cache one; and layers are what the cache says."""
    q, k, v = (x[:1] for x in arrays(1, 4, 4))
    rows = torch.zeros(32, KV_HEADS, DIM)
    cache = SimpleNamespace(
        layer_index_to_group_indices={0: (0, 0)}, key_cache=[rows], value_cache=[rows],
        sliding_windows={0: 1}, sentinel_index=-1, block_size=16,
    )  # fmt: skip
    ends = torch.tensor([0, 4])
    none = torch.zeros(0, dtype=torch.int64)
    step: dict[str, Any] = {
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "read_index": [none],
        "write_index": [torch.arange(4)], "cache": cache,
    }  # fmt: skip
    with pytest.raises(flashbsr.UnsupportedError, match="^value: got heads and dim"):
        paged_attention(LAYER, q, k, v, None, **step)
    with pytest.raises(flashbsr.UnsupportedError, match="^sliding_window"):
        paged_attention(LAYER, q, k, k, None, sliding_window=4, **step)
    out = paged_attention(LAYER, q, k, k, None, scaling=0.3, **step)[0]
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    torch.testing.assert_close(out.double(), exact(q, k, k, keep, None, None), atol=2e-6, rtol=2e-5)
    assert torch.equal(rows[:4], k[0].transpose(0, 1))


def test_backward_ends() -> None:
    """In eval a forward pass goes through; the way back says that there is none."""
    loss = small(register())(torch.arange(9)[None]).logits.sum()
    with pytest.raises(flashbsr.UnsupportedError, match="^backward"):
        loss.backward()
