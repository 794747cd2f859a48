# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What to compute: `AttentionSpec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .._check import check_float, check_int, check_name
from ..errors import DTypeError, FlashbsrError
from .rotary import YarnScaling, check_rotary
from .variant import Variant

__all__ = ["AttentionSpec"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The computation: masks, logits transforms, positions, activation.

    For query row *i* (position ``p = kv_len - q_len + i``) and key *j* of one request and head::

        x_ij = soft_cap(sm_scale * <q_i, k_j>) + alibi_ij
        o_i  = sum_j softmax_j(x_ij) v_j,   lse_i = log sum_j exp(x_ij)

    with *j* running over the keys that the masks leave: causal ``j <= p``, window
    ``j >= p - window_left``, and the custom mask given to ``plan`` (which replaces causality).

    Parameters
    ----------
    causal : bool
        Causal mask, bottom-right aligned: the last query sees every key.
    window_left : int
        Keys further than this behind the query are masked. Inclusive: 0 leaves the query's own
        position. -1: no window.
    sm_scale : float, optional
        Scale of the logits. Default ``1 / sqrt(head_dim_qk)``.
    logits_soft_cap : float, optional
        ``cap * tanh(x / cap)`` after `sm_scale` (Gemma 2, arXiv:2408.00118, section 2). None or
        0: off.
    pos_encoding_mode : {"NONE", "ROPE_LLAMA", "ALIBI"}
        ROPE_LLAMA rotates keys by their position in the sequence and queries by *p*, inside the
        kernel (RoFormer, arXiv:2104.09864, eq. 34). The fields below that name RoPE need it.
        ALIBI adds ``slope_h * (j - p)`` (Press et al., arXiv:2108.12409, section 3).
    rope_scale : float
        Positions are divided by it (interpolation). With `rope_llama31` or `rope_yarn`: their
        factor.
    rope_theta : float
        Base of the rotary frequencies.
    rope_llama31 : tuple of 3 floats, optional
        RoPE: ``(low_freq_factor, high_freq_factor, old_context_len)`` of the Llama 3.1 frequency
        scaling. One of this and the next three at most.
    rope_yarn : YarnScaling, optional
        RoPE: the frequencies and the attention factor of YaRN (Peng et al. 2023).
    rope_frequencies : array [rotary_dim / 2] or sequence of float, optional
        RoPE: radians per position of each pair, in place of `rope_scale` and `rope_theta`.
    rope_cos_sin_cache : float32 or float64 array [max_position, rotary_dim], optional
        RoPE: row *p* has the cosines of the pairs' angles at position *p*, then the sines, as for
        `apply_rope_with_cos_sin_cache`. Angles must grow linearly with the position; one factor
        may be on all. Read once, here: what is kept are frequencies, the factor and the number of
        positions, beyond which ``plan`` raises `IndexRangeError`.
    rotary_dim : int, optional
        RoPE: dims from here on stay as they are. Even, at most `head_dim_qk`; on a GPU without
        `rope_interleave` a multiple of 32. Default: what the frequencies say, or all.
    rope_interleave : bool
        RoPE: pairs are dims ``(2 i, 2 i + 1)`` (GPT-J), not ``(i, i + rotary_dim / 2)`` (NeoX).
    activation : {"softmax", "sigmoid"}
        ``"sigmoid"``: ``o_i = sum_j sigmoid(x_ij + sigmoid_bias) v_j`` (Ramapuram et al.,
        arXiv:2409.04431, eq. 3). It has no LSE.
    sigmoid_bias : float
        Added to every logit; sigmoid only.
    variant : Variant, optional
        What `from_source` or `from_functions` made. It takes the place of soft-cap, ALiBi and
        activation; masks, windows, RoPE and sinks go with it.

    Raises
    ------
    FlashbsrError
        A value out of its range, an unknown name, or a combination without a meaning.

    Examples
    --------
    >>> AttentionSpec(causal=True, window_left=127).window_left
    127
    >>> AttentionSpec(activation="relu")
    Traceback (most recent call last):
        ...
    flashbsr.errors.FlashbsrError: activation: got 'relu'; expected 'softmax' or 'sigmoid'
    """

    causal: bool = False
    window_left: int = -1
    sm_scale: float | None = None
    logits_soft_cap: float | None = None
    pos_encoding_mode: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    rope_llama31: tuple[float, float, float] | None = None
    rope_yarn: YarnScaling | None = None
    rope_frequencies: Any = None
    rope_cos_sin_cache: Any = None
    rotary_dim: int | None = None
    rope_interleave: bool = False
    activation: str = "softmax"
    sigmoid_bias: float = 0.0
    variant: Variant | None = None

    @classmethod
    def from_source(
        cls,
        text: str,
        *,
        name: str | None = None,
        extras: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> AttentionSpec:
        """Make a spec whose variant is written in C++.

        Parameters
        ----------
        text : str
            A struct that derives from ``flashbsr::VariantBase``, with any of the members that
            ``docs/variants.md`` lists. It is compiled when it is first run, for the device at hand.
        name : str, optional
            Of the struct, where the text has several.
        extras : mapping, optional
            Numbers and arrays that ``Attention.run`` is given by keyword and that are members of
            the struct: ``{"bias": "float32", "table": ("float32", 2)}``, a data type, or data
            type and rank. Numbers are float32 or int32; arrays those, float16, bfloat16, int64
            (read as int32), uint8 or bool, of up to 4 dimensions and with any strides.
        **fields
            Of `AttentionSpec`.

        Raises
        ------
        FlashbsrError, DTypeError, UnsupportedError
            No struct in the text; extras that cannot be declared.

        Examples
        --------
        Sigmoid attention (Ramapuram et al., arXiv:2409.04431; figure 5 of the FlashInfer paper):

        >>> spec = AttentionSpec.from_source('''
        ... struct FlashSigmoid : flashbsr::VariantBase {
        ...   static constexpr bool use_softmax = false;
        ...   template <class M> auto activation(typename M::Float x) const {
        ...     return M::sigmoid(x + bias);
        ...   }
        ... };
        ... ''', extras={"bias": "float32"})
        >>> spec.variant.use_softmax
        False
        """
        return cls(variant=Variant.parse(text, name, extras or {}), **fields)

    @classmethod
    def from_functions(
        cls,
        *,
        score_mod: Callable[..., Any] | None = None,
        mask_mod: Callable[..., Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> AttentionSpec:
        """Make a spec whose variant is written in Python.

        The functions are called once, with objects that record what is computed; kernels compute
        it in C++ (`source`). They are those of PyTorch's FlexAttention.

        Parameters
        ----------
        score_mod : callable ``(score, b, h, q_idx, kv_idx) -> score``, optional
            Of the scaled logit: request, query head, query token within the request, KV position.
        mask_mod : callable ``(b, h, q_idx, kv_idx) -> bool``, optional
            True keeps. `causal` and `window_left` still hold, and skip what they hide.
        extras : mapping, optional
            As in `from_source`; a function has those that are parameters of it by name, after the
            ones above. ``q_position`` (``kv_len - q_len + q_idx``), ``kv_head``, ``q_len`` and
            ``kv_len`` may be named so too. Arrays that a function captures need no declaration:
            every run reads them as they are then. Arrays of one number are read once, here.
        **fields
            Of `AttentionSpec`.

        Raises
        ------
        FlashbsrError, DTypeError
            Other parameters; an array with elements or dimensions that extras do not have.
        UnsupportedError
            What cannot be traced: decisions in Python (``if``, ``and``), other functions than
            ``docs/variants.md`` lists. The message names the line and what to write instead.

        Examples
        --------
        >>> import numpy as np
        >>> slopes = np.array([0.5, 0.25], np.float32)
        >>> def alibi(score, b, h, q_idx, kv_idx):
        ...     return score + slopes[h] * (kv_idx - q_idx)
        >>> spec = AttentionSpec.from_functions(score_mod=alibi)
        >>> spec.variant.extras
        (Extra(name='slopes', dtype='float32', rank=1),)
        """
        from .trace.build import trace

        return cls(variant=trace(score_mod, mask_mod, extras or {}), **fields)

    @property
    def source(self) -> str:
        """C++ of the variant as it is compiled, text and extras. `FlashbsrError` without one."""
        if self.variant is None:
            raise FlashbsrError("variant", None, "a variant; built-in ones are in include/flashbsr")
        from .source import variant_source

        return variant_source(self.variant)

    def __post_init__(self) -> None:
        _set(self, "causal", bool(self.causal))
        _set(self, "window_left", check_int("window_left", self.window_left, -1))
        if self.sm_scale is not None:
            _set(self, "sm_scale", check_float("sm_scale", self.sm_scale))
        if self.logits_soft_cap is not None:
            cap = check_float("logits_soft_cap", self.logits_soft_cap)
            if cap < 0:
                raise FlashbsrError("logits_soft_cap", cap, "a positive number, or None or 0: off")
            _set(self, "logits_soft_cap", cap or None)
        check_name("pos_encoding_mode", self.pos_encoding_mode, ("NONE", "ROPE_LLAMA", "ALIBI"))
        check_name("activation", self.activation, ("softmax", "sigmoid"))
        for name in ("rope_scale", "rope_theta"):
            value = check_float(name, getattr(self, name))
            if value <= 0:
                raise FlashbsrError(name, value, "a positive number")
            _set(self, name, value)
        for name, kept in check_rotary(self).items():
            _set(self, name, kept)
        _set(self, "sigmoid_bias", check_float("sigmoid_bias", self.sigmoid_bias))
        if self.sigmoid_bias and self.activation != "sigmoid":
            raise FlashbsrError("sigmoid_bias", self.sigmoid_bias, "0 unless activation='sigmoid'")
        if self.variant is not None:
            check_variant(self)


def _set(obj: object, name: str, value: object) -> None:
    object.__setattr__(obj, name, value)  # the dataclasses are frozen


def check_variant(spec: AttentionSpec) -> None:
    """Raise for fields that a variant replaces."""
    if not isinstance(spec.variant, Variant):
        raise DTypeError("variant", type(spec.variant).__name__, "what from_source() makes")
    for name, on in (
        ("logits_soft_cap", spec.logits_soft_cap is not None),
        ("pos_encoding_mode", spec.pos_encoding_mode == "ALIBI"),
        ("activation", spec.activation != "softmax"),
    ):
        if on:
            raise FlashbsrError(
                name, repr(getattr(spec, name)), "the default: write it into the variant"
            )
