# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The model's shape and its safetensors file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

FOLDER = Path(__file__).resolve().parent
WEIGHTS = FOLDER / "model.safetensors"
TOKENIZER = FOLDER / "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Config:
    """The shape of a Llama-style decoder with grouped query heads and tied embeddings."""

    vocab_size: int = 1536
    hidden: int = 192
    layers: int = 5
    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 448
    context: int = 512  # positions seen in training
    rope_theta: float = 1e4
    norm_eps: float = 1e-5

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor; a matrix is `(out, in)`."""
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, self.hidden)}
        for i in range(self.layers):
            shapes[f"layers.{i}.attn_norm"] = (self.hidden,)
            shapes[f"layers.{i}.wq"] = (self.q_heads * self.head_dim, self.hidden)
            shapes[f"layers.{i}.wk"] = (self.kv_heads * self.head_dim, self.hidden)
            shapes[f"layers.{i}.wv"] = (self.kv_heads * self.head_dim, self.hidden)
            shapes[f"layers.{i}.wo"] = (self.hidden, self.q_heads * self.head_dim)
            shapes[f"layers.{i}.ffn_norm"] = (self.hidden,)
            shapes[f"layers.{i}.w_gate"] = (self.ffn, self.hidden)
            shapes[f"layers.{i}.w_up"] = (self.ffn, self.hidden)
            shapes[f"layers.{i}.w_down"] = (self.hidden, self.ffn)
        shapes["norm"] = (self.hidden,)
        return shapes


def load(path: Path = WEIGHTS) -> tuple[Config, dict[str, NDArray[np.floating]]]:
    """The configuration and the tensors of a model file, checked against each other."""
    with safe_open(path, framework="np") as file:
        config = Config(**json.loads(file.metadata()["config"]))
    tensors = load_file(path)
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != config.shapes():
        raise ValueError(f"{path}: the tensors {found} do not fit {config}")
    return config, tensors


def save(path: Path, config: Config, tensors: dict[str, NDArray[np.float16]], **notes: str) -> None:
    """Writes a model file; `notes` go into its metadata."""
    ordered = {name: tensors[name] for name in config.shapes()}
    save_file(ordered, path, {"format": "np", "config": json.dumps(asdict(config)), **notes})
