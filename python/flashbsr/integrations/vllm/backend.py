# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's three classes, as far as its versions agree. What differs stands in ``v0_26`` and kin."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from ...arrays.torch import stream
from ...engine.context import ContextParallel
from ...errors import UnsupportedError
from . import MERGE
from .context import METHODS, Ranks
from .cores import spread
from .kinds import (
    ATTN_TYPES,
    BLOCK_MULTIPLE,
    FIXED_SPLIT,
    KV_CACHE_DTYPES,
    combination_problem,
    takes_head_size,
)
from .layer import Layer
from .rows import rows_of
from .steps import Batch, Place, Step, Steps

__all__ = ["FlashbsrBackend", "FlashbsrBuilder", "FlashbsrImpl", "dtype_name"]


# How ranks that share keys merge: as vLLM's dcp_comm_backend says, or through peers' memory.
MERGES = ("collectives", "peers")
# Tokens of KV that sharing a prefix must save, of all requests.
LEAST_SHARED = 1 << 16


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _first(x: Any, count: int) -> Any:
    """Give a tensor's first elements: itself where it has no others, a view costs the host 2 us."""
    return x if x.shape[0] == count else x[:count]


def through_peers(*, on_gpu: bool, halves: bool) -> bool:
    """Tell whether ranks are to merge through each other's memory.

    Raises
    ------
    UnsupportedError
        They are, and cannot.
    """
    wanted = os.environ.get(MERGE, MERGES[0])
    if wanted not in MERGES:
        raise UnsupportedError(MERGE, wanted, f"one of {', '.join(MERGES)}")
    if wanted == MERGES[0]:
        return False
    if not on_gpu or halves:
        where = "with micro-batching" if on_gpu else "on the CPU"
        raise UnsupportedError(MERGE, f"{wanted} {where}", MERGES[0])
    return True


def patience() -> float:
    """Give the seconds that a GPU waits for other ranks: more than vLLM waits for the whole step.

    What it could not merge is NaN. By then nobody is there any more to draw tokens from it.
    """
    return float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS) + 10


class FlashbsrImpl(Layer, AttentionImpl):  # type: ignore[misc]
    """A layer of vLLM."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Tell whether outputs can be written as what the next product quantises them to.

        That is float8 with one scale that the weights bring. Where ranks share the keys of a
        request, outputs are merged behind the kernel.
        """
        from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

        alone = getattr(self, "dcp_world_size", 1) == 1
        return alone and self.divides_outputs and quant_key == kFp8StaticTensorSym


class FlashbsrBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Plans each step for the layers of a group.

    Raises
    ------
    UnsupportedError
        What a model or a configuration asks for and no layer's options say: masks of images'
        tokens, reference windows, encoders beside caches that are spread over ranks.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model = vllm_config.model_config
        if getattr(model, "rswa_window", None) is not None:
            raise UnsupportedError("rswa_window", model.rswa_window, "None")
        layers = vllm_config.compilation_config.static_forward_context
        kinds = [layers[name].impl.kind for name in layer_names]
        # Decoders read what an encoder has left: its lengths are not those of the decoder.
        self.crosses = any(layers[name].impl.attn_type == "encoder_decoder" for name in layer_names)
        device = torch.device(device)
        on_gpu = device.type == "cuda"
        if not on_gpu:
            spread(torch.get_num_threads())
        split = FIXED_SPLIT if envs.VLLM_BATCH_INVARIANT else None
        if on_gpu and split and any(kind.window_left >= 0 for kind in kinds):
            raise UnsupportedError("VLLM_BATCH_INVARIANT", 1, "0: windows have no fixed splits")
        place = Place(
            dtype_name(model.dtype),
            int(kv_cache_spec.block_size),
            # A worker has the cores of its threads, which need not be all.
            num_threads=None if on_gpu else torch.get_num_threads(),
            device=(device.index or 0) if on_gpu else None,
            fixed_split_size=split,
            ranks=self._ranks(vllm_config.parallel_config, kv_cache_spec),
        )
        # What a full graph reads lies where it lay at the capture: vLLM's contract. Halves of a
        # batch (micro-batching) have arrays that are made for the step.
        halves = getattr(vllm_config.parallel_config, "use_ubatching", False)
        if place.ranks is not None:
            place.ranks.check(kinds, crosses=self.crosses)
            if through_peers(on_gpu=on_gpu, halves=halves):
                most = vllm_config.scheduler_config.max_num_batched_tokens
                ranks = place.ranks.through_peers(kinds, most, patience())
                place = replace(place, ranks=ranks)
        drafts = getattr(vllm_config, "speculative_config", None) is not None
        cascades = not getattr(model, "disable_cascade_attn", True)
        self.steps = Steps(kinds, place, fixed=not halves, drafts=drafts, cascades=cascades)
        self._prefix = 0  # that the next step's requests begin with

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Say which steps a graph may be replayed for.

        Any, where one graph is for steps of all sorts. Graphs of decode steps alone are captured
        with as many rows for every request, and are replayed for those: another captured kernel
        would be slower for them. Encoders plan on the host for the step alone.
        """
        if isinstance(kv_cache_spec, EncoderOnlyAttentionSpec):
            return AttentionCGSupport.NEVER
        mode = vllm_config.compilation_config.cudagraph_mode
        apart = mode is None or mode.separate_routine()
        return AttentionCGSupport.UNIFORM_BATCH if apart else AttentionCGSupport.ALWAYS

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,  # noqa: ARG002
    ) -> Step:
        """Plan a step. On the CPU prefixes are found, not told."""
        m, ranks = common_attn_metadata, self.steps.place.ranks
        if ranks is not None:
            ranks.raise_if_missed()
        batch = self.batch(m)
        prefix, self._prefix = common_prefix_len or self._prefix, 0
        if self.steps.place.device is not None and prefix > 0:
            batch = replace(batch, common_prefix=prefix)
        return self.steps.plan(batch, m.slot_mapping, int(m.num_actual_tokens), self._stream())

    def use_cascade_attention(
        self, common_prefix_len: int, query_lens: Any, *told: Any, **more: Any
    ) -> bool:
        """Hear of a prefix that all requests of the next step have; say if it costs the graph.

        vLLM asks where ``disable_cascade_attn`` is False, before it builds the step. Told True, it
        replays no full graph, which costs the host some 10 us a layer, and tells `build`. Told
        False it does neither; but a plan with a prefix is one that graphs follow as any other, so
        that it is remembered here, and `build` has it. Only where graphs have no kernel for mixed
        batches and no room for two requests in a tile, or read on the GPU how many rows a request
        has (drafts), vLLM is told True: then a plan of its own may choose a better kernel.

        There must be enough to save, since a prefix that changes is planned anew: the keys of 65536
        tokens with 8 heads of 128 take 60 us. What a plan makes of it is up to its prices.
        """
        names = ("num_query_heads", "num_kv_heads", "use_alibi", "use_sliding_window",
                 "use_local_attention", "num_sms", "dcp_world_size")  # fmt: skip
        options = dict(zip(names, told, strict=False)) | more
        place, self._prefix = self.steps.place, 0
        if place.device is None or place.fixed_split_size or options["dcp_world_size"] > 1:
            return False
        if options["use_alibi"] or options["use_local_attention"] or self.crosses:
            return False
        if (len(query_lens) - 1) * common_prefix_len < LEAST_SHARED:
            return False
        if self._loses_its_graph(np.asarray(query_lens)):
            return True
        self._prefix = common_prefix_len
        return False

    def _loses_its_graph(self, query_lens: Any) -> bool:
        """Tell whether a step that shares a prefix can do so only outside of graphs."""
        if self.steps.drafts:
            return True
        mode, tokens = self.vllm_config.compilation_config.cudagraph_mode, int(query_lens[0])
        if mode is None or not mode.separate_routine() or (query_lens != tokens).any():
            return False
        mixed = self.steps.cascades
        kinds = self.steps.kinds
        return not all((mixed and x.mixes(tokens)) or x.graphs_share(tokens) for x in kinds)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Step:
        """Plan a step whose runs are captured; replays follow the plans of later steps."""
        m, config = common_attn_metadata, self.vllm_config
        batch = self.batch(m)
        compilation = config.compilation_config
        rows = max(batch.rows, int(m.num_actual_tokens))
        tokens = max(rows, *(compilation.cudagraph_capture_sizes or [0]))
        requests = max(config.scheduler_config.max_num_seqs, int(m.num_reqs))
        # One graph for steps of all sorts, or graphs for decode steps and others apart?
        if compilation.cudagraph_mode.separate_routine():
            key: Any = batch.of_requests.even
            if key is None:
                raise UnsupportedError("cudagraph_mode", compilation.cudagraph_mode, "another")
            requests = max(requests, -(-tokens // key))
            tokens = requests * key  # kernels are chosen for that many rows of a request
        else:
            key, tokens = "mixed", max(tokens, requests)
        pages = requests * int(m.block_table_tensor.shape[1])
        self.steps.captures(key, batch.causal, rows, requests=requests, tokens=tokens, pages=pages)
        return self.build(0, m)

    def batch(self, m: Any) -> Batch:
        """Read a step's requests: on a GPU what the host has of them, and no more."""
        if not isinstance(m.causal, bool):
            raise UnsupportedError("causal", "one value per request", "one for all of a step")
        if getattr(m, "mm_req_doc_ranges", None):
            raise UnsupportedError("mm_req_doc_ranges", "spans that see each other", "none")
        requests = int(m.num_reqs)
        rows = rows_of(_first(m.query_start_loc_cpu, requests + 1).numpy())
        on_cpu = self.steps.place.device is None
        if on_cpu:
            bounds = _first(m.seq_lens, requests).numpy()
        elif self.crosses or m.seq_lens_cpu_upper_bound is None:
            bounds = np.full(requests, int(m.max_seq_len))
        else:
            bounds = _first(m.seq_lens_cpu_upper_bound, requests).numpy()
        if rows.absent is not None:  # requests that pad a graph
            bounds = np.where(rows.absent, 0, bounds)
        tables = _first(m.block_table_tensor, requests)
        if on_cpu:
            return Batch(rows.starts, bounds, tables, causal=m.causal, known=rows)
        lens, query_starts = _first(m.seq_lens, requests), _first(m.query_start_loc, requests + 1)
        return Batch(rows.starts, bounds, tables, lens, query_starts, m.causal, known=rows)

    @staticmethod
    def _ranks(parallel: Any, kv_cache_spec: Any) -> Ranks | None:
        """Find who shares the keys of this cache: that of a draft model may be whole."""
        if parallel.decode_context_parallel_size == 1:
            return None
        if not getattr(kv_cache_spec, "dcp_sharded", True):
            return None
        from vllm.distributed.parallel_state import get_dcp_group

        group = get_dcp_group()
        interleave = int(parallel.cp_kv_cache_interleave_size)
        share = ContextParallel(group.world_size, group.rank_in_group, interleave)
        return Ranks(share, group.device_group, METHODS[parallel.dcp_comm_backend])

    def _stream(self) -> Any:
        device = self.steps.place.device
        return None if device is None else stream(device)


