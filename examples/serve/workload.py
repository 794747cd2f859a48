# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive over time: seeded Poisson arrivals of short, long and prefixed prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .engine import Request
from .tokenizer import END, Tokenizer

# What many requests begin with, as a chat service's system prompt.
SYSTEM = """\
This is the reference manual of the Python language and of its standard library. It describes the \
syntax and the core semantics of the language, the built-in functions, objects and exceptions, and \
the modules that come with the interpreter. It tries to be exact and complete. The manual is meant \
to be read by programmers who know what a function and a class are. Every entry begins with a \
short description of the object, which is followed by its arguments, by the value that it returns \
and by the exceptions that it may raise.
"""

SHORT = (
    "The with statement is used to",
    "A class definition is",
    "If you open a file,",
    "When an exception is raised,",
    "The import statement",
    "A function is",
    "The return value is",
    "Strings are",
    "A generator is an object that",
    "This method is called when",
    "The optional argument specifies",
    "The for statement is used to iterate over",
    "An instance of this class",
    "A lock is",
    "The event loop is",
    "Dictionaries are",
    "The default value of the parameter",
    "Return True if",
    "The interpreter",
    "Beautiful is better than ugly.",
)

LONG = (
    """\
A server that answers many readers at once keeps the keys and the values of every text in pages of \
a fixed size. A page is taken from a list when a text grows and it is given back when the text is \
finished. Two texts which begin with the same words can share the pages of that beginning, because \
the keys and the values of a word depend only on the words before it. If no page is left, the \
youngest text has to wait: its pages are given to the others, and it is computed again when there \
is room. Nobody who reads the answers should be able to see that. The method that does this""",
    """\
The file object returned by this function can be used in a with statement. The file is closed when \
the block is left, also when an exception is raised in it. If the file cannot be opened, an \
exception is raised before the block is entered. The mode is an optional string that says how the \
file is opened: for reading, for writing or for appending. In text mode the bytes are decoded with \
the given encoding, and in binary mode they are returned as they are. Reading a file in binary \
mode""",
    """\
A thread that waits for a lock does nothing until the lock is released by the thread that holds \
it. The threads which wait are not served in a particular order. When the lock is released, one of \
them is woken and it takes the lock before it goes on. A thread which holds the lock may take it \
again if the lock is a reentrant one; it must then release it as often as it has taken it. If a \
thread ends while it holds a lock, the lock is not released. To release a lock that is not held""",
)


def poisson(
    count: int, rate: float, max_new_tokens: int, seed: int, tokenizer: Tokenizer
) -> list[Request]:
    """Requests in order of arrival.

    Parameters
    ----------
    count : int
    rate : float
        Mean arrivals per second; `inf`: all at once.
    max_new_tokens : int
        Upper end of the requests' own limits, which are drawn from its upper two thirds.
    seed : int
    """
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count)) if count else np.zeros(0)
    requests = []
    for number, arrival in enumerate(arrivals.tolist()):
        kind = rng.choice(("system", "short", "long"), p=(0.6, 0.25, 0.15))
        text = str(rng.choice(LONG if kind == "long" else SHORT))
        greedy = bool(rng.random() < 0.4)
        requests.append(
            Request(
                number=number,
                prompt=encode_prompt(SYSTEM + text if kind == "system" else text, tokenizer),
                max_new_tokens=int(rng.integers(-(-max_new_tokens // 3), max_new_tokens + 1)),
                temperature=0.0 if greedy else 0.7,
                top_p=1.0 if greedy else 0.9,
                seed=seed,
                arrival=arrival,
            )
        )
    return requests


def custom(
    prompts: Sequence[str],
    max_new_tokens: int,
    seed: int,
    tokenizer: Tokenizer,
    samples: int = 1,
    prompt_tokens: int | None = None,
    ignore_end: bool = False,
) -> list[Request]:
    """Requests for texts, all at once, at temperature 0.7.

    Parameters
    ----------
    prompts : sequence of str
    max_new_tokens, seed : int
    samples : int
        Answers to each; they differ by their draws.
    prompt_tokens : int, optional
        Repeat and cut each text to this many tokens.
    ignore_end : bool
        All answers have max_new_tokens.
    """
    requests = []
    for text in prompts:
        prompt = encode_prompt(text, tokenizer)
        if prompt_tokens is not None:
            again = prompt[1:] or prompt
            prompt = (prompt + again * (prompt_tokens // len(again)))[:prompt_tokens]
        first = len(requests)
        requests += [
            Request(
                number=first + i,
                prompt=prompt,
                max_new_tokens=max_new_tokens,
                temperature=0.7,
                top_p=0.9,
                seed=seed,
                ignore_end=ignore_end,
                sample_of=first if i else None,
            )
            for i in range(samples)
        ]
    return requests


def encode_prompt(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The end mark, which starts every text in training, and the text's tokens."""
    return (END, *tokenizer.encode(text))
