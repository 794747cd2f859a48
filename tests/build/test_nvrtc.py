# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Every header that a GPU sees compiles alone under NVRTC, and so does every kernel template."""

from __future__ import annotations

import re

import pytest
from nvrtc import nvrtc
from toolchain import INCLUDE, ROOT, load_tool

LAYERING = load_tool("check_layering")
TARGETS = ("sm_75", "sm_80", "sm_89", "sm_90a")
HEADERS = sorted(
    path.relative_to(INCLUDE).as_posix()
    for path in INCLUDE.rglob("*.h")
    if LAYERING.is_freestanding(path.relative_to(INCLUDE / "flashbsr"))
)
# Of one architecture: the instructions are no other's.
HOPPER = re.compile(r"flashbsr/(ptx/(wgmma|tma)\w*\.h|kernel/sm90a/)")
EMPTY_KERNEL = 'extern "C" __global__ void kernel() {}\n'


def test_headers_were_found() -> None:
    assert "flashbsr/config.h" in HEADERS
    assert "flashbsr/core/plan.h" in HEADERS
    assert "flashbsr/core/error.h" not in HEADERS
    assert {name.split("/")[1] for name in HEADERS} >= {"core", "variant", "ptx", "tile", "kernel"}
    hopper = {name for name in HEADERS if HOPPER.match(name)}
    assert hopper > {"flashbsr/ptx/wgmma.h", "flashbsr/ptx/tma.h", "flashbsr/kernel/sm90a/kernel.h"}


def targets_of(header: str) -> tuple[str, ...]:
    return ("sm_90a",) if HOPPER.match(header) else TARGETS


@pytest.mark.parametrize(
    ("header", "target"), [(header, target) for header in HEADERS for target in targets_of(header)]
)
def test_header_compiles_alone(header: str, target: str) -> None:
    source = f"#include <{header}>\n#include <{header}>\n{EMPTY_KERNEL}"
    compiled, messages = nvrtc().compile(source, target)
    assert compiled, messages
    assert "warning" not in messages, messages


def test_broken_source_fails() -> None:
    compiled, messages = nvrtc().compile(f"#include <vector>\n{EMPTY_KERNEL}", "sm_80")
    assert not compiled
    assert "vector" in messages


def table_rows() -> list[tuple[str, ...]]:
    """The first kernel of every line of cpp/instances.txt, for each architecture and head dims
    of two numbers."""
    text = re.sub("#.*", "", (ROOT / "cpp/instances.txt").read_text())
    rows: dict[tuple[str, ...], None] = {}
    for line in text.splitlines():
        family, archs, dims, *rest = (field.split(",") for field in line.split() or [""] * 6)
        for arch in archs if family[0] else []:
            for dim in dict.fromkeys([dims[0], *(d for d in dims if "x" in d)]):
                rows[(family[0], arch, dim, *(values[0] for values in rest))] = None
    return list(rows)


@pytest.mark.parametrize("row", table_rows(), ids="-".join)
def test_shipped_kernel_compiles(row: tuple[str, ...]) -> None:
    """Ahead of time or at run time, the source of a kernel is one."""
    family, arch, head_dim, kv, rows, variant = row
    templates = [ROOT / f"cpp/kernels/{name}.cu.in" for name in (f"{family}_{arch}", family)]
    source = next(path for path in templates if path.exists()).read_text()
    settings = (ROOT / "cmake/instances.cmake").read_text()
    meaning = dict(re.findall(r"set\(FLASHBSR_(\w+) (flashbsr::[\w:]+)\)", settings))
    for name, value in {
        "NAME": "kernel",
        "ARCH": arch.removeprefix("sm").rstrip("a"),
        "HEAD_DIM": head_dim.partition("x")[0],
        "HEAD_DIM_VO": head_dim.rpartition("x")[2],
        "ROWS": rows,
        "KV": meaning.get(f"KV_{kv}", ""),
        "VARIANT": meaning.get(f"VARIANT_{variant}", ""),
    }.items():
        source = source.replace(f"@{name}@", value)
    assert "@" not in source
    # nvcc takes a lambda in a device function for one of the device, NVRTC where it is told to.
    option = "--device-as-default-execution-space"
    compiled, messages = nvrtc().compile(source, arch.replace("sm", "sm_"), option)
    assert compiled, messages
