# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's door: its names over one `flashbsr.Attention`.

``import flashbsr.flashinfer as flashinfer``, or ``sys.modules["flashinfer"]`` set to this package,
and programs that are written for FlashInfer run; docs/from-flashinfer.md has what differs.
"""

from __future__ import annotations

from . import (
    _alias,
    attention,
    cascade,
    cudnn,
    decode,
    jit,
    mla,
    page,
    pod,
    prefill,
    quantization,
    rope,
    sparse,
    utils,
)
from .attention import *  # noqa: F403
from .cascade import *  # noqa: F403
from .decode import *  # noqa: F403
from .page import *  # noqa: F403
from .pod import *  # noqa: F403
from .prefill import *  # noqa: F403
from .quantization import *  # noqa: F403
from .rope import *  # noqa: F403
from .sparse import *  # noqa: F403

_MODULES = (attention, cascade, decode, page, pod, prefill, quantization, rope, sparse)
__all__ = sorted({name for module in _MODULES for name in module.__all__})
__all__ += ["cudnn", "jit", "mla", "utils"]

_alias.install()
