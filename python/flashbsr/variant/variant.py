# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Variants that users write: C++ text, and the numbers and arrays that it asks for."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import adapter_for
from ..errors import DTypeError, FlashbsrError, UnsupportedError

__all__ = ["Captured", "Extra", "Variant", "extra_values"]

SCALARS = ("float32", "int32")
ELEMENTS = ("float32", "float16", "bfloat16", "int32", "int64", "uint8", "bool")
MAX_SCALARS = 8  # kMaxExtraScalars and its neighbours in core/extras.h
MAX_TENSORS = 8
MAX_RANK = 4

# The functions that a variant may have, and what they are called for.
HOOKS = (
    "query_transform",
    "key_transform",
    "value_transform",
    "logits_transform",
    "logits_mask",
    "activation",
    "output_transform",
)
# Those of whole rows of q, k and v: floats, so that products are made in float32.
ROW_HOOKS = frozenset(("query_transform", "key_transform", "value_transform"))

_STRUCT = re.compile(r"\bstruct\s+(\w+)\s*:\s*(?:public\s+)?(?:flashbsr\s*::\s*)?VariantBase\b")
_CALLED = re.compile(r"(?<![\w.:>])(\w+)\s*\(")  # not M::, at. or this->
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_POSITION = re.compile(r"\b(kv_position|q_position|q_token|kv_first|position|token|request)\b")
_FLOAT32, _UINT32 = struct.Struct("<f"), struct.Struct("<I")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
# Words that would compile to something else than a member, or hide a function of the variant.
_ARGUMENTS = (
    "q kv out lse return_lse q_scale k_scale v_scale sinks alibi_slopes enable_pdl kv_ready"
)
_RESERVED = frozenset((*_ARGUMENTS.split(), "stream", "self", "custom_mask", "use_softmax", *HOOKS))


@dataclass(frozen=True)
class Extra:
    """A number (`rank` 0) or an array that a variant declares."""

    name: str
    dtype: str
    rank: int

    def __str__(self) -> str:
        kind = f"{self.dtype} array of {self.rank} dimensions" if self.rank else self.dtype
        return f"{self.name}: {kind}"


class Captured:
    """An array that a traced function has by itself; equal to itself only."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array


@dataclass(frozen=True)
class Variant:
    """A user's variant; `AttentionSpec.from_source` and `AttentionSpec.from_functions` make it.

    Attributes
    ----------
    name : str
        Of the struct.
    text : str
        C++ that defines it, deriving from ``VariantBase``.
    extras : tuple of Extra
    hooks : frozenset of str
        Those of `HOOKS` that it has.
    use_softmax : bool
    captured : tuple of (str, Captured)
        Values of extras that are not given to ``run``.
    """

    name: str
    text: str
    extras: tuple[Extra, ...]
    hooks: frozenset[str]
    use_softmax: bool
    captured: tuple[tuple[str, Captured], ...] = ()

    @property
    def rewrites_rows(self) -> bool:
        """Whether it changes rows of q, k or v."""
        return bool(self.hooks & ROW_HOOKS)

    @property
    def has_row_hooks(self) -> bool:
        """Whether it changes rows of q, k, v or the output."""
        return self.rewrites_rows or "output_transform" in self.hooks

    @property
    def uses_positions(self) -> bool:
        """Whether it asks where in its request a logit or a row is, or which request that is."""
        return bool(_POSITION.search(_COMMENT.sub(" ", self.text)))

    @staticmethod
    def parse(text: str, name: str | None, extras: Mapping[str, Any]) -> Variant:
        """Find the struct, its hooks and its extras.

        Raises
        ------
        FlashbsrError, DTypeError
            No struct, or several and no name; a text or extras that cannot be compiled.
        """
        if not isinstance(text, str):
            raise DTypeError("text", type(text).__name__, "C++ text")
        code = _COMMENT.sub(" ", text)
        if re.search(r"^\s*#\s*include", code, re.MULTILINE):
            raise FlashbsrError("text", "an #include", "none: the kernel's headers are there")
        found = _STRUCT.findall(code)
        if name is None:
            if len(found) != 1:
                raise FlashbsrError(
                    "text",
                    f"{len(found)} structs that derive from flashbsr::VariantBase",
                    "one, or name=",
                )
            name = found[0]
        elif name not in found:
            raise FlashbsrError(
                "name", repr(name), "a struct of the text that derives from flashbsr::VariantBase"
            )
        hooks = frozenset(hook for hook in HOOKS if re.search(rf"\b{hook}\s*\(", code))
        _refuse_misspelt(code, hooks)
        use_softmax = not re.search(r"\buse_softmax\s*(?:=|\{)\s*false\b", code)
        if use_softmax and "activation" in hooks:
            raise FlashbsrError(
                "text", "activation() with a softmax", "static constexpr bool use_softmax = false"
            )
        return Variant(name, text, declared(extras), hooks, use_softmax)


def _refuse_misspelt(code: str, hooks: frozenset[str]) -> None:
    """Raise for a name that is nearly a hook's which the text has not: nobody would call it."""
    import difflib  # for texts only

    plain = {hook.replace("_", ""): hook for hook in HOOKS if hook not in hooks}
    for name in dict.fromkeys(_CALLED.findall(code)):
        near = difflib.get_close_matches(name.replace("_", "").lower(), plain, 1, 0.9)
        if near and name not in hooks:
            wanted = f"{plain[near[0]]}, or another name"
            raise FlashbsrError("text", f"a function {name}(), which is no hook", wanted)


