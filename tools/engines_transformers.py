# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Cases of tools/engines.py: transformers on the CPU, its own attention beside flashbsr's.

    python tools/engines_transformers.py [CASE ...]      alone, nothing is written

Each case is a model of random weights (standard deviation 0.08, or greedy tokens are ties). Its own
attention generates for each prompt alone. flashbsr generates for the same prompts alone, in a batch
with padding on the left, over a static cache, with drafts of another model, and by continuous
batching in chunks. Tokens must be
equal up to the first place where the two best logits are nearly a tie; what follows such a place
has another past, and is not compared.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

VERSIONS = ("5.17.0", "5.24.0")
SOURCES = (
    "python/flashbsr/integrations/transformers/*.py",
    "python/flashbsr/layout/padded.py",
    "tools/engines_transformers.py",
)
TOKENS, VOCAB = 24, 512
TIE = 1e-3  # logits are 4 to 8; float32 sums in another order move them by 1e-5
LEAST = 0.9  # of all places, so many are compared
LENGTHS = 5, 70, 33, 17, 1
# What transformers' own attention is right with: sdpa knows no sinks and no soft-cap.
OWN = {"gptoss": "eager", "gemma2": "eager"}


def version() -> str:
    """Give the version of this Python's transformers."""
    return importlib.metadata.version("transformers")


def packages() -> dict[str, str]:
    """Give what else decides."""
    return {name: importlib.metadata.version(name) for name in ("torch", "numpy")}


def config(kind: str) -> Any:
    """Heads as in Llama 3.2 1B, Qwen3 0.6B, Gemma 2 2B and 3 1B, gpt-oss 20B, DeepSeek V2 Lite."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
        "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    by_turns = {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 16,
    }
    experts = {"num_experts_per_tok": 2, "num_local_experts": 4}

    def heads(q: int, kv: int, dim: int, **more: Any) -> dict[str, Any]:
        return {"num_attention_heads": q, "num_key_value_heads": kv, "head_dim": dim, **more}

    if kind == "llama":
        return transformers.LlamaConfig(**common, **heads(32, 8, 64))
    if kind == "qwen3":
        return transformers.Qwen3Config(**common, **heads(16, 8, 128))
    if kind == "gemma2":
        more = {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 2.0, **by_turns}
        return transformers.Gemma2Config(**common, **heads(8, 4, 256, **more))
    if kind == "gemma3":
        more = {"query_pre_attn_scalar": 256, **by_turns}
        return transformers.Gemma3TextConfig(**common, **heads(4, 1, 256, **more))
    if kind == "gptoss":
        return transformers.GptOssConfig(**common, **heads(64, 8, 64, **by_turns, **experts))
    return transformers.DeepseekV2Config(
        **common, num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=128,
        q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy",
        routed_scaling_factor=1.0,
    )  # fmt: skip


def model_of(kind: str) -> Any:
    """Make a model of random weights."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(kind), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.08)
            elif parameter.ndim == 1 and kind == "gptoss":
                parameter.normal_(1, 0.5)  # sinks, among others, that decide something
    model.generation_config.eos_token_id = None
    return model


