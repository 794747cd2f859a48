# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""transformers' models compiled by PyTorch: attention is an operator, and nothing stops there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import flashbsr
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from flashbsr.integrations.transformers import NAME, register
from flashbsr.integrations.transformers.dense import attention
from torch._dynamo.utils import counters
from transformers import AttentionInterface
from transformers_world import small

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
