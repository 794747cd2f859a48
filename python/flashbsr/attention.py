# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`Attention`: the one way from Python to a kernel. Every wrapper is a thin adapter over it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import _core
from ._typing import Array
from .adapters import adapter_for, float_dtype, to_numpy, to_values
from .errors import DTypeError, FlashbsrError, UnsupportedError
from .plan import Plan
from .spec import AttentionSpec, TaskInfo

__all__ = ["Attention"]


class Attention:
    """Attention with a fixed computation (`spec`) on a fixed kind of arrays (`task`).

    Three times are kept apart: construction finds the kernel, `plan` takes lengths, page tables
    and masks (host work, no array of q, k or v is needed), `run` computes. One plan serves any
    number of runs, for instance all layers of a model's step.

    Parameters
    ----------
    spec : AttentionSpec
        What to compute.
    task : TaskInfo
        Head counts and dims, data types, layout, capacity, threads.
    workspace : uint8 array or int, optional
        Memory for partial states: an array of the caller's, a size in bytes, or None (owned, sized
        by `plan`). ``run`` never allocates it.

    Raises
    ------
    CapacityError
        The workspace is smaller than the capacity needs.

    Notes
    -----
    For query row *i* of a request, at position ``p = kv_len - q_len + i``::

        O_i = sum_j softmax_j(sm_scale * <q_i, k_j>) v_j

    over the keys that causality, window and mask leave (FlashInfer, MLSys 2025, sections 2 and 3).

    Examples
    --------
    >>> import numpy as np
    >>> from flashbsr import Attention, AttentionSpec, TaskInfo
    >>> attention = Attention(
    ...     AttentionSpec(causal=True), TaskInfo(num_qo_heads=4, num_kv_heads=2, head_dim_qk=64)
    ... )
    >>> attention.plan(np.array([0, 3, 5]), np.array([0, 10, 12]))  # two ragged requests
    >>> q = np.ones((5, 4, 64), np.float32)
    >>> k = v = np.ones((12, 2, 64), np.float32)
    >>> attention.run(q, (k, v)).shape
    (5, 4, 64)
    """

    def __init__(
        self, spec: AttentionSpec, task: TaskInfo, workspace: Array | int | None = None
    ) -> None:
        for name, value, kind in (("spec", spec, AttentionSpec), ("task", task, TaskInfo)):
            if not isinstance(value, kind):
                raise DTypeError(name, type(value).__name__, f"a flashbsr.{kind.__name__}")
        self.spec = spec
        self.task = task
        head_dim_vo = task.head_dim_vo or task.head_dim_qk
        if spec.pos_encoding_mode == "ROPE_LLAMA" and task.head_dim_qk % 2:
            raise FlashbsrError("head_dim_qk", task.head_dim_qk, "an even number for ROPE_LLAMA")
        options = {
            "num_qo_heads": task.num_qo_heads,
            "num_kv_heads": task.num_kv_heads,
            "head_dim_qk": task.head_dim_qk,
            "head_dim_vo": head_dim_vo,
            "page_size": task.page_size or 0,
            "kv_layout": task.kv_layout,
            "causal": spec.causal,
            "window_left": spec.window_left,
            "sm_scale": 1 / math.sqrt(task.head_dim_qk) if spec.sm_scale is None else spec.sm_scale,
            "logits_soft_cap": spec.logits_soft_cap or 0.0,
            "pos_encoding_mode": spec.pos_encoding_mode,
            "rope_scale": spec.rope_scale,
            "rope_theta": spec.rope_theta,
            "rope_llama31": spec.rope_llama31,
            "activation": spec.activation,
            "sigmoid_bias": spec.sigmoid_bias,
            "lse_base": task.lse_base,
            "fixed_split_size": task.fixed_split_size or 0,
            "disable_split_kv": task.disable_split_kv,
            "max_batch_size": -1 if task.max_batch_size is None else task.max_batch_size,
            "max_q_tokens": -1 if task.max_q_tokens is None else task.max_q_tokens,
            "max_kv_pages": -1 if task.max_kv_pages is None else task.max_kv_pages,
            "num_workers": task.num_workers or 0,
            "num_threads": task.num_threads or 0,
        }
        self._engine = _core.Engine(options)
        self._head_dim_vo = head_dim_vo
        self._workspace: Any = None  # keeps the caller's memory alive
        if workspace is not None:
            if isinstance(workspace, int):
                if workspace < 0:
                    raise FlashbsrError("workspace", workspace, "a size in bytes, at least 0")
                workspace = np.empty(workspace, np.uint8)
            self._workspace = workspace
            self._engine.set_workspace(
                adapter_for(workspace, "workspace").export(workspace, True, "workspace")
            )

    def plan(
        self,
        qo_indptr: Array | None,
        kv_indptr: Array,
        kv_indices: Array | None = None,
        *,
        last_page_len: Array | None = None,
        kv_lens: Array | None = None,
        custom_mask: Array | None = None,
        packed_custom_mask: Array | None = None,
    ) -> None:
        """Plan a ragged or a paged batch.

        Parameters
        ----------
        qo_indptr : int32 or int64 array, shape (batch_size + 1,), or None
            Rows of q of request b: ``qo_indptr[b]`` to ``qo_indptr[b + 1]``. None: one each
            (decode).
        kv_indptr : int32 or int64 array, shape (batch_size + 1,)
            Paged: entries of `kv_indices`. Ragged: rows of k and v.
        kv_indices : int32 or int64 array, shape (>= kv_indptr[-1],), optional
            Page ids (paged only).
        last_page_len : int32 or int64 array, shape (batch_size,), optional
            Tokens in each request's last page, 1 to page_size. Ignored for requests without pages.
        kv_lens : int32 or int64 array, shape (batch_size,), optional
            Instead: tokens of each request; it may hold more pages than it needs.
        custom_mask : bool or uint8 array, shape (sum of q_len * kv_len,), optional
            Row-major per request; True keeps. It replaces causality; a window still applies.
        packed_custom_mask : uint8 array, shape (sum of ceil(q_len * kv_len / 8),), optional
            The same as little-endian bits, each request starting at a byte.

        Raises
        ------
        ShapeError, DTypeError, IndexRangeError
            Wrong lengths or types; indptr that does not start at 0 or decreases; page ids, lengths
            out of range.
        CapacityError
            More than the capacity of `TaskInfo`, or than the caller's workspace.
        """
        self._engine.plan(
            _optional(qo_indptr, "qo_indptr"),
            to_values(kv_indptr, "kv_indptr"),
            _optional(kv_indices, "kv_indices"),
            _optional(last_page_len, "last_page_len"),
            _optional(kv_lens, "kv_lens"),
            _optional(custom_mask, "custom_mask"),
            _optional(packed_custom_mask, "packed_custom_mask"),
        )

    def plan_block_table(
        self,
        qo_indptr: Array | None,
        block_tables: Array,
        kv_lens: Array,
        *,
        custom_mask: Array | None = None,
        packed_custom_mask: Array | None = None,
    ) -> None:
        """Plan a paged batch from a dense table of pages.

        Parameters
        ----------
        qo_indptr : int32 or int64 array, shape (batch_size + 1,), or None
            As in `plan`.
        block_tables : int32 or int64 array, shape (batch_size, max_pages)
            Page ids; entries beyond ``ceil(kv_len / page_size)`` are not read.
        kv_lens : int32 or int64 array, shape (batch_size,)
            Tokens of each request.
        custom_mask, packed_custom_mask
            As in `plan`.

        Raises
        ------
        As `plan`; also `FlashbsrError` where the task has no page size.
        """
        if self.task.page_size is None:
            raise FlashbsrError("block_tables", "an array", "a task with a page_size; KV is ragged")
        self._engine.plan_block_table(
            _optional(qo_indptr, "qo_indptr"),
            to_values(block_tables, "block_tables"),
            to_values(kv_lens, "kv_lens"),
            _optional(custom_mask, "custom_mask"),
            _optional(packed_custom_mask, "packed_custom_mask"),
        )

    def plan_bsr(
        self,
        indptr: Array,
        indices: Array,
        m: int,
        n: int,
        r: int,
        c: int,
        *,
        mask: Array | None = None,
        packed_mask: Array | None = None,
    ) -> None:
        """Plan attention over a block-sparse matrix of `m` query rows and `n` KV columns.

        The task's page_size must be `c`: a block column is a page.

        Parameters
        ----------
        indptr : int32 or int64 array, shape (ceil(m / r) + 1,)
            Blocks of each block row.
        indices : int32 or int64 array, shape (indptr[-1],)
            Block columns, each below ``n / c``.
        m, n, r, c : int
            Matrix and block shape. `n` is a multiple of `c`; the last block row may be short.
        mask : bool or uint8 array, shape (indptr[-1], r, c), optional
            True keeps; rows past `m` are ignored.
        packed_mask : uint8 array, shape (ceil(indptr[-1] * r * c / 8),), optional
            The same flattened, as little-endian bits without gaps.

        Raises
        ------
        As `plan`; also `UnsupportedError` for causality, windows and position encodings, whose
        positions a block-sparse matrix does not have.
        """
        if self.task.page_size != c:
            raise FlashbsrError("C", c, f"the task's page_size = {self.task.page_size}")
        spec = self.spec
        for name, on in (
            ("causal", spec.causal),
            ("window_left", spec.window_left >= 0),
            ("pos_encoding_mode", spec.pos_encoding_mode != "NONE"),
        ):
            if on:
                raise UnsupportedError(
                    name,
                    getattr(spec, name),
                    "the default with plan_bsr: write it into the blocks and the mask (for causal "
                    "BlockSparseAttentionWrapper does so), rotate with apply_rope first",
                )
        self._engine.plan_bsr(
            to_values(indptr, "indptr"),
            to_values(indices, "indices"),
            m,
            n,
            r,
            c,
            _optional(mask, "mask"),
            _optional(packed_mask, "packed_mask"),
        )

    def run(
        self,
        q: Array,
        kv: Array | tuple[Array, Array],
        *,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        q_scale: float | Array | None = None,
        k_scale: float | Array | None = None,
        v_scale: float | Array | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
    ) -> Any:
        """Compute the planned attention.

        Parameters
        ----------
        q : float32, float16 or bfloat16 array, shape (num_q_tokens, num_qo_heads, head_dim_qk)
        kv : array or tuple of arrays
            A stacked cache ``(pages, 2, page_size, H_kv, D)`` (NHD) or
            ``(pages, 2, H_kv, page_size, D)`` (HND), or a tuple ``(k, v)`` of its halves with
            strides of their own; for ragged KV a tuple of ``(tokens, H_kv, D)`` (HND:
            ``(H_kv, tokens, D)``). The type of q, float8_e4m3fn or float8_e5m2. The last
            dimension is contiguous.
        out : array, shape (num_q_tokens, num_qo_heads, head_dim_vo), optional
            Where to write; default: a new array of q's kind.
        lse : float32 array, shape (num_q_tokens, num_qo_heads), optional
            Where to write the LSE; given, it is returned too.
        return_lse : bool
            Also return ``log(sum(exp(logits)))``, natural or base 2 (`TaskInfo.lse_base`); -inf
            where nothing is visible (the output is 0 there).
        q_scale, k_scale : float or float32 array, optional
            Multiply the logits: one number, or one per query head / KV head.
        v_scale : float or float32 array of shape (num_kv_heads,), optional
            Multiplies the output.
        sinks : float32 array, shape (num_qo_heads,), optional
            Learned logits that join the softmax denominator only (gpt-oss, 2025).
        alibi_slopes : float32 array, shape (num_qo_heads,), optional
            With ``pos_encoding_mode="ALIBI"``; default: the standard slopes of these heads.

        Returns
        -------
        out, or (out, lse)
            Arrays of q's kind.

        Raises
        ------
        PlanError
            No plan, or arrays that do not match it.
        ShapeError, DTypeError, DeviceError, IndexRangeError
            Arrays that do not match the task.
        """
        adapter = adapter_for(q, "q")
        task = self.task
        q_dtype = float_dtype(q, "q")
        if task.q_dtype is not None and q_dtype != task.q_dtype:
            raise DTypeError("q", q_dtype, f"{task.q_dtype}, the task's q_dtype")
        if isinstance(kv, tuple):
            if len(kv) != 2:
                raise FlashbsrError("kv", f"a tuple of {len(kv)}", "a stacked cache or (k, v)")
            k_array, v_array = kv
            k, v = _export(k_array, "k"), _export(v_array, "v")
        else:
            k_array = kv
            k, v = _export(kv, "kv"), None
        if task.kv_dtype is not None:
            kv_dtype = adapter_for(k_array, "kv").dtype_name(k_array, "kv")
            if kv_dtype != task.kv_dtype:
                raise DTypeError("kv", kv_dtype, f"{task.kv_dtype}, the task's kv_dtype")

        rows = (q.shape[0], task.num_qo_heads) if len(q.shape) else (0, task.num_qo_heads)
        return_lse = return_lse or lse is not None
        out_adapter = lse_adapter = adapter
        if out is None:
            out = adapter.empty(q, (*rows, self._head_dim_vo), task.o_dtype or q_dtype)
            out_export = adapter.export(out, True, "out")
        else:
            out_adapter = adapter_for(out, "out")
            out_export = out_adapter.export(out, True, "out")
            wanted, actual = task.o_dtype or q_dtype, out_adapter.dtype_name(out, "out")
            if actual != wanted:
                raise DTypeError("out", actual, f"{wanted} (o_dtype; by default that of q)")
        lse_export = None
        if lse is not None:
            lse_adapter = adapter_for(lse, "lse")
            lse_export = lse_adapter.export(lse, True, "lse")
        elif return_lse:
            lse = adapter.empty(q, rows, "float32")
            lse_export = adapter.export(lse, True, "lse")

        self._engine.run(
            adapter.export(q, False, "q"),
            k,
            v,
            out_export,
            lse_export,
            _scale(q_scale, "q_scale"),
            _scale(k_scale, "k_scale"),
            _scale(v_scale, "v_scale"),
            None if sinks is None else _export(sinks, "sinks"),
            None if alibi_slopes is None else _export(alibi_slopes, "alibi_slopes"),
        )
        if return_lse:
            return out_adapter.finish(out), lse_adapter.finish(lse)
        return out_adapter.finish(out)

    def workspace_size(self) -> int:
        """Bytes of partial states: of the capacity if one is fixed, otherwise of the last plan."""
        return int(self._engine.workspace_size())

    @property
    def plan_info(self) -> Plan:
        """The current plan, a copy. Raises `PlanError` before `plan`."""
        buffer: Any = self._engine.plan_buffer()
        return Plan(buffer)

    def run_stats(self) -> dict[str, Any]:
        """Measurements of the last run.

        Returns
        -------
        dict
            ``kernel_s`` (wall seconds in the kernel), ``busy_s`` (seconds of each thread; the
            caller is the first), ``isa``, ``threads``.
        """
        return dict(self._engine.run_stats())


def _export(x: Any, name: str) -> Any:
    return adapter_for(x, name).export(x, False, name)


def _scale(x: Any, name: str) -> Any:
    if x is None or isinstance(x, (int, float)):
        return x
    if isinstance(x, (np.floating, np.integer)):
        return float(x)
    exported = _export(x, name)
    if math.prod(x.shape) == 1 and len(x.shape) < 2:  # vLLM keeps its scales as such tensors
        return float(to_numpy(x, name).reshape(()).astype(np.float64))
    return exported


def _optional(x: Any, name: str) -> Any:
    return None if x is None else to_values(x, name)
