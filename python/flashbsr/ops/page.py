# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Writing to a paged KV cache, and the index arithmetic around it."""

from __future__ import annotations

from typing import Any

import flashbsr._core as _core

from .._check import check_float, check_int, check_llama31, check_name
from ..arrays import adapter_for, float_dtype
from ..arrays.types import Array
from ..errors import FlashbsrError, ShapeError, UnsupportedError
from .call import Call
from .codes import take_scales
from .rotate import check_frequencies, check_rotary_dim, check_table

__all__ = [
    "append_paged_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "rope_append_paged_kv_cache",
]

_NAMES = {"k_cache": "paged_kv_cache[0]", "v_cache": "paged_kv_cache[1]"}


def _export_cache(call: Call, paged_kv_cache: Array | tuple[Array, Array]) -> tuple[Any, Any]:
    """Hand over a stacked cache and None, or k and v."""
    if paged_kv_cache is None:
        raise ShapeError("paged_kv_cache", "None", "a stacked cache, or (k, v)")
    if not isinstance(paged_kv_cache, (tuple, list)):
        return call.export(paged_kv_cache, "paged_kv_cache", True), None
    if len(paged_kv_cache) != 2:
        raise ShapeError("paged_kv_cache", f"{len(paged_kv_cache)} arrays", "(k, v)")
    k, v = paged_kv_cache
    return (
        call.export(k, "paged_kv_cache[0]", True),
        call.export(v, "paged_kv_cache[1]", True),
    )


_TABLE = "batch_indices", "kv_indices", "kv_indptr", "kv_last_page_len"


def _places(slot_mapping: Array, table: tuple[Array, ...], *, positions: Array) -> Any:
    """Tell slots from a page table with positions: exactly one of the two is there."""
    named = dict(zip((*_TABLE, "positions"), (*table, positions), strict=True))
    if slot_mapping is not None:
        if given := [name for name, x in named.items() if x is not None]:
            raise FlashbsrError(
                "slot_mapping",
                f"slot_mapping and {', '.join(given)}",
                "one or the other: slots say where rows go without a page table",
            )
        return slot_mapping
    for name, x in named.items():
        if x is None:
            raise FlashbsrError(name, "None", "an array; or slot_mapping without a page table")
    return table


def _export_places(call: Call, places: Any) -> Any:
    if isinstance(places, tuple):
        return tuple(map(call.values, places, _TABLE))
    return call.values(places, "slot_mapping")


def append_paged_kv_cache(
    append_key: Array,
    append_value: Array,
    batch_indices: Array = None,
    positions: Array = None,
    paged_kv_cache: Array | tuple[Array, Array] = None,
    kv_indices: Array = None,
    kv_indptr: Array = None,
    kv_last_page_len: Array = None,
    kv_layout: str = "NHD",
    *,
    slot_mapping: Array = None,
    k_scale: float | Array | tuple[Array, float] = 1.0,
    v_scale: float | Array | tuple[Array, float] = 1.0,
    kv_dtype: Any = None,
) -> None:
    """Write new keys and values into their slots.

    Row *t* goes to position ``positions[t]`` of request ``batch_indices[t]``, or straight to slot
    ``slot_mapping[t]``, as serving engines keep them. On the CPU all indices are checked before
    anything is written. On a GPU their values are not looked at: rows whose request, position,
    page or slot does not exist are skipped (``FLASHBSR_CHECK=1`` in the environment has them
    checked, at the price of a synchronisation).

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
        ``num_kv_heads`` swapped), or ``(k, v)`` without the 2. The type of the new rows,
        float8_e4m3fn, float8_e5m2 or int8, or uint8 with two codes in a byte (`kv_dtype`). Not a
        JAX array: those are immutable.
    kv_indices : int32 or int64 array [>= kv_indptr[-1]]
        Page ids.
    kv_indptr : int32 or int64 array [B + 1]
        Request *i* has the pages ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]``.
    kv_last_page_len : int32 or int64 array [B]
        Tokens in each request's last page *after* the append.
    kv_layout : {"NHD", "HND"}
    slot_mapping : int64 or int32 array [nnz], optional
        ``page * page_size + offset`` of each row; -1 for rows that are written nowhere. In place of
        `batch_indices`, `positions`, `kv_indices`, `kv_indptr` and `kv_last_page_len`.
    k_scale, v_scale : float, array or tuple
        A number: the rows are divided by it before they are rounded to the type of the cache. An
        array, written: the rows become codes with a scale of every token and head (and group), in
        the shapes, types and formulas of docs/kv-quantization.md. A tuple: such an array, and a
        number that rows are divided by before. Give the same to ``run``.
    kv_dtype : data type or tuple of two, optional
        "int4" or "nvfp4", of K or V in uint8. None: the cache says it.

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

    The same by slots.

    >>> again = np.zeros_like(cache)
    >>> append_paged_kv_cache(
    ...     new, new, paged_kv_cache=again, slot_mapping=np.array([2 * 4 + 3, 0 * 4 + 0])
    ... )
    >>> bool((again == cache).all())
    True
    """
    check_name("kv_layout", kv_layout, ("NHD", "HND"))
    table = batch_indices, kv_indices, kv_indptr, kv_last_page_len
    places = _places(slot_mapping, table, positions=positions)
    call = Call(append_key, "append_key")
    *numbers, scales = take_scales(call, k_scale, v_scale, kv_dtype)
    if call.operators is not None:
        call.operators.append_paged_kv_cache(
            append_key, append_value, paged_kv_cache, positions, places, kv_layout, *numbers
        )
        return
    k_cache, v_cache = _export_cache(call, paged_kv_cache)
    append_exported(
        call.export(append_key, "append_key"),
        call.export(append_value, "append_value"),
        k_cache,
        v_cache,
        None if slot_mapping is not None else call.values(positions, "positions"),
        _export_places(call, places),
        kv_layout,
        *numbers,
        scales,
        call.stream,
    )
    call.done()


