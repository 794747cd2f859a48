# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""C++ of traced expressions: one statement per node, for every math policy alike."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .operations import FUNCTIONS, convert
from .value import Tensor, Value

__all__ = ["LEAVES", "Numbers", "function_body", "row_value", "scalar_body"]

# Name of a leaf -> (C++, kind, one for each logit, never negative).
LEAVES = {
    "score": ("score", "float", True, False),
    "b": ("at.request->index", "int", False, True),
    "h": ("at.q_head", "int", False, True),
    "q_idx": ("at.q_token", "int", False, True),
    "kv_idx": ("at.kv_position", "int", True, True),
    "q_position": ("at.q_position", "int", False, False),
    "kv_head": ("at.kv_head", "int", False, True),
    "q_len": ("at.request->q_len", "int", False, True),
    "kv_len": ("at.request->kv_len", "int", False, True),
}

_LANES = {"float": "typename M::Float", "int": "typename M::Int", "bool": "typename M::Bool"}
_SCALAR = {"float": "float", "int": "int32_t", "bool": "bool"}
_SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^",
    "shl": "<<", "shr": ">>", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
# Functions of a number that is one for all logits, exact enough for float32.
_SCALAR_FUNCTIONS = {
    "exp": "exp2_of({0} * kLog2e)",
    "exp2": "exp2_of({0})",
    "log": "log2_of({0}) * kLn2",
    "tanh": "1.0f - 2.0f / (exp2_of({0} * (2.0f * kLog2e)) + 1.0f)",
    "sigmoid": "1.0f / (1.0f + exp2_of({0} * -kLog2e))",
    "sqrt": "sqrt_of({0})",
    "floor": "floor_of({0})",
}


def row_value(roots: list[Value]) -> Value | None:
    """Find the largest float that the query head alone decides.

    Kernels look it up once per row and not for every logit (``VariantBase::row_value``).
    """
    best: Value | None = None
    sizes: dict[int, int] = {}

    def visit(x: Value) -> int:
        nonlocal best
        if id(x) not in sizes:
            sizes[id(x)] = size = 1 + sum(visit(arg) for arg in _operands(x))
            found = x.kind == "float" and not x.lanes and x.deps == {"h"}
            if found and (best is None or size > sizes[id(best)]):
                best = x
        return sizes[id(x)]

    for root in roots:
        visit(root)
    return best


def _text(x: Any) -> str:
    """Of what is no node: 1, 1.0 and True differ."""
    return x.name if isinstance(x, Tensor) else repr(x)


class Numbers:
    """A number for each node, the same for equal expressions."""

    def __init__(self) -> None:
        self._of_node: dict[int, int] = {}
        self._of_expression: dict[Any, int] = {}
        self._nodes: list[Value] = []  # keeps the ids alive

    def __call__(self, x: Value) -> int:
        """Tell the number of a node."""
        found = self._of_node.get(id(x))
        if found is None:
            args = [self(a) if isinstance(a, Value) else _text(a) for a in x.args]
            key = (x.op, x.kind, *args)
            found = self._of_expression.setdefault(key, len(self._of_expression))
            self._of_node[id(x)] = found
            self._nodes.append(x)
        return found


def function_body(
    root: Value, kind: str, at_row_value: Value | None, numbers: Numbers
) -> list[str]:
    """Statements that compute and return a root, as a value for each logit.

    Parameters
    ----------
    root : Value
    kind : {"float", "bool"}
        Of the result.
    at_row_value : Value, optional
        The expression that ``at.row_value`` holds.
    numbers : Numbers
        Those of the whole variant.
    """
    writer = _Writer(numbers, at_row_value)
    name = writer.lanes(convert(root, kind))
    return [*writer.lines, f"return {name};"]


def scalar_body(root: Value, numbers: Numbers) -> list[str]:
    """Statements that compute and return what is one for all logits; ``q_head`` is the head."""
    writer = _Writer(numbers, None, {"at.q_head": "q_head"})
    name = writer.name(root)
    return [*writer.lines, f"return {name};"]


def _operands(x: Value) -> tuple[Value, ...]:
    return tuple(arg for arg in x.args if isinstance(arg, Value))


