# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Names of FlashInfer's compiler, for programs that build ahead: nothing has to be built.

Kernels are in the package; a variant's are compiled at its first run, or by ``flashbsr warm``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ._arguments import described

__all__ = ["JitSpec", "MissingJITCacheError", "build_jit_specs"]


class MissingJITCacheError(RuntimeError):
    """FlashInfer's, for programs that catch it; never raised."""


class JitSpec:
    """What ``gen_*_module`` functions return by `name`: something that is built already."""

    is_compiled = True

    def __init__(self, name: str) -> None:
        self.name = name

    def build(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to build."""

    def load(self, *args: Any, **kwargs: Any) -> JitSpec:  # noqa: ARG002
        """Return the spec itself."""
        return self

    build_and_load = load


@described()
def build_jit_specs(
    specs: Iterable[JitSpec], verbose: bool = False, skip_prebuilt: bool = True,
) -> None:  # fmt: skip
    """Build nothing."""


def __getattr__(name: str) -> Callable[..., JitSpec]:
    if name.startswith("gen_") and name.endswith(("_module", "_spec")):

        def generate(*args: Any, **kwargs: Any) -> JitSpec:  # noqa: ARG001
            return JitSpec(name.removeprefix("gen_"))

        return generate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
