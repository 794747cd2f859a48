# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The texts of the example: a small search demo, awkward inputs, and English from Python itself."""

from __future__ import annotations

import random
import re
from pydoc_data.topics import topics

QUERY = "How can I keep my houseplants alive while I am travelling?"

# The query shares no content word with the sentence that answers it: the third.
DOCUMENTS = (
    "The train to Lisbon leaves at seven in the morning.",
    "Interest rates rose for the third month in a row.",
    "Ask a neighbour to water the ferns while you are on holiday.",
    "A recipe for bread needs flour, water, salt and yeast.",
    "The goalkeeper saved two penalties in the final.",
    "Succulents and cacti survive weeks without being watered.",
    "She plays the cello in the city orchestra.",
    "Photosynthesis turns light into chemical energy.",
    "Pack light, and leave a copy of your passport at home.",
    "The new graphics card is twice as fast at matrix products.",
    "Cats sleep for most of the day.",
    "Too much sun burns the leaves of an orchid on the window sill.",
)

# No words at all, one letter, accents, CJK, an unknown word, and more tokens than the model takes.
AWKWARD = ("", "I", "Déjà vu à la Noël", "北京 is a city", "x" * 101, "again and again " * 120)


def sentences(count: int, seed: int) -> list[str]:
    """Return `count` sentences of the Python language reference, shuffled by `seed`.

    They are 10 to a few hundred tokens long, with a long tail: what ragged batches are for.
    """
    text = "\n\n".join(topics[name] for name in sorted(topics))
    pieces = (" ".join(piece.split()) for piece in re.split(r"(?<=[.!?])\s+|\n\n", text))
    pool = sorted({piece for piece in pieces if len(piece) > 20})
    random.Random(seed).shuffle(pool)
    return [pool[i % len(pool)] for i in range(count)]
