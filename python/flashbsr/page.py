# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Writing to a paged KV cache, and the index arithmetic around it."""

from __future__ import annotations

from . import _core
from ._typing import Array
from .adapters import adapter_for, export, to_values
from .errors import FlashbsrError, ShapeError
from .spec import check_float, check_int, check_name

__all__ = ["append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"]


def append_paged_kv_cache(
    append_key: Array,
    append_value: Array,
    batch_indices: Array,
    positions: Array,
    paged_kv_cache: Array | tuple[Array, Array],
    kv_indices: Array,
    kv_indptr: Array,
    kv_last_page_len: Array,
    kv_layout: str = "NHD",
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write new keys and values into their slots.

    Row *t* goes to position ``positions[t]`` of request ``batch_indices[t]``. All indices are
    checked before anything is written.

    Parameters
    ----------
    append_key : array [nnz, num_kv_heads, head_dim]
        float32, float16 or bfloat16. Any strides but the last.
    append_value : array [nnz, num_kv_heads, head_dim_vo]
        Likewise.
    batch_indices : int32 or int64 array [nnz]
        Request of each row; -1 for rows of padding, which are skipped.
    positions : int32 or int64 array [nnz]
        Position of each row in its request, from 0.
    paged_kv_cache : array or tuple of two
        Written. Stacked ``[pages, 2, page_size, num_kv_heads, head_dim]`` (HND: ``page_size`` and
        ``num_kv_heads`` swapped), or ``(k, v)`` without the 2. The type of the new rows, or
        float8_e4m3fn / float8_e5m2. Not a JAX array: those are immutable.
    kv_indices : int32 or int64 array [>= kv_indptr[-1]]
        Page ids.
    kv_indptr : int32 or int64 array [B + 1]
        Request *i* has the pages ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]``.
    kv_last_page_len : int32 or int64 array [B]
        Tokens in each request's last page *after* the append.
    kv_layout : {"NHD", "HND"}
    k_scale, v_scale : float
        The rows are divided by these before they are rounded to the type of the cache. Give the
        same to ``run``.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError
    UnsupportedError
        An immutable cache.

    Examples
    --------
    Tokens 3 and 4 of one request go to slot 3 of page 2 and slot 0 of page 0.

    >>> import numpy as np
    >>> cache = np.zeros((3, 2, 4, 1, 8), np.float32)
    >>> new = np.arange(1, 3, dtype=np.float32)[:, None, None].repeat(8, axis=2)
    >>> append_paged_kv_cache(
    ...     new, new, np.array([0, 0], np.int32), np.array([3, 4], np.int32), cache,
    ...     kv_indices=np.array([2, 0], np.int32), kv_indptr=np.array([0, 2], np.int32),
    ...     kv_last_page_len=np.array([1], np.int32),
    ... )
    >>> cache[2, 0, :, 0, 0].tolist(), cache[0, 1, :, 0, 0].tolist()
    ([0.0, 0.0, 0.0, 1.0], [2.0, 0.0, 0.0, 0.0])
    """
    check_name("kv_layout", kv_layout, ("NHD", "HND"))
    if isinstance(paged_kv_cache, (tuple, list)):
        if len(paged_kv_cache) != 2:
            raise ShapeError("paged_kv_cache", f"{len(paged_kv_cache)} arrays", "(k, v)")
        k, v = paged_kv_cache
        k_cache = export(k, "paged_kv_cache[0]", True)
        v_cache = export(v, "paged_kv_cache[1]", True)
    else:
        k_cache = export(paged_kv_cache, "paged_kv_cache", True)
        v_cache = None
    try:
        _core.append_paged_kv_cache(
            export(append_key, "append_key"),
            export(append_value, "append_value"),
            to_values(batch_indices, "batch_indices"),
            to_values(positions, "positions"),
            k_cache,
            v_cache,
            to_values(kv_indices, "kv_indices"),
            to_values(kv_indptr, "kv_indptr"),
            to_values(kv_last_page_len, "kv_last_page_len"),
            kv_layout,
            check_float("k_scale", k_scale),
            check_float("v_scale", v_scale),
        )
    except FlashbsrError as error:
        names = {"k_cache": "paged_kv_cache[0]", "v_cache": "paged_kv_cache[1]"}
        raise error.respell(names) from None


def get_batch_indices_positions(
    append_indptr: Array,
    seq_lens: Array,
    nnz: int,
    batch_indices: Array = None,
    positions: Array = None,
) -> tuple[Array, Array]:
    """Name the request and the position of each new row, for `append_paged_kv_cache`.

    Parameters
    ----------
    append_indptr : int32 or int64 array [B + 1]
        Request *i* appends the rows ``append_indptr[i]`` to ``append_indptr[i + 1] - 1``.
    seq_lens : int32 or int64 array [B]
        Its length *after* the append: row *t* of its *m* new ones gets position
        ``seq_lens[i] - m + t``.
    nnz : int
        Rows of the results; those from ``append_indptr[-1]`` on are padding.
    batch_indices, positions : int32 array [nnz], optional
        Written and returned. Not JAX arrays: those are immutable.

    Returns
    -------
    batch_indices : int32 array [nnz]
        -1 for padding.
    positions : int32 array [nnz]
        0 for padding.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError

    Examples
    --------
    >>> import numpy as np
    >>> indptr, lens = np.array([0, 1, 3], np.int32), np.array([5, 2], np.int32)
    >>> [x.tolist() for x in get_batch_indices_positions(indptr, lens, 4)]
    [[0, 1, 1, -1], [4, 0, 1, 0]]
    """
    nnz = check_int("nnz", nnz, 0)
    a = adapter_for(append_indptr, "append_indptr")
    outputs = []
    for name, given in (("batch_indices", batch_indices), ("positions", positions)):
        if given is None:
            given = a.empty(append_indptr, (nnz,), "int32")
            outputs.append((a, given, a.export(given, True)))
        else:
            b = adapter_for(given, name)
            if tuple(given.shape) != (nnz,):
                raise ShapeError(name, f"shape {tuple(given.shape)}", f"({nnz},): nnz")
            outputs.append((b, given, b.export(given, True, name)))
    _core.get_batch_indices_positions(
        to_values(append_indptr, "append_indptr"),
        to_values(seq_lens, "seq_lens"),
        outputs[0][2],
        outputs[1][2],
    )
    return outputs[0][0].finish(outputs[0][1]), outputs[1][0].finish(outputs[1][1])


def get_seq_lens(kv_indptr: Array, kv_last_page_len: Array, page_size: int) -> Array:
    """KV length of each request: ``(pages - 1) * page_size + last_page_len``.

    Parameters
    ----------
    kv_indptr : int32 or int64 array [B + 1]
    kv_last_page_len : int32 or int64 array [B]
        1 to `page_size`.
    page_size : int

    Returns
    -------
    int32 array [B]
        Of the kind of `kv_indptr`. 0 for a request without pages, whatever its last_page_len.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError

    Examples
    --------
    >>> import numpy as np
    >>> get_seq_lens(np.array([0, 2, 2], np.int32), np.array([3, 0], np.int32), 16).tolist()
    [19, 0]
    """
    a = adapter_for(kv_indptr, "kv_indptr")
    adapter_for(kv_last_page_len, "kv_last_page_len")  # before its shape is read
    out = a.empty(kv_indptr, tuple(kv_last_page_len.shape), "int32")
    _core.get_seq_lens(
        to_values(kv_indptr, "kv_indptr"),
        to_values(kv_last_page_len, "kv_last_page_len"),
        check_int("page_size", page_size, 1),
        a.export(out, True),
    )
    return a.finish(out)
