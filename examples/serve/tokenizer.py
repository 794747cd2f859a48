# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A byte-level byte-pair tokenizer of the package `tokenizers`: any text in, the same text out.

Token ids 0..255 are the bytes, 256 is the end-of-text mark that also starts every sequence, and
id `257 + i` is merge number `i`. Merges never cross a word: the text is cut by `_PIECE` first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END = 256
# ASCII white space by name: the package's own \s is Unicode's.
_PIECE = r" ?[A-Za-z]+| ?[0-9]| ?[^ \t\n\r\f\vA-Za-z0-9]+|[ \t\n\r\f\v]"
# No text can become it: the package writes a blank, like every byte, as another character.
_END_TEXT = "end of text"

Pair = tuple[str, str]


def _alphabet() -> list[str]:
    """The character that stands for each byte: itself where it can be seen, others from U+0100."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    seen = {ord(c): c for c in characters if ord(c) < 256}
    others = (c for c in characters if ord(c) >= 256)
    return [seen.get(byte) or next(others) for byte in range(256)]


def _assemble(model: models.BPE) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_PIECE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_merges(texts: Iterable[str], vocab_size: int) -> list[Pair]:
    """Byte-pair merges by descending frequency.

    Parameters
    ----------
    texts : iterable of str
    vocab_size : int
        Tokens in all, the bytes and the end mark included.
    """
    tokenizer = _assemble(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # the end mark is not learnt
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return [(a, b) for a, b in json.loads(tokenizer.to_str())["model"]["merges"]]


class Tokenizer:
    """Text to token ids and back.

    Parameters
    ----------
    merges : sequence of (str, str)
        Pairs of tokens in the order in which they were learnt, bytes as the package writes them.
    """

    def __init__(self, merges: Sequence[Pair]) -> None:
        tokens = [*_alphabet(), _END_TEXT, *(a + b for a, b in merges)]
        self._set(_assemble(models.BPE({token: i for i, token in enumerate(tokens)}, [*merges])))

    def _set(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        byte = {character: i for i, character in enumerate(_alphabet())}
        tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        self._bytes = [b"" if i == END else bytes(byte[c] for c in token) for token, i in tokens]

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a file of the package `tokenizers`."""
        tokenizer = cls.__new__(cls)
        tokenizer._set(tokenizers.Tokenizer.from_file(str(path)))
        return tokenizer

    def save(self, path: Path) -> None:
        self._tokenizer.save(str(path), pretty=False)

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without end marks."""
        return self._tokenizer.encode(text).ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, none for the end mark."""
        return self._bytes[token]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; end marks are empty, bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids if i != END])
