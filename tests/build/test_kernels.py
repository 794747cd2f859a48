# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The table of CUDA kernels: how CMake expands it, and what is read of ptxas. No nvcc is needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_consumer import tool
from toolchain import ROOT, Outcome, load_tool, run

REGISTERS = load_tool("kernel_registers")

# instances.cmake alone, with a compiler that notes what it was asked for.
SCRIPT = """
set(PROJECT_SOURCE_DIR {root})
set(FLASHBSR_TARGETS {archs})
list(GET FLASHBSR_TARGETS -1 FLASHBSR_HIGHEST_ARCH)
cmake_policy(VERSION 3.20)
set(FLASHBSR_KERNELS {kernels})
include({root}/cmake/instances.cmake)
flashbsr_expand_instances({table} kernels rare)
list(JOIN rare " " rare)
message(NOTICE "left to NVRTC: ${{rare}}")
foreach(kernel IN LISTS kernels)
  flashbsr_kernel_targets("${{kernel}}" "${{kernels}}" sass ptx)
  message(NOTICE "${{kernel}}: ${{sass}} +${{ptx}}")
endforeach()
"""


def expand(folder: Path, text: str, archs: str = "75;80;90", kernels: str = "all") -> Outcome:
    table, script = folder / "instances.txt", folder / "expand.cmake"
    table.write_text(text)
    script.write_text(SCRIPT.format(root=ROOT, table=table, archs=archs, kernels=kernels))
    return run([tool("cmake"), "-P", script])


def names(outcome: Outcome) -> list[str]:
    assert outcome.status == 0, outcome.output
    return re.findall(r"^(\S+\|\S*): ", outcome.output, re.MULTILINE)


def targets(folder: Path, text: str, archs: str) -> dict[str, str]:
    outcome = expand(folder, text, archs)
    assert outcome.status == 0, outcome.output
    return dict(re.findall(r"^(\w+\|\w+)\|\S*: (.*)$", outcome.output, re.MULTILINE))


def test_products(tmp_path: Path) -> None:
    text = "# a comment\n\nf sm80,sm90 64,128 bf16 8 plain  # another\ng sm75 - - - -\n"
    assert names(expand(tmp_path, text)) == [
        "f|sm80|64|bf16|8|plain",
        "f|sm90|64|bf16|8|plain",
        "f|sm80|128|bf16|8|plain",
        "f|sm90|128|bf16|8|plain",
        "g|sm75|-|-|-|-",
    ]


def test_one_ptx_for_all(tmp_path: Path) -> None:
    """Of what has no instruction of newer architectures; float8 has conversions."""
    text = "prefill sm80 64 {} 64 plain\n"
    row = "prefill|sm80"
    for kv, found in (("bf16", "80 90 +80"), ("e4m3", "80 90 +90")):
        assert targets(tmp_path, text.format(kv), "75;80;90")[row] == found.replace(" 9", ";9")
    assert targets(tmp_path, text.format("i4"), "90")[row] == "90 +90"


def test_two_head_dims(tmp_path: Path) -> None:
    found = names(expand(tmp_path, "f sm90a 64,192x128 bf16 128 plain\n", "90"))
    assert found == ["f|sm90a|64|bf16|128|plain", "f|sm90a|192x128|bf16|128|plain"]


