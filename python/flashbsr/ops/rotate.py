# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What the functions of `flashbsr.rope` share: checks, positions, allocation, the calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import flashbsr._core as _core

from .._check import check_float, check_int
from ..arrays import adapter_for, float_dtype, to_indices
from ..arrays.types import Array
from ..errors import FlashbsrError, IndexRangeError, ShapeError
from .call import Call, checking

__all__ = [
    "check_frequencies", "check_rotary_dim", "check_table", "ragged_positions", "rotate",
    "rotate_by_table",
]  # fmt: skip


def check_rotary_dim(rotary_dim: int | None, head_dim: int) -> int:
    """Default of the rotary dims, and whether they are an even part of the head."""
    rotary_dim = check_int("rotary_dim", head_dim if rotary_dim is None else rotary_dim, 2)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise FlashbsrError("rotary_dim", rotary_dim, f"an even number up to head_dim={head_dim}")
    return rotary_dim


def check_frequencies(rope_scale: float, rope_theta: float) -> tuple[float, float]:
    """Both positive."""
    scale, theta = check_float("rope_scale", rope_scale), check_float("rope_theta", rope_theta)
    for name, value in (("rope_scale", scale), ("rope_theta", theta)):
        if value <= 0:
            raise FlashbsrError(name, value, "a positive number")
    return scale, theta


def check_table(cos_sin_cache: Array, head_dim: int, name: str) -> None:
    """Whether a table of cosines and sines fits heads of `head_dim`, an argument called `name`."""
    adapter_for(cos_sin_cache, "cos_sin_cache")
    shape = tuple(cos_sin_cache.shape)
    if len(shape) != 2 or shape[1] % 2 or not 2 <= shape[1] <= head_dim:
        raise ShapeError(
            "cos_sin_cache",
            f"shape {shape}",
            f"[max_position, rotary_dim], rotary_dim even and at most {name}={head_dim}",
        )


@dataclass(frozen=True)
class RaggedPositions:
    """Positions that run on from an offset in every request; worked out by the kernel."""

    indptr: Array
    offsets: Array


def ragged_positions(
    q: Array, indptr: Array, offsets: Array
) -> npt.NDArray[np.int64] | RaggedPositions:
    """Position of every row: its place within the request, plus the request's offset."""
    call = Call(q, "q")
    if call.operators is not None or (call.on_device and not checking()):
        return RaggedPositions(indptr, offsets)
    bounds, starts = to_indices(indptr, "indptr"), to_indices(offsets, "offsets")
    if not bounds.size:
        raise ShapeError("indptr", "no elements", "[B + 1]")
    if starts.shape != (bounds.size - 1,):
        raise ShapeError("offsets", f"shape {starts.shape}", f"({bounds.size - 1},): one a request")
    adapter_for(q, "q")
    nnz = q.shape[0] if q.ndim else 0
    lengths = bounds[1:] - bounds[:-1]
    if bounds[0] != 0 or bounds[-1] != nnz or (lengths < 0).any():
        raise IndexRangeError(
            "indptr",
            f"from {bounds[0]} to {bounds[-1]}",
            f"ascending from 0 to the {nnz} rows of q",
        )
    if call.on_device:
        return RaggedPositions(indptr, offsets)
    positions: npt.NDArray[np.int64] = np.arange(nnz) + np.repeat(starts - bounds[:-1], lengths)
    return positions


