# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The attention state ``(v, s)`` and its merge.

A state is the output of attention over some set of keys and the logarithm ``s`` of the sum of the
exponentiated logits. States over disjoint sets of keys merge, in any order::

    s = log(exp(s_a) + exp(s_b)),   v = (exp(s_a) v_a + exp(s_b) v_b) / exp(s)

(FlashInfer, MLSys 2025, section 2.2.) ``s == -inf`` is the state of no keys; it is neutral. The
functions here take the natural logarithm, as ``run`` returns it; ``lse_base="2"`` is FlashInfer's.
"""

from __future__ import annotations

from typing import Any

import flashbsr._core as _core

from .._check import check_name
from ..arrays import adapter_for, float_dtype
from ..arrays.types import Array
from ..errors import ShapeError
from .call import Call

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]


def _base2(lse_base: str) -> bool:
    check_name("lse_base", lse_base, ("e", "2"))
    return lse_base == "2"


def merge_state(
    v_a: Array, s_a: Array, v_b: Array, s_b: Array, *, lse_base: str = "e"
) -> tuple[Array, Array]:
    """Merge two states.

    Parameters
    ----------
    v_a, v_b : array [n, num_heads, head_dim]
        Outputs; float32, float16 or bfloat16.
    s_a, s_b : float32 array [n, num_heads]
        Their LSE.
    lse_base : {"e", "2"}
        Base of `s_a` and `s_b`, and of the result.

    Returns
    -------
    v : array [n, num_heads, head_dim]
        Of the kind and type of `v_a`.
    s : float32 array [n, num_heads]

    Raises
    ------
    ShapeError, DTypeError, DeviceError, FlashbsrError

    Examples
    --------
    Three keys with the mean 1 and one with the value 5.

    >>> import numpy as np
    >>> v_a, s_a = np.full((1, 1, 8), 1.0, np.float32), np.log(np.full((1, 1), 3, np.float32))
    >>> v_b, s_b = np.full((1, 1, 8), 5.0, np.float32), np.zeros((1, 1), np.float32)
    >>> v, s = merge_state(v_a, s_a, v_b, s_b)
    >>> float(v[0, 0, 0].round(5)), float(np.exp(s[0, 0]).round(5))
    (2.0, 4.0)
    """
    base2 = _base2(lse_base)
    a = adapter_for(v_a, "v_a")
    if a.OPERATORS is not None:
        made: tuple[Any, Any] = a.OPERATORS.merge_state(v_a, s_a, v_b, s_b, base2)
        return made
    adapter_for(s_a, "s_a")  # before its shape is read
    v = a.empty(v_a, tuple(v_a.shape), float_dtype(v_a, "v_a"))
    s = a.empty(v_a, tuple(s_a.shape), "float32")
    call = Call(v_a, "v_a")
    _core.merge_state(
        a.export(v_a, False, "v_a"),
        call.export(s_a, "s_a"),
        call.export(v_b, "v_b"),
        call.export(s_b, "s_b"),
        a.export(v, True),
        a.export(s, True),
        base2,
        call.stream,
    )
    call.done()
    return a.finish(v, v_a, v_b), a.finish(s, v_a, v_b)


def merge_state_in_place(
    v: Array,
    s: Array,
    v_other: Array,
    s_other: Array,
    mask: Array = None,
    *,
    lse_base: str = "e",
) -> None:
    """Merge a second state into the first.

    Parameters
    ----------
    v : array [n, num_heads, head_dim]
        Written. float32, float16 or bfloat16; not a JAX array, those are immutable.
    s : float32 array [n, num_heads]
        Written.
    v_other : array [n, num_heads, head_dim]
    s_other : float32 array [n, num_heads]
    mask : bool or uint8 array [n], optional
        Rows where it is 0 stay as they are.
    lse_base : {"e", "2"}
        Base of `s` and `s_other`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, FlashbsrError
    UnsupportedError
        An immutable array. `merge_state` returns new ones.

    Examples
    --------
    >>> import numpy as np
    >>> v, s = np.full((2, 1, 8), 1.0, np.float32), np.zeros((2, 1), np.float32)
    >>> merge_state_in_place(v, s, v + 2, s, np.array([True, False]))
    >>> v[:, 0, 0].tolist(), np.exp(s[:, 0]).round(5).tolist()
    ([2.0, 1.0], [2.0, 1.0])
    """
    base2 = _base2(lse_base)
    call = Call(v, "v")
    if call.operators is not None:
        call.operators.merge_state_in_place(v, s, v_other, s_other, mask, base2)
        return
    _core.merge_state_in_place(
        call.export(v, "v", True),
        call.export(s, "s", True),
        call.export(v_other, "v_other"),
        call.export(s_other, "s_other"),
        None if mask is None else call.values(mask, "mask"),
        base2,
        call.stream,
    )
    call.done()


def merge_states(v: Array, s: Array, *, lse_base: str = "e") -> tuple[Array, Array]:
    """Merge any number of states, in their order.

    Parameters
    ----------
    v : array [n, num_states, num_heads, head_dim]
        Outputs; float32, float16 or bfloat16.
    s : float32 array [n, num_states, num_heads]
        Their LSE.
    lse_base : {"e", "2"}
        Base of `s` and of the result.

    Returns
    -------
    v : array [n, num_heads, head_dim]
        Of the kind and type of `v`. 0 without states.
    s : float32 array [n, num_heads]
        ``-inf`` without states.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, FlashbsrError

    Examples
    --------
    >>> import numpy as np
    >>> v = np.arange(3, dtype=np.float32).reshape(1, 3, 1, 1).repeat(8, axis=3)
    >>> out, lse = merge_states(v, np.zeros((1, 3, 1), np.float32))
    >>> float(out[0, 0, 0].round(5)), float(np.exp(lse[0, 0]).round(5))
    (1.0, 3.0)
    """
    base2 = _base2(lse_base)
    a = adapter_for(v, "v")
    if a.OPERATORS is not None:
        made: tuple[Any, Any] = a.OPERATORS.merge_states(v, s, base2)
        return made
    shape = tuple(v.shape)
    if len(shape) != 4:
        raise ShapeError("v", f"shape {shape}", "[n, num_states, num_heads, head_dim]")
    v_out = a.empty(v, (shape[0], *shape[2:]), float_dtype(v, "v"))
    s_out = a.empty(v, (shape[0], shape[2]), "float32")
    call = Call(v, "v")
    _core.merge_states(
        a.export(v, False, "v"),
        call.export(s, "s"),
        a.export(v_out, True),
        a.export(s_out, True),
        base2,
        call.stream,
    )
    call.done()
    return a.finish(v_out, v), a.finish(s_out, v)
