# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""From Python functions to a `Variant`."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...errors import DTypeError, FlashbsrError, UnsupportedError
from ..variant import Extra, Variant, check_counts, declared
from .capture import Captures
from .emit import LEAVES, Numbers, function_body, row_value, scalar_body
from .operations import value_of
from .value import Tensor, Value

__all__ = ["trace", "trace_mask"]

_SCORE = ("score", "b", "h", "q_idx", "kv_idx")
_MASK = _SCORE[1:]
_NAMED = ("q_position", "kv_head", "q_len", "kv_len")


def trace(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    extras: Mapping[str, Any],
) -> Variant:
    """Trace the functions once and write what they compute as C++.

    Raises
    ------
    FlashbsrError, DTypeError, UnsupportedError
        As `AttentionSpec.from_functions`.
    """
    if score_mod is None and mask_mod is None:
        raise FlashbsrError("score_mod", None, "a function, or a mask_mod")
    named = declared(extras)
    for extra in named:
        if extra.name in LEAVES or extra.name == "at":
            raise FlashbsrError("extras", repr(extra.name), "a name that is not an index's")
    captures = Captures(iter([*LEAVES, "at", *(extra.name for extra in named)]))
    roots = {}
    for argument, function, first in (
        ("score_mod", score_mod, _SCORE),
        ("mask_mod", mask_mod, _MASK),
    ):
        if function is not None:
            roots[argument] = _function(argument, function, first, named, captures)
    text, name = _text(roots, [f for f in (score_mod, mask_mod) if f is not None])
    variant = Variant.parse(text, name, {})
    used = captures.used_by(roots.values())
    found = (*named, *(extra for extra, _ in used))
    check_counts(found)
    arrays = tuple((extra.name, array) for extra, array in used)
    return replace(variant, extras=found, captured=arrays)


def trace_mask(mask_mod: Callable[..., Any]) -> tuple[Value, dict[str, Any]]:
    """Trace a mask function without extras; returns what it computes and the arrays it captures."""
    captures = Captures(iter([*LEAVES, "at"]))
    root = _function("mask_mod", mask_mod, _MASK, (), captures)
    return root, {extra.name: captured.array for extra, captured in captures.used_by([root])}


def _function(
    argument: str,
    function: Callable[..., Any],
    first: tuple[str, ...],
    named: tuple[Extra, ...],
    captures: Captures,
) -> Value:
    if not callable(function) or not hasattr(function, "__name__"):
        raise DTypeError(argument, type(function).__name__, "a Python function")
    return _call(argument, captures.rebuild(function), first, named)


def _call(
    argument: str, function: Callable[..., Any], first: tuple[str, ...], named: tuple[Extra, ...]
) -> Value:
    """Call the function on leaves: the first ones by position, others by their names."""
    known = {extra.name: extra for extra in named}
    parameters = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(parameters) < len(first):
        raise FlashbsrError(
            argument, f"{len(parameters)} parameters", f"{', '.join(first)}, in this order"
        )
    more: dict[str, Any] = {}
    for parameter in parameters[len(first) :]:
        name = parameter.name
        if name in _NAMED:
            more[name] = _leaf(name)
        elif name in known:
            more[name] = _extra(known[name])
        elif parameter.default is parameter.empty:
            raise FlashbsrError(
                argument,
                f"a parameter {name!r}",
                f"after {first[-1]}: {', '.join(_NAMED)}, or a name in extras",
            )
    try:
        result = function(*(_leaf(name) for name in first), **more)
    except FlashbsrError:
        raise
    except (IndexError, TypeError) as error:  # of a framework, about a traced value
        frames = traceback.extract_tb(error.__traceback__)
        at = next((f for f in frames if f.name == function.__name__), frames[-1])
        raise UnsupportedError(
            argument,
            f"{type(error).__name__} at {at.filename}:{at.lineno} ({at.line}): {error}",
            "arrays that the function captures by a variable, not by an attribute, and the "
            "functions of flashbsr, torch or numpy",
        ) from error
    if result is None or isinstance(result, Tensor):
        raise FlashbsrError(
            argument, f"a function that returns {result}", "one that returns a value"
        )
    return value_of(result)


def _leaf(name: str) -> Value:
    _, kind, lanes, nonneg = LEAVES[name]
    return Value("leaf", (name,), kind, lanes=lanes, deps=frozenset((name,)), nonneg=nonneg)


def _extra(extra: Extra) -> Value | Tensor:
    if extra.rank:
        return Tensor(extra.name, extra.dtype, extra.rank, None)
    kind = "float" if extra.dtype == "float32" else "int"
    return Value("leaf", (extra.name,), kind, lanes=False, deps=frozenset())


def _text(roots: dict[str, Value], functions: list[Callable[..., Any]]) -> tuple[str, str]:
    """Write the struct; its name is that of the functions."""
    names = [re.sub(r"\W", "", function.__name__) for function in functions]
    name = "_".join(["traced", *(n for n in names if n and n != "lambda")])
    numbers = Numbers()
    shared = row_value(list(roots.values()))
    lines = [f"struct {name} : flashbsr::VariantBase {{"]

    def add(head: str, body: list[str]) -> None:
        lines.extend([f"  {head} {{", *(f"    {line}" for line in body), "  }"])

    if shared is not None:
        add("FLASHBSR_FN float row_value(int32_t q_head) const", scalar_body(shared, numbers))
    if "score_mod" in roots:
        lines.append("  template <class M>")
        add(
            "FLASHBSR_FN typename M::Float logits_transform(typename M::Float score, "
            "const LogitsAt<M>& at) const",
            function_body(roots["score_mod"], "float", shared, numbers),
        )
    if "mask_mod" in roots:
        lines.append("  template <class M>")
        add(
            "FLASHBSR_FN typename M::Bool logits_mask(const LogitsAt<M>& at) const",
            function_body(roots["mask_mod"], "bool", shared, numbers),
        )
    return "\n".join([*lines, "};"]) + "\n", name
