# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""CUDA-graph mode of the wrappers: FlashInfer's buffers as the capacity of a plan.

FlashInfer copies index arrays into buffers of the caller's, so that a captured kernel finds them
where they were. Here a wrapper has the plan in memory of its own, which a capacity keeps in place;
what the buffers say is how large the batch may become. Their contents are neither read nor written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._check import check_int
from ..arrays import adapter_for
from ..errors import FlashbsrError, ShapeError, UnsupportedError

__all__ = ["Graph", "graph_mode"]


@dataclass(slots=True)
class Graph:
    """A wrapper's capacity, and the GPU that it is for. None: the first plan decides."""

    device: int
    max_batch_size: int
    max_kv_pages: int | None
    max_q_tokens: int | None

    def capacity_of_decode(self, q_len: int) -> dict[str, int]:
        """Fields of `TaskInfo` for requests of `q_len` query tokens each."""
        return {**self.capacity(0), "max_q_tokens": self.max_batch_size * q_len}

    def capacity(self, q_tokens: int, kv_rows: int = 0) -> dict[str, int]:
        """Fields of `TaskInfo`; a first plan of this size fixes what is open."""
        if self.max_q_tokens is None:
            self.max_q_tokens = q_tokens
        if self.max_kv_pages is None:
            self.max_kv_pages = kv_rows
        names = "max_batch_size", "max_q_tokens", "max_kv_pages"
        return {name: getattr(self, name) for name in names}


def graph_mode(given: dict[str, Any]) -> Graph | None:
    """Read the capacity off the buffers among a constructor's arguments, by their names.

    Those of ``indptr`` have batch size + 1 values, the first of them and the one of ``indices`` are
    needed; ``max_q_tokens`` and ``max_kv_tokens`` are arguments of our own. None: no graph mode.
    """
    if not given.get("use_cuda_graph"):
        return None
    names = [name for name in given if (name.endswith(("_buf", "_buffer")) and "_kv_" in name)
             or name in ("qo_indptr_buf", "kv_indptr_buf")]  # fmt: skip
    indptrs = [name for name in names if "indptr" in name]
    pages = [name for name in names if "indices" in name]
    missing = [name for name in (*indptrs[:1], *pages) if given[name] is None]
    if missing:
        buffers = " and ".join(f"{name}=" for name in missing)
        expected = f"False, or {buffers} on a GPU, whose length is the capacity"
        raise UnsupportedError("use_cuda_graph", True, expected)
    device: int | None = None
    for name in (name for name in names if given[name] is not None):
        on, shape = adapter_for(given[name], name).device(given[name]), tuple(given[name].shape)
        if on is None:
            expected = "one on a GPU: the CPU has no CUDA graphs"
            raise UnsupportedError(name, "an array in host memory", expected)
        device = on if device is None else device
        if on != device:
            raise FlashbsrError(name, f"cuda:{on}", f"cuda:{device}, as the first buffer")
        length = given[indptrs[0]].shape[0]
        if len(shape) != 1 or (name in indptrs and shape != (max(length, 1),)):
            raise ShapeError(name, f"shape {shape}", f"a vector; of indptrs of {max(length, 1)}")
    assert device is not None
    limits = [given.get("max_q_tokens"), given.get("max_kv_tokens")]
    for name, value in zip(("max_q_tokens", "max_kv_tokens"), limits, strict=True):
        if value is not None:
            check_int(name, value, 0)
    rows = given[pages[0]].shape[0] if pages else limits[1]
    return Graph(device, given[indptrs[0]].shape[0] - 1, rows, limits[0])
