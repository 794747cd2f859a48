# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Operators of what stands around attention: cache writes, rotary embedding, states."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

import flashbsr._core as _core

from ...ops.codes import NO_CODES
from ...ops.page import append_exported, rope_append_exported
from ...ops.rotate import RaggedPositions, ragged_positions, rotate_by_table_exported
from ...ops.rotate import rotate_exported as rotate
from .library import operator

__all__: list[str] = []

Tensor: TypeAlias = torch.Tensor
Maybe: TypeAlias = torch.Tensor | None

_CACHE = (
    "Tensor append_key, Tensor append_value, Tensor(a!) k_cache, Tensor(b!)? v_cache, "
    "Tensor? positions, Tensor? slot_mapping, Tensor? batch_indices, Tensor? kv_indices, "
    "Tensor? kv_indptr, Tensor? kv_last_page_len, str kv_layout, float k_scale, float v_scale"
)


def _places(slot_mapping: Maybe, *table: Maybe) -> Any:
    if slot_mapping is not None:
        return slot_mapping.contiguous()
    return tuple(x.contiguous() for x in table if x is not None)


@operator(f"append_paged_kv_cache({_CACHE}) -> ()")
def append_paged_kv_cache(
    append_key: Tensor, append_value: Tensor, k_cache: Tensor, v_cache: Maybe, positions: Maybe,
    slot_mapping: Maybe, batch_indices: Maybe, kv_indices: Maybe, kv_indptr: Maybe,
    kv_last_page_len: Maybe, kv_layout: str, k_scale: float, v_scale: float, stream: int = 0,
) -> None:  # fmt: skip
    """`flashbsr.append_paged_kv_cache`; without `v_cache`, `k_cache` is stacked."""
    places = _places(slot_mapping, batch_indices, kv_indices, kv_indptr, kv_last_page_len)
    append_exported(
        append_key, append_value, k_cache, v_cache,
        None if positions is None else positions.contiguous(), places, kv_layout, k_scale, v_scale,
        NO_CODES, stream,
    )  # fmt: skip


@operator(
    f"rope_append_paged_kv_cache(Tensor q, Tensor(c!) q_out, {_CACHE}, SymInt rotary_dim, "
    "bool interleave, float rope_scale, float rope_theta, float[]? llama31, "
    "Tensor? cos_sin_cache) -> ()"
)
def rope_append_paged_kv_cache(
    q: Tensor, q_out: Tensor, append_key: Tensor, append_value: Tensor, k_cache: Tensor,
    v_cache: Maybe, positions: Tensor, slot_mapping: Maybe, batch_indices: Maybe,
    kv_indices: Maybe, kv_indptr: Maybe, kv_last_page_len: Maybe, kv_layout: str, k_scale: float,
    v_scale: float, rotary_dim: int, interleave: bool, rope_scale: float, rope_theta: float,
    llama31: list[float] | None, cos_sin_cache: Maybe, stream: int = 0,
) -> None:  # fmt: skip
    """`flashbsr.rope_append_paged_kv_cache`; `rotary_dim` is 0 with a table."""
    places = _places(slot_mapping, batch_indices, kv_indices, kv_indptr, kv_last_page_len)
    rope_append_exported(
        q, q_out, append_key, append_value, k_cache, v_cache, positions.contiguous(), places,
        kv_layout, k_scale, v_scale, NO_CODES, rotary_dim, interleave, rope_scale, rope_theta,
        _three(llama31), cos_sin_cache, stream,
    )  # fmt: skip


def _three(llama31: list[float] | None) -> Any:
    return None if llama31 is None else tuple(llama31)


_PLACES = "Tensor? pos_ids, Tensor? indptr, Tensor? offsets"
_ROPE = "SymInt rotary_dim, bool interleave, float rope_scale, float rope_theta, float[]? llama31"


@operator(
    f"apply_rope(Tensor q, Tensor k, Tensor(a!) q_out, Tensor(b!) k_out, {_PLACES}, {_ROPE}) -> ()"
)
def apply_rope(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, pos_ids: Maybe, indptr: Maybe,
    offsets: Maybe, rotary_dim: int, interleave: bool, rope_scale: float, rope_theta: float,
    llama31: list[float] | None, stream: int = 0,
) -> None:  # fmt: skip
    """`flashbsr.apply_rope`, its variants with positions per row and with Llama 3.1's scaling."""
    if pos_ids is None:
        places: Any = ragged_positions(q, indptr, offsets)
        ragged = isinstance(places, RaggedPositions)
        places = (None, indptr, offsets) if ragged else (places, None, None)
    else:
        places = pos_ids.contiguous(), None, None
    rotate(
        q, k, q_out, k_out, *places, rotary_dim, interleave, rope_scale, rope_theta,
        _three(llama31), None, stream,
    )  # fmt: skip


