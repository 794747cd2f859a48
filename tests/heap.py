# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Memory of large arrays stays with the process that had it.

References need arrays of all sizes. glibc takes large ones from the system, one by one, and gives
them back; the system clears each page anew, which in a virtual machine is half of a large test's
time (28 tests of latents 13 s in place of 23 beside other work; by two workers alone, 1579 tests in
83 s in place of 98). What was freed is garbage in the next array, too, where new pages are zeros: a
test that reads what nobody wrote sees it.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep"]

# malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def keep() -> None:
    """Tell glibc; other systems' allocators are left alone."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_TOP_PAD, 1 << 26)
        mallopt(M_MMAP_MAX, 0)
