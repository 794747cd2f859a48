# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Attention whose keys lie on several ranks, by PyTorch's process groups. Imported by its name.

- `merge_over_ranks`: partial results of all ranks become one, for decode over a cache that is
  spread over them (`flashbsr.ContextParallel`).
- `PeerMerge`: the same on GPUs of one host, through each other's memory and in one launch.
- `PrefillOverRanks`: a prompt in zig-zag parts, keys and values travelling from rank to rank.
- `Cost` predicts what either takes on 2 to 64 GPUs.

docs/distributed.md has both step by step.
"""

from .cost import Cost, Link
from .merge import PeerError, merge_over_ranks
from .peers import PeerMerge
from .prefill import PrefillOverRanks, ZigZag, zigzag

__all__ = [
    "Cost",
    "Link",
    "PeerError",
    "PeerMerge",
    "PrefillOverRanks",
    "ZigZag",
    "merge_over_ranks",
    "zigzag",
]