class _Writer:
    def __init__(
        self, numbers: Numbers, at_row_value: Value | None, leaves: dict[str, str] | None = None
    ) -> None:
        self.lines: list[str] = []
        self._numbers = numbers
        self._names: dict[int, str] = {}  # by the node's number
        self._leaves = leaves or {}
        if at_row_value is not None:
            self._names[numbers(at_row_value)] = "at.row_value"

    def name(self, x: Value) -> str:
        """Name of a node's variable, written on first use; of equal nodes, one."""
        number = self._numbers(x)
        if number not in self._names:
            self._names[number] = self._write(x)
        return self._names[number]

    def lanes(self, x: Value) -> str:
        """Name of a node with a value for each logit."""
        return self.name(x) if x.lanes else f"M::splat({self.name(x)})"

    def _write(self, x: Value) -> str:
        if x.op == "constant":
            return _literal(x)
        if x.op == "leaf":
            text = LEAVES[x.args[0]][0] if x.args[0] in LEAVES else x.args[0]
            return self._leaves.get(text, text)
        if x.op == "size":
            return f"{x.args[0].name}.size({x.args[1]})"
        text = self._expression(x)  # writes what it needs
        name = f"t{len(self.lines)}"
        kind = (_LANES if x.lanes else _SCALAR)[x.kind]
        self.lines.append(f"const {kind} {name} = {text};")
        return name

    def _expression(self, x: Value) -> str:
        if x.op == "element":
            index = ", ".join(self.name(i) for i in x.args[1:])
            name = x.args[0].name
            return f"M::gather({name}, {index})" if x.lanes else f"{name}({index})"
        values = _operands(x)
        take = self.lanes if x.lanes else self.name
        names = [take(value) for value in values]
        if x.op in _SYMBOLS:
            return f"{names[0]} {_SYMBOLS[x.op]} {names[1]}"
        if x.lanes:
            return _function(x, values[0], names)
        return _scalar_function(x, names)


def _function(x: Value, first: Value, names: list[str]) -> str:
    """Of a number for each logit: what the math policy has."""
    a = names[0]
    if x.op == "neg":
        return f"-{a}"
    if x.op == "invert":
        return f"M::logical_not({a})" if x.kind == "bool" else f"~{a}"
    if x.op == "wrap":
        return f"M::select({a} < M::splat(0), {a} + {names[1]}, {a})"
    if x.op == "where":
        if x.kind == "bool":
            return f"({a} & {names[1]}) | (M::logical_not({a}) & {names[2]})"
        return f"M::select({', '.join(names)})"
    if x.op.startswith("to_") and first.kind == "bool":
        yes, no = ("1.0f", "0.0f") if x.kind == "float" else ("1", "0")
        return f"M::select({a}, M::splat({yes}), M::splat({no}))"
    if x.op == "to_bool":
        return f"{a} != M::splat({'0.0f' if first.kind == 'float' else '0'})"
    return f"M::{x.op}({', '.join(names)})"


def _scalar_function(x: Value, names: list[str]) -> str:
    """Of a number that is one for all logits."""
    a, last = names[0], names[-1]
    if x.op in FUNCTIONS:
        return _SCALAR_FUNCTIONS[x.op].format(a)
    if x.op in ("min", "max"):
        # A NaN is not equal to itself, and wins.
        return f"{a} != {a} ? {a} : {a} {'<' if x.op == 'min' else '>'} {last} ? {a} : {last}"
    if x.op == "floor_div":
        return f"floor_div({a}, {last})"
    if x.op == "where":
        return f"{a} ? {names[1]} : {last}"
    return {
        "neg": f"-{a}",
        "abs": f"{a} < 0 ? -{a} : {a}",
        "invert": f"!{a}" if x.kind == "bool" else f"~{a}",
        "wrap": f"{a} < 0 ? {a} + {last} : {a}",
        "to_float": f"static_cast<float>({a})",
        "to_int": f"static_cast<int32_t>({a})",
        "to_bool": f"{a} != 0",
    }[x.op]


def _literal(x: Value) -> str:
    number = x.args[0]
    if x.kind == "bool":
        return "true" if number else "false"
    if x.kind == "int":
        return f"({number})" if number < 0 else str(number) if number != -(2**31) else "INT32_MIN"
    if math.isnan(number):
        return "not_a_number()"
    with np.errstate(over="ignore"):
        rounded = np.float32(number)
    if np.isinf(rounded):
        return "infinity()" if rounded > 0 else "(-infinity())"
    text = np.format_float_scientific(rounded, unique=True, trim="0")
    return f"({text}f)" if rounded < 0 or str(rounded) == "-0.0" else f"{text}f"
