# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Cases of tools/sanitizer_cases.py that merge attention states; `normal` draws arrays there."""

from __future__ import annotations

from collections.abc import Callable

import flashbsr
import torch
from flashbsr import _core

Normal = Callable[[tuple[int, ...], str], torch.Tensor]


def here(normal: Normal) -> None:
    """Two states, several, and one into another."""
    v, s = normal((19, 3, 2, 72), "float16"), normal((19, 3, 2), "float32")
    flashbsr.merge_states(v, s)
    flashbsr.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    mask = (torch.arange(19) % 2 > 0).to(v.device)
    flashbsr.merge_state_in_place(v[:, 0].clone(), s[:, 0].clone(), v[:, 1], s[:, 1], mask)


def through_peers(normal: Normal) -> None:
    """Be rank 0 of two, to which the other one has sent already, in each half of the inbox."""
    for dtype in ("float32", "float16", "bfloat16"):
        for travel in {dtype, *(("float16", "bfloat16") if dtype == "float32" else ())}:
            _through_peers(normal, dtype, travel)


def _through_peers(normal: Normal, dtype: str, travel: str) -> None:
    tokens, heads, dim = 19, 4, 72
    v, s = normal((tokens, heads, dim), dtype), normal((tokens, heads), "float32")
    sends = v.to(getattr(torch, travel))
    rows, row_bytes = tokens * heads, dim * sends.itemsize
    count = _core.inbox_bytes(2, rows, row_bytes)
    inboxes = torch.full((2, count), 255, dtype=torch.uint8).to(v.device)
    lses = -(-rows * row_bytes // 128) * 128
    for half in range(2):
        sent = inboxes[0].view(2, 2, -1)[half, 1]
        sent[: rows * row_bytes] = sends.reshape(-1).view(torch.uint8)
        sent[lses : lses + rows * 4] = s.reshape(-1).view(torch.uint8)
    control = torch.zeros(4, dtype=torch.int32).to(v.device)
    missed = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    addresses = [x.data_ptr() for x in (*inboxes, control, missed)]
    peers = _core.Peers(addresses[:2], 0, rows, row_bytes, *addresses[2:], 1000)
    stream = torch.cuda.current_stream().cuda_stream
    for _ in range(2):
        out, lse = torch.empty_like(v), torch.empty_like(s)
        _core.merge_peers(v, s, out, lse, peers, travel, False, stream)
        if not torch.equal(out, sends.to(v.dtype)):  # with itself
            raise RuntimeError("the merge of two equal states is another one")
    if int(missed):
        raise RuntimeError("a rank was missed that had sent")
