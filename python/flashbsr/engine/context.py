# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Which of a request's keys a rank has, when several share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._check import check_int
from ..errors import FlashbsrError

__all__ = ["ContextParallel"]


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """One rank's share: of every ``size * interleave`` positions ``interleave`` are its own.

    Key *j* of a request on this rank stands at position
    ``((j // interleave) * size + rank) * interleave + j % interleave`` of the request.

    Parameters
    ----------
    size : int
        Ranks that share the keys of each request.
    rank : int
        This one, from 0.
    interleave : int
        Tokens in a row that one rank has: 1, a page, or more.

    Raises
    ------
    FlashbsrError
        A rank that is not below size, or a number out of its range.

    Examples
    --------
    >>> share = ContextParallel(size=2, rank=1, interleave=4)
    >>> share.key_positions(6).tolist()
    [4, 5, 6, 7, 12, 13]
    >>> share.local_lens(14)
    6
    """

    size: int
    rank: int
    interleave: int = 1

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("rank", 0), ("interleave", 1)):
            object.__setattr__(self, name, check_int(name, getattr(self, name), least))
        if self.rank >= self.size:
            raise FlashbsrError("rank", self.rank, f"below size={self.size}")
        if self.size * self.interleave >= 1 << 30:
            raise FlashbsrError("interleave", self.interleave, "size * interleave below 2^30")

    def local_lens(self, lens: Any) -> Any:
        """Count the tokens that this rank has of requests.

        Parameters
        ----------
        lens : int or integer array
            Tokens of each request on all ranks. Arrays stay where they are: on a GPU this is
            arithmetic of the framework, nothing is waited for.

        Returns
        -------
        int or array
            Of the same kind.
        """
        whole = lens // (self.size * self.interleave)
        rest = lens - whole * (self.size * self.interleave) - self.rank * self.interleave
        if isinstance(rest, (int, np.integer)):
            return int(whole * self.interleave + min(max(rest, 0), self.interleave))
        return whole * self.interleave + rest.clip(0, self.interleave)

    def key_positions(self, count: int) -> npt.NDArray[np.int64]:
        """Give the positions of this rank's first keys of a request.

        Parameters
        ----------
        count : int
            How many.

        Returns
        -------
        numpy.ndarray, int64 [count]
        """
        j = np.arange(count, dtype=np.int64)
        place = j // self.interleave * self.size + self.rank
        return place * self.interleave + j % self.interleave

    def has(self, positions: Any) -> Any:
        """Tell which tokens this rank keeps.

        Parameters
        ----------
        positions : int or integer array
            Of tokens within their requests.

        Returns
        -------
        bool or bool array
            Of the same kind. A token that it has is its key number ``local_lens(position)``.
        """
        return positions // self.interleave % self.size == self.rank
