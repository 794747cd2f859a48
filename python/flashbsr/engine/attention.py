# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`Attention`: the one way from Python to a kernel. Doors and the one call stand above it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .._check import check_float
from ..arrays import adapter_for, device_of, float_dtype, to_numpy
from ..arrays.dtypes import NVFP4_GROUP, Q_DTYPES, output_dtype
from ..arrays.types import Array
from ..errors import DTypeError, FlashbsrError, UnsupportedError
from ..variant.spec import AttentionSpec
from ..variant.variant import extra_values
from .explain import Explanation, explain
from .launch import launch_options, refuse_on_host, wait_for
from .planning import Planned
from .task import TaskInfo

__all__ = ["Attention"]


class Attention(Planned):
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
        Memory for partial states: an array of the caller's where the computation is, the most
        bytes to own, or None (owned, sized by `plan`). ``run`` never allocates it.

    Raises
    ------
    DeviceError
        The workspace is in another memory than the task says.
    CudaError
        The driver refused.

    Notes
    -----
    For query row *i* of a request, at position ``p = kv_len - q_len + i``::

        O_i = sum_j softmax_j(sm_scale * <q_i, k_j>) v_j

    over the keys that causality, window and mask leave (FlashInfer, MLSys 2025, sections 2 and 3).

    On a GPU, a ``run`` that is captured into a CUDA graph stays right. Without a capacity the graph
    has the plan in memory of its own: a replay computes what was captured, whatever is planned, run
    or deleted later, and ``plan`` may be called within the capture. With a capacity (graph mode)
    replays follow later plans: plan on the stream that the graph is replayed on; a plan that the
    captured launch could not serve raises and changes nothing. Graphs keep what they use, this
    object need not be kept.

    Examples
    --------
    >>> import numpy as np
    >>> from flashbsr import Attention, AttentionSpec, Ragged, TaskInfo
    >>> attention = Attention(
    ...     AttentionSpec(causal=True), TaskInfo(num_qo_heads=4, num_kv_heads=2, head_dim_qk=64)
    ... )
    >>> attention.plan(Ragged(np.array([0, 3, 5]), np.array([0, 10, 12])))  # two requests
    >>> q = np.ones((5, 4, 64), np.float32)
    >>> k = v = np.ones((12, 2, 64), np.float32)
    >>> attention.run(q, (k, v)).shape
    (5, 4, 64)
    """

    def __init__(
        self, spec: AttentionSpec, task: TaskInfo, workspace: Array | int | None = None
    ) -> None:
        super().__init__(spec, task, workspace)  # errors name this class

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
        o_scale: float = 1.0,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        enable_pdl: bool | None = None,
        kv_ready: bool = False,
        kv_lens: Array | None = None,
        block_tables: Array | None = None,
        qo_indptr: Array | None = None,
        q_positions: Array | None = None,
        stream: Any = None,
        **extras: Any,
    ) -> Any:
        """Compute the planned attention.

        On a GPU it is launched, not waited for: nothing is allocated but what is returned, and the
        call can be captured into a CUDA graph. All arrays are in the same memory, with rows aligned
        to 16 bytes there.

        Parameters
        ----------
        q : array, shape (num_q_tokens, num_qo_heads, head_dim_qk)
            float16, bfloat16 or float8_e4m3fn, and on the CPU float32.
        kv : array or tuple of arrays
            A stacked cache ``(pages, 2, page_size, H_kv, D)`` (NHD) or
            ``(pages, 2, H_kv, page_size, D)`` (HND), or a tuple ``(k, v)`` of its halves with
            strides of their own; for ragged KV, and for pages of several tokens one after another
            (the last may be short with `Bsr`), a tuple of ``(tokens, H_kv, D)`` (HND:
            ``(H_kv, tokens, D)``). The type of q, and unless q is float8 also float8_e4m3fn,
            float8_e5m2 or int8; codes of four bits (`TaskInfo.kv_dtype`) are uint8 with ``D / 2``
            in place of ``D``. The last dimension is contiguous. With `TaskInfo.latent`
            ``(pages, page_size, head_dim_qk)``, or a tuple of ``(pages, page_size, head_dim_vo)``
            and ``(pages, page_size, head_dim_qk - head_dim_vo)``; ragged: without page_size; or
            uint8 ``(pages, page_size, 656)``, packed rows (docs/mla.md).
        out : array, shape (num_q_tokens, num_qo_heads, head_dim_vo), optional
            Where to write; default: a new array of q's kind. Its type is the task's o_dtype, by
            default that of q or float8_e4m3fn; with float8 q also any of float32, float16 and
            bfloat16. With an o_dtype of "nvfp4" a tuple: codes, uint8 of ``head_dim_vo / 2``, two
            in a byte, and scales, float8_e4m3fn of ``head_dim_vo / 16``
            (docs/kv-quantization.md).
        lse : float32 array, shape (num_q_tokens, num_qo_heads), optional
            Where to write the LSE; given, it is returned too.
        return_lse : bool
            Also return ``log(sum(exp(logits)))``, natural or base 2 (`TaskInfo.lse_base`); -inf
            where nothing is visible (the output is 0 there).
        q_scale, k_scale : float or float32 array, optional
            Multiply the logits: one number, or one per query head / KV head. `k_scale` also
            per token and head, where K are codes: an array of the shape of K's cache without the
            last dimension, or with groups there, in the types of docs/kv-quantization.md; or a
            tuple of that and of a number or one per KV head.
        v_scale : float, array or tuple, optional
            Multiplies the output; or the values, like `k_scale`.
        o_scale : float
            The output is divided by it, before it is rounded: of an output in float8 or NVFP4 the
            number that its reader multiplies by. Not with a variant's `output_transform`.
        sinks : float32 array, shape (num_qo_heads,), optional
            Learned logits that join the softmax denominator only (gpt-oss, 2025).
        alibi_slopes : float32 array, shape (num_qo_heads,), optional
            With ``pos_encoding_mode="ALIBI"``; default: the standard slopes of these heads.
        enable_pdl : bool, optional
            Let the kernel start before the one ahead of it in the stream has finished
            (programmatic dependent launch, compute capability 9.0 and later). None and True: what
            it reads early is the plan, which is safe whatever runs ahead. False: never.
        kv_ready : bool
            The caller promises that the kernel ahead in the stream does not write the KV cache, so
            that K and V are fetched early too.
        kv_lens, block_tables, qo_indptr, q_positions : int32 or int64 arrays, optional
            With a plan of `Bounds`: its lengths, pages and positions, as `update` takes them.
            Layers of a step have the same: one ``update`` for all of them saves a launch each.
        stream : CUDA stream or int, optional
            Where to run. Default: the current stream of q's framework.
        **extras
            Numbers and arrays that the spec's variant declares, by their names.

        Returns
        -------
        out, or (out, lse)
            Arrays of q's kind; `out` is a tuple where the output is NVFP4.

        Raises
        ------
        PlanError
            No plan, or arrays that do not match it.
        ShapeError, DTypeError, DeviceError, IndexRangeError
            Arrays that do not match the task, or are in another memory than the first.
        UnsupportedError, CudaError
            No kernel for this on the GPU; the driver refused.
        """
        if type(o_scale) is not float or o_scale != 1.0:
            o_scale = self._output_scale(o_scale, adapter_for(q, "q"))
        # A look at a tensor takes PyTorch 50 ns, and a call Python as long: the core checks types.
        adapter = adapter_for(q, "q")
        task = self.task
        device = adapter.device(q)
        handle = how = 0
        if device is not None:
            if adapter.OPERATORS is not None:
                return adapter.OPERATORS.run(
                    self, q, kv, out, lse, return_lse, (q_scale, k_scale, v_scale), sinks,
                    alibi_slopes, enable_pdl, kv_ready,
                    (kv_lens, block_tables, qo_indptr, q_positions), stream, extras,
                )  # fmt: skip
            handle, how = launch_options(adapter, device, self._how, enable_pdl, kv_ready, stream)
            self._streams = adapter, device
        elif enable_pdl or kv_ready or stream is not None:
            refuse_on_host(enable_pdl=enable_pdl, kv_ready=kv_ready, stream=stream)

        if kv_lens is not None:
            stream = handle if device is not None else None
            self.update(
                kv_lens, block_tables, qo_indptr=qo_indptr, q_positions=q_positions, stream=stream
            )
        elif block_tables is not None or qo_indptr is not None or q_positions is not None:
            wanted = "the lengths with block_tables, qo_indptr and q_positions"
            raise FlashbsrError("kv_lens", None, wanted)
        if isinstance(kv, tuple):
            if len(kv) != 2:
                raise FlashbsrError("kv", f"a tuple of {len(kv)}", "a stacked cache or (k, v)")
            k, v = _export(kv[0], "k"), _export(kv[1], "v")
            if device is not None:
                how |= wait_for(adapter, *kv)
        else:
            kv_adapter = adapter if type(kv) is type(q) else adapter_for(kv, "kv")
            k, v = kv_adapter.export(kv, False, "kv"), None
            if kv_adapter is not adapter and device is not None:
                how |= wait_for(adapter, kv)

        return_lse = return_lse or lse is not None
        result, out_adapter, lse_adapter = out, adapter, adapter
        scales = scales_export = None
        if task.o_dtype == "nvfp4":
            scales_adapter = adapter
            if out is None:
                result, scales = self._codes(q, adapter)
            else:
                result, scales = _pair(out)
                out_adapter, scales_adapter = adapter_for(result, "out"), adapter_for(scales, "out")
            scales_export = scales_adapter.export(scales, True, "out")
        elif out is None:
            o_dtype = task.o_dtype or output_dtype(float_dtype(q, "q", Q_DTYPES))
            result = adapter.empty(q, (*_rows(q), task.num_qo_heads, self._head_dim_vo), o_dtype)
        else:
            out_adapter = adapter if type(out) is type(q) else adapter_for(out, "out")
        lse_export = None
        if return_lse:
            if lse is None:
                lse = adapter.empty(q, (*_rows(q), task.num_qo_heads), "float32")
            else:
                lse_adapter = adapter_for(lse, "lse")
            lse_export = lse_adapter.export(lse, True, "lse")

        k_tokens = v_tokens = None
        if k_scale is not None:
            k_scale, k_tokens = _scales(k_scale, "k_scale", task.num_kv_heads)
        if v_scale is not None:
            v_scale, v_tokens = _scales(v_scale, "v_scale", task.num_kv_heads)
        self._engine.run(
            adapter.export(q, False, "q"),
            k,
            v,
            out_adapter.export(result, True, "out"),
            lse_export,
            None if q_scale is None else _scale(q_scale, "q_scale", task.num_qo_heads),
            k_scale,
            v_scale,
            None if sinks is None else _export(sinks, "sinks"),
            None if alibi_slopes is None else _export(alibi_slopes, "alibi_slopes"),
            extra_values(self._extras, self._captured, extras) if extras or self._extras else (),
            handle,
            how,
            k_tokens,
            v_tokens,
            o_scale,
            scales_export,
        )
        self._open = False
        if out is None:
            result = adapter.finish(result, q, kv)
            if scales is not None:
                result = result, adapter.finish(scales, q, kv)
        elif scales is not None:
            result = out
        return (result, lse_adapter.finish(lse, q, kv)) if return_lse else result

    def _codes(self, q: Any, adapter: Any) -> tuple[Any, Any]:
        """Allocate an output in NVFP4: codes and scales."""
        rows, dim = (*_rows(q), self.task.num_qo_heads), self._head_dim_vo
        scales = adapter.empty(q, (*rows, dim // NVFP4_GROUP), "float8_e4m3fn")
        return adapter.empty(q, (*rows, dim // 2), "uint8"), scales

    def _output_scale(self, o_scale: float, adapter: Any) -> float:
        """Check a scale of the output. It is folded into that of the values."""
        if self.spec.variant is not None and "output_transform" in self.spec.variant.hooks:
            raise UnsupportedError(
                "o_scale", o_scale, "1.0 with an output_transform, and the division in there"
            )
        if adapter.OPERATORS is not None:
            raise UnsupportedError(
                "o_scale", o_scale, "1.0 in a compiled program, and v_scale divided by it"
            )
        return check_float("o_scale", o_scale)

    def run_stats(self) -> dict[str, Any]:
        """Measurements of the last run.

        Returns
        -------
        dict
            ``kernel_s`` (wall seconds in the kernel), ``busy_s`` (seconds of each thread; the
            caller is the first), ``isa``, ``threads``. Empty before the first run, and on a GPU,
            whose runs are not timed: measure those with events and give `explain` the time.
        """
        return dict(self._engine.run_stats())

    def explain(
        self,
        *,
        bandwidth: float | None = None,
        flops: float | None = None,
        time_s: float | None = None,
    ) -> Explanation:
        """Say what the plan does and why, what it costs at least, and how near the last run came.

        Parameters
        ----------
        bandwidth : float, optional
            Bytes per second of the memory, for the floor. Default: on a GPU by its clock and width
            (a kernel reads about 95 % of that), on the CPU none.
        flops : float, optional
            Operations per second of matrix products. Default: on a GPU what its maker says of dense
            16-bit products, where its name is known; on the CPU none.
        time_s : float, optional
            Seconds of a run. Default: the last run of this plan where it was timed (the CPU's are).

        Returns
        -------
        Explanation

        Raises
        ------
        PlanError
            Before `plan`.

        Examples
        --------
        >>> import numpy as np
        >>> from flashbsr import Attention, AttentionSpec, Ragged, TaskInfo
        >>> attention = Attention(
        ...     AttentionSpec(), TaskInfo(num_qo_heads=4, num_kv_heads=2, head_dim_qk=64)
        ... )
        >>> attention.plan(Ragged(None, np.array([0, 10, 12])))
        >>> attention.explain(bandwidth=50e9).limit
        'memory'
        """
        return explain(self, bandwidth=bandwidth, flops=flops, time_s=time_s)


def _rows(q: Any) -> tuple[int]:
    """Rows of an output."""
    return (q.shape[0] if len(q.shape) else 0,)


def _pair(out: Any) -> tuple[Any, Any]:
    """Take an output in NVFP4 apart."""
    if not isinstance(out, tuple) or len(out) != 2:
        got = f"a tuple of {len(out)}" if isinstance(out, tuple) else type(out).__name__
        raise DTypeError("out", got, "(codes, scales) with o_dtype='nvfp4'")
    return out


def _export(x: Any, name: str) -> Any:
    return adapter_for(x, name).export(x, False, name)


def _scales(x: Any, name: str, heads: int) -> tuple[Any, Any]:
    """Split a scale of K or V into that of the tensor or its heads, and those of every token."""
    if isinstance(x, tuple):
        if len(x) != 2:
            raise FlashbsrError(name, f"a tuple of {len(x)}", "(scales of every token, a number)")
        return _scale(x[1], name, heads), _export(x[0], name)
    if not isinstance(x, (int, float)) and len(getattr(x, "shape", ())) > 1:
        return None, _export(x, name)
    return _scale(x, name, heads), None


def _scale(x: Any, name: str, heads: int) -> Any:
    if isinstance(x, (int, float)):
        return x
    if isinstance(x, (np.floating, np.integer)):
        return float(x)
    exported = _export(x, name)
    if math.prod(x.shape) == 1 and len(x.shape) < 2:  # vLLM keeps its scales as such tensors
        if device_of(x, name) is not None:
            if heads == 1 and len(x.shape) == 1:
                return exported
            raise UnsupportedError(
                name,
                "one number in the memory of a GPU",
                f"a float read once, or one number per head (expand to {heads}): reading it in "
                "every run would wait for the GPU",
            )
        return float(to_numpy(x, name).reshape(()).astype(np.float64))
    return exported
