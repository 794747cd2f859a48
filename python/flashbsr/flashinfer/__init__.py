# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's door: its names over one `flashbsr.Attention`."""

from __future__ import annotations

from .batch import BatchAttention
from .batch_pod import BatchPODWithPagedKVCacheWrapper
from .block_table import (
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from .cudnn import cudnn_batch_decode_with_kv_cache, cudnn_batch_prefill_with_kv_cache
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .levels import MultiLevelCascadeAttentionWrapper
from .pod import PODWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from .shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from .single import single_decode_with_kv_cache, single_prefill_with_kv_cache
from .sparse import BlockSparseAttentionWrapper
from .variable_sparse import VariableBlockSparseAttentionWrapper

__all__ = [
    "BatchAttention",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
    "VariableBlockSparseAttentionWrapper",
    "cudnn_batch_decode_with_kv_cache",
    "cudnn_batch_prefill_with_kv_cache",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
]
