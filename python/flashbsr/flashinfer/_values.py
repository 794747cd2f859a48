# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Single values in FlashInfer's form, as the engine takes them."""

from __future__ import annotations

from typing import Any

from .._check import check_int
from ..arrays import adapter_for, device_of
from ..errors import FlashbsrError
from ._arguments import Default

__all__ = ["as_bytes", "as_tuple", "pages_to_tokens", "per_head", "types"]

ALIGNMENT = 16


def as_bytes(workspace: Any, name: str) -> Any:
    """View a workspace of any type as bytes; None and a size stay. Raise if it is not aligned."""
    if workspace is None or isinstance(workspace, int):
        return workspace
    adapter = adapter_for(workspace, name)
    start = adapter.address(workspace)[0]
    if start % ALIGNMENT:
        expected = f"{name} must be {ALIGNMENT}-byte aligned"
        raise FlashbsrError(name, f"an array at {start:#x}", expected)
    return adapter.as_bytes(workspace)


def types(given: dict[str, Any]) -> dict[str, Any]:
    """Element types: FlashInfer's defaults, where nothing is given, are those of the arrays."""
    q, kv, both = given["q_data_type"], given["kv_data_type"], given.get("data_type")
    out = given.get("o_data_type")
    q = both if q is None or isinstance(q, Default) else q
    kv = both if kv is None or isinstance(kv, Default) else kv
    if isinstance(out, Default):
        out = None if q is None else str(out)
    return {"q_dtype": q, "kv_dtype": q if kv is None else kv, "o_dtype": out}


def per_head(scale: Any, heads: int) -> Any:
    """Expand a scale that is one number in the memory of a GPU: reading it there would wait."""
    if scale is None or isinstance(scale, (int, float)) or heads == 1:
        return scale
    shape = getattr(scale, "shape", None)
    if shape is None or tuple(shape) not in ((), (1,)) or device_of(scale, "scale") is None:
        return scale
    return adapter_for(scale, "scale").join([scale.reshape(1)] * heads)


def as_tuple(cache: Any) -> Any:
    """Make a tuple of K and V that came as a list."""
    return tuple(cache) if isinstance(cache, list) else cache


def pages_to_tokens(fixed_split_size: int | None, page_size: int) -> int | None:
    """Convert FlashInfer's split size, in pages, to that of `TaskInfo`, in tokens."""
    if fixed_split_size is None:
        return None
    check_int("page_size", page_size, 1)
    return check_int("fixed_split_size", fixed_split_size, 1) * page_size
