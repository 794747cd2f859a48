# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What the compiled core asks for kernels that the build does not have."""

from __future__ import annotations

import dataclasses

from ..variant.variant import Variant

__all__ = ["Provider"]


class Provider:
    """Kernels of one variant (`api::KernelProvider` of the core).

    Parameters
    ----------
    variant : Variant or None
        None: the built-in ones.
    rotates : bool
        Whether RoPE is inside the attention; a variant's CUDA kernels without it lack its code.
    """

    def __init__(self, variant: Variant | None, rotates: bool = False) -> None:
        # Without its arrays: the core keeps a provider as long as kernels that it was asked for.
        self._variant = variant and dataclasses.replace(variant, captured=())
        self._text = self._struct = self.name = ""
        if variant is not None:
            from ..variant.source import signature_checks, struct_name, variant_source
            from . import cache

            text, self._struct = variant_source(variant, rotates), struct_name(variant)
            checks = signature_checks(variant, "::flashbsr::ThreadMath")
            self._text = f"#include <flashbsr/ptx/math.h>\n{text}{checks}"
            # Kernels are told apart by this name: two texts may call their structs alike.
            self.name = f"{variant.name}_{cache.key_of(text)[:8]}"

    def cpu_library(self, isa: str) -> str:
        """Path of a shared object for a SIMD level of the CPU engine."""
        from .cxx import cpu_library

        assert self._variant is not None  # the CPU has every built-in kernel
        return str(cpu_library(self._variant, isa))

    def cuda_kernel(
        self,
        name: str,
        family: str,
        arch: str,
        target: str,
        head_dim: int,
        head_dim_vo: int,
        q: str,
        kv: str,
        rows: int,
        variant: str,
        copies: str,
        v: str,
    ) -> bytes:
        """Machine code of a CUDA kernel; the parameters are those of ``KernelWish``."""
        from .cuda import cuda_kernel
        from .kernel_source import Wish

        wish = Wish(
            name, family, arch, target, head_dim, head_dim_vo, q, kv, rows, variant, copies, v
        )
        return cuda_kernel(wish, self._text, self._struct)
