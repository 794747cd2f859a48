# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Names of element types, the same for every array framework.

A data type travels through the package as its NumPy/ml_dtypes name: ``"float32"``, ``"float16"``,
``"bfloat16"``, ``"float8_e4m3fn"``, ``"float8_e5m2"``, ``"int32"`` and so on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import DTypeError

__all__ = [
    "FLOAT8",
    "KV_DTYPES",
    "NVFP4_GROUP",
    "OUTPUT_DTYPES",
    "O_DTYPES",
    "PACKED",
    "PACKED_LATENTS",
    "Q_DTYPES",
    "elements_of",
    "kv_dtypes",
    "normalize_dtype",
    "output_dtype",
]

O_DTYPES = ("float32", "float16", "bfloat16")
"""Element types of states, and of outputs on every device."""

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")

OUTPUT_DTYPES = (*O_DTYPES, "float8_e4m3fn", "nvfp4")
"""Element types of outputs."""

NVFP4_GROUP = 16
"""Elements that share a scale of NVFP4."""

Q_DTYPES = (*O_DTYPES, "float8_e4m3fn")
"""Element types of queries."""

PACKED = ("int4", "nvfp4")
"""Codes of which two lie in a byte, in arrays of uint8."""

KV_DTYPES = (*O_DTYPES, *FLOAT8, "int8", *PACKED)
"""Element types of keys and values."""

PACKED_LATENTS = "fp8_ds_mla"
"""vLLM's name for latents in 656 bytes: 512 e4m3, four float32 scales of 128 each, 64 bfloat16."""

_INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_KNOWN = frozenset((*KV_DTYPES, *_INTEGERS, "float64", "bool"))
_ALIASES = {"half": "float16", "float": "float32"}  # as torch spells them

# Types already seen. Data types are few and hashable, so the table stays small.
_SEEN: dict[Any, str] = {}


def normalize_dtype(
    dtype: Any, argument: str = "dtype", allowed: tuple[str, ...] | None = None
) -> str | None:
    """Name of a data type given in any framework's way.

    Parameters
    ----------
    dtype : str, numpy.dtype, type, torch.dtype, jax or ml_dtypes type, None
        None passes through: "as the arrays".
    argument : str
        Name for the error message.
    allowed : tuple of str, optional
        Names accepted here. Default: every known one.

    Returns
    -------
    str or None

    Raises
    ------
    DTypeError
        Not a data type, or not one of `allowed`.

    Examples
    --------
    >>> import numpy as np
    >>> normalize_dtype(np.float16), normalize_dtype("bfloat16"), normalize_dtype("half")
    ('float16', 'bfloat16', 'float16')
    """
    if dtype is None:
        return None
    try:
        name = _SEEN.get(dtype)
    except TypeError:  # unhashable, so no data type
        name = None
    if name is None:
        name = _name(dtype, argument)
        _SEEN[dtype] = name
    if allowed is not None and name not in allowed:
        raise DTypeError(argument, name, f"one of {', '.join(allowed)}")
    return name


def kv_dtypes(kv_dtype: Any, argument: str = "kv_dtype") -> tuple[str | None, str | None]:
    """Names of the types of K and V, which are one or a tuple of two.

    Raises
    ------
    DTypeError
        Not a data type that K and V may have, or not two of them.

    Examples
    --------
    >>> kv_dtypes("int8"), kv_dtypes(("int8", "int4")), kv_dtypes(None)
    (('int8', 'int8'), ('int8', 'int4'), (None, None))
    """
    pair = kv_dtype if isinstance(kv_dtype, tuple) else (kv_dtype, kv_dtype)
    if len(pair) != 2 or (pair is kv_dtype and None in pair):
        raise DTypeError(argument, repr(kv_dtype), "one type, or those of K and of V")
    k, v = (normalize_dtype(x, argument, KV_DTYPES) for x in pair)
    return k, v


def elements_of(kv_dtype: Any) -> tuple[str | None, str | None]:
    """Names of the types of K and V, whose codes may lie in packed rows.

    Examples
    --------
    >>> elements_of("fp8_ds_mla"), elements_of("int8")
    (('float8_e4m3fn', 'float8_e4m3fn'), ('int8', 'int8'))
    """
    packed = isinstance(kv_dtype, str) and kv_dtype == PACKED_LATENTS
    return kv_dtypes("float8_e4m3fn" if packed else kv_dtype)


def output_dtype(q_dtype: str) -> str:
    """Name the type of an output that nobody asked another of: that of q, bfloat16 for float8.

    Examples
    --------
    >>> output_dtype("float16"), output_dtype("float8_e4m3fn")
    ('float16', 'bfloat16')
    """
    return "bfloat16" if q_dtype in FLOAT8 else q_dtype


def _name(dtype: Any, argument: str) -> str:
    name: str | None
    if isinstance(dtype, str):
        name = _ALIASES.get(dtype, dtype)
    elif type(dtype).__module__.partition(".")[0] == "torch":
        name = str(dtype).removeprefix("torch.")
    else:
        try:
            resolved = np.dtype(dtype)  # also takes jax's and ml_dtypes' scalar types
            name = resolved.name if resolved.isnative else None
        except TypeError:
            name = None
    if name not in _KNOWN:
        codes = ", 'float8_e4m3fn', 'int8', 'int4' or 'nvfp4'" if argument == "kv_dtype" else ""
        raise DTypeError(argument, repr(dtype), f"a data type: a name such as 'bfloat16'{codes}, "
                         "or a NumPy, PyTorch, JAX or ml_dtypes type")  # fmt: skip
    return name
