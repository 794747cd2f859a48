# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over blocks of different sizes, each KV head with a matrix of its own."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from .._check import check_int, check_name
from ..arrays import adapter_for, float_dtype, to_numpy
from ..arrays.dtypes import Q_DTYPES, output_dtype
from ..arrays.types import Array, DType, Scale
from ..errors import (
    DTypeError,
    FlashbsrError,
    IndexRangeError,
    PlanError,
    ShapeError,
    UnsupportedError,
)
from .base import Wrapper, reject

__all__ = ["VariableBlockSparseAttentionWrapper"]

Ints = npt.NDArray[np.int64]


class VariableBlockSparseAttentionWrapper(Wrapper):
    """Attention for blocks of any heights and widths, chosen for each KV head.

    The queries of KV head *h* are cut into MB blocks of ``block_row_sz[h]``, its keys into NB
    blocks of ``block_col_sz[h]``; query block *i* meets the key blocks *j* with
    ``block_mask_map[h, i, j]``. FlashInfer, MLSys 2025, section 3.1.

    Parameters
    ----------
    float_workspace_buffer : None, int or uint8 array
        As in `BlockSparseAttentionWrapper`, like the others.
    backend : {"auto", "cpu", "cuda", "fa2", "fa3"}
    lse_base : {"e", "2"}
    num_threads : int, optional

    Notes
    -----
    Nothing is expanded to tokens unless sizes leave no other way: a page is as many tokens as
    divide every place where what is seen changes (`page_size`). Sizes that are multiples of 16
    give pages of 16 tokens or more; one odd place in any head gives pages of one token. The index
    array has one int32 for each visible page of each block row and head. On Hopper, pages of a
    multiple of 8 tokens are loaded by TMA, others row by row.

    Examples
    --------
    Keys are zero, so that attention is the mean of the visible values, which are the positions.

    >>> import numpy as np
    >>> import flashbsr
    >>> wrapper = flashbsr.flashinfer.VariableBlockSparseAttentionWrapper()
    >>> wrapper.plan(
    ...     np.array([[[True, False, True], [False, True, False]]]),
    ...     np.array([[1, 3]]), np.array([[2, 2, 3]]),
    ...     num_qo_heads=1, num_kv_heads=1, head_dim=32,
    ... )
    >>> q = np.ones((1, 4, 32), np.float32)
    >>> k = np.zeros((1, 7, 32), np.float32)
    >>> v = k + np.arange(7, dtype=np.float32)[:, None]
    >>> wrapper.run(q, k, v)[0, :, 0].tolist()
    [3.200000047683716, 2.5, 2.5, 2.5]
    >>> wrapper.page_size, wrapper.plan_info.kv_indices.tolist()
    (2, [0, 2, 3, 1])
    """

    _spelling: ClassVar[dict[str, str]] = {
        **Wrapper._spelling,
        "indptr": "block_mask_map",
        "page_size": "block_col_sz",
        "head_dim_qk": "head_dim",
    }

    def __init__(
        self,
        float_workspace_buffer: Array | int | None = None,
        backend: str = "auto",
        *,
        lse_base: str = "e",
        num_threads: int | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, "NHD", backend, lse_base, num_threads)
        self._tokens = (0, 0)  # of q; of k and v

    @property
    def page_size(self) -> int:
        """Tokens of a page of the current plan. Raises `PlanError` before ``plan``."""
        return self.plan_info.header.page_size

    def plan(
        self,
        block_mask_map: Array,
        block_row_sz: Array,
        block_col_sz: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,  # noqa: ARG002
        q_data_type: DType = None,
        kv_data_type: DType = None,
        *,
        o_data_type: DType = None,
        fp8_accumulation: str = "default",
    ) -> None:
        """Schedule the matrices. Checks them completely.

        Parameters
        ----------
        block_mask_map : bool array [num_kv_heads, MB, NB]
        block_row_sz : int array [num_kv_heads, MB]
            Queries of each block, 0 or more, the same sum in every head.
        block_col_sz : int array [num_kv_heads, NB]
            Keys of each block, likewise.
        num_qo_heads, num_kv_heads : int
            The first is a multiple of the second.
        head_dim : int
            Multiple of 8, at most 256.
        causal : bool
            Only False: cut blocks at the diagonal, or take `BlockSparseAttentionWrapper`.
        pos_encoding_mode : {"NONE"}
            Only NONE: see `apply_rope_pos_ids`.
        use_fp16_qk_reduction : bool
            Only False.
        logits_soft_cap, sm_scale, q_data_type, kv_data_type, o_data_type, fp8_accumulation
            As in `BlockSparseAttentionWrapper.plan`.
        rope_scale, rope_theta : None
        non_blocking : bool
            Without effect: host arrays are never waited for, arrays on a GPU are copied back once.

        Raises
        ------
        ShapeError, DTypeError, IndexRangeError, CapacityError, UnsupportedError, FlashbsrError
            The argument, what it was, what is allowed. There is no plan afterwards.
        """
        self._attention = None
        reject(use_fp16_qk_reduction=use_fp16_qk_reduction)
        if causal:
            raise UnsupportedError(
                "causal",
                True,
                "False: cut blocks at the diagonal and leave out those above it, or take "
                "BlockSparseAttentionWrapper, which writes causality into a mask",
            )
        reject_positions(pos_encoding_mode, rope_scale, rope_theta)
        heads = check_int("num_kv_heads", num_kv_heads, 1)
        seen = _map(block_mask_map, heads)
        row_indptr = _offsets("block_row_sz", block_row_sz, (heads, seen.shape[1]))
        column_indptr = _offsets("block_col_sz", block_col_sz, (heads, seen.shape[2]))
        page, indptr, indices = block_pages(seen, column_indptr)
        tokens = int(row_indptr[0, -1]), int(column_indptr[0, -1])
        attention = self._engine_of(
            {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap},
            {
                "num_qo_heads": num_qo_heads,
                "num_kv_heads": heads,
                "head_dim_qk": head_dim,
                "page_size": page,
                "q_dtype": q_data_type,
                "kv_dtype": kv_data_type,
                "o_dtype": o_data_type,
                "fp8_accumulation": fp8_accumulation,
            },
        )
        attention._settle_on_gpu(block_mask_map=block_mask_map)
        matrix = indptr, indices, *tokens, row_indptr, page
        self._plan_by(attention, attention.plan_bsr, *matrix, per_head=True)
        self._tokens = tokens

    def run(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array = None,
        lse: Array = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        *,
        scale_q: Scale = None,
        scale_k: Scale = None,
        scale_v: Scale = None,
        sinks: Array = None,
    ) -> Any:
        """Compute the planned matrices.

        Parameters
        ----------
        q : array [num_qo_heads, queries, head_dim]
            float32, float16, bfloat16 or float8_e4m3fn.
        k, v : array [num_kv_heads, keys, head_dim]
            The type of `q`, or unless that is float8 also float8_e4m3fn / float8_e5m2.
        out : array [num_qo_heads, queries, head_dim], optional
            Written and returned.
        lse : float32 array [num_qo_heads, queries], optional
            Written and returned.
        return_lse : bool
            Return ``(out, lse)``.
        enable_pdl, scale_q, scale_k, scale_v, sinks
            As in `BlockSparseAttentionWrapper.run`.

        Returns
        -------
        out : array [num_qo_heads, queries, head_dim]
            Of the caller's kind. A row that sees no key gives 0.
        lse : float32 array [num_qo_heads, queries]
            Only with ``return_lse=True``. ``-inf`` for a row that sees no key.

        Raises
        ------
        PlanError
            No plan, or the arrays do not match it.
        ShapeError, DTypeError, DeviceError, UnsupportedError

        Notes
        -----
        Heads come first, and are passed on as strides: nothing is copied but JAX's arrays, which
        have none.
        """
        task = self._planned().task
        arrays = {"q": (q, self._tokens[0]), "k": (k, self._tokens[1]), "v": (v, self._tokens[1])}
        for name, (x, tokens) in arrays.items():
            adapter_for(x, name)
            shape = tuple(x.shape)
            if len(shape) != 3:
                raise ShapeError(name, f"shape {shape}", "(heads, tokens, head_dim)")
            if shape[1] != tokens:
                raise PlanError(name, f"{shape[1]} tokens", f"{tokens}, as planned")
        adapter = adapter_for(q, "q")
        return_lse = return_lse or lse is not None
        result, result_lse = out, lse
        rows = (task.num_qo_heads, self._tokens[0])
        if adapter.MUTABLE:  # contiguous as the caller counts
            if out is None:
                o_dtype = task.o_dtype or output_dtype(float_dtype(q, "q", Q_DTYPES))
                result = adapter.empty(q, (*rows, task.head_dim_qk), o_dtype)
            if return_lse and lse is None:
                result_lse = adapter.empty(q, rows, "float32")
        found = self._run(
            _tokens_first(q),
            (_tokens_first(k), _tokens_first(v)),
            _tokens_first(result, "out"),
            _tokens_first(result_lse, "lse", 2),
            return_lse,
            scale_q,
            scale_k,
            scale_v,
            sinks,
            None,
            enable_pdl,
        )
        if not return_lse:
            return found.swapaxes(0, 1) if result is None else result
        found, found_lse = found
        if result is None:
            result = found.swapaxes(0, 1)
        if result_lse is None:
            result_lse = found_lse.swapaxes(0, 1)
        return result, result_lse