class FlashbsrBackend(AttentionBackend):  # type: ignore[misc]
    """What there is. vLLM asks before it chooses, and says the reasons of what is refused."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(KV_CACHE_DTYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Give the name that vLLM's enumeration has for backends of others."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashbsrImpl]:
        """Give the class of layers."""
        return FlashbsrImpl

    @staticmethod
    def get_builder_cls() -> type[FlashbsrBuilder]:
        """Give the class that plans."""
        return FlashbsrBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:  # noqa: ARG004
        """Give the block sizes that vLLM may choose from."""
        return [MultipleOf(BLOCK_MULTIPLE)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Any multiple of 8 up to 512."""
        return takes_head_size(head_size)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Take decoders, encoders, decoders over an encoder."""
        return str(getattr(attn_type, "value", attn_type)) in ATTN_TYPES

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks join the softmax."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Any window of decoders."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """All requests of a step alike."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """By fixed splits."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Plans have the most rows of each request from the host: drafts may not be moved."""
        return False

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any
    ) -> str | None:
        """Say why options that are there one by one do not go together."""
        capability = others[-1] if others else None
        return combination_problem(
            head_size,
            dtype_name(dtype),
            kv_cache_dtype,
            None if capability is None else int(capability.to_int()),
        )

    @classmethod
    def validate_configuration(cls, **selected: Any) -> list[str]:
        """List the reasons against a configuration of a GPU; none: it can be had."""
        reasons: list[str] = super().validate_configuration(**selected)
        if selected.get("use_batch_invariant") and selected.get("has_sliding_window"):
            reasons.append("batch invariance with a sliding window not supported on a GPU")
        return reasons
