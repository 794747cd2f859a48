# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Prefill on decode (POD): prompts and decodes of one step as one plan and one launch.

FlashInfer's wrappers take the parts' queries and options apart (Kamath et al., POD-Attention,
ASPLOS 2025). Where both parts have one cache and one computation they become one batch, as
`BatchAttention` has it; otherwise, and with masks, they are two launches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from .._check import check_name
from ..arrays.types import Array, DType, Scale
from ..errors import FlashbsrError, PlanError
from ..layout.joined import Part, join_rows, pages_within, same_cache
from ._arguments import FLOAT16, refuse
from ._base import Wrapper
from ._values import types
from .prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]

_SPEC = ("pos_encoding_mode", "sm_scale", "window_left", "rope_scale", "rope_theta")
_OF_A_PART = ("q", "k", "v", "paged_kv_cache", "custom_mask", "packed_custom_mask", "out")


@contextlib.contextmanager
def _part(suffix: str) -> Iterator[None]:
    """Name a part's arguments in messages."""
    try:
        yield
    except FlashbsrError as error:
        raise error.respell({name: name + suffix for name in _OF_A_PART}) from None


class _TwoParts(Wrapper):
    """Wrappers of the joined batch and of each part, planned in ``run`` where it is another."""

    _plans_in_run = True

    def _set_up(self, given: dict[str, Any]) -> None:
        super()._set_up({**given, "use_cuda_graph": False})
        self._wrappers: dict[Any, Any] = {}
        self._planned: dict[str, Any] = {}  # what they were planned for
        self._decodes: Part | None = None

    def reset_workspace_buffer(
        self, float_workspace_buffer: Array | int | None, int_workspace_buffer: Any = None
    ) -> None:
        """Replace the workspace. The next call must be ``plan``."""
        super().reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._wrappers.clear()
        self._decodes = None

    def _take(self, given: dict[str, Any]) -> None:
        """Keep a plan's arguments; whatever fails from here on leaves no plan."""
        self._decodes = self._attention = None
        self._planned.clear()
        self._given = given

    def _parts(self) -> Part:
        if self._decodes is None:
            raise PlanError("run", "no plan", "plan() first; a plan() that raised leaves none")
        return self._decodes

    def _common(self) -> tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]:
        """Heads and dim, options of the computation, types and stream of the plan."""
        given = self._given
        assert given is not None
        found = types(given)
        rest = {
            "q_data_type": found["q_dtype"], "kv_data_type": found["kv_dtype"],
            "stream": given["stream"],
        }  # fmt: skip
        spec = {name: given[name] for name in _SPEC}
        spec["logits_soft_cap"] = given.get("logits_soft_cap")
        return (given["num_qo_heads"], given["num_kv_heads"], given["head_dim"]), spec, rest

    def _on(
        self, name: str, kind: type[Wrapper], layout: str, key: Any, *arrays: Any, **options: Any
    ) -> Any:
        """Return a wrapper planned for these; not again where `key` is that of its plan."""
        wrapper = self._wrappers.get((name, layout))
        if wrapper is None:
            kept = {x: self._task_options[x] for x in ("backend", "lse_base", "num_threads")}
            wrapper = kind(self._workspace, layout, **kept)  # type: ignore[arg-type, call-arg]
            self._wrappers[name, layout] = wrapper
        if key is None or self._planned.get(name) != (key, layout):
            self._planned[name] = None
            wrapper.plan(*arrays, **options)
            self._planned[name] = key, layout
        self._attention = wrapper.attention
        return wrapper

    def _paged(
        self, name: str, part: Part, key: Any, causal: bool, mask: Array, packed: Array
    ) -> Any:
        """Return the wrapper of a part over pages."""
        heads, spec, rest = self._common()
        assert self._given is not None
        return self._on(
            name, BatchPrefillWithPagedKVCacheWrapper, self._task_options["kv_layout"],
            key if mask is packed is None else None, part.qo_indptr, part.kv_indptr,
            part.kv_indices, part.last_page_len, *heads, self._given["page_size"], causal=causal,
            custom_mask=mask, packed_custom_mask=packed, **spec, **rest,
        )  # fmt: skip

    def _together(
        self, prompts: Part, key: Any, causal: bool, q_p: Array, q_d: Array, cache: Any,
        options: dict[str, Any],
    ) -> list[tuple[Any, Any]]:  # fmt: skip
        """One launch; ``[(out_p, out_d)]`` and, if asked, the same of the LSE, views of one."""
        decodes = self._parts()
        for name, q, part in (("q_p", q_p, prompts), ("q_d", q_d, decodes)):
            rows = int(part.qo_indptr[-1])
            if len(getattr(q, "shape", ())) == 3 and q.shape[0] != rows:
                raise PlanError(name, f"{q.shape[0]} rows", f"the planned {rows}")
        heads, spec, rest = self._common()
        assert self._given is not None
        indptrs, kv_lens = prompts.join(decodes)
        whole = self._on(
            "both", BatchPrefillWithPagedKVCacheWrapper, self._task_options["kv_layout"],
            (key, causal), *indptrs, None, *heads, self._given["page_size"], causal=causal,
            seq_lens=kv_lens, **spec, **rest,
        )  # fmt: skip
        with _part("_d"):
            found = whole.run(join_rows(q_p, q_d, ("q_p", "q_d")), cache, **options)
        first = q_p.shape[0]
        both = found if options["return_lse"] else (found,)
        return [(x[:first], x[first:]) for x in both]