def reject_positions(mode: str, rope_scale: float | None, rope_theta: float | None) -> None:
    """Raise `UnsupportedError` for encodings of positions, which gathered blocks have none of."""
    if mode != "NONE":
        check_name("pos_encoding_mode", mode, ("NONE", "ROPE_LLAMA", "ALIBI"))
        raise UnsupportedError(
            "pos_encoding_mode",
            repr(mode),
            "'NONE': gathered blocks have no running position; rotate q and k first with "
            "apply_rope_pos_ids",
        )
    for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        if value is not None:
            raise UnsupportedError(name, value, "None: give it to apply_rope_pos_ids")


def _tokens_first(x: Any, name: str = "q", rank: int = 3) -> Any:
    if x is None:
        return None
    adapter_for(x, name)
    if len(x.shape) != rank:
        dims = ("heads", "tokens", "head_dim")[:rank]
        raise ShapeError(name, f"shape {tuple(x.shape)}", f"({', '.join(dims)})")
    return x.swapaxes(0, 1)


def _map(block_mask_map: Array, heads: int) -> npt.NDArray[np.bool_]:
    seen = to_numpy(block_mask_map, "block_mask_map")
    if seen.dtype not in (np.bool_, np.uint8):
        raise DTypeError("block_mask_map", seen.dtype, "bool or uint8")
    if seen.ndim != 3 or seen.shape[0] != heads:
        raise ShapeError("block_mask_map", f"shape {seen.shape}", f"({heads}, MB, NB)")
    return seen.astype(np.bool_, copy=False)


