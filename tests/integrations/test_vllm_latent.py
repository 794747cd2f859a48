# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's layers of latent attention without vLLM: steps of a server against float64."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from flashbsr import errors
from harness import CPU, DEVICES, Device, framework

torch = framework("torch")
chosen = importlib.import_module("flashbsr.integrations.vllm.chosen")
world = importlib.import_module("latent_world")

KINDS = ["auto", "fp8", "fp8_ds_mla"]
# Chunks over what earlier ones left, decodes, drafts, a request that waits.
STEPS = [[5, 59, 0], [1, 64, 2], [1, 1, 33], [1, 4, 20], [1, 1, 1], [2, 2, 2], [0, 3, 0]]


def place(device: Device, kv: str = "auto") -> dict[str, Any]:
    """Where `Serving` computes."""
    if not device.is_cuda:
        return {"kv": kv}
    capability = torch.cuda.get_device_capability()
    if kv != "auto" and capability[0] != 9:
        pytest.skip(f"latents of eight bits on compute capability {capability}")
    stream = torch.cuda.current_stream().cuda_stream
    return {"kv": kv, "device": "cuda", "gpu": True, "stream": stream}


def serve(device: Device, steps: list[list[int]], kv: str = "auto", **options: Any) -> None:
    serving = world.Serving(**place(device, kv), **options)
    for q_lens in steps:
        serving.step(q_lens)


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_steps_of_a_server(dtype: str, kv: str, device: Device) -> None:
    serve(device, STEPS, dtype=dtype, kv=kv)


@pytest.mark.parametrize("kv", KINDS)
def test_steps_in_float32(kv: str) -> None:
    """Which is computed on the CPU only."""
    serve(CPU, STEPS, dtype="float32", kv=kv)


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("topk", [8, 40])
def test_steps_over_chosen_tokens(topk: int, kv: str, device: Device) -> None:
    """Fewer than are chosen at most, none at all, the same of every request."""
    serve(device, STEPS, dtype="bfloat16", kv=kv, topk=topk)


@pytest.mark.parametrize(("heads", "block"), [(1, 16), (5, 48), (64, 64), (128, 32)])
@pytest.mark.parametrize("topk", [0, 16])
def test_heads_and_blocks(heads: int, block: int, topk: int, device: Device) -> None:
    steps = [[5, 19, 0], [1, 3, 2], [1, 1, 1]]
    serve(device, steps, dtype="float16", heads=heads, block=block, topk=topk)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (2, 16), (3, 4), (8, 1)])
