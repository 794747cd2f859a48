# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What a call of the public API is in a program that a compiler reads: results and an operator.

These functions see tensors without values. They make what the call returns, so that its memory is
the compiler's to plan, and leave checks to the operator, which raises what the call raises.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ..._check import check_one_array
from ...arrays.dtypes import output_dtype
from ...errors import FlashbsrError, PlanError, UnsupportedError
from ...ops.rotate import RaggedPositions
from . import around, attend  # noqa: F401  (they make the operators)

__all__ = [
    "append_paged_kv_cache", "attention", "detached", "forward_only",
    "get_batch_indices_positions", "get_seq_lens",
    "merge_state", "merge_state_in_place", "merge_states", "rope_append_paged_kv_cache", "rotate",
    "rotate_by_table", "run",
]  # fmt: skip

Tensor: TypeAlias = torch.Tensor
_ops = torch.ops.flashbsr


class _ForwardOnly(torch.autograd.Function):  # type: ignore[misc]
    """The node of a result in the graph of gradients, where the way back ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (None, *[_ops.no_gradient.default(gradient, x) for x in ctx.saved_tensors])


def forward_only(results: Any, *inputs: Any) -> Any:
    """Put results into the graph of gradients where an input is: then ``backward`` raises."""
    if torch.is_grad_enabled():
        asked = [x for x in inputs if x is not None and x.requires_grad]
        if asked:
            return tuple([_ForwardOnly.apply(x, *asked) for x in results])
    return results


def detached(x: Any) -> Any:
    """Detach what is read; whatever is no tensor stays."""
    if isinstance(x, torch.Tensor) and x.requires_grad:
        return x.detach()
    return x


def _split(kv: Any) -> tuple[Tensor, Tensor | None]:
    """K and V, or a stacked cache and None."""
    if not isinstance(kv, (tuple, list)):
        return kv, None
    if len(kv) != 2:
        raise FlashbsrError("kv", f"{len(kv)} arrays", "a stacked cache or (k, v)")
    return kv[0], kv[1]


def _number(scale: Any) -> float | None:
    if isinstance(scale, tuple):
        raise UnsupportedError(
            "scale", "a tuple, in a compiled program", "an array: multiply it by the number before"
        )
    return None if scale is None or isinstance(scale, torch.Tensor) else float(scale)


def _array(scale: Any) -> Tensor | None:
    return scale if isinstance(scale, torch.Tensor) else None


def run(
    self: Any, q: Tensor, kv: Any, out: Tensor | None, lse: Tensor | None, return_lse: bool,
    scales: tuple[Any, Any, Any], sinks: Tensor | None, alibi_slopes: Tensor | None,
    enable_pdl: bool | None, kv_ready: bool, lengths: tuple[Tensor | None, ...], stream: Any,
    extras: dict[str, Any],
) -> Any:  # fmt: skip
    """`flashbsr.Attention.run`."""
    if stream is not None:
        raise UnsupportedError(
            "stream", "a stream, in a compiled program", "the stream that is current when it runs"
        )
    if self._operand is None:
        raise PlanError("run", "no plan", "plan() before the program is compiled")
    task, shape = self.task, (q.shape[0], self.task.num_qo_heads)
    check_one_array("o_dtype", task.o_dtype, "another type, or a call outside of the program")
    k, v = _split(kv)
    result = out
    if result is None:
        name = task.o_dtype or output_dtype(str(q.dtype).removeprefix("torch."))
        result = q.new_empty((*shape, self._head_dim_vo), dtype=getattr(torch, name))
    return_lse = return_lse or lse is not None
    if return_lse and lse is None:
        lse = q.new_empty(shape, dtype=torch.float32)

    arrays = detached(q), detached(k), detached(v), result, lse
    plain = scales[0] is scales[1] is scales[2] is sinks is alibi_slopes is enable_pdl is None
    plain = plain and all(array is None for array in lengths)
    if plain and not kv_ready and not extras:
        if q.is_cuda:
            _ops.run.number(self._number, *arrays)
        else:
            _ops.run.default(self._operand, *arrays)
    else:
        held = [name for name in extras if isinstance(extras[name], torch.Tensor)]
        said = [name for name in extras if not isinstance(extras[name], torch.Tensor)]
        more = (
            *[detached(_array(x)) for x in scales], *[_number(x) for x in scales], detached(sinks),
            detached(alibi_slopes), enable_pdl, kv_ready, *lengths, held,
            [detached(extras[name]) for name in held], said, [float(extras[name]) for name in said],
        )  # fmt: skip
        if q.is_cuda:
            _ops.run_with.number(self._number, *arrays, *more)
        else:
            _ops.run_with.default(self._operand, *arrays, *more)
    results = (result, lse) if return_lse else (result,)
    results = forward_only(results, q, k, v)
    return results if return_lse else results[0]


def attention(
    q: Tensor, k: Tensor, v: Tensor, given: tuple[Any, ...], spec: Any, cu_seqlens_q: Any,
    cu_seqlens_k: Any, out: Any, return_lse: bool, options: dict[str, Any],
) -> Any:  # fmt: skip
    """`flashbsr.attention`, which plans where it runs."""
    sinks = options.pop("sinks", None)
    left = [name for name in options if options[name] is not None]
    for name, value in (("spec", spec), ("out", out), *((name, True) for name in left)):
        if value is not None:
            raise UnsupportedError(
                name,
                "a value, in a compiled program",
                "None; Attention.run, planned outside, has it",
            )
    causal, window_left, sm_scale, soft_cap = given
    results = _ops.attention.default(
        detached(q), detached(k), detached(v), causal, window_left, sm_scale, soft_cap,
        cu_seqlens_q, cu_seqlens_k, return_lse, detached(sinks),
    )  # fmt: skip
    results = forward_only(results if return_lse else results[:1], q, k, v)
    return results if return_lse else results[0]


def _slots_or_table(places: Any) -> tuple[Tensor | None, ...]:
    """slot_mapping, batch_indices, kv_indices, kv_indptr, kv_last_page_len."""
    return (None, *places) if isinstance(places, tuple) else (places, None, None, None, None)


def append_paged_kv_cache(
    append_key: Tensor, append_value: Tensor, paged_kv_cache: Any, positions: Tensor | None,
    places: Any, kv_layout: str, k_scale: float, v_scale: float,
) -> None:  # fmt: skip
    """`flashbsr.append_paged_kv_cache`; `places`: slots, or the four arrays of a page table."""
    _ops.append_paged_kv_cache.default(
        detached(append_key), detached(append_value), *_split(paged_kv_cache), positions,
        *_slots_or_table(places), kv_layout, k_scale, v_scale,
    )  # fmt: skip


def rope_append_paged_kv_cache(
    q: Tensor, append_key: Tensor, append_value: Tensor, paged_kv_cache: Any, positions: Tensor,
    places: Any, kv_layout: str, k_scale: float, v_scale: float, rotary_dim: int, interleave: bool,
    rope_scale: float, rope_theta: float, llama31: tuple[float, ...] | None,
    cos_sin_cache: Tensor | None, q_out: Tensor | None,
) -> Tensor:  # fmt: skip
    """`flashbsr.rope_append_paged_kv_cache`."""
    out = q.new_empty(q.shape) if q_out is None else q_out
    _ops.rope_append_paged_kv_cache.default(
        detached(q), out, detached(append_key), detached(append_value), *_split(paged_kv_cache),
        positions, *_slots_or_table(places), kv_layout, k_scale, v_scale, rotary_dim, interleave,
        rope_scale, rope_theta, llama31, cos_sin_cache,
    )  # fmt: skip
    result: Tensor = forward_only((out,), q)[0]
    return result


def rotate(
    q: Tensor, k: Tensor, positions: Any, how: tuple[Any, ...], in_place: bool
) -> tuple[Tensor, Tensor]:
    """Rotate by frequencies: ``apply_rope`` and its kin."""
    ragged = isinstance(positions, RaggedPositions)
    places = (None, positions.indptr, positions.offsets) if ragged else (positions, None, None)
    if in_place:
        _ops.apply_rope_inplace.default(q, k, *places, *how)
        return q, k
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    _ops.apply_rope.default(detached(q), detached(k), q_out, k_out, *places, *how)
    return forward_only((q_out,), q)[0], forward_only((k_out,), k)[0]


def rotate_by_table(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor,
    is_neox: bool, in_place: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate by a table: ``apply_rope_with_cos_sin_cache``, in place or not."""
    heads = [x.view(x.shape[0], -1, head_size) for x in (query, key)]
    table = positions, cos_sin_cache, is_neox
    if in_place:
        _ops.apply_rope_with_cos_sin_cache_inplace.default(*heads, *table)
        return query, key
    q, k = heads
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    _ops.apply_rope_with_cos_sin_cache.default(detached(q), detached(k), q_out, k_out, *table)
    q_out, k_out = q_out.view(query.shape), k_out.view(key.shape)
    return forward_only((q_out,), query)[0], forward_only((k_out,), key)[0]


