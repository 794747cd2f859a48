# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's ``scaled_dot_product_attention`` on the CPU, given its best.

Contiguous ``(batch, heads, tokens, dim)`` tensors, every way to say GQA that gives the same result,
and the fastest of them is the one that is timed:

gqa     ``enable_gqa=True``.
repeat  K and V repeated to the query heads ahead of time, not timed (prefill only: in decode it
        would multiply the bytes).
fold    the query heads of a KV head become query rows of that head (decode only: without a causal
        mask that is exact, and K/V is read once).
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Peer", "as_torch", "torch_decode", "torch_latent", "torch_or_none", "torch_prefill"]


def torch_or_none() -> Any | None:
    """Return the torch module, or None where it is not installed."""
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None


@dataclass(slots=True)
class Peer:
    """The timed call, which form of it won, and its output for the check, as NumPy float32."""

    call: Callable[[int], Any]
    form: str
    output: Callable[[], np.ndarray]


def _fastest(forms: dict[str, Callable[[int], Any]]) -> str:
    """Name the form with the shortest second call (the first one warms up)."""
    times = {}
    for name, call in forms.items():
        call(0)
        start = time.perf_counter()
        call(1)
        times[name] = time.perf_counter() - start
    return min(times, key=lambda name: times[name])


def _inference(torch: Any, call: Callable[[int], Any]) -> Callable[[int], Any]:
    def wrapped(index: int) -> Any:
        with torch.inference_mode():
            return call(index)

    return wrapped


def torch_prefill(q: Any, k: Any, v: Any, threads: int) -> Peer:
    """Causal prefill of one request.

    Parameters
    ----------
    q : tensor, shape (1, num_qo_heads, tokens, head_dim)
    k, v : tensor, shape (1, num_kv_heads, tokens, head_dim)
    threads : int
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch.set_num_threads(threads)
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    forms = {
        "gqa": _inference(torch, lambda _: sdpa(q, k, v, is_causal=True, enable_gqa=True)),
        "repeat": _inference(torch, lambda _: sdpa(q, wide_k, wide_v, is_causal=True)),
    }
    form = _fastest(forms)
    call = forms[form]
    return Peer(call, form, lambda: call(0)[0].transpose(0, 1).float().numpy())


def torch_decode(
    q: Any, sets: list[tuple[Any, Any]], kv_lens: tuple[int, ...], threads: int
) -> Peer:
    """One query token per request over padded K/V.

    Parameters
    ----------
    q : tensor, shape (batch, num_qo_heads, head_dim)
    sets : list of (k, v)
        Each of shape (batch, num_kv_heads, max(kv_lens), head_dim); calls rotate over the list.
    kv_lens : tuple[int, ...]
        Unequal lengths are masked with a boolean mask.
    threads : int
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch.set_num_threads(threads)
    batch, heads, dim = q.shape
    kv_heads, longest = sets[0][0].shape[1:3]
    rows = q.view(batch, heads, 1, dim)
    folded = q.view(batch, kv_heads, heads // kv_heads, dim)
    mask = None
    if min(kv_lens) != max(kv_lens):
        lengths = torch.tensor(kv_lens)
        mask = (torch.arange(longest)[None, :] < lengths[:, None])[:, None, None, :]

    def gqa(index: int) -> Any:
        k, v = sets[index % len(sets)]
        return sdpa(rows, k, v, attn_mask=mask, enable_gqa=True)

    def fold(index: int) -> Any:
        k, v = sets[index % len(sets)]
        return sdpa(folded, k, v, attn_mask=mask)

    forms = {"gqa": _inference(torch, gqa), "fold": _inference(torch, fold)}
    form = _fastest(forms)
    call = forms[form]
    return Peer(call, form, lambda: call(0).reshape(batch, heads, dim).float().numpy())


def torch_latent(q: Any, latents: Any, dim_vo: int, scale: float, threads: int) -> Peer:
    """One query token of one request over latents, with as many KV heads as query heads.

    Parameters
    ----------
    q : tensor, shape (num_qo_heads, head_dim)
    latents : tensor, shape (tokens, head_dim)
    dim_vo : int
        The first dims, which are V.
    scale : float
    threads : int
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch.set_num_threads(threads)
    rows = q[None, :, None]
    k = latents[None, None].expand(1, len(q), -1, -1)
    call = _inference(torch, lambda _: sdpa(rows, k, k[..., :dim_vo], scale=scale))
    return Peer(call, "expanded", lambda: call(0)[0, :, 0].float().numpy())


def as_torch(array: np.ndarray) -> Any:
    """View `array` as a tensor, no copy; bf16 by its bits, torch does not know NumPy's."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
