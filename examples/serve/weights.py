# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The model's shape and its safetensors file.

A safetensors file is eight bytes of header length (little-endian), a JSON header that maps a name
to `{dtype, shape, data_offsets}`, and the tensors' bytes. NumPy and `json` are enough for it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).resolve().parent
WEIGHTS = FOLDER / "model.safetensors"
TOKENIZER = FOLDER / "tokenizer.json"

_DTYPES: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}


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


def read(path: Path) -> tuple[dict[str, NDArray[np.floating]], dict[str, str]]:
    """The tensors and the metadata of a safetensors file.

    Raises
    ------
    ValueError
        A dtype that the example does not use, or offsets outside of the file.
    """
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{path}: {name}: got {entry['dtype']}; expected one of {[*_DTYPES]}")
        begin, end = (start + offset for offset in entry["data_offsets"])
        if not start <= begin <= end <= len(raw):
            raise ValueError(f"{path}: {name}: got bytes {begin}..{end}; expected <= {len(raw)}")
        flat = np.frombuffer(raw[begin:end], _DTYPES[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors, metadata


def write(path: Path, tensors: dict[str, NDArray[np.float16]], metadata: dict[str, str]) -> None:
    """Writes float16 tensors as safetensors."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        span = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(t, "<f2").tobytes() for t in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def load(path: Path = WEIGHTS) -> tuple[Config, dict[str, NDArray[np.floating]]]:
    """The configuration and the tensors of a model file, checked against each other."""
    tensors, metadata = read(path)
    config = Config(**json.loads(metadata["config"]))
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != config.shapes():
        raise ValueError(f"{path}: the tensors {found} do not fit {config}")
    return config, tensors


def save(path: Path, config: Config, tensors: dict[str, NDArray[np.float16]], **notes: str) -> None:
    """Writes a model file; `notes` go into its metadata."""
    ordered = {name: tensors[name] for name in config.shapes()}
    write(path, ordered, {"format": "np", "config": json.dumps(asdict(config)), **notes})
