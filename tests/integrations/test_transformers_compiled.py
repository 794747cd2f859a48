# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""transformers' models compiled by PyTorch: attention is an operator, and nothing stops there."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import flashbsr
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from flashbsr.integrations.transformers import NAME, masks, register, steps
from flashbsr.integrations.transformers.dense import attention
from harness import DEVICES
from torch._dynamo.utils import counters
from transformers import AttentionInterface, masking_utils
from transformers_world import llama, small

# PyTorch's own, of programs that ask for gradients, and of inductor.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LAYER = SimpleNamespace(is_causal=True, training=False, layer_idx=0)
IDS = torch.arange(3 * 9).view(3, 9) % 61 + 3
KEEP = torch.arange(9) >= torch.tensor([0, 4, 7])[:, None]


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Forget what was compiled, and counted."""
    torch.compiler.reset()
    counters.clear()


def rows() -> Any:
    """Random q, k and v."""
    torch.manual_seed(0)
    return [torch.randn(2, heads, 9, 32) for heads in (6, 2, 2)]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of steps as on a GPU, on the CPU."""
    monkeypatch.setattr(masks, "_on_gpu", lambda _: True)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[steps.Shape]:
    """Engines, as often as they are told lengths."""
    found: list[steps.Shape] = []
    tell = steps._Engine.tell

    def counted(self: Any, what: steps.Told) -> None:
        found.append(self)
        tell(self, what)

    monkeypatch.setattr(steps._Engine, "tell", counted)
    return found


def registered() -> Any:
    """What transformers calls."""
    register()
    return AttentionInterface()[NAME]


@pytest.mark.parametrize("sinks", [None, torch.randn(6)], ids=["plain", "sinks"])
def test_promises(sinks: torch.Tensor | None) -> None:
    """Schema, results without values, and the way through AOTAutograd."""
    register()
    mask = KEEP[:2, None, None].expand(2, 1, 9, 9)
    arguments = *rows(), mask, sinks, 0.3, None, None, None, True
    torch.library.opcheck(torch.ops.flashbsr.transformers_dense.default, arguments)


@pytest.mark.parametrize("sinks", [None, torch.randn(6)], ids=["plain", "sinks"])
def test_promises_of_steps(sinks: torch.Tensor | None) -> None:
    """The same of the two operators of a step."""
    register()
    q, k, v = rows()
    mask = steps.marked(KEEP[:2, None, None])
    engine = [6, 2], [32, 32], ["float32", "float32"], 0.3, None, None
    torch.library.opcheck(torch.ops.flashbsr.transformers_tell.default, (mask, 18, *engine))
    lens, slots = torch.ops.flashbsr.transformers_tell.default(mask, 18, *engine)
    arguments = q[:, :, :1], k, v, lens, slots, sinks, 0.3, None, None
    torch.library.opcheck(torch.ops.flashbsr.transformers_step.default, arguments)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model(mode: Any) -> None:
    """It computes the same; compilers stop at masks, which are made once, and not at layers."""
    with mode():
        wanted = small("sdpa")(IDS, attention_mask=KEEP.long()).logits
        model = torch.compile(small(register()), backend="eager")
        found = model(IDS, attention_mask=KEEP.long()).logits
    torch.testing.assert_close(found[KEEP], wanted[KEEP], atol=1e-4, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] > 0
    assert not [text for text in counters["graph_break"] if "<function mask at" not in text]


def test_steps_over_a_static_cache() -> None:
    """Programs for prompts and for steps, whatever the lengths are, and nothing between them."""
    how: dict[str, Any] = {
        "attention_mask": KEEP.long(), "max_new_tokens": 12, "do_sample": False,
        "pad_token_id": 2, "cache_implementation": "static", "disable_compile": True,
    }  # fmt: skip
    with torch.no_grad():
        wanted = small("sdpa").generate(IDS, **how)
        model = small(register())
        model.forward = torch.compile(model.forward, backend="aot_eager")
        assert torch.equal(model.generate(IDS, **how), wanted)
    assert not counters["graph_break"]
    assert 0 < counters["stats"]["unique_graphs"] <= 3