def merge_state(
    v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, base2: bool
) -> tuple[Tensor, Tensor]:
    """`flashbsr.merge_state`."""
    merged = v_a.new_empty(v_a.shape), s_a.new_empty(s_a.shape)
    states = detached(v_a), detached(s_a), detached(v_b), detached(s_b)
    _ops.merge_state.default(*states, *merged, base2)
    result: tuple[Tensor, Tensor] = forward_only(merged, v_a, v_b)
    return result


def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None, base2: bool
) -> None:
    """`flashbsr.merge_state_in_place`."""
    _ops.merge_state_in_place.default(v, s, detached(v_other), detached(s_other), mask, base2)


def merge_states(v: Tensor, s: Tensor, base2: bool) -> tuple[Tensor, Tensor]:
    """`flashbsr.merge_states`."""
    merged = (
        v.new_empty((v.shape[0], *v.shape[2:])),
        v.new_empty((v.shape[0], v.shape[2]), dtype=torch.float32),
    )
    _ops.merge_states.default(detached(v), detached(s), *merged, base2)
    result: tuple[Tensor, Tensor] = forward_only(merged, v)
    return result


def get_batch_indices_positions(
    append_indptr: Tensor, seq_lens: Tensor, nnz: int, outputs: tuple[Any, Any]
) -> tuple[Tensor, Tensor]:
    """`flashbsr.get_batch_indices_positions`."""
    rows = [
        append_indptr.new_empty((nnz,), dtype=torch.int32) if out is None else out
        for out in outputs
    ]
    _ops.get_batch_indices_positions.default(append_indptr, seq_lens, *rows)
    return rows[0], rows[1]


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """`flashbsr.get_seq_lens`."""
    out = kv_indptr.new_empty(kv_last_page_len.shape, dtype=torch.int32)
    _ops.get_seq_lens.default(kv_indptr, kv_last_page_len, page_size, out)
    return out