class PODWithPagedKVCacheWrapper(_TwoParts):
    """One prompt with contiguous keys and values, and decodes over a paged cache.

    One launch where `k_p` and `v_p` are views of consecutive pages of the decodes' cache (of a
    tuple of K and V, or of pages of one token; in a stacked cache a prompt within one page), there
    is no mask, and options are the same; two otherwise. ``run`` plans, since it is told what the
    prompt is; the plan is kept while that stays the same, as it does from layer to layer of a step.
    """

    _context = ("pod",)

    def __init__(
        self, float_workspace_buffer: Array | int | None = None, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, paged_kv_indptr_buffer: Array = None,
        paged_kv_indices_buffer: Array = None,
        paged_kv_last_page_len_buffer: Array = None, jit_args: Any = None, *,
        backend: str = "auto", lse_base: str = "2", num_threads: int | None = None,
    ) -> None:  # fmt: skip
        refuse("pod", use_cuda_graph=use_cuda_graph, jit_args=jit_args)
        self._set_up(locals())

    def plan(
        self, indptr: Array, indices: Array, last_page_len: Array, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE",
        window_left: int = -1, q_data_type: DType = FLOAT16, kv_data_type: DType = None,
        data_type: DType = None, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, non_blocking: bool = True, *, stream: Any = None,
    ) -> None:  # fmt: skip
        """Take the decodes' page table and options. ``run`` plans."""
        self._take(locals())
        self._decodes = Part.of(None, indptr, indices, last_page_len, page_size, "")

    def run(
        self, q_p: Array, k_p: Array, v_p: Array, q_d: Array, paged_kv_cache_d: Any,
        custom_mask_p: Array = None, packed_custom_mask_p: Array = None, causal_p: bool = False,
        kv_layout_p: str = "NHD", pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None, window_left_p: int = -1,
        rope_scale_p: float | None = None, rope_theta_p: float | None = None,
        return_lse_p: bool = False, custom_mask_d: Array = None,
        packed_custom_mask_d: Array = None, causal_d: bool = False,  # noqa: ARG002
        kv_layout_d: str = "NHD", pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None, window_left_d: int = -1,
        rope_scale_d: float | None = None, rope_theta_d: float | None = None,
        q_scale: Scale = None, k_scale: Scale = None, v_scale: Scale = None,
        return_lse_d: bool = False, use_fp16_qk_reduction: bool = False,  # noqa: ARG002
        enable_pdl: bool | None = None, *args: Any, kv_ready: bool = False, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Compute the prompt and the planned decodes for one layer.

        Returns
        -------
        (out_p, out_d)
            Each ``(out, lse)`` where it was asked.
        """
        refuse("pod", args=args)
        check_name("kv_layout_p", kv_layout_p, ("NHD", "HND"))
        decodes = self._parts()
        heads, spec, rest = self._common()
        layout = self._task_options["kv_layout"]
        prompt = dict(zip(
            _SPEC,
            (pos_encoding_mode_p, sm_scale_p, window_left_p, rope_scale_p, rope_theta_p),
            strict=True,
        ))  # fmt: skip
        given_d = (pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d)
        self._check_decodes(kv_layout_d, dict(zip(_SPEC, given_d, strict=True)))
        options = {
            "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "enable_pdl": enable_pdl,
            "kv_ready": kv_ready, "stream": stream, "return_lse": return_lse_p or return_lse_d,
        }  # fmt: skip
        page_size = self._given["page_size"]  # type: ignore[index]
        where = pages_within(
            {"k_p": k_p, "v_p": v_p}, kv_layout_p, paged_kv_cache_d, page_size, layout
        )
        rows, masks = np.array([0, q_p.shape[0]]), (custom_mask_p, packed_custom_mask_p)
        masks_d = (custom_mask_d, packed_custom_mask_d)
        unmasked = all(mask is None for mask in (*masks, *masks_d))
        if where and unmasked and self._settled(prompt) == self._settled(spec):
            page, tokens = where
            count = -(-tokens // page_size)
            part = Part(
                rows, np.array([0, count]), page + np.arange(count),
                np.array([tokens - (count - 1) * page_size]), np.array([tokens]),
            )  # fmt: skip
            key = (*where, int(rows[1]))
            found = self._together(part, key, causal_p, q_p, q_d, paged_kv_cache_d, options)
        else:
            tokens = int(k_p.shape[0 if kv_layout_p == "NHD" else 1])
            key = (int(rows[1]), tokens, causal_p, tuple(prompt.values()))
            with _part("_p"):
                first = self._on(
                    "prompt", BatchPrefillWithRaggedKVCacheWrapper, kv_layout_p,
                    key if masks[0] is masks[1] is None else None, rows, np.array([0, tokens]),
                    *heads, causal=causal_p, custom_mask=masks[0], packed_custom_mask=masks[1],
                    **prompt, **rest,
                )  # fmt: skip
                results = [first.run(q_p, k_p, v_p, **options)]
            with _part("_d"):
                second = self._paged("decodes", decodes, (), False, *masks_d)
                results.append(second.run(q_d, paged_kv_cache_d, **options))
            found = list(zip(*results, strict=True)) if options["return_lse"] else [tuple(results)]
        if len(found) == 1:
            return found[0]
        (out_p, out_d), (lse_p, lse_d) = found
        return (out_p, lse_p) if return_lse_p else out_p, (out_d, lse_d) if return_lse_d else out_d

    def _settled(self, spec: dict[str, Any]) -> tuple[Any, ...]:
        """Options with their defaults put in, of the two parts to be compared."""
        assert self._given is not None
        mode, scale, window, *rope = (spec[name] for name in _SPEC)
        scale = self._given["head_dim"] ** -0.5 if scale is None else scale
        rope = [default if x is None else x for x, default in zip(rope, (1.0, 1e4), strict=True)]
        return (mode, float(np.float32(scale)), window, *(rope if mode == "ROPE_LLAMA" else ()))

    def _check_decodes(self, layout: str, options: dict[str, Any]) -> None:
        """Raise unless what is said of the decodes is the default or what was planned."""
        planned: dict[str, Any] = {**(self._given or {}), "kv_layout": None}
        if layout not in ("NHD", self._task_options["kv_layout"]):
            raise PlanError("kv_layout_d", repr(layout), f"{self._task_options['kv_layout']!r}")
        whole = self._settled(planned)
        for name, value in options.items():
            if value in (None, -1, "NONE", planned[name]):
                continue
            if self._settled({**planned, name: value}) != whole:
                raise PlanError(f"{name}_d", repr(value), f"the planned {planned[name]!r}")


class BatchPODWithPagedKVCacheWrapper(_TwoParts):
    """Prompts and decodes over paged KV caches, their queries apart.

    One launch where both have one cache, there is no mask, and decodes are of one token or
    nothing is causal: rows of q are joined, without a copy where `q_d` lies behind `q_p` in one
    array, and outputs are views of one array. Two launches otherwise. ``run`` plans where the batch
    or causality is another than before.
    """

    _context = ("pod",)

    def __init__(
        self, float_workspace_buffer: Array | int | None = None, kv_layout: str = "NHD", *,
        backend: str = "auto", lse_base: str = "2", num_threads: int | None = None,
    ) -> None:  # fmt: skip
        self._set_up(locals())
        self._prompts: Part | None = None

    def plan(
        self, qo_indptr_p: Array, kv_indptr_p: Array, kv_indices_p: Array,
        last_page_len_p: Array, qo_indptr_d: Array, kv_indptr_d: Array, kv_indices_d: Array,
        last_page_len_d: Array, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
        q_data_type: DType = FLOAT16, kv_data_type: DType = None, data_type: DType = None,
        sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, non_blocking: bool = True, *,
        logits_soft_cap: float | None = None, stream: Any = None,
    ) -> None:  # fmt: skip
        """Take the parts' page tables, and the options of both. ``run`` plans."""
        self._take(locals())
        prompts = qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p
        decodes = qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d
        self._prompts = Part.of(*prompts, page_size, "_p")
        self._decodes = Part.of(*decodes, page_size, "_d")

    def run(
        self, q_p: Array, paged_kv_cache_p: Any, q_d: Array, paged_kv_cache_d: Any,
        custom_mask_p: Array = None, packed_custom_mask_p: Array = None, causal_p: bool = False,
        q_scale: Scale = None, k_scale: Scale = None, v_scale: Scale = None,
        return_lse: bool = False, use_fp16_qk_reduction: bool = False,  # noqa: ARG002
        enable_pdl: bool | None = None, *, kv_ready: bool = False, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Compute the planned batch for one layer.

        Returns
        -------
        (out_p, out_d), or ((out_p, out_d), (lse_p, lse_d))
        """
        decodes, prompts = self._parts(), self._prompts
        assert prompts is not None
        options = {
            "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "enable_pdl": enable_pdl,
            "kv_ready": kv_ready, "stream": stream, "return_lse": return_lse,
        }  # fmt: skip
        masks = custom_mask_p, packed_custom_mask_p
        unmasked = all(mask is None for mask in masks)
        one_each = not causal_p or bool((np.diff(decodes.qo_indptr) <= 1).all())
        if unmasked and one_each and same_cache(paged_kv_cache_p, paged_kv_cache_d):
            found = self._together(prompts, (), causal_p, q_p, q_d, paged_kv_cache_d, options)
        else:
            with _part("_p"):
                first = self._paged("prompts", prompts, causal_p, causal_p, *masks)
                results = [first.run(q_p, paged_kv_cache_p, **options)]
            with _part("_d"):
                second = self._paged("decodes", decodes, (), False, None, None)
                results.append(second.run(q_d, paged_kv_cache_d, **options))
            found = list(zip(*results, strict=True)) if return_lse else [tuple(results)]
        return tuple(found) if return_lse else found[0]