def rotate(
    q: Array,
    k: Array,
    positions: Array | RaggedPositions,
    rotary_dim: int | None,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    llama31: tuple[float, float, float] | None,
    in_place: bool,
) -> tuple[Array, Array]:
    """Rotate by computed frequencies, into new arrays or in place."""
    a, b = adapter_for(q, "q"), adapter_for(k, "k")
    shape = tuple(q.shape)
    if len(shape) != 3:
        raise ShapeError("q", f"shape {shape}", "[nnz, num_qo_heads, head_dim]")
    rotary_dim = check_rotary_dim(rotary_dim, shape[2])
    scale, theta = check_frequencies(rope_scale, rope_theta)
    call = Call(q, "q")
    if call.operators is not None:
        made: tuple[Any, Any] = call.operators.rotate(
            q, k, positions, (rotary_dim, bool(interleave), scale, theta, llama31), in_place
        )
        return made
    per_token, indptr, offsets = None, None, None
    if isinstance(positions, RaggedPositions):
        indptr = call.export(positions.indptr, "indptr")
        offsets = call.export(positions.offsets, "offsets")
    else:
        per_token = call.values(positions, "pos_ids")
    q_out = q if in_place else a.empty(q, shape, float_dtype(q, "q"))
    k_out = k if in_place else b.empty(k, tuple(k.shape), float_dtype(k, "k"))
    rotate_exported(
        a.export(q, False, "q"),
        call.export(k, "k"),
        a.export(q_out, True, "q"),
        b.export(k_out, True, "k"),
        per_token,
        indptr,
        offsets,
        rotary_dim,
        bool(interleave),
        scale,
        theta,
        llama31,
        None,
        call.stream,
    )
    call.done()
    return (q, k) if in_place else (a.finish(q_out, q), b.finish(k_out, k))


def rotate_exported(*arguments: Any) -> None:
    """Call the core with exported arrays and checked numbers; errors have the caller's names."""
    try:
        _core.apply_rope(*arguments)
    except FlashbsrError as error:
        raise error.respell({"positions": "pos_ids", "q_out": "q", "k_out": "k"}) from None


def _heads(x: Array, name: str, head_size: int) -> tuple[Any, tuple[int, int, int]]:
    """View [nnz, heads * head_size] as [nnz, heads, head_size]. Splitting never copies."""
    shape = tuple(x.shape)
    if len(shape) != 2 or shape[1] % head_size:
        raise ShapeError(name, f"shape {shape}", f"[nnz, num_heads * {head_size}]")
    split = (shape[0], shape[1] // head_size, head_size)
    adapter = adapter_for(x, name)
    if adapter.name == "jax" and adapter.device(x) is None:
        adapter.export(x, False, name)  # refuses what is not concrete
        return adapter.to_numpy(x).reshape(split), split  # JAX's own reshape may copy
    return x.reshape(split), split


def rotate_by_table(
    positions: Array,
    query: Array,
    key: Array,
    head_size: int,
    cos_sin_cache: Array,
    is_neox: bool,
    in_place: bool,
) -> tuple[Array, Array]:
    """Rotate by a table, into new arrays or in place."""
    head_size = check_int("head_size", head_size, 1)
    check_table(cos_sin_cache, head_size, "head_size")
    call = Call(query, "query")
    if call.operators is not None:
        made: tuple[Any, Any] = call.operators.rotate_by_table(
            positions, query, key, head_size, cos_sin_cache, is_neox, in_place
        )
        return made
    results, exported = [], []
    for name, x in (("query", query), ("key", key)):
        a = adapter_for(x, name)
        if in_place:
            a.export(x, True, name)  # refuses arrays that cannot be written
        view, split = _heads(x, name, head_size)
        out = view if in_place else a.empty(x, split, float_dtype(x, name))
        exported.append((call.export(view, name), a.export(out, True, name)))
        results.append((a, out, tuple(x.shape)))
    rotate_by_table_exported(
        exported[0][0],
        exported[1][0],
        exported[0][1],
        exported[1][1],
        call.values(positions, "positions"),
        call.export(cos_sin_cache, "cos_sin_cache"),
        is_neox,
        call.stream,
    )
    call.done()
    if in_place:
        return query, key
    q_out, k_out = (
        a.finish(out, x).reshape(shape)
        for x, (a, out, shape) in zip((query, key), results, strict=True)
    )
    return q_out, k_out


def rotate_by_table_exported(
    query: Any, key: Any, query_out: Any, key_out: Any, positions: Any, cos_sin_cache: Any,
    is_neox: bool, stream: int,
) -> None:  # fmt: skip
    """Call the core, likewise, with heads apart."""
    try:
        _core.apply_rope(
            query, key, query_out, key_out, positions, None, None, 0, not is_neox, 1.0, 1e4, None,
            cos_sin_cache, stream,
        )  # fmt: skip
    except FlashbsrError as error:
        names = {"q": "query", "k": "key", "q_out": "query", "k_out": "key"}
        raise error.respell(names) from None
