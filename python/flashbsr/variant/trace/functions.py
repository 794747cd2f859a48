# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Functions for score and mask functions, and what PyTorch's and NumPy's become on traced values.

Each takes numbers and NumPy arrays too, so that a function can be tried outside of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .operations import apply
from .value import Tensor, Value, carried_out, refuse

__all__ = [
    "FUNCTIONS",
    "call",
    "exp",
    "exp2",
    "floor",
    "log",
    "maximum",
    "minimum",
    "sigmoid",
    "sqrt",
    "tanh",
    "where",
]


def _traced(*operands: Any) -> bool:
    return any(isinstance(x, (Value, Tensor)) for x in operands)


def where(condition: Any, a: Any, b: Any) -> Any:
    """Choose: `a` where `condition` holds, otherwise `b`. Both are computed.

    Examples
    --------
    >>> int(where(2 > 1, 5, 7))
    5
    """
    return (
        apply("where", condition, a, b) if _traced(condition, a, b) else np.where(condition, a, b)
    )


def exp(x: Any) -> Any:
    """Exponential.

    Examples
    --------
    >>> float(exp(0))
    1.0
    """
    return apply("exp", x) if _traced(x) else np.exp(x)


def exp2(x: Any) -> Any:
    """Power of two.

    Examples
    --------
    >>> float(exp2(-3))
    0.125
    """
    return apply("exp2", x) if _traced(x) else np.exp2(x)


def log(x: Any) -> Any:
    """Natural logarithm: -inf at 0, NaN below.

    Examples
    --------
    >>> float(log(1))
    0.0
    """
    return apply("log", x) if _traced(x) else np.log(x)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent.

    Examples
    --------
    >>> float(tanh(0))
    0.0
    """
    return apply("tanh", x) if _traced(x) else np.tanh(x)


def sigmoid(x: Any) -> Any:
    """Logistic function: ``1 / (1 + exp(-x))``.

    Examples
    --------
    >>> float(sigmoid(0))
    0.5
    """
    return apply("sigmoid", x) if _traced(x) else 1 / (1 + np.exp(-x))


def sqrt(x: Any) -> Any:
    """Square root.

    Examples
    --------
    >>> float(sqrt(9))
    3.0
    """
    return apply("sqrt", x) if _traced(x) else np.sqrt(x)


def floor(x: Any) -> Any:
    """Round to -inf.

    Examples
    --------
    >>> float(floor(-1.5))
    -2.0
    """
    return apply("floor", x) if _traced(x) else np.floor(x)


def minimum(a: Any, b: Any) -> Any:
    """Smaller of the two; NaN where one is.

    Examples
    --------
    >>> int(minimum(3, 5))
    3
    """
    return apply("min", a, b) if _traced(a, b) else np.minimum(a, b)


def maximum(a: Any, b: Any) -> Any:
    """Larger of the two; NaN where one is.

    Examples
    --------
    >>> int(maximum(3, 5))
    5
    """
    return apply("max", a, b) if _traced(a, b) else np.maximum(a, b)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002 - PyTorch's names
    if min is not None:
        x = apply("max", x, min)
    return x if max is None else apply("min", x, max)


def _logical(op: str) -> Callable[..., Any]:
    return lambda *x: apply(op, *(apply("to_bool", v) for v in x))


def _operation(op: str) -> Callable[..., Any]:
    return lambda *x: apply(op, *x)


# Names in torch, torch.Tensor and numpy, without underscores around them.
_OPERATIONS = {
    "add": "add",
    "sub": "sub",
    "subtract": "sub",
    "mul": "mul",
    "multiply": "mul",
    "div": "div",
    "divide": "div",
    "true_divide": "div",
    "truediv": "div",
    "floor_divide": "floor_div",
    "floordiv": "floor_div",
    "remainder": "mod",
    "mod": "mod",
    "pow": "pow",
    "power": "pow",
    "neg": "neg",
    "negative": "neg",
    "abs": "abs",
    "absolute": "abs",
    "fabs": "abs",
    "exp": "exp",
    "exp2": "exp2",
    "log": "log",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "sqrt": "sqrt",
    "floor": "floor",
    "minimum": "min",
    "maximum": "max",
    "where": "where",
    "lt": "lt",
    "less": "lt",
    "le": "le",
    "less_equal": "le",
    "gt": "gt",
    "greater": "gt",
    "ge": "ge",
    "greater_equal": "ge",
    "eq": "eq",
    "equal": "eq",
    "ne": "ne",
    "not_equal": "ne",
    "and": "and",
    "bitwise_and": "and",
    "or": "or",
    "bitwise_or": "or",
    "xor": "xor",
    "bitwise_xor": "xor",
    "bitwise_not": "invert",
    "invert": "invert",
    "left_shift": "shl",
    "bitwise_left_shift": "shl",
    "lshift": "shl",
    "right_shift": "shr",
    "bitwise_right_shift": "shr",
    "rshift": "shr",
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _operation(op) for name, op in _OPERATIONS.items()},
    "rsub": lambda x, y: apply("sub", y, x),
    "rdiv": lambda x, y: apply("div", y, x),
    "rtruediv": lambda x, y: apply("div", y, x),
    "rpow": lambda x, y: apply("pow", y, x),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": _logical("invert"),
    "clamp": _clamp,
    "clip": _clamp,
    "square": lambda x: apply("mul", x, x),
    "reciprocal": lambda x: apply("div", 1.0, x),
    "rsqrt": lambda x: apply("div", 1.0, apply("sqrt", x)),
    "relu": lambda x: apply("max", x, 0),
    "ceil": lambda x: apply("neg", apply("floor", apply("neg", x))),
    "log2": lambda x: apply("mul", apply("log", x), 1.4426950408889634),
    "isnan": lambda x: apply("ne", x, x),
}
for _name in ("add", "mul", "and", "or", "xor"):
    FUNCTIONS[f"r{_name}"] = FUNCTIONS[_name]


def call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out a framework's function on traced values."""
    function = FUNCTIONS.get(name.strip("_"))
    if function is None:
        refuse(
            f"{name}() of a traced value",
            "where, exp, exp2, log, tanh, sigmoid, sqrt, floor, minimum, maximum, clamp and "
            "operators; or the variant as C++ text (AttentionSpec.from_source)",
        )
    try:
        return function(*args, **kwargs)
    except TypeError:
        refuse(f"{name}() with {len(args)} arguments and {sorted(kwargs)}", "its plain form")


carried_out.update(call=call, knows=FUNCTIONS.__contains__)
