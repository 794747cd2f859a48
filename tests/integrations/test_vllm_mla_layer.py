# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's own layer of latent attention over flashbsr's classes: needs vLLM (0.26 or later).

It absorbs the queries and expands the outputs. Compared with attention over expanded keys, which is
what a prompt's would be without a cache, in float64.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import flashbsr
import numpy as np
import pytest
import stand_in_vllm
from harness import framework

torch = framework("torch")
pytestmark = [
    pytest.mark.skipif(not stand_in_vllm.INSTALLED, reason="vLLM is not installed here"),
    pytest.mark.filterwarnings("ignore"),
]
HEADS, NOPE, ROPE, VALUE, LATENT, BLOCK, TOPK = 16, 128, 64, 128, 512, 16, 24
SCALE, CODE_SCALE = (NOPE + ROPE) ** -0.5, 0.25


class Projection(torch.nn.Module):  # type: ignore[misc]
    """What expands latents into keys and values."""

    def __init__(self) -> None:
        super().__init__()
        linear = importlib.import_module("vllm.model_executor.layers.linear")
        weight = torch.randn(HEADS * (NOPE + VALUE), LATENT) * LATENT**-0.5
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method = linear.UnquantizedLinearMethod()


class World:
    """A layer, its builder, a cache and two requests."""

    def __init__(self, kv: str, chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        config = importlib.import_module("vllm.config")
        attention = importlib.import_module("vllm.model_executor.layers.attention.mla_attention")
        mla = importlib.import_module("flashbsr.integrations.vllm.mla")
        torch.manual_seed(0)
        # Which kernel vLLM would take for prompts, if there were rows that are not absorbed.
        unused = type("Unused", (), {"__init__": lambda self, **_: None})
        monkeypatch.setattr(attention, "get_mla_prefill_backend", lambda _: unused)
        of_all = config.VllmConfig(device_config=config.DeviceConfig("cpu"))
        of_all.cache_config.block_size = BLOCK
        of_all.cache_config.cache_dtype = kv
        self.kv, self.chosen, self.projection = kv, chosen, Projection()
        self.buffer = torch.full((64, TOPK), -1, dtype=torch.int32)
        with config.set_current_vllm_config(of_all):
            self.layer = attention.MLAAttention(
                num_heads=HEADS, scale=SCALE, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
                v_head_dim=VALUE, q_lora_rank=None, kv_lora_rank=LATENT,
                kv_b_proj=self.projection, cache_config=of_all.cache_config,
                prefix="model.layers.0.attn",
                attn_backend=mla.ChosenBackend if chosen else mla.LatentBackend,
                use_sparse=chosen, topk_indices_buffer=self.buffer if chosen else None,
            )  # fmt: skip
            self.layer.process_weights_after_loading(torch.float32)
            spec = self.layer.get_kv_cache_spec(of_all)
        self.layer._k_scale_float = CODE_SCALE if kv == "fp8" else 1.0
        self.layer._k_scale.fill_(self.layer._k_scale_float)
        width, stored = {"auto": (576, torch.float32), "fp8": (576, torch.uint8),
                         "fp8_ds_mla": (656, torch.uint8)}[kv]  # fmt: skip
        if kv != "auto":  # without a model vLLM counts in float16
            assert spec.page_size_bytes == BLOCK * width * stored.itemsize
        fill = float("nan") if kv == "auto" else 255
        self.cache = torch.full((12, BLOCK, width), fill, dtype=stored)
        made = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.float32, rswa_window=None),
            parallel_config=of_all.parallel_config,
            scheduler_config=SimpleNamespace(max_num_seqs=16),
            compilation_config=SimpleNamespace(static_forward_context={"a": self.layer}),
        )
        builder = self.layer.attn_backend.get_builder_cls()
        self.builder = builder(spec, ["a"], made, torch.device("cpu"))
        self.tables = torch.tensor([[3, 7, 1, 0], [5, 2, 9, 0]], dtype=torch.int32)
        self.lens = [0, 0]

    def step(self, q_lens: list[int]) -> None:
        """Update and attention of a step, compared."""
        rows = sum(q_lens)
        starts = torch.tensor(np.cumsum([0, *q_lens]), dtype=torch.int32)
        of_row = [(i, self.lens[i] + t) for i, n in enumerate(q_lens) for t in range(n)]
        slots = torch.tensor([int(self.tables[i, at // BLOCK]) * BLOCK + at % BLOCK
                              for i, at in of_row])  # fmt: skip
        self.lens = [x + n for x, n in zip(self.lens, q_lens, strict=True)]
        lens = torch.tensor(self.lens, dtype=torch.int32)
        metadata = self.builder.build(0, SimpleNamespace(
            num_reqs=2, num_actual_tokens=rows, query_start_loc=starts, query_start_loc_cpu=starts,
            seq_lens=lens, max_seq_len=max(self.lens), block_table_tensor=self.tables,
            slot_mapping=slots, causal=True,
        ))  # fmt: skip
        seen = [torch.arange(at + 1) for _, at in of_row]
        if self.chosen:
            self.buffer.fill_(-1)
            seen = [torch.randperm(at + 1)[:TOPK] for _, at in of_row]
            for row, tokens in zip(self.buffer, seen, strict=False):
                row[: len(tokens)] = tokens
        latents, rotated = torch.randn(rows, LATENT), torch.randn(rows, 1, ROPE)
        q = torch.randn(rows, HEADS, NOPE + ROPE)
        self.layer.impl.do_kv_cache_update(
            latents, rotated, self.cache, slots, self.kv, self.layer._k_scale
        )
        # Rows of padding, as graphs have them, are nobody's.
        pad = [torch.cat([x, torch.full_like(x[:2], float("nan"))]) for x in (q, latents, rotated)]
        out = torch.full((rows + 2, HEADS * VALUE), float("nan"))
        self.layer.forward_impl(*pad, self.cache, metadata, output=out)
        stored = self.stored()
        for row, ((i, _), tokens) in enumerate(zip(of_row, seen, strict=True)):
            slots = self.tables[i, tokens // BLOCK] * BLOCK + tokens % BLOCK
            expected = self.expanded(q[row].double(), stored[slots])
            assert (out[row].double() - expected).abs().max() < 1e-5

    def stored(self) -> Any:
        """What the cache means, slot by slot."""
        if self.kv == "fp8_ds_mla":
            means = torch.from_numpy(flashbsr.unpack_latents(self.cache.numpy()))
        elif self.kv == "fp8":
            means = self.cache.view(torch.float8_e4m3fn).float() * CODE_SCALE
        else:
            means = self.cache
        return means.reshape(-1, LATENT + ROPE).double()

    def expanded(self, q: Any, rows: Any) -> Any:
        """Attention of one row over expanded keys and values."""
        weight = self.projection.weight.T.reshape(LATENT, HEADS, NOPE + VALUE).double()
        both = torch.einsum("tl,lhp->thp", rows[:, :LATENT], weight)
        logits = torch.einsum("hp,thp->ht", q[:, :NOPE], both[..., :NOPE])
        logits = (logits + q[:, NOPE:] @ rows[:, LATENT:].T) * SCALE
        return torch.einsum("ht,thv->hv", logits.softmax(-1), both[..., NOPE:]).flatten()


@pytest.mark.parametrize("kv", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("chosen", [False, True])
def test_steps_of_vllms_layer(kv: str, chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, a chunk of one beside a decode, decodes."""
    world = World(kv, chosen, monkeypatch)
    for q_lens in ([20, 7], [1, 30], [1, 1]):
        world.step(q_lens)
