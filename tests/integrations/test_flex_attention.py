# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's flex_attention over its block masks, against its own."""

from __future__ import annotations

from typing import Any

import flashbsr
import pytest
from harness import framework

torch = framework("torch")

from flashbsr.integrations import flex_attention as door  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402

MASKS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 70),
    "by request": lambda b, h, q, kv: (kv < 100 * (b + 1)) & (q >= kv),
    "nothing": lambda b, h, q, kv: (kv < 0) & (q >= 0),
    "holes": lambda b, h, q, kv: (q * 7 + kv) % 3 > 0,
}


def draw(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int) -> list[Any]:
    torch.manual_seed(0)
    shapes = (batch, heads, q_len, 64), (batch, kv_heads, kv_len, 64), (batch, kv_heads, kv_len, 32)
    return [torch.randn(shape) for shape in shapes]


def expected(q: Any, k: Any, v: Any, keep: Any, scale: float) -> tuple[Any, Any]:
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = (q @ k.transpose(2, 3) * scale).masked_fill(~keep[:, None], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.where(torch.isneginf(lse)[..., None], 0.0, (logits - lse[..., None]).exp())
    return weights.nan_to_num() @ v, lse


def kept(function: Any, batch: int, q_len: int, kv_len: int) -> Any:
    grid = torch.meshgrid(
        torch.arange(batch), torch.arange(q_len), torch.arange(kv_len), indexing="ij"
    )
    return function(grid[0], torch.tensor(0), grid[1], grid[2])


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block", [64, (32, 64)])
@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(2, 128, 256), (1, 130, 201)])
def test_masks(name: str, block: Any, batch: int, q_len: int, kv_len: int) -> None:
    q, k, v = draw(batch, 4, 2, q_len, kv_len)
    per_request = batch if name == "by request" else None
    mask = create_block_mask(
        MASKS[name], per_request, None, q_len, kv_len, device="cpu", BLOCK_SIZE=block
    )
    out, lse = door.flex_attention(
        q, k, v, block_mask=mask, scale=0.2, enable_gqa=True, return_lse=True
    )
    wanted, wanted_lse = expected(q, k, v, kept(MASKS[name], batch, q_len, kv_len), 0.2)
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=2e-5, rtol=2e-5)
    again = door.flex_attention(q, k, v, block_mask=mask, scale=0.2, enable_gqa=True)
    assert torch.equal(again, out)


def test_a_mask_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its plan goes with it."""
    q, k, v = draw(1, 4, 4, 64, 64)
    mask = create_block_mask(MASKS["causal"], None, None, 64, 64, device="cpu", BLOCK_SIZE=64)
    calls = []
    monkeypatch.setattr(door, "_plan", lambda *x, plan=door._plan: calls.append(1) or plan(*x))
    for _ in range(3):
        door.flex_attention(q, k, v, block_mask=mask)
    assert len(calls) == 1
    held = len(door._planned)
    del mask
    assert len(door._planned) == held - 1


def test_without_a_mask() -> None:
    q, k, v = draw(2, 4, 2, 5, 9)
    out, lse = door.flex_attention(q, k, v, enable_gqa=True, return_lse=True)
    wanted, wanted_lse = expected(q, k, v, torch.ones(2, 5, 9, dtype=torch.bool), 64**-0.5)
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=2e-5, rtol=2e-5)


def test_refusals() -> None:
    q, k, v = draw(2, 4, 2, 60, 64)
    with pytest.raises(flashbsr.UnsupportedError, match="score_mod"):
        door.flex_attention(q, k, v, lambda s, b, h, i, j: s, enable_gqa=True)
    with pytest.raises(flashbsr.ShapeError, match="enable_gqa"):
        door.flex_attention(q, k, v)
    short = create_block_mask(MASKS["causal"], None, None, 60, 64, device="cpu", BLOCK_SIZE=64)
    with pytest.raises(flashbsr.UnsupportedError, match="multiples"):
        door.flex_attention(q, k, v, block_mask=short, enable_gqa=True)
    heads = create_block_mask(MASKS["causal"], None, 4, 60, 64, device="cpu", BLOCK_SIZE=64)
    with pytest.raises(flashbsr.UnsupportedError, match="4 heads"):
        door.flex_attention(q[:1], k[:1], v[:1], block_mask=heads, enable_gqa=True)
    with pytest.raises(flashbsr.ShapeError, match="tokens"):
        door.flex_attention(q[:1, :, :50], k[:1], v[:1], block_mask=short, enable_gqa=True)
