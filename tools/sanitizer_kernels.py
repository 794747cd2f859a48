# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels for tools/sanitizer_cases.py: those of the build, and some that no build has."""

from __future__ import annotations

from typing import Any


def reachable(kernels: list[dict[str, Any]], capability: int) -> list[dict[str, Any]]:
    """Of the rows that differ in nothing but their architecture, the highest that runs here."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for kernel in kernels:
        arch = arch_of(kernel)
        # Of an architecture with an 'a' there is one chip, and none later that runs it.
        if arch == capability or (arch < capability and not kernel["arch"].endswith("a")):
            names = ("family", "head_dim", "head_dim_vo", "kv", "rows", "variant")
            key = tuple(kernel[name] for name in names)
            if key not in best or arch > arch_of(best[key]):
                best[key] = kernel
    return list(best.values())


def compiled() -> list[dict[str, Any]]:
    """Rows that no build has and 9.0 compiles.

    Head dim 512, hooks over codes and over latents, codes of two types, e5m2, other latents.
    """
    wide = [
        (family, arch, 512, kv, rows, variant)
        for family, arch, rows in (("decode", "sm90", 8), ("prefill", "sm80", 64))
        for kv in ("bf16", "e4m3", "e5m2")
        for variant in ("plain", "standard", "sigmoid")
    ]
    codes = [
        ("prefill_scaled", "sm80", 128, kv, 64, "plain" if kv == "e5m2" else "standard")
        for kv in ("i8", "i4", "e2m1", "e5m2")
    ]
    codes += [("prefill_scaled", "sm80", 128, kv, 64, "plain") for kv in ("i8_i4", "i4_e2m1")]
    float8 = [
        ("decode", "sm90", 128, "e4m3", 8, "standard"),
        ("decode", "sm90", 64, "e5m2", 8, "plain"),
        ("prefill", "sm80", 128, "e5m2", 64, "plain"),
        ("hopper", "sm90a", 128, "e4m3", 192, "standard"),
        ("hopper", "sm90a", 128, "bf16xe4m3", 192, "standard"),
    ]
    latents = [("latent_mma", "sm90", 320, "bf16", rows, "standard") for rows in (16, 32, 64)]
    latents += [
        (family, "sm90", "576x512", "e4m3", 16, "standard")
        for family in ("latent_mma", "latent_mma_packed")
    ]
    hopper = [
        ("latent", "sm90a", "576x512", "bf16", 64, "standard"),
        ("latent_codes", "sm90a", "576x512", "bf16xe4m3", 64, "standard"),
        ("latent_packed", "sm90a", "576x512", "bf16xe4m3", 64, "standard"),
    ]
    rows = (*wide, *codes, *float8, *latents, *hopper)
    return [dict(found(*row), name="{}_{}_d{}_{}_r{}_{}".format(*row)) for row in rows]


def found(
    family: str, arch: str, dims: int | str, kv: str, rows: int, variant: str
) -> dict[str, Any]:
    """Give a row as `flashbsr info` does."""
    head_dim, _, head_dim_vo = str(dims).partition("x")
    return {
        "family": family, "arch": arch, "head_dim": int(head_dim), "kv": kv, "rows": rows,
        "head_dim_vo": int(head_dim_vo or head_dim), "variant": variant,
    }  # fmt: skip


def arch_of(kernel: dict[str, Any]) -> int:
    """Take the number of ``sm90a``."""
    return int(kernel["arch"].removeprefix("sm").removesuffix("a"))
