# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""transformers with its own attention and with flashbsr's: the same tokens, and how fast each is.

    pip install transformers flashbsr
    python examples/engines/transformers_generate.py

It makes a small model of random weights, no download. Prompts of different lengths generate in one
batch with padding on the left, then by continuous batching, with each attention in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from flashbsr.integrations import transformers as door
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

VOCAB = 2048


def make_model(layers: int, hidden: int, dtype: torch.dtype) -> Any:
    """A Llama with grouped queries; so large a deviation that greedy tokens are no ties."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=2 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256), head_dim=64, max_position_embeddings=32768,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.08)
    model.generation_config.eos_token_id = None
    return model.cuda() if torch.cuda.is_available() else model


def padded(model: Any, prompts: list[list[int]], tokens: int) -> tuple[Any, Any]:
    """New tokens ``(B, tokens)``, and how far the best logit is ahead of the next."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[2] * (longest - len(x)) + x for x in prompts], device=model.device)
    keep = torch.tensor([[0] * (longest - len(x)) + [1] * len(x) for x in prompts])
    found = model.generate(
        ids, attention_mask=keep.to(ids.device), max_new_tokens=tokens, do_sample=False,
        pad_token_id=2, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.stack(found.logits, 1).topk(2).values
    return found.sequences[:, longest:].tolist(), (best[..., 0] - best[..., 1]).tolist()


def continuous(model: Any, prompts: list[list[int]], tokens: int) -> tuple[Any, Any]:
    """The same by ``generate_batch``, which gives no logits."""
    how = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=2)
    size = 256  # tokens of a page; as many as the requests need, and some
    needed = sum(-(-(len(x) + tokens) // size) for x in prompts)
    batching = ContinuousBatchingConfig(
        block_size=size, num_blocks=needed + 8, max_batch_tokens=1024, use_cuda_graph=False
    )
    ours = model.config._attn_implementation == door.NAME
    with door.continuous(model) if ours else contextlib.nullcontext():
        found = model.generate_batch(
            prompts, generation_config=how, continuous_batching_config=batching,
            progress_bar=False,
        )  # fmt: skip
    names = sorted(found, key=lambda name: int(name.split("_")[-1]))
    return [list(found[name].generated_tokens) for name in names], None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--longest", type=int, default=800, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="new ones of each request")
    parser.add_argument("--dtype", default="float32", help="a GPU takes bfloat16 or float16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse_args()
    tie = 1e-3 if args.dtype == "float32" else 2**-4
    model = make_model(args.layers, args.hidden, getattr(torch, args.dtype))
    numbers = random.Random(0)
    prompts = [
        [numbers.randrange(3, VOCAB) for _ in range(numbers.randint(1, args.longest))]
        for _ in range(args.requests)
    ]
    new = args.requests * args.tokens
    print(f"{args.requests} requests, {sum(map(len, prompts))} tokens of prompts, {new} new ones")
    bad = False
    lead: Any = None
    for way in (padded, continuous):
        seconds, tokens = {}, {}
        for name in ("sdpa", door.register()) * 2:  # the first time warms up
            model.set_attn_implementation(name)
            begin = time.perf_counter()
            tokens[name], found = way(model, prompts, args.tokens)
            seconds[name] = time.perf_counter() - begin
            lead = lead or found
        for name, took in seconds.items():
            print(f"  {way.__name__:10} {name:5} {took:6.2f} s  {new / took:8.1f} new tokens/s")
        equal, different = 0, 0
        for x, y, ahead in zip(tokens["sdpa"], tokens[door.NAME], lead, strict=True):
            same = next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
            equal += same
            different += same < len(x) and ahead[same] > tie
        print(f"  {equal} of {new} tokens are equal up to a tie; {different} differ elsewhere")
        bad |= different > 0 or not equal
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
