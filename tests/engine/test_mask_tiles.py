# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Masks that keep, cut or hide whole tiles: a kernel may pass over them, or not ask the mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flashbsr
import numpy as np
import pytest
from cases import BF16, F16, FP8, Case, build
from harness import Device, attention_for, check_case
from reference import Variant

BLOCKS = Case(
    "blocks", (300, 1, 70, 0, 9), (1000, 200, 333, 5, 700), dims=(128, 128), mask="blocks"
)
FP8_KV = ("bfloat16", "float8_e4m3fn", "bfloat16")
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"layout": "paged"},
    {"layout": "paged", "page_size": 3, "kv_layout": "HND"},
    {"layout": "table", "page_size": 1},
]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"variant": Variant(window_left=300)},
    "soft_cap": {"variant": Variant(logits_soft_cap=2.0)},
    "alibi": {"variant": Variant(pos_encoding_mode="ALIBI")},
    "rope": {"variant": Variant(pos_encoding_mode="ROPE_LLAMA")},
    "sinks": {"sinks": True, "scales": "head"},
    "scale_negative": {"variant": Variant(sm_scale=-0.2)},
    "steep": {"gain": 300.0},
    "sigmoid": {"variant": Variant(activation="sigmoid", sigmoid_bias=-2.0)},
}


def mask_cases() -> Iterator[Case]:
    """Over head dims, types, groups, layouts, variants and splits."""
    for i, dtypes in enumerate((BF16, F16, FP8_KV, FP8)):
        for j, dim in enumerate((64, 128, 256)):
            for k, heads in enumerate(((4, 1), (2, 2), (6, 2))):
                name = f"{dtypes[1]}-{dtypes[0]}-dim{dim}-heads{heads[0]}x{heads[1]}"
                fields = {"dtypes": dtypes, "dims": (dim, dim), "heads": heads}
                yield BLOCKS.but(name, **fields, **LAYOUTS[(i + j + k) % 4], seed=i + 3 * j)
    for i, (name, changes) in enumerate(VARIANTS.items()):
        for dtypes in (BF16, F16):
            fields = {**LAYOUTS[i % 4], **changes}
            yield BLOCKS.but(f"{name}-{dtypes[0]}", dtypes=dtypes, heads=(4, 1), **fields)
    for i, task in enumerate(({"num_workers": 40}, {"fixed_split_size": 200}, {"num_workers": 2})):
        for seed in range(3):
            name = f"cut{i}-{seed}"
            yield BLOCKS.but(name, dtypes=BF16, heads=(8, 2), task=task, seed=seed)


@pytest.mark.parametrize("case", list(mask_cases()), ids=lambda case: case.name)
def test_blocks(case: Case, device: Device) -> None:
    check_case(case, device)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("dtypes", [BF16, F16], ids=lambda dtypes: dtypes[0])
def test_everything_or_nothing(dtypes: tuple[str, str, str], keeps: bool, device: Device) -> None:
    """A mask of zeros gives zeros and an LSE of -inf, whatever K and V hold; of ones, all."""
    case = BLOCKS.but(f"{keeps}", dtypes=dtypes, heads=(4, 1), q_lens=(200,), kv_lens=(777,))
    problem = device.build(case)
    attention = attention_for(problem, device.backend)
    mask = np.full(200 * 777, keeps)
    attention.plan(problem.layout(), custom_mask=mask)
    q, kv = device.put(problem.q), device.put_kv(problem.kv)
    out, lse = (device.get(x) for x in attention.run(q, kv, return_lse=True))
    if keeps:
        plain = flashbsr.Attention(flashbsr.AttentionSpec(), attention.task)
        plain.plan(problem.layout())
        want, want_lse = (device.get(x) for x in plain.run(q, kv, return_lse=True))
        unit = 2.0 ** (-8 if dtypes is BF16 else -10)
        np.testing.assert_allclose(np.float32(out), np.float32(want), atol=unit, rtol=2 * unit)
        np.testing.assert_allclose(lse, want_lse, atol=1e-2)
    else:
        np.testing.assert_array_equal(np.float32(out), 0)
        np.testing.assert_array_equal(lse, -np.inf)


def test_no_keys_first(device: Device) -> None:
    """Rows without keys are zeros, whichever item a block begins with."""
    for q_lens in ((64,), (64, 300, 64), (300, 64)):
        kv_lens = tuple(0 if n == 64 else 500 for n in q_lens)
        for dtypes in (BF16, F16):
            case = Case(f"{q_lens}", q_lens, kv_lens, (4, 1), (128, 128), dtypes)
            check_case(case, device)


def test_build_is_what_it_says() -> None:
    """The blocks are kept, cut and hidden, several at a time."""
    mask = build(BLOCKS).requests[0][3]
    kinds = [mask[r : r + 64, c : c + 80].mean() for r in range(0, 256, 70) for c in (0, 130, 260)]
    assert 0.0 in kinds
    assert any(0 < kind < 1 for kind in kinds)
