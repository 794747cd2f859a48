# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Attention under a block-sparse-row matrix."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from .._check import check_int
from ..arrays import adapter_for, to_indices, to_numpy, to_values
from ..arrays.types import Array, DType, Scale
from ..errors import DTypeError, FlashbsrError, IndexRangeError, ShapeError
from .base import Wrapper, reject
from .variable_sparse import VariableBlockSparseAttentionWrapper, reject_positions

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"]


class BlockSparseAttentionWrapper(Wrapper):
    """Attention of M queries against N keys, for the blocks that a BSR matrix names.

    Row block *i* (queries ``i R .. i R + R - 1``) meets the column blocks
    ``indices[indptr[i]:indptr[i + 1]]`` (keys ``j C .. j C + C - 1``). FlashInfer, MLSys 2025,
    section 3.1.

    Parameters
    ----------
    float_workspace_buffer : None, int or uint8 array
        Scratch memory for partial results: None (owned by the wrapper and sized by ``plan``), a
        size in bytes, or an array. `CapacityError` in ``plan`` if it is too small.
    backend : {"auto", "cpu", "cuda", "fa2", "fa3"}
        As in `TaskInfo`.
    lse_base : {"e", "2"}
        Base of the LSE. FlashInfer's is 2.
    num_threads : int, optional
        Threads that compute. Default: the machine's cores.

    Examples
    --------
    Queries 0, 1 see keys 0, 1; queries 2, 3 see keys 0, 1, 4, 5. Keys are zero, so that attention
    is the mean of the visible values, which are the positions.

    >>> import numpy as np
    >>> import flashbsr
    >>> wrapper = flashbsr.flashinfer.BlockSparseAttentionWrapper(None)
    >>> wrapper.plan(
    ...     np.array([0, 1, 3]), np.array([0, 0, 2]), M=4, N=6, R=2, C=2,
    ...     num_qo_heads=1, num_kv_heads=1, head_dim=32,
    ... )
    >>> q = np.ones((4, 1, 32), np.float32)
    >>> k = np.zeros((6, 1, 32), np.float32)
    >>> v = k + np.arange(6, dtype=np.float32)[:, None, None]
    >>> wrapper.run(q, k, v)[:, 0, 0].tolist()
    [0.5, 0.5, 2.5, 2.5]
    """

    _spelling: ClassVar[dict[str, str]] = {
        **Wrapper._spelling,
        "m": "M",
        "n": "N",
        "r": "R",
        "c": "C",
        "page_size": "C",
        "head_dim_qk": "head_dim",
        "q_scale": "scale_q",
        "k_scale": "scale_k",
        "v_scale": "scale_v",
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
        self._n = 0

    def plan(
        self,
        indptr: Array,
        indices: Array,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Array = None,
        packed_mask: Array = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = None,
        kv_data_type: DType = None,
        o_data_type: DType = None,
        non_blocking: bool = True,  # noqa: ARG002
        block_mask: Any = None,
        *,
        fp8_accumulation: str = "default",
        per_head: bool = False,
    ) -> None:
        """Schedule the matrix. Checks it completely.

        Parameters
        ----------
        indptr : int32 or int64 array [ceil(M / R) + 1]
        indices : int32 or int64 array [nnz]
            Column blocks, 0 to ``ceil(N / C) - 1``.
        M, N : int
            Queries and keys. The last row block may have fewer than R rows, the last column block
            fewer than C columns.
        R, C : int
            Rows and columns of a block.
        num_qo_heads, num_kv_heads : int
            The first is a multiple of the second.
        head_dim : int
            Multiple of 8, at most 512.
        mask : bool array [nnz, R, C], optional
            Elements of each block that count.
        packed_mask : uint8 array [ceil(nnz * R * C / 8)], optional
            The same, flattened, in little-endian bits.
        causal : bool
            Key *j* is visible to query *i* iff ``j <= i + N - M``, with the true positions.
            Together with a mask both hold.
        pos_encoding_mode : {"NONE"}
            Only NONE: see `apply_rope_pos_ids`.
        use_fp16_qk_reduction : bool
            Only False.
        logits_soft_cap : float, optional
            ``cap * tanh(x / cap)`` on the scaled logits. None or 0: off.
        sm_scale : float, optional
            Default ``1 / sqrt(head_dim)``.
        rope_scale, rope_theta : None
        q_data_type, kv_data_type, o_data_type : data type, optional
            None: the arrays'. The output's is that of q, or of a given `out` and otherwise bfloat16
            where q is float8_e4m3fn, which needs a KV of that type. FlashInfer's default is
            float16.
        non_blocking : bool
            Without effect: host arrays are never waited for, arrays on a GPU are copied back once.
        block_mask : None
        fp8_accumulation : {"default", "fast"}
            As in `TaskInfo`.
        per_head : bool
            Each KV head has a matrix of its own: indptr [num_kv_heads ceil(M / R) + 1], the row
            blocks of head 0, then those of head 1; indices and masks in that order.

        Raises
        ------
        ShapeError, DTypeError, IndexRangeError, CapacityError, UnsupportedError, FlashbsrError
            The argument, what it was, what is allowed. There is no plan afterwards.
        """
        self._attention = None
        reject(use_fp16_qk_reduction=use_fp16_qk_reduction, block_mask=block_mask)
        reject_positions(pos_encoding_mode, rope_scale, rope_theta)
        attention = self._engine_of(
            {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap},
            {
                "num_qo_heads": num_qo_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim_qk": head_dim,
                "page_size": C,
                "q_dtype": q_data_type,
                "kv_dtype": kv_data_type,
                "o_dtype": o_data_type,
                "fp8_accumulation": fp8_accumulation,
            },
        )
        if causal:
            heads = num_kv_heads if per_head else 1
            matrix = indptr, indices, M, N, R, C
            indptr, indices, mask = causal_blocks(*matrix, mask, packed_mask, heads)
            packed_mask = None
        self._plan_by(
            attention, attention.plan_bsr, indptr, indices, M, N, R, C, mask=mask,
            packed_mask=packed_mask, per_head=per_head,
        )  # fmt: skip
        self._n = N

    def run(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale_q: Scale = None,
        scale_k: Scale = None,
        scale_v: Scale = None,
        out: Array = None,
        lse: Array = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        *,
        sinks: Array = None,
    ) -> Any:
        """Compute the planned matrix.

        Parameters
        ----------
        q : array [M, num_qo_heads, head_dim]
            float32, float16, bfloat16 or float8_e4m3fn.
        k, v : array [N, num_kv_heads, head_dim]
            The type of `q`, or unless that is float8 also float8_e4m3fn / float8_e5m2.
        scale_q, scale_k, scale_v : float or float32 array, optional
            Per tensor or per head (q: ``[num_qo_heads]``, k and v: ``[num_kv_heads]``). The first
            two multiply the logits, the third the output.
        out : array [M, num_qo_heads, head_dim], optional
            Written and returned.
        lse : float32 array [M, num_qo_heads], optional
            Written and returned.
        return_lse : bool
            Return ``(out, lse)``.
        enable_pdl : bool, optional
            GPUs of compute capability 9.0 and later: start before the kernel ahead in the stream
            has finished. None and True: reading ahead no more than the plan, which is always safe.
            False: never.
        sinks : float32 array [num_qo_heads], optional
            Learned logit per head that takes part in the softmax (and the LSE) and has no value.

        Returns
        -------
        out : array [M, num_qo_heads, head_dim]
            Of the caller's kind. A row that sees no key gives 0.
        lse : float32 array [M, num_qo_heads]
            Only with ``return_lse=True``. ``-inf`` for a row that sees no key.

        Raises
        ------
        PlanError
            No plan, or the arrays do not match it.
        ShapeError, DTypeError, DeviceError, UnsupportedError
        """
        self._planned()
        for name, x in (("k", k), ("v", v)):
            adapter_for(x, name)
            shape = tuple(x.shape)
            if len(shape) != 3 or shape[0] != self._n:
                raise ShapeError(name, f"shape {shape}", f"({self._n}, num_kv_heads, head_dim)")
        return self._run(
            q, (k, v), out, lse, return_lse, scale_q, scale_k, scale_v, sinks, None, enable_pdl
        )


def causal_blocks(
    indptr: Array,
    indices: Array,
    m: int,
    n: int,
    r: int,
    c: int,
    mask: Array,
    packed_mask: Array,
    heads: int = 1,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
    """Write causality into a BSR matrix: drop invisible blocks, mask the partial ones.

    Parameters
    ----------
    indptr, indices, m, n, r, c, mask, packed_mask
        As in `BlockSparseAttentionWrapper.plan`.
    heads : int
        Matrices, one after another.

    Returns
    -------
    indptr : int64 array [heads ceil(m / r) + 1]
    indices : int64 array [nnz']
        Blocks with a visible element.
    mask : bool array [nnz', r, c] or None
        None if every block that is left counts whole.

    Raises
    ------
    ShapeError, IndexRangeError, FlashbsrError
        A matrix that is none.

    Examples
    --------
    >>> import numpy as np
    >>> indptr, indices, mask = causal_blocks(
    ...     np.array([0, 2, 4]), np.array([0, 1, 0, 1]), 4, 4, 2, 2, None, None
    ... )
    >>> indptr.tolist(), indices.tolist()
    ([0, 1, 3], [0, 0, 1])
    >>> mask.astype(int).tolist()
    [[[1, 0], [1, 1]], [[1, 1], [1, 1]], [[1, 0], [1, 1]]]
    """
    m, n = check_int("M", m, 0), check_int("N", n, 0)
    r, c = check_int("R", r, 1), check_int("C", c, 1)
    starts, columns = to_indices(indptr, "indptr"), to_indices(indices, "indices")
    rows, width = heads * -(-m // r), -(-n // c)
    if starts.shape != (rows + 1,):
        raise ShapeError("indptr", f"shape {starts.shape}", f"({rows + 1},): block rows + 1")
    if starts[0] != 0 or starts[-1] != columns.size or (np.diff(starts) < 0).any():
        raise IndexRangeError(
            "indptr", f"from {starts[0]} to {starts[-1]}", f"ascending from 0 to {columns.size}"
        )
    if columns.size and not 0 <= columns.min() <= columns.max() < width:
        at = int(np.flatnonzero((columns < 0) | (columns >= width))[0])
        raise IndexRangeError(
            "indices", f"{columns[at]} at {at}", f"0 to ceil(N / C) - 1 = {width - 1}"
        )
    shape = (columns.size, r, c)
    kept = None
    if mask is not None and packed_mask is not None:
        raise FlashbsrError("packed_mask", type(packed_mask).__name__, "None next to mask")
    if mask is not None:
        kept = to_numpy(mask, "mask")
        if kept.shape != shape:
            raise ShapeError("mask", f"shape {kept.shape}", f"{shape}: (nnz, R, C)")
        if kept.dtype not in (np.bool_, np.uint8):
            raise DTypeError("mask", kept.dtype, "bool or uint8")
        kept = kept.astype(np.bool_)
    elif packed_mask is not None:
        packed = to_values(packed_mask, "packed_mask")
        count = columns.size * r * c
        if packed.dtype != np.uint8 or packed.shape != (-(-count // 8),):
            raise ShapeError(
                "packed_mask", f"{packed.dtype} {packed.shape}", f"uint8 ({-(-count // 8)},)"
            )
        kept = np.unpackbits(packed, count=count, bitorder="little").reshape(shape).astype(np.bool_)

    row_of = np.repeat(np.arange(rows), np.diff(starts))  # row block of each block
    first_query = row_of % max(rows // heads, 1) * r
    last_query = np.minimum(first_query + r, m) - 1
    first_key = columns * c
    visible = first_key <= last_query + n - m
    whole = np.minimum(first_key + c, n) - 1 <= first_query + n - m
    new_starts = np.zeros(rows + 1, np.int64)
    np.cumsum(np.bincount(row_of[visible], minlength=rows), out=new_starts[1:])
    if kept is None and bool(whole[visible].all()):
        return new_starts, columns[visible], None
    query = first_query[visible, None, None] + np.arange(r)[:, None]
    key = first_key[visible, None, None] + np.arange(c)
    seen = key <= query + n - m
    return new_starts, columns[visible], seen if kept is None else seen & kept[visible]
