# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Pages that each KV head chooses on the device: Quest without the host.

The importance of a page is Quest's (quest.py, which plans what the host has chosen). Here PyTorch
chooses, each KV head for itself, and hands its tables and lengths to a plan of bounds: in a CUDA
graph or a compiled program a step chooses and attends without a look by the host. NSA and MoBA
choose blocks by other scores, and attend in the same way.

>>> import torch
>>> from flashbsr import Attention, AttentionSpec, Bounds, TaskInfo
>>> q, cache = torch.randn(2, 4, 64), torch.randn(12, 2, 16, 2, 64)
>>> tables, kv_lens = torch.arange(12).view(2, 6), torch.tensor([90, 20])
>>> attention = Attention(AttentionSpec(), TaskInfo(4, 2, 64))
>>> attention.plan(Bounds(None, [[48, 48], [48, 48]], page_size=16))  # three pages of each head
>>> bounds = cache[:, 0].amin(dim=1), cache[:, 0].amax(dim=1)
>>> chosen, lens = top_pages(q, bounds, tables, kv_lens, page_size=16, keep=3)
>>> lens.tolist()
[[42, 42], [20, 20]]
>>> attention.run(q, cache, kv_lens=lens, block_tables=chosen).shape
torch.Size([2, 4, 64])
"""

from __future__ import annotations

import torch
from flashbsr import FlashbsrError


def top_pages(
    q: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    page_size: int,
    keep: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`block_tables` (B, H_kv, keep) and `kv_lens` (B, H_kv) of at most `keep` pages.

    `q` (B, H_qo, D); `bounds`: smallest and largest of each dimension, (pages, H_kv, D); `tables`
    (B, max_pages), whatever stands behind a request's last page; `kv_lens` (B,). A request's last
    page is always kept: it has the newest tokens, and may not be full.
    """
    batch, slots = tables.shape
    if not 1 <= keep <= slots:
        raise FlashbsrError("keep", keep, f"1 (the newest tokens' page) to {slots}, all of them")
    pages, heads, dim = bounds[0].shape
    lower, upper = (x[tables.clamp(0, pages - 1)].float() for x in bounds)
    group = q.reshape(batch, heads, -1, dim).float()
    # The larger of two products is the one with the bound on q's own side.
    most = torch.einsum("bhgd,bphd->bhgp", group.clamp(min=0), upper)
    most += torch.einsum("bhgd,bphd->bhgp", group.clamp(max=0), lower)
    held = ((kv_lens + page_size - 1) // page_size).view(-1, 1, 1)
    slot = torch.arange(slots, device=tables.device)
    importance = most.amax(dim=2)
    importance = importance.masked_fill(slot >= held, -torch.inf)
    importance = importance.masked_fill(slot == held - 1, torch.inf)
    # In the order of positions: the last page stays last, slots that hold nothing follow.
    best = importance.topk(keep).indices.sort().values
    chosen = tables.unsqueeze(1).expand(-1, heads, -1).gather(2, best)
    left_out = (held.flatten() - keep).clamp(min=0) * page_size
    return chosen, (kv_lens - left_out).unsqueeze(1).expand(-1, heads).contiguous()
