# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The half of `Attention` before a run: construction and plans."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import flashbsr._core as _core

from .._check import check_name, is_cuda
from ..arrays import Adapter, adapter_for, device_of, operand, stream_handle, to_values
from ..arrays.dtypes import PACKED_LATENTS, elements_of
from ..arrays.types import Array
from ..errors import DTypeError, FlashbsrError, PlanError
from ..jit.provider import Provider
from ..layout.layouts import Layout
from ..layout.tree import check_tree_spec
from ..variant.rotary import rotation
from ..variant.spec import AttentionSpec
from .launch import always
from .live import enter, outside
from .plan import Plan
from .task import TaskInfo

__all__ = ["Planned"]

#: Arrays of `Planned.update`, as the core takes them.
_LENGTHS = "kv_lens", "block_tables", "kv_indptr", "kv_indices", "qo_indptr", "q_positions"


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
        if task.latent and spec.sm_scale is None:
            raise FlashbsrError(
                "sm_scale",
                None,
                "a number with latent=True: 1/sqrt(head dim before absorption), of 192 for "
                "DeepSeek-V3",
            )
        self._head_dim_vo = task.head_dim_vo or task.head_dim_qk
        variant = spec.variant
        self._extras = () if variant is None else variant.extras
        self._captured = {} if variant is None else {name: c.array for name, c in variant.captured}
        self._engine = _core.Engine(_options(spec, task))
        self._number = enter(self)
        self._operand: Any = None
        # Of the last plan: its layout, whether it has trees, and where its queries are.
        self._batch: tuple[Layout, bool, Array | None] | None = None
        self._how = always(task.check)
        self._engine.keep((workspace, *self._captured.values()))
        # Index arrays and the first q may decide where to compute; whose stream plan() copies on.
        self._open = task.backend == "auto" or (is_cuda(task.backend) and task.device is None)
        self._streams: tuple[Adapter, int] | None = None
        if isinstance(workspace, int):
            if workspace < 0:
                raise FlashbsrError("workspace", workspace, "a size in bytes, at least 0")
            self._engine.set_workspace_bytes(workspace)
        elif workspace is not None:
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

    def _plan_stream(self, stream: Any) -> int:
        """Stream to copy the plan on."""
        if stream is not None:
            return stream_handle(stream)
        return 0 if self._streams is None else self._streams[0].stream(self._streams[1])

    @outside
    def plan(
        self,
        layout: Layout | Planned,
        *,
        custom_mask: Array | None = None,
        packed_custom_mask: Array | None = None,
        tree_parents: Array | None = None,
        q_positions: Array | None = None,
        share_prefixes: str = "auto",
        stream: Any = None,
    ) -> None:
        """Plan a batch.

        On a GPU the plan is on its way there, asynchronously, when this returns.

        Parameters
        ----------
        layout : Ragged, Paged, Padded, BlockTable, Bounds, Levels, Bsr or Attention
            Who meets whom. After `Bounds`, `update` or ``run(kv_lens=)`` says how long requests
            are. An `Attention`: the batch that it is planned for, its masks and what it says of
            sharing. Kinds of layers of one step (scales, soft-caps, types, windows that are longer
            than all requests) then cost one schedule; those with other cuts get their own.
        custom_mask : bool or uint8 array, shape (sum of q_len * kv_len,), optional
            Row-major per request; True keeps. It replaces causality; a window still applies. Not
            with `Levels` and `Bsr`, which has masks of its own.
        packed_custom_mask : uint8 array, shape (sum of ceil(q_len * kv_len / 8),), optional
            The same as little-endian bits, each request starting at a byte.
        tree_parents : int32 or int64 array, shape (num_q_tokens,), optional
            The query tokens of each request are a tree, their keys the last of its KV: token *t*
            has the parent ``tree_parents[qo_indptr[b] + t]``, an earlier token of the request, or
            -1. It sees all that lies before the tree, its ancestors and itself; `draft_trees` makes
            it of lists. It replaces causality, and no mask goes beside it.
        q_positions : int32 or int64 array, shape (batch_size,), optional
            Position of each request's first query token among all keys of the request, where that
            is not ``kv_len - q_len``: with `TaskInfo.context_parallel`, and for chunks of a prompt
            that meet keys from elsewhere in it (keys begin at position 0; positions may be
            negative, and beyond the last key). Causality, windows and encodings of positions go by
            it. On a GPU not with variants that ask for positions.
        share_prefixes : {"auto", "off"}
            "auto": KV that several requests begin with, the same pages, is loaded once for all of
            them where the cost model says that it pays (`Paged` and `BlockTable`; docs/sharing.md).
            The results differ in rounding only. Not with custom masks (trees do share), position
            encodings inside attention, fixed or disabled splits, variants that ask for positions,
            and where a window cuts it.
        stream : CUDA stream or int, optional
            Where the copy to the GPU is made. Default: the current stream of the framework whose
            arrays were seen last (before the first: the legacy default stream). Runs on other
            streams wait for it by themselves; a replay of a captured run does not, so that it
            belongs on this stream.

        Index arrays on a GPU are copied to the host, once each, but for the table of `BlockTable`;
        from host arrays nothing is waited for.

        Raises
        ------
        ShapeError, DTypeError, IndexRangeError
            Wrong lengths or types; indptr that does not start at 0 or decreases; page ids, lengths
            out of range; levels that are not nested.
        CapacityError
            More than the capacity of `TaskInfo`, than the caller's workspace, or than a captured
            run has.
        UnsupportedError
            No kernel for this on the GPU; a window or an encoding of positions with a tree, with a
            block-sparse matrix, or with levels that end inside of a page.
        CudaError
            The driver refused.
        """
        if isinstance(layout, Planned):
            masks = (custom_mask, packed_custom_mask, tree_parents, q_positions)
            if any(mask is not None for mask in masks) or share_prefixes != "auto":
                raise FlashbsrError(
                    "layout",
                    "an Attention, beside masks, positions or share_prefixes",
                    "these with its plan",
                )
            self._plan_like(layout, stream)
            return
        if not isinstance(layout, Layout):
            raise DTypeError(
                "layout",
                type(layout).__name__,
                "flashbsr.Ragged, Paged, Padded, BlockTable, Bounds, Levels or Bsr (a mask's "
                "layout()), or an Attention that is planned",
            )
        self._check_batch(layout, tree_parents is not None)
        if self._open:  # index arrays on a GPU decide where to compute
            for name, x in layout.arrays():
                if device_of(x, name) is not None:
                    self.settle(x, name)
                    break
        self._engine.plan(
            layout.views(self.task.num_kv_heads),
            _optional(custom_mask, "custom_mask"),
            _optional(packed_custom_mask, "packed_custom_mask"),
            _optional(tree_parents, "tree_parents"),
            _optional(q_positions, "q_positions"),
            share_prefixes == "auto" or _refuse_sharing(share_prefixes),
            self._plan_stream(stream),
        )
        self._is_planned((layout, tree_parents is not None, q_positions), stream)

    def _check_batch(self, layout: Layout, trees: bool) -> None:
        layout.check(self.spec)
        if trees:
            check_tree_spec(self.spec)

    def _is_planned(self, batch: tuple[Layout, bool, Array | None], stream: Any) -> None:
        """Remember the batch, and say what the plan lacks of it."""
        if self._operand is None:
            self._operand = operand(self._number)
        self._batch = batch
        self._lengths: tuple[Any, ...] = ()
        if late := batch[0].late():
            self.update(**late, q_positions=batch[2], stream=stream)

    def _plan_like(self, like: Planned, stream: Any) -> None:
        if like._batch is None:
            wanted = "one whose plan() has succeeded"
            raise PlanError("layout", "an Attention without a plan", wanted)
        self._check_batch(*like._batch[:2])
        self._streams = self._streams or like._streams
        self._engine.plan_like(like._engine, self._plan_stream(stream))
        self._open = self._open and like._open
        self._is_planned(like._batch, stream)

    def update(
        self,
        kv_lens: Array,
        block_tables: Array | None = None,
        *,
        kv_indptr: Array | None = None,
        kv_indices: Array | None = None,
        qo_indptr: Array | None = None,
        q_positions: Array | None = None,
        stream: Any = None,
    ) -> None:
        """Say how long the requests of a plan of `Bounds` are, and where their pages lie.

        On a GPU it is one small launch, which reads the arrays there: all runs that follow on the
        stream have these lengths, all layers of a step with one call. In a CUDA graph it is
        captured as runs are: a replay reads what the arrays hold then, and does nothing on the
        host. Without a capacity a capture has a plan of its own, so that it needs an update of its
        own.

        Parameters
        ----------
        kv_lens : int32 or int64 array, shape (batch_size,) or (batch_size, num_kv_heads)
            Tokens of each request, from 0 to its bound; more counts as the bound.
        block_tables : int32 or int64 array, optional
            Page ids, of shape (batch_size, max_pages) or (batch_size, num_kv_heads, max_pages).
            Entries beyond ``ceil(kv_len / page_size)`` may be anything; rows may be apart.
        kv_indptr, kv_indices : int32 or int64 arrays, optional
            Instead, the page table in CSR form.
        qo_indptr : int32 or int64 array, shape (batch_size + 1,), optional
            Query rows of each request, at most as many as planned. Rows of the outputs behind
            ``qo_indptr[-1]`` become 0 and -inf. Default: as planned.
        q_positions : int32 or int64 array, shape (batch_size,), optional
            Positions of requests' first query tokens, where `plan` had some. With RoPE inside
            attention none is beyond the last query or key that `plan` was told of, the furthest of
            all requests: more counts as that.
        stream : CUDA stream or int, optional
            Default: the current stream of the framework whose arrays these are.

        Arrays on the host are copied before this returns; those on a GPU must stay as they are
        until the work on the stream has read them.

        Raises
        ------
        PlanError
            Not after a plan of `Bounds`.
        ShapeError, DTypeError, DeviceError
            Arrays that do not match the plan.
        IndexRangeError
            On the CPU a negative page id; with ``FLASHBSR_CHECK=1`` a length beyond its bound.
        UnsupportedError
            Arrays on the host while a CUDA graph is captured.
        """
        arrays = kv_lens, block_tables, kv_indptr, kv_indices, qo_indptr, q_positions
        views = tuple(map(self._in_place, arrays, _LENGTHS))
        self._engine.update(views, self._plan_stream(stream), self._how != 0)
        # The core reads them again if the first run needs another plan.
        self._lengths = arrays, views

    def _in_place(self, x: Array | None, name: str) -> Any:
        """Export an index array, from a GPU without a copy."""
        if x is None:
            return None
        if isinstance(x, (np.ndarray, list, tuple)):
            return to_values(x, name)
        adapter = adapter_for(x, name)
        device = adapter.device(x)
        if device is None:
            return to_values(x, name)
        self._streams = adapter, device
        return adapter.export(x, False, name)

    @property
    def device(self) -> int | None:
        """Ordinal of the GPU that computes; None: the CPU does, or will unless arrays decide."""
        place: Any = self._engine.place()
        return None if place is None else int(place)

    @property
    def captured(self) -> bool:
        """Whether CUDA graphs hold runs that follow later plans: with a capacity only."""
        return bool(self._engine.captured())

    def workspace_size(self) -> int:
        """Bytes of partial states: of the capacity if one is fixed, otherwise of the last plan.

        Raises `PlanError` before `plan`. Of the place that is decided: with ``backend="auto"`` the
        CPU until an array on a GPU is seen (`settle`).
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
        "latent": task.latent,
        "kv_layout": task.kv_layout,
        "causal": spec.causal,
        "context_size": task.share.size,
        "context_rank": task.share.rank,
        "context_interleave": task.share.interleave,
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
        "max_kv_len": -1 if task.max_kv_len is None else task.max_kv_len,
        "num_workers": task.num_workers or 0,
        "tile_rows": task.tile_rows or 0,
        "mixed": task.mixed,
        "num_threads": task.num_threads or 0,
        "backend": task.backend,
        "device": -1 if task.device is None else task.device,
        "q_dtype": task.q_dtype or "",
        "kv_dtype": elements_of(task.kv_dtype)[0] or "",
        "v_dtype": elements_of(task.kv_dtype)[1] or "",
        "packed_latents": task.kv_dtype == PACKED_LATENTS,
        "o_dtype": task.o_dtype or "",
        "dequantize_bytes": task.dequantize_bytes,
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
