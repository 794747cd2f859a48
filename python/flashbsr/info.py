# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What this build is and what it found on this machine."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["engine_info"]


def engine_info() -> dict[str, Any]:
    """Describe what this build is and what it found on this machine.

    Returns
    -------
    dict
        ``version``, ``backends``, ``isa`` (in use), ``isas`` (that this machine can run), ``cores``
        and ``threads`` (of the default pool), ``kernels`` (list of dict: backend, isa, compute,
        variant, q_dtypes, kv_dtypes, head_dims).
    """
    import flashbsr

    from . import _core

    kernels = [dict(kernel) for kernel in _core.kernels()]
    return {
        "version": flashbsr.__version__,
        "backends": sorted({kernel["backend"] for kernel in kernels}),
        "isa": _core.isa(),
        "isas": list(_core.isa_levels()),
        "cores": os.cpu_count() or 1,
        "threads": _core.num_threads(),
        "kernels": kernels,
    }
