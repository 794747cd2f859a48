# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What the wrappers share: workspaces, engines, plans of arguments by their names, runs.

A wrapper turns FlashInfer's arguments into an `AttentionSpec`, a `TaskInfo` and a layout, keeps the
`Attention` made of them, and passes arrays on. There is no second path to the kernels.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any, ClassVar

from .._check import check_backend, check_name, on_cuda
from ..arrays import adapter_for, as_bytes, device_of, per_head
from ..arrays.types import Array, Scale
from ..engine.attention import Attention
from ..engine.known import Known, captured_otherwise, normal
from ..engine.live import outside
from ..engine.plan import Plan
from ..engine.task import TaskInfo
from ..errors import FlashbsrError, PlanError, UnsupportedError
from ..layout.layouts import Layout
from ..variant.spec import AttentionSpec
from ._arguments import Number, Uses, Workspace, describe_class, refuse
from ._graph import graph_mode
from ._values import read_jit_args, types
from .quantized import block_scales

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..engine.explain import Explanation

__all__ = ["UnchangedError", "Wrapper"]

# Distinct options that a wrapper remembers: they differ per kind of layer, not per batch.
MAX_ENGINES = 8

_FORWARD_DEFAULTS = {"causal": False, "pos_encoding_mode": "NONE", "window_left": -1,
                     "use_fp16_qk_reduction": False}  # fmt: skip


class UnchangedError(PlanError):
    """A plan that graph mode refuses before anything is changed."""