def test_ranks_that_share_tokens(size: int, interleave: int, drafts: bool, device: Device) -> None:
    """What vLLM's layer merges: outputs and LSEs of each rank, whose steps are all alike."""
    where = {**place(device), "drafts": drafts, "dtype": "float16"}
    ranks = world.ranks(world.Serving, size, interleave, **where)
    for q_lens in STEPS:
        found, steps = [], []
        for serving in ranks:
            x, slots = serving.grow(q_lens)
            steps.append(serving.plan(q_lens, slots))
            serving.write(x, slots)
            q = serving.rows(sum(q_lens), serving.heads)
            found.append(serving.attend(steps[-1], q))
        serving.check(world.merged(found, steps), q, q_lens, None)


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("topk", [0, 40])
@pytest.mark.parametrize("device", [d for d in DEVICES if d.is_cuda], ids=lambda d: d.name)
def test_cuda_graphs_follow_later_steps(topk: int, kv: str, device: Device) -> None:
    """Update and attention of a decode step, replayed: longer requests, and fewer."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        where = {**place(device, kv), "stream": stream.cuda_stream}
        serving = world.Captured(dtype="bfloat16", topk=topk, **where)
        serving.prefill([5, 100, 17])
        step, *_ = serving.prepare(3)
        assert step.step.captured
        serving.work(step)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = serving.work(step)
        for requests in world.REPLAYS:
            _, *expected = serving.prepare(requests)
            out.fill_(float("nan"))
            graph.replay()
            serving.replayed(out, requests, *expected)


@pytest.mark.parametrize("device", [d for d in DEVICES if d.is_cuda], ids=lambda d: d.name)
def test_cuda_graphs_of_ranks_that_share_tokens(device: Device) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        where = {**place(device), "stream": stream.cuda_stream, "dtype": "bfloat16"}
        ranks = world.ranks(world.Captured, 2, 16, **where)
        graphs, outs = [], []
        for serving in ranks:
            serving.prefill([5, 100, 17])
            step, *_ = serving.prepare(3)
            assert step.step.captured
            serving.work(step)
            stream.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], stream=stream):
                outs.append(serving.work(step))
        for requests in world.REPLAYS:
            steps = []
            for serving, graph, out in zip(ranks, graphs, outs, strict=True):
                step, *expected = serving.prepare(requests)
                steps.append(step)
                out[0].fill_(float("nan"))
                graph.replay()
            serving.replayed(world.merged(outs, steps), requests, *expected)


def test_chosen_tokens_of_a_row_move_to_its_front() -> None:
    tables = torch.tensor([[3, 1], [2, 7]], dtype=torch.int32)
    of_rows = torch.tensor([1, 0, -1], dtype=torch.int32)
    step = object.__new__(chosen.ChosenStep)
    step.of_rows, step.tables, step.block = of_rows, tables, 4
    given = torch.tensor([[-1, 5, 0, -1], [7, -1, -1, 2], [3, 2**30, 1, 0]], dtype=torch.int32)
    places, counts = step.places(given, 5)
    assert counts.tolist() == [2, 2, 0]
    assert places[0, :2].tolist() == [7 * 5 + 1, 2 * 5] and places[1, :2].tolist() == [8, 17]
    assert places.is_contiguous() and places.dtype == torch.int32


def test_requests_of_rows() -> None:
    """Those without rows have none; rows behind the last request are nobody's."""
    out = torch.full((9,), 77, dtype=torch.int32)
    starts = torch.tensor([0, 2, 2, 5, 5], dtype=torch.int32)
    found = chosen.requests_of_rows(starts, 7, out)
    assert found.tolist() == [0, 0, 2, 2, 2, -1, -1]
    assert out.tolist()[7:] == [77, 77] and found.data_ptr() == out.data_ptr()


def test_blocks_that_are_no_whole_rows_apart() -> None:
    serving = world.Serving(topk=8)
    serving.cache = torch.zeros(40 * 10000)[:].as_strided((40, 16, 576), (9217, 576, 1))
    step = serving.plan([1, 0, 0], serving.grow([1, 0, 0])[1])
    with pytest.raises(errors.UnsupportedError, match="kv_cache"):
        serving.attend(step, serving.rows(1, 16))


def test_measuring_memory_writes_nothing() -> None:
    """vLLM profiles before there is a cache."""
    world.make().do_kv_cache_update(None, None, torch.tensor([]), None)


REFUSED: list[tuple[str, Any]] = [
    ("sliding_window", 9),
    ("alibi_slopes", [1.0]),
    ("logits_soft_cap", 3.0),
    ("num_kv_heads", 2),
    ("kv_sharing_target_layer_name", "layers.0"),
    ("q_pad_num_heads", 64),
    ("kv_cache_dtype", "fp8_e5m2"),
    ("attn_type", "encoder_only"),
]


@pytest.mark.parametrize(("name", "value"), [*REFUSED, ("indexer", object())])
def test_what_is_not_there_is_refused(name: str, value: Any) -> None:
    with pytest.raises(errors.UnsupportedError, match=name):
        world.make(**{name: value})


@pytest.mark.parametrize(("name", "value"), [*REFUSED, ("topk_indices_buffer", None)])
def test_what_is_not_there_over_chosen_tokens(name: str, value: Any) -> None:
    buffer = torch.zeros(4, 8, dtype=torch.int32)
    with pytest.raises(errors.UnsupportedError, match=name):
        world.make(True, **{"topk_indices_buffer": buffer, name: value})


def test_layers_share_the_buffer_of_the_indexer() -> None:
    buffer = torch.zeros(4, 8, dtype=torch.int32)
    made = world.make(True, indexer=type("Indexer", (), {"topk_indices_buffer": buffer})())
    assert made.topk_indices_buffer is buffer and made.is_sparse
    made.record_logical_topk_ready()
    made.prepare_for_batch(None)
    assert np.prod(made.topk_indices_buffer.shape) == 32
