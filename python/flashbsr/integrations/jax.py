# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""flashbsr inside ``jax.jit``, ``lax.scan`` and ``jax.shard_map``.

Each function is one node of the program, a handler of XLA's foreign function interface: XLA calls
the compiled core with its own buffers and, on a GPU, its stream. There is no Python in between, and
no derivative. ``vmap`` runs a node once for every element; a batch of requests is what a plan
describes.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import jax
import numpy as np
import numpy.typing as npt

import flashbsr
import flashbsr._core as _core

from .._check import check_name, check_one_array
from ..arrays.dtypes import output_dtype
from ..errors import ShapeError, UnsupportedError

__all__ = [
    "append_paged_kv_cache", "apply_llama31_rope_pos_ids", "apply_rope_pos_ids", "handle",
    "merge_state", "run",
]  # fmt: skip

for _name, _handlers in _core.xla_targets().items():
    for _platform, _handler in zip(("cpu", "CUDA"), _handlers, strict=True):
        jax.ffi.register_ffi_target(_name, _handler, platform=_platform)

# Arguments of Attention.run that are its own; others are the variant's.
_OWN = {
    "kv_lens", "block_tables", "kv_indptr", "kv_indices", "qo_indptr", "q_positions", "q_scale",
    "k_scale", "v_scale", "sinks", "alibi_slopes",
}  # fmt: skip


# Shape and type: a tuple is hashed in a tenth of the time of JAX's own.
Result: TypeAlias = tuple[tuple[int, ...], Any]


def handle(attention: flashbsr.Attention) -> npt.NDArray[np.int32]:
    """Name an attention by a number that is an operand: another one does not compile again.

    On the CPU only: on a GPU operands are where the host does not see them, and the `Attention`
    itself goes to `run`.

    Parameters
    ----------
    attention : Attention
        Programs follow its later plans, so that the caller keeps it alive and does not plan it
        again until those that run have ended (``jax.block_until_ready``). The number keeps nothing
        alive and is never given twice.

    Returns
    -------
    int32 array, shape ()

    Raises
    ------
    UnsupportedError
        Its variant has captured values.
    """
    return np.asarray(_number(attention), np.int32)


def _number(attention: flashbsr.Attention) -> int:
    if attention._captured:
        raise UnsupportedError(
            ", ".join(attention._captured),
            "captured by the variant",
            "arguments of the variant, given to run: a program has its arrays as operands",
        )
    attention._engine.enter(attention._number, attention._how)
    return attention._number


# Outside of a program this is one of its own, which JAX's compiled dispatch calls.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _call(
    target: str,
    results: tuple[Result, ...],
    aliases: tuple[tuple[int, int], ...],
    attributes: tuple[tuple[str, Any], ...],
    *operands: Any,
) -> Any:
    call = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(*result) for result in results],
        input_output_aliases=dict(aliases),
        vmap_method="sequential",
    )
    return call(*operands, **dict(attributes))


def _node(
    target: str,
    results: tuple[Result, ...],
    attributes: dict[str, Any],
    operands: dict[str, Any],
    aliases: tuple[tuple[int, int], ...] = (),
) -> tuple[Any, ...]:
    named = (("names", ",".join(operands)), *attributes.items())
    return tuple(_call(target, results, aliases, named, *operands.values()))


def _like(x: Any) -> Result:
    return np.shape(x), x.dtype


@functools.cache
def _output_dtype(q: np.dtype[Any]) -> np.dtype[Any]:
    found: np.dtype[Any] = jax.numpy.dtype(output_dtype(q.name))
    return found


