# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Cache writes: those of `flashbsr`, and the two arrays of MLA's compressed cache."""

from __future__ import annotations

from ..arrays.types import Array
from ..ops.latent import append_latents
from ..ops.page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from ._arguments import described
from .quantized import (
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)

__all__ = ["append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions",
           "get_seq_lens", "nvfp4_quantize_append_paged_kv_cache",
           "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"]  # fmt: skip


@described()
def append_paged_mla_kv_cache(
    append_ckv: Array, append_kpe: Array, batch_indices: Array, positions: Array, ckv_cache: Array,
    kpe_cache: Array, kv_indices: Array, kv_indptr: Array, kv_last_page_len: Array,
) -> None:  # fmt: skip
    """Write new rows of a compressed cache into their slots: `append_paged_kv_cache`, one head.

    With a `ckv_cache` of uint8, [pages, page_size, 656], and `kpe_cache` None rows are quantised
    (`append_packed_latents`).
    """
    append_latents(
        append_ckv, append_kpe, batch_indices, positions, (ckv_cache, kpe_cache), kv_indices,
        kv_indptr, kv_last_page_len,
    )  # fmt: skip
