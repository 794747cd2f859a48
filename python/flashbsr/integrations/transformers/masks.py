# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Masks of transformers: spans of keys where that says it all, bits where it does not.

Models make a mask once per step and kind of layer, and hand it to their layers, so that layers need
not look at padding again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import masking_utils

from ...arrays import torch as adapter
from ...errors import ShapeError, UnsupportedError
from .common import version_of
from .own import refuse_own_attention
from .steps import marked

__all__ = ["NO_WINDOW", "Bits", "Spans", "bits_of", "chosen", "mask"]

NO_WINDOW = -1
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Spans:
    """Row b sees keys ``begin[b]`` to ``stop[b]`` of its cache, the last query the last key."""

    begin: Numbers
    stop: Numbers
    causal: bool
    window_left: int

    @staticmethod
    def whole(batch: int, length: int, causal: bool, window_left: int) -> Spans:
        """All keys of all rows."""
        begin = np.zeros(batch, np.int64)
        return Spans(begin, begin + length, causal, window_left)

    @staticmethod
    def of(x: torch.Tensor) -> Spans:
        """Read what `tensor` made, unless it is the last of this thread."""
        if x is _made.tensor and _made.spans is not None and not version_of(x):
            return _made.spans
        if x.shape[1:] != (1, 1, 4):
            raise ShapeError("attention_mask", f"shape {tuple(x.shape)}", "(B, 1, 1, 4) if int32")
        rows = x.numpy(force=True)[:, 0, 0].astype(np.int64)
        return Spans(rows[:, 0], rows[:, 1], bool(rows[0, 2]), int(rows[0, 3]))

    def tensor(self) -> torch.Tensor:
        """Make an int32 tensor (B, 1, 1, 4) on the host: models pass such masks on."""
        rows = np.empty((len(self.begin), 4), np.int32)
        rows[:, 0], rows[:, 1] = self.begin, self.stop
        rows[:, 2:] = self.causal, self.window_left
        _made.tensor, _made.spans = torch.from_numpy(rows[:, None, None]), self
        return _made.tensor

    def dense(self, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
        """Make the booleans ``(B, 1, S_q, S_kv)`` that it is short for."""
        begin, stop = (
            torch.from_numpy(x).to(device)[:, None, None] for x in (self.begin, self.stop)
        )
        key = torch.arange(kv_len, device=device)
        last = stop - 1
        if self.causal:
            last = stop - q_len + torch.arange(q_len, device=device)[:, None]
        keep = (key >= begin) & (key <= last)
        if self.window_left >= 0:
            keep &= key >= last - self.window_left
        return keep.expand(len(self.begin), q_len, kv_len)[:, None]


class _Made(threading.local):
    """The last spans of a thread that became a tensor, which models pass on as it is."""

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self.spans: Spans | None = None


_made = _Made()


class Bits:
    """A boolean mask ``(B or 1, S_q or 1, S_kv)``, the same object for all layers of a step."""

    def __init__(self, keep: torch.Tensor) -> None:
        self._keep = keep  # on the host

    def holds(self, keep: torch.Tensor) -> bool:
        """Tell whether it is this mask."""
        return bool(torch.equal(self._keep, keep))

    def flat(self, batch: int, q_len: int) -> npt.NDArray[np.bool_]:
        """As the engine takes it: row after row."""
        keep: npt.NDArray[np.bool_] = self._keep.expand(batch, q_len, -1).numpy()
        return keep.reshape(-1)


class _Last(threading.local):
    def __init__(self) -> None:
        self.found: list[tuple[torch.Tensor, int | None, Bits]] = []


_last = _Last()
_KEPT = 4  # kinds of masks in a step: full, sliding, and those of an encoder


def bits_of(x: torch.Tensor) -> Bits:
    """Read a mask ``(B or 1, 1, S_q or 1, S_kv)``: booleans, or numbers to add to the logits.

    Raises
    ------
    UnsupportedError
        A mask for each head; numbers that weigh keys (a bias) and do not mask them.
    """
    version = version_of(x)
    for held, at, bits in _last.found:
        if held is x and at == version is not None:
            return bits
    if x.shape[1] != 1:
        raise UnsupportedError("attention_mask", f"{x.shape[1]} heads", "a mask for all heads")
    keep = _kept(x[:, 0]).to("cpu", copy=True)
    if version is None:  # the same object, so that layers share a plan
        for _, _, bits in _last.found:
            if bits.holds(keep):
                return bits
    bits = Bits(keep)
    _last.found = [*_last.found[1 - _KEPT :], (x, version, bits)]
    return bits


def _kept(x: torch.Tensor) -> torch.Tensor:
    """Booleans of a mask of any type."""
    if x.dtype == torch.bool:
        return x
    kept = x == 0
    if not bool((kept | (x <= torch.finfo(x.dtype).min / 2)).all()):
        raise UnsupportedError(
            "attention_mask", "numbers that weigh keys", "0 and -inf (a mask, not a bias)"
        )
    return kept


def chosen(x: torch.Tensor | None, indices: torch.Tensor, kv_len: int) -> torch.Tensor:
    """Make booleans of a mask and of the keys ``(B, S_q, topk)`` that an index chose, -1 for none.

    Layers of DeepSeek V3.2 and their like leave this to implementations that they do not know.
    """
    batch, q_len, _ = indices.shape
    if x is None or x.dtype == torch.int32:
        spans = Spans.whole(batch, kv_len, True, NO_WINDOW) if x is None else Spans.of(x)
        x = spans.dense(q_len, kv_len, indices.device)
    keep = _kept(x)
    found = torch.zeros(batch, q_len, kv_len + 1, dtype=torch.bool, device=indices.device)
    found.scatter_(-1, indices.long() % (kv_len + 1), True)  # -1: the last one, which is cut off
    return keep & found[:, None, :, :kv_len]


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Make the mask of a step for a kind of layer, with the arguments of transformers.

    Returns
    -------
    tensor
        `Spans` as a tensor where the pattern is causal (with a window, or not) or whole, and
        padding is before the tokens (behind them too if it is whole). Otherwise, and where the
        model computes with its masks, booleans ``(B, 1, S_q, S_kv)``, as ``sdpa`` gets them, or for
        layers over compressed keys 0 and -inf, as ``eager`` does. For a step over a static cache on
        a GPU these booleans, `marked`.

    Raises
    ------
    UnsupportedError
        A model with an attention of its own that adds masks to its logits.
    """
    refuse_own_attention(options.get("config"))
    adds = _has(options.get("config"), _COMPRESSED)
    pattern = _pattern(mask_function)
    on_device = not adds and _is_step(q_length, kv_length, q_offset, kv_offset, pattern, options)
    if pattern is not None and not adds and not on_device:
        first, skipped = int(q_offset), int(kv_offset)
        causal, window_left = pattern
        # Slots of a static cache behind the last query are not written yet.
        stop = first + q_length - skipped if causal else kv_length
        all_slots = window_left == NO_WINDOW and stop == kv_length
        short = not _computes_with_it(options, q_length, all_slots=all_slots)
        if short and (q_length <= stop <= kv_length or not causal):
            spans = Spans.whole(batch_size, stop, causal, window_left)
            if attention_mask is None:
                return spans.tensor()
            cut = skipped or attention_mask.shape[1] > stop
            seen = attention_mask[:, skipped : skipped + stop] if cut else attention_mask
            found = _seen(spans, seen, whole=seen.shape[1] == stop)
            if found is not None:
                return found.tensor()
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    made = (masking_utils.eager_mask if adds else masking_utils.sdpa_mask)(
        batch_size,
        q_length,
        kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )
    return marked(made) if on_device else made


def _is_step(
    q_length: int, kv_length: int, q_offset: int | torch.Tensor, kv_offset: int | torch.Tensor,
    pattern: tuple[bool, int] | None, options: dict[str, Any],
) -> bool:  # fmt: skip
    """Tell whether it is a step of one token over a static cache on a GPU.

    Every one of a cache is, the last one too, so that they are one program. Padding is not asked
    for: the mask says it all, and stays where it is. Layers that see all tokens give their length
    as a tensor, sliding ones, over a ring, as a number: of these it is one if they have slots that
    nobody has written yet, or as many as the window, or as before. To be wrong there costs a plan.
    """
    asked = q_length == 1 and not options.get("allow_is_causal_skip", True)
    # What compiles such steps makes them operators, of PyTorch 2.10 and later.
    if not asked or not adapter._EXCHANGES or not _on_gpu(options):
        return False
    if _has(options.get("config"), _INDEXED):
        return False
    if isinstance(q_offset, torch.Tensor):
        return True
    if pattern is None or pattern[1] == NO_WINDOW:
        return False
    written = int(q_offset) + 1 - int(kv_offset)
    known = kv_length > written or kv_length in (pattern[1] + 1, _ring.slots)
    _ring.slots = kv_length if known else 0
    return known


class _Ring(threading.local):
    """The ring of a thread's last step over a static cache."""

    def __init__(self) -> None:
        self.slots = 0


_ring = _Ring()


def _on_gpu(options: dict[str, Any]) -> bool:
    return str(torch.device(options.get("device", "cpu"))).startswith("cuda")


# Kinds of layers that put numbers of their own behind a mask, and that choose keys by it.
_COMPRESSED = frozenset(("compressed_sparse_attention", "heavily_compressed_attention"))
_INDEXED = frozenset(
    ("indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention")
)  # the last two: transformers 5.17


def _has(config: Any, kinds: frozenset[str]) -> bool:
    return not kinds.isdisjoint(getattr(config, "layer_types", None) or ())


def _computes_with_it(options: dict[str, Any], q_length: int, *, all_slots: bool) -> bool:
    """Tell whether a model does something with its mask before attention does.

    It asks for one of its own then (``allow_is_causal_skip=False``). So does transformers in decode
    steps over static caches, most of which have slots behind the last token, or a window.
    """
    asked = not options.get("allow_is_causal_skip", True)
    return asked and (q_length > 1 or all_slots or _has(options.get("config"), _INDEXED))


class _Padding(threading.local):
    """The last padding of a thread's causal batches: each row has its tokens at its end."""

    def __init__(self) -> None:
        self.some = False  # whether the last batch had any
        self.keep: npt.NDArray[np.bool_] | None = None
        self.begin: Numbers | None = None

    def begins(self, keep: npt.NDArray[np.bool_]) -> Numbers | None:
        """Where rows begin, if they are those of before and perhaps a token more of each."""
        held = self.keep
        if held is None or len(held) != len(keep):
            return None
        new = keep.shape[1] - held.shape[1]
        if new not in (0, 1) or (new and not keep[:, -1].all()):
            return None
        return self.begin if np.array_equal(keep[:, : held.shape[1]], held) else None

    def keep_on(self, keep: npt.NDArray[np.bool_], begin: Numbers) -> None:
        self.keep, self.begin = keep.copy(), begin  # booleans of the caller's may be written


_padding = _Padding()


def _seen(spans: Spans, mask: torch.Tensor, *, whole: bool) -> Spans | None:
    """Spans of a padding mask ``(B, S)`` on any device; None: they do not say it all.

    `whole`: it has as many tokens as `spans`.

    A GPU is asked for one number where the last batch had no padding: to bring 16 rows of 8000 here
    in every step took 90 us longer than sdpa's mask, of 200 (an H200's host).
    """
    if whole and mask.is_cuda and not _padding.some and bool(mask.all()):
        return spans
    keep = mask.bool().numpy(force=True)
    _padding.some = not (whole and keep.all())
    return _padded(spans, keep) if _padding.some else spans


def _padded(spans: Spans, keep: npt.NDArray[np.bool_]) -> Spans | None:
    """Spans of a padding mask ``(B, S)``; None: rows have holes, or queries without a key.

    Nothing is counted: 16 rows of 8000 took 0.12 ms of a step on a Zen 3 core, and take 0.02.
    """
    if spans.causal and (spans.stop == keep.shape[1]).all():
        known = _padding.begins(keep)
        if known is not None:
            _padding.keep_on(keep, known)
            return Spans(known, spans.stop, True, spans.window_left)
    begin = keep.argmax(1)
    some = keep[np.arange(len(keep)), begin]
    stop = np.full_like(begin, keep.shape[1])
    if not keep[:, -1].all():
        stop = np.where(some, stop - keep[:, ::-1].argmax(1), 0)
    if spans.causal:
        begin, stop = np.where(some, begin, spans.stop), np.where(some, stop, spans.stop)
        if (stop != spans.stop).any():
            return None
    if not keep.all():
        rows = zip(keep, begin.tolist(), stop.tolist(), strict=True)
        if not all(row[first:last].all() for row, first, last in rows):
            return None
    begin = begin.astype(np.int64)
    if spans.causal and some.all():
        _padding.keep_on(keep, begin)
    return Spans(begin, stop.astype(np.int64), spans.causal, spans.window_left)


_AND = masking_utils.and_masks().__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__


def _pattern(function: Callable[..., Any]) -> tuple[bool, int] | None:
    """Causality and window of a mask function; None: it is another one."""
    if function is masking_utils.causal_mask_function:
        return True, NO_WINDOW
    if function is masking_utils.bidirectional_mask_function:
        return False, NO_WINDOW
    if getattr(function, "__code__", None) is not _AND:
        return None
    causal, window = False, NO_WINDOW
    for part in _closure(function)["mask_functions"]:
        if part is masking_utils.causal_mask_function:
            causal = True
        elif getattr(part, "__code__", None) is _WINDOW:
            # It counts the query itself.
            found = int(_closure(part)["sliding_window"]) - 1
            window = found if window < 0 else min(window, found)
        else:
            return None
    return (causal, window) if causal else None


def _closure(function: Any) -> dict[str, Any]:
    names = function.__code__.co_freevars
    return {x: cell.cell_contents for x, cell in zip(names, function.__closure__, strict=True)}
