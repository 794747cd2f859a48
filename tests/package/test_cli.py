# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The command line, and the benchmark on problems small enough for a test."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import flashbsr
import numpy as np
import pytest
from flashbsr import _core
from flashbsr.bench import (
    WORKLOADS,
    Session,
    plot_results,
    prefill,
    render_table,
    runner,
    select,
    timing,
    to_json,
    workloads,
)
from flashbsr.bench import data as bench_data
from flashbsr.bench.timing import Budget, Side, interleave
from flashbsr.cli import main, parse_lengths
from flashbsr.info import cuda_summary
from harness import framework


def test_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashbsr", "--help"], capture_output=True, text=True, check=True
    )
    for word in ("info", "bench", "plan", "examples:"):
        assert word in done.stdout


def test_no_command_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "usage: flashbsr" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"flashbsr {flashbsr.__version__}\n"


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["version"] == flashbsr.__version__
    assert info["isa"] in info["isas"]
    assert "cpu" in info["backends"]
    assert set(info["jit"]) == {"nvrtc", "cxx"}
    assert len(info["kernels"]) == len(_core.kernels())
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert info["isa"] in text
    assert all(kernel["variant"] in text for kernel in info["kernels"])
    cuda = info["cuda"]
    assert cuda["available"] == bool(cuda["devices"])
    assert (cuda["problem"] or cuda["devices"][0]["name"]) in text
    assert sum(int(row["kernels"]) for row in cuda_summary(cuda["kernels"])) == len(cuda["kernels"])
    assert all(kernel["targets"] in text for kernel in cuda["kernels"] if kernel["image_bytes"])
    left = not all(kernel["image_bytes"] for kernel in cuda["kernels"])
    assert ("NVRTC, at first use" in text) == left


def test_cuda_kernels_are_the_rows_of_the_table() -> None:
    """Every row of cpp/instances.txt that the architectures keep, under a name of its own."""
    kernels = _core.cuda_kernels()
    if not kernels:
        pytest.skip("this build has no CUDA kernels")
    text = (Path(__file__).resolve().parents[2] / "cpp/instances.txt").read_text()
    lines = [line.split() for line in re.sub("#.*", "", text).splitlines() if line.split()]

    def products(rows: Iterable[list[str]]) -> set[tuple[str, ...]]:
        return {key for row in rows for key in itertools.product(*(f.split(",") for f in row))}

    table = products(row[:6] for row in lines)
    rare = products(row[:6] for row in lines if row[6:] == ["rare"])
    columns = ("family", "arch", "head_dim", "kv", "rows", "variant")
    for kernel in kernels:
        if kernel["head_dim_vo"] != kernel["head_dim"]:
            kernel["head_dim"] = f"{kernel['head_dim']}x{kernel['head_dim_vo']}"
    shipped = {tuple("-" if k[c] is None else str(k[c]) for c in columns) for k in kernels}
    assert shipped <= table
    assert len({kernel["name"] for kernel in kernels}) == len(kernels) == len(shipped)
    # FLASHBSR_KERNELS=common leaves the rare ones to NVRTC.
    without = {tuple("-" if k[c] is None else str(k[c]) for c in columns)
               for k in kernels if not k["image_bytes"]}  # fmt: skip
    assert without in (set(), rare & shipped)
    if {"sm_75", "sm_80", "sm_90"} <= {t for k in kernels for t in k["targets"].split()}:
        assert shipped == table


