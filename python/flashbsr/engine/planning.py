# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The half of `Attention` before a run: construction and plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import flashbsr._core as _core

from .._check import check_int, check_name, is_cuda
from ..arrays import Adapter, adapter_for, device_of, stream_handle, to_values
from ..arrays.types import Array
from ..errors import DTypeError, FlashbsrError, ShapeError, UnsupportedError
from ..jit.provider import Provider
from ..layout.tree import check_tree_spec
from ..variant.rotary import rotation
from ..variant.spec import AttentionSpec
from .launch import always
from .plan import Plan
from .task import TaskInfo

__all__ = ["Planned"]


class Planned:
    """An engine and its plan; `Attention` documents the parameters."""

    def __init__(
        self, spec: AttentionSpec, task: TaskInfo, workspace: Array | int | None = None
    ) -> None:
        for name, value, kind in (("spec", spec, AttentionSpec), ("task", task, TaskInfo)):
            if not isinstance(value, kind):
                raise DTypeError(name, type(value).__name__, f"a flashbsr.{kind.__name__}")
        self.spec = spec
        self.task = task
        if spec.pos_encoding_mode == "ROPE_LLAMA" and task.head_dim_qk % 2:
            raise FlashbsrError("head_dim_qk", task.head_dim_qk, "an even number for ROPE_LLAMA")
        self._head_dim_vo = task.head_dim_vo or task.head_dim_qk
        variant = spec.variant
        self._extras = () if variant is None else variant.extras
        self._captured = {} if variant is None else {name: c.array for name, c in variant.captured}
        self._engine = _core.Engine(_options(spec, task))
        self._how = always(task.check)
        # Index arrays and the first q may decide where to compute; whose stream plan() copies on.
        self._open = task.backend == "auto" or (is_cuda(task.backend) and task.device is None)
        self._streams: tuple[Adapter, int] | None = None
        self._workspace: Any = None  # keeps the caller's memory alive
        if isinstance(workspace, int):
            if workspace < 0:
                raise FlashbsrError("workspace", workspace, "a size in bytes, at least 0")
            self._engine.set_workspace_bytes(workspace)
        elif workspace is not None:
            self._workspace = workspace
            adapter = adapter_for(workspace, "workspace")
            self._engine.set_workspace(adapter.export(workspace, True, "workspace"))
            self._settled_by(adapter, adapter.device(workspace))

    def _settled_by(self, adapter: Adapter, device: int | None) -> None:
        """Remember that the place is decided and, on a GPU, whose current stream to use."""
        self._open = False
        if device is not None:
            self._streams = adapter, device

    def settle(self, array: Array, argument: str = "array") -> None:
        """Compute where `array` is, unless that is decided already.

        ``plan`` and ``run`` do this themselves; a call before ``plan`` saves planning twice when
        all of its arrays are on the host.

        Parameters
        ----------
        array : array
            One on the device.
        argument : str
            Name for the error message.

        Raises
        ------
        DeviceError, UnsupportedError
            There is no GPU, or no kernel for it.
        """
        if self._open:
            adapter = adapter_for(array, argument)
            device = adapter.device(array)
            self._engine.settle(-1 if device is None else device, argument)
            self._settled_by(adapter, device)

    def _settle_on_gpu(self, **arrays: Array) -> None:
        """Let index arrays on a GPU decide where to compute."""
        for name, x in arrays.items():
            if device_of(x, name) is not None:
                self.settle(x, name)
                break

    def _plan_stream(self, stream: Any) -> int:
        """Stream to copy the plan on."""
        if stream is not None:
            return stream_handle(stream)
        return 0 if self._streams is None else self._streams[0].stream(self._streams[1])

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
        tree_parents: Array | None = None,
        share_prefixes: str = "auto",
        stream: Any = None,
    ) -> None:
        """Plan a ragged or a paged batch.

        On a GPU the plan is on its way there, asynchronously, when this returns.

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
        tree_parents : int32 or int64 array, shape (num_q_tokens,), optional
            The query tokens of each request are a tree, their keys the last of its KV: token *t*
            has the parent ``tree_parents[qo_indptr[b] + t]``, an earlier token of the request, or
            -1. It sees all that lies before the tree, its ancestors and itself; `draft_trees` makes
            it of lists. It replaces causality, and no mask goes beside it.
        share_prefixes : {"auto", "off"}
            "auto": KV that several requests begin with, the same pages, is loaded once for all of
            them where the cost model says that it pays (paged only; docs/sharing.md). The results
            differ in rounding only. Not with custom masks (trees do share), position encodings
            inside attention, fixed or disabled splits, variants that ask for positions, and where a
            window cuts it.
        stream : CUDA stream or int, optional
            Where the copy to the GPU is made. Default: the current stream of the framework whose
            arrays were seen last (before the first: the legacy default stream). Runs on other
            streams wait for it by themselves; a replay of a captured run does not, so that it
            belongs on this stream.

        Index arrays on a GPU are copied to the host, once each; from host arrays nothing is waited
        for.

        Raises
        ------
        ShapeError, DTypeError, IndexRangeError
            Wrong lengths or types; indptr that does not start at 0 or decreases; page ids, lengths
            out of range.
        CapacityError
            More than the capacity of `TaskInfo`, than the caller's workspace, or than a captured
            run has.
        UnsupportedError
            No kernel for this on the GPU; a window or an encoding of positions with a tree.
        CudaError
            The driver refused.
        """
        if tree_parents is not None:
            check_tree_spec(self.spec)
        if self._open:
            self._settle_on_gpu(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices)
        self._engine.plan(
            None if qo_indptr is None else to_values(qo_indptr, "qo_indptr"),
            to_values(kv_indptr, "kv_indptr"),
            None if kv_indices is None else to_values(kv_indices, "kv_indices"),
            None if last_page_len is None else to_values(last_page_len, "last_page_len"),
            None if kv_lens is None else to_values(kv_lens, "kv_lens"),
            _optional(custom_mask, "custom_mask"),
            _optional(packed_custom_mask, "packed_custom_mask"),
            _optional(tree_parents, "tree_parents"),
            share_prefixes == "auto" or _refuse_sharing(share_prefixes),
            self._plan_stream(stream),
        )

    def plan_block_table(
        self,
        qo_indptr: Array | None,
        block_tables: Array,
        kv_lens: Array,
        *,
        custom_mask: Array | None = None,
        packed_custom_mask: Array | None = None,
        tree_parents: Array | None = None,
        share_prefixes: str = "auto",
        stream: Any = None,
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
        custom_mask, packed_custom_mask, tree_parents, share_prefixes, stream
            As in `plan`.

        Raises
        ------
        As `plan`; also `FlashbsrError` where the task has no page size.
        """
        if tree_parents is not None:
            check_tree_spec(self.spec)
        if self.task.page_size is None:
            raise FlashbsrError("block_tables", "an array", "a task with a page_size; KV is ragged")
        if self._open:
            self._settle_on_gpu(qo_indptr=qo_indptr, block_tables=block_tables, kv_lens=kv_lens)
        self._engine.plan_block_table(
            _optional(qo_indptr, "qo_indptr"),
            to_values(block_tables, "block_tables"),
            to_values(kv_lens, "kv_lens"),
            _optional(custom_mask, "custom_mask"),
            _optional(packed_custom_mask, "packed_custom_mask"),
            _optional(tree_parents, "tree_parents"),
            share_prefixes == "auto" or _refuse_sharing(share_prefixes),
            self._plan_stream(stream),
        )

    def plan_levels(
        self,
        qo_indptr_arr: Sequence[Array],
        kv_indptr_arr: Sequence[Array],
        kv_indices_arr: Sequence[Array],
        last_page_len_arr: Sequence[Array],
        *,
        stream: Any = None,
    ) -> None:
        """Plan a paged batch whose shared KV is given, level by level.

        The queries of a group see the group's pages on every level, one level after another;
        causality is that of the last level. Each level's KV is loaded once per group, in one launch
        with the others.

        Parameters
        ----------
        qo_indptr_arr : list of int32 or int64 arrays, shape (num_groups + 1,)
            Rows of q of the groups of a level; level 0 has the largest groups, the last level the
            requests. Groups are made of whole groups of the next level.
        kv_indptr_arr, kv_indices_arr, last_page_len_arr : lists of int32 or int64 arrays
            The page table of every level, as in `plan`.
        stream
            As in `plan`.

        Raises
        ------
        As `plan`; also `IndexRangeError` where groups are not nested, and `UnsupportedError` where
        a shared level ends inside of a page and the spec has a window or asks for positions.
        """
        lists = (qo_indptr_arr, kv_indptr_arr, kv_indices_arr, last_page_len_arr)
        names = ("qo_indptr_arr", "kv_indptr_arr", "kv_indices_arr", "last_page_len_arr")
        if self.task.page_size is None:
            raise FlashbsrError("kv_indices_arr", "a list", "a task with a page_size; KV is ragged")
        for name, arrays in zip(names, lists, strict=True):
            if len(arrays) != len(qo_indptr_arr) or not len(arrays):
                raise ShapeError(
                    name,
                    f"{len(arrays)} arrays",
                    f"one per level, {len(qo_indptr_arr) or 'at least 1'}",
                )
        if self._open:
            self._settle_on_gpu(qo_indptr_arr=qo_indptr_arr[-1], kv_indices_arr=kv_indices_arr[-1])
        qo, indptr, pages, last = (
            [to_values(x, name) for x in xs] for name, xs in zip(names, lists, strict=True)
        )
        self._engine.plan_levels(qo, indptr, pages, last, self._plan_stream(stream))

    def plan_bsr(
        self,
        indptr: Array,
        indices: Array,
        m: int,
        n: int,
        r: int | Array,
        c: int,
        *,
        mask: Array | None = None,
        packed_mask: Array | None = None,
        per_head: bool = False,
        stream: Any = None,
    ) -> None:
        """Plan attention over a block-sparse matrix of `m` query rows and `n` KV columns.

        The task's page_size must be `c`: a block column is a page. `run` takes k and v as tokens
        then, ``(n, num_kv_heads, head_dim)``, or as pages.

        Parameters
        ----------
        indptr : int32 or int64 array, shape (block rows + 1,)
            Blocks of each block row.
        indices : int32 or int64 array, shape (indptr[-1],)
            Block columns, each below ``ceil(n / c)``, in any order.
        m, n, c : int
            Shape of the matrix, width of a block. Where `n` is no multiple of `c` the last block
            column is short, and at most once in a block row.
        r : int, or int32 or int64 array of shape (block rows + 1,)
            Height of a block, the last block row may be short; or where block rows begin, from 0 to
            `m`.
        mask : bool or uint8 array, shape (indptr[-1], r, c), optional
            True keeps; rows past `m` and columns past `n` are ignored.
        packed_mask : uint8 array, shape (ceil(indptr[-1] * r * c / 8),), optional
            The same flattened, as little-endian bits without gaps.
        per_head : bool
            Each KV head has a matrix of its own: `indptr` has the block rows of all heads, head
            after head, and an array `r` has shape (num_kv_heads, block rows + 1).
        stream
            As in `plan`.

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
        if spec.variant is not None and spec.variant.uses_positions:
            raise UnsupportedError(
                "variant",
                f"{spec.variant.name}, which asks for positions or the request",
                "one that does not with plan_bsr, whose rows count along their own blocks: write "
                "the mask into the blocks (flashbsr.block_mask)",
            )
        if self._open:
            self._settle_on_gpu(indptr=indptr, indices=indices)
        heads = self.task.num_kv_heads if per_head else 0
        starts = None
        if not isinstance(r, (int, np.integer)):
            if mask is not None or packed_mask is not None:
                raise UnsupportedError(
                    "packed_mask" if mask is None else "mask",
                    "an array",
                    "None with an array of rows: blocks of one height have masks",
                )
            starts = to_values(r, "R")
            if starts.ndim != (2 if heads else 1) or (heads and len(starts) != heads):
                rows = f"({heads}, block rows + 1)" if heads else "(block rows + 1,)"
                raise ShapeError("R", f"shape {starts.shape}", rows)
            starts = starts.reshape(-1)
        self._engine.plan_bsr(
            starts,
            to_values(indptr, "indptr"),
            to_values(indices, "indices"),
            (
                check_int("M", m, 0),
                check_int("N", n, 0),
                check_int("R", r if starts is None else 1, 1),
                check_int("C", c, 1),
            ),
            heads,
            _optional(mask, "mask"),
            _optional(packed_mask, "packed_mask"),
            self._plan_stream(stream),
        )

    @property
    def device(self) -> int | None:
        """Ordinal of the GPU that computes; None: the CPU does, or will unless arrays decide."""
        place: Any = self._engine.place()
        return None if place is None else int(place)

    def workspace_size(self) -> int:
        """Bytes of partial states: of the capacity if one is fixed, otherwise of the last plan.

        Of the place that is decided. With ``backend="auto"`` that is the CPU until an array on a
        GPU is seen (`settle`).
        """
        return int(self._engine.workspace_size())

    @property
    def plan_info(self) -> Plan:
        """The current plan, a copy. Raises `PlanError` before `plan`."""
        buffer: Any = self._engine.plan_buffer()
        return Plan(buffer)


def _options(spec: AttentionSpec, task: TaskInfo) -> dict[str, Any]:
    """Spell out the options for ``_core.Engine``."""
    variant = spec.variant
    no_softmax = variant is not None and not variant.use_softmax
    return {
        "num_qo_heads": task.num_qo_heads,
        "num_kv_heads": task.num_kv_heads,
        "head_dim_qk": task.head_dim_qk,
        "head_dim_vo": task.head_dim_vo or task.head_dim_qk,
        "page_size": task.page_size or 0,
        "kv_layout": task.kv_layout,
        "causal": spec.causal,
        "window_left": spec.window_left,
        "sm_scale": 1 / math.sqrt(task.head_dim_qk) if spec.sm_scale is None else spec.sm_scale,
        "logits_soft_cap": spec.logits_soft_cap or 0.0,
        "pos_encoding_mode": spec.pos_encoding_mode,
        **rotation(spec, task.head_dim_qk),
        "activation": "sigmoid" if no_softmax else spec.activation,
        "sigmoid_bias": spec.sigmoid_bias,
        "lse_base": task.lse_base,
        "fixed_split_size": task.fixed_split_size or 0,
        "disable_split_kv": task.disable_split_kv,
        "max_batch_size": -1 if task.max_batch_size is None else task.max_batch_size,
        "max_q_tokens": -1 if task.max_q_tokens is None else task.max_q_tokens,
        "max_kv_pages": -1 if task.max_kv_pages is None else task.max_kv_pages,
        "num_workers": task.num_workers or 0,
        "num_threads": task.num_threads or 0,
        "backend": task.backend,
        "device": -1 if task.device is None else task.device,
        "q_dtype": task.q_dtype or "",
        "kv_dtype": task.kv_dtype or "",
        "o_dtype": task.o_dtype or "",
        "fast_fp8": task.fp8_accumulation == "fast",
        "custom_variant": variant is not None,
        "rewrites_rows": variant is not None and variant.rewrites_rows,
        "row_hooks": variant is not None and variant.has_row_hooks,
        "asks_where": variant is not None and variant.uses_positions,
        "extras": tuple((e.name, e.dtype, e.rank) for e in variant.extras) if variant else (),
        "provider": _provider(spec),
    }


def _provider(spec: AttentionSpec) -> Provider | None:
    """Make what compiles kernels; the CPU has every one of the built-in variants."""
    if spec.variant is None and _core.cuda_problem():
        return None
    return Provider(spec.variant, rotates=spec.pos_encoding_mode == "ROPE_LLAMA")


def _refuse_sharing(share_prefixes: str) -> bool:
    check_name("share_prefixes", share_prefixes, ("auto", "off"))
    return False


def _optional(x: Any, name: str) -> Any:
    return None if x is None else to_values(x, name)
