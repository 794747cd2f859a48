# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""BERT's uncased WordPiece tokenizer, put together from the package `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

MAX_WORD_CHARS = 100  # longer words are [UNK], as in the reference implementation


class WordPieceTokenizer:
    """Maps texts to BERT token ids.

    The text is plain text: a literal ``[MASK]`` in it is punctuation and letters, never the
    special token.

    Parameters
    ----------
    vocabulary
        The tokens; the position is the id. Must hold ``[UNK]``, ``[CLS]`` and ``[SEP]``.
    max_length
        Most ids of one text, ``[CLS]`` and ``[SEP]`` included; the rest is cut off.
        At least 2.

    Raises
    ------
    ValueError
        A special token is missing, or `max_length` is less than 2.
    """

    def __init__(self, vocabulary: Iterable[str], max_length: int = 256) -> None:
        ids = {token: i for i, token in enumerate(vocabulary)}
        missing = [token for token in ("[UNK]", "[CLS]", "[SEP]") if token not in ids]
        if missing:
            raise ValueError(f"vocabulary: lacks {', '.join(missing)}")
        if max_length < 2:
            raise ValueError(f"max_length: got {max_length}; expected at least 2")
        self._tokenizer = tokenizers.Tokenizer(
            models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARS)
        )
        self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._tokenizer.post_processor = processors.BertProcessing(
            ("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"])
        )
        self._tokenizer.enable_truncation(max_length)

    @classmethod
    def from_file(cls, path: Path, max_length: int = 256) -> WordPieceTokenizer:
        """Read a ``vocab.txt``: UTF-8, one token a line."""
        return cls(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), max_length)

    def encode(self, text: str) -> list[int]:
        """Return ``[CLS] pieces... [SEP]`` of one text, at most `max_length` ids."""
        return self._tokenizer.encode(text).ids
