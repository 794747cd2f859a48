# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Frequencies of RoPE inside attention: YaRN's, the caller's own, those of a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._check import check_float, check_int, check_llama31
from ..arrays import adapter_for, to_values
from ..errors import DTypeError, FlashbsrError, ShapeError

__all__ = ["CosSinTable", "YarnScaling", "check_rotary", "rotation"]

# Fields of AttentionSpec of which one at most says what the frequencies are.
FREQUENCIES = ("rope_llama31", "rope_yarn", "rope_frequencies", "rope_cos_sin_cache")

# Rows of a table that are compared with the angles found in it at a time.
CHECKED_ROWS = 4096


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN, for ``AttentionSpec(rope_yarn=...)``; `rope_scale` is its factor.

    As its authors' code and the models trained with it have it (Peng et al. 2023,
    arXiv:2309.00071, sections 3.2 and 3.4)::

        f_i  = (1 - r_i) f0_i + r_i f0_i / rope_scale,       f0_i = rope_theta^(-2 i / rotary_dim)
        r_i  = clamp((i - low) / (high - low), 0, 1)
        low  = floor(pair(beta_fast)),  high = ceil(pair(beta_slow)),  clipped to the head
        pair(n) = rotary_dim ln(old_context_len / (2 pi n)) / (2 ln rope_theta)

    *pair(n)* turns *n* times within the old context. Rotated queries and keys are multiplied by
    `attention_factor` each, so logits by its square. The paper's own ramp is linear in
    turns and not in *i*: ``rope_llama31=(1, 32, old_context_len)`` is that one.

    Parameters
    ----------
    old_context_len : float
        Tokens that the model was trained with before.
    beta_fast, beta_slow : float
        Turns above which a frequency stays and below which it is divided by `rope_scale`.
    attention_factor : float, optional
        Default ``0.1 ln(rope_scale) + 1``, and 1 for factors up to 1. Checkpoints with ``mscale``
        and ``mscale_all_dim`` have ``(0.1 mscale ln(rope_scale) + 1) / (0.1 mscale_all_dim
        ln(rope_scale) + 1)``.
    truncate : bool
        False: *low* and *high* are not rounded (gpt-oss).

    Raises
    ------
    FlashbsrError, DTypeError

    Examples
    --------
    >>> round(YarnScaling(4096).magnitude(16.0), 6)
    1.277259
    """

    old_context_len: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("old_context_len", "beta_fast", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            if name == "attention_factor" and value is None:
                continue
            value = check_float(name, value)
            if value <= 0:
                raise FlashbsrError(name, value, "a positive number")
            object.__setattr__(self, name, value)  # the dataclass is frozen
        if self.old_context_len <= 2 * math.pi * self.beta_slow:
            raise FlashbsrError(
                "old_context_len",
                self.old_context_len,
                "more than 2 pi beta_slow: the fastest pair turns within it",
            )
        if self.beta_slow >= self.beta_fast:
            raise FlashbsrError(
                "beta_slow", self.beta_slow, f"a number below beta_fast={self.beta_fast}"
            )
        object.__setattr__(self, "truncate", bool(self.truncate))

    def magnitude(self, rope_scale: float) -> float:
        """Return the attention factor."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if rope_scale <= 1 else 0.1 * math.log(rope_scale) + 1.0

    def frequencies(
        self, rotary_dim: int, rope_scale: float, rope_theta: float
    ) -> npt.NDArray[np.float64]:
        """Radians per position of each pair, ``(rotary_dim / 2,)``.

        Examples
        --------
        >>> f = YarnScaling(4096).frequencies(128, 16.0, 1e4)
        >>> float(f[0]), round(float(f[63]) * 16 * 1e4 ** (126 / 128), 6)
        (1.0, 1.0)
        """
        pair = np.arange(rotary_dim // 2)
        plain = rope_theta ** (-2.0 * pair / rotary_dim)
        low, high = (
            rotary_dim
            * math.log(self.old_context_len / (2 * math.pi * turns))
            / (2 * math.log(rope_theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001  # as the authors' code
        ramp = np.clip((pair - low) / (high - low), 0.0, 1.0)
        scaled: npt.NDArray[np.float64] = (1 - ramp) * plain + ramp * plain / rope_scale
        return scaled


@dataclass(frozen=True, slots=True)
class CosSinTable:
    """What a table of cosines and sines says: angles that grow with the position, one magnitude."""

    frequencies: tuple[float, ...]
    magnitude: float
    max_positions: int

    @staticmethod
    def read(table: Any) -> CosSinTable:
        """Find the frequencies of an array ``[max_position, rotary_dim]``: cosines, then sines."""
        name = "rope_cos_sin_cache"
        adapter_for(table, name)
        values = to_values(table, name)
        if values.dtype not in (np.float32, np.float64):
            raise DTypeError(name, values.dtype, "float32 or float64")
        if not np.isfinite(values).all():
            raise FlashbsrError(name, "a table with infinities or NaN", "cosines and sines")
        if values.ndim != 2 or values.shape[0] < 2 or values.shape[1] % 2 or not values.shape[1]:
            raise ShapeError(
                name, f"shape {values.shape}", "[max_position, rotary_dim], at least two positions"
            )
        half = values.shape[1] // 2

        def row(p: int) -> npt.NDArray[np.complex128]:
            both = values[p].astype(np.float64)
            turned: npt.NDArray[np.complex128] = both[:half] + 1j * both[half:]
            return turned

        origin = row(0)
        magnitude = float(np.abs(origin).mean())
        if magnitude == 0:
            raise FlashbsrError(name, "zeros in row 0", "cosines of 0, times one factor")
        # Twice as far, an error of the frequency shows twice as much and is still no turn.
        frequencies, step = np.angle(row(1) * origin.conj()), 2
        while step < len(values):
            off = np.angle(row(step) * origin.conj() * np.exp(-1j * step * frequencies))
            frequencies, step = frequencies + off / step, 2 * step
        for begin in range(0, len(values), CHECKED_ROWS):
            part = values[begin : begin + CHECKED_ROWS]
            position = np.arange(begin, begin + len(part))[:, None]
            found = part[:, :half] + 1j * part[:, half:]
            expected = magnitude * np.exp(1j * position * frequencies)
            # Whoever made it in float32 rounded angles to 2^-24 of them.
            allowed = magnitude * (1e-5 + 2.0**-22 * position)
            wrong = np.abs(found - expected) > allowed
            if wrong.any():
                p, i = np.argwhere(wrong)[0]
                raise FlashbsrError(
                    name,
                    f"a table that is no rotation by position x frequency in row {begin + p}, "
                    f"pair {i}",
                    "cos(p f_i) and sin(p f_i), times one factor, computed in float32 or better; "
                    "rotate by other tables with apply_rope_with_cos_sin_cache first",
                )
        return CosSinTable(tuple(map(float, frequencies)), magnitude, len(values))


def check_given(value: Any) -> tuple[float, ...]:
    """Return the caller's frequencies, a number a pair."""
    name = "rope_frequencies"
    values = to_values(value, name)
    if values.dtype.kind not in "fiu":
        raise DTypeError(name, values.dtype, "numbers")
    if values.ndim != 1 or not values.size:
        raise ShapeError(name, f"shape {values.shape}", "(rotary_dim / 2,)")
    if not np.isfinite(values).all():
        raise FlashbsrError(name, "infinities or NaN", "radians per position of every pair")
    return tuple(float(f) for f in values)


def check_rotary(spec: Any) -> dict[str, Any]:
    """Fields of RoPE of an `AttentionSpec` as they are kept; raise for those that contradict."""
    kept: dict[str, Any] = {"rope_interleave": bool(spec.rope_interleave)}
    if spec.rope_llama31 is not None:
        kept["rope_llama31"] = check_llama31(spec.rope_llama31)
    if spec.rotary_dim is not None:
        kept["rotary_dim"] = check_int("rotary_dim", spec.rotary_dim, 2)
        if spec.rotary_dim % 2:
            raise FlashbsrError("rotary_dim", spec.rotary_dim, "an even number")
    if spec.rope_yarn is not None:
        if not isinstance(spec.rope_yarn, YarnScaling):
            raise DTypeError("rope_yarn", repr(spec.rope_yarn), "a flashbsr.YarnScaling")
        if spec.rope_theta <= 1:
            raise FlashbsrError("rope_theta", spec.rope_theta, "more than 1 with rope_yarn")
    if spec.rope_frequencies is not None:
        kept["rope_frequencies"] = check_given(spec.rope_frequencies)
    if spec.rope_cos_sin_cache is not None:
        table = spec.rope_cos_sin_cache
        known = isinstance(table, CosSinTable)  # of dataclasses.replace
        kept["rope_cos_sin_cache"] = table if known else CosSinTable.read(table)
    given = [name for name in FREQUENCIES if getattr(spec, name) is not None]
    if len(given) > 1:
        raise FlashbsrError(given[1], "another kind of frequencies", f"None beside {given[0]}")
    options = [*given, *(["rotary_dim"] if spec.rotary_dim is not None else [])]
    options += ["rope_interleave"] if spec.rope_interleave else []
    if options and spec.pos_encoding_mode != "ROPE_LLAMA":
        raise FlashbsrError(
            options[0],
            getattr(spec, options[0]),
            "the default unless pos_encoding_mode='ROPE_LLAMA'",
        )
    if given and given[0] in ("rope_frequencies", "rope_cos_sin_cache"):
        for name, default in (("rope_scale", 1.0), ("rope_theta", 1e4)):
            if getattr(spec, name) != default:
                raise FlashbsrError(name, getattr(spec, name), f"{default}: {given[0]} says it all")
    return kept


def rotation(spec: Any, head_dim: int) -> dict[str, Any]:
    """Options of ``_core.Engine`` that say how an `AttentionSpec` rotates heads of `head_dim`."""
    table = spec.rope_cos_sin_cache
    frequencies = table.frequencies if table else spec.rope_frequencies or ()
    rotary_dim = spec.rotary_dim or 2 * len(frequencies) or head_dim
    name = next((name for name in FREQUENCIES[2:] if getattr(spec, name) is not None), "rotary_dim")
    if rotary_dim > head_dim:
        raise FlashbsrError(name, rotary_dim, f"at most head_dim_qk={head_dim} rotated dims")
    if frequencies and rotary_dim != 2 * len(frequencies):
        raise ShapeError(name, f"{len(frequencies)} frequencies", f"rotary_dim={rotary_dim} / 2")
    magnitude = table.magnitude if table else 1.0
    if spec.rope_yarn is not None:
        yarn = spec.rope_yarn
        frequencies = tuple(yarn.frequencies(rotary_dim, spec.rope_scale, spec.rope_theta).tolist())
        magnitude = yarn.magnitude(spec.rope_scale)
    return {
        "rope_scale": spec.rope_scale,
        "rope_theta": spec.rope_theta,
        "rope_llama31": spec.rope_llama31,
        "rope_frequencies": frequencies,
        "rope_magnitude": magnitude,
        "rope_max_positions": table.max_positions if table else -1,
        "rope_interleave": spec.rope_interleave,
        "rotary_dim": rotary_dim,
    }