def test_cuda_summary() -> None:
    row = {"family": "f", "arch": "sm80", "variant": "plain", "targets": "sm_80", "rows": 8}
    row |= {"image_bytes": 9}
    dims = [{"head_dim": qk, "head_dim_vo": vo} for qk, vo in ((128, 128), (192, 128), (64, 64))]
    kernels = [{**row, "kv": kv, **dim} for kv in ("f16", "bf16") for dim in dims]
    nothing = dict.fromkeys(("kv", "head_dim", "head_dim_vo", "rows", "variant"))
    kernels.append(
        {"family": "op", "arch": "sm75", "targets": "sm_75", **nothing, "image_bytes": 9}
    )
    kernels.append({**row, "kv": "i8", **dims[0], "image_bytes": 0})
    folded, op, rare = cuda_summary(kernels)
    assert (rare["kv"], rare["targets"]) == ("i8", "NVRTC, at first use")
    assert folded["kv"] == "f16, bf16"
    assert folded["head_dims"] == "64, 128, 192x128"
    assert (folded["rows"], folded["kernels"]) == ("8", "6")
    assert op["head_dims"] == "-"
    assert (op["kv"], op["variant"], op["kernels"]) == ("-", "-", "1")


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("512", [512]), ("512x3,1", [512, 512, 512, 1]), (" 7 , 0x2", [7, 0, 0])],
)
def test_parse_lengths(text: str, lengths: list[int]) -> None:
    assert parse_lengths(text) == lengths


PLAN = ["plan", "--kv-lens", "512x2,8192", "--num-qo-heads", "8", "--num-kv-heads", "2"]


def test_plan_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--page-size", "16", "--causal", "--workers", "4"]) == 0
    text = capsys.readouterr().out
    assert "paged (page size 16), causal" in text
    assert sum(line.startswith("worker ") for line in text.splitlines()) == 4


def test_plan_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lanes, matrix = tmp_path / "lanes.png", tmp_path / "matrix.svg"
    shared = ["--page-size", "16", "--shared-prefix", "100"]
    assert main([*PLAN, *shared, "--out", str(lanes), "--bsr", str(matrix)]) == 0
    assert str(lanes) in capsys.readouterr().out
    assert lanes.read_bytes().startswith(b"\x89PNG")
    assert "6 columns shared" in matrix.read_text()  # 100 tokens hold 6 whole pages


