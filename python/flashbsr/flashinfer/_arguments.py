# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What is made of the table of arguments: refusals, fields of a plan, docstrings."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

from ..errors import UnsupportedError
from ._table import ROWS

__all__ = ["ARGUMENTS", "BFLOAT16", "FLOAT16", "Argument", "Default", "Number", "Uses",
           "Workspace", "argument", "described", "refuse", "refuse_given"]  # fmt: skip


Number: TypeAlias = "float | None"
Workspace: TypeAlias = "Any"
"""None, the most bytes to own, or an array."""


class Default(str):
    """A default of FlashInfer's: it says less than that text by the caller, and is no equal key."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Default) and str.__eq__(self, other)

    __hash__ = str.__hash__


FLOAT16, BFLOAT16 = Default("float16"), Default("bfloat16")


@dataclass(frozen=True)
class Argument:
    """A row of the table."""

    kind: str
    meaning: str
    becomes: str


def _rows() -> dict[str, Argument]:
    found: dict[str, Argument] = {}
    for row in ROWS.strip().replace("\n    ", " ").splitlines():
        names, kind, becomes, meaning = row.split(" | ")
        found |= {name: Argument(kind, meaning, becomes) for name in names.split()}
    return found


ARGUMENTS = _rows()
_PARTS = {"_p": " Of the prompts.", "_d": " Of the decodes."}


def argument(name: str, context: Iterable[str] = ()) -> Argument:
    """Find the row of an argument: that of the first `context` that has one of its own."""
    for key in (*(f"{where}.{name}" for where in context), name):
        if key in ARGUMENTS:
            return ARGUMENTS[key]
    row, part = argument(name[:-2], context), _PARTS[name[-2:]]
    return Argument(row.kind, row.meaning + part, row.becomes)


def refuse(*context: str, **options: Any) -> None:
    """Raise `UnsupportedError` for the first option that is not None, False, 0 or ``()``."""
    for name, value in options.items():
        plain = isinstance(value, (bool, int, float, str, tuple))
        row = argument(name, context)
        only = row.kind.partition("only ")[2]
        if (plain and repr(value) == only) if only else (value is None or (plain and not value)):
            continue
        actual = repr(value) if plain else type(value).__name__
        raise UnsupportedError(name, actual, f"{only or 'the default'}: {row.meaning}")


@functools.cache
def _refused(context: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if argument(name, context).becomes == "refused")


def refuse_given(given: dict[str, Any], *context: str) -> None:
    """Raise for the first of a call's arguments, by name, that the table refuses."""
    names = tuple(name for name in given if name != "self")
    refuse(*context, **{name: given[name] for name in _refused(context, names)})


@dataclass(frozen=True)
class Uses:
    """What becomes of the arguments of a ``plan``."""

    spec: tuple[tuple[str, str], ...]  # (argument, field of AttentionSpec)
    task: tuple[tuple[str, str], ...]  # (argument, field of TaskInfo)
    refused: tuple[str, ...]
    key: Callable[[dict[str, Any]], tuple[Any, ...]]  # values that choose an engine

    @classmethod
    def of(cls, plan: Callable[..., Any], context: Iterable[str]) -> Uses:
        """Read them off a signature."""
        kinds = ("spec", "task", "refused", "key")
        found: dict[str, list[tuple[str, str]]] = {kind: [] for kind in kinds}
        for name in names_of(plan):
            what, _, field = argument(name, context).becomes.partition(":")
            if what in found:
                found[what].append((name, field or name))
        refused = tuple(name for name, _ in found["refused"])
        names = [name for kind in kinds for name, _ in found[kind]]
        return cls(tuple(found["spec"]), tuple(found["task"]), refused, itemgetter(*names))


F = TypeVar("F", bound=Callable[..., Any])

# What is true of all methods of a name.
_RAISES = {
    "plan": (
        "ShapeError, DTypeError, IndexRangeError, CapacityError, UnsupportedError, FlashbsrError\n"
        "    The argument, what it was, what is allowed. There is no plan afterwards.\n"
        "PlanError\n    Other options than those of a captured run; nothing has changed."
    ),
    "run": "PlanError\n    No plan, or the arrays do not match it.\n"
    "ShapeError, DTypeError, DeviceError, UnsupportedError",
    "__init__": "UnsupportedError\n    What has no meaning here, with the way out.",
    "": "ShapeError, DTypeError, IndexRangeError, DeviceError, UnsupportedError, FlashbsrError",
}
_VERDICTS = {"nothing": "Without effect: ", "refused": "Only the default: "}
_RETURNS = "out, or (out, lse)\n    Of the caller's kind. A row that sees no key gives 0, and -inf."


def described(*context: str) -> Callable[[F], F]:
    """Complete the docstring of a function by the table."""

    def describe(function: F) -> F:
        function.__doc__ = _complete(function.__doc__ or "", function, context, "")
        return function

    return describe


def describe_class(cls: type, context: tuple[str, ...]) -> None:
    """Complete the docstrings of a class and of its own public methods."""
    init = cls.__init__  # type: ignore[misc]
    cls.__doc__ = _complete(cls.__doc__ or "", init, context, "__init__")
    for name, method in vars(cls).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            method.__doc__ = _complete(method.__doc__ or "", method, (name, *context), name)


def names_of(function: Any) -> list[str]:
    """List the arguments but ``self``; `inspect.signature` takes 30 us a function."""
    code = getattr(function, "__code__", None)
    if code is None:  # object.__init__
        return []
    first = code.co_argcount
    named = first + code.co_kwonlyargcount
    rest = list(code.co_varnames[named : named + bool(code.co_flags & 4) + bool(code.co_flags & 8)])
    args = [rest.pop(0)] if code.co_flags & 4 else []  # *args; what is left is **kwargs
    names = [*code.co_varnames[:first], *args, *code.co_varnames[first:named], *rest]
    return [name for name in names if name != "self"]


@functools.cache  # wrapping takes 60 us
def _wrapped(row: Argument) -> list[str]:
    text = _VERDICTS.get(row.becomes, "") + row.meaning
    return textwrap.wrap(text, 92, initial_indent="    ", subsequent_indent="    ")


def _complete(doc: str, function: Any, context: Iterable[str], method: str) -> str:
    doc = inspect.cleandoc(doc)
    lines: list[str] = []
    head, shown = 0, None  # where the entry of the row before begins
    for name in names_of(function):
        row = argument(name, context)
        if row == shown:  # neighbours with one meaning are one entry
            both, _, kind = lines[head].partition(" : ")
            lines[head] = f"{both}, {name} : {kind}"
            continue
        head, shown = len(lines), row
        lines += [f"{name} : {row.kind}", *_wrapped(row)]
    if lines:
        lines = ["", "Parameters", "----------", *lines]
    at = min((i for i in (doc.find(f"\n{t}\n---") for t in ("Returns", "Notes")) if i >= 0),
             default=len(doc))  # fmt: skip
    parts = [doc[:at].rstrip(), *lines, doc[at:].rstrip()]
    if method == "run" and "\nReturns\n" not in doc:
        parts += ["", "Returns", "-------", _RETURNS]
    if method in _RAISES:
        parts += ["", "Raises", "------", _RAISES[method]]
    return "\n".join(parts).rstrip() + "\n"
