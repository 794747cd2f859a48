# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Layers and forward batches of SGLang in the engine's terms. Knows its names, imports nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import UnsupportedError
from ..vllm.kinds import Kind, kind_of, latent_kind
from ..vllm.slots import ROOM
from ..vllm.steps import Batch

__all__ = ["batch_of", "is_latent", "layer_kind", "tree_mask"]

# Attributes of a layer that change what it computes, and the values that change nothing.
PLAIN: dict[str, tuple[Any, ...]] = {
    "is_cross_attention": (False,),
    "use_irope": (False,),
    "pos_encoding_mode": ("NONE",),
    "logit_capping_method": ("tanh",),
    "xai_temperature_len": (-1,),
}


def is_latent(layer: Any, latent: int) -> bool:
    """Tell whether a layer has absorbed queries, whose values are latents of so many dims."""
    return bool(layer.tp_k_head_num == 1 and layer.v_head_dim == latent)


def layer_kind(layer: Any, latent: int = 0, kv_cache_dtype: str = "auto") -> Kind:
    """Translate a RadixAttention.

    Parameters
    ----------
    layer : RadixAttention
    latent : int
        Dims of the latents in the cache; 0: it has keys and values.
    kv_cache_dtype : str
        vLLM's name of the cache's type; ``auto``: the model's own.

    Raises
    ------
    UnsupportedError
        Cross-attention, encoders, chunked local attention, scales by position, keys and values of
        different head dims that are no latents, windows or caps over latents, another cap than that
        by tanh.
    """
    for name, plain in PLAIN.items():
        value = getattr(layer, name)
        if value not in plain:
            raise UnsupportedError(name, repr(value), f"{plain[0]!r}, or another backend")
    attn_type = str(getattr(layer.attn_type, "value", layer.attn_type))
    if attn_type != "decoder":
        raise UnsupportedError("attn_type", attn_type, "decoder, or another backend")
    window, cap = max(int(layer.sliding_window_size), -1), float(layer.logit_cap or 0)
    if latent:
        for name, value, none in (("sliding_window_size", window, -1), ("logit_cap", cap, 0.0)):
            if value != none:
                raise UnsupportedError(name, value, f"{none} with latent attention")
        dims = layer.tp_q_head_num, layer.qk_head_dim, latent
        return latent_kind(*dims, float(layer.scaling), kv_cache_dtype)
    if layer.v_head_dim != layer.qk_head_dim:
        wanted = f"{layer.qk_head_dim}, as that of keys"
        raise UnsupportedError("v_head_dim", layer.v_head_dim, wanted)
    return kind_of(
        layer.tp_q_head_num,
        layer.tp_k_head_num,
        layer.qk_head_dim,
        float(layer.scaling),
        # SGLang does not count the query itself.
        None if window < 0 else window + 1,
        cap,
        False,
        kv_cache_dtype,
        "decoder",
    )


def batch_of(forward_batch: Any, req_to_token: Any, page_size: int, on_gpu: bool) -> Batch:
    """Read a step's requests: on a GPU what the host has of them, and no more.

    Parameters
    ----------
    forward_batch : ForwardBatch
        Decoding, extending (chunks and prefixes included), or verifying drafts.
    req_to_token : int32 tensor, shape (max_requests, max_context)
        The slot of each token of each request. Those of a page follow each other.
    page_size : int
    on_gpu : bool

    Raises
    ------
    UnsupportedError
        Steps of a draft model.
    """
    mode, requests = forward_batch.forward_mode, int(forward_batch.batch_size)
    host = forward_batch.seq_lens_cpu
    if host is None and on_gpu:
        raise UnsupportedError("seq_lens_cpu", None, "lengths on the host")
    lens = np.asarray(forward_batch.seq_lens if host is None else host)[:requests].astype(np.int64)
    device_lens = forward_batch.seq_lens[:requests]
    if mode.is_decode():
        rows = np.ones(requests, np.int64)
    elif mode.is_target_verify():
        drafts = int(forward_batch.spec_info.draft_token_num)
        rows = np.full(requests, drafts)
        lens, device_lens = lens + drafts, device_lens + drafts
    elif mode.is_draft_extend_v2() or not mode.is_extend():
        wanted = "decode, extend, mixed or target_verify; draft models need a backend of their own"
        raise UnsupportedError("forward_mode", mode.name, wanted)
    else:
        rows = np.asarray(forward_batch.extend_seq_lens_cpu, np.int64)[:requests]
    starts = np.concatenate([[0], np.cumsum(rows)])
    # Plans of decode steps on a GPU have room for more steps, and so need their pages.
    most = int(lens.max(initial=1)) + (2 * ROOM if on_gpu else 0)
    width = min(-(-most // page_size) * page_size, int(req_to_token.shape[1]))
    slots = req_to_token[forward_batch.req_pool_indices[:requests], :width:page_size]
    tables = slots if page_size == 1 else slots // page_size
    if not on_gpu:
        return Batch(starts, lens, tables)
    import torch

    # Rows are those that the host says: on the GPU nobody needs to ask where they begin.
    return Batch(starts, lens, tables, device_lens.to(torch.int32))


def tree_mask(forward_batch: Any, batch: Batch) -> np.ndarray[Any, Any] | None:
    """Give the mask of drafts that are trees, row-major per request; None: they are chains.

    Rows of ``batch.bounds`` keys: what SGLang has behind the last row is padding.
    """
    if not forward_batch.forward_mode.is_target_verify():
        return None
    info = forward_batch.spec_info
    if info.custom_mask is None or int(info.topk) == 1:
        return None
    size = int(((batch.starts[1:] - batch.starts[:-1]) * batch.bounds).sum())
    return np.asarray(info.custom_mask)[:size].astype(bool)
