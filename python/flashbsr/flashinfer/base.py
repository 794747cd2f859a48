# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What the batch wrappers share: constructor checks, the cache of engines, rejected options.

A wrapper turns FlashInfer's arguments into an `AttentionSpec` and a `TaskInfo`, keeps the
`Attention` made of them, and passes the arrays on. There is no second path to the kernels.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .._check import check_backend, check_int, check_name, on_cuda
from ..arrays import device_of, to_indices
from ..arrays.types import Array, Scale
from ..engine.attention import Attention
from ..engine.plan import Plan
from ..engine.task import TaskInfo
from ..errors import FlashbsrError, PlanError, ShapeError, UnsupportedError
from ..variant.spec import AttentionSpec
from .graphs import Graph

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..engine.explain import Explanation

__all__ = ["Wrapper", "fold_data_type", "pages_to_tokens", "reject", "reject_others"]

# Distinct option tuples a wrapper remembers. Engines differ per tuple, not per batch, so a serving
# loop has one or two (say global and sliding-window layers).
MAX_ENGINES = 8

_MASK_BUFFER = "the wrapper keeps masks itself; plan the largest one before the capture"
_MULTI_ITEM = "write the multi-item mask as custom_mask"
_JIT = "there is no JIT; AttentionSpec has the built-in variants"
_REDUNDANT = "plan reads the lengths from indptr"
_PEER_ONLY = "no kernel here has it"

# Option -> why not, and the way out.
WAY_OUT = {
    "custom_mask_buf": _MASK_BUFFER,
    "mask_indptr_buf": _MASK_BUFFER,
    "use_tensor_cores": "plan chooses the kernel; every one serves every head ratio",
    "jit_args": _JIT,
    "jit_kwargs": _JIT,
    "args": "pass q_scale=, k_scale=, v_scale=, sinks= or alibi_slopes= by name",
    "use_fp16_qk_reduction": "logits are accumulated in float32",
    "window_right": "AttentionSpec has causal and window_left; custom_mask says everything else",
    "prefix_len_ptr": _MULTI_ITEM,
    "token_pos_in_items_ptr": _MULTI_ITEM,
    "token_pos_in_items_len": _MULTI_ITEM,
    "max_item_len_ptr": _MULTI_ITEM,
    "seq_lens": _REDUNDANT,
    "seq_lens_q": _REDUNDANT,
    "max_token_per_sequence": _REDUNDANT,
    "max_sequence_kv": _REDUNDANT,
    "v_indptr": "v has the rows of k: kv_indptr",
    "o_indptr": "the output has the rows of q: qo_indptr",
    "kv_cache_sf": "NVFP4 caches are not supported; use a float8 cache with k_scale and v_scale",
    "o_scale": "fold 1 / o_scale into v_scale",
    "skip_softmax_threshold_scale_factor": _PEER_ONLY,
    "use_fp16_softmax": "softmax is computed in float32",
    "uses_spcompress": _PEER_ONLY,
    "use_profiler": "Attention.run_stats() tells what each thread did",
    "profiler_buffer": "Attention.run_stats() tells what each thread did",
    "block_mask": "leave masked blocks out of indices",
    "mask": "causality is built in; a tree of drafts goes to Attention.plan_block_table as "
    "tree_parents, any other mask as custom_mask",
    "o_sf_scale": "NVFP4 outputs are not supported",
    "o_sf_vec_size": "NVFP4 outputs are not supported",
    "bmm1_scale_log2": "give bmm1_scale",
    "multi_ctas_kv_counter_buffer": "the plan has counters of its own",
    "enable_block_sparse_attention": "BlockSparseAttentionWrapper",
    "bf16q_fp8kv_transform_mode": _PEER_ONLY,
    "rope_scale": "nothing is rotated here; apply_rope before",
    "rope_theta": "nothing is rotated here; apply_rope before",
    "is_cuda_graph_compatible": "the call plans, which cannot be captured: "
    "BatchDecodeWithPagedKVCacheWrapper(use_cuda_graph=True) and its block_tables",
    "int_workspace_buffer": "the plan lives in memory of the wrapper's own",
}


def reject(**options: Any) -> None:
    """Raise `UnsupportedError` for the first option that is not None, False or ``()``."""
    for name, value in options.items():
        if value is None or value is False or (isinstance(value, tuple) and not value):
            continue
        plain = isinstance(value, (bool, int, float, str))
        default = "()" if isinstance(value, tuple) else "False" if value is True else "None"
        raise UnsupportedError(
            name, repr(value) if plain else type(value).__name__, f"{default}: {WAY_OUT[name]}"
        )


def reject_others(way_out: str, **options: Any) -> None:
    """Raise `UnsupportedError` for the first option that is not None or False."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise UnsupportedError(name, type(value).__name__, f"its default: {way_out}")


def fold_data_type(data_type: Any, q_data_type: Any, kv_data_type: Any) -> tuple[Any, Any]:
    """Resolve FlashInfer's ``data_type``: both types at once, unless they are given."""
    return (
        data_type if q_data_type is None else q_data_type,
        data_type if kv_data_type is None else kv_data_type,
    )


