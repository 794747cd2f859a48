# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Every header that a GPU sees compiles alone under NVRTC, and so does every kernel template."""

from __future__ import annotations

import re
from typing import Any

import pytest
from flashbsr.jit import kernel_source as kernel_source_module
from flashbsr.jit.kernel_source import Wish, kernel_source
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
    text = re.sub(" +$", "", text, flags=re.MULTILINE)
    rows: dict[tuple[str, ...], None] = {}
    for line in text.splitlines():
        fields = line.removesuffix("rare").split() or [""] * 6
        family, archs, dims, *rest = (field.split(",") for field in fields)
        for arch in archs if family[0] else []:
            for dim in dict.fromkeys([dims[0], *(d for d in dims if "x" in d)]):
                rows[(family[0], arch, dim, *(values[0] for values in rest))] = None
    return list(rows)


@pytest.mark.parametrize("row", table_rows(), ids="-".join)
def test_shipped_kernel_compiles(row: tuple[str, ...]) -> None:
    """Ahead of time or at run time, the source of a kernel is one."""
    family, arch, head_dim, kv, rows, variant = row
    types = {"f16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
    types |= {"f32": "float32", "i8": "int8", "i4": "int4", "e2m1": "nvfp4"}
    q, _, v = kv.rpartition("x")  # f16xe4m3 says Q too
    qk, _, vo = head_dim.partition("x")
    shape: tuple[Any, ...] = (0, 0, "float16", "float16", 0, "plain")  # around attention: none
    if kv != "-":
        shape = (types[q or v], types[v])
        shape = (
            (0, 0, *shape, 0, "plain")
            if rows == "-"
            else (int(qk), int(vo or qk), *shape, int(rows), variant)
        )
    wish = Wish("kernel", family, arch, arch.replace("sm", "sm_"), *shape)
    source = kernel_source(wish, ROOT / "cpp/kernels")
    assert "@" not in source
    compiled, messages = nvrtc().compile(source, wish.target)
    assert compiled, messages


def test_both_ways_give_words_the_same_meaning() -> None:
    """CMake's table of what columns mean, and the one of kernels compiled at run time."""
    settings = (ROOT / "cmake/instances.cmake").read_text()
    meaning = dict(re.findall(r"set\(FLASHBSR_(\w+) flashbsr::([\w:]+)\)", settings))
    variants = {n.removeprefix("VARIANT_"): v for n, v in meaning.items() if n[0] == "V"}
    assert variants == kernel_source_module.VARIANTS
    tags = {v.removeprefix("DType::") for n, v in meaning.items() if n.startswith("KV_")}
    assert tags == set(kernel_source_module.TYPES.values())
