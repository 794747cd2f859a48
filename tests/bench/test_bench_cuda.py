# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""``flashbsr bench --device cuda`` without a GPU: PyTorch's CPU and the host's clock stand in."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from flashbsr.bench import (
    cuda_data,
    cuda_mixed,
    cuda_peers,
    cuda_prefill,
    cuda_runner,
    cuda_sparse,
    cuda_timing,
    plot_results,
    render_table,
    runner,
    select,
    to_json,
)
from flashbsr.bench.cuda_runner import CudaSession, run_cuda_workload
from flashbsr.bench.cuda_workloads import CUDA_KINDS, CUDA_WORKLOADS
from flashbsr.bench.timing import Budget
from flashbsr.bench.workloads import Workload
from flashbsr.cli import main
from flashbsr.errors import UnsupportedError
from harness import DEVICES, framework

torch = framework("torch")
ROOT = Path(__file__).resolve().parents[2]


class HostClock(cuda_timing.Clock):
    """Runs what it would record, and asks the host's clock."""

    def __init__(self) -> None:
        self.recorded = 0
        self.rests = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        return work

    def seconds(self, work: Callable[[], None]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        pass

    def rest(self) -> None:
        self.rests += 1


def small(w: Workload) -> Workload:
    """Shrink a workload to what a CPU does in no time."""
    heads = (4, 4) if w.num_qo_heads == w.num_kv_heads else (4, 2)
    kv_lens = tuple(min(n, 40) for n in w.kv_lens[:4])
    # Few queries on a long KV stay fewer than that.
    q_lens = tuple(
        kv if q == whole else min(q, 16)
        for q, whole, kv in zip(w.q_lens, w.kv_lens, kv_lens, strict=False)
    )
    return dataclasses.replace(
        w,
        q_lens=q_lens,
        kv_lens=kv_lens,
        window_left=min(w.window_left, 7),
        chosen_from=w.chosen_from and (min(w.chosen_from[0], 4), 64),
        prefixes=((1, 32),) if w.prefixes and w.kind == "gpu-plan" else w.prefixes,
        block=w.block and (min(w.block[0], 12), min(w.block[1], 7)),
        num_qo_heads=heads[0],
        num_kv_heads=1 if w.kind == "gpu-mla" else heads[1],
        head_dim=576 if w.kind == "gpu-mla" else 32,
    )


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> CudaSession:
    monkeypatch.setattr(cuda_data, "ROTATE_BYTES", 1 << 18)
    monkeypatch.setattr(cuda_timing, "BANDWIDTH_BYTES", 1 << 20)
    monkeypatch.setattr(cuda_timing, "MATMUL_SIZE", 64)
    monkeypatch.setattr(cuda_timing, "REPLAYS", 3)
    monkeypatch.setattr(cuda_timing, "REPLAY_S", 1e-4)
    monkeypatch.setattr(cuda_runner, "HOST_CALLS", 60)
    monkeypatch.setattr(runner, "Budget", lambda *_, **__: Budget(0.0, 1, 2))
    monkeypatch.setattr(cuda_runner, "describe_device", lambda _: {"name": "NVIDIA Abacus"})
    gpu = cuda_timing.Gpu(torch, device="cpu", backend="cpu")
    gpu.clock = HostClock()
    return CudaSession(gpu)


def test_every_workload_runs_and_every_goal_is_judged(
    session: CudaSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goals, columns, the plot and the README refer to metrics that the runners give."""
    results = [run_cuda_workload(small(w), session) for w in CUDA_WORKLOADS]
    session.finish(results)
    text = render_table(results, session.limits())
    assert "read" in text.splitlines()[0]
    for w, result in zip(CUDA_WORKLOADS, results, strict=True):
        assert w.name in text
        assert result.times["flashbsr"].median > 0
        assert all(np.isfinite(value) for value in result.metrics.values())
        assert {goal.metric for goal in w.goals} <= set(result.metrics)
    assert {w.kind for w in CUDA_WORKLOADS} == set(CUDA_KINDS)
    assert len({w.name for w in CUDA_WORKLOADS}) == len(CUDA_WORKLOADS)
    record = json.loads(json.dumps(to_json(results, session)))
    assert record["device"] == "cuda"
    assert record["limits"]["read_method"] == "torch.sum"
    assert len(record["limits"]["samples"]) == 2
    plot_results(record, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    readme_cuda = importlib.import_module("readme_cuda")
    record["machine"]["device"]["driver"] = "580.1"
    path = tmp_path / "abacus.json"
    path.write_text(json.dumps(record))
    text = readme_cuda.figures(path, record["machine"]["source_hash"])
    assert "NVIDIA Abacus" in text
    assert "changed since" not in text
    assert "| 63 x 512 and 1 x 131072 |" in text
    for names in (readme_cuda.ROWS, readme_cuda.OPTIONS, readme_cuda.SHARED, readme_cuda.BLOCKS):
        assert set(names) <= {w.name for w in CUDA_WORKLOADS}
        assert all(f"| {words} |" in text for words in names.values())
    assert all(f"| {words} |" in text for words in readme_cuda.SHAPES.values())
    assert "Verifying 4 tokens" in text
    assert "Trees of 8 drafts" in text
    assert "in one launch; apart" in text
    assert not re.search(r"[^|] - [^|]", text)  # every number was there
    assert "changed since" in readme_cuda.figures(path, "other")


def test_peers_take_part(session: CudaSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that refuses is left out; the fastest form is the one that counts."""
    monkeypatch.setattr(cuda_peers, "BACKENDS", {"flash": "MATH", "cudnn": "CUDNN_ATTENTION"})
    for name in (
        "decode-16x1024",
        "prefill-4x4096",
        "prefill-no-mask-4x4096",
        "prefill-d256-4x4096",
    ):
        (w,) = select(name, workloads=CUDA_WORKLOADS)
        result = run_cuda_workload(small(w), session)
        assert set(result.times) == {"flashbsr", "flash"}
        assert result.metrics["flash_speedup"] > 0
        assert result.note in ("flash: gqa", "flash: fold")


def test_goals_scale_with_the_read_bandwidth(
    session: CudaSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that reads less than the reference, more microseconds are allowed."""
    (w,) = select("decode-16x8192", workloads=CUDA_WORKLOADS)
    limits = {"copy_gbs": 4000.0, "read_gbs": 4550.0 / 1.04, "matmul_tflops": 700.0}
    monkeypatch.setattr(cuda_runner, "measure_limits", lambda _: {**limits, "read_method": ""})
    result = run_cuda_workload(small(w), session)
    result.metrics |= {"us": 129.0, "gbs": 4000.0}
    session.finish([result])
    assert result.metrics["us_scaled"] == pytest.approx(129.0 / 1.04)
    assert result.goals_met()
    assert result.metrics["copy_fraction"] == 1


def test_rotation_and_rest() -> None:
    """Every set has its turn, in one recording of the target's length; rest comes on demand."""
    clock, seen = HostClock(), []
    cuda_timing.measure(clock, lambda index: (seen.append(index), time.sleep(1e-3)), 3)
    assert set(seen) == {0, 1, 2}
    assert clock.recorded == 2
    assert clock.rests == 0
    samples = cuda_timing.measure(clock, lambda _: time.sleep(2e-3), compute_bound=True)
    assert clock.rests == 1
    assert len(samples.seconds) == cuda_timing.REPLAYS
    assert 2e-3 <= samples.median < 20e-3


def test_wrong_results_are_not_timed(session: CudaSession) -> None:
    gpu: Any = session.gpu
    q, k, v = (cuda_data.normal(gpu, shape, "float16") for shape in ((8,), (5, 8), (5, 8)))
    right = torch.softmax(k.double() @ q.double(), 0) @ v.double()
    w = Workload("w", "gpu-prefill", "float16", (1,), (5,), head_dim=8)
    right = torch.softmax(k.double() @ q.double() * 8**-0.5, 0) @ v.double()
    cuda_data.check_rows(gpu, "side", [cuda_data.Row(right, q, k, v)], w)
    for wrong in (right + 0.1, right * float("nan")):
        with pytest.raises(RuntimeError, match="side: wrong result"):
            cuda_data.check_rows(gpu, "side", [cuda_data.Row(wrong, q, k, v)], w)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        *(
            (f"prefill-{variant}-4x4096", {"variant": "plain"})
            for variant in ("soft-cap", "alibi", "sinks", "sigmoid")
        ),
        ("prefill-mask-4x4096", {"causal": False, "variant": "plain"}),
        ("prefill-window-4x4096", {"window_left": -1}),
        ("prefill-e4m3-4x4096", {"causal": False}),
        ("extend-4x512", {"causal": False}),
        ("tree-16x8", {"variant": "plain"}),
    ],
)
def test_a_result_without_the_option_is_wrong(
    session: CudaSession, monkeypatch: pytest.MonkeyPatch, name: str, without: dict[str, Any]
) -> None:
    """Checks see each option: data and constants are such that it matters."""
    for module in (cuda_data, cuda_prefill):  # few tokens have no logits as large as many have
        monkeypatch.setattr(module, "SOFT_CAP", 5.0)
    plan = cuda_prefill._plan
    (w,) = select(name, workloads=CUDA_WORKLOADS)
    monkeypatch.setattr(
        cuda_prefill, "_plan", lambda w, *args: plan(dataclasses.replace(w, **without), *args)
    )
    with pytest.raises(RuntimeError, match="flashbsr: wrong result"):
        run_cuda_workload(small(w), session)


def test_what_the_device_lacks_is_said(
    session: CudaSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise UnsupportedError("q_data_type", "float8_e4m3fn", "float16 or bfloat16")

    monkeypatch.setattr(cuda_prefill, "_plan", refuse)
    (w,) = select("prefill-e4m3-4x4096", workloads=CUDA_WORKLOADS)
    result = run_cuda_workload(small(w), session)
    session.finish([result])
    assert result.skipped
    assert "not run: q_data_type: got" in render_table([result], session.limits())


def test_causal_bits() -> None:
    """Each request's mask from a byte on, bottom-right aligned, rows without a gap."""
    w = Workload("w", "gpu-variants", "float16", (3, 2), (5, 2), causal=True)
    bits = np.unpackbits(cuda_prefill.causal_bits(w), bitorder="little")
    assert bits[:15].reshape(3, 5).tolist() == np.tri(3, 5, 2, dtype=int).tolist()
    assert bits[15:].tolist() == [0, 1, 0, 1, 1, 0, 0, 0, 0]


def test_what_is_bound_by_products() -> None:
    """Prefill, blocks, extensions, chunks, beside decodes too; not these, nor few tokens."""
    others = "gpu-append", "gpu-merge", "gpu-mla", "gpu-plan"
    attention = [w for w in CUDA_WORKLOADS if not w.kind.startswith(others)]
    bound = {w.name for w in attention if cuda_data.compute_bound(w)}
    prefill = {w.name for w in attention if w.name.startswith("prefill-")}
    sparse = {w.name for w in attention if w.kind == "gpu-sparse"}
    chunks = {w.name for w in attention if "chunk-" in w.name}
    extensions = {w.name for w in attention if w.name.startswith("extend-")}
    mixed = {w.name for w in attention if w.name.startswith("mixed-") and w.kv_dtype}
    assert bound == prefill | sparse | chunks | extensions | mixed


def test_mixed_batches_are_taken_apart(session: CudaSession) -> None:
    """Each half is a workload of its own; the times of both are in the result."""
    (w,) = select("mixed-4x512-60", workloads=CUDA_WORKLOADS)
    assert "batch 64, 1 to 512 queries on 4096 KV tokens" in w.describe()
    halves = [cuda_mixed._half(w, decodes=decodes) for decodes in (False, True)]
    assert [set(half.q_lens) for half in halves] == [{512}, {1}]
    assert [len(half.q_lens) for half in halves] == [4, 60] == [len(h.kv_lens) for h in halves]
    result = run_cuda_workload(small(w), session)
    metrics = result.metrics
    longer = max(metrics["prefill_us"], metrics["decode_us"])
    assert metrics["over_larger"] == pytest.approx(metrics["us"] / longer)
    both = metrics["prefill_us"] + metrics["decode_us"]
    assert metrics["apart_gain"] == pytest.approx(both / metrics["us"])
    assert set(result.times) == {"flashbsr", "prefills", "decodes"}


def test_sparse_flops_count_what_is_kept() -> None:
    """Short last blocks in both directions."""
    w = Workload("w", "gpu-sparse", "bfloat16", (33,), (50,), block=(8, 16), kept=0.5)
    blocks = cuda_sparse.random_blocks(w)
    dense = reference.bsr_mask(blocks.indptr, blocks.indices, (33, 50), (8, 16))
    assert 0 < dense.mean() < 1
    assert cuda_sparse.sparse_flops(w, blocks) == 4 * dense.sum() * 128 * 32
    assert "50% of blocks of 8 x 16" in w.describe()


def test_bytes_count_each_array_in_its_type() -> None:
    w = Workload("w", "gpu-prefill-fp8", "float8_e4m3fn", (3,), (5,))
    q, kv = 3 * 32 * 128, 2 * 5 * 8 * 128
    assert cuda_data.io_bytes(w) == q + kv + 2 * q
    mixed = dataclasses.replace(w, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    assert cuda_data.io_bytes(mixed) == 2 * q + kv + 2 * q


@pytest.mark.skipif(any(device.is_cuda for device in DEVICES), reason="there is a GPU")
def test_without_a_gpu_the_error_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda", "--only", "plan-16"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("flashbsr: error: --device: got 'cuda'; expected a")
    assert error.count("\n") == 1


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda", "--list"]) == 0
    text = capsys.readouterr().out
    assert all(w.name in text for w in CUDA_WORKLOADS)
