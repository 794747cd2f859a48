# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""An attention engine for LLM inference: any KV layout, any array framework.

Every attention is one computation over a block-sparse-row layout: `Attention` plans it (host work,
once per step) and runs it (once per layer). Four nouns say it all: an `AttentionSpec` what is
computed, a `TaskInfo` on what kind of arrays, a layout who meets whom, ``run`` with what data.
Arrays come from NumPy (with ml_dtypes), PyTorch, JAX or CuPy, and results go back as the caller's
kind. `flashbsr.flashinfer` has the names and conventions of FlashInfer over the same engine.
"""

from __future__ import annotations

import importlib
from typing import Any

import flashbsr._core as _core

from ._installed import get_cmake_dir, get_include
from .arrays import operators_by
from .engine.attention import Attention
from .engine.call import attention
from .engine.context import ContextParallel
from .engine.plan import Plan
from .engine.task import TaskInfo
from .errors import (
    CapacityError,
    DeviceError,
    DTypeError,
    FlashbsrError,
    IndexRangeError,
    PlanError,
    ShapeError,
    UnsupportedError,
)
from .layout.block_mask import BlockMask, block_mask
from .layout.bounds import Bounds
from .layout.layouts import BlockTable, Bsr, Levels, Paged, Ragged
from .layout.padded import Padded
from .layout.sharing import find_shared_prefixes
from .layout.span_mask import SpanMask, span_mask
from .layout.tree import DraftTrees, draft_trees
from .ops.bits import packbits, segment_packbits
from .ops.codes import dequantize_kv_cache
from .ops.hadamard import hadamard
from .ops.latent import append_packed_latents, unpack_latents
from .ops.page import (
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    rope_append_paged_kv_cache,
)
from .ops.rope import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
)
from .ops.rope_quantize import rope_quantize
from .ops.state import merge_state, merge_state_in_place, merge_states
from .variant.rotary import YarnScaling
from .variant.spec import AttentionSpec
from .variant.trace.functions import (
    exp,
    exp2,
    floor,
    log,
    maximum,
    minimum,
    sigmoid,
    sqrt,
    tanh,
    where,
)

__version__: str = _core.__version__

__all__ = [
    "Attention",
    "AttentionSpec",
    "BlockMask",
    "BlockTable",
    "Bounds",
    "Bsr",
    "CapacityError",
    "ContextParallel",
    "DTypeError",
    "DeviceError",
    "DraftTrees",
    "FlashbsrError",
    "IndexRangeError",
    "Levels",
    "Padded",
    "Paged",
    "Plan",
    "PlanError",
    "Ragged",
    "ShapeError",
    "SpanMask",
    "TaskInfo",
    "UnsupportedError",
    "YarnScaling",
    "__version__",
    "append_packed_latents",
    "append_paged_kv_cache",
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "attention",
    "block_mask",
    "dequantize_kv_cache",
    "draft_trees",
    "exp",
    "exp2",
    "find_shared_prefixes",
    "floor",
    "get_batch_indices_positions",
    "get_cmake_dir",
    "get_include",
    "get_seq_lens",
    "hadamard",
    "log",
    "maximum",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "minimum",
    "packbits",
    "rope_append_paged_kv_cache",
    "rope_quantize",
    "segment_packbits",
    "sigmoid",
    "span_mask",
    "sqrt",
    "tanh",
    "unpack_latents",
    "where",
]

# Doors and tools that a program without them does not pay for.
_LATER = ("flashinfer", "integrations", "viz")
operators_by(lambda: importlib.import_module(".integrations.torch", __name__))


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
