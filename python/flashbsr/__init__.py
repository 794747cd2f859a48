# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""An attention engine for LLM inference: any KV layout, any array framework.

Every attention is one computation over a block-sparse-row layout: `Attention` plans it (host work,
once per step) and runs it (once per layer). The wrappers under the names that the ecosystem knows
are thin adapters over it. Arrays come from NumPy (with ml_dtypes), PyTorch, JAX or CuPy, and
results go back as the caller's kind.
"""

from __future__ import annotations

from typing import Any

from . import _core
from .attention import Attention
from .batch import BatchAttention
from .batch_pod import BatchPODWithPagedKVCacheWrapper
from .block_mask import BlockMask, block_mask
from .block_table import (
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from .cascade import merge_state, merge_state_in_place, merge_states
from .cudnn import cudnn_batch_decode_with_kv_cache, cudnn_batch_prefill_with_kv_cache
from .decode import BatchDecodeWithPagedKVCacheWrapper
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
from .levels import MultiLevelCascadeAttentionWrapper
from .page import (
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    rope_append_paged_kv_cache,
)
from .plan import Plan
from .pod import PODWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from .quantization import packbits, segment_packbits
from .rope import (
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
from .rotary import YarnScaling
from .shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from .sharing import find_shared_prefixes
from .single import single_decode_with_kv_cache, single_prefill_with_kv_cache
from .span_mask import SpanMask, span_mask
from .sparse import BlockSparseAttentionWrapper
from .spec import AttentionSpec, TaskInfo
from .trace.functions import exp, exp2, floor, log, maximum, minimum, sigmoid, sqrt, tanh, where
from .tree import DraftTrees, draft_trees
from .variable_sparse import VariableBlockSparseAttentionWrapper

__version__: str = _core.__version__

__all__ = [
    "Attention",
    "AttentionSpec",
    "BatchAttention",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockMask",
    "BlockSparseAttentionWrapper",
    "CapacityError",
    "DTypeError",
    "DeviceError",
    "DraftTrees",
    "FlashbsrError",
    "IndexRangeError",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
    "Plan",
    "PlanError",
    "ShapeError",
    "SpanMask",
    "TaskInfo",
    "UnsupportedError",
    "VariableBlockSparseAttentionWrapper",
    "YarnScaling",
    "__version__",
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
    "block_mask",
    "cudnn_batch_decode_with_kv_cache",
    "cudnn_batch_prefill_with_kv_cache",
    "draft_trees",
    "exp",
    "exp2",
    "find_shared_prefixes",
    "floor",
    "get_batch_indices_positions",
    "get_cmake_dir",
    "get_include",
    "get_seq_lens",
    "log",
    "maximum",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "minimum",
    "packbits",
    "rope_append_paged_kv_cache",
    "segment_packbits",
    "sigmoid",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "span_mask",
    "sqrt",
    "tanh",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "where",
    "xqa_batch_decode_with_kv_cache",
]


def _installed(*parts: str) -> str:
    from pathlib import Path  # 3 ms that `import flashbsr` does not need

    # Beside the compiled module, which is there in an editable install too.
    path = Path(_core.__file__).parent.joinpath(*parts)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: this installation of flashbsr has no such files")
    return str(path)


def get_include() -> str:
    """Directory to put on the include path: ``#include <flashbsr/...>``.

    Returns
    -------
    str

    Raises
    ------
    FileNotFoundError
        The package was installed without headers.

    Examples
    --------
    >>> import pathlib
    >>> pathlib.Path(get_include(), "flashbsr", "config.h").is_file()
    True
    """
    return _installed("include")


def get_cmake_dir() -> str:
    """Directory of the CMake package: ``find_package(flashbsr)`` with ``flashbsr_DIR`` set to it.

    Returns
    -------
    str

    Raises
    ------
    FileNotFoundError
        The package was installed without it.

    Examples
    --------
    >>> import pathlib
    >>> pathlib.Path(get_cmake_dir(), "flashbsrConfig.cmake").is_file()
    True
    """
    return _installed("lib", "cmake", "flashbsr")


def __getattr__(name: str) -> Any:
    if name == "viz":  # not imported with the package: it needs matplotlib
        import importlib

        return importlib.import_module(".viz", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
