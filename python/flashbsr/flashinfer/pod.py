# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Prefill on decode (POD): prompts and decodes of one step as one plan and one launch.

FlashInfer's wrappers take the parts' queries and options apart (Kamath et al., POD-Attention,
ASPLOS 2025). Where both parts have one cache and one computation they become one batch, as
`BatchAttention` has it; otherwise, and with masks, they are two launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._check import check_name
from ..arrays import adapter_for
from ..arrays.types import Array, DType, Scale
from ..engine.known import sm_scale_of
from ..errors import PlanError, renamed
from ..layout.joined import Part, join_rows, pages_within, same_cache
from ._arguments import FLOAT16, Number, Workspace, refuse
from ._composed import Composed
from ._values import types
from .prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]

_SPEC = ("pos_encoding_mode", "sm_scale", "window_left", "rope_scale", "rope_theta")
_OF_P, _OF_D = (
    {name: name + suffix for name in ("q", "custom_mask", "packed_custom_mask")}
    | dict.fromkeys(("k", "v", "paged_kv_cache"), "paged_kv_cache" + suffix)
    for suffix in ("_p", "_d")
)


class _TwoParts(Composed):
    """What both wrappers share."""

    _decodes: Part | None = None

    def _take(self, given: dict[str, Any]) -> None:
        """Keep a plan's arguments; whatever fails from here on leaves no plan."""
        self._forget()
        self._decodes, self._given = None, given
        found = types(given)
        self._heads = given["num_qo_heads"], given["num_kv_heads"], given["head_dim"]
        self._spec = {name: given[name] for name in _SPEC}
        self._rest = {
            "q_data_type": found["q_dtype"], "kv_data_type": found["kv_dtype"],
            "logits_soft_cap": given.get("logits_soft_cap"), "stream": given["stream"],
        }  # fmt: skip

    def _parts(self) -> tuple[Part, int]:
        """Return the decodes, and the page size."""
        if self._decodes is None or self._given is None:
            raise PlanError("run", "no plan", "plan() first; a plan() that raised leaves none")
        return self._decodes, self._given["page_size"]

    def _paged(
        self, name: str, part: Part, causal: bool, masks: tuple[Array, Array], q: Array, cache: Any,
        run: dict[str, Any],
    ) -> Any:  # fmt: skip
        """Launch a part over pages."""
        layout, page_size = self._task_options["kv_layout"], self._parts()[1]
        key = causal if masks[0] is masks[1] is None else None
        table = part.qo_indptr, part.kv_indptr, part.kv_indices, part.last_page_len
        wrapper = self._on(
            name, BatchPrefillWithPagedKVCacheWrapper, layout, key, *table, *self._heads,
            page_size, causal=causal, custom_mask=masks[0], packed_custom_mask=masks[1],
            **self._spec, **self._rest,
        )  # fmt: skip
        return wrapper.run(q, cache, **run)

    def _apart(self, prompts: Callable[[], Any], decodes: Callable[[], Any], lse: bool) -> Any:
        """Launch both parts; ``[(out_p, out_d)]``, and the same of the LSE if asked."""
        with renamed(_OF_P):
            first = prompts()
        with renamed(_OF_D):
            second = decodes()
        return list(zip(first, second, strict=True)) if lse else [(first, second)]

    def _together(
        self, prompts: Part, key: Any, causal: bool, q_p: Array, q_d: Array, cache: Any,
        run: dict[str, Any],
    ) -> Any:  # fmt: skip
        """Launch both as one batch; what `_apart` returns, views of one array each."""
        decodes, page_size = self._parts()
        for name, q, part in (("q_p", q_p, prompts), ("q_d", q_d, decodes)):
            rows = int(part.qo_indptr[-1])
            if len(getattr(q, "shape", ())) == 3 and q.shape[0] != rows:
                raise PlanError(name, f"{q.shape[0]} rows", f"the planned {rows}")
        indptrs, kv_lens = prompts.join(decodes)
        whole = self._on(
            "both", BatchPrefillWithPagedKVCacheWrapper, self._task_options["kv_layout"],
            (key, causal), *indptrs, None, *self._heads, page_size, causal=causal,
            seq_lens=kv_lens, **self._spec, **self._rest,
        )  # fmt: skip
        with renamed(_OF_D):
            found = whole.run(join_rows(q_p, q_d, ("q_p", "q_d")), cache, **run)
        first = q_p.shape[0]
        return [(x[:first], x[first:]) for x in (found if run["return_lse"] else (found,))]


