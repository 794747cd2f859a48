# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What a compiler says about a user's text, out of what it says about everything."""

from __future__ import annotations

import re

__all__ = ["own_errors"]

_MOST = 8  # errors: the rest follows from them
# GCC and Clang: `Mine:3:16: error: ...`; NVRTC: `Mine(3): error: ...`.
_ERROR = re.compile(r"^(\w+)(?::(\d+)(?::\d+)?|\((\d+)\)): (?:fatal |catastrophic )?error: ")


def own_errors(messages: str, source: str) -> list[str]:
    """Errors in the lines of the user's text, each followed by that line.

    Parameters
    ----------
    messages : str
        Of GCC, Clang or NVRTC.
    source : str
        What was compiled; `variant_source` marks the text in it with ``#line``.

    Returns
    -------
    list of str
        Empty where the errors are elsewhere.
    """
    marked = re.search(r'^#line 1 "(\w+)"\n(.*?)^#line 1 "after \1"$', source, re.M | re.S)
    if marked is None:
        return []
    name, lines = marked[1], marked[2].splitlines()
    found: dict[str, str] = {}
    for message in messages.splitlines():
        error = _ERROR.match(message)
        number = int(error[2] or error[3]) if error and error[1] == name else 0
        if 0 < number <= len(lines):
            found[message] = lines[number - 1].strip()
    # A hook that does not compile does not fit its signature either.
    bodies = {error: line for error, line in found.items() if "static assert" not in error}
    chosen = list((bodies or found).items())[:_MOST]
    return [text for error, line in chosen for text in (error, f"    {line}")]
