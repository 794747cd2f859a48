# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""SGLang's base class of attention backends, over plans that kinds of layers share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention

from ...engine.attention import Attention
from ...errors import UnsupportedError
from ...layout.layouts import BlockTable
from ..vllm.kinds import Kind
from ..vllm.steps import Batch, Place, Step, Steps
from .batches import batch_of, is_latent, layer_kind, tree_mask
from .pools import Pools

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
        self.page_size = int(runner.page_size)
        self.pools = Pools(runner.token_to_kv_pool, self.page_size, runner.dtype)
        latent = self.pools.latent
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
        if latent:  # beside each of these there is one over expanded keys, with the same id
            layers = [layer for layer in layers if is_latent(layer, latent)]
        capability = None
        if self.on_gpu:
            major, minor = torch.cuda.get_device_capability(device)
            capability = 10 * major + minor
        self.kinds: dict[int, Kind] = {}
        # Of layers whose keys are in the pool for windows, and of the others.
        groups: dict[bool, list[Kind]] = {}
        for layer in layers:
            self.pools.check(layer.qk_head_dim, self.place.q_dtype, capability)
            kind = layer_kind(layer, latent, self.pools.kv_cache_dtype)
            self.kinds[layer.layer_id] = kind
            groups.setdefault(self.pools.windowed(layer.layer_id), []).append(kind)
        self.steps = {windowed: Steps(kinds, self.place) for windowed, kinds in groups.items()}
        self.forward_metadata: dict[bool, Step] | None = None
        self._slots: dict[bool, Any] = {}  # of the step's tokens in the pool for windows
        self._trees: dict[Kind, Attention] = {}
        self._tree_rows: int | None = None  # of the step, if its drafts are trees

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan a step, for all layers. Captured runs follow the plans of later steps."""
        self._tree_rows = None
        self._slots.clear()
        if forward_batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        batch = batch_of(forward_batch, self.req_to_token, self.page_size, self.on_gpu)
        mask = self._mask(forward_batch, batch, in_capture)
        if mask is not None:
            self._plan_trees(batch, mask)
            return
        stream = torch.cuda.current_stream().cuda_stream if self.on_gpu else None
        self.forward_metadata = {
            windowed: steps.plan(
                self._in_pool(batch, windowed), forward_batch.out_cache_loc, batch.rows, stream
            )
            for windowed, steps in self.steps.items()
        }

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make engines for captured steps, of as many rows for each request."""
        rows = max_num_tokens // max_bs
        pages = max_bs * -(-int(self.req_to_token.shape[1]) // self.page_size)
        tokens = max_bs * rows
        for steps in self.steps.values():
            steps.captures(rows, True, tokens, requests=max_bs, tokens=tokens, pages=pages)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Give the length of requests that pad a batch: nothing is loaded for one without keys."""
        return 0

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
        windowed = self.pools.windowed(layer.layer_id)
        if save_kv_cache and k is not None:
            slots = forward_batch.out_cache_loc
            self.pools.write(layer, slots, self._slots_of(slots) if windowed else None, k, v)
        q = q.reshape(-1, kind.num_qo_heads, kind.head_dim)
        attention, rows = self._planned(kind, windowed)
        out = q.new_empty(q.shape[0], kind.num_qo_heads, kind.latent or kind.head_dim)
        out[rows:].zero_()
        if sinks is not None:
            sinks = sinks.detach().float()
        cache = self.pools.cache(layer.layer_id, latent=bool(kind.latent))
        scales = self.pools.scales(layer)
        attention.run(q[:rows], cache, out=out[:rows], sinks=sinks, **scales)
        return out.flatten(1)

    def _planned(self, kind: Kind, windowed: bool) -> tuple[Attention, int]:
        if self._tree_rows is not None:
            return self._trees[kind], self._tree_rows
        if self.forward_metadata is None:
            raise UnsupportedError("forward_batch", "one without a plan", "init_forward_metadata")
        step = self.forward_metadata[windowed]
        return step.attention(kind), step.rows

    def _in_pool(self, batch: Batch, windowed: bool) -> Batch:
        """Give the batch with the pages that its tokens have in a pool."""
        if not windowed:
            return batch
        tables = self.pools.tables_of_windows(batch.tables)
        return replace(batch, tables=tables, known=batch.of_requests)

    def _slots_of(self, slots: Any) -> Any:
        """Find the step's slots in the pool for windows once, and once in a graph's capture."""
        captures = self.on_gpu and torch.cuda.is_current_stream_capturing()
        if captures not in self._slots:
            self._slots[captures] = self.pools.slots_of_windows(slots)
        return self._slots[captures]

    def _mask(self, forward_batch: Any, batch: Batch, in_capture: bool) -> Any:
        verifies = forward_batch.forward_mode.is_target_verify()
        if verifies and (self.on_gpu or in_capture) and int(forward_batch.spec_info.topk) > 1:
            wanted = "1 on a GPU, where the host does not have the mask of a tree"
            raise UnsupportedError("speculative_eagle_topk", forward_batch.spec_info.topk, wanted)
        return tree_mask(forward_batch, batch)

    def _plan_trees(self, batch: Batch, mask: Any) -> None:
        """Plan drafts that are trees: their mask is in the place of causality."""
        self.forward_metadata, self._tree_rows = None, batch.rows
        for windowed, steps in self.steps.items():
            tables = self._in_pool(batch, windowed).tables
            layout = BlockTable(batch.starts, tables, batch.bounds, page_size=self.page_size)
            for kind in steps.kinds:
                if kind not in self._trees:
                    task = self.place.task()
                    self._trees[kind] = kind.attention(True, self.place.q_dtype, **task)
                self._trees[kind].plan(layout, custom_mask=mask)
