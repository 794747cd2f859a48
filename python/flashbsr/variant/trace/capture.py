# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays that a function captures become extras of its variant.

No framework lets an object of ours index its arrays, so the function is rebuilt with other objects
in their places: in its closure, its defaults and the globals that it names, and in those of
functions of the user's that it calls.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...arrays import adapter_for
from ...errors import DTypeError, FlashbsrError, UnsupportedError
from ..variant import ELEMENTS, MAX_RANK, Captured, Extra
from . import functions
from .value import Tensor, Value

__all__ = ["Captures"]

# Functions of these are called as they are.
_LIBRARIES = frozenset(("torch", "numpy", "jax", "jaxlib", "cupy", "math", "builtins"))


class Captures:
    """Extras of the arrays found so far, one for each array."""

    def __init__(self, taken: Iterator[str]) -> None:
        self._taken = set(taken)
        self._found: dict[int, tuple[Extra, Captured, Tensor]] = {}
        self._functions: dict[int, Any] = {}

    def used_by(self, roots: Iterable[Value]) -> list[tuple[Extra, Captured]]:
        """Find the arrays that expressions look into: a function may only name others."""
        names, seen, left = set(), set(), list(roots)
        while left:
            x = left.pop()
            if id(x) not in seen:
                seen.add(id(x))
                names |= {arg.name for arg in x.args if isinstance(arg, Tensor)}
                left += [arg for arg in x.args if isinstance(arg, Value)]
        return [(e, array) for e, array, _ in self._found.values() if e.name in names]

    def rebuild(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Copy a function with tensors of a trace in the places of arrays."""
        rebuilt: Callable[..., Any] = self._replace(function, function.__name__)
        return rebuilt

    def _replace(self, x: Any, name: str) -> Any:
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, functools.partial):
            return functools.partial(
                self._replace(x.func, name),
                *(self._replace(arg, name) for arg in x.args),
                **{key: self._replace(arg, key) for key, arg in x.keywords.items()},
            )
        if type(x) in (tuple, list):
            return type(x)(self._replace(item, f"{name}_{i}") for i, item in enumerate(x))
        if type(x) is dict:
            return {key: self._replace(item, f"{name}_{key}") for key, item in x.items()}
        if _is_array(x):
            return self._tensor(x, name) if len(x.shape) else x.item()
        return x

    def _function(self, function: types.FunctionType) -> Any:
        module = function.__module__ or ""
        if module.partition(".")[0] in _LIBRARIES or module == functions.__name__:
            return function
        if id(function) in self._functions:  # it calls itself, or two of its names are one
            return self._functions[id(function)]
        names = _names(function.__code__)
        scope = dict(function.__globals__)
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        rebuilt = types.FunctionType(
            function.__code__, scope, function.__name__, function.__defaults__, cells
        )
        self._functions[id(function)] = rebuilt
        for name in names & scope.keys():
            scope[name] = self._replace(scope[name], name)
        for name, cell, old in zip(
            function.__code__.co_freevars, cells, function.__closure__ or (), strict=True
        ):
            if old != types.CellType():  # one that is still empty
                cell.cell_contents = self._replace(old.cell_contents, name)
        rebuilt.__defaults__ = self._replace(function.__defaults__, "default")
        rebuilt.__kwdefaults__ = self._replace(function.__kwdefaults__, "default")
        return rebuilt

    def _tensor(self, array: Any, name: str) -> Tensor:
        if id(array) in self._found:
            return self._found[id(array)][2]
        shape = tuple(array.shape)
        problem: FlashbsrError | None = None
        dtype = "none"
        try:
            dtype = adapter_for(array, name).dtype_name(array, name)
            if dtype not in ELEMENTS:
                raise DTypeError(name, dtype, ", ".join(ELEMENTS))
            if len(shape) > MAX_RANK:
                raise UnsupportedError(name, f"{len(shape)} dimensions", f"at most {MAX_RANK}")
        except FlashbsrError as error:  # raised where it is looked into
            problem = error
        unique = base = re.sub(r"\W", "_", name)
        count = 1
        while unique in self._taken:
            count += 1
            unique = f"{base}_{count}"
        self._taken.add(unique)
        extra = Extra(unique, dtype, len(shape))
        tensor = Tensor(unique, dtype, len(shape), shape, problem)
        self._found[id(array)] = extra, Captured(array), tensor
        return tensor


def _names(code: types.CodeType) -> set[str]:
    """Global names in a function and in those that it defines."""
    names = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names |= _names(inner)
    return names


def _is_array(x: Any) -> bool:
    if isinstance(x, type) or not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return False
    try:
        adapter_for(x)
    except DTypeError:  # a NumPy scalar, or another framework's: arithmetic says so
        return False
    return True
