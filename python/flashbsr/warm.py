# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""``flashbsr warm``: compile ahead of the first request what a server will need."""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import flashbsr._core as _core

from ._check import is_cuda
from .arrays import numpy as host
from .arrays.dtypes import PACKED, kv_dtypes
from .engine.attention import Attention
from .engine.task import TaskInfo
from .errors import FlashbsrError
from .layout.layouts import Layout, Paged, Ragged
from .variant.spec import AttentionSpec
from .variant.variant import Variant

__all__ = ["load_spec", "run", "warm"]

_FEW, _MANY = 4, 1024  # query tokens that KV heads are read in pairs for, and requests


def warm(
    spec: AttentionSpec,
    task: TaskInfo,
    q_lens: Sequence[int] = (1, 512),
    page_size: int | None = None,
) -> list[str]:
    """Compile the kernels of a spec into the cache of this machine, those that the build lacks.

    Parameters
    ----------
    spec : AttentionSpec
    task : TaskInfo
        With the data types, and for a GPU ``backend="cuda"`` or one of its families.
    q_lens : sequence of int
        Query tokens of a request, which decide about the kernel on a GPU: 1 is decode.
    page_size : int, optional
        Tokens of a KV page. None: ragged KV.

    Returns
    -------
    list of str
        Names of the kernels that will run.

    Raises
    ------
    FlashbsrError
        Types are missing; what `Attention` raises.
    """
    if task.kv_dtype is None or task.q_dtype is None:
        missing = "q_dtype" if task.q_dtype is None else "kv_dtype"
        raise FlashbsrError(missing, None, "a data type: it decides about the kernel")
    names = []
    for q_len in q_lens if is_cuda(task.backend) else q_lens[:1]:
        attention = Attention(spec, task)
        for count, size in _batches(task, q_len, page_size):
            attention.plan(_layout(count, q_len, size))
            if not is_cuda(task.backend):
                _run_once(attention, spec.variant, task, q_len, page_size)
            names.append(attention._engine.kernel_name())
    return list(dict.fromkeys(names))


def _batches(task: TaskInfo, q_len: int, page_size: int | None) -> list[tuple[int, int | None]]:
    """List numbers of requests and page sizes that decide about a kernel.

    Many requests of packed codes have another than one. Rows of theirs that the copy engine does
    not take, by their scales or their order, have the kernel of pages of one token.
    """
    packed = any(str(dtype) in PACKED for dtype in kv_dtypes(task.kv_dtype))
    if not is_cuda(task.backend) or not packed or q_len > _FEW:
        return [(1, page_size)]
    counts = (1,) if task.max_batch_size is not None else (1, _MANY)
    return [(count, size) for size in (page_size, 1) for count in counts]


def _layout(count: int, q_len: int, page_size: int | None) -> Layout:
    """Make requests of as many keys as queries, or of one page."""
    rows = np.arange(count + 1) * q_len
    if not page_size:
        return Ragged(rows, rows)
    lengths = np.full(count, min(q_len, page_size))
    pages = np.zeros(count, np.int32)
    return Paged(rows, np.arange(count + 1), pages, kv_lens=lengths, page_size=page_size)


def _run_once(
    attention: Attention, variant: Variant | None, task: TaskInfo, q_len: int, page_size: int | None
) -> None:
    """On a CPU the first run compiles. One request, whose keys are one page or `q_len` rows."""
    assert task.q_dtype is not None
    assert task.kv_dtype is not None
    dims = (task.head_dim_qk, task.head_dim_vo or task.head_dim_qk)
    kv_heads = task.num_kv_heads
    tokens = (1, page_size) if page_size else (q_len,)
    rows = (*tokens[:-1], kv_heads, tokens[-1]) if task.kv_layout == "HND" else (*tokens, kv_heads)
    extras: dict[str, Any] = {}
    captured = {name for name, _ in variant.captured} if variant else set()
    for extra in variant.extras if variant else ():
        if extra.name not in captured:
            extras[extra.name] = _zeros((1,) * extra.rank, extra.dtype) if extra.rank else 0
    (k, k_scale), (v, v_scale) = (
        _cache(rows, dim, str(dtype))
        for dim, dtype in zip(dims, kv_dtypes(task.kv_dtype), strict=True)
    )
    attention.run(
        _zeros((q_len, task.num_qo_heads, dims[0]), task.q_dtype),
        (k, v),
        k_scale=k_scale,
        v_scale=v_scale,
        **extras,
    )


def _cache(rows: tuple[int, ...], dim: int, dtype: str) -> tuple[Any, Any]:
    """K or V of zeros, and the scales that codes of four bits ask for."""
    if dtype not in PACKED:
        return _zeros((*rows, dim), dtype), None
    scales = _zeros((*rows, dim // 16), "uint8") if dtype == "nvfp4" else _zeros(rows, "float32")
    return _zeros((*rows, dim // 2), "uint8"), scales


def _zeros(shape: tuple[int, ...], dtype: str) -> Any:
    try:
        zeros = host.empty(None, shape, dtype)
    except ImportError:
        raise FlashbsrError(
            "dtype", dtype, "pip install ml_dtypes: NumPy has no such type"
        ) from None
    zeros[...] = 0
    return zeros


def load_spec(text: str) -> AttentionSpec:
    """``package.module:NAME`` or ``file.py:NAME`` -> that `AttentionSpec`.

    Raises
    ------
    FlashbsrError
        There is no such module or name, or it is something else.
    """
    where, colon, name = text.rpartition(":")
    if not colon:
        raise FlashbsrError("--spec", repr(text), "module:NAME or file.py:NAME")
    try:
        if where.endswith(".py"):
            found: Any = runpy.run_path(where)[name]
        else:
            sys.path.insert(0, str(Path.cwd()))
            try:
                found = getattr(importlib.import_module(where), name)
            finally:
                sys.path.pop(0)
    except (ImportError, OSError, KeyError, AttributeError) as error:
        raise FlashbsrError("--spec", repr(text), f"a spec ({error!r})") from None
    if not isinstance(found, AttentionSpec):
        raise FlashbsrError("--spec", type(found).__name__, "an AttentionSpec")
    return found


def run(args: argparse.Namespace) -> int:
    """Compile, and print the names of the kernels."""
    task = TaskInfo(
        num_qo_heads=args.num_qo_heads,
        num_kv_heads=args.num_kv_heads,
        head_dim_qk=args.head_dim,
        head_dim_vo=args.head_dim_vo,
        q_dtype=args.dtype,
        kv_dtype=args.kv_dtype or args.dtype,
        backend=args.backend or ("cpu" if _core.cuda_problem() else "cuda"),
    )
    for spec in args.spec:
        for name in dict.fromkeys(warm(load_spec(spec), task, args.qo_lens, args.page_size)):
            print(f"{spec}: {name}")
    return 0
