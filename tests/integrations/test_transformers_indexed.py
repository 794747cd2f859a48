# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""transformers: models that choose keys by an index, and that compute with their masks."""

from __future__ import annotations

import itertools
from typing import Any

import flashbsr
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from flashbsr.integrations.transformers import register
from flashbsr.integrations.transformers.dense import attention, mask
from test_transformers import CAUSAL, LAYER, arrays, exact, window


@pytest.mark.parametrize("held", ["causal", "window", "padding", "booleans", "numbers", None])
def test_keys_that_an_index_chose(held: str | None) -> None:
    """Those of them that the mask leaves; -1 is none, and an index may name a key twice."""
    q, k, v = arrays(2, 4, 9)
    indices = torch.randint(-1, 9, (2, 4, 5), dtype=torch.int32)
    indices[1, 2] = -1
    keep = torch.ones(4, 9, dtype=torch.bool).tril(5).expand(2, 1, 4, 9).clone()
    given: Any = None
    if held in ("causal", "window", "padding"):
        pads = torch.ones(2, 9, dtype=torch.long)
        pads[0, :3] = held != "padding"
        function = window(4) if held == "window" else CAUSAL
        given = mask(2, 4, 9, 5, mask_function=function, attention_mask=pads)
        assert given.dtype == torch.int32
        keep[0, ..., :3] &= held != "padding"
        if held == "window":
            keep &= ~torch.ones(4, 9, dtype=torch.bool).tril(1)
    elif held is not None:
        keep[1, ..., 2] = False
        given = (
            keep if held == "booleans" else torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)
        )
    named = (indices[..., None] == torch.arange(9)).any(2)[:, None]
    out, _ = attention(LAYER, q, k, v, given, scaling=0.3, indices=indices)
    wanted = exact(q, k, v, keep & named, None, None)
    torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=1e-5)
    with pytest.raises(flashbsr.UnsupportedError, match="^attention_mask: got numbers that weigh"):
        attention(LAYER, q, k, v, keep.float() * 0.5, indices=indices)


# transformers has no static cache of compressed keys, those of DeepSeek V4.
INDEXED = [
    *itertools.product(["deepseek_v32", "glm_moe_dsa"], ["dynamic", "static"]),
    ("deepseek_v4", "dynamic"),
]


@pytest.mark.parametrize(("kind", "cache"), INDEXED)
def test_models_that_compute_with_their_masks(kind: str, cache: str) -> None:
    """An index that chooses keys by the mask, and numbers that a layer puts behind it."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=1 if kind == "deepseek_v4" else 4, head_dim=16,
        q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
        index_topk=6, index_n_heads=2, index_head_dim=16, moe_intermediate_size=32,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
        sliding_window=8, max_position_embeddings=64, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.12)
    ids = torch.arange(3 * 17).view(3, 17) % 59 + 3
    keep = (torch.arange(17) >= torch.tensor([0, 4, 1])[:, None]).long()
    how: dict[str, Any] = {"attention_mask": keep, "max_new_tokens": 8, "do_sample": False}
    if cache == "static":
        how |= {"cache_implementation": "static", "disable_compile": True}
    found = {}
    for name in ("eager", register()):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found[name] = model(ids, attention_mask=keep).logits, model.generate(ids, **how)
    (logits, tokens), (ours, chosen) = found.values()
    torch.testing.assert_close(ours[keep.bool()], logits[keep.bool()], atol=1e-4, rtol=1e-4)
    assert torch.equal(chosen, tokens)
