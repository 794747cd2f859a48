# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""CUDA-graph mode of the wrappers: FlashInfer's buffers as the capacity of a plan.

FlashInfer copies index arrays into buffers of the caller's, so that a captured kernel finds them
where they were. Here a wrapper has the plan in memory of its own, which a capacity keeps in place;
what the buffers say is how large the batch may become. Their contents are neither read nor written.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._check import check_int
from ..arrays import adapter_for
from ..arrays.types import Array
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
        return {
            "max_batch_size": self.max_batch_size,
            "max_q_tokens": self.max_q_tokens,
            "max_kv_pages": self.max_kv_pages,
        }


def graph_mode(
    use_cuda_graph: bool,
    indptr: dict[str, Array],
    pages: dict[str, Array] | None = None,
    others: dict[str, Array] | None = None,
    limits: dict[str, int | None] | None = None,
) -> Graph | None:
    """Read the capacity off the buffers of a wrapper's constructor.

    Parameters
    ----------
    use_cuda_graph : bool
    indptr : dict of str to array
        Buffers of batch_size + 1 values, by the caller's name; the first is the one needed.
    pages : dict of str to array, optional
        The buffer of page ids (paged KV).
    others : dict of str to array, optional
        Buffers that say nothing more.
    limits : dict of str to int, optional
        Our own arguments: ``max_q_tokens``, ``max_kv_tokens``.

    Returns
    -------
    Graph or None
        None without `use_cuda_graph`.

    Raises
    ------
    UnsupportedError, ShapeError, FlashbsrError
        Buffers without `use_cuda_graph` or the other way round, on the host, or of different sizes.
    """
    limits = limits or {}
    given = {**indptr, **(pages or {}), **(others or {})}
    if not use_cuda_graph:
        for name, value in {**given, **limits}.items():
            if value is not None:
                raise UnsupportedError(name, type(value).__name__, "None without use_cuda_graph")
        return None
    needed = [next(iter(indptr)), *(pages or {})]
    missing = [name for name in needed if given[name] is None]
    if missing:
        raise UnsupportedError(
            "use_cuda_graph",
            True,
            f"False, or {' and '.join(f'{name}=' for name in missing)} on a GPU, whose length is "
            "the capacity",
        )
    device = None
    for name, buffer in given.items():
        if buffer is None:
            continue
        on = adapter_for(buffer, name).device(buffer)
        if on is None:
            raise UnsupportedError(
                name, "an array in host memory", "one on a GPU: the CPU has no CUDA graphs"
            )
        if device is None:
            device = on
        if on != device:
            raise FlashbsrError(name, f"cuda:{on}", f"cuda:{device}, as the first buffer")
        if len(buffer.shape) != 1:
            raise ShapeError(name, f"shape {tuple(buffer.shape)}", "a vector")
    assert device is not None
    lengths = {name: x.shape[0] for name, x in indptr.items() if x is not None}
    length = lengths[needed[0]]
    for name, other in lengths.items():
        if other != length or length == 0:
            raise ShapeError(name, f"length {other}", f"{max(length, 1)}: batch size + 1")
    for name, value in limits.items():
        if value is not None:
            check_int(name, value, 0)
    page_count = next(iter(pages.values())).shape[0] if pages else limits.get("max_kv_tokens")
    return Graph(device, length - 1, page_count, limits.get("max_q_tokens"))
