# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A model of transformers that tests generate with."""

from __future__ import annotations

from typing import Any

import torch
import transformers


def small(kind: str, head_dim: int = 16) -> Any:
    """A model of two kinds of layers, by turns."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim, sliding_window=8,
        query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    return _ready(transformers.Gemma3ForCausalLM(config), kind)


def llama(kind: str) -> Any:
    """A model of three layers that attend to all tokens."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    return _ready(transformers.LlamaForCausalLM(config), kind)


def _ready(model: Any, kind: str) -> Any:
    """Random weights so large that tokens differ; no token ends a text."""
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.2)
    model.generation_config.eos_token_id = None
    model.set_attn_implementation(kind)
    return model
