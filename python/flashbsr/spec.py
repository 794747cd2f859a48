# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What to compute (`AttentionSpec`) and on what (`TaskInfo`): all that is fixed at construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ._check import check_backend, check_float, check_int, check_name, is_cuda
from .dtypes import FLOAT8, KV_DTYPES, O_DTYPES, Q_DTYPES, normalize_dtype
from .errors import DTypeError, FlashbsrError, ShapeError, UnsupportedError
from .rotary import YarnScaling, check_rotary
from .variant import Variant

__all__ = ["AttentionSpec", "TaskInfo"]

MAX_HEAD_DIM = 512
HEAD_DIM_MULTIPLE = 8


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
        from .jit.source import variant_source

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


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """The arrays: head counts and dims, data types, layout, capacity, threads.

    Parameters
    ----------
    num_qo_heads, num_kv_heads : int
        Heads of queries and of keys; the first is a multiple of the second (GQA).
    head_dim_qk : int
        Head dim of queries and keys: a multiple of 8, at most 512.
    head_dim_vo : int, optional
        Head dim of values and outputs. Default `head_dim_qk`.
    page_size : int, optional
        Tokens of a KV page, 1 or more. None: the KV is ragged (contiguous per request).
    kv_layout : {"NHD", "HND"}
        Order of tokens and heads within a page (paged), or in the whole array (ragged).
    q_dtype : data type, optional
        float32 (on the CPU only), float16, bfloat16 or float8_e4m3fn, in any framework's notation.
        None: the query array's. float8 queries need a KV of the same type.
    kv_dtype : data type, optional
        The type of q, or with 16-bit and float32 q float8_e4m3fn / float8_e5m2. None: the KV
        array's. On a GPU the first ``run`` with other types than the plan expected (float16 at
        first) plans once more; say them here where that run is captured into a CUDA graph.
    o_dtype : data type, optional
        float32, float16 or bfloat16. None: that of q; with float8 q that of a given ``out``,
        otherwise bfloat16.
    max_batch_size, max_q_tokens, max_kv_pages : int, optional
        Capacity: requests, rows of q, and entries of ``kv_indices`` (paged) or rows of k (ragged).
        A larger plan raises `CapacityError`, and memory, kernel and grid stay as they are from
        the first plan on, so that a captured ``run`` may be replayed over later plans; q may then
        have more rows than the plan names. None: ``plan`` grows as needed (``run`` never does).
    num_workers : int, optional
        Queues of the plan. Default: as many as the backend has use for.
    num_threads : int, optional
        Threads that run the queues. Default: the machine's cores. Results do not depend on it.
    fixed_split_size : int, optional
        Cut every KV range at multiples of this many tokens, so that a request's result does not
        depend on the rest of the batch (batch invariance). None: the scheduler chooses.
    disable_split_kv : bool
        Never split a KV range.
    lse_base : {"e", "2"}
        Base of the LSE that ``run`` returns: natural, or 2 as FlashInfer has it.
    backend : {"auto", "cpu", "cuda", "fa2", "fa3"}
        Where to compute. "auto": on the GPU that the workspace or an index array given to ``plan``
        is on, otherwise where the q of the first ``run`` is; decided once. Arrays of a run are all
        in that memory. "fa2" and "fa3" are "cuda" with one family of attention kernels, which
        "cuda" chooses itself: "fa2" those of every GPU (``mma.sync``), "fa3" those of compute
        capability 9.0 (``wgmma``); what the family does not have raises `UnsupportedError`.
    device : int, optional
        Ordinal of the GPU; only with one of the last three backends. None: that of the arrays.
    check : bool
        Validate the page table on the GPU before each run, which then waits for the verdict and
        raises `IndexRangeError` instead of reading elsewhere. A debugging aid, also switched on by
        ``FLASHBSR_CHECK=1`` in the environment. The CPU always checks.
    fp8_accumulation : {"default", "fast"}
        Products of float8 q and KV on tensor cores that truncate as they accumulate (compute
        capability 9.0): how often partial sums are promoted to float32. "default": so often that
        the output over values with a mean is at most 0.25 % too small; "fast": 1.2 %. The same
        wherever sums are exact, the CPU included.

    Raises
    ------
    FlashbsrError, ShapeError, DTypeError
        A value out of its range or an unknown name.
    UnsupportedError
        A backend that this build does not have, a head dim that no kernel has.

    Examples
    --------
    >>> TaskInfo(num_qo_heads=32, num_kv_heads=8, head_dim_qk=128, page_size=16).head_dim_vo
    128
    >>> TaskInfo(num_qo_heads=30, num_kv_heads=8, head_dim_qk=128)
    Traceback (most recent call last):
        ...
    flashbsr.errors.ShapeError: num_qo_heads: got 30; expected a multiple of num_kv_heads=8
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int | None = None
    page_size: int | None = None
    kv_layout: str = "NHD"
    q_dtype: Any = None
    kv_dtype: Any = None
    o_dtype: Any = None
    max_batch_size: int | None = None
    max_q_tokens: int | None = None
    max_kv_pages: int | None = None
    num_workers: int | None = None
    num_threads: int | None = None
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    lse_base: str = "e"
    backend: str = "auto"
    device: int | None = None
    check: bool = False
    fp8_accumulation: str = "default"

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk"):
            _set(self, name, check_int(name, getattr(self, name), 1))
        if self.num_qo_heads % self.num_kv_heads:
            raise ShapeError(
                "num_qo_heads", self.num_qo_heads, f"a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim_vo is None:
            _set(self, "head_dim_vo", self.head_dim_qk)
        _set(self, "head_dim_vo", check_int("head_dim_vo", self.head_dim_vo, 1))
        for name in ("head_dim_qk", "head_dim_vo"):
            dim = getattr(self, name)
            if dim > MAX_HEAD_DIM or dim % HEAD_DIM_MULTIPLE:
                raise UnsupportedError(
                    name,
                    dim,
                    f"a multiple of {HEAD_DIM_MULTIPLE}, at most {MAX_HEAD_DIM} (pad the last "
                    "dimension with zeros and pass sm_scale=1/sqrt(unpadded dim))",
                )
        for name, least in (
            ("page_size", 1),
            ("max_batch_size", 0),
            ("max_q_tokens", 0),
            ("max_kv_pages", 0),
            ("num_workers", 1),
            ("num_threads", 1),
            ("fixed_split_size", 1),
            ("device", 0),
        ):
            value = getattr(self, name)
            if value is not None:
                _set(self, name, check_int(name, value, least))
        capacity = ("max_batch_size", "max_q_tokens", "max_kv_pages")
        missing = [name for name in capacity if getattr(self, name) is None]
        if missing and len(missing) < len(capacity):
            raise FlashbsrError(missing[0], None, "a number: a capacity is all three, or none")
        check_name("kv_layout", self.kv_layout, ("NHD", "HND"))
        _set(self, "q_dtype", normalize_dtype(self.q_dtype, "q_dtype", Q_DTYPES))
        _set(self, "kv_dtype", normalize_dtype(self.kv_dtype, "kv_dtype", KV_DTYPES))
        _set(self, "o_dtype", normalize_dtype(self.o_dtype, "o_dtype", O_DTYPES))
        if self.q_dtype in FLOAT8 and self.kv_dtype not in (None, self.q_dtype):
            raise DTypeError(
                "kv_dtype", self.kv_dtype, f"{self.q_dtype} as q_dtype; any KV goes with 16-bit q"
            )
        if self.q_dtype and self.kv_dtype not in (None, self.q_dtype, *FLOAT8):
            raise DTypeError("kv_dtype", self.kv_dtype, f"{self.q_dtype} as q_dtype, or a float8")
        _set(self, "disable_split_kv", bool(self.disable_split_kv))
        if self.disable_split_kv and self.fixed_split_size is not None:
            raise FlashbsrError(
                "fixed_split_size", self.fixed_split_size, "None when disable_split_kv=True"
            )
        check_name("lse_base", self.lse_base, ("e", "2"))
        check_name("fp8_accumulation", self.fp8_accumulation, ("default", "fast"))
        check_backend(self.backend)
        if self.device is not None and not is_cuda(self.backend):
            raise FlashbsrError("device", self.device, "None unless backend='cuda', 'fa2' or 'fa3'")
        _set(self, "check", bool(self.check))


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
