# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of queries and keys.

Pair *i* of a head at position *p* is rotated by
``p / (rope_scale * rope_theta^(2 i / rotary_dim))`` (RoFormer, arXiv:2104.09864, eq. 34). Pairs are
elements ``(i, i + rotary_dim / 2)``, or ``(2 i, 2 i + 1)`` with ``interleave=True``. Elements from
`rotary_dim` on are left as they are. Angles are computed in float32 or better.

The ``llama31`` functions blend the scaled and the unscaled frequency: wavelengths below
``old_context_len / high_freq_factor`` keep theirs, the frequencies of those above
``old_context_len / low_freq_factor`` are divided by `rope_scale`, with a linear ramp between
(Llama 3.1).
"""

from __future__ import annotations

from .._check import check_llama31
from ..arrays.types import Array
from .rotate import ragged_positions, rotate, rotate_by_table

__all__ = [
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
]


def apply_rope(
    q: Array,
    k: Array,
    indptr: Array,
    offsets: Array,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Array, Array]:
    """Rotate ragged queries and keys whose positions run on from an offset.

    Parameters
    ----------
    q : array [nnz, num_qo_heads, head_dim]
        float32, float16 or bfloat16. Any strides but the last.
    k : array [nnz, num_kv_heads, head_dim]
        Likewise.
    indptr : int32 or int64 array [B + 1]
        Request *i* has the rows ``indptr[i]`` to ``indptr[i + 1] - 1``; ``indptr[-1] == nnz``.
    offsets : int32 or int64 array [B]
        Position of the first row of each request.
    rotary_dim : int, optional
        Even, at most `head_dim`. Default `head_dim`.
    interleave : bool
        Which elements form a pair; see the module.
    rope_scale : float
        Positions are divided by it.
    rope_theta : float
        Base of the frequencies.

    Returns
    -------
    q_rope, k_rope : arrays
        Like `q` and `k`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError

    See Also
    --------
    apply_rope_inplace : the same, written into `q` and `k`.
    apply_rope_pos_ids : a position for every row.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.zeros((2, 1, 4), np.float32)
    >>> q[..., 0] = 1
    >>> out, _ = apply_rope(q, q, np.array([0, 2]), np.array([0]))
    >>> out[0, 0].tolist()
    [1.0, 0.0, 0.0, 0.0]
    >>> np.allclose(out[1, 0], [np.cos(1), 0, np.sin(1), 0])
    True
    """
    positions = ragged_positions(q, indptr, offsets)
    return rotate(q, k, positions, rotary_dim, interleave, rope_scale, rope_theta, None, False)


def apply_rope_inplace(
    q: Array,
    k: Array,
    indptr: Array,
    offsets: Array,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Do what `apply_rope` does, writing into `q` and `k`.

    Parameters
    ----------
    q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta
        As for `apply_rope`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError
    UnsupportedError
        JAX arrays, which are immutable.
    """
    positions = ragged_positions(q, indptr, offsets)
    rotate(q, k, positions, rotary_dim, interleave, rope_scale, rope_theta, None, True)


def apply_rope_pos_ids(
    q: Array,
    k: Array,
    pos_ids: Array,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Array, Array]:
    """Rotate queries and keys by a position per row.

    Parameters
    ----------
    q, k
        As for `apply_rope`.
    pos_ids : int32 or int64 array [nnz]
    rotary_dim, interleave, rope_scale, rope_theta
        As for `apply_rope`.

    Returns
    -------
    q_rope, k_rope : arrays
        Like `q` and `k`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, FlashbsrError

    Examples
    --------
    >>> import numpy as np
    >>> q = np.ones((1, 1, 2), np.float32)
    >>> out, _ = apply_rope_pos_ids(q, q, np.array([2]))
    >>> np.allclose(out[0, 0], [np.cos(2) - np.sin(2), np.cos(2) + np.sin(2)])
    True
    """
    return rotate(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, None, False)