def _offsets(name: str, sizes: Array, shape: tuple[int, int]) -> Ints:
    """Offsets of blocks in each head, ``(heads, blocks + 1)``."""
    counts = to_numpy(sizes, name)
    if counts.shape != shape:
        raise ShapeError(name, f"shape {counts.shape}", f"{shape}, as block_mask_map has blocks")
    if counts.dtype.kind not in "iu" and counts.size:
        raise DTypeError(name, counts.dtype, "integers")
    if counts.size and counts.min() < 0:
        at = tuple(int(i) for i in np.argwhere(counts < 0)[0])
        raise IndexRangeError(name, f"{counts[at]} at {at}", "0 or more")
    offsets = np.zeros((shape[0], shape[1] + 1), np.int64)
    np.cumsum(counts, axis=1, out=offsets[:, 1:])
    if (offsets[:, -1] != offsets[0, -1]).any():
        head = int(np.argmax(offsets[:, -1] != offsets[0, -1]))
        raise FlashbsrError(
            name,
            f"a sum of {offsets[head, -1]} in head {head}",
            f"{offsets[0, -1]}, that of head 0",
        )
    return offsets


def block_pages(seen: npt.NDArray[np.bool_], column_indptr: Ints) -> tuple[int, Ints, Ints]:
    """Block columns of any widths as pages of one size.

    Columns that all rows of a head see alike are one; a page then is as many tokens as divide the
    places between them, but for the end of all.

    Parameters
    ----------
    seen : bool array [heads, block rows, block columns]
    column_indptr : int64 array [heads, block columns + 1]
        Where columns begin.

    Returns
    -------
    page_size : int
    indptr : int64 array [heads x block rows + 1]
    indices : int64 array [indptr[-1]]
        Pages of each block row, head after head.

    Examples
    --------
    >>> import numpy as np
    >>> seen = np.array([[[True, True, False], [False, False, True]]])
    >>> page_size, indptr, indices = block_pages(seen, np.array([[0, 5, 8, 21]]))
    >>> page_size, indptr.tolist(), indices.tolist()
    (8, [0, 1, 3], [0, 1, 2])
    """
    heads, rows, _ = seen.shape
    tokens = int(column_indptr[0, -1])
    parts: list[tuple[Ints, npt.NDArray[np.bool_]]] = []  # where columns begin; who sees them
    for h in range(heads):
        some = np.diff(column_indptr[h]) > 0
        begins, columns = column_indptr[h, :-1][some], seen[h][:, some]
        first = np.ones(len(begins), np.bool_)
        first[1:] = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
        parts.append((begins[first], columns[:, first]))
    page = math.gcd(*(int(np.gcd.reduce(begins)) for begins, _ in parts)) or max(tokens, 1)
    counts, indices = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)]
    for begins, columns in parts:
        first_page = begins // page
        pages = np.diff(first_page, append=-(-tokens // page))
        row, column = np.nonzero(columns)
        each = pages[column]
        counts.append(np.bincount(row, each, minlength=rows).astype(np.int64))
        nth = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
        indices.append(np.repeat(first_page[column], each) + nth)
    return page, np.cumsum(np.concatenate(counts)), np.concatenate(indices)
