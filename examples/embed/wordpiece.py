# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""BERT's uncased WordPiece tokenizer, in plain Python.

Text becomes ids in three steps, the ones of the BERT paper's reference code (Devlin et al.,
arXiv:1810.04805) and of Hugging Face's ``BertTokenizerFast``:

1. normalise: drop control characters, white space to blanks, blanks around CJK characters, strip
   accents (NFD without combining marks), lower case;
2. split at blanks, and around every punctuation character;
3. WordPiece: take the longest vocabulary entry that starts the word, then the longest ``##``
   entry that continues it, until the word is used up. A word that cannot be covered is ``[UNK]``.

One difference on purpose: the text is plain text. A literal ``[MASK]`` in it is five characters
of punctuation and letters, never the special token.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

MAX_WORD_CHARS = 100  # longer words are [UNK], as in the reference implementation

# Control, format, private and surrogate characters. Unassigned code points (Cn) stay, and make
# their word [UNK]: what is unassigned depends on the Unicode version of the Python at hand.
_DROPPED = ("Cc", "Cf", "Co", "Cs")

# CJK ideographs; the reference code's list. Kana and Hangul are ordinary letters.
_CJK_RANGES = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


def _is_cjk(char: str) -> bool:
    code = ord(char)
    return code >= 0x3400 and any(low <= code <= high for low, high in _CJK_RANGES)


def _is_punctuation(char: str) -> bool:
    # BERT counts all ASCII that is neither letter, digit nor blank, so "$" and "^" too.
    return ("!" <= char <= "~" and not char.isalnum()) or unicodedata.category(char).startswith("P")


def normalize(text: str) -> str:
    """Clean, strip accents and lower the case of a text (step 1).

    >>> normalize("Caf\\u00e9\\tAU LAIT")
    'cafe au lait'
    """
    cleaned: list[str] = []
    for char in text:
        if char in "\t\n\r" or (char.isspace() and unicodedata.category(char) != "Cc"):
            cleaned.append(" ")
        elif char == "\ufffd" or unicodedata.category(char) in _DROPPED:
            continue
        elif _is_cjk(char):
            cleaned.append(f" {char} ")
        else:
            cleaned.append(char)
    decomposed = unicodedata.normalize("NFD", "".join(cleaned))
    # One character at a time: str.lower() of a whole word would give the Greek final sigma.
    return "".join(c.lower() for c in decomposed if unicodedata.category(c) != "Mn")


def split_words(text: str) -> Iterator[str]:
    """Yield the words and punctuation characters of a normalised text (step 2).

    >>> list(split_words("don't stop!"))
    ['don', "'", 't', 'stop', '!']
    """
    for chunk in text.split():
        start = 0
        for i, char in enumerate(chunk):
            if _is_punctuation(char):
                if start < i:
                    yield chunk[start:i]
                yield char
                start = i + 1
        if start < len(chunk):
            yield chunk[start:]


class WordPieceTokenizer:
    """Maps texts to BERT token ids.

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
        self.ids = {token: i for i, token in enumerate(vocabulary)}
        missing = [token for token in ("[UNK]", "[CLS]", "[SEP]") if token not in self.ids]
        if missing:
            raise ValueError(f"vocabulary: lacks {', '.join(missing)}")
        if max_length < 2:
            raise ValueError(f"max_length: got {max_length}; expected at least 2")
        self.max_length = max_length
        self._unk = self.ids["[UNK]"]
        self._longest = max(map(len, self.ids))

    @classmethod
    def from_file(cls, path: Path, max_length: int = 256) -> WordPieceTokenizer:
        """Read a ``vocab.txt``: UTF-8, one token a line."""
        return cls(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), max_length)

    def _word_ids(self, word: str) -> list[int]:
        """Ids of one word by greedy longest match (step 3)."""
        if len(word) > MAX_WORD_CHARS:
            return [self._unk]
        pieces: list[int] = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            for end in range(min(len(word), start + self._longest), start, -1):
                piece = self.ids.get(prefix + word[start:end])
                if piece is not None:
                    break
            else:
                return [self._unk]
            pieces.append(piece)
            start = end
        return pieces

    def encode(self, text: str) -> list[int]:
        """Return ``[CLS] pieces... [SEP]`` of one text, at most `max_length` ids."""
        body: list[int] = []
        for word in split_words(normalize(text)):
            if len(body) >= self.max_length - 2:
                break
            body.extend(self._word_ids(word))
        return [self.ids["[CLS]"], *body[: self.max_length - 2], self.ids["[SEP]"]]
