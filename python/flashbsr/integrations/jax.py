# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""flashbsr inside ``jax.jit``, ``lax.scan`` and ``jax.shard_map``, on the CPU.

Each function is one node of the program. When XLA reaches it, XLA's own buffers go, without a copy,
to the function of `flashbsr` that has the same name, under Python's lock. There is no derivative
and no rule for ``vmap``: a batch of requests is what a plan describes already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental.buffer_callback import buffer_callback

import flashbsr

from ..engine.live import behind
from ..errors import ShapeError, UnsupportedError

__all__ = ["append_paged_kv_cache", "apply_rope_pos_ids", "handle", "merge_state", "run"]


def handle(attention: flashbsr.Attention) -> npt.NDArray[np.int32]:
    """Name an attention by a number that is an operand: another one does not compile again.

    Parameters
    ----------
    attention : Attention
        Programs follow its later plans, so that the caller keeps it alive and does not plan it
        again until those that run have ended (``jax.block_until_ready``). The number keeps nothing
        alive and is never given twice.

    Returns
    -------
    int32 array, shape ()
    """
    return np.asarray(attention._number, np.int32)


def _view(buffer: Any) -> npt.NDArray[Any]:
    if buffer.__dlpack_device__()[0] != 1:  # kDLCPU
        raise UnsupportedError(
            "device", "a GPU's program", "one for the CPU; on a GPU call flashbsr outside jit"
        )
    return np.asarray(buffer)


def _node(
    call: Callable[..., None], results: Any, *arrays: Any, aliases: dict[int, int] | None = None
) -> Any:
    """Put `call(results, *arrays)` of NumPy views into the program."""

    def on_buffers(_context: Any, out: Any, *buffers: Any) -> None:
        call([_view(x) for x in out], *[_view(x) for x in buffers])

    return buffer_callback(on_buffers, results, input_output_aliases=aliases)(*arrays)


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def run(
    handle: Any,
    q: Any,
    kv: Any,
    *,
    head_dim_vo: int | None = None,
    o_dtype: Any = None,
    return_lse: bool = False,
    **arrays: Any,
) -> Any:
    """Compute a planned attention, as `Attention.run`.

    Parameters
    ----------
    handle : int32 array, shape ()
        What `handle` gave; an operand of the program.
    q : array, shape (num_q_tokens, num_qo_heads, head_dim_qk)
    kv : array or tuple of arrays
        As in `Attention.run`.
    head_dim_vo : int, optional
        Last dimension of the output. Default: that of q.
    o_dtype : dtype, optional
        Type of the output, the task's. Default: that of q.
    return_lse : bool
        Also return the LSE.
    **arrays
        Arguments of `Attention.run` that are arrays: ``kv_lens``, ``block_tables``, ``qo_indptr``,
        ``sinks``, scales and what the variant declares.

    Returns
    -------
    out, or (out, lse)

    Raises
    ------
    ShapeError
        q has not three dimensions.
    jax.errors.JaxRuntimeError
        When the program runs; it ends with the error of flashbsr, a `PlanError` where the handle's
        attention is gone.
    """
    if np.ndim(q) != 3:
        raise ShapeError("q", f"shape {np.shape(q)}", "(num_q_tokens, num_qo_heads, head_dim_qk)")
    stacked = not isinstance(kv, (tuple, list))
    caches = [kv] if stacked else list(kv)
    given = {name: x for name, x in arrays.items() if x is not None}
    results = [jax.ShapeDtypeStruct((*q.shape[:2], head_dim_vo or q.shape[2]), o_dtype or q.dtype)]
    if return_lse:
        results.append(jax.ShapeDtypeStruct(q.shape[:2], np.float32))

    def call(out: list[Any], number: Any, q: Any, *rest: Any) -> None:
        attention = behind(int(number))
        cache = rest[0] if stacked else rest[: len(caches)]
        named = dict(zip(given, rest[len(caches) :], strict=True))
        attention.run(q, cache, out=out[0], lse=out[1] if return_lse else None, **named)

    found = _node(call, results, handle, q, *caches, *given.values())
    return tuple(found) if return_lse else found[0]


def append_paged_kv_cache(
    append_key: Any, append_value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any
) -> tuple[Any, Any]:
    """Write tokens to the slots of a paged cache, as `flashbsr.append_paged_kv_cache`.

    Parameters
    ----------
    append_key, append_value : array, shape (tokens, num_kv_heads, head_dim)
    k_cache, v_cache : array, shape (pages, page_size, num_kv_heads, head_dim)
        Written in place where the program owns them (donated, or carried by a scan); otherwise XLA
        copies them first.
    slot_mapping : int32 or int64 array, shape (tokens,)
        ``page * page_size + offset``; -1 for tokens that are written nowhere.

    Returns
    -------
    k_cache, v_cache
    """

    def call(out: list[Any], k: Any, v: Any, _k: Any, _v: Any, slots: Any) -> None:
        flashbsr.append_paged_kv_cache(k, v, paged_kv_cache=tuple(out), slot_mapping=slots)

    results = [_like(k_cache), _like(v_cache)]
    arrays = (append_key, append_value, k_cache, v_cache, slot_mapping)
    return tuple(_node(call, results, *arrays, aliases={2: 0, 3: 1}))


def apply_rope_pos_ids(q: Any, k: Any, pos_ids: Any, **options: Any) -> tuple[Any, Any]:
    """Rotate q and k, as `flashbsr.apply_rope_pos_ids`, whose ``options`` are Python values.

    Parameters
    ----------
    q, k : array, shape (tokens, heads, head_dim)
    pos_ids : int32 or int64 array, shape (tokens,)

    Returns
    -------
    q, k
    """

    def call(out: list[Any], _q: Any, _k: Any, positions: Any) -> None:
        flashbsr.apply_rope_pos_ids_inplace(out[0], out[1], positions, **options)

    return tuple(_node(call, [_like(q), _like(k)], q, k, pos_ids, aliases={0: 0, 1: 1}))


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[Any, Any]:
    """Merge two attention states, as `flashbsr.merge_state`.

    Parameters
    ----------
    v_a, v_b : array, shape (tokens, heads, head_dim)
    s_a, s_b : float32 array, shape (tokens, heads)

    Returns
    -------
    v, s
    """

    def call(out: list[Any], *states: Any) -> None:
        for to, merged in zip(out, flashbsr.merge_state(*states), strict=True):
            to[...] = merged

    return tuple(_node(call, [_like(v_a), _like(s_a)], v_a, s_a, v_b, s_b))
