# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Bit packing of masks."""

from __future__ import annotations

import numpy as np

import flashbsr._core as _core

from .._check import check_name
from ..arrays import adapter_for, to_indices
from ..arrays.types import Array
from ..errors import ShapeError
from .call import Call

__all__ = ["packbits", "segment_packbits"]


def packbits(x: Array, bitorder: str = "big") -> Array:
    """Pack booleans, eight to a byte.

    Parameters
    ----------
    x : bool or uint8 array [n]
        Anything but 0 counts as 1.
    bitorder : {"big", "little"}
        Whether the first element is the highest or the lowest bit. Masks are ``"little"``.

    Returns
    -------
    uint8 array [ceil(n / 8)]
        Of the kind of `x`; the last byte is filled up with zeros.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, FlashbsrError

    Examples
    --------
    >>> import numpy as np
    >>> packbits(np.array([1, 0, 1], bool)).tolist()
    [160]
    >>> packbits(np.array([1, 0, 1], bool), bitorder="little").tolist()
    [5]
    """
    check_name("bitorder", bitorder, ("big", "little"))
    a = adapter_for(x, "x")
    shape = tuple(x.shape)
    if len(shape) != 1:
        raise ShapeError("x", f"shape {shape}", "[n]")
    out = a.empty(x, (-(-shape[0] // 8),), "uint8")
    call = Call(x, "x")
    _core.packbits(call.values(x, "x"), a.export(out, True), bitorder == "little", call.stream)
    call.done()
    return a.finish(out)


def segment_packbits(x: Array, indptr: Array, bitorder: str = "big") -> tuple[Array, Array]:
    """Pack booleans segment by segment, each from a byte on.

    On a GPU the values of `indptr` are copied to the host, to know the size of the result.

    Parameters
    ----------
    x : bool or uint8 array [indptr[-1]]
        Anything but 0 counts as 1.
    indptr : int32 or int64 array [B + 1]
        Segment *i* is ``x[indptr[i]:indptr[i + 1]]``.
    bitorder : {"big", "little"}
        Whether the first element is the highest or the lowest bit. Masks are ``"little"``.

    Returns
    -------
    packed : uint8 array [new_indptr[-1]]
        Of the kind of `x`.
    new_indptr : int32 array [B + 1]
        Segment bounds in bytes. Of the kind of `indptr`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError

    Examples
    --------
    >>> import numpy as np
    >>> bits, bounds = segment_packbits(
    ...     np.array([1, 0, 1, 1], bool), np.array([0, 3, 4], np.int32), bitorder="little"
    ... )
    >>> bits.tolist(), bounds.tolist()
    ([5, 1], [0, 1, 2])
    """
    check_name("bitorder", bitorder, ("big", "little"))
    a, b = adapter_for(x, "x"), adapter_for(indptr, "indptr")
    call = Call(x, "x")
    values, bounds = call.values(x, "x"), to_indices(indptr, "indptr")
    # Only to size the output. The core checks indptr; a descending one must get that far.
    lengths = np.maximum(np.diff(bounds), 0)
    out = a.empty(x, (int((-(-lengths // 8)).sum()),), "uint8")
    out_indptr = b.empty(indptr, tuple(indptr.shape), "int32")
    _core.segment_packbits(
        values,
        bounds,
        a.export(out, True),
        b.export(out_indptr, True),
        bitorder == "little",
        call.export(indptr, "indptr") if call.on_device else None,
        call.stream,
    )
    call.done()
    return a.finish(out), b.finish(out_indptr)
