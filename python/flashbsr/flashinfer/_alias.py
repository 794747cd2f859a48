# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""``sys.modules["flashinfer"] = flashbsr.flashinfer``, and what a program then imports.

``import flashinfer.decode`` looks for a file of that name below the package and would load a second
copy of it. This finder, the first to be asked, gives the module that is there.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["install"]

THIS = __package__ or ""


class _Alias(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, *args: object) -> ModuleSpec | None:  # noqa: ARG002
        name, dot, _rest = fullname.partition(".")
        if not dot or name == THIS or sys.modules.get(name) is not sys.modules.get(THIS):
            return None
        return ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.partition(".")[2]
        try:
            sys.modules[module.__name__] = importlib.import_module(f"{THIS}.{name}")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"flashbsr.flashinfer has no module {name!r}", name=module.__name__
            ) from error


def install() -> None:
    """Let submodules be found by any other name of the package."""
    if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alias())
