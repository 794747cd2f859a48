# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""SGLang with its own attention and with flashbsr's: the same tokens, and how fast each is.

    pip install sglang flashbsr
    python examples/engines/sglang_generate.py     (on the CPU a build of SGLang for CPUs)

It makes a small model of random weights, no download. Each backend generates in processes of its
own, with the one option that users set: ``attention_backend="flashbsr"``.
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
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256), head_dim=64, max_position_embeddings=8192,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.08)
    model.save_pretrained(out)


def generate(args: argparse.Namespace) -> None:
    """One backend, in this process and those that SGLang starts."""
    import sglang

    numbers = random.Random(0)
    prompts = [
        [numbers.randrange(3, VOCAB) for _ in range(numbers.randint(1, args.longest))]
        for _ in range(args.requests)
    ]
    engine = sglang.Engine(
        model_path=args.model, skip_tokenizer_init=True, device=args.device, dtype=args.dtype,
        attention_backend=args.generate, page_size=args.page, max_running_requests=args.requests,
        max_total_tokens=args.requests * (args.longest + args.tokens + args.page),
        random_seed=0, log_level="error", disable_radix_cache=True,
    )  # fmt: skip
    how = {"temperature": 0, "max_new_tokens": args.tokens, "ignore_eos": True}
    for _ in range(2):  # the first time warms up
        begin = time.perf_counter()
        found = engine.generate(
            input_ids=prompts, sampling_params=how, return_logprob=True, top_logprobs_num=2
        )
        seconds = time.perf_counter() - begin
    best = [[step[:2] for step in x["meta_info"]["output_top_logprobs"]] for x in found]
    lead = [[a[0] - b[0] for a, b in steps] for steps in best]
    outcome = {"seconds": seconds, "tokens": [x["output_ids"] for x in found], "lead": lead}
    args.out.write_text(json.dumps(outcome))
    engine.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--longest", type=int, default=800, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="new ones of each request")
    parser.add_argument("--dtype", default="float32", help="a GPU takes bfloat16 or float16")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--own", default="torch_native", help="SGLang's backend")
    parser.add_argument("--page", type=int, default=16, help="tokens of a page")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.generate:
        generate(args)
        return 0
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model", args.layers, args.hidden)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        if args.device == "cpu":
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        for backend in (args.own, "flashbsr"):
            out = folder / f"{backend}.json"
            command = [sys.executable, *sys.argv, f"--generate={backend}", f"--out={out}"]
            command += [f"--model={folder / 'model'}"]
            subprocess.run(command, env=environment, check=True)
            found[backend] = json.loads(out.read_text())
    new = args.requests * args.tokens
    for backend, x in found.items():
        print(f"{backend:12} {x['seconds']:6.2f} s  {new / x['seconds']:8.1f} new tokens/s")
    tie = 1e-3 if args.dtype == "float32" else 2**-4
    equal = different = 0
    own, ours = found[args.own], found["flashbsr"]
    for x, y, ahead in zip(own["tokens"], ours["tokens"], own["lead"], strict=True):
        same = next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        equal += same
        different += same < len(x) and ahead[same] > tie
    print(f"{equal} of {new} tokens are equal up to a tie; {different} differ elsewhere")
    return int(different > 0 or not equal)


if __name__ == "__main__":
    raise SystemExit(main())