@pytest.mark.parametrize("share", ["auto", "off"])
def test_plan_shows_shared_parts(
    share: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words, in the terminal and in both pictures; not where they are switched off."""
    argv = ["plan", "--kv-lens", "1280x6", "--shared-prefix", "1024", "--page-size", "16"]
    argv += ["--workers", "4", "--share-prefixes", share]
    assert main(argv) == 0
    text = capsys.readouterr().out
    on = share == "auto"
    assert ("shared    1 part of 1024 tokens over 6 requests, saves 5 loads" in text) == on
    assert ("#" in text) == on
    lanes, matrix = tmp_path / "lanes.svg", tmp_path / "matrix.svg"
    assert main([*argv, "--out", str(lanes), "--bsr", str(matrix)]) == 0
    assert ("6 requests, 1 shared part: " in lanes.read_text()) == on
    assert ("64 columns shared, 1 shared part" in matrix.read_text()) == on


@pytest.mark.parametrize(
    ("views", "printed"),
    [
        ([], ["lanes"]),
        (["--view"], ["parts", "bsr", "lanes"]),
        (["--view", "bsr", "parts"], ["bsr", "parts"]),
        (["--bsr", "matrix.svg"], []),
        (["--bsr", "matrix.svg", "--view", "parts"], ["parts"]),
    ],
)
def test_plan_views(
    views: list[str],
    printed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those that are named in their order, or all; by itself the lanes, where there is no file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "90")
    argv = ["plan", "--kv-lens", "1280x6", "--shared-prefix", "1024", "--page-size", "16"]
    assert main([*argv, "--workers", "4", *views]) == 0
    text = capsys.readouterr().out
    marks = {
        "parts": "  # s0  KV 0 to 1024  6 requests: 0-5  1 load instead of 6  5120 tokens saved\n",
        "bsr": f"\nr1 |{'#' * 32}{'.' * 8}{'1' * 8}{'.' * 32}|\n",
        "lanes": "\nworker 0 |####",
    }
    found = {name: text.find(mark) for name, mark in marks.items()}
    assert [name for name in sorted(found, key=found.__getitem__) if found[name] >= 0] == printed


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["fly"], "invalid choice: 'fly'"),
        (["info", "--yaml"], "--yaml"),
        (["plan"], "--kv-lens"),
        (["plan", "--kv-lens", "5x"], "got '5x'"),
        (["plan", "--kv-lens", "-3"], "--kv-lens"),
        (["plan", "--kv-lens", "5", "--workers", "0"], "expected a positive integer"),
        (["plan", "--kv-lens", "5,5", "--qo-lens", "1"], "--qo-lens: got 1 lengths"),
        (["plan", "--kv-lens", "5", "--num-qo-heads", "7", "--num-kv-heads", "2"], "num_qo_heads"),
        (["plan", "--kv-lens", "5", "--dtype", "int3"], "int3"),
        (["plan", "--kv-lens", "5", "--shared-prefix", "16"], "--page-size"),
        (["plan", "--kv-lens", "5", "--out", "plan.docx"], "docx"),
        (["plan", "--kv-lens", "5", "--view", "rows"], "invalid choice: 'rows'"),
        (["bench", "--only", "nothing-*"], "got 'nothing-*'"),
        (["bench", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["bench", "--device", "cuda", "--only", "decode-1024-bf16"], "got 'decode-1024-bf16'"),
        (["bench", "--json", "/nowhere/at/all.json"], "a folder that exists"),
    ],
)
def test_errors_are_one_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(argv)
    except SystemExit as stop:
        status = int(stop.code or 0)
    error = capsys.readouterr().err
    assert status == 2
    assert says in error
    assert error.startswith("flashbsr")
    assert error.count("\n") == 1


def test_bench_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    text = capsys.readouterr().out
    assert all(w.name in text for w in WORKLOADS)


def test_select() -> None:
    assert select() == WORKLOADS
    assert set(select(quick=True)) < set(WORKLOADS)
    assert [w.name for w in select("plan-16,decode-1024-*")] == [
        "decode-1024-bf16",
        "decode-1024-fp32",
        "plan-16",
    ]
    assert {w.kind for w in select("skew")} == {"skew"}


def test_names_are_unique_and_metrics_known() -> None:
    assert len({w.name for w in WORKLOADS}) == len(WORKLOADS)
    assert {w.kind for w in WORKLOADS} == set(workloads.KINDS)


@pytest.mark.parametrize("lens", [(5, 5), (3, 9), (9, 3), (0, 4), (1, 7)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [-1, 0, 2, 20])
def test_flops_count_unmasked_pairs(lens: tuple[int, int], causal: bool, window_left: int) -> None:
    q_len, kv_len = lens
    mask = np.tri(q_len, kv_len, kv_len - q_len) if causal else np.ones((q_len, kv_len))
    if window_left >= 0:
        mask -= mask * np.tri(q_len, kv_len, kv_len - q_len - window_left - 1)
    w = workloads.Workload(
        "w", "prefill", "float32", (q_len,), (kv_len,), causal=causal, window_left=window_left
    )
    assert workloads.attention_flops(w) == 4 * int(mask.sum()) * w.head_dim * w.num_qo_heads


def test_page_table_uses_every_page_once() -> None:
    pages = bench_data.page_table((1, 16, 17, 40), 16)
    assert pages.indptr.tolist() == [0, 1, 2, 4, 7]
    assert sorted(pages.indices.tolist()) == list(range(7))
    assert pages.last_page_len.tolist() == [1, 16, 1, 8]
    assert sum(workloads.equal_lengths((1, 16, 17, 40))) == 74


def test_sides_take_turns() -> None:
    order: list[str] = []
    sides = {name: Side(lambda _, name=name: order.append(name)) for name in ("a", "b")}
    samples = interleave(sides, Budget(1.0, 3, 3, calls_per_round=2))
    assert [len(s.seconds) for s in samples.values()] == [6, 6]
    assert order == ["a", "b", *(["a"] * 3 + ["b"] * 3) * 3]


def test_wrong_results_are_not_timed() -> None:
    row = (np.ones(4), np.eye(4), np.eye(4), np.float64(0.5))
    right = np.full((1, 4), 0.25)
    bench_data.check_rows("side", right, [row], "float32")
    for wrong in (right + 0.01, np.full((1, 4), np.nan)):
        with pytest.raises(RuntimeError, match="side: wrong result"):
            bench_data.check_rows("side", wrong, [row], "float32")


def small(name: str) -> workloads.Workload:
    """Shrink a named workload to what a test can wait for."""
    (w,) = select(name)
    small = dataclasses.replace(
        w,
        q_lens=tuple(min(n, 48) for n in w.q_lens[:6]),
        kv_lens=tuple(min(n, 48) if w.kind == "prefill" else min(n, 200) for n in w.kv_lens[:6]),
        num_qo_heads=4,
    )
    if w.kind == "latent":  # whose dims are the kernels'
        return small
    return dataclasses.replace(small, num_kv_heads=2, head_dim=32)


SMALL = (
    "prefill-512-fp32",
    "prefill-2048-fp16",
    "chunk-4x256-8192-fp32",
    "decode-1024-fp32",
    "zipf-1024-fp32",
    "one64k-fp32",
    "plan-16",
    "run-overhead-numpy",
)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small rotations and budgets; numbers that mean nothing, code that runs."""
    monkeypatch.setattr(runner, "ROTATE_BYTES", 1 << 20)
    monkeypatch.setattr(prefill, "ROTATE_BYTES", 1 << 20)
    monkeypatch.setattr(prefill, "WHOLE", 64)
    monkeypatch.setattr(Session, "budget", lambda *_: Budget(0.0, 1, 2))
    monkeypatch.setattr(timing, "BANDWIDTH_BYTES", 1 << 20)
    monkeypatch.setattr(timing, "MATMUL_SIZE", 64)


@pytest.mark.usefixtures("fast")
def test_bench_end_to_end(tmp_path: Path) -> None:
    session = Session(quick=True)
    results = [runner.run_workload(small(name), session) for name in SMALL]
    session.finish(results)
    table = render_table(results, session.limits())
    for result in results:
        assert result.workload.name in table
        assert all(np.isfinite(value) for value in result.metrics.values())
        assert not result.skipped
        measured = [goal.metric for goal in result.workload.goals if goal.metric != "speedup"]
        assert set(measured) <= set(result.metrics)
    record = json.loads(json.dumps(to_json(results, session)))
    assert record["machine"]["isa"] in _core.isa_levels()
    assert [r["name"] for r in record["results"]] == list(SMALL)
    plot_results(record, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("fast")
def test_bench_against_torch() -> None:
    framework("torch")
    session = Session(quick=True)
    for name in ("prefill-512-fp32", "decode-1024-fp32", "zipf-1024-fp32"):
        result = runner.run_workload(small(name), session)
        assert result.metrics["speedup"] > 0
        assert result.note.startswith("torch: ")


@pytest.mark.usefixtures("fast")
def test_bench_latents_against_torch() -> None:
    framework("torch")
    pytest.importorskip("ml_dtypes")
    result = runner.run_workload(small("mla-16x4096-bf16"), Session(quick=True))
    assert {goal.metric for goal in result.workload.goals} <= set(result.metrics)
    assert workloads.attention_flops(result.workload) == 2 * 6 * 200 * 4 * (576 + 512)


@pytest.mark.usefixtures("fast")
def test_bench_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, plot = tmp_path / "bench.json", tmp_path / "bench.svg"
    argv = ["bench", "--quick", "--only", "plan-16,run-overhead-numpy"]
    assert main([*argv, "--json", str(record), "--plot", str(plot)]) == 0
    assert "2 workloads" in capsys.readouterr().out
    found = json.loads(record.read_text())
    assert [r["name"] for r in found["results"]] == ["plan-16", "run-overhead-numpy"]
    assert plot.exists()


def test_a_reader_that_has_enough_is_no_error() -> None:
    """``flashbsr info | head``: no message about a broken pipe, and status 0."""
    program = "import time, flashbsr.cli as c, sys; time.sleep(0.3); sys.exit(c.main(['info']))"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 0
