# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Trains the example's language model on the prose that ships with Python (PyTorch, CPU or GPU).

    python examples/serve/train.py --out examples/serve

Writes `model.safetensors` (float16) and `tokenizer.json`. Seeded: one machine, one PyTorch and one
Python version give one model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as fn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from serve import corpus, weights
from serve.tokenizer import END, Tokenizer, train_merges
from serve.weights import Config

PROMPTS = ("The with statement ", "A class is ", "If you open a file, ", "The quick brown fox ")


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `x (..., T, D)` by position, halves as pairs (NeoX)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Transformer(torch.nn.Module):
    """The training twin of `dense.py`; parameters carry the names of `Config.shapes`."""

    def __init__(self, config: Config, dropout: float) -> None:
        super().__init__()
        self.config, self.dropout = config, dropout
        self.weight = torch.nn.ParameterDict()
        for name, shape in config.shapes().items():
            if len(shape) == 1:
                value = torch.ones(shape)
            else:
                deep = name.endswith(("wo", "w_down"))
                value = torch.randn(shape) * 0.02 / (math.sqrt(2 * config.layers) if deep else 1)
            self.weight[name.replace(".", "_")] = torch.nn.Parameter(value)
        inverse = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.arange(config.context)[:, None] * inverse
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def w(self, name: str) -> Tensor:
        return self.weight[name.replace(".", "_")]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `(B, T, vocab)` of token ids `(B, T)`."""
        c, (batch, length) = self.config, tokens.shape
        cos, sin = self.cos[:length], self.sin[:length]

        def norm(x: Tensor, name: str) -> Tensor:
            return fn.rms_norm(x, (c.hidden,), self.w(name), c.norm_eps)

        def heads(x: Tensor, count: int) -> Tensor:
            return x.view(batch, length, count, c.head_dim).transpose(1, 2)

        def drop(x: Tensor) -> Tensor:
            return fn.dropout(x, self.dropout, self.training)

        x = drop(self.w("embed")[tokens])
        for i in range(c.layers):
            at = f"layers.{i}."
            h = norm(x, at + "attn_norm")
            q = rope(heads(h @ self.w(at + "wq").T, c.q_heads), cos, sin)
            k = rope(heads(h @ self.w(at + "wk").T, c.kv_heads), cos, sin)
            v = heads(h @ self.w(at + "wv").T, c.kv_heads)
            k, v = (t.repeat_interleave(c.q_heads // c.kv_heads, dim=1) for t in (k, v))
            o = fn.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
            x = x + drop(o.transpose(1, 2).reshape(batch, length, -1) @ self.w(at + "wo").T)
            h = norm(x, at + "ffn_norm")
            h = fn.silu(h @ self.w(at + "w_gate").T) * (h @ self.w(at + "w_up").T)
            x = x + drop(h @ self.w(at + "w_down").T)
        return norm(x, "norm") @ self.w("embed").T


def windows(data: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """`(batch, length + 1)` random windows of the token stream."""
    starts = torch.randint(len(data) - length, (batch,), generator=generator)
    return torch.stack([data[s : s + length + 1] for s in starts.tolist()])


def loss_of(model: Transformer, batch: Tensor, device: torch.device) -> Tensor:
    batch = batch.to(device, non_blocking=True)
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(batch[:, :-1])
    return fn.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: Transformer, data: Tensor, device: torch.device) -> float:
    """Mean loss in nats per token over the held-out text."""
    model.eval()
    length = min(model.config.context, len(data) - 1)
    rows = data[: (len(data) - 1) // length * length + 1].unfold(0, length + 1, length)
    losses = [loss_of(model, part, device).item() * len(part) for part in rows.split(32)]
    model.train()
    return sum(losses) / len(rows)


@torch.no_grad()
def sample(model: Transformer, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """A continuation at temperature 0.7, to look at."""
    model.eval()
    device = model.w("norm").device
    ids = [END, *tokenizer.encode(prompt)]
    for _ in range(count):
        logits = model(torch.tensor([ids], device=device))[0, -1].float()
        ids.append(int(torch.multinomial(torch.softmax(logits / 0.7, -1), 1)))
        if ids[-1] == END:
            break
    model.train()
    return tokenizer.decode(ids)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 200 steps, then a cosine down to 2 % of the peak."""
    if step < 200:
        return peak * (step + 1) / 200
    return peak * (0.02 + 0.49 * (1 + math.cos(math.pi * (step - 200) / max(steps - 200, 1))))


def train(args: argparse.Namespace, documents: list[str], tokenizer: Tokenizer) -> Transformer:
    """The training loop; prints the losses as it goes."""
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = Config(vocab_size=tokenizer.vocab_size)
    streams: dict[bool, list[int]] = {True: [], False: []}
    for n, document in enumerate(documents):  # every 40th document is held out
        streams[n % 40 != 39] += [END, *tokenizer.encode(document)]
    data, held_out = (torch.tensor([*streams[kind], END]) for kind in (True, False))
    model = Transformer(config, args.dropout).to(device)
    size = sum(p.numel() for p in model.parameters())
    print(f"{device}: {size:,} parameters, {len(data):,} tokens", flush=True)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda"
    )
    generator = torch.Generator().manual_seed(args.seed)
    started = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        loss = loss_of(model, windows(data, args.batch, config.context, generator), device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % args.report == args.report - 1 or step == args.steps - 1:
            seconds = time.perf_counter() - started
            held = evaluate(model, held_out, device)
            print(
                f"step {step + 1:5d}/{args.steps}  {seconds:6.1f} s  "
                f"loss {loss.item():.3f}  held out {held:.3f}",
                flush=True,
            )
    return model


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="train the model of examples/serve")
    parser.add_argument("--out", type=Path, default=weights.FOLDER, help="folder for the two files")
    parser.add_argument("--corpus", type=Path, help="JSON list of documents instead of gathering")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=64, help="windows of 512 tokens per step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--vocab", type=int, default=1536)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=int, default=250, help="steps between two loss lines")
    parser.add_argument("--sample", type=int, default=120, help="tokens of each text at the end")
    args = parser.parse_args(argv)

    documents = json.loads(args.corpus.read_text()) if args.corpus else corpus.gather()
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    characters = sum(map(len, documents))
    print(f"{len(documents)} documents, {characters:,} characters, sha256 {digest}", flush=True)
    tokenizer = Tokenizer(train_merges(documents, args.vocab))
    model = train(args, documents, tokenizer)

    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(args.out / "tokenizer.json")
    config = model.config
    tensors = {n: model.w(n).detach().cpu().numpy().astype(np.float16) for n in config.shapes()}
    notes = {"corpus_sha256": digest, "steps": str(args.steps), "seed": str(args.seed)}
    notes |= {"torch": torch.__version__, "python": platform.python_version()}
    weights.save(args.out / "model.safetensors", config, tensors, **notes)
    for prompt in PROMPTS:
        print("---", sample(model, tokenizer, prompt, args.sample), flush=True)


if __name__ == "__main__":
    main()
