# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over dense caches: ``generate`` and plain forward passes."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...arrays.torch import finish
from ...errors import DTypeError, ShapeError, UnsupportedError
from ...layout.layouts import BlockTable
from ...layout.padded import Padded
from .common import Engine, Kind, as_autocast, refuse, refuse_capture, sinks_of, version_of
from .masks import NO_WINDOW, Bits, Spans, bits_of, chosen, mask
from .steps import is_marked, rows_alike, step_over

__all__ = ["attention", "mask"]


_KEPT = 4  # kinds of layers of a step


@dataclass(eq=False, slots=True)
class _Call:
    """A layer's call: what it was told, and the engine that is planned for such layers."""

    mask: torch.Tensor | None
    told: tuple[Any, ...]
    engine: Engine
    batch: tuple[Any, ...] | None
    shapes: tuple[tuple[Any, Any], ...]  # and strides of K and V as pages; none: as they are

    def pages(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View K and V of another layer as pages; to ask the layout took 29 of 73 us (Zen 3)."""
        try:
            key, value = (
                x.detach().as_strided(*how, x.storage_offset())
                for x, how in zip((key, value), self.shapes, strict=True)
            )
        except RuntimeError:  # its storage ends before the last page does
            key, value = self.engine.layout.pages(key, value)
        return key, value


class _Calls(threading.local):
    """The last calls of a thread.

    Layers of a step are told the same; to find out again what it means took 8 us of 33 that a layer
    of 8 x 64 tokens takes (Zen 5).
    """

    def __init__(self) -> None:
        self._found: list[_Call] = []

    def find(self, mask: torch.Tensor | None, told: tuple[Any, ...]) -> _Call | None:
        for call in self._found:
            if call.mask is mask and call.told == told and call.engine.batch is call.batch:
                return call
        return None

    def keep(self, call: _Call) -> None:
        del self._found[_KEPT - 1 :]
        self._found.insert(0, call)


_calls = _Calls()


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer, with the arguments of transformers.

    Parameters
    ----------
    module : torch.nn.Module
        The layer; ``is_causal`` and ``training`` are read.
    query : tensor, shape (B or 1, H_q, S_q, D)
    key, value : tensors, shapes (B or 1, H_kv, S_kv, D) and (B or 1, H_kv, S_kv, D_v)
        Of any strides.
    attention_mask : tensor, optional
        What `mask` made, or a mask of ``(B or 1, 1, S_q or 1, S_kv)``: booleans, or numbers that
        are 0 or so low that nothing remains.
    scaling : float, optional
    dropout : float
        0.
    sliding_window : int, optional
        Where there is no mask: tokens that a query sees, its own included.
    softcap : float, optional
    is_causal : bool, optional
        Where there is no mask. Default: the layer's.
    s_aux : tensor, shape (H_q,), optional
        Sinks.
    indices : int tensor, shape (B, S_q, topk), optional
        Keys that a query sees of those that the mask leaves it; -1: none.

    Returns
    -------
    tensor, shape (B, S_q, H_q, D_v); None
    """
    refuse(module, (query, key, value, s_aux), dropout, options)
    stepwise = query.shape[2] == 1 and indices is None
    if attention_mask is not None and stepwise and is_marked(attention_mask):
        query, key, value = as_autocast(query, key, value)
        how = scaling, softcap, sliding_window
        out = step_over(query, key, value, attention_mask, s_aux, *how)
        return finish(out, None, (key, value, s_aux)), None
    refuse_capture(query)
    query, key, value = as_autocast(query, key, value)
    batch, heads, q_len, dim = query.shape  # to ask a tensor for its length takes 0.5 us
    rows = key.shape[0]
    if batch == 1 != rows:  # learned queries, the same for all rows
        query, batch = query.expand(rows, -1, -1, -1), rows
    if rows == 1 != batch:  # the same keys for all rows
        key, value = (x.expand(batch, -1, -1, -1).contiguous() for x in (key, value))
    elif rows != batch:
        raise ShapeError("key", f"{rows} rows", f"{batch}, as query")
    if indices is not None:
        attention_mask = chosen(attention_mask, indices, key.shape[2])
    # Of one token each in half of what it takes to transpose and reshape.
    one = q_len == 1
    q = query.squeeze(2) if one else query.transpose(1, 2).reshape(batch * q_len, heads, dim)
    told = (
        query.shape, key.shape, value.shape, key.stride(), value.stride(), q.dtype, key.dtype,
        q.device, scaling, softcap, sliding_window, is_causal, getattr(module, "is_causal", True),
        None if attention_mask is None else version_of(attention_mask),
    )  # fmt: skip
    # What nobody counts the writes of is read again, but for ours, which are not written.
    counted = attention_mask is None or told[-1] is not None or attention_mask.dtype == torch.int32
    call = _calls.find(attention_mask, told) if counted else None
    if call is not None:
        engine, kv = call.engine, (key, value)
        if call.shapes:
            kv = call.pages(key, value)
    else:
        spans, bits = _meaning(module, query, key, attention_mask, sliding_window, is_causal)
        if spans.begin.any() and not rows_alike(key, value):
            # Without a cache of transformers: K of one product, V a slice of another.
            key, value = key.contiguous(), value.contiguous()
        kind = Kind(spans.causal, spans.window_left, scaling, softcap, "HND")
        engine = _planned(kind, q, (key, value), spans, bits)
        paged = isinstance(engine.layout, Padded)
        kv = engine.layout.pages(key, value) if paged else (key, value)
        if counted and told[3:5] == (key.stride(), value.stride()):
            alike = kv[0] is key and kv[1] is value
            shapes = () if alike else tuple((x.shape, x.stride()) for x in kv)
            _calls.keep(_Call(attention_mask, told, engine, engine.batch, shapes))
    out = engine.attention.run(q, kv, sinks=sinks_of(s_aux))
    out = finish(out, None, (key, value, s_aux))  # pages and sinks are detached
    return out.view(batch, q_len, heads, value.shape[3]), None


def _planned(
    kind: Kind,
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    spans: Spans,
    bits: Bits | None,
) -> Engine:
    """Find an engine that is planned for these rows, or plan it."""
    key, value = kv
    batch, kv_heads, tokens, _ = key.shape
    q_len = q.shape[0] // batch
    heads_and_dim = kv_heads, value.shape[3]
    if q_len == 1 and bits is None and tokens == value.shape[2] > 0 and not spans.begin.any():
        # A token for each row of a cache that has no padding before it, most steps of generation:
        # rows are pages. `Padded` finds that out in 110 us where caches are cold (Zen 3).
        return kind.planned(
            q,
            key,
            heads_and_dim,
            (tokens, spans.stop),
            lambda: BlockTable(None, _rows(batch), spans.stop, page_size=tokens),
            lambda: {"share_prefixes": "off"},
        )
    return kind.planned(
        q,
        key,
        heads_and_dim,
        (q_len, tokens, key.stride(), value.stride(), spans.begin, spans.stop, bits),
        lambda: _layout(spans, q_len, kv),
        lambda: {} if bits is None else {"custom_mask": bits.flat(batch, q_len)},
    )


@lru_cache(maxsize=64)
def _rows(count: int) -> npt.NDArray[np.int32]:
    """Make the page table of rows that are a page each."""
    rows = np.arange(count, dtype=np.int32)[:, None]
    rows.flags.writeable = False
    return rows


def _layout(spans: Spans, q_len: int, kv: tuple[torch.Tensor, torch.Tensor]) -> Padded:
    """Make a request of each row, or where its first queries are padding, two."""
    count = len(spans.begin)
    lens = spans.stop - spans.begin
    begins = spans.begin if spans.begin.any() else None
    each = np.arange(count)
    # Queries are the last q_len tokens before `stop`; those before the first key are padding.
    padding = np.maximum(q_len - lens, 0) if spans.causal else np.zeros_like(lens)
    if not padding.any():
        queries = np.arange(count + 1) * q_len
        return Padded(queries, lens, kv=kv, kv_layout="HND", kv_begin=begins)
    queries = np.zeros(2 * count + 1, np.int64)
    queries[1::2], queries[2::2] = each * q_len + padding, (each + 1) * q_len
    doubled: list[npt.NDArray[np.int64]] = []
    for x in (lens, spans.begin):
        pair = np.zeros(2 * count, np.int64)
        pair[1::2] = x
        doubled.append(pair)
    rows = np.repeat(each, 2)
    return Padded(queries, doubled[0], kv=kv, kv_layout="HND", kv_begin=doubled[1], rows=rows)


def _meaning(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None,
    is_causal: bool | None,
) -> tuple[Spans, Bits | None]:
    """Keys that rows have, and bits where those do not say it all."""
    batch, kv_len = key.shape[0], key.shape[2]
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and query.shape[2] not in (1, kv_len):
            raise UnsupportedError(
                "attention_mask",
                None,
                f"a mask, for {query.shape[2]} queries of {kv_len} keys that are causal",
            )
        window = sliding_window - 1 if sliding_window and causal else NO_WINDOW
        return Spans.whole(batch, kv_len, causal, window), None
    if len(attention_mask.shape) != 4:
        raise ShapeError(
            "attention_mask", f"shape {tuple(attention_mask.shape)}", "(B, 1, S_q, S_kv)"
        )
    if attention_mask.dtype == torch.int32:
        spans = Spans.of(attention_mask)
        if len(spans.begin) != batch:
            raise ShapeError("attention_mask", f"{len(spans.begin)} rows", f"{batch}, as key")
        return spans, None
    if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
        raise DTypeError("attention_mask", attention_mask.dtype, "bool or floating point")
    q_len, shape = query.shape[2], tuple(attention_mask.shape)
    if shape[3] != kv_len or shape[2] not in (1, q_len) or shape[0] not in (1, batch):
        expected = f"({batch} or 1, 1, {q_len} or 1, {kv_len})"
        raise ShapeError("attention_mask", f"shape {shape}", expected)
    return Spans.whole(batch, kv_len, False, NO_WINDOW), bits_of(attention_mask)
