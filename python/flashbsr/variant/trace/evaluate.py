# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Traced expressions on NumPy arrays: what a mask function says of many pairs at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .value import Value

__all__ = ["evaluate"]

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "floor_div": np.floor_divide, "neg": np.negative, "abs": np.abs,
    "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "invert": np.invert,
    "shl": np.left_shift, "shr": np.right_shift,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal, "where": np.where,
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "tanh": np.tanh, "sqrt": np.sqrt,
    "floor": np.floor, "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "to_float": lambda x: np.asarray(x, np.float64),
    "to_int": lambda x: np.asarray(x, np.int64),
    "to_bool": lambda x: np.asarray(x, np.bool_),
    "wrap": lambda x, n: np.where(x < 0, x + n, x),
}  # fmt: skip


def evaluate(
    root: Value, leaves: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
) -> npt.NDArray[Any]:
    """Compute a traced expression.

    Parameters
    ----------
    root : Value
    leaves : mapping of str to array
        Indices and numbers by their names, of shapes that broadcast.
    arrays : mapping of str to array
        The extras that it indexes. Indices are clamped, as in kernels.
    """
    done: dict[int, Any] = {}

    def element(x: Value) -> Any:
        array = arrays[x.args[0].name]
        index = (visit(i) for i in x.args[1:])
        found = array[tuple(np.clip(i, 0, n - 1) for i, n in zip(index, array.shape, strict=True))]
        return found.astype({"float": np.float64, "int": np.int64, "bool": np.bool_}[x.kind])

    def visit(x: Value) -> Any:
        if id(x) not in done:
            if x.op == "constant":
                done[id(x)] = x.args[0]
            elif x.op == "leaf":
                done[id(x)] = leaves[x.args[0]]
            elif x.op == "size":
                done[id(x)] = arrays[x.args[0].name].shape[x.args[1]]
            elif x.op == "element":
                done[id(x)] = element(x)
            else:
                done[id(x)] = _OPERATIONS[x.op](*(visit(arg) for arg in x.args))
        return done[id(x)]

    with np.errstate(all="ignore"):
        return np.asarray(visit(root))
