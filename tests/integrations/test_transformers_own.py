# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""transformers: models that never ask for their attention, and would add masks to their logits."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import flashbsr
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from flashbsr.integrations.transformers import register
from flashbsr.integrations.transformers.dense import mask

BERT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS = torch.tensor([[5, 8, 3, 4], [9, 2, 7, 6]])
KEEP = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])


@pytest.mark.parametrize("keep", [None, KEEP])
@pytest.mark.parametrize("kind", ["bloom", "rembert", "roformer", "tapas"])
def test_models_with_an_attention_of_their_own(kind: str, keep: Any) -> None:
    """4 tokens, so that spans, 4 numbers of each row, could be added to logits without an error."""
    config = transformers.AutoConfig.for_model(kind, **BERT)
    model = transformers.AutoModel.from_config(config, attn_implementation=register()).eval()
    with pytest.raises(
        flashbsr.UnsupportedError, match=f"^attn_implementation.*'eager' for {kind}"
    ):
        model(IDS, attention_mask=keep)


def test_one_of_two_files() -> None:
    """BLIP's text has a file of its own, and is found by its config."""
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    config = transformers.BlipTextConfig(**BERT, encoder_hidden_size=32)
    with pytest.raises(flashbsr.UnsupportedError, match="^attn_implementation.*blip_text_model"):
        BlipTextModel._from_config(config, attn_implementation=register())(IDS, attention_mask=KEEP)


def test_a_part_with_an_attention_of_its_own() -> None:
    """GIT's images ask, its text does not."""
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    config = transformers.GitConfig(**BERT, vision_config=vision)
    model = transformers.GitForCausalLM(config).eval()
    model.set_attn_implementation(register())
    with pytest.raises(flashbsr.UnsupportedError, match="^attn_implementation.*git"):
        model(IDS, attention_mask=KEEP)
    for part in (
        transformers.Gemma4AudioConfig(),
        transformers.InformerConfig(),
        transformers.BridgeTowerConfig(),
    ):
        name = part.model_type
        with pytest.raises(flashbsr.UnsupportedError, match=f"^attn_implementation.*{name}"):
            mask(2, 4, 4, config=part)


def test_others_are_let_through() -> None:
    """Models without layers of their own, those who ask, and configs of nobody known."""
    from transformers.models.bert import modeling_bert
    from transformers.models.paligemma import modeling_paligemma

    mine = type("Mine", (transformers.BertConfig,), {})  # a user's
    assert not hasattr(modeling_paligemma, "ALL_ATTENTION_FUNCTIONS")
    for config in (modeling_bert.BertConfig(), transformers.PaliGemmaConfig(), mine(), None):
        assert mask(2, 4, 4, config=config).shape == (2, 1, 1, 4)


@pytest.mark.parametrize("kind", ["inherits", "defines", "asks"])
def test_code_from_elsewhere(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that inherit what they compute may ask for it; those that define it have to ask."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    code: Any = ModuleType("far.modeling_mine")
    monkeypatch.setitem(sys.modules, code.__name__, code)
    members: dict[str, Any] = {"__module__": code.__name__}
    if kind != "inherits":
        members |= {"forward": lambda *_: None}
    code.MineAttention = type("MineAttention", (LlamaAttention,), members)
    if kind == "asks":
        code.INTERFACE = transformers.AttentionInterface()
    members = {"__module__": "far.configuration_mine"}
    config = type("MineConfig", (transformers.LlamaConfig,), members)()
    if kind == "defines":
        with pytest.raises(flashbsr.UnsupportedError, match="^attn_implementation.*llama"):
            mask(2, 4, 4, config=config)
    else:
        assert mask(2, 4, 4, config=config).shape == (2, 1, 1, 4)
