# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What this build is and what it found on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .errors import UnsupportedError

__all__ = ["cuda_summary", "engine_info"]


def engine_info() -> dict[str, Any]:
    """Describe what this build is and what it found on this machine.

    Returns
    -------
    dict
        ``version``, ``backends`` (usable here), ``isa`` (in use), ``isas`` (that this machine can
        run), ``cores`` and ``threads`` (of the default pool), ``kernels`` (the CPU's; list of dict:
        backend, isa, compute, variant, q_dtypes, kv_dtypes, head_dims), ``jit``, a dict of the
        compilers for kernels compiled at run time: ``nvrtc`` and ``cxx``, None where there
        is none, and ``cuda``, a dict:
        ``available``, ``problem`` (why not, or None), ``devices`` (list of dict: name,
        compute_capability, sm_count, max_smem_per_block, l2_bytes, memory_bytes, kernels: how many
        it runs), ``kernels`` (list of dict, one per compiled kernel: name, family, arch,
        head_dim, kv, rows, variant, targets, threads, smem_bytes, blocks_per_sm, kv_tile,
        image_bytes, 0 where the build leaves a rare kernel to NVRTC).
    """
    import flashbsr._core as _core

    from .jit.cxx import compiler

    kernels = [dict(kernel) for kernel in _core.kernels()]
    problem = _core.cuda_problem()
    backends = {kernel["backend"] for kernel in kernels} | (set() if problem else {"cuda"})
    return {
        "version": _core.__version__,
        "backends": sorted(backends),
        "isa": _core.isa(),
        "isas": list(_core.isa_levels()),
        "cores": os.cpu_count() or 1,
        "threads": _core.num_threads(),
        "kernels": kernels,
        "jit": {"nvrtc": _found(_nvrtc), "cxx": _found(lambda: compiler()[0])},
        "cuda": {
            "available": not problem,
            "problem": problem or None,
            "devices": [dict(device) for device in _core.cuda_devices()],
            "kernels": [dict(kernel) for kernel in _core.cuda_kernels()],
        },
    }


def _nvrtc() -> str:
    from .jit.nvrtc import find_library, nvrtc

    return "NVRTC {}.{}, {}".format(*nvrtc().version, find_library())


def _found(find: Callable[[], Any]) -> str | None:
    try:
        return str(find())
    except UnsupportedError:
        return None


def cuda_summary(kernels: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Fold the CUDA kernels into what they can do: a row per family, architecture and variant.

    Parameters
    ----------
    kernels : list of dict
        ``engine_info()["cuda"]["kernels"]``.

    Returns
    -------
    list of dict
        ``family``, ``arch``, ``variant``, ``targets`` (or that the build leaves it to NVRTC),
        ``kv``, ``head_dims``, ``rows`` and ``kernels``, the number of kernels folded. ``192x128``
        is a kernel for q and k of 192 and v of 128. A row promises no product of its columns where
        ``kernels`` is smaller than that.
    """
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for kernel in kernels:
        variant = kernel["variant"] or "-"
        targets = kernel["targets"] if kernel["image_bytes"] else "NVRTC, at first use"
        key = (kernel["family"], kernel["arch"], variant, targets)
        groups.setdefault(key, []).append(kernel)

    def head_dims(members: list[dict[str, Any]]) -> str:
        found = {(member["head_dim"] or 0, member["head_dim_vo"] or 0) for member in members}
        # Of q and k, and of v where that is another one.
        texts = (str(qk) if qk == vo else f"{qk}x{vo}" for qk, vo in sorted(found))
        return ", ".join("-" if text == "0" else text for text in texts)

    def values(members: list[dict[str, Any]], column: str) -> str:
        found = list(dict.fromkeys(member[column] for member in members))
        if all(isinstance(value, int) for value in found):
            found.sort()
        return ", ".join("-" if value is None else str(value) for value in found)

    return [
        {
            "family": family,
            "arch": arch,
            "variant": variant,
            "targets": targets,
            "kv": values(members, "kv"),
            "head_dims": head_dims(members),
            "rows": values(members, "rows"),
            "kernels": str(len(members)),
        }
        for (family, arch, variant, targets), members in groups.items()
    ]
