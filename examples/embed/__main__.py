# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`python examples/embed`: embed sentences with flashbsr, check, search, measure."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

# One BLAS thread, for every row of the measurement: where another program keeps a core busy, two of
# them wait for each other, and a run took 4 to 20 times as long (NumPy reads this when imported).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flashbsr
import numpy as np

from embed import corpus
from embed.dense import embed_float64, embed_padded
from embed.minilm import (
    HEAD_DIM,
    MAX_TOKENS,
    NUM_HEADS,
    NUM_LAYERS,
    Rows,
    Weights,
    encode,
    find_model,
    load_weights,
    pool,
)
from embed.wordpiece import WordPieceTokenizer

# Components of a unit vector of 384, so 0.05 is typical. fp32 with a different order of summation
# is off by 2e-7 after 6 layers; ten times that covers other BLAS libraries and longer sentences.
TOLERANCE = 2e-6
RAGGED_TOKENS = 1024  # of a batch in the measurement: its activations, 6 MB, stay in the cache
PADDED_SENTENCES = 32  # of a padded batch: the default of sentence-transformers

Ids = Sequence[list[int]]


class RaggedEmbedder:
    """Embeds batches of sentences without padding.

    All sentences lie one after another; ``indptr[i]:indptr[i + 1]`` are the rows of sentence i.
    An encoder attends to its own sentence only, so the queries and the keys are ragged alike, and
    one plan serves the six layers.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        task = flashbsr.TaskInfo(NUM_HEADS, NUM_HEADS, HEAD_DIM, q_dtype="float32")
        self.attention = flashbsr.Attention(flashbsr.AttentionSpec(), task)
        self.attention_seconds = 0.0

    def _attend(self, q: Rows, k: Rows, v: Rows) -> Rows:
        start = time.perf_counter()
        out: Rows = self.attention.run(q, (k, v))
        self.attention_seconds += time.perf_counter() - start
        return out

    def __call__(self, sentences: Ids) -> Rows:
        """Embed token ids. Returns (sentences, 384) fp32, rows of length 1."""
        lengths = [len(ids) for ids in sentences]
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self.attention.plan(flashbsr.Ragged(indptr, indptr))
        ids = np.concatenate([np.asarray(sentence, np.int64) for sentence in sentences])
        positions = np.arange(len(ids)) - np.repeat(indptr[:-1], lengths)
        return pool(encode(self.weights, ids, positions, self._attend), indptr)


def check(embed: RaggedEmbedder, sentences: Ids) -> bool:
    """Compare one ragged batch with the dense float64 forward, print the result."""
    ours = embed(sentences)
    truth = embed_float64(embed.weights, sentences)
    error = float(np.abs(ours - truth).max())
    yardstick = float(np.abs(embed_padded(embed.weights, sentences) - truth).max())
    lengths = [len(ids) for ids in sentences]
    passed = error <= TOLERANCE  # False for NaN
    print(
        f"check       {len(sentences)} sentences of {min(lengths)} to {max(lengths)} tokens, "
        f"{sum(lengths)} rows, one plan, {NUM_LAYERS} runs\n"
        f"            max |flashbsr - float64|     {error:.1e}  tolerance {TOLERANCE:.1e}  "
        f"{'ok' if passed else 'FAILED'}\n"
        f"            max |padded fp32 - float64|  {yardstick:.1e}  for scale"
    )
    return passed


def search(embed: RaggedEmbedder, tokenizer: WordPieceTokenizer, query: str) -> None:
    """Rank the demo's sentences by their cosine with `query`, print the table."""
    embeddings = embed([tokenizer.encode(text) for text in (query, *corpus.DOCUMENTS)])
    cosines = embeddings[1:] @ embeddings[0]  # unit vectors
    print(f"\nquery       {query}\n  cosine    sentence")
    for i in np.argsort(-cosines):
        print(f"  {cosines[i]:6.3f}    {corpus.DOCUMENTS[i]}")


def batches_of_tokens(sentences: Ids, most: int) -> Iterator[Ids]:
    """Cut a list into runs of at most `most` tokens, or of one sentence that has more."""
    begin = tokens = 0
    for i, ids in enumerate(sentences):
        if tokens + len(ids) > most and i > begin:
            yield sentences[begin:i]
            begin, tokens = i, 0
        tokens += len(ids)
    yield sentences[begin:]


def measure(embed: RaggedEmbedder, sentences: Ids, repeat: int) -> None:
    """Time the ragged batches and padded ones, print sentences per second."""
    lengths = [len(ids) for ids in sentences]
    by_length = sorted(sentences, key=len)

    def padded(order: Ids) -> list[Ids]:
        return [order[i : i + PADDED_SENTENCES] for i in range(0, len(order), PADDED_SENTENCES)]

    def rows(batches: list[Ids]) -> int:
        return sum(len(batch) * max(map(len, batch)) for batch in batches)

    def embed_dense(batch: Ids) -> Rows:
        return embed_padded(embed.weights, batch)

    print(
        f"\nspeed       {len(sentences)} sentences, {sum(lengths)} tokens (median "
        f"{np.median(lengths):.0f}, longest {max(lengths)}), best of {repeat}\n"
        f"{'':<32}{'rows':>9}{'seconds':>10}{'sentences/s':>13}"
    )
    for name, one, batches in (
        ("padded fp32 NumPy, as they come", embed_dense, padded(sentences)),
        ("padded fp32 NumPy, by length", embed_dense, padded(by_length)),
        ("ragged, flashbsr", embed, list(batches_of_tokens(sentences, RAGGED_TOKENS))),
    ):
        runs = []
        for _ in range(repeat):
            embed.attention_seconds = 0.0
            start = time.perf_counter()
            for batch in batches:
                one(batch)
            runs.append((time.perf_counter() - start, embed.attention_seconds))
        seconds, attention = min(runs)
        count = sum(lengths) if one is embed else rows(batches)
        print(f"{name:<32}{count:>9}{seconds:>10.2f}{len(sentences) / seconds:>13.0f}")
    print(f"{'  of which attention':<32}{attention / seconds:>19.1%}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example. Returns the exit status: 1 if the check fails or the model is missing."""
    parser = argparse.ArgumentParser(
        prog="python examples/embed",
        description="Embed sentences over a ragged batch, check them against a dense forward.",
    )
    parser.add_argument("--model", type=Path, help="folder with model.safetensors and vocab.txt")
    parser.add_argument("--query", default=corpus.QUERY, help="what to search for")
    parser.add_argument("--sentences", type=int, default=128, help="to time; 0: do not")
    parser.add_argument("--repeat", type=int, default=2, help="timed runs, the best counts")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the sentences")
    options = parser.parse_args(arguments)

    try:
        model = options.model or find_model()
        weights = load_weights(model / "model.safetensors")
        tokenizer = WordPieceTokenizer.from_file(model / "vocab.txt", MAX_TOKENS)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    print(f"model       all-MiniLM-L6-v2, {NUM_LAYERS} layers, {NUM_HEADS} heads of {HEAD_DIM}")
    embed = RaggedEmbedder(weights)
    texts = (options.query, *corpus.DOCUMENTS, *corpus.AWKWARD, *corpus.sentences(8, options.seed))
    passed = check(embed, [tokenizer.encode(text) for text in texts])
    search(embed, tokenizer, options.query)
    if options.sentences > 0:
        ids = [tokenizer.encode(text) for text in corpus.sentences(options.sentences, options.seed)]
        measure(embed, ids, max(1, options.repeat))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