@operator(f"apply_rope_inplace(Tensor(a!) q, Tensor(b!) k, {_PLACES}, {_ROPE}) -> ()")
def apply_rope_inplace(q: Tensor, k: Tensor, *args: Any, **on: Any) -> None:
    """Likewise, written into `q` and `k`."""
    apply_rope(q, k, q, k, *args, **on)


_TABLE = "Tensor positions, Tensor cos_sin_cache, bool is_neox"


@operator(
    "apply_rope_with_cos_sin_cache(Tensor query, Tensor key, Tensor(a!) query_out, "
    f"Tensor(b!) key_out, {_TABLE}) -> ()"
)
def apply_rope_with_cos_sin_cache(
    query: Tensor, key: Tensor, query_out: Tensor, key_out: Tensor, positions: Tensor,
    cos_sin_cache: Tensor, is_neox: bool, stream: int = 0,
) -> None:  # fmt: skip
    """`flashbsr.apply_rope_with_cos_sin_cache`, heads apart: ``[nnz, heads, head_size]``."""
    rotate_by_table_exported(
        query, key, query_out, key_out, positions.contiguous(), cos_sin_cache, is_neox, stream
    )


@operator(
    f"apply_rope_with_cos_sin_cache_inplace(Tensor(a!) query, Tensor(b!) key, {_TABLE}) -> ()"
)
def apply_rope_with_cos_sin_cache_inplace(
    query: Tensor, key: Tensor, *args: Any, **on: Any
) -> None:
    """Likewise, written into `query` and `key`."""
    apply_rope_with_cos_sin_cache(query, key, query, key, *args, **on)


@operator(
    "merge_state(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b, Tensor(a!) v, Tensor(b!) s, "
    "bool base2) -> ()"
)
def merge_state(
    v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, v: Tensor, s: Tensor, base2: bool,
    stream: int = 0,
) -> None:  # fmt: skip
    """`flashbsr.merge_state`."""
    _core.merge_state(v_a, s_a, v_b, s_b, v, s, base2, stream)


@operator(
    "merge_state_in_place(Tensor(a!) v, Tensor(b!) s, Tensor v_other, Tensor s_other, "
    "Tensor? mask, bool base2) -> ()"
)
def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Maybe, base2: bool,
    stream: int = 0,
) -> None:  # fmt: skip
    """`flashbsr.merge_state_in_place`."""
    kept = None if mask is None else mask.contiguous()
    _core.merge_state_in_place(v, s, v_other, s_other, kept, base2, stream)


@operator("merge_states(Tensor v, Tensor s, Tensor(a!) v_out, Tensor(b!) s_out, bool base2) -> ()")
def merge_states(
    v: Tensor, s: Tensor, v_out: Tensor, s_out: Tensor, base2: bool, stream: int = 0
) -> None:
    """`flashbsr.merge_states`."""
    _core.merge_states(v, s, v_out, s_out, base2, stream)


@operator(
    "get_batch_indices_positions(Tensor append_indptr, Tensor seq_lens, "
    "Tensor(a!) batch_indices, Tensor(b!) positions) -> ()"
)
def get_batch_indices_positions(
    append_indptr: Tensor, seq_lens: Tensor, batch_indices: Tensor, positions: Tensor,
    stream: int = 0,
) -> None:  # fmt: skip
    """`flashbsr.get_batch_indices_positions`."""
    _core.get_batch_indices_positions(
        append_indptr.contiguous(), seq_lens.contiguous(), batch_indices, positions, stream
    )


@operator(
    "get_seq_lens(Tensor kv_indptr, Tensor kv_last_page_len, SymInt page_size, Tensor(a!) out) "
    "-> ()"
)
def get_seq_lens(
    kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int, out: Tensor, stream: int = 0
) -> None:
    """`flashbsr.get_seq_lens`."""
    _core.get_seq_lens(
        kv_indptr.contiguous(), kv_last_page_len.contiguous(), page_size, out, stream
    )
