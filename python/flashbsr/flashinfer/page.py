# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Cache writes: those of `flashbsr`, and the two arrays of MLA's compressed cache."""

from __future__ import annotations

from ..arrays.types import Array
from ..errors import FlashbsrError
from ..ops.latent import PACKED_BYTES, append_packed_latents
from ..ops.page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from ._arguments import described

__all__ = ["append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions",
           "get_seq_lens"]  # fmt: skip

_SPELLING = {
    "append_key": "append_ckv", "append_value": "append_kpe", "cache": "ckv_cache",
    "paged_kv_cache[0]": "ckv_cache", "paged_kv_cache[1]": "kpe_cache",
}  # fmt: skip


@described()
def append_paged_mla_kv_cache(
    append_ckv: Array, append_kpe: Array, batch_indices: Array, positions: Array, ckv_cache: Array,
    kpe_cache: Array, kv_indices: Array, kv_indptr: Array, kv_last_page_len: Array,
) -> None:  # fmt: skip
    """Write new rows of a compressed cache into their slots: `append_paged_kv_cache`, one head.

    With a `ckv_cache` of uint8, [pages, page_size, 656], and `kpe_cache` None rows are quantised
    (`append_packed_latents`).
    """
    try:
        if kpe_cache is None and ckv_cache.shape[-1] == PACKED_BYTES:
            append_packed_latents(
                append_ckv, append_kpe, batch_indices, positions, ckv_cache, kv_indices, kv_indptr,
                kv_last_page_len,
            )  # fmt: skip
            return
        append_paged_kv_cache(
            append_ckv[:, None], append_kpe[:, None], batch_indices, positions,
            (ckv_cache[:, :, None], kpe_cache[:, :, None]), kv_indices, kv_indptr,
            kv_last_page_len,
        )  # fmt: skip
    except FlashbsrError as error:
        raise type(error)(_SPELLING.get(error.argument, error.argument), *error.args[1:]) from None
