# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The source of a CUDA kernel: a template of ``cpp/kernels``, as ahead of time, filled in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Wish", "kernel_source"]

# As in cmake/instances.cmake; a test compares them.
TYPES = {
    "float32": "kF32",
    "float16": "kF16",
    "bfloat16": "kBF16",
    "float8_e4m3fn": "kE4M3",
    "float8_e5m2": "kE5M2",
    "int8": "kI8",
    "int4": "kI4",
    "nvfp4": "kE2M1",
}
VARIANTS = {
    "plain": "Plain",
    "standard": "Standard",
    "sigmoid": "Sigmoid",
    "sigmoid_alone": "SigmoidAlone",
    "soft_cap": "SoftCapped",
    "alibi": "WithAlibi",
}
COPIES = {"boxes": "kBoxes", "rows": "kRows", "either": "kEither"}


@dataclass(frozen=True)
class Wish:
    """A kernel that the build does not have: ``KernelWish`` of ``cpp/api/provider.h``."""

    name: str  #: of its function
    family: str
    arch: str  #: of its template, ``"sm80"``
    target: str  #: what machine code is for, ``"sm_86"``
    head_dim: int
    head_dim_vo: int
    q: str
    kv: str
    rows: int
    variant: str  #: ``"plain"``, ``"standard"``, ``"sigmoid"``, ``"custom"``, ``"custom_masked"``
    copies: str = "boxes"  #: on Hopper: by TMA, ``"rows"``: as any lie, ``"either"``
    v: str = ""  #: V's type, where that is another than K's


def kernel_source(
    wish: Wish, templates: Path, text: str = "", struct: str = "", floats: bool = False
) -> str:
    """Write the source of a kernel.

    Parameters
    ----------
    wish : Wish
        The kernel.
    templates : Path
        Folder of the templates.
    text, struct : str
        C++ of a user's variant, which includes ``variant/custom.h``, and the qualified name of its
        struct, where ``wish.variant`` is ``"custom"`` or, with a plan's mask, ``"custom_masked"``.
    floats : bool
        Whether its logits are to be floats on Hopper, too.

    Returns
    -------
    str
    """
    names = (f"{wish.family}_{wish.arch}", wish.family)
    paths = [templates / f"{name}.cu.in" for name in names]
    template = next((path for path in paths if path.is_file()), paths[-1]).read_text()
    if wish.variant.startswith("custom"):
        if wish.family.startswith("hopper"):
            text += "\n#include <flashbsr/kernel/sm90a/per_logit.h>\n"
            math = "FloatMath" if floats else "LogitMath"
            struct = f"flashbsr::sm90a::PerLogit<{struct}, flashbsr::sm90a::{math}>"
        masked = "true" if wish.variant.endswith("masked") else "false"
        variant = f"flashbsr::Custom<{struct}, {masked}>"
    else:
        variant = f"flashbsr::{VARIANTS[wish.variant]}"
    values = {
        "NAME": wish.name,
        "ARCH": re.sub(r"\D", "", wish.arch),
        "HEAD_DIM": str(wish.head_dim),
        "HEAD_DIM_VO": str(wish.head_dim_vo),
        "Q": f"flashbsr::DType::{TYPES[wish.q]}",
        "KV": f"flashbsr::DType::{TYPES[wish.kv]}",
        "V": f"flashbsr::DType::{TYPES[wish.v or wish.kv]}",
        "ROWS": str(wish.rows),
        "HOOKS": "false" if wish.variant == "plain" else "true",
        "VARIANT": variant,
        "COPIES": COPIES[wish.copies],
    }
    filled = re.sub(r"@(\w+)@", lambda match: values[match[1]], template)
    # Messages about the user's lines name the user's text (source.py); ours begin anew.
    return f'{text}\n#line 1 "{wish.name}.cu"\n{filled}' if text else filled
