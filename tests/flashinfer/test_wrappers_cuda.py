# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Wrappers in CUDA graphs, on a GPU."""

from __future__ import annotations

import flashbsr.flashinfer as flashinfer
import numpy as np
import pytest
from cuda_world import DIM, HEADS, KV_HEADS, PAGE, WORLD, on_gpu
from harness import DEVICES, framework

if not any(device.is_cuda for device in DEVICES):
    pytest.skip("no GPU, or a build or a PyTorch without CUDA", allow_module_level=True)

torch = framework("torch")


def test_wrapper_graph_mode() -> None:
    world, rows = WORLD, 8
    buffers = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (rows + 1, 500, rows)]
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", True, False, *buffers)
    q, cache, out = on_gpu(world.q[:rows]), on_gpu(world.cache), on_gpu(world.q[:rows])
    graph = None
    for lens in ([100] * 8, [7, 900, 33, 1, 2, 3, 4, 5], [800]):
        batch = world.batch(lens)
        last = np.array([(n - 1) % PAGE + 1 for n in lens], np.int32)
        wrapper.plan(
            batch.kv_indptr, batch.kv_indices, last, HEADS, KV_HEADS, DIM, PAGE,
            q_data_type=torch.float16,
        )  # fmt: skip
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                wrapper.run(q, cache, out=out)
        graph.replay()
        world.check(out.cpu(), batch, len(lens))
