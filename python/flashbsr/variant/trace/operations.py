# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Operations on traced values: types promote as in PyTorch, integers are exact in 32 bits."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...errors import FlashbsrError
from .value import KINDS, Tensor, Value, carried_out, refuse

__all__ = ["FUNCTIONS", "apply", "constant", "convert", "element", "value_of"]

COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))
FUNCTIONS = frozenset(("exp", "exp2", "log", "tanh", "sigmoid", "sqrt", "floor"))


def constant(x: float) -> Value:
    """Make a node of a number that is known now."""
    if isinstance(x, bool):
        kind = "bool"
    elif isinstance(x, int):
        kind = "int"
        if not -(2**31) <= x < 2**31:
            refuse(f"the integer {x}", "one of 32 bits")
    else:
        kind = "float"
    return Value("constant", (x,), kind, lanes=False, deps=frozenset(), nonneg=x >= 0)


def value_of(x: Any) -> Value:
    """Take a value, or a number as one: Python's, NumPy's, or an array of one element."""
    if isinstance(x, Value):
        return x
    if isinstance(x, Tensor):
        refuse(
            f"arithmetic on the array {x.name}",
            f"an element of it, {x.name}[...], by each of its {x.ndim} indices",
        )
    if isinstance(x, np.generic) or (hasattr(x, "item") and getattr(x, "ndim", -1) == 0):
        x = x.item()
    if isinstance(x, (bool, int, float)):
        return constant(x)
    if not isinstance(x, numbers.Real):
        refuse(
            f"a {type(x).__name__} in arithmetic with a traced value",
            "a number, a traced value, or an element of an array",
        )
    return constant(float(x))


def convert(x: Value, kind: str) -> Value:
    """Convert to another kind."""
    if x.kind == kind:
        return x
    if x.op == "constant":
        number = x.args[0]
        return constant({"bool": bool, "int": int, "float": float}[kind](number))
    nonneg = kind == "int" and (x.kind == "bool" or x.nonneg)
    return Value(f"to_{kind}", (x,), kind, lanes=x.lanes, deps=x.deps, nonneg=nonneg)


def highest(values: Iterable[Value], least: str = "bool") -> str:
    """Find the kind that all convert to."""
    return KINDS[max([KINDS.index(least), *(KINDS.index(x.kind) for x in values)])]


def node(op: str, args: Sequence[Value], kind: str, nonneg: bool = False) -> Value:
    """Make a node over arguments of the right kinds."""
    return Value(
        op,
        tuple(args),
        kind,
        lanes=any(x.lanes for x in args),
        deps=frozenset().union(*(x.deps for x in args)),
        nonneg=nonneg,
    )


def apply(op: str, *operands: Any) -> Value:
    """Apply an operation; operands are converted to one kind as PyTorch does it."""
    x = [value_of(operand) for operand in operands]
    if op in COMPARISONS:
        kind = highest(x, "int")
        return node(op, [convert(v, kind) for v in x], "bool")
    if op in FUNCTIONS:
        return node(op, [convert(x[0], "float")], "float")
    if op.startswith("to_"):
        return convert(x[0], op[3:])
    if op in ("and", "or", "xor", "invert", "shl", "shr"):
        kind = highest(x, "int" if op in ("shl", "shr") else "bool")
        if kind == "float":
            refuse(f"a bit operation ({op}) on floats", "bools or integers")
        every, some = all(v.nonneg for v in x), any(v.nonneg for v in x)
        nonneg = {"and": some, "or": every, "xor": every, "shr": x[0].nonneg}.get(op, False)
        return node(op, [convert(v, kind) for v in x], kind, kind == "int" and nonneg)
    if op == "where":
        kind = highest(x[1:])
        condition = convert(x[0], "bool")
        return node(op, [condition, *(convert(v, kind) for v in x[1:])], kind, _all(x[1:]))
    if op == "div":
        return node(op, [convert(v, "float") for v in x], "float")
    if op == "mod":
        if highest(x) != "float" and (size := _power_of_two(x[1])):
            return apply("and", convert(x[0], "int"), size - 1)
        return apply("sub", x[0], apply("mul", apply("floor_div", *x), x[1]))
    if op == "floor_div" and highest(x) == "float":
        return apply("floor", apply("div", *x))
    if op == "pow":
        return _power(x[0], x[1])
    # add, sub, mul, floor_div, min, max, neg, abs
    kind = highest(x, "int")
    x = [convert(v, kind) for v in x]
    if op == "floor_div" and (size := _power_of_two(x[1])):
        return node("shr", [x[0], constant(size.bit_length() - 1)], "int", x[0].nonneg)
    nonneg = op == "abs" or (op not in ("sub", "neg") and _all(x))
    return node(op, x, kind, kind == "int" and nonneg)


def _all(values: Sequence[Value]) -> bool:
    return all(v.nonneg for v in values)


def _power_of_two(x: Value) -> int:
    """Tell the constant where it is a power of two; otherwise 0."""
    number = x.args[0] if x.op == "constant" and x.kind == "int" else 0
    return number if number > 0 and number & (number - 1) == 0 else 0


def _power(base: Value, exponent: Value) -> Value:
    if base.op == "constant" and float(base.args[0]) > 0:
        if float(base.args[0]) == 2.0:
            return apply("exp2", exponent)
        return apply("exp2", apply("mul", exponent, float(np.log2(float(base.args[0])))))
    number = exponent.args[0] if exponent.op == "constant" else None
    if number == 0.5:
        return apply("sqrt", base)
    if number is None or number != int(number) or not 0 < abs(number) <= 16:
        refuse("a power", "whole exponents from 1 to 16, 0.5, or exp(y * log(x))")
    result, square, left = None, base, abs(int(number))
    while left:
        if left % 2:
            result = square if result is None else apply("mul", result, square)
        square, left = apply("mul", square, square), left // 2
    if result is None:
        raise FlashbsrError("exponent", number, "another")
    return apply("div", 1.0, result) if number < 0 else result


def element(tensor: Tensor, index: Sequence[Any]) -> Value:
    """Look up an element of an array; negative indices count from the end."""
    parts = []
    for dim, i in enumerate(index):
        if i is None or i is Ellipsis or isinstance(i, slice):
            refuse(f"{tensor.name}[{i}]", "one index, a number, for each dimension")
        value = value_of(i)
        if value.kind == "float":
            refuse(f"a float as index of {tensor.name}", "an integer: x.to(int)")
        value = convert(value, "int")
        if not value.nonneg:
            value = node("wrap", [value, _size(tensor, dim)], "int")
        parts.append(value)
    dtype = tensor.dtype_name
    kind = "bool" if dtype == "bool" else "float" if "float" in dtype else "int"
    found = node("element", parts, kind, dtype == "uint8")
    found.args = (tensor, *parts)
    return found


def _size(tensor: Tensor, dim: int) -> Value:
    return Value("size", (tensor, dim), "int", lanes=False, deps=frozenset(), nonneg=True)


carried_out.update(apply=apply, element=element)
