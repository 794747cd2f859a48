# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's door: its names over one `flashbsr.Attention`.

``import flashbsr.flashinfer as flashinfer``, or ``sys.modules["flashinfer"]`` set to this package,
and programs that are written for FlashInfer run; docs/from-flashinfer.md has what differs.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

from . import (
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


# Without the bases of importlib.abc, whose import took a fifth of what that of this package did.
class _Alias:
    """Finds ``flashinfer.decode`` where this package has another name: no second copy of a file."""

    def find_spec(self, fullname: str, *args: object) -> ModuleSpec | None:  # noqa: ARG002
        name, dot, _ = fullname.partition(".")
        if not dot or name == __name__ or sys.modules.get(name) is not sys.modules.get(__name__):
            return None
        return ModuleSpec(fullname, cast("Loader", self))

    def create_module(self, spec: ModuleSpec) -> None:
        """As usual."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.partition(".")[2]
        try:
            sys.modules[module.__name__] = importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"flashbsr.flashinfer has no module {name!r}", name=module.__name__
            ) from error


if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Alias())