GENERATE: dict[str, Any] = {
    "max_new_tokens": 12, "do_sample": False, "pad_token_id": 2, "cache_implementation": "static",
    "disable_compile": True,
}  # fmt: skip
BY_TURNS = functools.partial(small, head_dim=64)  # sliding layers and full ones
HOLES = KEEP.clone()
HOLES[0, 3] = HOLES[1, 6] = False


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("keep", [KEEP, HOLES, None], ids=["padding", "holes", "no mask"])
def test_steps_that_the_host_does_not_see(
    backend: str | None, keep: torch.Tensor | None, told: list[Any]
) -> None:
    """One program for all steps, the last one of the cache too, and the tokens of sdpa."""
    how = {**GENERATE, "attention_mask": None if keep is None else keep.long()}
    with torch.no_grad():
        wanted = llama("sdpa").generate(IDS, **how)
        model = llama(register())
        if backend is not None:
            model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
        assert torch.equal(model.generate(IDS, **how), wanted)
    assert counters["stats"]["unique_graphs"] == (2 if backend else 0)
    assert len(told) == (11 * 3 if backend else 11)  # 3 layers
    assert len(set(map(id, told))) == 1


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(("tokens", "programs"), [(12, 3), (3, 2)], ids=["ring", "short"])
def test_steps_of_sliding_layers(
    backend: str | None, tokens: int, programs: int, told: list[Any]
) -> None:
    """Rings, before they are full and behind it, and caches that are shorter than a window."""
    ids, keep = IDS[:, -5:], KEEP[:, -5:]
    how = {**GENERATE, "attention_mask": keep.long(), "max_new_tokens": tokens}
    with torch.no_grad():
        wanted = small("sdpa").generate(ids, **how)
        model = small(register())
        if backend is not None:
            model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
        assert torch.equal(model.generate(ids, **how), wanted)
    assert counters["stats"]["unique_graphs"] == (programs if backend else 0)
    assert len(told) == (tokens - 1) * (4 if backend else 2)  # layers, kinds of layers


def test_layers_of_a_program_are_told_once(told: list[Any]) -> None:
    """By inductor: those of one mask and one kind. Options and strides as without a compiler."""
    call = registered()
    q, k, v = rows()
    query, sinks = q[:, :, :1], torch.randn(6)
    other = torch.randn(2, 9, 2, 64).transpose(1, 2)  # K and V of one array, NHD
    keeps = [x[:2, None, None] for x in (KEEP, torch.ones_like(KEEP))]

    def layers(mask: Any, without: Any) -> list[Any]:
        return [
            call(LAYER, query, *kv, mask_of, 0.3, **options)[0]
            for kv, mask_of, options in (
                ((k, v), mask, {}),
                ((k, v), without, {}),
                ((v, k), mask, {"s_aux": sinks}),
                ((v, k), without, {}),
                ((k, v), mask, {"softcap": 5.0}),
                ((other[..., :32], other[..., 32:]), mask, {}),
                ((k, other[..., 32:]), mask, {}),
            )
        ]

    wanted = layers(*keeps)
    assert not told
    with torch.no_grad():
        found = torch.compile(layers, fullgraph=True)(*map(steps.marked, keeps))
        assert len(set(map(id, told))) == 2  # with a soft-cap and without
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
            assert x.stride() == y.stride()

        def alike(mask: Any) -> list[Any]:
            return [call(LAYER, query * i, k, v, mask, 0.3)[0] for i in range(4)]

        told.clear()
        compiled = torch.compile(alike, fullgraph=True)
        for _ in range(3):
            compiled(steps.marked(keeps[0]))
        assert len(told) == 3


@pytest.mark.usefixtures("on_device")
def test_which_masks_stay_on_the_device() -> None:
    """Of one query, at an offset that is a tensor, where transformers asks for a mask."""
    asked: dict[str, Any] = {
        "batch_size": 3, "q_length": 1, "kv_length": 12, "q_offset": torch.tensor(8),
        "attention_mask": KEEP, "allow_is_causal_skip": False,
        "mask_function": masking_utils.causal_mask_function,
    }  # fmt: skip
    found = masks.mask(**asked)
    assert steps.is_marked(found)
    assert torch.equal(found, masking_utils.sdpa_mask(**asked))
    window = masking_utils.sliding_window_causal_mask_function(4)
    assert masks.mask(**asked | {"mask_function": window}).sum() == 4 + 4 + 2
    assert masks.mask(**asked | {"attention_mask": None}).is_contiguous()
    # Of rings the host knows the length: slots that nobody wrote, as many as the window, as before.
    ring = asked | {"mask_function": window, "attention_mask": None}
    for offset, skipped, slots, static in (
        (1, 0, 3, True), (2, 0, 3, True), (7, 4, 4, True), (2, 0, 3, False), (8, 5, 4, True),
    ):  # fmt: skip
        given = {"q_offset": offset, "kv_offset": skipped, "kv_length": slots}
        assert steps.is_marked(masks.mask(**ring | given)) == static
    indexed = SimpleNamespace(layer_types=["indexed_attention"])
    for change in (
        {"q_offset": 8},
        {"q_length": 2, "q_offset": torch.tensor(7)},
        {"allow_is_causal_skip": True},
        {"config": indexed},
    ):
        assert not steps.is_marked(masks.mask(**asked | change))


