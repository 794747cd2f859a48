# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Measures what each type of KV cache costs in accuracy on the two models of examples/.

    python tools/kv_accuracy.py            measure (minutes), rewrite the tables of the docs
    python tools/kv_accuracy.py --check    say whether they are of these sources

K and V of every layer are written by `append_paged_kv_cache` and read by `Attention`; everything
else of the language model is float64 and of MiniLM float32, so that errors are the cache's. A
query sees its own token as the cache has it, as in decode, so one pass over a text gives the logits
that decoding it token by token would. Truth is the dense float64 forward, which knows nothing of
flashbsr.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import flashbsr
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from readme_cuda import table
from readme_figures import ROOT, between, source_hash

sys.path.insert(0, str(ROOT / "examples"))

from embed import corpus as sentences
from embed import dense as embed_dense
from embed import minilm, wordpiece
from serve import corpus, dense, weights
from serve.tokenizer import END, Tokenizer

DOCS = ROOT / "docs" / "kv-quantization.md"
MARKER = "accuracy"
Floats = NDArray[np.floating]


@dataclass(frozen=True)
class Cache:
    """One row: types of K and V, of their scales, and what is rotated before they are rounded."""

    name: str
    k: str
    v: str
    scale: str = "float32"  # "": the cache has none
    rotated: str = ""  # "k", or "kv"

    @property
    def q(self) -> str:
        """Element type of the queries: floats of 16 bits need their like."""
        return self.k if self.k == "bfloat16" else "float32"


CACHES = (
    Cache("float32", "float32", "float32", ""),
    Cache("bfloat16 (and q)", "bfloat16", "bfloat16", ""),
    Cache("int8", "int8", "int8"),
    Cache("int8, float16 scales", "int8", "int8", "float16"),
    Cache("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn"),
    Cache("float8_e4m3fn, no scales", "float8_e4m3fn", "float8_e4m3fn", ""),
    Cache("float8_e5m2", "float8_e5m2", "float8_e5m2"),
    Cache("K int8, V int4", "int8", "int4"),
    Cache("int4", "int4", "int4"),
    Cache("int4, K rotated", "int4", "int4", rotated="k"),
    Cache("int4, K and V rotated", "int4", "int4", rotated="kv"),
    Cache("nvfp4", "nvfp4", "nvfp4"),
    Cache("nvfp4, K rotated", "nvfp4", "nvfp4", rotated="k"),
    Cache("nvfp4, K and V rotated", "nvfp4", "nvfp4", rotated="kv"),
)


