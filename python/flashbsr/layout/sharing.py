# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What requests have in common: `find_shared_prefixes`."""

from __future__ import annotations

import flashbsr._core as _core

from ..errors import DTypeError
from .layouts import BlockTable, Paged

__all__ = ["find_shared_prefixes"]


def find_shared_prefixes(
    layout: Paged | BlockTable, *, causal: bool = False
) -> list[tuple[int, list[int]]]:
    """Find the requests of a page table that begin with the same pages.

    It is what ``plan(share_prefixes="auto")`` looks at (docs/sharing.md); that then shares what its
    cost model says is worth it. Equal page ids are equal KV: what lies in the pages is not read.

    Parameters
    ----------
    layout : Paged or BlockTable
        A request without query tokens shares nothing, nor is a page that is not full anybody
        else's.
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
    ...     Paged(
    ...         None,
    ...         kv_indptr=np.array([0, 2, 5, 6, 8]),
    ...         kv_indices=np.array([7, 1, 7, 2, 3, 5, 7, 2]),
    ...         kv_lens=np.array([20, 41, 16, 32]),
    ...         page_size=16,
    ...     )
    ... )
    [(16, [1, 3, 0]), (32, [1, 3])]
    """
    if not isinstance(layout, (Paged, BlockTable)):
        raise DTypeError("layout", type(layout).__name__, "flashbsr.Paged or BlockTable")
    return _core.find_prefixes(layout.views(1), causal)
