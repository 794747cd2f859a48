# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Cases of tools/sanitizer_cases.py that write codes; `normal` draws arrays there."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import flashbsr
import torch

PAGE_SIZE = 16
Normal = Callable[[tuple[int, ...], str], torch.Tensor]


def quantize(normal: Normal) -> None:
    """Head dims that fill a warp's turns and that do not; one row goes nowhere."""
    device = normal((1,), "float32").device
    slots = torch.tensor([5, -1, 17, 31]).to(device)
    shape = (2, PAGE_SIZE, 2)
    kinds = (("int8", 0, "float32"), ("float8_e4m3fn", 0, "float16"), ("int4", 0, "float32"),
             ("int4", 32, "float32"), ("nvfp4", 16, "float8_e4m3fn"))  # fmt: skip
    for dim, (dtype, group, scale) in itertools.product((64, 192), kinds):
        rows = normal((4, 2, dim), "bfloat16")
        packed = group > 0 or dtype == "int4"
        held, row = ("uint8", dim // 2) if packed else (dtype, dim)
        cache = [torch.zeros(*shape, row).to(getattr(torch, held)).to(device) for _ in "kv"]
        groups = (*shape, dim // group) if group else shape
        scales = [torch.zeros(groups).to(getattr(torch, scale)).to(device) for _ in "kv"]
        flashbsr.append_paged_kv_cache(
            rows, rows, paged_kv_cache=tuple(cache), slot_mapping=slots, k_scale=scales[0],
            v_scale=scales[1], kv_dtype=dtype,
        )  # fmt: skip
        flashbsr.rope_append_paged_kv_cache(
            rows, rows, rows, positions=torch.arange(4, dtype=torch.int32).to(device),
            paged_kv_cache=tuple(cache), slot_mapping=slots, rotary_dim=36, k_scale=scales[0],
            v_scale=scales[1], kv_dtype=dtype,
        )  # fmt: skip
        flashbsr.dequantize_kv_cache(cache[0], scales[0], kv_dtype=dtype)
    quantize_many(normal)


def quantize_many(normal: Normal) -> None:
    """So many tokens that a warp takes eight of them, one after another; one goes nowhere."""
    tokens = 8 * 8192
    rows = normal((tokens, 1, 64), "bfloat16")
    device = rows.device
    slots = torch.randperm(tokens).to(device)
    slots[5] = -1
    shape = (tokens // PAGE_SIZE, PAGE_SIZE, 1)
    cache = [torch.zeros(*shape, 64, dtype=torch.int8).to(device) for _ in "kv"]
    scales = [torch.zeros(shape).to(device) for _ in "kv"]
    where = {"paged_kv_cache": tuple(cache), "slot_mapping": slots, "kv_dtype": "int8",
             "k_scale": scales[0], "v_scale": scales[1]}  # fmt: skip
    flashbsr.append_paged_kv_cache(rows, rows, **where)
    positions = torch.arange(tokens, dtype=torch.int32).to(device)
    flashbsr.rope_append_paged_kv_cache(rows, rows, rows, positions=positions, **where)


def outputs(normal: Normal) -> None:
    """Float32 as codes, of requests that are split and of some that are not."""
    lens, rows = (0, 700, 707, 760), (0, 1, 5, 45)
    indptr = [torch.tensor(x, dtype=torch.int32) for x in (rows, lens)]
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=True), flashbsr.TaskInfo(4, 2, 64, o_dtype="nvfp4")
    )
    attention.plan(flashbsr.Ragged(*indptr))
    k = normal((lens[-1], 2, 64), "float16")
    codes, scales = attention.run(normal((rows[-1], 4, 64), "float16"), (k, k))
    if not bool(torch.isfinite(scales.float().cpu()).all()) or not bool(codes.cpu().any()):
        raise RuntimeError("outputs are not what codes say")
