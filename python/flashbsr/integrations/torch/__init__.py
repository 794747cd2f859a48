# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's compilers: `flashbsr` as operators, ``torch.ops.flashbsr``.

Nothing here is called by name. Under torch.compile and torch.export a call of the public API, such
as ``attention.run(q, kv)``, becomes an operator of the program; this module is loaded then. Import
it where a program that was exported or compiled before is loaded: its operators must be there.

Planning stays outside: the program holds a number for an `Attention` and follows its plans.
"""

from __future__ import annotations

from .calls import (
    append_paged_kv_cache,
    attention,
    get_batch_indices_positions,
    get_seq_lens,
    merge_state,
    merge_state_in_place,
    merge_states,
    rope_append_paged_kv_cache,
    rotate,
    rotate_by_table,
    run,
)

__all__ = [
    "append_paged_kv_cache",
    "attention",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "rope_append_paged_kv_cache",
    "rotate",
    "rotate_by_table",
    "run",
]