def run(
    attention: Any,
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
    attention : Attention, tuple of them, or int32 array of shape ()
        The attention, which the program then has for good and follows to its later plans; keep it
        alive as long. A program of several devices has one for each, in the order of the devices.
        Or what `handle` gave, an operand of a program for the CPU.
    q : array, shape (num_q_tokens, num_qo_heads, head_dim_qk)
    kv : array or tuple of arrays
        As in `Attention.run`.
    head_dim_vo : int, optional
        Last dimension of the output. Default: the attention's; with a handle that of q.
    o_dtype : dtype, optional
        Type of the output. Default: the attention's; with a handle that of q.
    return_lse : bool
        Also return the LSE.
    **arrays
        Further arguments of `Attention.run`, and what the variant declares. Arrays (``kv_lens``,
        ``block_tables``, ``qo_indptr``, ``q_positions``, ``sinks``, scales) are operands; numbers
        become part of the program.

    Returns
    -------
    out, or (out, lse)

    Raises
    ------
    ShapeError
        q has not three dimensions.
    UnsupportedError
        The attention's variant has captured values.
    jax.errors.JaxRuntimeError
        When the program runs; it ends with the error of flashbsr, a `PlanError` where the handle's
        attention is gone.
    """
    if np.ndim(q) != 3:
        raise ShapeError("q", f"shape {np.shape(q)}", "(num_q_tokens, num_qo_heads, head_dim_qk)")
    attributes: dict[str, Any] = {}
    operands: dict[str, Any] = {}
    known = (attention,) if isinstance(attention, flashbsr.Attention) else attention
    if isinstance(known, (tuple, list)):
        attributes["attentions"] = np.int32(len(known))
        attributes["numbers"] = ",".join(str(_number(x)) for x in known)
        head_dim_vo = head_dim_vo or known[0]._head_dim_vo
        o_dtype = o_dtype or known[0].task.o_dtype
        for x in known:
            check_one_array("o_dtype", x.task.o_dtype, "another type, or Attention.run outside")
    else:
        operands["handle"] = attention
    operands["q"] = q
    operands |= dict(zip("kv", kv, strict=True)) if isinstance(kv, (tuple, list)) else {"kv": kv}
    for name, x in arrays.items():
        if isinstance(x, (int, float, np.number)):
            attributes[name] = np.float64(x)
        elif x is not None:
            operands[name] = x
    extras = [name for name in arrays if name not in _OWN]
    if extras:
        attributes["extras"] = ",".join(extras)
    shape = np.shape(q)
    results: list[Result] = [
        ((*shape[:2], head_dim_vo or shape[2]), o_dtype or _output_dtype(q.dtype))
    ]
    if return_lse:
        results.append((shape[:2], np.float32))
    found = _node("flashbsr_run", tuple(results), attributes, operands)
    return found if return_lse else found[0]


def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    kv_layout: str = "NHD",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
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
    kv_layout : {"NHD", "HND"}
        HND: caches of shape (pages, num_kv_heads, page_size, head_dim).
    k_scale, v_scale : float
        Float8 caches hold keys and values divided by these.

    Returns
    -------
    k_cache, v_cache
    """
    check_name("kv_layout", kv_layout, ("NHD", "HND"))
    operands = {
        "append_key": append_key,
        "append_value": append_value,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": slot_mapping,
    }
    attributes = {
        "hnd": np.int32(kv_layout == "HND"),
        "k_scale": np.float64(k_scale),
        "v_scale": np.float64(v_scale),
    }
    results = _like(k_cache), _like(v_cache)
    caches = _node("flashbsr_append", results, attributes, operands, aliases=((2, 0), (3, 1)))
    return caches[0], caches[1]


def apply_rope_pos_ids(
    q: Any,
    k: Any,
    pos_ids: Any,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Any, Any]:
    """Rotate q and k, as `flashbsr.apply_rope_pos_ids`.

    Parameters
    ----------
    q, k : array, shape (tokens, heads, head_dim)
    pos_ids : int32 or int64 array, shape (tokens,)
    rotary_dim, interleave, rope_scale, rope_theta
        Numbers, which become part of the program.

    Returns
    -------
    q, k
    """
    return _rotate(
        q, k, pos_ids, rotary_dim, interleave, rope_scale=rope_scale, rope_theta=rope_theta
    )


def apply_llama31_rope_pos_ids(
    q: Any,
    k: Any,
    pos_ids: Any,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[Any, Any]:
    """Rotate q and k, as `flashbsr.apply_llama31_rope_pos_ids`.

    Parameters
    ----------
    q, k : array, shape (tokens, heads, head_dim)
    pos_ids : int32 or int64 array, shape (tokens,)
    rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor, high_freq_factor
    old_context_len
        Numbers, which become part of the program.

    Returns
    -------
    q, k
    """
    return _rotate(
        q, k, pos_ids, rotary_dim, interleave, rope_scale=rope_scale, rope_theta=rope_theta,
        low_freq_factor=low_freq_factor, high_freq_factor=high_freq_factor,
        old_context_len=old_context_len,
    )  # fmt: skip


def _rotate(
    q: Any, k: Any, pos_ids: Any, rotary_dim: int | None, interleave: bool, **numbers: float
) -> tuple[Any, Any]:
    attributes = {
        "rotary_dim": np.int32(np.shape(q)[-1] if rotary_dim is None else rotary_dim),
        "interleave": np.int32(interleave),
        **{name: np.float64(x) for name, x in numbers.items()},
    }
    operands = {"q": q, "k": k, "pos_ids": pos_ids}
    results = _like(q), _like(k)
    rotated = _node("flashbsr_rope", results, attributes, operands)
    return rotated[0], rotated[1]


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any, *, lse_base: str = "e") -> tuple[Any, Any]:
    """Merge two attention states, as `flashbsr.merge_state`.

    Parameters
    ----------
    v_a, v_b : array, shape (tokens, heads, head_dim)
    s_a, s_b : float32 array, shape (tokens, heads)
    lse_base : {"e", "2"}
        Base of the LSE.

    Returns
    -------
    v, s
    """
    check_name("lse_base", lse_base, ("e", "2"))
    operands = {"v_a": v_a, "s_a": s_a, "v_b": v_b, "s_b": s_b}
    attributes = {"base2": np.int32(lse_base == "2")}
    merged = _node("flashbsr_merge", (_like(v_a), _like(s_a)), attributes, operands)
    return merged[0], merged[1]
