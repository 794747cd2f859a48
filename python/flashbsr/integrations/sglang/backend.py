# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""SGLang's base class of attention backends, over plans that kinds of layers share."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool

from ...engine.attention import Attention
from ...errors import UnsupportedError
from ...layout.layouts import BlockTable
from ..vllm.kinds import Kind
from ..vllm.steps import Batch, Place, Step, Steps
from .batches import batch_of, is_latent, layer_kind, tree_mask

__all__ = ["FlashbsrAttnBackend"]


class FlashbsrAttnBackend(AttentionBackend):  # type: ignore[misc]
    """Attention of a model's layers over SGLang's slots of tokens, without gathering them.

    Parameters
    ----------
    runner : ModelRunner
        Its model is loaded and its cache is there.

    Raises
    ------
    UnsupportedError
        Layers, caches or options that the engine does not have, with the way out.
    """

    needs_cpu_seq_lens = True  # bounds of plans

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.pool, self.page_size = runner.token_to_kv_pool, int(runner.page_size)
        # Dims of the latents in the cache; 0: it has keys and values.
        self.latent = int(self.pool.kv_lora_rank) if type(self.pool) is MLATokenToKVPool else 0
        plain = type(self.pool) is MHATokenToKVPool and self.pool.kv_cache_layout == "nhd"
        if not (plain or self.latent):
            found = type(self.pool).__name__
            wanted = (
                "MHATokenToKVPool in NHD or MLATokenToKVPool: hybrid models need "
                "--disable-hybrid-swa-memory"
            )
            raise UnsupportedError("token_to_kv_pool", found, wanted)
        if self.pool.dtype != runner.dtype:
            wanted = f"{runner.dtype}, that of the model: --kv-cache-dtype auto"
            raise UnsupportedError("kv_cache_dtype", self.pool.dtype, wanted)
        self.req_to_token = runner.req_to_token_pool.req_to_token
        device = self.req_to_token.device
        self.on_gpu: bool = device.type == "cuda"
        self.place = Place(
            str(runner.dtype).removeprefix("torch."),
            self.page_size,
            num_threads=None if self.on_gpu else torch.get_num_threads(),
            device=(device.index or 0) if self.on_gpu else None,
        )
        layers = [x for x in runner.model.modules() if isinstance(x, RadixAttention)]
        if self.latent:  # beside each of these there is one over expanded keys, with the same id
            layers = [layer for layer in layers if is_latent(layer, self.latent)]
        self.kinds = {layer.layer_id: layer_kind(layer, self.latent) for layer in layers}
        self.steps = Steps(list(self.kinds.values()), self.place)
        self.forward_metadata: Step | None = None
        self._trees: dict[Kind, Attention] = {}
        self._tree_rows: int | None = None  # of the step, if its drafts are trees

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan a step, for all layers. Captured runs follow the plans of later steps."""
        self._tree_rows = None
        if forward_batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        batch = batch_of(forward_batch, self.req_to_token, self.page_size, self.on_gpu)
        mask = self._mask(forward_batch, batch, in_capture)
        if mask is not None:
            self._plan_trees(batch, mask)
            return
        stream = torch.cuda.current_stream().cuda_stream if self.on_gpu else None
        self.forward_metadata = self.steps.plan(
            batch, forward_batch.out_cache_loc, batch.rows, stream
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make engines for captured steps, of as many rows for each request."""
        rows = max_num_tokens // max_bs
        pages = max_bs * -(-int(self.req_to_token.shape[1]) // self.page_size)
        tokens = max_bs * rows
        self.steps.captures(rows, True, tokens, requests=max_bs, tokens=tokens, pages=pages)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Give the length of requests that pad a batch: one token, of the slot that nobody has."""
        return 1

    def support_triton(self) -> bool:
        """Tell whether SGLang's own Triton kernels, beside attention, can run here."""
        return self.on_gpu

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any,
                       save_kv_cache: bool = True, **options: Any) -> Any:  # fmt: skip
        """Attention of a decode step, as `forward_extend`."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **options)

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any,
                       save_kv_cache: bool = True, **options: Any) -> Any:  # fmt: skip
        """Write the step's keys and values, and attend to all of each request.

        Parameters
        ----------
        q : tensor, shape (tokens, num_heads * head_dim)
            Of latent attention absorbed, with the rotated part behind each head.
        k, v : tensors, shape (tokens, num_kv_heads, head_dim), or None
            None: the layer reads what another has written. Latents with their rotated keys are k.
        layer : RadixAttention
        forward_batch : ForwardBatch
            The one of `init_forward_metadata`.
        save_kv_cache : bool
        **options
            ``sinks``, a number per head; others are refused.

        Returns
        -------
        tensor, shape (tokens, num_heads * head_dim); of latent attention, dims of the latent
            Rows of no request are zeros.
        """
        sinks = options.pop("sinks", None)
        for name, value in options.items():
            if value is not None:
                raise UnsupportedError(name, type(value).__name__, "None, or another backend")
        if layer.layer_id not in self.kinds:
            known = f"one of the {len(self.kinds)} layers that the model had"
            raise UnsupportedError("layer_id", layer.layer_id, known)
        kind = self.kinds[layer.layer_id]
        if layer.qk_head_dim != kind.head_dim:
            wanted = f"{kind.head_dim}: absorbed queries, of prompts too"
            raise UnsupportedError("qk_head_dim", layer.qk_head_dim, wanted)
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        q = q.reshape(-1, kind.num_qo_heads, kind.head_dim)
        attention, rows = self._planned(kind)
        out = q.new_empty(q.shape[0], kind.num_qo_heads, kind.latent or kind.head_dim)
        out[rows:].zero_()
        if sinks is not None:
            sinks = sinks.detach().float()
        cache = self._cache(layer.layer_id, latent=bool(kind.latent))
        attention.run(q[:rows], cache, out=out[:rows], sinks=sinks)
        return out.flatten(1)

    def _planned(self, kind: Kind) -> tuple[Attention, int]:
        if self._tree_rows is not None:
            return self._trees[kind], self._tree_rows
        step = self.forward_metadata
        if step is None:
            raise UnsupportedError("forward_batch", "one without a plan", "init_forward_metadata")
        return step.attention(kind), step.rows

    def _cache(self, layer_id: int, *, latent: bool) -> Any:
        """Keys and values as ``(pages, heads, page, dim)``, views of the slots.

        Latents with their rotated keys are one array, ``(pages, page, dims)``.
        """
        k, shape = self.pool.get_key_buffer(layer_id), (-1, self.page_size)
        if latent:
            return k[:, 0].unflatten(0, shape)
        v = self.pool.get_value_buffer(layer_id)
        return k.unflatten(0, shape).transpose(1, 2), v.unflatten(0, shape).transpose(1, 2)

    def _mask(self, forward_batch: Any, batch: Batch, in_capture: bool) -> Any:
        verifies = forward_batch.forward_mode.is_target_verify()
        if verifies and (self.on_gpu or in_capture) and int(forward_batch.spec_info.topk) > 1:
            wanted = "1 on a GPU, where the host does not have the mask of a tree"
            raise UnsupportedError("speculative_eagle_topk", forward_batch.spec_info.topk, wanted)
        return tree_mask(forward_batch, batch)

    def _plan_trees(self, batch: Batch, mask: Any) -> None:
        """Plan drafts that are trees: their mask is in the place of causality."""
        self.forward_metadata, self._tree_rows = None, batch.rows
        layout = BlockTable(batch.starts, batch.tables, batch.bounds, page_size=self.page_size)
        for kind in self.steps.kinds:
            if kind not in self._trees:
                self._trees[kind] = kind.attention(True, self.place.q_dtype, **self.place.task())
            self._trees[kind].plan(layout, custom_mask=mask)