def test_rare_rows(tmp_path: Path) -> None:
    """Wheels and the C library have all; elsewhere these are compiled when they are first used."""
    text = "f sm80 64 bf16 8 plain\nf sm80 64,128 f16 8 plain rare\n"
    rare = ["f|sm80|64|f16|8|plain", "f|sm80|128|f16|8|plain"]
    for kernels, left in (("all", ""), ("common", " ".join(rare))):
        outcome = expand(tmp_path, text, kernels=kernels)
        assert names(outcome) == ["f|sm80|64|bf16|8|plain", *rare]
        assert f"left to NVRTC: {left}\n" in outcome.output
    few = expand(tmp_path, text, kernels="few")
    assert few.status != 0
    assert "FLASHBSR_KERNELS: got 'few'; expected all or common" in few.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nf sm80 64 bf16 8", "instances.txt:2: got 5 columns; expected 6"),
        ("f sm80 64 bf16 8 plain\nf sm80 32,64 bf16 8 plain", "instances.txt:2: got 'f sm80 64"),
        ("f sm80 64,64 bf16 8 plain", "a second time"),
        ("f sm80 64 bf16 8 plain\nf sm80 64 bf16 8 plain rare", "a second time"),
        ("f sm80 64 bf16 8 plain seldom", "got 7 columns; expected 6"),
        ("f sm80 64 bf17 8 plain", "instances.txt:1: kv: got 'bf17'"),
        ("f sm80 64 bf16 8 fancy", "variant: got 'fancy'"),
        ("f 80 64 bf16 8 plain", "arch: got '80'; expected sm75"),
        ("f sm90b 64 bf16 8 plain", "arch: got 'sm90b'; expected sm75, sm80, sm90a"),
        ("f sm80 d64 bf16 8 plain", "head_dim: got 'd64'; expected a number, two such as 192x128"),
        ("f sm80 192x bf16 8 plain", "head_dim: got '192x'; expected a number, two"),
        ("f sm80 64 bf16 64x64 plain", "rows: got '64x64'; expected a number or -"),
        ("f; sm80 64 bf16 8 plain", "family: got"),
        ("- sm80 64 bf16 8 plain", "family: got '-'"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    outcome = expand(tmp_path, text)
    assert outcome.status != 0
    assert message in " ".join(outcome.output.split())


TABLE = """
decode sm80,sm90 64 bf16 8 plain
prefill sm75 64 f16 64 plain
prefill sm80 64 bf16 64 plain
op sm75 - - - -
own sm90a 64 bf16 128 plain
"""


@pytest.mark.parametrize(
    ("archs", "expected"),
    [
        ("75;80;90", {"decode|sm80": "80 +0", "decode|sm90": "90 +90", "prefill|sm75": "75 +0",
                      "prefill|sm80": "80;90 +80", "op|sm75": "75;80;90 +90",
                      "own|sm90a": "90a +0"}),
        ("90", {"decode|sm80": " +0", "decode|sm90": "90 +90", "prefill|sm75": " +0",
                "prefill|sm80": "90 +90", "op|sm75": "90 +90", "own|sm90a": "90a +0"}),
        ("75;80", {"decode|sm80": "80 +80", "decode|sm90": " +0", "prefill|sm75": "75 +0",
                   "prefill|sm80": "80 +80", "op|sm75": "75;80 +80", "own|sm90a": " +0"}),
        ("89;120", {"decode|sm80": "89 +0", "decode|sm90": "120 +120", "prefill|sm75": " +0",
                    "prefill|sm80": "89;120 +89", "op|sm75": "89;120 +120", "own|sm90a": " +0"}),
    ],
    ids=lambda value: value.replace(";", "-") if isinstance(value, str) else "",
)  # fmt: skip
def test_targets(tmp_path: Path, archs: str, expected: dict[str, str]) -> None:
    """Machine code up to the family's next row; PTX with the last. An 'a' is for one chip alone."""
    assert targets(tmp_path, TABLE, archs) == expected


LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one_d64' for 'sm_80'
ptxas info    : Function properties for one_d64
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, 128 bytes smem, 800 bytes cmem[0]
ptxas info    : Compiling entry function 'one_d64' for 'sm_90'
ptxas info    : Function properties for one_d64
    {stack} bytes stack frame, {spill} bytes spill stores, {spill} bytes spill loads
ptxas info    : Used 112 registers, used 1 barriers
"""


def test_a_row_of_one_chip_takes_nothing_over(tmp_path: Path) -> None:
    """Later chips cannot run it: the family's other rows go on as without it."""
    text = "f sm80 64 bf16 64 plain\nf sm90a 64 bf16 128 plain\n"
    found = targets(tmp_path, text, "80;90;120")
    assert found == {"f|sm80": "80;90;120 +120", "f|sm90a": "90a +0"}


@pytest.fixture
def build(tmp_path: Path) -> Path:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/manifest.txt").write_text("nvcc 13.0.88\none_d64\n")
    (tmp_path / "kernels/gone_d64.log").write_text("of a row that was removed")
    (tmp_path / "kernels/one_d64.log").write_text(LOG.format(stack=0, spill=0))
    return tmp_path


def test_registers_are_read_and_compared(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = build / "registers.md"
    argv = [str(build), "--table", str(table)]
    assert REGISTERS.main(argv) == 0
    text = table.read_text()
    assert "| `one_d64` | sm_80 | 96 | 128 | 0 | 0 | 0 |" in text
    assert "| `one_d64` | sm_90 | 112 | 0 | 0 | 0 | 0 |" in text
    assert REGISTERS.main([*argv, "--check"]) == 0
    table.write_text(text.replace("| 112 |", "| 111 |"))
    assert REGISTERS.main([*argv, "--check"]) == 1
    assert "stale" in capsys.readouterr().out


def test_rare_kernels_may_be_missing(build: Path) -> None:
    """Of a build that leaves them to NVRTC; of another a row without a kernel is a problem."""
    table = build / "registers.md"
    argv = [str(build), "--table", str(table)]
    assert REGISTERS.main(argv) == 0
    table.write_text(table.read_text() + "| `rare_d64` | sm_90 | 112 | 0 | 0 | 0 | 0 |\n")
    cache = build / "CMakeCache.txt"
    for kernels, status in (("common", 0), ("all", 1)):
        cache.write_text(f"X:STRING=1\nFLASHBSR_KERNELS:STRING={kernels}\nY:STRING=2\n")
        assert REGISTERS.main([*argv, "--check"]) == status


def test_a_spill_fails(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (build / "kernels/one_d64.log").write_text(LOG.format(stack=16, spill=24))
    assert REGISTERS.main([str(build), "--table", str(build / "registers.md")]) == 1
    assert "spills: one_d64 for sm_90: 24 + 24 bytes" in capsys.readouterr().out


def test_another_compiler_is_not_compared(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = build / "registers.md"
    argv = [str(build), "--table", str(table)]
    assert REGISTERS.main(argv) == 0
    (build / "kernels/manifest.txt").write_text("nvcc 12.4.131\none_d64\n")
    (build / "kernels/one_d64.log").write_text(LOG.format(stack=0, spill=0).replace("96", "97"))
    assert REGISTERS.main([*argv, "--check"]) == 0
    assert "the table is CUDA 13.0's, this is 12.4's" in capsys.readouterr().out
    (build / "kernels/manifest.txt").write_text("nvrtc 13.0\none_d64\n")
    assert REGISTERS.main([*argv, "--check"]) == 0
    assert "this is 13.0 (NVRTC)'s" in capsys.readouterr().out
    assert REGISTERS.main(argv) == 0
    assert REGISTERS.main([*argv, "--check"]) == 0
    assert "the table is" not in capsys.readouterr().out


def test_a_build_without_reports_fails(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (build / "kernels/one_d64.log").unlink()
    assert REGISTERS.main([str(build)]) == 2
    assert "no report of ptxas" in capsys.readouterr().out
    (build / "kernels/manifest.txt").unlink()
    assert REGISTERS.main([str(build)]) == 2
    assert "FLASHBSR_CUDA=ON" in capsys.readouterr().out


def test_the_table_in_the_tree_has_every_kernel_and_no_spill() -> None:
    """CI compares the numbers with a build; names and spills are seen without one."""
    rows = re.findall(r"^\| `(\w+)` \| sm_\d+ \|.*\| (\d+) \| (\d+) \|$",
                      REGISTERS.TABLE.read_text(), re.MULTILINE)  # fmt: skip
    assert rows
    assert all(spills == ["0", "0"] for _, *spills in rows)