def declared(extras: Mapping[str, Any]) -> tuple[Extra, ...]:
    """Check ``{"bias": "float32", "table": ("float32", 2)}``."""
    found = []
    for name, value in extras.items():
        argument = f"extras[{name!r}]"
        if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name) or name in _RESERVED:
            raise FlashbsrError("extras", repr(name), "a C++ name that run() has no other use for")
        pair = value if isinstance(value, (tuple, list)) else (value, 0)
        if len(pair) != 2 or not isinstance(pair[1], int) or isinstance(pair[1], bool):
            raise FlashbsrError(argument, repr(value), "a data type, or (data type, rank)")
        dtype, rank = pair
        allowed = ELEMENTS if rank else SCALARS
        if dtype not in allowed:
            raise DTypeError(argument, repr(dtype), ", ".join(allowed))
        if not 0 <= rank <= MAX_RANK:
            raise FlashbsrError(argument, rank, f"at most {MAX_RANK} dimensions")
        found.append(Extra(name, dtype, rank))
    check_counts(found)
    return tuple(found)


def check_counts(found: Sequence[Extra]) -> None:
    """Raise `UnsupportedError` for more extras than kernels take."""
    scalars = sum(extra.rank == 0 for extra in found)
    for count, most, what in (
        (scalars, MAX_SCALARS, "numbers"),
        (len(found) - scalars, MAX_TENSORS, "arrays"),
    ):
        if count > most:
            raise UnsupportedError("extras", f"{count} {what}", f"at most {most}")


def extra_values(
    extras: tuple[Extra, ...], captured: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Values of the extras as the compiled core takes them: a number's bits, or an export.

    Raises
    ------
    FlashbsrError, DTypeError
        One that is missing, or that the variant does not declare; a value of another kind.
    """
    values = []
    used = 0
    for extra in extras:
        if extra.name in captured:
            value = captured[extra.name]
        elif extra.name in given:
            value = given[extra.name]
            used += 1
        else:
            raise FlashbsrError(extra.name, "nothing", f"a value for the variant's {extra}")
        if extra.rank:
            values.append(adapter_for(value, extra.name).export(value, False, extra.name))
        else:
            values.append(_bits(extra, value))
    if used != len(given):
        names = [extra.name for extra in extras if extra.name not in captured]
        unknown = next(name for name in given if name not in names)
        listed = ", ".join(names) if names else "none"
        raise FlashbsrError(unknown, "a value", f"no such argument; the spec's extras: {listed}")
    return tuple(values)


def _bits(extra: Extra, value: Any) -> int:
    """Check a number; returns its 32 bits."""
    if type(value) is float and extra.dtype == "float32":  # most are: a quarter of the time
        return _float_bits(extra, value)
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (int, np.integer, float, np.floating)
    ):
        raise DTypeError(extra.name, repr(value), f"a number, as the variant's {extra}")
    if extra.dtype == "int32":
        if not isinstance(value, (int, np.integer)):
            raise DTypeError(extra.name, repr(value), "an integer")
        if not -(2**31) <= value < 2**31:
            raise FlashbsrError(extra.name, value, "an integer of 32 bits")
        return int(value) & 0xFFFFFFFF
    return _float_bits(extra, float(value))


def _float_bits(extra: Extra, number: float) -> int:
    try:
        bits: int = _UINT32.unpack(_FLOAT32.pack(number))[0]
        return bits
    except OverflowError:
        raise FlashbsrError(extra.name, number, "a number that float32 holds") from None


def finite_float(value: float) -> str:
    """Write a float32 as a C++ literal."""
    if math.isnan(value):
        return "not_a_number()"
    if math.isinf(value):
        return "infinity()" if value > 0 else "-infinity()"
    return f"{np.float32(value)!s}f"