def prompts() -> list[list[int]]:
    """Short and long ones; two begin alike."""
    numbers = random.Random(1)
    made = [[numbers.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]
    return [*made, made[1][:50] + made[2]]


def generate(model: Any, given: list[list[int]], **options: Any) -> tuple[list[list[int]], Any]:
    """Greedy tokens of a batch with padding on the left, and its logits ``(steps, B, vocab)``."""
    import torch

    longest = max(map(len, given))
    ids = torch.tensor([[2] * (longest - len(x)) + x for x in given])
    keep = torch.tensor([[0] * (longest - len(x)) + [1] * len(x) for x in given])
    found = model.generate(
        ids, attention_mask=keep, max_new_tokens=TOKENS, do_sample=False, pad_token_id=2,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return found.sequences[:, longest:].tolist(), torch.stack(found.logits)


def drafter_for(model: Any, kind: str) -> Any:
    """Make a model that is a little other: some of its drafts are right, some are not.

    None where layers have windows, whose caches transformers cannot cut back.
    """
    import torch

    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        return None
    drafter = model_of(kind)
    head = drafter.get_output_embeddings().weight
    with torch.no_grad():
        head.add_(torch.randn(head.shape, generator=torch.Generator().manual_seed(1)), alpha=0.01)
    return drafter


def generate_paged(model: Any, given: list[list[int]]) -> list[list[int]]:
    """Greedy tokens by continuous batching, in chunks of 48 tokens."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    size = {"page_size" if "page_size" in fields else "block_size": 16}
    how = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=2)
    batching = ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=48, **size)
    found = model.generate_batch(
        given, generation_config=how, continuous_batching_config=batching, progress_bar=False
    )
    by_name = sorted(found, key=lambda name: int(name.split("_")[-1]))
    return [list(found[name].generated_tokens) for name in by_name]


def dense(
    model: Any, drafter: Any, given: list[list[int]]
) -> Iterator[tuple[str, list[list[int]]]]:
    """Every way of ``generate``."""
    yield "alone", [generate(model, [x])[0][0] for x in given]
    yield "padded", generate(model, given)[0]
    static = {"cache_implementation": "static", "disable_compile": True}
    yield "static", [generate(model, [x], **static)[0][0] for x in given[:3]]
    yield "static padded", generate(model, given, **static)[0]
    if drafter is not None:  # several query tokens over a cache that is cut back now and then
        yield "drafts", [generate(model, [x], assistant_model=drafter)[0][0] for x in given[:3]]


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count plans and runs of flashbsr."""
    import flashbsr

    counts = {"plan": 0, "run": 0}
    held = {name: getattr(flashbsr.Attention, name) for name in counts}

    def count(name: str, *given: Any, **options: Any) -> Any:
        counts[name] += 1
        return held[name](*given, **options)

    def method(name: str) -> Callable[..., Any]:
        return lambda *given, **options: count(name, *given, **options)

    for name in counts:
        setattr(flashbsr.Attention, name, method(name))
    try:
        yield counts
    finally:
        for name, function in held.items():
            setattr(flashbsr.Attention, name, function)


def compare(
    own: list[list[int]], leads: list[list[float]], ours: list[list[int]]
) -> dict[str, Any]:
    """Count equal tokens up to a tie, and requests that differ elsewhere."""
    equal = different = 0
    for x, y, lead in zip(own, ours, leads, strict=False):
        same = next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), len(x))
        equal += same
        different += len(y) != len(x) or (same < len(x) and lead[same] > TIE)
    total = sum(map(len, own[: len(ours)]))
    good = bool(ours) and not different and equal >= LEAST * total
    return {"ok": good, "equal": equal, "tokens": total, "different": different}


def case(kind: str, paged: bool = True) -> dict[str, Any]:
    """Generate in all ways with a model."""
    import flashbsr.integrations.transformers as door
    import torch

    model, given = model_of(kind), prompts()
    model.set_attn_implementation(OWN.get(kind, "sdpa"))
    alone = [generate(model, [x]) for x in given]
    own = [tokens[0] for tokens, _ in alone]
    leads = []
    for _, logits in alone:
        best = torch.topk(logits[:, 0], 2).values
        leads.append((best[:, 0] - best[:, 1]).tolist())
    ways: dict[str, Any] = {}
    model.set_attn_implementation(door.register())
    with counted() as counts:
        for name, tokens in dense(model, drafter_for(model, kind), given):
            ways[name] = compare(own, leads, tokens) | counts
            ways[name]["ok"] &= counts["run"] > counts["plan"] > 0
            counts.update(plan=0, run=0)
        if paged:
            with door.continuous(model):
                tokens = generate_paged(model, given)
            ways["continuous"] = compare(own, leads, tokens) | counts
            ways["continuous"]["ok"] &= len(tokens) == len(given) and counts["run"] > 0
    return {"ok": all(way["ok"] for way in ways.values()), "ways": ways}


# transformers' own continuous batching keeps K and V of one head dim; those of MLA have two.
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    kind: partial(case, kind) for kind in ("llama", "qwen3", "gemma2", "gemma3", "gptoss")
} | {"deepseek": partial(case, "deepseek", paged=False)}


def main() -> int:
    """Run the cases that are named, or all."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    good = True
    for name in sys.argv[1:] or CASES:
        outcome = CASES[name]()
        good &= outcome["ok"]
        print(name, json.dumps(outcome), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
