# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Attention under block-sparse matrices: of equal blocks, and of blocks of different sizes."""

from __future__ import annotations

from typing import Any, ClassVar

from .._check import check_int, check_name
from ..arrays import adapter_for, device_of, float_dtype
from ..arrays.dtypes import Q_DTYPES, output_dtype
from ..arrays.types import Array, DType, Scale
from ..engine.attention import Attention
from ..errors import (
    PlanError,
    ShapeError,
    UnsupportedError,
)
from ..layout.bsr_blocks import causal_blocks, variable_blocks
from ..layout.layouts import Bsr
from ._arguments import FLOAT16, Number, Workspace
from ._base import Wrapper

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"]


class _Sparse(Wrapper):
    """What both wrappers share."""

    def __init__(
        self, float_workspace_buffer: Workspace = None, backend: str = "auto", *,
        lse_base: str = "2", num_threads: int | None = None,
    ) -> None:  # fmt: skip
        self._set_up(locals())
        self._tokens = (0, 0)  # of q; of k and v

    def _check(self, given: dict[str, Any]) -> None:
        if (mode := given["pos_encoding_mode"]) != "NONE":
            check_name("pos_encoding_mode", mode, ("NONE", "ROPE_LLAMA", "ALIBI"))
            way_out = "'NONE': gathered blocks have no positions; apply_rope_pos_ids first"
            raise UnsupportedError("pos_encoding_mode", repr(mode), way_out)


class BlockSparseAttentionWrapper(_Sparse):
    """Attention of M queries against N keys, for the blocks that a BSR matrix names.

    Row block *i* (queries ``i R .. i R + R - 1``) meets the column blocks
    ``indices[indptr[i]:indptr[i + 1]]`` (keys ``j C .. j C + C - 1``).
    """

    _context = ("sparse",)
    _spelling: ClassVar[dict[str, str]] = {
        "m": "M", "n": "N", "r": "R", "c": "C", "page_size": "C", "q_scale": "scale_q",
        "k_scale": "scale_k", "v_scale": "scale_v",
    }  # fmt: skip

    def plan(
        self, indptr: Array, indices: Array, M: int, N: int, R: int, C: int, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, mask: Array = None, packed_mask: Array = None,
        causal: bool = False, pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        logits_soft_cap: Number = None, sm_scale: Number = None, rope_scale: Number = None,
        rope_theta: Number = None, q_data_type: DType = FLOAT16, kv_data_type: DType = None,
        o_data_type: DType = FLOAT16, non_blocking: bool = True, block_mask: Any = None, *,
        fp8_accumulation: str = "default", per_head: bool = False,
    ) -> None:  # fmt: skip
        """Schedule the matrix. Checks it completely."""
        self._plan(locals())

    def _start(self, attention: Attention, given: dict[str, Any]) -> None:
        indptr, indices, m, n, r, c = (given[name] for name in ("indptr", "indices", *"MNRC"))
        mask, packed_mask = given["mask"], given["packed_mask"]
        if given["causal"]:
            if device_of(indptr, "indptr") is not None:
                attention.settle(indptr, "indptr")
            heads = given["num_kv_heads"] if given["per_head"] else 1
            matrix = indptr, indices, m, n, r, c
            indptr, indices, mask = causal_blocks(*matrix, mask, packed_mask, heads)
            packed_mask = None
        masks = {"mask": mask, "packed_mask": packed_mask, "per_head": given["per_head"]}
        attention.plan(Bsr(indptr, indices, (m, n), (check_int("R", r, 1), c), **masks))
        self._tokens = m, n

    def run(
        self, q: Array, k: Array, v: Array, scale_q: Scale = None, scale_k: Scale = None,
        scale_v: Scale = None, out: Array = None, lse: Array = None, return_lse: bool = False,
        enable_pdl: bool | None = None, *, sinks: Array = None,
    ) -> Any:  # fmt: skip
        """Compute the planned matrix: q ``[M, ...]``, k and v ``[N, ...]``."""
        self._ready()
        for name, x in (("k", k), ("v", v)):
            adapter_for(x, name)
            shape, tokens = tuple(x.shape), self._tokens[1]
            if len(shape) != 3 or shape[0] != tokens:
                raise ShapeError(name, f"shape {shape}", f"({tokens}, num_kv_heads, head_dim)")
        return self._run(
            q, (k, v), out, lse, return_lse, scale_q, scale_k, scale_v, sinks, None, enable_pdl
        )


