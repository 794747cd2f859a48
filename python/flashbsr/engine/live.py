# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Every `Attention` that there is, by a number: what compiled programs hold in place of it.

When the interpreter ends, their engines go before the compiled core does. Whoever keeps an
`Attention` longer than the interpreter, such as a function that PyTorch's dispatcher never lets go
of, would otherwise keep its engine, and the core would call that a leak.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar
from weakref import WeakValueDictionary

import flashbsr._core as _core

from ..errors import PlanError

__all__ = ["behind", "enter", "outside"]

F = TypeVar("F", bound=Callable[..., Any])

_LIVE: WeakValueDictionary[int, Any] = WeakValueDictionary()
# Compilers make programs of their own for 0 and 1.
_NUMBERS = itertools.count(2)


def enter(attention: Any) -> int:
    """Give an `Attention` its number, which no other will have."""
    number = next(_NUMBERS)
    _LIVE[number] = attention
    return number


def behind(number: int) -> Any:
    """Find the `Attention` of a number.

    Raises
    ------
    PlanError
        It is gone, or of another process.
    """
    attention = _LIVE.get(number)
    if attention is None:
        raise PlanError(
            "attention",
            f"number {number}, which is gone",
            "one that is alive: keep the Attention (or wrapper) as long as the compiled program",
        )
    return attention


def outside(plan: F) -> F:
    """Have torch.compile stop before a call of this function, or say why it cannot."""
    plan._torchdynamo_disable = True  # type: ignore[attr-defined]
    plan._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "flashbsr plans on the host: call plan() outside of the compiled program, which follows "
        "every later plan"
    )
    return plan


class _Ended:
    """In the place of an engine when the interpreter ends."""

    def __getattr__(self, name: str) -> NoReturn:
        raise PlanError(name, "a call while the interpreter ends", "calls before that")


def _end() -> None:
    _core.end_programs()
    for attention in list(_LIVE.values()):
        attention._engine = _Ended()


atexit.register(_end)