class CachedAttention:
    """Attention over a cache that K and V are written to first.

    Parameters
    ----------
    cache : Cache
    heads : tuple of three
        Query heads, KV heads, head dim.
    causal : bool
    """

    def __init__(self, cache: Cache, heads: tuple[int, int, int], causal: bool) -> None:
        self.cache = cache
        task = flashbsr.TaskInfo(
            *heads, q_dtype=cache.q, kv_dtype=(cache.k, cache.v), o_dtype="float32"
        )
        self.attention = flashbsr.Attention(flashbsr.AttentionSpec(causal=causal), task)

    def plan(self, lengths: list[int]) -> None:
        """Texts that lie one after another, each with its own keys."""
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self.attention.plan(flashbsr.Ragged(indptr, indptr))

    def _empty(self, dtype: str, x: Floats) -> tuple[Any, Any]:
        """Make a cache for rows `x`, and its scales: one, an array, or that and NVFP4's number."""
        n, heads, dim = x.shape
        if not self.cache.scale:
            return np.empty(x.shape, getattr(ml_dtypes, dtype, dtype)), 1.0
        if dtype == "nvfp4":
            # Of the tensor: the largest group gets the largest scale.
            number = float(np.abs(x).max()) / (6 * 448)
            scales = np.empty((n, heads, dim // 16), ml_dtypes.float8_e4m3fn)
            return np.empty((n, heads, dim // 2), np.uint8), (scales, number)
        if dtype == "int4":
            return np.empty((n, heads, dim // 2), np.uint8), np.empty((n, heads), np.float32)
        codes = np.empty(x.shape, getattr(ml_dtypes, dtype, dtype))
        return codes, np.empty((n, heads), self.cache.scale)

    def __call__(self, q: Floats, k: Floats, v: Floats) -> Floats:
        """Attend from q `[n, H_qo, D]` to k and v `[n, H_kv, D]`, in any float type."""
        cache = self.cache
        dtype = getattr(ml_dtypes, cache.q, cache.q)
        q, k, v = (x.astype(np.float32).astype(dtype) for x in (q, k, v))
        if cache.rotated:
            q, k = flashbsr.hadamard(q), flashbsr.hadamard(k)
        if cache.rotated == "kv":
            v = flashbsr.hadamard(v)
        (k_codes, k_scale), (v_codes, v_scale) = self._empty(cache.k, k), self._empty(cache.v, v)
        flashbsr.append_paged_kv_cache(
            k, v, paged_kv_cache=(k_codes, v_codes), slot_mapping=np.arange(len(k)),
            k_scale=k_scale, v_scale=v_scale, kv_dtype=(cache.k, cache.v),
        )  # fmt: skip
        out = self.attention.run(q, (k_codes, v_codes), k_scale=k_scale, v_scale=v_scale)
        return flashbsr.hadamard(out) if cache.rotated == "kv" else out


class LanguageModel:
    """examples/serve's model on text that it was not trained on."""

    def __init__(self, windows: int | None = None, prompts: int = 24, answer: int = 64) -> None:
        self.config, self.tensors = weights.load()
        tokenizer = Tokenizer.load(weights.TOKENIZER)
        documents = [[END, *tokenizer.encode(text)] for text in corpus.gather()[39::40]]
        text = np.concatenate([*documents, [END]])
        length = self.config.context
        count = (len(text) - 1) // length
        self.windows = [text[i * length :][: length + 1] for i in range(count)][:windows]
        self.exact = [dense.forward(self.config, self.tensors, w[:-1]) for w in self.windows]
        self.answer = answer
        self.answers = [self._continued(document[:32]) for document in documents[:prompts]]

    def _continued(self, tokens: list[int]) -> list[int]:
        """Append the greedy text of float64."""
        tokens = list(tokens)
        for _ in range(self.answer):
            tokens.append(int(dense.forward(self.config, self.tensors, tokens)[-1].argmax()))
        return tokens

    def _logits(self, attend: CachedAttention, tokens: Any) -> Floats:
        attend.plan([len(tokens)])
        return dense.forward(self.config, self.tensors, tokens, attend=attend)

    def row(self, cache: Cache) -> dict[str, float]:
        """Errors over all windows, and greedy texts."""
        c = self.config
        attend = CachedAttention(cache, (c.q_heads, c.kv_heads, c.head_dim), True)
        square = equal = loss = divergence = count = 0.0
        for window, exact in zip(self.windows, self.exact, strict=True):
            logits = self._logits(attend, window[:-1])
            # A constant on all logits of a row changes nothing that is drawn from them.
            logs, true = log_softmax(logits), log_softmax(exact)
            difference = logits - exact
            square += float(((difference - difference.mean(-1, keepdims=True)) ** 2).mean(-1).sum())
            equal += float((logits.argmax(-1) == exact.argmax(-1)).sum())
            loss -= float(np.take_along_axis(logs, window[1:, None], 1).sum())
            divergence += float((np.exp(true) * (true - logs)).sum())
            count += len(logits)
        # A greedy text is the true one up to the first token where one pass over the true text
        # would choose another.
        same = []
        for tokens in self.answers:
            chosen = self._logits(attend, tokens[:-1])[-self.answer :].argmax(-1)
            wrong = np.flatnonzero(chosen != tokens[-self.answer :])
            same.append(wrong[0] if len(wrong) else self.answer)
        return {
            "error": (square / count) ** 0.5,
            "divergence": divergence / count,
            "equal": equal / count,
            "perplexity": float(np.exp(loss / count)),
            "same": float(np.mean(same)),
        }


def log_softmax(x: Floats) -> Floats:
    """Logarithms of probabilities, of rows."""
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


class Encoder:
    """all-MiniLM-L6-v2 on sentences of the Python reference."""

    def __init__(self, count: int = 256) -> None:
        model = minilm.find_model()
        self.weights = minilm.load_weights(model / "model.safetensors")
        tokenizer = wordpiece.WordPieceTokenizer.from_file(model / "vocab.txt", minilm.MAX_TOKENS)
        self.ids = [tokenizer.encode(text) for text in sentences.sentences(count, 0)]
        self.exact = embed_dense.embed_float64(self.weights, self.ids)

    def row(self, cache: Cache) -> dict[str, float]:
        """Errors of embeddings, vectors of length 1."""
        heads = minilm.NUM_HEADS
        attend = CachedAttention(cache, (heads, heads, minilm.HEAD_DIM), False)
        lengths = [len(ids) for ids in self.ids]
        attend.plan(lengths)
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        positions = np.arange(indptr[-1]) - np.repeat(indptr[:-1], lengths)
        hidden = minilm.encode(self.weights, np.concatenate(self.ids), positions, attend)
        found = minilm.pool(hidden, indptr).astype(np.float64)
        return {
            "distance": float(np.linalg.norm(found - self.exact, axis=1).mean()),
            "worst": float(np.linalg.norm(found - self.exact, axis=1).max()),
            "nearest": float((nearest(found) == nearest(self.exact)).mean()),
        }


def nearest(x: Floats) -> NDArray[np.int64]:
    """Find the other vector with the largest cosine, of each."""
    cosines = x @ x.T
    np.fill_diagonal(cosines, -2)
    return cosines.argmax(-1)


TEXT = """\
The language model of `examples/serve` ({layers} layers, {q_heads} query and {kv_heads} KV heads \
of {dim}) on {tokens} tokens of text that it was not trained on, against its dense float64 \
forward: the root mean square error of a logit (less the mean of its row), the Kullback-Leibler \
divergence of the next token's distribution in nats, how often the most likely token is the \
same, the perplexity ({perplexity:.3f} in float64), and how many of {answer} greedy tokens are \
the same before the first other one, a mean of {prompts} texts:"""

EMBED = """\
all-MiniLM-L6-v2 of `examples/embed` (6 layers, 12 heads of 32) on {count} sentences: the \
distance of an embedding, a vector of length 1, from that of a float64 forward, in the mean and \
at worst, and how often the nearest other sentence is the same:"""

SOURCE = "Written by `tools/kv_accuracy.py` from sources `{}`."


def measure() -> str:
    """Render the part between the markers."""
    model, encoder = LanguageModel(), Encoder()
    language, embedding = [], []
    for cache in CACHES:
        r = model.row(cache)
        language.append([
            cache.name, f"{r['error']:.1e}", f"{r['divergence']:.1e}", f"{r['equal']:.2%}",
            f"{r['perplexity']:.3f}", f"{r['same']:.1f}",
        ])  # fmt: skip
        e = encoder.row(cache)
        embedding.append(
            [cache.name, f"{e['distance']:.1e}", f"{e['worst']:.1e}", f"{e['nearest']:.1%}"]
        )
        print(*language[-1], *embedding[-1][1:], sep="  ", flush=True)
    losses = [
        -np.take_along_axis(log_softmax(exact), window[1:, None], 1).mean()
        for window, exact in zip(model.windows, model.exact, strict=True)
    ]
    c = model.config
    parts = [
        TEXT.format(
            layers=c.layers, q_heads=c.q_heads, kv_heads=c.kv_heads, dim=c.head_dim,
            tokens=len(losses) * c.context, perplexity=float(np.exp(np.mean(losses))),
            answer=model.answer, prompts=len(model.answers),
        ),
        table(["cache", "error", "divergence", "same token", "perplexity", "same text"], language),
        EMBED.format(count=len(encoder.ids)),
        table(["cache", "mean distance", "largest", "same nearest"], embedding),
        SOURCE.format(source_hash()),
    ]  # fmt: skip
    return "\n\n".join(parts)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare hashes, write nothing")
    if parser.parse_args().check:
        current = SOURCE.format(source_hash()) in DOCS.read_text()
        print(f"kv_accuracy: {DOCS.name} is {'current' if current else 'STALE'}")
        return 0
    measured = measure()
    DOCS.write_text(between(DOCS.read_text(), MARKER, measured + "\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
