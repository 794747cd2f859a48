# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The one computation behind the functions that take block tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._check import check_backend, check_int, check_name
from ..arrays import adapter_for, to_values
from ..arrays.types import Array, DType, Scale
from ..errors import DTypeError, FlashbsrError, ShapeError
from .engines import Engines

__all__ = ["Call", "check_most", "lengths", "query_indptr"]

_engines = Engines()  # their notes: lengths and table of the plan

Ints = npt.NDArray[Any]


def lengths(x: Array, name: str, batch: int | None = None) -> Ints:
    """Host copy of sequence lengths, of any integer type and with axes of length 1."""
    values = to_values(x, name)
    if values.dtype.kind not in "iu":
        raise DTypeError(name, values.dtype, "int32, uint32 or int64")
    values = values.reshape(-1).astype(np.int64)
    if batch is not None and len(values) != batch:
        raise ShapeError(name, f"{len(values)} lengths", f"{batch}: one per request")
    return values


def check_most(name: str, most: Any, values: Ints) -> None:
    """Raise if a length is larger than the caller says."""
    longest = int(values.max(initial=0))
    if check_int(name, most, 0) < longest:
        raise FlashbsrError(name, most, f"at least {longest}, the longest")


def query_indptr(q_len_per_req: int, batch: int) -> Ints | None:
    """Offsets of equal numbers of query tokens; None: one each."""
    if check_int("q_len_per_req", q_len_per_req, 1) == 1:
        return None
    return np.arange(batch + 1) * q_len_per_req


def _shape_of_cache(cache: Any, kv_layout: str, argument: str) -> tuple[int, int, int]:
    """Page size, KV heads and head_dim_vo."""
    check_name("kv_layout", kv_layout, ("NHD", "HND"))
    stacked = not isinstance(cache, tuple)
    shape = tuple(cache.shape if stacked else cache[-1].shape)
    if len(shape) != (5 if stacked else 4):
        axes = "page_size, num_kv_heads" if kv_layout == "NHD" else "num_kv_heads, page_size"
        raise ShapeError(
            argument, f"shape {shape}", f"[pages, {'2, ' if stacked else ''}{axes}, head_dim]"
        )
    page_size, heads = shape[-3:-1] if kv_layout == "NHD" else shape[-2:-4:-1]
    return page_size, heads, shape[-1]


@dataclass
class Call:
    """Arguments under our names; `run` plans and computes."""

    q: Array
    kv: Any
    block_tables: Array | None  # None: KV is ragged
    kv_lens: Ints
    qo_indptr: Ints | None
    causal: bool
    sm_scale: float
    spelling: dict[str, str]  # our names -> the caller's
    kv_layout: str = "HND"
    window_left: int = -1
    workspace: Array | int | None = None
    backend: str = "auto"
    o_dtype: DType = None
    lse_base: str = "e"
    fp8_accumulation: str = "default"

    def run(
        self,
        out: Array,
        lse: Array,
        return_lse: bool,
        scales: tuple[Scale, Scale, Scale],
        sinks: Array = None,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Return the output, or it and the LSE; errors name the caller's arguments."""
        try:
            return self._run(out, lse, return_lse, scales, sinks, enable_pdl)
        except FlashbsrError as error:
            raise error.respell(self.spelling) from None

    def _run(
        self, out: Array, lse: Array, return_lse: bool, scales: Any, sinks: Array, pdl: Any
    ) -> Any:
        adapter_for(self.q, "q")
        for x in self.kv if isinstance(self.kv, tuple) else (self.kv,):
            adapter_for(x, "kv")
        check_backend(self.backend)
        if len(self.q.shape) != 3:
            shape = tuple(self.q.shape)
            raise ShapeError("q", f"shape {shape}", "[tokens, num_qo_heads, head_dim]")
        if self.block_tables is None:
            page_size, (heads, head_dim_vo) = None, tuple(self.kv[1].shape)[-2:]
        else:
            page_size, heads, head_dim_vo = _shape_of_cache(self.kv, self.kv_layout, "kv")
        o_dtype = self.o_dtype
        if o_dtype is None and out is not None:
            o_dtype = adapter_for(out, "out").dtype_name(out, "out")
        spec = {
            "causal": self.causal, "window_left": self.window_left, "sm_scale": self.sm_scale,
        }  # fmt: skip
        task = {
            "num_qo_heads": self.q.shape[1], "num_kv_heads": heads,
            "head_dim_qk": self.q.shape[2], "head_dim_vo": head_dim_vo, "page_size": page_size,
            "kv_layout": self.kv_layout, "lse_base": self.lse_base, "backend": self.backend,
            "o_dtype": o_dtype, "fp8_accumulation": self.fp8_accumulation,
        }  # fmt: skip
        key = (*spec.values(), *task.values())
        engine = _engines.find(key, spec, task, self.q, self.workspace)
        self._plan(engine)
        return engine.attention.run(
            self.q, self.kv, out=out, lse=lse, return_lse=return_lse, q_scale=scales[0],
            k_scale=scales[1], v_scale=scales[2], sinks=sinks, enable_pdl=pdl,
        )  # fmt: skip

    def _plan(self, engine: Any) -> None:
        """Plan, unless the last call of this engine had the same lengths and pages."""
        batch: tuple[Any, ...]
        if self.block_tables is None:
            indptr = np.concatenate([[0], np.cumsum(self.kv_lens)])
            batch = (self.qo_indptr, indptr)
        else:
            table = to_values(self.block_tables, "block_tables")
            batch = (self.qo_indptr, table, self.kv_lens)
        if engine.planned is not None and all(map(_equal, engine.planned, batch)):
            return
        engine.planned = None  # stays so if plan raises
        if self.block_tables is None:
            engine.attention.plan(*batch)
        else:
            engine.attention.plan_block_table(*batch)
        engine.planned = tuple(None if x is None else x.copy() for x in batch)


def _equal(a: Ints | None, b: Ints | None) -> bool:
    if a is None or b is None:
        return a is b
    return bool(np.array_equal(a, b))