def test_refused_masks_of_steps() -> None:
    q, k, v = rows()
    mask = steps.marked(torch.ones(2, 1, 1, 8, dtype=torch.bool))
    with pytest.raises(flashbsr.ShapeError, match="^attention_mask"):
        attention(LAYER, q[:, :, :1], k, v, mask)
    with pytest.raises(flashbsr.ShapeError, match="^query"):
        attention(LAYER, q[:1, :, :1], k[:, :, :8], v[:, :, :8], mask)


def below_the_best(model: Any, tokens: torch.Tensor, keep: torch.Tensor) -> float:
    """How far the logits of chosen tokens are below the best, by a model in float32."""
    first = keep.shape[1]
    seen = torch.nn.functional.pad(keep, (0, tokens.shape[1] - first), value=True)
    places = (seen.cumsum(-1) - 1).clamp(min=0)
    logits = model(tokens, attention_mask=seen.long(), position_ids=places).logits[
        :, first - 1 : -1
    ]
    chosen = logits.gather(-1, tokens[:, first:, None])[..., 0]
    return float((logits.max(-1).values - chosen).max())


@pytest.mark.skipif(len(DEVICES) < 2, reason="needs a GPU")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("keep", [KEEP, HOLES], ids=["padding", "holes"])
@pytest.mark.parametrize(
    "make", [llama, functools.partial(small, head_dim=64)], ids=["full", "by turns"]
)
def test_steps_in_a_graph_cuda(make: Any, keep: torch.Tensor) -> None:
    """`generate` compiles by itself: one program, of which every step is one graph.

    Rings of transformers 5.17 count tokens in a number: a second program is for any number.
    """
    ids, keep = IDS.cuda(), keep.cuda()
    how = {**GENERATE, "disable_compile": False, "max_new_tokens": 24}
    how["attention_mask"] = keep.long()
    model = make(register()).cuda().half()
    with torch.no_grad():
        found = [model.generate(ids, **how) for _ in range(2)]
        assert counters["stats"]["unique_graphs"] in ((1,) if make is llama else (1, 2))
        assert not counters["graph_break"]
        assert not counters["inductor"]["cudagraph_skips"]
        with torch.profiler.profile() as seen:
            found.append(model.generate(ids, **how))
        launched = [x.count for x in seen.key_averages() if x.key == "cudaGraphLaunch"]
        assert launched == [23]  # of 24 tokens the first one is the prompt's
        judge = make("sdpa").cuda()
        for tokens in found:
            assert below_the_best(judge, tokens, keep) < 0.02  # of 1.6 by which logits scatter
            assert torch.equal(tokens, found[0])


def test_shapes_and_options() -> None:
    """Keys or queries that all rows share, sinks, a soft-cap, a window: as without a compiler."""
    call = registered()
    q, k, v = rows()

    def layer(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return call(LAYER, q, k, v, None, 0.3, **options)[0]

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for given, options in (
        ((q, k, v), {}),
        ((q[:1], k, v), {"is_causal": False}),
        ((q, k[:1], v[:1]), {"softcap": 5.0}),
        ((q, k, v[..., :16]), {"sliding_window": 4, "s_aux": torch.randn(6)}),
        ((q[:, :, :1], k, v), {}),
    ):
        wanted = attention(LAYER, *given, None, 0.3, **options)[0]
        found = compiled(*given, **options)
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()


def test_autocast() -> None:
    """Attention is computed in the type that autocast says, as without a compiler."""
    call = registered()

    def layer(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return call(LAYER, q, k, v, None)[0]

    found = torch.compile(layer, backend="eager", fullgraph=True)(*rows())
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, layer(*rows()))


def test_refused() -> None:
    """What raises without a compiler raises with one; the way back through a result does."""
    call = registered()
    q, k, v = rows()

    def layer(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return call(LAYER, q, k, v, None, **options)[0]

    compiled = torch.compile(layer, backend="eager")
    for options, name in (({"dropout": 0.1}, "dropout"), ({"position_bias": q}, "position_bias")):
        with pytest.raises(flashbsr.UnsupportedError, match=f"^{name}"):
            compiled(q, k, v, **options)
    out = compiled(q, k.requires_grad_(), v)
    with pytest.raises(flashbsr.UnsupportedError, match="^backward"):
        out.sum().backward()


def test_keys_that_an_index_chose() -> None:
    """Compilers stop there: which keys they are is read on the host."""
    call = registered()
    indices = torch.stack([torch.randperm(9)[:4] for _ in range(18)]).view(2, 9, 4)

    def layer(q: Any, k: Any, v: Any) -> Any:
        return call(LAYER, q, k, v, None, 0.3, indices=indices)[0]

    found = torch.compile(layer, backend="eager")(*rows())
    assert torch.equal(found, layer(*rows()))
    assert counters["graph_break"]
