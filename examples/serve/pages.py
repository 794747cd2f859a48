# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The page allocator: reference counts, and prefix sharing of full pages.

A full page is known by the digest of all tokens up to its end, so equal prefixes find equal pages,
and a page is never written after it was published. A page that nobody holds but that has a digest
stays findable, until the free list is empty and it is the least recently held one.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


class OutOfPagesError(RuntimeError):
    """Every page is held by a request."""


def page_digests(
    tokens: Sequence[int], page_size: int, count: int, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Digests of the first `count` full pages of `tokens`; `known` are those already computed."""
    digests = list(known[:count])
    for page in range(len(digests), count):
        chunk = np.asarray(tokens[page * page_size : (page + 1) * page_size], np.int32)
        before = digests[-1] if digests else b""
        digests.append(hashlib.blake2b(before + chunk.tobytes(), digest_size=16).digest())
    return digests


class PagePool:
    """Who holds which page of the KV cache.

    Parameters
    ----------
    num_pages, page_size : int
        Size of the cache in pages, and of a page in tokens.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # published pages without a holder
        self._digest: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Pages that `allocate` can still give."""
        return len(self._free) + len(self._idle)

    @property
    def shared(self) -> int:
        """Pages with two or more holders."""
        return sum(count > 1 for count in self.references)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self) -> int:
        """A page with one holder and no content.

        Raises
        ------
        OutOfPagesError
            No page is available.
        """
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        else:
            raise OutOfPagesError(f"all {self.num_pages} pages are held")
        self.references[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Gives up one hold on each page, the last page first, so that prefixes live longest."""
        for page in reversed(pages):
            if self.references[page] <= 0:
                raise ValueError(f"page {page} is released but nobody holds it")
            self.references[page] -= 1
            if self.references[page] == 0:
                if self._digest[page] is None:
                    self._free.append(page)
                else:
                    self._idle[page] = None

    def share(self, digests: Sequence[bytes]) -> list[int]:
        """Takes hold of the pages of the longest known prefix of `digests`."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            self._idle.pop(page, None)
            self.references[page] += 1
            pages.append(page)
        return pages

    def publish(self, page: int, digest: bytes) -> None:
        """Makes a full, held page findable; a second page with the same content stays private."""
        if self.references[page] <= 0:
            raise ValueError(f"page {page} is published but nobody holds it")
        if self._digest[page] is None and digest not in self._page_of:
            self._digest[page] = digest
            self._page_of[digest] = page

    def _forget(self, page: int) -> None:
        digest = self._digest[page]
        if digest is not None:
            del self._page_of[digest]
            self._digest[page] = None

    def check(self) -> None:
        """Raises AssertionError unless every page is in exactly one state."""
        free, idle = set(self._free), set(self._idle)
        held = {page for page, count in enumerate(self.references) if count > 0}
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert len(free) + len(idle) + len(held) == self.num_pages, "a page is in two states"
        assert free | idle | held == set(range(self.num_pages)), "a page is lost"
        assert min(self.references, default=0) >= 0, "a page has a negative count"
        known = {page: d for page, d in enumerate(self._digest) if d is not None}
        assert {d: page for page, d in known.items()} == self._page_of, "digests disagree"
        assert idle <= set(known), "an unpublished page is kept"
        assert not free & set(known), "a free page can be found"
