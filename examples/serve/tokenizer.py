# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A byte-level byte-pair tokenizer: any text in, the same text out, nothing to install.

Token ids 0..255 are the bytes, 256 is the end-of-text mark that also starts every sequence, and
id `257 + i` is merge number `i`. Merges never cross a word: the text is cut by `_PIECE` first.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

END = 256
_FIRST_MERGE = 257
_PIECE = re.compile(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s", re.ASCII)

Pair = tuple[int, int]


def _merge(ids: list[int], pair: Pair, new: int) -> list[int]:
    """`ids` with every occurrence of `pair`, from the left, replaced by `new`."""
    out: list[int] = []
    i = 0
    while i < len(ids):
        if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


def train_merges(texts: Iterable[str], vocab_size: int) -> list[Pair]:
    """Byte-pair merges by descending frequency, ties by the smaller pair.

    Parameters
    ----------
    texts : iterable of str
    vocab_size : int
        Tokens in all, the bytes and the end mark included.
    """
    counts = Counter(piece for text in texts for piece in _PIECE.findall(text))
    words = [(list(piece.encode()), n) for piece, n in sorted(counts.items())]
    totals: Counter[Pair] = Counter()
    where: dict[Pair, set[int]] = defaultdict(set)
    for w, (ids, n) in enumerate(words):
        for pair in pairwise(ids):
            totals[pair] += n
            where[pair].add(w)
    merges: list[Pair] = []
    while len(merges) < vocab_size - _FIRST_MERGE:
        best = min(totals, key=lambda pair: (-totals[pair], pair))
        new = _FIRST_MERGE + len(merges)
        merges.append(best)
        for w in sorted(where[best]):
            ids, n = words[w]
            for pair in pairwise(ids):
                totals[pair] -= n
            merged = _merge(ids, best, new)
            for pair in pairwise(merged):
                totals[pair] += n
                where[pair].add(w)
            words[w] = (merged, n)
        del totals[best], where[best]
    return merges


class Tokenizer:
    """Text to token ids and back.

    Parameters
    ----------
    merges : sequence of (int, int)
        Pairs of token ids in the order in which they were learnt.
    """

    def __init__(self, merges: Sequence[Pair]) -> None:
        self.merges = [(int(a), int(b)) for a, b in merges]
        self._rank = {pair: i for i, pair in enumerate(self.merges)}
        self._bytes = [bytes([i]) for i in range(256)] + [b""]
        for a, b in self.merges:
            self._bytes.append(self._bytes[a] + self._bytes[b])
        self._encode_piece = lru_cache(maxsize=1 << 16)(self._encode_piece_uncached)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        return cls(json.loads(path.read_text("utf-8"))["merges"])

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"end": END, "merges": self.merges}) + "\n", "utf-8")

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    def _encode_piece_uncached(self, piece: str) -> list[int]:
        ids = list(piece.encode())
        while len(ids) > 1:
            ranks = [self._rank.get(pair, len(self._rank)) for pair in pairwise(ids)]
            rank = min(ranks)
            if rank == len(self._rank):
                break
            ids = _merge(ids, self.merges[rank], _FIRST_MERGE + rank)
        return ids

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without end marks."""
        return [i for piece in _PIECE.findall(text) for i in self._encode_piece(piece)]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, none for the end mark."""
        return self._bytes[token]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; end marks are empty, bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", errors="replace")