class VariableBlockSparseAttentionWrapper(_Sparse):
    """Attention for blocks of any heights and widths, chosen for each KV head.

    The queries of KV head *h* are cut into MB blocks of ``block_row_sz[h]``, its keys into NB
    blocks of ``block_col_sz[h]``; query block *i* meets the key blocks *j* with
    ``block_mask_map[h, i, j]``.

    Notes
    -----
    Nothing is expanded to tokens unless sizes leave no other way: a page is as many tokens as
    divide every place where what is seen changes (`page_size`). Sizes that are multiples of 16
    give pages of 16 tokens or more; one odd place in any head gives pages of one token. On Hopper,
    pages of a multiple of 8 tokens are loaded by TMA, others row by row. Heads come first, and are
    passed on as strides: nothing is copied but JAX's arrays, which have none.
    """

    _context = ("variable", "sparse")
    _spelling: ClassVar[dict[str, str]] = {"indptr": "block_mask_map", "page_size": "block_col_sz"}

    @property
    def page_size(self) -> int:
        """Tokens of a page of the current plan. Raises `PlanError` before ``plan``."""
        return self.plan_info.header.page_size

    def plan(
        self, block_mask_map: Array, block_row_sz: Array, block_col_sz: Array, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, logits_soft_cap: Number = None,
        sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None,
        non_blocking: bool = True, q_data_type: DType = FLOAT16, kv_data_type: DType = None, *,
        o_data_type: DType = None, fp8_accumulation: str = "default",
    ) -> None:  # fmt: skip
        """Schedule the matrices. Checks them completely."""
        self._plan(locals())

    def _check(self, given: dict[str, Any]) -> None:
        super()._check(given)
        if given["causal"]:
            way_out = "False: cut blocks at the diagonal, or take BlockSparseAttentionWrapper"
            raise UnsupportedError("causal", True, way_out)
        heads = check_int("num_kv_heads", given["num_kv_heads"], 1)
        names = "block_mask_map", "block_row_sz", "block_col_sz"
        block_map, rows, columns = (given[name] for name in names)
        given["matrix"] = variable_blocks(block_map, rows, columns, heads)

    def _start(self, attention: Attention, given: dict[str, Any]) -> None:
        if device_of(given["block_mask_map"], "block_mask_map") is not None:
            attention.settle(given["block_mask_map"], "block_mask_map")
        matrix = given.pop("matrix")
        attention.plan(matrix)
        self._tokens = matrix.shape

    def run(
        self, q: Array, k: Array, v: Array, out: Array = None, lse: Array = None,
        return_lse: bool = False, enable_pdl: bool | None = None, *, scale_q: Scale = None,
        scale_k: Scale = None, scale_v: Scale = None, sinks: Array = None,
    ) -> Any:  # fmt: skip
        """Compute the planned matrices.

        Returns
        -------
        out [num_qo_heads, queries, head_dim], or (out, lse [num_qo_heads, queries])
            Of the caller's kind. A row that sees no key gives 0, and -inf.
        """
        task = self._ready().task
        for name, x, tokens in zip("qkv", (q, k, v), (*self._tokens, self._tokens[1]), strict=True):
            adapter_for(x, name)
            shape = tuple(x.shape)
            if len(shape) != 3:
                raise ShapeError(name, f"shape {shape}", "(heads, tokens, head_dim)")
            if shape[1] != tokens:
                raise PlanError(name, f"{shape[1]} tokens", f"{tokens}, as planned")
        adapter = adapter_for(q, "q")
        with_lse = return_lse or lse is not None
        result, result_lse = out, lse
        rows = (task.num_qo_heads, self._tokens[0])
        if adapter.MUTABLE:  # contiguous as the caller counts
            if out is None:
                o_dtype = task.o_dtype or output_dtype(float_dtype(q, "q", Q_DTYPES))
                result = adapter.empty(q, (*rows, task.head_dim_qk), o_dtype)
            if with_lse and lse is None:
                result_lse = adapter.empty(q, rows, "float32")
        found = self._run(
            _tokens_first(q), (_tokens_first(k), _tokens_first(v)), _tokens_first(result, "out"),
            _tokens_first(result_lse, "lse", 2), with_lse, scale_q, scale_k, scale_v, sinks, None,
            enable_pdl,
        )  # fmt: skip
        found, found_lse = found if with_lse else (found, found)
        result = found.swapaxes(0, 1) if result is None else result
        if not return_lse:
            return result
        return result, found_lse.swapaxes(0, 1) if result_lse is None else result_lse


def _tokens_first(x: Any, name: str = "q", rank: int = 3) -> Any:
    if x is None:
        return None
    adapter_for(x, name)
    if len(x.shape) != rank:
        dims = ("heads", "tokens", "head_dim")[:rank]
        raise ShapeError(name, f"shape {tuple(x.shape)}", f"({', '.join(dims)})")
    return x.swapaxes(0, 1)