def append_exported(*arguments: Any) -> None:
    """Call the core with exported arrays and checked numbers; errors have the caller's names."""
    try:
        _core.append_paged_kv_cache(*arguments)
    except FlashbsrError as error:
        raise error.respell(_NAMES) from None


def rope_append_paged_kv_cache(
    q: Array,
    append_key: Array,
    append_value: Array,
    batch_indices: Array = None,
    positions: Array = None,
    paged_kv_cache: Array | tuple[Array, Array] = None,
    kv_indices: Array = None,
    kv_indptr: Array = None,
    kv_last_page_len: Array = None,
    kv_layout: str = "NHD",
    *,
    slot_mapping: Array = None,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    llama31: tuple[float, float, float] | None = None,
    cos_sin_cache: Array = None,
    k_scale: float | Array | tuple[Array, float] = 1.0,
    v_scale: float | Array | tuple[Array, float] = 1.0,
    kv_dtype: Any = None,
    q_out: Array = None,
    q_scale: float = 1.0,
    hadamard: bool = False,
) -> Array:
    """Rotate queries and new keys, and write keys and values into their slots, in one pass.

    The same as `apply_rope_pos_ids` followed by `append_paged_kv_cache`, except that a key is
    rounded once, to the type of the cache.

    Parameters
    ----------
    q : array [nnz, num_qo_heads, head_dim]
        float32, float16 or bfloat16. Any strides but the last.
    append_key : array [nnz, num_kv_heads, head_dim]
        Likewise; not rotated yet.
    append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, \
    kv_last_page_len, kv_layout, slot_mapping, k_scale, v_scale, kv_dtype
        As for `append_paged_kv_cache`. `positions` give the angles as well, so they are there with
        `slot_mapping` too. A query whose slot is -1 is rotated all the same: its key may belong to
        another rank.
    rotary_dim, interleave, rope_scale, rope_theta
        As for `apply_rope`.
    llama31 : tuple (low_freq_factor, high_freq_factor, old_context_len), optional
        Frequencies of Llama 3.1, as for `apply_llama31_rope`.
    cos_sin_cache : float32 array [max_position, rotary_dim], optional
        A table of cosines and sines, as for `apply_rope_with_cos_sin_cache`, in place of
        frequencies.
    q_out : array [nnz, num_qo_heads, head_dim], optional
        Written and returned; may be `q`. Of its type, float8_e4m3fn or float8_e5m2. Not a JAX
        array.
    q_scale : float
        Positive. Queries are divided by it before they are rounded, once, to the type of `q_out`.
    hadamard : bool
        Multiply every head of the queries and keys by the matrix of `hadamard` behind its rotation,
        before it is rounded: products stay as they are, and keys fit scales of few bits better. For
        queries and keys of the same head dim, a power of two, or 12 or 20 times one, on a GPU up to
        512.

    Returns
    -------
    array [nnz, num_qo_heads, head_dim]
        Rotated queries: `q_out`, or of the kind and type of `q`. Rows of padding are not rotated.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError, FlashbsrError
    UnsupportedError
        An immutable cache; a head dim without a Hadamard matrix, or one in a compiled program.

    Examples
    --------
    >>> import numpy as np
    >>> cache = np.zeros((1, 2, 4, 1, 8), np.float32)
    >>> x = np.ones((2, 1, 8), np.float32)
    >>> q = rope_append_paged_kv_cache(
    ...     x, x, x, np.array([0, 0], np.int32), np.array([0, 1], np.int32), cache,
    ...     kv_indices=np.array([0], np.int32), kv_indptr=np.array([0, 1], np.int32),
    ...     kv_last_page_len=np.array([2], np.int32),
    ... )
    >>> bool((q == cache[0, 0, :2]).all()), cache[0, 1, :2, 0, 0].tolist()
    (True, [1.0, 1.0])
    """
    check_name("kv_layout", kv_layout, ("NHD", "HND"))
    call = Call(q, "q")
    a = adapter_for(q, "q")
    shape = tuple(q.shape)
    if len(shape) != 3:
        raise ShapeError("q", f"shape {shape}", "[nnz, num_qo_heads, head_dim]")
    if cos_sin_cache is None:
        rotary_dim = check_rotary_dim(rotary_dim, shape[2])
    else:
        check_table(cos_sin_cache, shape[2], "head_dim")
        if rotary_dim is not None or llama31 is not None:
            raise FlashbsrError(
                "cos_sin_cache",
                "a table and " + ("rotary_dim" if rotary_dim is not None else "llama31"),
                "one or the other: the table has the angles and their number",
            )
        rotary_dim = 0
    scale, theta = check_frequencies(rope_scale, rope_theta)
    if llama31 is not None:
        llama31 = check_llama31(llama31)
    if positions is None:
        raise FlashbsrError("positions", "None", "an array: RoPE takes the angles from it")
    table = batch_indices, kv_indices, kv_indptr, kv_last_page_len
    places = _places(slot_mapping, table, positions=positions if slot_mapping is None else None)
    *numbers, scales = take_scales(call, k_scale, v_scale, kv_dtype)
    q_scale = check_float("q_scale", q_scale)
    if call.operators is not None:
        if q_scale != 1:
            raise UnsupportedError("q_scale", q_scale, "1.0 in a compiled program")
        if hadamard:
            raise UnsupportedError("hadamard", hadamard, "False in a compiled program")
        return call.operators.rope_append_paged_kv_cache(
            q, append_key, append_value, paged_kv_cache, positions, places, kv_layout, *numbers,
            rotary_dim, bool(interleave), scale, theta, llama31, cos_sin_cache, q_out,
        )  # fmt: skip
    out = a.empty(q, shape, float_dtype(q, "q")) if q_out is None else q_out
    out_adapter = a if q_out is None else adapter_for(q_out, "q_out")
    k_cache, v_cache = _export_cache(call, paged_kv_cache)
    rope_append_exported(
        a.export(q, False, "q"),
        out_adapter.export(out, True, "q_out"),
        call.export(append_key, "append_key"),
        call.export(append_value, "append_value"),
        k_cache,
        v_cache,
        call.values(positions, "positions"),
        _export_places(call, places),
        kv_layout,
        *numbers,
        scales,
        rotary_dim,
        bool(interleave),
        scale,
        theta,
        llama31,
        None if cos_sin_cache is None else call.export(cos_sin_cache, "cos_sin_cache"),
        call.stream,
        q_scale,
        bool(hadamard),
    )
    call.done()
    return out_adapter.finish(out)


