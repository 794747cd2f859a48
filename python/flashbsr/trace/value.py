# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What a traced function sees instead of numbers: nodes of an expression.

A value is a float, an int (32 bits) or a bool, and one for all logits of a row (the head, the query
index and what follows from them) or one for each (the score, the KV index). Types promote as in
PyTorch: bool, int, float; ``/`` gives floats; ``//`` and ``%`` round to -inf.
"""

from __future__ import annotations

import linecache
import numbers
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from ..errors import DTypeError, FlashbsrError, UnsupportedError

__all__ = ["Tensor", "Value", "apply", "constant", "element", "refuse", "value_of"]

KINDS = ("bool", "int", "float")
COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))
FUNCTIONS = frozenset(("exp", "exp2", "log", "tanh", "sigmoid", "sqrt", "floor"))


def refuse(what: str, instead: str) -> NoReturn:
    """Raise, naming the line of the user's function that is running."""
    frame = sys._getframe(1)
    package = __name__.partition(".")[0]
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in (
        package,
        "torch",
        "numpy",
    ):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    where = f"{file}:{line}" + (f" ({text})" if text else "")
    raise UnsupportedError(frame.f_code.co_name, f"{what} at {where}", instead)


class Value:
    """A node. `op` and `args` say how it is computed; its operators make more nodes."""

    __array_priority__ = 1000
    __slots__ = ("args", "deps", "kind", "lanes", "nonneg", "op")

    def __init__(
        self,
        op: str,
        args: tuple[Any, ...],
        kind: str,
        *,
        lanes: bool,
        deps: frozenset[str],
        nonneg: bool = False,
    ) -> None:
        self.op = op
        self.args = args  # values; of "constant" and "leaf" a number or a name
        self.kind = kind
        self.lanes = lanes  # one for each logit
        self.deps = deps  # names of leaves
        self.nonneg = nonneg  # an int that cannot be negative

    def __repr__(self) -> str:
        inside = ", ".join(str(arg) if isinstance(arg, Value) else repr(arg) for arg in self.args)
        return f"{self.op}({inside})"

    # Arithmetic, comparisons, bit operations
    def __add__(self, other: Any) -> Value:
        return apply("add", self, other)

    def __radd__(self, other: Any) -> Value:
        return apply("add", other, self)

    def __sub__(self, other: Any) -> Value:
        return apply("sub", self, other)

    def __rsub__(self, other: Any) -> Value:
        return apply("sub", other, self)

    def __mul__(self, other: Any) -> Value:
        return apply("mul", self, other)

    def __rmul__(self, other: Any) -> Value:
        return apply("mul", other, self)

    def __truediv__(self, other: Any) -> Value:
        return apply("div", self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return apply("div", other, self)

    def __floordiv__(self, other: Any) -> Value:
        return apply("floor_div", self, other)

    def __rfloordiv__(self, other: Any) -> Value:
        return apply("floor_div", other, self)

    def __mod__(self, other: Any) -> Value:
        return apply("mod", self, other)

    def __rmod__(self, other: Any) -> Value:
        return apply("mod", other, self)

    def __pow__(self, other: Any) -> Value:
        return apply("pow", self, other)

    def __rpow__(self, other: Any) -> Value:
        return apply("pow", other, self)

    def __and__(self, other: Any) -> Value:
        return apply("and", self, other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Value:
        return apply("or", self, other)

    __ror__ = __or__

    def __xor__(self, other: Any) -> Value:
        return apply("xor", self, other)

    __rxor__ = __xor__

    def __lshift__(self, other: Any) -> Value:
        return apply("shl", self, other)

    def __rlshift__(self, other: Any) -> Value:
        return apply("shl", other, self)

    def __rshift__(self, other: Any) -> Value:
        return apply("shr", self, other)

    def __rrshift__(self, other: Any) -> Value:
        return apply("shr", other, self)

    def __lt__(self, other: Any) -> Value:
        return apply("lt", self, other)

    def __le__(self, other: Any) -> Value:
        return apply("le", self, other)

    def __gt__(self, other: Any) -> Value:
        return apply("gt", self, other)

    def __ge__(self, other: Any) -> Value:
        return apply("ge", self, other)

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return apply("eq", self, other)

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return apply("ne", self, other)

    __hash__ = object.__hash__

    def __neg__(self) -> Value:
        return apply("neg", self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return apply("abs", self)

    def __invert__(self) -> Value:
        return apply("invert", self)

    # Conversions that frameworks spell as methods
    def float(self) -> Value:
        """Convert to float32."""
        return apply("to_float", self)

    def int(self) -> Value:
        """Convert to int32."""
        return apply("to_int", self)

    def long(self) -> Value:
        """Convert to int32: there is no other."""
        return apply("to_int", self)

    def bool(self) -> Value:
        """Convert to bool."""
        return apply("to_bool", self)

    def to(self, dtype: Any) -> Value:
        """Convert to a data type of any framework's notation; its width does not matter."""
        name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
        for kind in KINDS:
            if kind in name or (kind == "int" and name in ("long", "short")):
                return apply(f"to_{kind}", self)
        raise DTypeError("dtype", dtype, "a floating-point type, an integer or bool")

    astype = to

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that are asked for
            raise AttributeError(name)
        from .functions import FUNCTIONS, call

        if name in FUNCTIONS:  # PyTorch has its functions as methods too
            return lambda *args, **kwargs: call(name, (self, *args), kwargs)
        refuse(f".{name} of a traced value", "operators, and the functions of flashbsr")

    # What would need the numbers while the function is traced
    def __bool__(self) -> bool:  # type: ignore[valid-type]
        refuse(
            "a Python decision (if, and, or, not, a chain of comparisons) about a traced value",
            "where(condition, a, b) of flashbsr, torch or numpy; & | ~ instead of and, or, not",
        )

    def __int__(self) -> Any:
        refuse("int() of a traced value", "x.to(int)")

    def __float__(self) -> Any:
        refuse(
            "float(), or a function of math, of a traced value",
            "x.to(float), and the functions of flashbsr, torch or numpy (flashbsr.exp(x))",
        )

    def __index__(self) -> Any:
        refuse(
            "an array that is reached through an attribute or a call, indexed by a traced value",
            "the array in a variable that the function captures, or as an extra",
        )

    def __len__(self) -> Any:
        refuse("len() of a traced value", "no loop over it: it is one number")

    def __iter__(self) -> Any:
        refuse("a loop over a traced value", "none: it is one number")

    # Other frameworks' functions
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        from .functions import call

        return call(func.__name__, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        from .functions import call

        return call(ufunc.__name__ if method == "__call__" else method, inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from .functions import call

        return call(func.__name__, args, kwargs)


class Tensor:
    """An array among the extras, indexed by as many values as it has dimensions."""

    def __init__(self, name: str, dtype: str, rank: int, shape: tuple[int, ...] | None) -> None:
        self.name = name
        self.dtype_name = dtype
        self.ndim = rank
        self._shape = shape  # None: known in run() only
        self._first: tuple[Any, ...] = ()  # indices of the leading dimensions

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an array that the function captures."""
        if self._shape is None:
            refuse(f"the shape of the extra {self.name}", "a number of your own")
        return self._shape[len(self._first) :]

    def size(self, dim: int) -> int:
        """As PyTorch spells it."""
        return self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        found = (*self._first, *(index if isinstance(index, tuple) else (index,)))
        if len(found) > self.ndim:
            refuse(f"{len(found)} indices of {self.name}", f"{self.ndim}, its dimensions")
        if len(found) < self.ndim:
            rest = Tensor(self.name, self.dtype_name, self.ndim, self._shape)
            rest._first = found
            return rest
        return element(self, found)

    def __getattr__(self, name: str) -> Any:
        refuse(
            f"{self.name}.{name}",
            f"{self.name}[...], an element by each of its {self.ndim} indices",
        )

    def _refuse(self, *_: Any) -> NoReturn:
        refuse(
            f"arithmetic on the array {self.name}",
            f"an element of it, {self.name}[...], by each of its {self.ndim} indices",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = _refuse
    __bool__ = __float__ = __int__ = _refuse


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
    if isinstance(x, np.generic) or (hasattr(x, "item") and getattr(x, "ndim", -1) == 0):
        x = x.item()
    if isinstance(x, (bool, int, float)):
        return constant(x)
    if isinstance(x, numbers.Real):
        return constant(float(x))
    refuse(
        f"a {type(x).__name__} in arithmetic with a traced value",
        "a number, a traced value, or an element of an array",
    )


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
