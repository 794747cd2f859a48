# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""How long a process waits for its first decode on a GPU, behind ``import flashbsr``.

    python tools/first_decode.py

PyTorch is there before, with its arrays on the GPU: what it takes is not flashbsr's. The clock of
the decode starts behind the import and stops when the result is on the GPU: driver, kernels of the
build, engine, plan, run. Prints JSON; tools/gpu_record.py keeps it.
"""

from __future__ import annotations

import json
import time

REQUESTS, TOKENS, PAGE = 16, 1024, 16


def main() -> None:
    """Import, decode once, print the seconds of both."""
    import numpy as np
    import torch

    pages = REQUESTS * TOKENS // PAGE
    q = torch.randn(REQUESTS, 32, 128, dtype=torch.bfloat16, device="cuda")
    cache = torch.randn(pages, 2, PAGE, 8, 128, dtype=torch.bfloat16, device="cuda")
    tables = np.arange(pages, dtype=np.int32).reshape(REQUESTS, -1)
    lens = np.full(REQUESTS, TOKENS)
    torch.cuda.synchronize()

    begin = time.perf_counter()
    import flashbsr

    imported = time.perf_counter()
    task = flashbsr.TaskInfo(32, 8, 128, q_dtype="bfloat16", kv_dtype="bfloat16", backend="cuda")
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), task)
    attention.plan(flashbsr.BlockTable(None, tables, lens, page_size=PAGE))
    out = attention.run(q, cache)
    torch.cuda.synchronize()
    decoded = time.perf_counter()
    if not torch.isfinite(out.float()).all():
        raise SystemExit("first_decode: the result is not finite")
    seconds = {"import_s": imported - begin, "first_decode_s": decoded - imported}
    print(json.dumps({name: round(x, 4) for name, x in seconds.items()}))


if __name__ == "__main__":
    main()
