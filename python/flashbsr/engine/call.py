# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`attention`: one call that plans by itself, for dense batches and ragged ones."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Adapter, adapter_for, float_dtype, to_values
from ..arrays.dtypes import KV_DTYPES, Q_DTYPES
from ..arrays.types import Array
from ..errors import DTypeError, FlashbsrError, ShapeError
from ..layout.layouts import Layout, Paged, Ragged
from ..variant.spec import AttentionSpec
from .attention import Attention
from .task import TaskInfo

__all__ = ["attention", "flat_rows"]

# A model calls with a few kinds of arrays; each engine kept has threads and memory of its own.
_MOST_ENGINES = 8


class _Kept(threading.local):
    """A thread's engines by what they compute, with the lengths that they are planned for."""

    def __init__(self) -> None:
        self.engines: OrderedDict[Hashable, tuple[Attention, Hashable]] = OrderedDict()


_KEPT = _Kept()


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window_left: int = -1,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    spec: AttentionSpec | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    out: Array | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Compute attention over a dense batch, or over sequences that follow each other.

    It plans by itself, and again only when lengths change. For KV in pages, and where a plan
    serves many layers, use `Attention`.

    Parameters
    ----------
    q : array, shape (B, S_q, H_q, D) or (tokens_q, H_q, D)
        Types as for `Attention.run`; any strides, the last dimension contiguous. The second shape
        needs `cu_seqlens_q`.
    k : array, shape (B, S_k, H_kv, D) or (tokens_k, H_kv, D)
        H_q is a multiple of H_kv (GQA).
    v : array, shape (B, S_k, H_kv, D_v) or (tokens_k, H_kv, D_v)
    causal : bool
        Causal mask, bottom-right aligned: the last query of a sequence sees all of its keys.
    window_left : int
        Keys further than this behind the query are masked. -1: no window.
    sm_scale : float, optional
        Scale of the logits. Default ``1 / sqrt(D)``.
    logits_soft_cap : float, optional
        ``cap * tanh(x / cap)`` after `sm_scale`. None or 0: off.
    spec : AttentionSpec, optional
        For any other computation, in place of the four above.
    cu_seqlens_q : int32 or int64 array, shape (B + 1,), optional
        Rows of q of sequence b: ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``. Arrays on a GPU are
        copied to the host, which waits for them.
    cu_seqlens_k : int32 or int64 array, shape (B + 1,), optional
        Rows of k and v, likewise. Default `cu_seqlens_q`.
    out : array, shape of q with D_v as its last dimension, optional
        Where to write; default: a new array of q's kind. Of a dense `out` batch and sequence are
        one axis in memory, as in every contiguous array.
    return_lse : bool
        Also return the LSE.
    **options
        More of `Attention.run`: sinks, scales, slopes, stream, extras of the spec's variant.

    Returns
    -------
    out : array, shape of q with D_v as its last dimension
        Of q's kind. A row that sees no key is 0.
    lse : float32 array, shape of q without its last dimension
        With ``return_lse=True``: ``log(sum(exp(logits)))``, natural; -inf where no key is seen.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, IndexRangeError
        Arrays that do not fit each other; `cu_seqlens_q` missing, decreasing or too long.
    FlashbsrError
        A value out of its range; both a `spec` and one of its fields.
    UnsupportedError, CudaError
        No kernel for this on the GPU; the driver refused.

    Notes
    -----
    Nothing is copied, except a dense q whose batch and sequence are not one axis in memory, such
    as the transpose of ``(B, H, S, D)``.

    A thread keeps the engines of its last 8 kinds of calls (computation, head counts and dims,
    types, device), with their specs.

    Examples
    --------
    >>> import numpy as np
    >>> import flashbsr
    >>> q = np.ones((2, 5, 4, 64), np.float32)
    >>> k = v = np.ones((2, 9, 2, 64), np.float32)
    >>> flashbsr.attention(q, k, v, causal=True).shape
    (2, 5, 4, 64)

    Two sequences of 2 and 3 queries, and of 4 and 5 keys:

    >>> out, lse = flashbsr.attention(
    ...     q[0], k[0], v[0], cu_seqlens_q=np.array([0, 2, 5]), cu_seqlens_k=np.array([0, 4, 9]),
    ...     return_lse=True,
    ... )
    >>> out.shape, lse.shape
    ((5, 4, 64), (5, 4))
    """
    given = (causal, window_left, sm_scale, logits_soft_cap)
    adapter = adapter_for(q, "q")
    if adapter.OPERATORS is not None:
        return adapter.OPERATORS.attention(
            q, k, v, given, spec, cu_seqlens_q, cu_seqlens_k, out, return_lse, options
        )
    if spec is None:
        spec = _spec(*given)
    elif isinstance(spec, AttentionSpec):
        _refuse_beside_spec(*given)
    else:
        raise DTypeError("spec", type(spec).__name__, "a flashbsr.AttentionSpec")
    if "lse" in options:
        raise FlashbsrError("lse", "an array", "return_lse=True; Attention.run writes into one")
    adapters = _check(adapter, q, k, v)
    sizes = int(q.shape[-2]), int(k.shape[-2]), int(q.shape[-1])
    more: dict[str, Any] = {
        "head_dim_vo": int(v.shape[-1]),
        "q_dtype": float_dtype(q, "q", Q_DTYPES),
        "kv_dtype": float_dtype(k, "k", KV_DTYPES),
    }
    cu_seqlens = _lengths(cu_seqlens_q, cu_seqlens_k)
    dense = len(q.shape) == 4
    arrays = q, (k, v), out
    lengths: tuple[Any, ...]
    if dense:
        lengths, arrays = _dense(adapters, q, k, v, out, cu_seqlens)
    elif not cu_seqlens:
        raise FlashbsrError(
            "cu_seqlens_q", None, "an array with q of 3 dimensions; one sequence is dense: q[None]"
        )
    else:
        lengths = tuple((x.dtype.str, x.tobytes()) for x in cu_seqlens)
    key = spec, sizes, *more.values(), adapters[0].device(q)
    engine, planned_for = _KEPT.engines.pop(key, (None, None))
    if engine is None:
        engine = Attention(spec, TaskInfo(*sizes, **more))
        engine.settle(q, "q")
    if planned_for != lengths:
        layout = Ragged(*cu_seqlens) if cu_seqlens else _dense_layout(*lengths)
        own = "cu_seqlens_q" if cu_seqlens_k is None else "cu_seqlens_k"
        _plan(engine, layout, {"qo_indptr": "cu_seqlens_q", "kv_indptr": own})
    result = engine.run(*arrays[:2], out=arrays[2], return_lse=return_lse, **options)
    # One that raised is not kept: it may have no plan, or another's.
    _KEPT.engines[key] = engine, lengths
    if len(_KEPT.engines) > _MOST_ENGINES:
        _KEPT.engines.popitem(last=False)
    if not dense:
        return result
    found, lse = result if return_lse else (result, None)
    found = found.reshape((*q.shape[:3], v.shape[3])) if out is None else out
    return found if lse is None else (found, lse.reshape(q.shape[:3]))


def _spec(*given: Any) -> AttentionSpec:
    try:
        return _known_spec(*given)
    except TypeError:  # what cannot be hashed, which is no option either: the spec says so
        return AttentionSpec(*given)


# A third of the time of a small call. Typed: 1 is a window, 1.0 is not.
_known_spec = functools.lru_cache(maxsize=64, typed=True)(AttentionSpec)


def _refuse_beside_spec(
    causal: bool, window_left: int, sm_scale: float | None, logits_soft_cap: float | None
) -> None:
    for name, value, default in (
        ("causal", causal, False),
        ("window_left", window_left, -1),
        ("sm_scale", sm_scale, None),
        ("logits_soft_cap", logits_soft_cap, None),
    ):
        if value != default:
            raise FlashbsrError(name, value, f"{default} beside spec, which says it all")


def _check(adapter: Adapter, q: Array, k: Array, v: Array) -> tuple[Adapter, Adapter, Adapter]:
    """Adapters of the three, whose shapes fit each other."""
    adapters = adapter, adapter_for(k, "k"), adapter_for(v, "v")
    if len(q.shape) not in (3, 4):
        raise ShapeError("q", f"shape {tuple(q.shape)}", "(B, S, H, D), or (tokens, H, D)")
    batch = tuple(q.shape[:-3])
    for name, x, lead in (("k", k, batch), ("v", v, tuple(k.shape[:-1]))):
        if len(x.shape) != len(q.shape) or tuple(x.shape[: len(lead)]) != lead:
            rest = ("tokens", "H_kv", "D")[len(lead) - len(batch) :]
            expected = ", ".join(map(str, (*lead, *rest)))
            raise ShapeError(name, f"shape {tuple(x.shape)}", f"({expected})")
    return adapters


def _lengths(
    cu_seqlens_q: Array | None, cu_seqlens_k: Array | None
) -> tuple[npt.NDArray[Any], ...]:
    """Both on the host; nothing where there is none."""
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None:
            raise FlashbsrError("cu_seqlens_q", None, "an array beside cu_seqlens_k")
        return ()
    q_rows = to_values(cu_seqlens_q, "cu_seqlens_q")
    return q_rows, q_rows if cu_seqlens_k is None else to_values(cu_seqlens_k, "cu_seqlens_k")


def _dense(
    adapters: tuple[Adapter, Adapter, Adapter],
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    cu_seqlens: tuple[Any, ...],
) -> tuple[tuple[bool, int, int, int], tuple[Array, tuple[Array, Array], Array | None]]:
    """Whether KV is paged, sizes of the batch; q, (k, v) and out as the engine takes them."""
    if cu_seqlens:
        raise ShapeError("cu_seqlens_q", "an array", f"None with q of shape {tuple(q.shape)}")
    batch, q_len, kv_len = int(q.shape[0]), int(q.shape[1]), int(k.shape[1])
    q_rows = flat_rows(adapters[0], q, "q")
    if q_rows is None:
        q_rows = adapters[0].join([q[b] for b in range(batch)])
    if out is not None:
        shape = (*q.shape[:3], v.shape[3])
        if tuple(out.shape) != shape:
            raise ShapeError("out", f"shape {tuple(out.shape)}", f"{shape}")
        out = flat_rows(adapter_for(out, "out"), out, "out")
        if out is None:
            raise ShapeError(
                "out", "strides that keep batch and sequence apart", "those of a contiguous array"
            )
    kv = flat_rows(adapters[1], k, "k"), flat_rows(adapters[2], v, "v")
    paged = kv[0] is None or kv[1] is None
    return (paged, batch, q_len, kv_len), (q_rows, (k, v) if paged else kv, out)


def flat_rows(adapter: Adapter, x: Array, name: str) -> Array | None:
    """View `x` with batch and sequence as one axis; None: in memory they are two."""
    adapter.export(x, False, name)  # refuses what has no memory
    batch, length, *rest = x.shape
    try:
        strides = adapter.strides(x)
        if batch > 1 and length > 1 and 0 not in rest and strides[0] != length * strides[1]:
            return None
        return x.reshape((batch * length, *rest))
    except (RuntimeError, NotImplementedError) as error:
        raise DTypeError(name, f"an array without strides ({error})", "a strided one") from None


def _dense_layout(paged: bool, batch: int, q_len: int, kv_len: int) -> Layout:
    """Rows one sequence after another; K and V that are not have a page for each."""
    each = np.arange(batch + 1, dtype=np.int64)
    if not paged:
        return Ragged(each * q_len, each * kv_len)
    lens = np.full(batch, kv_len)
    return Paged(each * q_len, each, each[:-1], kv_lens=lens, page_size=kv_len)


def _plan(engine: Attention, layout: Layout, names: dict[str, str]) -> None:
    """Plan; an error has the caller's names."""
    try:
        engine.plan(layout)
    except FlashbsrError as error:
        texts = [str(error.argument), str(error.actual), str(error.expected)]
        for old, new in names.items():
            texts = [text.replace(old, new) for text in texts]
        raise type(error)(*texts) from None
