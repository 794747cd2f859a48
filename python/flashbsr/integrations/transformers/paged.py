# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache of transformers' continuous batching, without gathering it."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...errors import UnsupportedError
from ...layout.layouts import BlockTable, Layout, Paged, Ragged
from .common import Kind, refuse, refuse_capture, sinks_of
from .masks import NO_WINDOW

__all__ = ["keep_for_attention", "paged_attention", "without_graphs"]

FULL, SLIDING = "full_attention", "sliding_attention"


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cache: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer under continuous batching, with the arguments of transformers.

    Parameters
    ----------
    module : torch.nn.Module
        The layer; ``layer_idx`` is read, and ``sliding_window`` where no argument says it.
    query : tensor, shape (1, H_q, T, D)
        The tokens of all requests of the step.
    key, value : tensors, shape (1, H_kv, T, D)
        Likewise; they are written into the cache.
    cache : PagedAttentionCache
    scaling, dropout, softcap, s_aux
        As for dense attention.
    sliding_window : int, optional
        Tokens that a query sees, its own included.
    **options
        ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``read_index``, ``write_index``, ``block_table``.

    Returns
    -------
    tensor, shape (1, T, H_q, D); None
    """
    refuse(module, (query, key, value, s_aux), dropout, options)
    refuse_capture(query)
    if cache is None:
        raise UnsupportedError(
            "cache", None, "generate_batch's, in continuous(); elsewhere attn_implementation='fbsr'"
        )
    window = sliding_window if sliding_window else getattr(module, "sliding_window", None)
    layer = _Layer.of(cache, module.layer_idx, SLIDING if window else FULL)
    step = _step_of(layer, options)
    new = key[0].transpose(0, 1), value[0].transpose(0, 1)
    for name, held, x in (("key", layer.k, new[0]), ("value", layer.v, new[1])):
        if held.shape[1:] != x.shape[1:]:
            raise UnsupportedError(
                name,
                f"heads and dim {tuple(x.shape[1:])}",
                f"{tuple(held.shape[1:])}, as transformers made its paged cache (of models with "
                "MLA it makes another one: use generate)",
            )
    q = query[0].transpose(0, 1)
    kv = _write(layer, step, new, cache, module.layer_idx, options)
    left = window - 1 if window else NO_WINDOW
    kind = Kind(True, left, scaling, softcap, "NHD", layer.group)
    rows, heads_and_dim = step.rows, (int(key.shape[1]), int(value.shape[3]))
    engine = kind.planned(q, kv[0], heads_and_dim, (step,), lambda: step.layout(layer.page_size))
    out = engine.attention.run(q[:rows], kv, sinks=sinks_of(s_aux))
    if rows < len(q):  # tokens behind the last request, for graphs
        out = torch.cat([out, out.new_zeros(len(q) - rows, *out.shape[1:])])
    return out[None], None


def keep_for_attention(names: Collection[str]) -> None:
    """Leave updates of the paged cache to attention, for models whose attention has such a name.

    Up to 5.23 attention gets the new keys and the cache. Later versions of transformers update the
    cache before, and attention gets a copy of all keys, gathered for every layer.
    """
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    update = PagedAttentionCache.update
    if "kwargs" not in inspect.signature(update).parameters or hasattr(update, "kept_for"):
        return

    @functools.wraps(update)
    def left(self: Any, key_states: Any, value_states: Any, layer_idx: int, kwargs: Any) -> Any:
        if self.config._attn_implementation not in names:
            return update(self, key_states, value_states, layer_idx, kwargs)
        kwargs["cache"] = self
        return key_states, value_states

    left.kept_for = names  # type: ignore[attr-defined]
    PagedAttentionCache.update = left


def without_graphs(names: Collection[str]) -> None:
    """Leave CUDA graphs off unless they are asked for, for models whose attention has such a name.

    transformers turns them on by itself for every attention that has "flash" in its name.
    """
    from transformers.generation.continuous_batching import continuous_api

    resolve = continuous_api.resolve_continuous_batching_config
    if hasattr(resolve, "kept_for"):
        return

    @functools.wraps(resolve)
    def resolved(config: Any, cb_config: Any, *rest: Any, **options: Any) -> Any:
        if config._attn_implementation in names and cb_config.use_cuda_graph is None:
            cb_config = copy.copy(cb_config)
            cb_config.use_cuda_graph = False
        return resolve(config, cb_config, *rest, **options)

    resolved.kept_for = names  # type: ignore[attr-defined]
    continuous_api.resolve_continuous_batching_config = resolved


@dataclass(frozen=True)
class _Layer:
    """Where a layer's keys and values are, in either generation of transformers' cache."""

    group: int
    kind: str
    k: torch.Tensor  # (tokens, H_kv, D)
    v: torch.Tensor
    sentinel: int
    page_size: int  # tokens that always follow each other; a ring's are looked up one by one

    @staticmethod
    def of(cache: Any, index: int, kind: str) -> _Layer:
        if hasattr(cache, "layer_to_allocator"):
            allocator = cache.layer_to_allocator[index]
            # The class of full layers has views of pages, that of sliding ones hides them.
            from transformers.generation.continuous_batching import cache_allocators

            views = cache_allocators.FullAttentionCacheAllocator.get_cache_for_block_table
            k, v = (x.flatten(0, 1) for x in views(allocator, index))
            found, sentinel = allocator.layer_type, getattr(allocator, "sentinel_index", -1)
            group, page_size = allocator.index, allocator.tokens_per_page
        else:
            group, at = cache.layer_index_to_group_indices[index]
            k, v = cache.key_cache[at], cache.value_cache[at]
            found = FULL if cache.sliding_windows[index] == 1 else SLIDING
            sentinel, page_size = cache.sentinel_index, cache.block_size
        if found != kind:
            raise UnsupportedError("sliding_window", kind, f"{found}, as the cache has this layer")
        return _Layer(group, kind, k, v, sentinel, page_size if kind == FULL else 1)


class _Step:
    """Lengths and pages of a step for the layers of a group, on the host."""

    def __init__(self, layer: _Layer, source: tuple[Any, ...]) -> None:
        self.source = source  # kept: other tensors are another step
        cu_q, cu_k, read, write, tables = source
        table = None if tables is None else tables[layer.group]
        self.q = cu_q.numpy(force=True).astype(np.int64)
        self.k = cu_k.numpy(force=True).astype(np.int64)
        self.rows = int(self.q[-1])
        self.lens = np.diff(self.k)
        self.table = table
        self.write = write
        single = bool((np.diff(self.q) == 1).all())
        # What a chunk of a prompt writes into a ring lies on what its first queries see.
        self.gathers = table is None and layer.kind == SLIDING and read.numel() > 0 and not single
        self.reads = table is not None or read.numel() > 0
        self.pages: Any = None
        if table is not None:
            last = torch.from_numpy(self.lens - 1).to(table.device)
            page = table.gather(1, (last // layer.page_size)[:, None])[:, 0]
            self.write = page.long() * layer.page_size + last % layer.page_size
        elif self.reads and not self.gathers:
            self.pages = self._pages(layer, read, write)

    def _pages(
        self, layer: _Layer, read: torch.Tensor, write: torch.Tensor
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """List the pages of requests, and where each begins: every page's first slot says which."""
        size = layer.page_size
        counts = -(-self.lens // size)
        indptr = np.concatenate([[0], np.cumsum(counts)])
        within = np.arange(indptr[-1]) - np.repeat(indptr[:-1], counts)
        at = np.repeat(self.k[:-1], counts) + within * size
        slots = read[torch.from_numpy(at).to(read.device)].numpy(force=True).astype(np.int64)
        if layer.kind == SLIDING:  # the new token's slot is told by where it is written
            new = slots == layer.sentinel
            slots[new] = write[: self.rows].numpy(force=True)
        return indptr, slots // size

    def layout(self, page_size: int) -> Layout:
        """Who meets whom."""
        if self.table is not None:
            table = self.table[: len(self.lens)]
            return BlockTable(self.q, table, self.lens, page_size=page_size)
        if self.pages is None:
            return Ragged(self.q, self.k)
        return Paged(self.q, *self.pages, kv_lens=self.lens, page_size=page_size)


class _Steps(threading.local):
    def __init__(self) -> None:
        self.of_group: dict[int, _Step] = {}


_steps = _Steps()


def _step_of(layer: _Layer, options: dict[str, Any]) -> _Step:
    """Read the step, once for all layers of a group: another step has other tensors."""
    cu_k = options["cu_seq_lens_k"]
    table = options.get("block_table")
    given = (
        options["cu_seq_lens_q"],
        cu_k[layer.kind] if isinstance(cu_k, dict) else cu_k,
        None if table is not None else options["read_index"][layer.group],
        None if table is not None else options["write_index"][layer.group],
        table,
    )
    held = _steps.of_group.get(layer.group)
    if held is not None and all(a is b for a, b in zip(held.source, given, strict=True)):
        return held
    step = _steps.of_group[layer.group] = _Step(layer, given)
    return step


def _write(
    layer: _Layer,
    step: _Step,
    new: tuple[torch.Tensor, torch.Tensor],
    cache: Any,
    index: int,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the step's tokens into the cache; K and V as the layout of the step names them."""
    if step.gathers:
        return _update(layer, new, cache, index, options)
    rows = step.write.numel()
    for held, x in zip((layer.k, layer.v), new, strict=True):
        held.index_copy_(0, step.write, x[:rows])
    if not step.reads:
        return new
    shape = (-1, layer.page_size)
    return layer.k.unflatten(0, shape), layer.v.unflatten(0, shape)


def _update(
    layer: _Layer,
    new: tuple[torch.Tensor, torch.Tensor],
    cache: Any,
    index: int,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read and write as transformers does: at most a window of each request is gathered."""
    read, write = options["read_index"], options["write_index"]
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[index]
        k, v = allocator.update(*new, index, read[layer.group], write[layer.group])
    else:
        k, v = (x.transpose(0, 1)[None] for x in new)
        k, v = cache.update(
            key_states=k, value_states=v, layer_idx=index, read_index=read, write_index=write
        )
    return k, v
