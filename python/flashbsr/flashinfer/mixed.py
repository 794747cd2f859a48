# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What the wrappers of two parts, prompts and decodes, share: one batch, one plan, one run."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from .._check import check_int
from ..arrays import to_indices
from ..arrays.types import Array, DType, Scale
from ..errors import FlashbsrError, PlanError, ShapeError, UnsupportedError
from .base import Wrapper, fold_data_type
from .join import Part, join_masks, join_rows

__all__ = ["TWO_WRAPPERS", "Mixed", "both_masks", "page_table", "query_lens"]

TWO_WRAPPERS = "two wrappers run the parts one after the other"


class Mixed(Wrapper):
    """A plan of two parts, made again where a run's causality or masks are not the planned ones."""

    _spelling: ClassVar[dict[str, str]] = {**Wrapper._spelling, "kv": "paged_kv_cache_d"}

    def __init__(
        self,
        workspace: Array | int | None,
        kv_layout: str,
        backend: str,
        lse_base: str,
        num_threads: int | None,
    ) -> None:
        super().__init__(workspace, kv_layout, backend, lse_base, num_threads)
        self._options: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._batch: tuple[Any, ...] = ()
        self._parts: list[Part] = []
        self._stream: Any = None
        self._causal: bool | None = None  # of the current plan; None: it has a mask

    def _take(
        self, spec: dict[str, Any], task: dict[str, Any], data_type: DType, stream: Any
    ) -> None:
        q, kv = fold_data_type(data_type, task["q_dtype"], task["kv_dtype"])
        self._options = spec, {**task, "q_dtype": q, "kv_dtype": kv}
        self._stream = stream

    def _forget(self) -> None:
        """Whatever raises from here on leaves no plan."""
        self._options = self._attention = None

    def _plan_parts(self, causal: bool, masks: dict[str, Array]) -> None:
        """Plan, unless the plan is this one."""
        if self._options is None:
            self._planned()
        assert self._options is not None
        masked = any(mask is not None for mask in masks.values())
        if self._attention is not None and not masked and self._causal == causal:
            return
        if causal and not masked and (self._parts[1].q_lens > 1).any():
            raise UnsupportedError(
                "causal_p",
                True,
                "False, or decodes of one query token each, which causality does not cut; "
                "BatchAttention(causal=True) for several: " + TWO_WRAPPERS,
            )
        bits = join_masks(self._parts, masks, causal) if masked else None
        causal_now = causal and not masked
        spec, task = self._options
        attention = self._engine_of({**spec, "causal": causal_now}, task)
        self._attention = None  # stays so if the plan fails
        qo_indptr, kv_indptr, kv_indices, kv_lens = self._batch
        self._plan(
            attention, qo_indptr, kv_indptr, kv_indices, kv_lens=kv_lens,
            packed_custom_mask=bits, stream=self._stream,
        )  # fmt: skip
        self._causal = None if masked else causal

    def _join_batch(self, parts: list[tuple[Part, Any, Any]]) -> None:
        """Make one batch of parts with their page tables (indptr, indices)."""
        q_lens = np.concatenate([part.q_lens for part, _, _ in parts])
        pages = np.concatenate([np.diff(indptr) for _, indptr, _ in parts])
        self._parts = [part for part, _, _ in parts]
        self._batch = (
            np.concatenate([[0], np.cumsum(q_lens)]),
            np.concatenate([[0], np.cumsum(pages)]),
            np.concatenate([indices[: indptr[-1]] for _, indptr, indices in parts]),
            np.concatenate([part.kv_lens for part, _, _ in parts]),
        )
        self._attention = None

    def _run_parts(
        self,
        q: tuple[Array, Array],
        kv: Any,
        scales: tuple[Scale, Scale, Scale],
        return_lse: bool,
        **options: Any,
    ) -> list[tuple[Any, Any]]:
        """Run; ``[(out_p, out_d)]``, and the same of the LSE if asked, views of one array each."""
        for x, part in zip(q, self._parts, strict=True):
            count = int(part.q_lens.sum())
            if len(getattr(x, "shape", ())) == 3 and x.shape[0] != count:
                raise PlanError(part.name("q"), f"{x.shape[0]} rows", f"the planned {count}")
        rows = join_rows(*q, ("q_p", "q_d"))
        found = self._run(rows, kv, None, None, return_lse, *scales, None, **options)
        first = q[0].shape[0]
        return [(x[:first], x[first:]) for x in (found if return_lse else (found,))]


def page_table(
    indptr: Array, indices: Array, last: Array, page_size: int, suffix: str
) -> tuple[Any, Any, Any]:
    """Page table on the host, and the KV lengths."""
    check_int("page_size", page_size, 1)
    names = [f"{name}{suffix}" for name in ("kv_indptr", "kv_indices", "last_page_len")]
    arrays = [to_indices(x, name) for x, name in zip((indptr, indices, last), names, strict=True)]
    pages = np.diff(arrays[0])
    if arrays[2].shape != pages.shape:
        raise ShapeError(names[2], f"shape {arrays[2].shape}", f"{pages.shape}: one per request")
    wrong = np.flatnonzero((pages > 0) & ((arrays[2] < 1) | (arrays[2] > page_size)))
    if wrong.size:
        at = int(wrong[0])
        raise FlashbsrError(f"{names[2]}[{at}]", arrays[2][at], f"in [1, page_size = {page_size}]")
    if arrays[0].size == 0 or arrays[0][0] != 0 or (pages < 0).any():
        raise FlashbsrError(names[0], arrays[0][:9].tolist(), "offsets from 0 on, none decreasing")
    if arrays[1].size < arrays[0][-1]:
        raise ShapeError(names[1], f"length {arrays[1].size}", f"at least {arrays[0][-1]}")
    return arrays[0], arrays[1], np.where(pages > 0, (pages - 1) * page_size + arrays[2], 0)


def query_lens(qo_indptr: Array, name: str, batch: int) -> Any:
    """Query tokens of each request."""
    values = to_indices(qo_indptr, name)
    if values.shape != (batch + 1,):
        raise ShapeError(name, f"shape {values.shape}", f"({batch + 1},): batch size + 1")
    lens = np.diff(values)
    if values[0] != 0 or (lens < 0).any():
        raise FlashbsrError(name, values[:9].tolist(), "offsets from 0 on, none decreasing")
    return lens


def both_masks(
    mask_p: Array = None, packed_p: Array = None, mask_d: Array = None, packed_d: Array = None
) -> dict[str, Array]:
    """Name the masks of both parts."""
    return {
        "custom_mask_p": mask_p,
        "packed_custom_mask_p": packed_p,
        "custom_mask_d": mask_d,
        "packed_custom_mask_d": packed_d,
    }