class Planned:
    """An attribute that programs for FlashInfer read: what an argument of the last plan was."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments

    def __get__(self, wrapper: Wrapper | None, owner: type) -> Any:
        if wrapper is None:
            return self
        given = wrapper._given or {}
        return next((given[name] for name in self._arguments if name in given), None)


class Wrapper:
    """Base of the wrappers."""

    #: Arrays of ``run``, and arguments of ``forward`` in FlashInfer's order.
    _ARRAYS: ClassVar[tuple[str, ...]] = ("q", "paged_kv_cache")
    _FORWARD: ClassVar[tuple[str, ...]] = ()
    #: Where rows of the table hold that are special.
    _context: ClassVar[tuple[str, ...]] = ()
    #: The core's names of arguments -> the caller's.
    _spelling: ClassVar[dict[str, str]] = {}
    _uses: ClassVar[Uses]
    _plans_in_run: ClassVar[bool] = False

    _causal, _window_left = Planned("causal"), Planned("window_left")
    _sm_scale, _pos_encoding_mode = Planned("sm_scale"), Planned("pos_encoding_mode")
    _rope_scale, _rope_theta = Planned("rope_scale"), Planned("rope_theta")
    # In graph mode the caller's buffers, otherwise the arrays of the last plan.
    _qo_indptr_buf: Any = Planned("qo_indptr")
    _paged_kv_indptr_buf: Any = Planned("paged_kv_indptr", "indptr", "kv_indptr")
    _paged_kv_indices_buf: Any = Planned("paged_kv_indices", "indices", "kv_indices")
    _paged_kv_last_page_len_buf: Any = Planned("paged_kv_last_page_len", "last_page_len")

    def __init_subclass__(cls) -> None:
        describe_class(cls, cls._context)
        if "plan" in vars(cls):
            cls._uses = Uses.of(vars(cls)["plan"], cls._context)
        spelling = {"workspace": "float_workspace_buffer"}
        if hasattr(cls, "_uses"):
            spelling |= {field: name for name, field in (*cls._uses.spec, *cls._uses.task)}
        cls._spelling = {**spelling, **cls._spelling}

    def _set_up(self, given: dict[str, Any]) -> None:
        """Take a constructor's arguments, by name."""
        kv_layout, backend = given.get("kv_layout", "NHD"), given.get("backend", "auto")
        check_name("kv_layout", kv_layout, ("NHD", "HND"))
        check_name("lse_base", given.get("lse_base", "2"), ("e", "2"))
        check_backend(backend)
        graph = graph_mode(given)
        self._int_workspace_buffer: Any = None
        self._take_workspace(given["float_workspace_buffer"])
        self._backend, self._graph = backend, graph
        self._variant = read_jit_args(given.get("jit_args"))
        self._task_options: dict[str, Any] = {
            "kv_layout": kv_layout,
            "backend": backend,
            "lse_base": given.get("lse_base", "2"),
            "num_threads": given.get("num_threads"),
        }
        if graph is not None:
            if backend == "cpu":
                raise UnsupportedError("use_cuda_graph", True, "False with backend='cpu'")
            check_backend(on_cuda(backend))
            self._task_options |= {"backend": on_cuda(backend), "device": graph.device}
            self._fixed_batch_size = graph.max_batch_size
            for name, buffer in given.items():
                if name.endswith(("_buf", "_buffer")) and name != "float_workspace_buffer":
                    setattr(self, f"_{name.removesuffix('fer')}", buffer)
        # Graphs hold the memory of their engines, so that in graph mode none is dropped.
        self._engines: Known[Attention] = Known(None if graph else MAX_ENGINES)
        self._attention: Attention | None = None  # the planned one
        self._given: dict[str, Any] | None = None  # arguments of that plan
        self._forwarded: dict[str, Any] = {}  # options of the last forward()
        self._expected: dict[str, Any] = {}  # those of them that begin_forward() plans for
        self._asked: dict[str, Any] | None = None  # what it was given instead

    def _take_workspace(self, workspace: Any) -> None:
        self._workspace = as_bytes(workspace, "float_workspace_buffer")
        self._float_workspace_buffer = workspace
        if self._int_workspace_buffer is None and not isinstance(workspace, (int, type(None))):
            # Programs hand it on to reset_workspace_buffer.
            adapter = adapter_for(workspace, "float_workspace_buffer")
            self._int_workspace_buffer = adapter.finish(adapter.empty(workspace, (0,), "uint8"))

    # --- plans

    def _check(self, given: dict[str, Any]) -> None:
        """Raise for arguments that exclude each other; nothing has changed yet."""

    def _complete(self, given: dict[str, Any], spec: dict[str, Any], task: dict[str, Any]) -> None:
        """Add to the fields that the table makes of the arguments."""

    def _layout(self, given: dict[str, Any]) -> Layout:
        """Make the layout of the arguments."""
        raise NotImplementedError

    def _start(self, attention: Attention, given: dict[str, Any]) -> None:
        """Plan with an engine."""
        of = given.get  # a call with ** costs 0.5 us
        attention.plan(
            self._layout(given), custom_mask=of("custom_mask"), stream=of("stream"),
            packed_custom_mask=of("packed_custom_mask"), tree_parents=of("tree_parents"),
            share_prefixes=of("share_prefixes", "auto"),
        )  # fmt: skip

    @outside
    def _plan(self, given: dict[str, Any]) -> None:
        """Plan arguments, by name; only a plan that succeeds becomes the current one."""
        given.pop("self", None)
        asked = None
        if self._expected:
            asked = given
            given = given | self._expected | {"forward": self._expected}
        try:
            self._check(given)
            spelling = *self._uses.key(given), self._variant.bias, not self._variant.arrays
            # Splits are in pages here, and in tokens in an engine.
            spelling += (given.get("fixed_split_size") and given.get("page_size"),)
            attention = self._engines.find(spelling)
            if attention is None or attention is not self._attention:
                attention = self._engine(given, spelling)
            self._start(attention, given)
        except FlashbsrError as error:
            if not isinstance(error, UnchangedError):
                self._attention = self._asked = None
            raise error.respell(self._spelling) from None
        self._attention = attention
        self._given, self._asked = given, asked

    def _engine(self, given: dict[str, Any], spelling: tuple[Any, ...]) -> Attention:
        """Find or make the engine of arguments."""
        refuse(*self._context, **{name: given[name] for name in self._uses.refused})
        spec, task = self._wanted(given)
        options = normal(spec, task, open_types=self._graph is None)
        engine = self._engines.get(options)
        if self._graph is not None and (differs := captured_otherwise(self._engines, options)):
            name, wanted, has = differs
            expected = f"{has!r}, as the captured run has: make another wrapper for another one"
            raise UnchangedError(self._spelling.get(name, name), repr(wanted), expected)
        if engine is None:
            engine = Attention(spec, task, self._workspace)
        self._engines.add(spelling, options, engine)
        return engine

    def _wanted(self, given: dict[str, Any]) -> tuple[AttentionSpec, TaskInfo]:
        spec = {field: given[name] for name, field in self._uses.spec}
        spec = {field: value for field, value in spec.items() if value is not None}
        task = {field: given[name] for name, field in self._uses.task}
        if "q_dtype" in task:
            task |= types(given)
        self._complete(given, spec, task)
        return AttentionSpec(**spec), TaskInfo(**task, **self._task_options)

    # --- runs

    def _ready(self) -> Attention:
        """Return the planned engine; after begin_forward() that of its own arguments."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._plan(asked)
        if self._attention is None:
            raise PlanError("run", "no plan", "plan() first; a plan() that raised leaves none")
        return self._attention

    def _run(
        self, q: Array, kv: Any, out: Array, lse: Array, return_lse: bool, q_scale: Scale,
        k_scale: Scale, v_scale: Scale, sinks: Array, alibi_slopes: Array = None,
        enable_pdl: bool | None = None, kv_ready: bool = False, stream: Any = None,
        kv_cache_sf: Any = None, o_scale: Number = None,
    ) -> Any:  # fmt: skip
        attention = self._attention
        if attention is None or self._asked is not None:
            attention = self._ready()
        if type(kv) is list:
            kv = tuple(kv)
        task = attention.task
        if not (q_scale is k_scale is v_scale is None):
            q_scale = per_head(q_scale, task.num_qo_heads)
            k_scale = per_head(k_scale, task.num_kv_heads)
            v_scale = per_head(v_scale, task.num_kv_heads)
        try:
            if kv_cache_sf is not None or task.kv_dtype == "nvfp4":
                k_scale, v_scale = block_scales(kv_cache_sf, kv, task.kv_dtype, k_scale, v_scale)
            run: Any = attention.run
            if self._variant.arrays:  # a call with ** costs 0.5 us
                run = functools.partial(run, **self._variant.arrays)
            result = run(
                q, kv, out=out, lse=lse, return_lse=return_lse, q_scale=q_scale, k_scale=k_scale,
                v_scale=v_scale, o_scale=1.0 if o_scale is None else o_scale, sinks=sinks,
                alibi_slopes=alibi_slopes, kv_ready=kv_ready, stream=stream,
                enable_pdl=enable_pdl and None,  # True is the default, also on the CPU
            )  # fmt: skip
        except FlashbsrError as error:
            raise self._explained(error.respell(self._spelling)) from None
        return result if return_lse or lse is None else result[0]

    def _explained(self, error: FlashbsrError) -> FlashbsrError:
        return error

    def _extra(self, args: tuple[Any, ...], *keywords: Any) -> Any:
        """Make q_scale, k_scale, v_scale and sinks of positional extras, beside `keywords`."""
        attention = self._ready()
        values = self._variant.values(args, attention)
        names = "q_scale", "k_scale", "v_scale", "sinks"
        for name, *both in zip(names, keywords, values, strict=True):
            if all(x is not None for x in both):
                raise FlashbsrError(name, "a keyword", "None next to the one given by position")
        if self._variant.bias != attention.spec.sigmoid_bias and self._given is not None:
            self._plan(self._given)
        return (b if a is None else a for a, b in zip(keywords, values, strict=True))

    def _agrees(self, name: str, value: Any, default: Any = None) -> None:
        """Raise `PlanError` unless an option of ``run`` is what was planned."""
        self._ready()
        planned = (self._given or {}).get(name, 1)  # q_len_per_req, where there is none
        if value != default and value != planned:
            raise PlanError(name, value, f"the planned {planned}")

    # --- FlashInfer's older calls

    def begin_forward(self, *args: Any, **kwargs: Any) -> None:
        """Plan, by the older name, for what the last ``forward`` asked: the next need not plan."""
        self._expected = self._forwarded
        try:
            type(self).plan(self, *args, **kwargs)  # type: ignore[attr-defined]
        finally:
            self._expected = {}

    def forward(self, *args: Any, return_lse: bool = False, **kwargs: Any) -> Any:
        """Compute with options of its own; an older call. It plans again where they differ.

        Arguments, their order and their defaults are FlashInfer's: those of `run`, and the options
        of the computation, which are not taken from the plan.
        """
        if not self._FORWARD:
            return self.run(*args, **kwargs)  # type: ignore[attr-defined]
        given = dict(zip(self._FORWARD, args, strict=False)) | kwargs
        unknown = next((name for name in given if name not in self._FORWARD), None)
        if unknown is not None:
            raise TypeError(f"forward() got an unexpected keyword argument {unknown!r}")
        of_run = (*self._ARRAYS, "q_scale", "k_scale", "v_scale")
        run = {name: given[name] for name in of_run if name in given}
        names = [name for name in self._FORWARD if name not in of_run]
        options = {name: given.get(name, _FORWARD_DEFAULTS.get(name)) for name in names}
        if self._attention is None and self._asked is None:
            self._ready()
        assert self._given is not None
        self._asked = None
        planned = self._given.get("forward") == options
        if not planned and any(self._given[name] != value for name, value in options.items()):
            self._plan(self._given | options | {"forward": options})
        self._forwarded = options
        return self.run(return_lse=return_lse, **run)  # type: ignore[attr-defined]

    def run_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """``run`` with ``return_lse=True``."""
        return self.run(*args, return_lse=True, **kwargs)  # type: ignore[attr-defined]

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """``forward`` with the LSE."""
        return self.forward(*args, return_lse=True, **kwargs)

    def end_forward(self) -> None:
        """Nothing: FlashInfer has it."""

    # --- to look at

    @property
    def attention(self) -> Attention:
        """The planned engine: plan, statistics, workspace size."""
        return self._ready()

    @property
    def plan_info(self) -> Plan:
        """The current plan."""
        return self._ready().plan_info

    @property
    def _plan_info(self) -> dict[str, Any] | None:
        return self._given

    @property
    def _logits_soft_cap(self) -> float:
        return (self._given or {}).get("logits_soft_cap") or 0.0

    def explain(self, **options: Any) -> Explanation:
        """Say what the plan does and why: `Attention.explain` of the current plan."""
        return self._ready().explain(**options)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether a captured ``run`` may be replayed over later plans (``use_cuda_graph``)."""
        return self._graph is not None

    def reset_workspace_buffer(
        self, float_workspace_buffer: Workspace, int_workspace_buffer: Any = None
    ) -> None:
        """Replace the workspace. The next call must be ``plan``."""
        if int_workspace_buffer is not None:
            as_bytes(int_workspace_buffer, "int_workspace_buffer")
        self._take_workspace(float_workspace_buffer)
        self._engines = Known(None if self._graph else MAX_ENGINES)
        self._attention = None

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Bytes that a plan of these arguments needs, for partial results and for the plan.

        On the GPU of `backend`, the workspace or the current plan, otherwise on that of the index
        arrays, otherwise on the CPU.
        """
        if self._plans_in_run:
            raise UnsupportedError("workspace_size", "a call", "None: it is planned in run")
        probe = self._probe()
        probe.plan(*args, **kwargs)  # type: ignore[attr-defined]
        attention = probe._ready()
        return attention.workspace_size(), int(attention.plan_info.buffer.nbytes)

    def _probe(self) -> Self:
        """Copy the options and the place, not the workspace and the plans."""
        probe = copy.copy(self)
        on = None if self._attention is None else self._attention.device
        if on is None and not isinstance(self._workspace, int):
            on = device_of(self._workspace, "workspace")
        if on is not None:
            backend = on_cuda(self._task_options["backend"])
            probe._task_options = {**self._task_options, "backend": backend, "device": on}
        probe._variant = copy.copy(self._variant)
        probe._workspace = probe._attention = probe._given = None
        probe._engines = Known(1)
        return probe


describe_class(Wrapper, ())