def _check_seq_lens(kv_lens: Array, kv_indptr: Array, last_page_len: Array, page: int) -> None:
    """Raise unless both ways to give the lengths agree."""
    pages = np.diff(to_indices(kv_indptr, "kv_indptr"))
    last = to_indices(last_page_len, "last_page_len")
    lens = to_indices(kv_lens, "kv_lens")
    if not lens.shape == last.shape == pages.shape:
        raise ShapeError("kv_lens", f"shape {lens.shape}", f"{pages.shape}: one per request")
    expected = np.where(pages > 0, (pages - 1) * page + last, 0)
    if not np.array_equal(lens, expected):
        at = int(np.flatnonzero(lens != expected)[0])
        raise FlashbsrError(
            "kv_lens",
            f"{lens[at]} for request {at}",
            f"{expected[at]}, as the page table says (give one of the two)",
        )


def pages_to_tokens(fixed_split_size: int | None, page_size: int) -> int | None:
    """Convert FlashInfer's split size, in pages, to that of `TaskInfo`, in tokens."""
    if fixed_split_size is None:
        return None
    check_int("page_size", page_size, 1)
    return check_int("fixed_split_size", fixed_split_size, 1) * page_size


class Wrapper:
    """Base of the batch wrappers.

    Parameters
    ----------
    workspace : None, int or uint8 array
        Scratch memory: None (owned and sized by the wrapper), a size in bytes, or an array.
    kv_layout, backend, lse_base, num_threads
        As in `TaskInfo`.
    graph : Graph, optional
        Of CUDA-graph mode.
    """

    #: The core's names of arguments -> the caller's.
    _spelling: ClassVar[dict[str, str]] = {
        "workspace": "float_workspace_buffer",
        "q_dtype": "q_data_type",
        "kv_dtype": "kv_data_type",
        "o_dtype": "o_data_type",
    }

    def __init__(
        self,
        workspace: Array | int | None,
        kv_layout: str,
        backend: str,
        lse_base: str,
        num_threads: int | None,
        graph: Graph | None = None,
    ) -> None:
        check_name("kv_layout", kv_layout, ("NHD", "HND"))
        check_name("lse_base", lse_base, ("e", "2"))
        check_backend(backend)
        self._workspace = workspace
        self._graph = graph
        self._task_options: dict[str, Any] = {
            "kv_layout": kv_layout,
            "backend": backend,
            "lse_base": lse_base,
            "num_threads": num_threads,
        }
        if graph is not None:
            if backend == "cpu":
                raise UnsupportedError("use_cuda_graph", True, "False with backend='cpu'")
            check_backend(on_cuda(backend))
            self._task_options |= {"backend": on_cuda(backend), "device": graph.device}
        self._engines: dict[Hashable, Attention] = {}
        self._attention: Attention | None = None  # the planned one

    def _engine(self, key: Hashable, spec: dict[str, Any], task: dict[str, Any]) -> Attention:
        """Make the engine of these options and remember it under `key`."""
        rope = {"rope_scale": 1.0, "rope_theta": 1e4}
        spec = {name: rope.get(name) if x is None else x for name, x in spec.items()}
        try:
            attention = Attention(
                AttentionSpec(**spec), TaskInfo(**task, **self._task_options), self._workspace
            )
        except FlashbsrError as error:
            raise error.respell(self._spelling) from None
        if len(self._engines) >= MAX_ENGINES and self._graph is None:  # graphs hold their memory
            del self._engines[next(iter(self._engines))]  # the oldest
        with contextlib.suppress(TypeError):  # a number given as an array is not hashable
            self._engines[key] = attention
        return attention

    def _engine_of(self, spec: dict[str, Any], task: dict[str, Any]) -> Attention:
        """Find or make the engine of these options.

        Wrappers that plan every step write the key out: both dicts take 0.6 us.
        """
        key = (*spec.values(), *task.values())
        return self._find(key) or self._engine(key, spec, task)

    def _capacity(self, qo_indptr: Array, kv_indptr: Array = None) -> dict[str, int]:
        """Capacity of CUDA-graph mode, whose open parts a first plan fixes."""
        if self._graph is None:
            return {}
        rows = [0 if x is None else int(to_indices(x)[-1:].sum()) for x in (qo_indptr, kv_indptr)]
        return self._graph.capacity(*rows)

    def _find(self, key: Hashable) -> Attention | None:
        try:
            return self._engines.get(key)
        except TypeError:  # an unhashable option; if it is no number, TaskInfo will say which
            return None

    def _plan_by(
        self, attention: Attention, plan: Callable[..., None], *args: Any, **options: Any
    ) -> None:
        """Plan by another of the engine's functions; only a plan that succeeds becomes current."""
        try:
            plan(*args, **options)
        except FlashbsrError as error:
            raise error.respell(self._spelling) from None
        self._attention = attention

    def _plan(
        self,
        attention: Attention,
        qo_indptr: Array,
        kv_indptr: Array,
        kv_indices: Array = None,
        last_page_len: Array = None,
        kv_lens: Array = None,
        block_tables: Array = None,
        custom_mask: Array = None,
        packed_custom_mask: Array = None,
        stream: Any = None,
        tree_parents: Array = None,
        share_prefixes: str = "auto",
    ) -> None:
        """Plan a page table, or ragged KV; only a plan that succeeds becomes the current one."""
        try:
            if block_tables is not None:
                if kv_indptr is not None or kv_indices is not None:
                    name = "kv_indices" if kv_indptr is None else "kv_indptr"
                    raise FlashbsrError(name, "an array", "None next to block_tables: one table")
                if kv_lens is None:
                    raise FlashbsrError("kv_lens", None, "the lengths that block_tables needs")
                attention.plan_block_table(
                    qo_indptr,
                    block_tables,
                    kv_lens,
                    custom_mask=custom_mask,
                    packed_custom_mask=packed_custom_mask,
                    tree_parents=tree_parents,
                    share_prefixes=share_prefixes,
                    stream=stream,
                )
            else:
                if kv_lens is not None and last_page_len is not None:
                    page_size = attention.task.page_size or 1
                    _check_seq_lens(kv_lens, kv_indptr, last_page_len, page_size)
                    last_page_len = None
                attention.plan(
                    qo_indptr,
                    kv_indptr,
                    kv_indices,
                    last_page_len=last_page_len,
                    kv_lens=kv_lens,
                    custom_mask=custom_mask,
                    packed_custom_mask=packed_custom_mask,
                    tree_parents=tree_parents,
                    share_prefixes=share_prefixes,
                    stream=stream,
                )
        except FlashbsrError as error:
            raise error.respell(self._spelling) from None
        self._attention = attention

    def _run(
        self,
        q: Array,
        kv: Array | tuple[Array, Array],
        out: Array,
        lse: Array,
        return_lse: bool,
        q_scale: Scale,
        k_scale: Scale,
        v_scale: Scale,
        sinks: Array,
        alibi_slopes: Array = None,
        enable_pdl: bool | None = None,
        kv_ready: bool = False,
        stream: Any = None,
    ) -> Any:
        attention = self._attention or self._planned()
        try:
            return attention.run(
                q,
                kv,
                out=out,
                lse=lse,
                return_lse=return_lse,
                q_scale=q_scale,
                k_scale=k_scale,
                v_scale=v_scale,
                sinks=sinks,
                alibi_slopes=alibi_slopes,
                enable_pdl=enable_pdl,
                kv_ready=kv_ready,
                stream=stream,
            )
        except FlashbsrError as error:
            raise error.respell(self._spelling) from None

    def _planned(self) -> Attention:
        if self._attention is None:
            raise PlanError("run", "no plan", "plan() first; a plan() that raised leaves none")
        return self._attention

    @property
    def attention(self) -> Attention:
        """The planned engine: plan, statistics, workspace size."""
        return self._planned()

    @property
    def plan_info(self) -> Plan:
        """The current plan."""
        return self._planned().plan_info

    def explain(
        self,
        *,
        bandwidth: float | None = None,
        flops: float | None = None,
        time_s: float | None = None,
    ) -> Explanation:
        """Say what the plan does and why: `Attention.explain` of the current plan.

        Parameters
        ----------
        bandwidth, flops, time_s : float, optional
            As there.

        Returns
        -------
        Explanation

        Raises
        ------
        PlanError
            Before ``plan``.
        """
        return self._planned().explain(bandwidth=bandwidth, flops=flops, time_s=time_s)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether a captured ``run`` may be replayed over later plans (``use_cuda_graph``)."""
        return self._graph is not None

    def reset_workspace_buffer(
        self, float_workspace_buffer: Array | int | None, int_workspace_buffer: Any = None
    ) -> None:
        """Replace the workspace. The next call must be ``plan``.

        Parameters
        ----------
        float_workspace_buffer : None, int or uint8 array
            As in the constructor.
        int_workspace_buffer : None
            The plan lives in memory of the wrapper's own; a buffer raises `UnsupportedError`.
        """
        reject(int_workspace_buffer=int_workspace_buffer)
        self._workspace = float_workspace_buffer
        self._engines.clear()
        self._attention = None

    def _probe(self) -> Self:
        """Copy the options and the place, not the workspace and the plans."""
        probe = copy.copy(self)
        on = None if self._attention is None else self._attention.device
        if on is None and not isinstance(self._workspace, int):
            on = device_of(self._workspace, "workspace")
        if on is not None:
            backend = on_cuda(self._task_options["backend"])
            probe._task_options = {**self._task_options, "backend": backend, "device": on}
        probe._workspace = probe._attention = None
        probe._engines = {}
        return probe

    def _sizes(self) -> tuple[int, int]:
        attention = self._planned()
        return attention.workspace_size(), int(attention.plan_info.buffer.nbytes)