class PODWithPagedKVCacheWrapper(_TwoParts):
    """One prompt with contiguous keys and values, and decodes over a paged cache.

    One launch where `k_p` and `v_p` are views of consecutive pages of the decodes' cache (of a
    tuple of K and V, or of pages of one token; in a stacked cache a prompt within one page), there
    is no mask, and options are the same; two otherwise. ``run`` plans, since it is told what the
    prompt is; the plan is kept while that stays the same, as it does from layer to layer of a step.
    """

    _context = ("pod",)

    def __init__(
        self, float_workspace_buffer: Workspace = None, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, paged_kv_indptr_buffer: Array = None,
        paged_kv_indices_buffer: Array = None, paged_kv_last_page_len_buffer: Array = None,
        jit_args: Any = None, *, backend: str = "auto", lse_base: str = "2",
        num_threads: int | None = None,
    ) -> None:  # fmt: skip
        refuse("pod", use_cuda_graph=use_cuda_graph, jit_args=jit_args)
        self._set_up(locals())

    def plan(
        self, indptr: Array, indices: Array, last_page_len: Array, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE",
        window_left: int = -1, q_data_type: DType = FLOAT16, kv_data_type: DType = None,
        data_type: DType = None, sm_scale: Number = None, rope_scale: Number = None,
        rope_theta: Number = None, non_blocking: bool = True, *, stream: Any = None,
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
        decodes, page_size = self._parts()
        given_p = pos_encoding_mode_p, sm_scale_p, window_left_p, rope_scale_p, rope_theta_p
        given_d = pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d
        self._check_decodes(kv_layout_d, given_d)
        run = {
            "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "enable_pdl": enable_pdl,
            "kv_ready": kv_ready, "stream": stream, "return_lse": return_lse_p or return_lse_d,
        }  # fmt: skip
        kv, layout = {"k_p": k_p, "v_p": v_p}, self._task_options["kv_layout"]
        adapter_for(q_p, "q_p")
        with renamed(_OF_D):
            where = pages_within(kv, kv_layout_p, paged_kv_cache_d, page_size, layout)
        masks_p, masks_d = (
            (custom_mask_p, packed_custom_mask_p),
            (custom_mask_d, packed_custom_mask_d),
        )
        masked = any(mask is not None for mask in (*masks_p, *masks_d))
        rows = np.array([0, q_p.shape[0]])
        if where and not masked and self._settled(given_p) == self._settled(self._spec.values()):
            count = -(-where[1] // page_size)
            part = Part(
                rows, np.array([0, count]), where[0] + np.arange(count),
                np.array([where[1] - (count - 1) * page_size]), np.array([where[1]]),
            )  # fmt: skip
            key = (*where, int(rows[1]))
            found = self._together(part, key, causal_p, q_p, q_d, paged_kv_cache_d, run)
        else:
            tokens = int(k_p.shape[0 if kv_layout_p == "NHD" else 1])

            def prompt() -> Any:
                wrapper = self._on(
                    "prompt", BatchPrefillWithRaggedKVCacheWrapper, kv_layout_p,
                    None if masked else (int(rows[1]), tokens, causal_p, given_p), rows,
                    np.array([0, tokens]), *self._heads, causal=causal_p, custom_mask=masks_p[0],
                    packed_custom_mask=masks_p[1], **dict(zip(_SPEC, given_p, strict=True)),
                    **self._rest,
                )  # fmt: skip
                with renamed({"k": "k_p", "v": "v_p"}):
                    return wrapper.run(q_p, k_p, v_p, **run)

            of_decodes = decodes, False, masks_d, q_d, paged_kv_cache_d, run
            found = self._apart(
                prompt, lambda: self._paged("decodes", *of_decodes), run["return_lse"]
            )
        if len(found) == 1:
            return found[0]
        (out_p, out_d), (lse_p, lse_d) = found
        return (out_p, lse_p) if return_lse_p else out_p, (out_d, lse_d) if return_lse_d else out_d

    def _settled(self, options: Any) -> tuple[Any, ...]:
        """Options with their defaults put in, of the two parts to be compared."""
        mode, scale, window, *rope = options
        scale = float(np.float32(sm_scale_of(scale, self._heads[2])))
        rope = [default if x is None else x for x, default in zip(rope, (1.0, 1e4), strict=True)]
        return (mode, scale, window, *(rope if mode == "ROPE_LLAMA" else ()))

    def _check_decodes(self, layout: str, options: tuple[Any, ...]) -> None:
        """Raise unless what is said of the decodes is the default or what was planned."""
        if layout not in ("NHD", self._task_options["kv_layout"]):
            raise PlanError("kv_layout_d", repr(layout), f"{self._task_options['kv_layout']!r}")
        for name, value in zip(_SPEC, options, strict=True):
            said = self._settled({**self._spec, name: value}.values())
            if value not in (None, -1, "NONE") and said != self._settled(self._spec.values()):
                raise PlanError(f"{name}_d", repr(value), f"the planned {self._spec[name]!r}")


class BatchPODWithPagedKVCacheWrapper(_TwoParts):
    """Prompts and decodes over paged KV caches, their queries apart.

    One launch where both have one cache, there is no mask, and decodes are of one token or
    nothing is causal: rows of q are joined, without a copy where `q_d` lies behind `q_p` in one
    array, and outputs are views of one array. Two launches otherwise. ``run`` plans where the batch
    or causality is another than before.
    """

    _context = ("pod",)
    _prompts: Part

    def plan(
        self, qo_indptr_p: Array, kv_indptr_p: Array, kv_indices_p: Array, last_page_len_p: Array,
        qo_indptr_d: Array, kv_indptr_d: Array, kv_indices_d: Array, last_page_len_d: Array,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        pos_encoding_mode: str = "NONE", window_left: int = -1, q_data_type: DType = FLOAT16,
        kv_data_type: DType = None, data_type: DType = None, sm_scale: Number = None,
        rope_scale: Number = None, rope_theta: Number = None, non_blocking: bool = True, *,
        logits_soft_cap: Number = None, stream: Any = None,
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
        decodes, _ = self._parts()
        prompts = self._prompts
        run = {
            "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "enable_pdl": enable_pdl,
            "kv_ready": kv_ready, "stream": stream, "return_lse": return_lse,
        }  # fmt: skip
        masks = custom_mask_p, packed_custom_mask_p
        together = not causal_p or bool((np.diff(decodes.qo_indptr) <= 1).all())
        together = together and masks[0] is masks[1] is None
        if together and same_cache(paged_kv_cache_p, paged_kv_cache_d):
            found = self._together(prompts, (), causal_p, q_p, q_d, paged_kv_cache_d, run)
        else:
            of_prompts = prompts, causal_p, masks, q_p, paged_kv_cache_p, run
            of_decodes = decodes, False, (None, None), q_d, paged_kv_cache_d, run
            found = self._apart(
                lambda: self._paged("prompts", *of_prompts),
                lambda: self._paged("decodes", *of_decodes), return_lse,
            )  # fmt: skip
        return tuple(found) if return_lse else found[0]
