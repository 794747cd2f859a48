# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's layers of latent attention without vLLM: steps of a server against float64."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from compare import assert_attention
from flashbsr import errors
from harness import framework
from reference import DTYPES, Variant, attend, rounded

torch = framework("torch")
latent = importlib.import_module("flashbsr.integrations.vllm.latent")
steps = importlib.import_module("flashbsr.integrations.vllm.steps")

HEADS, LATENT, DIM, BLOCK, SCALE = 16, 512, 576, 16, 192**-0.5
VARIANT = Variant(causal=True, sm_scale=SCALE)
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make(**options: Any) -> Any:
    """Make a layer as vLLM does: ten arguments by position, the dims by name."""
    asked: dict[str, Any] = {
        "num_heads": HEADS,
        "head_size": DIM,
        "scale": SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
    }
    named: dict[str, Any] = {"kv_lora_rank": LATENT, "v_head_dim": 128, "q_lora_rank": None}
    for name, value in options.items():
        (asked if name in asked else named)[name] = value
    return latent.LatentLayer(*asked.values(), **named)


@pytest.mark.parametrize("dtype", TYPES)
def test_steps_of_a_server(dtype: str) -> None:
    """Chunks over what earlier ones left, decodes, drafts, a request that waits; padding behind."""
    rng = np.random.default_rng(0)
    layer = make()
    planned = steps.Steps([layer.kind], steps.Place(dtype, BLOCK, num_threads=1))
    # Blocks are padded, and what no token has been written to is NaN.
    room = torch.full((40, BLOCK + 1, DIM), float("nan"), dtype=TYPES[dtype])
    cache = room[:, :BLOCK]
    tables = rng.permutation(39)[:36].reshape(3, 12).astype(np.int32) + 1
    stored = [np.zeros((0, DIM)) for _ in range(3)]
    for q_lens in ([5, 59, 0], [1, 64, 2], [1, 1, 33], [1, 4, 20], [1, 1, 1], [0, 3, 0]):
        starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        rows, slots, new = int(starts[-1]), [], []
        for i, n in enumerate(q_lens):
            positions = np.arange(len(stored[i]), len(stored[i]) + n)
            new.append(rounded(rng.standard_normal((n, DIM)), dtype))
            stored[i] = np.concatenate([stored[i], new[-1]])
            slots.append(tables[i][positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK)
        given = torch.tensor(np.concatenate(new)).to(TYPES[dtype])
        places = torch.tensor(np.concatenate([*slots, [-1, -1]]))
        padded = torch.cat([given, given.new_full((2, DIM), float("nan"))])
        layer.do_kv_cache_update(padded[:, :LATENT], padded[:, None, LATENT:], cache, places)
        lens = np.array([len(x) if n else 0 for x, n in zip(stored, q_lens, strict=True)], np.int32)
        batch = steps.Batch(starts, lens, torch.tensor(tables))
        step = latent.LatentStep(planned.plan(batch, places, rows, None), 3)
        assert (step.num_decodes, step.num_decode_tokens, step.num_prefills) == (3, rows, 0)
        q = rounded(rng.standard_normal((rows, HEADS, DIM)), dtype)
        query = torch.tensor(q).to(TYPES[dtype])
        query = torch.cat([query, query.new_full((2, HEADS, DIM), float("nan"))])
        out, lse = layer.forward_mqa((query[..., :LATENT], query[..., LATENT:]), cache, step, None)
        assert lse is None and not out[rows:].any()
        torch.testing.assert_close(out, layer.forward_mqa(query, cache, step, None)[0])
        for i, n in enumerate(q_lens):
            if n:
                mine = slice(starts[i], starts[i + 1])
                k = stored[i][:, None]
                states = [
                    attend(q[mine], k, k[..., :LATENT], VARIANT, work=work, out_dtype=work)
                    for work in (None, dtype)
                ]
                got = out[mine].float().numpy().astype(DTYPES[dtype])
                assert_attention(got, None, *states, dtype, f"request {i}")


def test_measuring_memory_writes_nothing() -> None:
    """vLLM profiles before there is a cache."""
    make().do_kv_cache_update(None, None, torch.tensor([]), None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("indexer", object()),
        ("sliding_window", 9),
        ("alibi_slopes", [1.0]),
        ("logits_soft_cap", 3.0),
        ("num_kv_heads", 2),
        ("kv_sharing_target_layer_name", "layers.0"),
        ("q_pad_num_heads", 64),
        ("kv_cache_dtype", "fp8_ds_mla"),
        ("attn_type", "encoder_only"),
    ],
)
def test_what_is_not_there_is_refused(name: str, value: Any) -> None:
    with pytest.raises(errors.UnsupportedError, match=name):
        make(**{name: value})
