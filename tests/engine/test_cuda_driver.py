# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What the module makes of a driver that fails, an old one, one with GPUs. All are fakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from flashbsr import _core
from harness import needs_cxx
from toolchain import ROOT, compiler, run

if not _core.cuda_kernels():
    pytest.skip("this build has no CUDA kernels", allow_module_level=True)

pytestmark = needs_cxx  # for the fakes
SYMBOLS = re.findall(r'"(cu[A-Z]\w*)"\);', (ROOT / "cpp/cuda/driver.cpp").read_text())
# What cuda.h calls them: CU_DEVICE_ATTRIBUTE_...
ATTRIBUTES = {75: "major", 76: "minor", 16: "sms", 97: "smem", 81: "smem_sm", 38: "l2"}
GPUS = [
    {"name": "Fake H200", "major": 9, "minor": 0, "sms": 132, "smem": 232448, "l2": 52428800},
    {"name": "Fake T4", "major": 7, "minor": 5, "sms": 40, "smem": 65536, "l2": 4194304},
]
FAKE = """
#include <stdio.h>
#include <string.h>
int cuInit(unsigned flags) {{ return {init}; }}
int cuDriverGetVersion(int *version) {{ *version = 13000; return 0; }}
int cuGetErrorName(int e, const char **s) {{ *s = "CUDA_ERROR_FAKE"; return 0; }}
int cuGetErrorString(int e, const char **s) {{ *s = "as asked"; return 0; }}
int cuDeviceGetCount(int *count) {{ *count = {count}; return 0; }}
int cuDeviceGet(int *device, int i) {{ *device = i; return 0; }}
int cuDeviceGetName(char *name, int size, int device) {{
  static const char *const kNames[] = {{{names}}};
  strncpy(name, kNames[device], size);
  return 0;
}}
int cuDeviceTotalMem_v2(size_t *bytes, int device) {{ *bytes = (size_t)1 << 34; return 0; }}
int cuDeviceGetAttribute(int *value, int attribute, int device) {{
  switch (attribute) {{
{cases}
  }}
  return 1;
}}
"""


def answers(folder: Path, *, init: int = 0, gpus: list[dict] = GPUS, without: str = "") -> dict:
    """Start a process whose libcuda.so.1 is a fake, and ask the module."""
    cases = ""
    for number, name in ATTRIBUTES.items():
        values = ", ".join(str(gpu.get(name, 1)) for gpu in gpus) or "0"
        cases += f"    case {number}: *value = (int[]){{{values}}}[device]; return 0;\n"
    names = ", ".join(f'"{gpu["name"]}"' for gpu in gpus) or '""'
    source = FAKE.format(init=init, count=len(gpus), names=names, cases=cases)
    for symbol in SYMBOLS:
        if symbol != without and f"int {symbol}(" not in source:
            source += f"int {symbol}(void) {{ return 1; }}\n"
    library = folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-fno-builtin", "-w", "-o", library]
    cc = [compiler(), "-x", "c", "-", *flags]
    built = run(cc, stdin=source)
    assert built.status == 0, built.output
    script = (
        "import json; from flashbsr import _core; "
        "print(json.dumps([_core.cuda_problem(), _core.cuda_devices()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    problem, devices = json.loads(done.stdout)
    return {"problem": problem, "devices": devices}


def test_symbols_were_found() -> None:
    assert {"cuInit", "cuLibraryLoadData", "cuLaunchKernelEx"} <= set(SYMBOLS)


def test_devices(tmp_path: Path) -> None:
    found = answers(tmp_path)
    assert found["problem"] == ""
    assert [d["name"] for d in found["devices"]] == ["Fake H200", "Fake T4"]
    assert [d["compute_capability"] for d in found["devices"]] == [[9, 0], [7, 5]]
    assert [d["sm_count"] for d in found["devices"]] == [132, 40]
    assert [d["memory_bytes"] for d in found["devices"]] == [1 << 34] * 2
    targets = [kernel["targets"].split() for kernel in _core.cuda_kernels()]
    turing = sum("sm_75" in t for t in targets)
    assert found["devices"][1]["kernels"] <= turing
    hopper = sum(bool({"sm_90", "sm_90a"} & set(t)) for t in targets)
    if hopper:
        assert found["devices"][0]["kernels"] == hopper


def test_no_device(tmp_path: Path) -> None:
    assert answers(tmp_path, gpus=[]) == {
        "problem": "the CUDA driver sees no device",
        "devices": [],
    }


def test_driver_that_fails(tmp_path: Path) -> None:
    found = answers(tmp_path, init=999)
    assert found["problem"] == "cuInit: CUDA_ERROR_FAKE (as asked)"
    assert found["devices"] == []


def test_old_driver(tmp_path: Path) -> None:
    found = answers(tmp_path, without="cuLibraryLoadData")
    assert "too old, it lacks cuLibraryLoadData; CUDA 12.0" in found["problem"]
    assert found["devices"] == []
