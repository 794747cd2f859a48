# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What requests have in common: `find_shared_prefixes`."""

from __future__ import annotations

import flashbsr._core as _core

from .._check import check_int
from ..arrays import to_values
from ..arrays.types import Array

__all__ = ["find_shared_prefixes"]


def find_shared_prefixes(
    kv_indptr: Array,
    kv_indices: Array,
    kv_lens: Array,
    page_size: int,
    *,
    qo_indptr: Array | None = None,
    causal: bool = False,
) -> list[tuple[int, list[int]]]:
    """Find the requests of a page table that begin with the same pages.

    It is what ``plan(share_prefixes="auto")`` looks at (docs/sharing.md); that then shares what its
    cost model says is worth it. Equal page ids are equal KV: what lies in the pages is not read.

    Parameters
    ----------
    kv_indptr : int32 or int64 array, shape (batch_size + 1,)
        Entries of `kv_indices` of request b: ``kv_indptr[b]`` to ``kv_indptr[b + 1]``.
    kv_indices : int32 or int64 array, shape (>= kv_indptr[-1],)
        Page ids.
    kv_lens : int32 or int64 array, shape (batch_size,)
        Tokens of each request. A page that is not full is nobody else's.
    page_size : int
        Tokens of a page.
    qo_indptr : int32 or int64 array, shape (batch_size + 1,), optional
        Query tokens of the requests; one without any shares nothing. Default: one each.
    causal : bool
        Whether the last tokens of a request are hidden from its first query; what one query does
        not see does not count.

    Returns
    -------
    list of (tokens, requests)
        The nodes of a radix tree, parents before their children: two requests or more that have
        their first `tokens` tokens in common, as many as all of them have. Those of a child are
        neighbours in its parent.

    Raises
    ------
    ShapeError, DTypeError, IndexRangeError
        As ``Attention.plan``.
    FlashbsrError
        `page_size` is not positive.

    Notes
    -----
    A radix walk over the rows of the table: linear in the ids that are equal. 256 requests of 512
    pages take 22 us where nothing is shared and about 30 where half or all of it is (int32; 25 us
    more for int64; one core of an AMD EPYC, family 26), 18 of them to copy and check the table.
    Arrays on a GPU are copied to the host.

    Examples
    --------
    Pages of 16 tokens. Requests 0, 1 and 3 begin with page 7, of which 1 and 3 go on with page 2.

    >>> import numpy as np
    >>> find_shared_prefixes(
    ...     kv_indptr=np.array([0, 2, 5, 6, 8]),
    ...     kv_indices=np.array([7, 1, 7, 2, 3, 5, 7, 2]),
    ...     kv_lens=np.array([20, 41, 16, 32]),
    ...     page_size=16,
    ... )
    [(16, [1, 3, 0]), (32, [1, 3])]
    """
    return _core.find_prefixes(
        None if qo_indptr is None else to_values(qo_indptr, "qo_indptr"),
        to_values(kv_indptr, "kv_indptr"),
        to_values(kv_indices, "kv_indices"),
        to_values(kv_lens, "kv_lens"),
        check_int("page_size", page_size, 1),
        causal,
    )
