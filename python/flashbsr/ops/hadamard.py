# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Incoherence processing: queries and keys without outstanding elements, for caches of few bits."""

from __future__ import annotations

import flashbsr._core as _core

from ..arrays import adapter_for, float_dtype
from ..arrays.types import Array
from ..errors import ShapeError, UnsupportedError
from .call import Call

__all__ = ["hadamard"]


def hadamard(x: Array, *, out: Array = None) -> Array:
    """Multiply every head by an orthonormal Hadamard matrix.

    Products of queries and keys stay as they are when both are transformed, after RoPE, and a key's
    largest elements are spread over all dims, so that a scale of few bits fits the rest better
    (QuaRot, arXiv:2404.00456). Values may be transformed too, and the output then once more. What
    it gains is measured in docs/kv-quantization.md.

    The matrix ``H`` of D rows is symmetric, and ``H @ H`` the identity: the function is its own
    inverse. It is the Kronecker product of Paley's of order 12 or 20, where D needs one, and
    Sylvester's.

    Parameters
    ----------
    x : array [nnz, heads, D]
        float32, float16 or bfloat16. Any strides but the last. D is a power of two, or 12 or 20
        times one, on a GPU up to 512. Sums are in float32.
    out : array [nnz, heads, D], optional
        Written and returned; may be `x`. Of its type. Not a JAX array.

    Returns
    -------
    array [nnz, heads, D]
        Of the kind and type of `x`. A head with a NaN is NaN.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, FlashbsrError
    UnsupportedError
        Another head dim; a tensor of a compiled program.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.zeros((1, 1, 4), np.float32)
    >>> x[..., 1] = 6  # one large element
    >>> hadamard(x)[0, 0].tolist()
    [3.0, -3.0, 3.0, -3.0]
    >>> hadamard(hadamard(x))[0, 0].tolist()
    [0.0, 6.0, 0.0, 0.0]
    """
    call = Call(x, "x")
    if call.operators is not None:
        raise UnsupportedError(
            "x",
            "a tensor of a compiled program",
            "a call outside of it (torch.compiler.disable)",
        )
    a = adapter_for(x, "x")
    shape = tuple(x.shape)
    if len(shape) != 3:
        raise ShapeError("x", f"shape {shape}", "[nnz, heads, D]")
    result = a.empty(x, shape, float_dtype(x, "x")) if out is None else out
    to = a if out is None else adapter_for(out, "out")
    _core.hadamard(call.export(x, "x"), to.export(result, True, "out"), call.stream)
    call.done()
    return to.finish(result)