def apply_rope_pos_ids_inplace(
    q: Array,
    k: Array,
    pos_ids: Array,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Do what `apply_rope_pos_ids` does, writing into `q` and `k`.

    Parameters
    ----------
    q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta
        As for `apply_rope_pos_ids`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError
    UnsupportedError
        JAX arrays, which are immutable.
    """
    rotate(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, None, True)


def apply_llama31_rope(
    q: Array,
    k: Array,
    indptr: Array,
    offsets: Array,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[Array, Array]:
    """Do what `apply_rope` does, with the frequencies of Llama 3.1.

    Parameters
    ----------
    q, k, indptr, offsets, rotary_dim, interleave, rope_theta
        As for `apply_rope`.
    rope_scale : float
        Factor of the long wavelengths.
    low_freq_factor, high_freq_factor : float
        ``0 < low_freq_factor < high_freq_factor``.
    old_context_len : int
        Tokens of the original context.

    Returns
    -------
    q_rope, k_rope : arrays
        Like `q` and `k`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError

    Examples
    --------
    >>> import numpy as np
    >>> q = np.ones((1, 1, 64), np.float32)
    >>> out, _ = apply_llama31_rope(q, q, np.array([0, 1]), np.array([7]))
    >>> out.shape
    (1, 1, 64)
    """
    llama31 = check_llama31((low_freq_factor, high_freq_factor, old_context_len))
    positions = ragged_positions(q, indptr, offsets)
    return rotate(q, k, positions, rotary_dim, interleave, rope_scale, rope_theta, llama31, False)


def apply_llama31_rope_inplace(
    q: Array,
    k: Array,
    indptr: Array,
    offsets: Array,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Do what `apply_llama31_rope` does, writing into `q` and `k`.

    Parameters
    ----------
    q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta
        As for `apply_llama31_rope`.
    low_freq_factor, high_freq_factor, old_context_len
        As for `apply_llama31_rope`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError
    UnsupportedError
        JAX arrays, which are immutable.
    """
    llama31 = check_llama31((low_freq_factor, high_freq_factor, old_context_len))
    positions = ragged_positions(q, indptr, offsets)
    rotate(q, k, positions, rotary_dim, interleave, rope_scale, rope_theta, llama31, True)


def apply_llama31_rope_pos_ids(
    q: Array,
    k: Array,
    pos_ids: Array,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[Array, Array]:
    """Do what `apply_rope_pos_ids` does, with the frequencies of `apply_llama31_rope`.

    Parameters
    ----------
    q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta
        As for `apply_rope_pos_ids`.
    low_freq_factor, high_freq_factor, old_context_len
        As for `apply_llama31_rope`.

    Returns
    -------
    q_rope, k_rope : arrays
        Like `q` and `k`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, FlashbsrError
    """
    llama31 = check_llama31((low_freq_factor, high_freq_factor, old_context_len))
    return rotate(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, llama31, False)


def apply_llama31_rope_pos_ids_inplace(
    q: Array,
    k: Array,
    pos_ids: Array,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Do what `apply_llama31_rope_pos_ids` does, writing into `q` and `k`.

    Parameters
    ----------
    q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta
        As for `apply_llama31_rope_pos_ids`.
    low_freq_factor, high_freq_factor, old_context_len
        As for `apply_llama31_rope`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError
    UnsupportedError
        JAX arrays, which are immutable.
    """
    llama31 = check_llama31((low_freq_factor, high_freq_factor, old_context_len))
    rotate(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, llama31, True)


def apply_rope_with_cos_sin_cache(
    positions: Array,
    query: Array,
    key: Array,
    head_size: int,
    cos_sin_cache: Array,
    is_neox: bool = True,
) -> tuple[Array, Array]:
    """Rotate by a table of cosines and sines, as vLLM and SGLang keep it.

    Parameters
    ----------
    positions : int32 or int64 array [nnz]
        Rows of the table, 0 to ``max_position - 1``.
    query : array [nnz, num_qo_heads * head_size]
        float32, float16 or bfloat16. Any stride between rows.
    key : array [nnz, num_kv_heads * head_size]
        Likewise.
    head_size : int
    cos_sin_cache : float32 array [max_position, rotary_dim]
        Row *p*: the cosines of the ``rotary_dim / 2`` angles at position *p*, then the sines.
    is_neox : bool
        Pairs ``(i, i + rotary_dim / 2)``; False: ``(2 i, 2 i + 1)``.

    Returns
    -------
    query_out, key_out : arrays
        Like `query` and `key`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError

    Examples
    --------
    >>> import numpy as np
    >>> table = np.array([[1, 0], [0, 1]], np.float32)  # no turn, and a quarter turn
    >>> x = np.array([[1, 2], [1, 2]], np.float32)
    >>> apply_rope_with_cos_sin_cache(np.array([0, 1]), x, x, 2, table)[0].tolist()
    [[1.0, 2.0], [-2.0, 1.0]]
    """
    return rotate_by_table(positions, query, key, head_size, cos_sin_cache, is_neox, False)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Array,
    query: Array,
    key: Array,
    head_size: int,
    cos_sin_cache: Array,
    is_neox: bool = True,
) -> None:
    """Do what `apply_rope_with_cos_sin_cache` does, writing into `query` and `key`.

    Parameters
    ----------
    positions, query, key, head_size, cos_sin_cache, is_neox
        As for `apply_rope_with_cos_sin_cache`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError
    UnsupportedError
        JAX arrays, which are immutable.
    """
    rotate_by_table(positions, query, key, head_size, cos_sin_cache, is_neox, True)
