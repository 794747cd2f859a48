# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Attention from its formulas, in NumPy.

One function computes one request, head by head, with no blocking and no online softmax; the batch
front-ends gather each request's rows and call it. It runs in two precisions:

* exact: float64 throughout, what the engine is compared with;
* working: the same statements in float32, with the rotated q and k, the probabilities P and the
  output rounded to a storage type. Its distance from the exact answer is the error that an honest
  kernel in that type makes, and sets the tolerance (``compare.py``).

Nothing here imports flashbsr.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


@dataclass(frozen=True)
class Variant:
    """What is computed; the fields of ``flashbsr.AttentionSpec``."""

    causal: bool = False
    window_left: int = -1
    sm_scale: float | None = None
    logits_soft_cap: float | None = None
    pos_encoding_mode: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    rope_llama31: tuple[float, float, float] | None = None
    rope_yarn: Any = None  # with the fields of flashbsr.YarnScaling
    rope_frequencies: tuple[float, ...] | None = None
    rotary_dim: int | None = None
    rope_interleave: bool = False
    activation: str = "softmax"
    sigmoid_bias: float = 0.0


@dataclass(frozen=True)
class Hooks:
    """What a user's variant adds, on arrays of one request and, but for rows, of one head.

    ``score(x, b, h, q_idx, kv_idx)`` and ``mask(b, h, q_idx, kv_idx)`` get q_idx as a column and
    kv_idx as a row; ``activation(x)`` replaces the softmax. ``query``, ``key``, ``value`` and
    ``output`` change rows: ``f(rows, position)``, with rows of ``(tokens, heads, dim)``.
    """

    score: Callable[..., np.ndarray] | None = None
    mask: Callable[..., np.ndarray] | None = None
    activation: Callable[[np.ndarray], np.ndarray] | None = None
    query: Callable[..., np.ndarray] | None = None
    key: Callable[..., np.ndarray] | None = None
    value: Callable[..., np.ndarray] | None = None
    output: Callable[..., np.ndarray] | None = None


NO_HOOKS = Hooks()


@dataclass
class State:
    """Attention of some query rows, and how sensitive it is to rounding.

    Attributes
    ----------
    out : array ``(rows, heads, head_dim_vo)``
    lse : array ``(rows, heads)``, natural log; -inf where nothing is visible.
    noise : array like ``out``
        ``sqrt(sum_j (p_j v_j)^2)``: the standard deviation of the output when every probability
        carries an independent relative error of one.
    sum_size : array like ``out``
        ``sqrt(n) sum_j |p_j v_j|`` over the n visible keys: times 2^-24, the error of adding the
        terms up in float32.
    logit_size : array like ``lse``
        Largest ``sum_d |q_d k_d|`` times the scale, plus the ALiBi term: the error of a float32
        logit is a few times 2^-24 of that.
    logit_noise : array like ``lse``
        Largest standard deviation of a logit when each of its factors carries an independent
        relative error of one. Zero unless q and k are rounded again, which RoPE does.
    """

    out: np.ndarray
    lse: np.ndarray
    noise: np.ndarray
    sum_size: np.ndarray
    logit_size: np.ndarray
    logit_noise: np.ndarray

    @staticmethod
    def concatenate(states: Sequence[State], num_heads: int, head_dim: int) -> State:
        """Stack requests; ``num_heads`` and ``head_dim`` give the shape of an empty batch."""
        empty, none = np.zeros((0, num_heads, head_dim)), np.zeros((0, num_heads))
        return State(
            np.concatenate([empty, *(s.out for s in states)]),
            np.concatenate([none, *(s.lse for s in states)]),
            np.concatenate([empty, *(s.noise for s in states)]),
            np.concatenate([empty, *(s.sum_size for s in states)]),
            np.concatenate([none, *(s.logit_size for s in states)]),
            np.concatenate([none, *(s.logit_noise for s in states)]),
        )


