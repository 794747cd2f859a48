# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What a traced function sees instead of numbers: nodes of an expression.

A value is a float, an int (32 bits) or a bool, and one for all logits of a row (the head, the query
index and what follows from them) or one for each (the score, the KV index). Types promote as in
PyTorch: bool, int, float; ``/`` gives floats; ``//`` and ``%`` round to -inf.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from ...errors import DTypeError, FlashbsrError, UnsupportedError

__all__ = ["KINDS", "Tensor", "Value", "carried_out", "refuse"]

KINDS = ("bool", "int", "float")

#: What operators and functions of a value are carried out by: ``apply`` and ``element`` of
#: `operations`, ``call`` and ``knows`` of `functions`, which enter them here, being above.
carried_out: dict[str, Callable[..., Any]] = {}


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


def _apply(op: str, *operands: Any) -> Value:
    value: Value = carried_out["apply"](op, *operands)
    return value


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
        return _apply("add", self, other)

    def __radd__(self, other: Any) -> Value:
        return _apply("add", other, self)

    def __sub__(self, other: Any) -> Value:
        return _apply("sub", self, other)

    def __rsub__(self, other: Any) -> Value:
        return _apply("sub", other, self)

    def __mul__(self, other: Any) -> Value:
        return _apply("mul", self, other)

    def __rmul__(self, other: Any) -> Value:
        return _apply("mul", other, self)

    def __truediv__(self, other: Any) -> Value:
        return _apply("div", self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return _apply("div", other, self)

    def __floordiv__(self, other: Any) -> Value:
        return _apply("floor_div", self, other)

    def __rfloordiv__(self, other: Any) -> Value:
        return _apply("floor_div", other, self)

    def __mod__(self, other: Any) -> Value:
        return _apply("mod", self, other)

    def __rmod__(self, other: Any) -> Value:
        return _apply("mod", other, self)

    def __pow__(self, other: Any) -> Value:
        return _apply("pow", self, other)

    def __rpow__(self, other: Any) -> Value:
        return _apply("pow", other, self)

    def __and__(self, other: Any) -> Value:
        return _apply("and", self, other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Value:
        return _apply("or", self, other)

    __ror__ = __or__

    def __xor__(self, other: Any) -> Value:
        return _apply("xor", self, other)

    __rxor__ = __xor__

    def __lshift__(self, other: Any) -> Value:
        return _apply("shl", self, other)

    def __rlshift__(self, other: Any) -> Value:
        return _apply("shl", other, self)

    def __rshift__(self, other: Any) -> Value:
        return _apply("shr", self, other)

    def __rrshift__(self, other: Any) -> Value:
        return _apply("shr", other, self)

    def __lt__(self, other: Any) -> Value:
        return _apply("lt", self, other)

    def __le__(self, other: Any) -> Value:
        return _apply("le", self, other)

    def __gt__(self, other: Any) -> Value:
        return _apply("gt", self, other)

    def __ge__(self, other: Any) -> Value:
        return _apply("ge", self, other)

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return _apply("eq", self, other)

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return _apply("ne", self, other)

    __hash__ = object.__hash__

    def __neg__(self) -> Value:
        return _apply("neg", self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return _apply("abs", self)

    def __invert__(self) -> Value:
        return _apply("invert", self)

    # Conversions that frameworks spell as methods
    def float(self) -> Value:
        """Convert to float32."""
        return _apply("to_float", self)

    def int(self) -> Value:
        """Convert to int32."""
        return _apply("to_int", self)

    def long(self) -> Value:
        """Convert to int32: there is no other."""
        return _apply("to_int", self)

    def bool(self) -> Value:
        """Convert to bool."""
        return _apply("to_bool", self)

    def to(self, dtype: Any) -> Value:
        """Convert to a data type of any framework's notation; its width does not matter."""
        name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
        for kind in KINDS:
            if kind in name or (kind == "int" and name in ("long", "short")):
                return _apply(f"to_{kind}", self)
        raise DTypeError("dtype", dtype, "a floating-point type, an integer or bool")

    astype = to

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that are asked for
            raise AttributeError(name)
        if carried_out["knows"](name):  # PyTorch has its functions as methods too
            return lambda *args, **kwargs: carried_out["call"](name, (self, *args), kwargs)
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
        return carried_out["call"](func.__name__, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return carried_out["call"](
            ufunc.__name__ if method == "__call__" else method, inputs, kwargs
        )

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return carried_out["call"](func.__name__, args, kwargs)


class Tensor:
    """An array among the extras, indexed by as many values as it has dimensions."""

    def __init__(
        self,
        name: str,
        dtype: str,
        rank: int,
        shape: tuple[int, ...] | None,
        problem: FlashbsrError | None = None,
    ) -> None:
        self.name = name
        self.dtype_name = dtype
        self.ndim = rank
        self._shape = shape  # None: known in run() only
        self._problem = problem  # why kernels cannot look into it
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
            rest = Tensor(self.name, self.dtype_name, self.ndim, self._shape, self._problem)
            rest._first = found
            return rest
        if self._problem is not None:
            raise self._problem
        return carried_out["element"](self, found)

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