def rope_append_exported(*arguments: Any) -> None:
    """Call the core, likewise."""
    try:
        _core.rope_append_paged_kv_cache(*arguments)
    except FlashbsrError as error:
        raise error.respell(_NAMES) from None


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
    call = Call(append_indptr, "append_indptr")
    if call.operators is not None:
        made: tuple[Any, Any] = call.operators.get_batch_indices_positions(
            append_indptr, seq_lens, nnz, (batch_indices, positions)
        )
        return made
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
        call.values(append_indptr, "append_indptr"),
        call.values(seq_lens, "seq_lens"),
        outputs[0][2],
        outputs[1][2],
        call.stream,
    )
    call.done()
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
    call = Call(kv_indptr, "kv_indptr")
    if call.operators is not None:
        return call.operators.get_seq_lens(kv_indptr, kv_last_page_len, page_size)
    a = adapter_for(kv_indptr, "kv_indptr")
    adapter_for(kv_last_page_len, "kv_last_page_len")  # before its shape is read
    out = a.empty(kv_indptr, tuple(kv_last_page_len.shape), "int32")
    _core.get_seq_lens(
        call.values(kv_indptr, "kv_indptr"),
        call.values(kv_last_page_len, "kv_last_page_len"),
        check_int("page_size", page_size, 1),
        a.export(out, True),
        call.stream,
    )
    call.done()
    return a.finish(out)
