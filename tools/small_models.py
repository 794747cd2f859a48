# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Models of random weights that tools/engines_*.py serve, and prompts for them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

__all__ = ["prompts", "save_model"]

VOCAB = 512


def save_model(kind: str, out: Path) -> None:
    """Write a model with the head dims and counts of a small one of its kind."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(kind), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.08)
    model.generation_config.eos_token_id = None
    model.save_pretrained(out)


def config(kind: str) -> Any:
    """Heads as in Llama 3.2 1B, Qwen3 0.6B, Gemma 3 1B, DeepSeek V2 Lite, gpt-oss 20B."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
        "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    by_turns = ["sliding_attention", "full_attention", "sliding_attention"]

    def heads(q: int, kv: int, dim: int, **more: Any) -> dict[str, Any]:
        return {"num_attention_heads": q, "num_key_value_heads": kv, "head_dim": dim, **more}

    if kind == "mqa":  # a KV head that all ranks have, which is what vLLM spreads over them
        return transformers.LlamaConfig(**common, **heads(8, 1, 64))
    if kind == "llama":
        return transformers.LlamaConfig(**common, **heads(32, 8, 64))
    if kind == "qwen3":
        return transformers.Qwen3Config(**common, **heads(16, 8, 128))
    if kind == "gemma3":
        more = {"sliding_window": 16, "layer_types": by_turns, "query_pre_attn_scalar": 256}
        return transformers.Gemma3TextConfig(**common, **heads(4, 1, 256, **more))
    if kind.startswith("deepseek"):
        if kind == "deepseek yarn":  # SGLang's CPU has no other rotation for it
            common["rope_scaling"] = {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
                "mscale": 1.0, "mscale_all_dim": 1.0,
            }  # fmt: skip
        return transformers.DeepseekV2Config(
            **common, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None,
            kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            first_k_dense_replace=3, n_routed_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=128, n_shared_experts=1, n_group=1, topk_group=1,
            moe_layer_freq=1,
        )  # fmt: skip
    more = {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.GptOssConfig(**common, **heads(64, 8, 64, layer_types=by_turns, **more))


def prompts() -> list[dict[str, list[int]]]:
    """Short and long ones; two begin alike, and one repeats itself (n-grams guess it)."""
    numbers = random.Random(1)
    made = [[numbers.randrange(3, VOCAB) for _ in range(n)] for n in (5, 150, 33, 64, 90, 17, 1)]
    made.append(made[1][:100] + made[2])
    made.append(made[5] * 5)
    return [{"prompt_token_ids": tokens} for tokens in made]