def rounded(x: np.ndarray, dtype: str | None) -> np.ndarray:
    """`x` rounded to `dtype` and brought back to its own type; None leaves it alone."""
    if dtype is None:
        return x
    with np.errstate(over="ignore"):
        return x.astype(DTYPES[dtype]).astype(x.dtype)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """The standard slopes (Press et al. 2022, and their rule for other than powers of two)."""

    def powers(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    below = 2 ** int(np.floor(np.log2(num_heads)))
    return np.array(powers(below) + powers(2 * below)[0::2][: num_heads - below])


def rope_frequencies(
    dim: int,
    theta: float = 1e4,
    scale: float = 1.0,
    llama31: tuple[float, float, float] | None = None,
) -> np.ndarray:
    """Radians per position of each of the ``dim / 2`` planes.

    ``theta^(-2i/dim) / scale``; with `llama31` = (low_freq_factor, high_freq_factor,
    old_context_len) only wavelengths that the old context did not cover are scaled, and those
    between the two factors in proportion (Llama 3.1).
    """
    freq = theta ** (-2.0 * np.arange(dim // 2) / dim)
    if llama31 is None:
        return freq / scale
    low, high, old_context = llama31
    turns = old_context * freq / (2.0 * np.pi)  # full turns within the old context
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 - keep) * freq / scale + keep * freq


def yarn_frequencies(dim: int, theta: float, scale: float, yarn: Any) -> np.ndarray:
    """YaRN as its authors' code has it: which planes are interpolated is linear in their number."""

    def plane(turns: float) -> float:  # that turns so often within the old context
        return dim * np.log(yarn.old_context_len / (turns * 2 * np.pi)) / (2 * np.log(theta))

    first, last = plane(yarn.beta_fast), plane(yarn.beta_slow)
    if yarn.truncate:
        first, last = np.floor(first), np.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    freq = rope_frequencies(dim, theta)
    for i in range(dim // 2):
        share = min(max((i - first) / (last - first), 0), 1)
        freq[i] *= 1 - share + share / scale
    return freq


def rotation(variant: Variant, dim: int) -> tuple[np.ndarray, float]:
    """Radians per position of each rotated plane of a head of `dim`, and the attention factor."""
    given, yarn = variant.rope_frequencies, variant.rope_yarn
    if given is not None:
        return np.array(given), 1.0
    rotary_dim, theta, scale = variant.rotary_dim or dim, variant.rope_theta, variant.rope_scale
    if yarn is None:
        return rope_frequencies(rotary_dim, theta, scale, variant.rope_llama31), 1.0
    factor = yarn.attention_factor
    if factor is None:
        factor = 0.1 * np.log(scale) + 1 if scale > 1 else 1.0
    return yarn_frequencies(rotary_dim, theta, scale, yarn), factor


def rotate(
    x: np.ndarray,
    positions: np.ndarray,
    freq: np.ndarray,
    *,
    interleave: bool = False,
    factor: float = 1.0,
    dtype: type = np.float64,
) -> np.ndarray:
    """RoPE of `x` ``(rows, heads, dim)`` on its first ``2 * len(freq)`` dimensions.

    Plane i is (x[i], x[i + n]) with n = len(freq) (NeoX), or (x[2i], x[2i + 1]) if `interleave`.
    What is rotated is multiplied by `factor`.
    """
    x = x.astype(dtype)
    angle = positions.astype(dtype)[:, None, None] * freq.astype(dtype)
    cos, sin = (f(angle) * dtype(factor) for f in (np.cos, np.sin))
    n = len(freq)
    first, second = (
        (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleave else (slice(0, n), slice(n, 2 * n))
    )
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def visible(variant: Variant, q_len: int, kv_len: int, mask: np.ndarray | None) -> np.ndarray:
    """Boolean ``(q_len, kv_len)``: may query token i see key j.

    Query token i sits at position ``kv_len - q_len + i``: causal hides later keys, the window hides
    keys more than ``window_left`` before it. A custom mask takes the place of causality.
    """
    position = kv_len - q_len + np.arange(q_len)[:, None]
    key = np.arange(kv_len)[None, :]
    allowed = np.ones((q_len, kv_len), bool)
    if variant.causal and mask is None:
        allowed &= key <= position
    if variant.window_left >= 0:
        allowed &= key >= position - variant.window_left
    if mask is not None:
        allowed &= mask.reshape(q_len, kv_len)
    return allowed


def per_head(scale: object, num_heads: int) -> np.ndarray:
    """A scale as one float64 number a head; None is 1."""
    value = np.float64(1.0) if scale is None else np.asarray(scale, np.float64)
    return np.broadcast_to(value, (num_heads,))


def product(rows: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Multiply ``[heads, q_len, n]`` by a matrix, all rows at once; NumPy takes them by heads."""
    heads, q_len, n = rows.shape
    return (rows.reshape(heads * q_len, n) @ by).reshape(heads, q_len, by.shape[1])


def head_blocks(num_qo_heads: int, group: int, size: int) -> list[slice]:
    """Query heads whose products are made together: of one KV head, 2^22 elements of `size`."""
    step = max(1, min(group, 2**22 // max(size, 1)))
    return [
        slice(h, min(h + step, first + group))
        for first in range(0, num_qo_heads, group)
        for h in range(first, first + group, step)
    ]


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    variant: Variant,
    *,
    mask: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    slopes: np.ndarray | None = None,
    q_scale: object = None,
    k_scale: object = None,
    v_scale: object = None,
    hooks: Hooks = NO_HOOKS,
    request: int = 0,
    work: str | None = None,
    out_dtype: str | None = None,
) -> State:
    """Attention of one request.

    Parameters
    ----------
    q : ``(q_len, num_qo_heads, head_dim_qk)``
    k, v : ``(kv_len, num_kv_heads, head_dim_qk)`` and ``(kv_len, num_kv_heads, head_dim_vo)``
        Query head h reads KV head ``h // (num_qo_heads // num_kv_heads)``.
    mask : boolean ``(q_len, kv_len)`` or flat, True keeps.
    sinks, slopes : ``(num_qo_heads,)``
    q_scale, k_scale, v_scale : number or one per head
    hooks, request
        A user's variant, and the number that it knows this request by.
    work, out_dtype : str, optional
        Storage types of P and of the output; None is the exact computation in float64.
    """
    real = np.float64 if work is None else np.float32
    (q_len, num_qo_heads, dim), (kv_len, num_kv_heads, dim_vo) = q.shape, v.shape
    group = num_qo_heads // num_kv_heads
    q, k, v = (np.asarray(x).astype(real) for x in (q, k, v))
    q_scale, k_scale, v_scale = (
        per_head(q_scale, num_qo_heads),
        per_head(k_scale, num_kv_heads),
        per_head(v_scale, num_kv_heads),
    )
    sm_scale = 1.0 / np.sqrt(dim) if variant.sm_scale is None else variant.sm_scale

    position, key = kv_len - q_len + np.arange(q_len), np.arange(kv_len)
    if hooks.query:
        q = rounded(hooks.query(q, position).astype(real), work)
    if hooks.key:
        k = rounded(hooks.key(k, key).astype(real), work)
    if hooks.value:
        v = rounded(hooks.value(v, key).astype(real), work)
    if variant.pos_encoding_mode == "ROPE_LLAMA":
        freq, factor = rotation(variant, dim)
        how: dict[str, Any] = {"interleave": variant.rope_interleave, "factor": factor}
        q = rounded(rotate(q, position, freq, dtype=real, **how), work)
        k = rounded(rotate(k, key, freq, dtype=real, **how), work)
    if variant.pos_encoding_mode == "ALIBI" and slopes is None:
        slopes = alibi_slopes(num_qo_heads)
    allowed = visible(variant, q_len, kv_len, mask)

    out = np.zeros((q_len, num_qo_heads, dim_vo), real)
    lse = np.full((q_len, num_qo_heads), -np.inf, real)
    noise, sum_size = np.zeros_like(out), np.zeros_like(out)
    logit_size, logit_noise = np.zeros_like(lse), np.zeros_like(lse)
    turned = variant.pos_encoding_mode == "ROPE_LLAMA" or hooks.query or hooks.key
    for heads in head_blocks(num_qo_heads, group, q_len * kv_len):
        kv_head = heads.start // group
        keys, values = k[:, kv_head], v[:, kv_head]
        rows = q[:, heads].swapaxes(0, 1)  # [heads, q_len, dim]
        logits, magnitudes = product(rows, keys.T), product(np.abs(rows), np.abs(keys).T)
        weights = np.empty(logits.shape, real)
        norms, roots = np.empty((2, *rows.shape[:2], 1), real)
        for i, h in enumerate(range(heads.start, heads.stop)):
            scale = real(sm_scale * q_scale[h] * k_scale[kv_head])
            x = logits[i] * scale
            if variant.logits_soft_cap:
                cap = real(variant.logits_soft_cap)
                x = cap * np.tanh(x / cap)
            if variant.pos_encoding_mode == "ALIBI":
                x = x + real(slopes[h]) * (key[None, :] - position[:, None]).astype(real)
            gain = np.ones_like(x)  # by which the score function passes errors of the logit on
            seen = allowed
            index = (request, h, np.arange(q_len)[:, None], key[None, :])
            if hooks.mask is not None:
                seen = allowed & np.broadcast_to(
                    np.asarray(hooks.mask(*index), bool), allowed.shape
                )
            if hooks.score is not None:
                step = real(2.0**-10)
                moved = np.broadcast_to(hooks.score(x + step, *index), x.shape)
                x = np.broadcast_to(hooks.score(x, *index), x.shape).astype(real)
                with np.errstate(invalid="ignore"):  # inf - inf
                    gain = np.nan_to_num(np.abs(moved - x) / step, nan=0.0)
            if hooks.activation is not None:
                p = np.where(seen, hooks.activation(x), real(0))
                total = np.ones(q_len, real)
                lse[:, h] = np.nan
            elif variant.activation == "sigmoid":
                with np.errstate(over="ignore"):
                    p = 1 / (1 + np.exp(-(x + real(variant.sigmoid_bias))))
                p = np.where(seen, p, real(0))
                total = np.ones(q_len, real)
                lse[:, h] = np.nan  # not defined
            else:
                x = np.where(seen, x, -np.inf)
                top = x.max(axis=1, initial=-np.inf)
                if sinks is not None:
                    top = np.maximum(top, real(sinks[h]))
                top = np.where(np.isfinite(top), top, real(0))
                p = np.exp(x - top[:, None])
                total = p.sum(axis=1)
                if sinks is not None:  # a key without a value: takes probability, gives nothing
                    total = total + np.exp(real(sinks[h]) - top)
                with np.errstate(divide="ignore"):
                    lse[:, h] = top + np.log(total)
            weights[i], norms[i, :, 0] = p, np.where(total > 0, total, real(1))
            roots[i] = np.sqrt(seen.sum(axis=1, keepdims=True))
            sizes = magnitudes[i] * abs(scale)
            if variant.pos_encoding_mode == "ALIBI":
                sizes = sizes + abs(slopes[h]) * np.abs(key[None, :] - position[:, None])
            if hooks.score is not None:
                sizes = sizes * np.maximum(gain, 1) + np.where(np.isfinite(x), np.abs(x), 0)
            sizes = np.where(seen, sizes, real(0))
            logit_size[:, h] = sizes.max(axis=1, initial=0)
            if turned:
                squares = np.where(seen, 2 * rows[i] ** 2 @ keys.T**2, real(0))
                logit_noise[:, h] = np.sqrt(squares.max(axis=1, initial=0)) * abs(scale)
        by = real(v_scale[kv_head]) / norms
        out[:, heads] = (product(rounded(weights, work), values) * by).swapaxes(0, 1)
        noise[:, heads] = (np.sqrt(product(weights**2, values**2)) * by).swapaxes(0, 1)
        sum_size[:, heads] = (roots * product(weights, np.abs(values)) * by).swapaxes(0, 1)
    if hooks.output:
        out = hooks.output(out, position)
    return State(rounded(out, out_dtype), lse, noise, sum_size, logit_size, logit_noise)


def gather_pages(cache: np.ndarray, pages: np.ndarray, kv_len: int, kv_layout: str) -> np.ndarray:
    """The first `kv_len` tokens of a request: ``(kv_len, heads, dim)``.

    `cache` is one of K and V, 4-D: ``(pages, page_size, heads, dim)`` NHD,
    ``(pages, heads, page_size, dim)`` HND.
    """
    owned = cache[pages]
    if kv_layout == "HND":
        owned = owned.swapaxes(1, 2)
    return owned.reshape(-1, *owned.shape[2:])[:kv_len]


def split_cache(cache: object) -> tuple[np.ndarray, np.ndarray]:
    """K and V of a stacked 5-D cache or a tuple."""
    if isinstance(cache, tuple):
        return cache
    return cache[:, 0], cache[:, 1]


def bsr_mask(
    indptr: np.ndarray,
    indices: np.ndarray,
    shape: tuple[int, int],
    block: tuple[int, int],
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """Dense boolean ``shape`` of a block-sparse row matrix; `mask` is ``(nnz, r, c)``."""
    (m, n), (r, c) = shape, block
    dense = np.zeros((-(-m // r) * r, -(-n // c) * c), bool)
    for row in range(len(indptr) - 1):
        for at in range(indptr[row], indptr[row + 1]):
            column = indices[at]
            dense[row * r : (row + 1) * r, column * c : (column + 1) * c] = (
                True if mask is None else mask[at]
            )
    return dense[:m, :n]


def merge(outs: Sequence[np.ndarray], lses: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The operator on states: ``LSE = log sum exp LSE_i``, ``O = sum exp(LSE_i - LSE) O_i``.

    `outs` ``(rows, heads, dim)``, `lses` ``(rows, heads)``, float64. States at -inf are empty:
    their O has no part, whatever it holds; all empty gives O = 0, LSE = -inf.
    """
    stacked = np.stack([np.asarray(x, np.float64) for x in lses])
    top = stacked.max(axis=0)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        lse = top + np.log(np.exp(stacked - top).sum(axis=0))
    out = np.zeros(outs[0].shape, np.float64)
    for o, s in zip(outs, stacked, strict=True):
        weight = np.where(np.isfinite(s), np.exp(s - np.where(np.isfinite(lse), lse, 0.0)), 0.0)
        out += np.where(weight[..., None] > 0, weight[..., None] * np.asarray(o, np.float64), 0.0)
    return out, lse


def append(
    key: np.ndarray,
    value: np.ndarray,
    batch_indices: np.ndarray,
    positions: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    kv_indices: np.ndarray,
    kv_indptr: np.ndarray,
    kv_layout: str,
) -> None:
    """Write row i of `key`, `value` at token ``positions[i]`` of request ``batch_indices[i]``."""
    page_size = k_cache.shape[1 if kv_layout == "NHD" else 2]
    for i, (request, position) in enumerate(zip(batch_indices, positions, strict=True)):
        if request < 0:  # padding
            continue
        page = kv_indices[kv_indptr[request] + position // page_size]
        slot = position % page_size
        where = (page, slot) if kv_layout == "NHD" else (page, slice(None), slot)
        k_cache[where] = key[i]
        v_cache[where] = value[i]


def packbits(x: np.ndarray, bitorder: str) -> np.ndarray:
    """Eight booleans a byte, the first in the lowest bit ("little") or the highest ("big")."""
    packed = np.zeros(-(-len(x) // 8), np.uint8)
    for i, bit in enumerate(np.asarray(x).astype(bool)):
        packed[i // 8] |= int(bit) << (i % 8 if bitorder == "little" else 7 - i % 8)
    return packed


def segment_packbits(
    x: np.ndarray, indptr: np.ndarray, bitorder: str
) -> tuple[np.ndarray, np.ndarray]:
    """`packbits` of each segment, so that each starts at a byte; and the offsets in bytes."""
    parts = [packbits(x[a:b], bitorder) for a, b in itertools.pairwise(indptr)]
    offsets = np.cumsum([0, *(len(p) for p in parts)]).astype(np.int32)
    return np.concatenate([np.zeros(0, np.uint8), *parts]), offsets
