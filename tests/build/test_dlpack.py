# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The exchange table of cpp/bind/exchange.h is DLPack's: every offset, against its own header."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from toolchain import ROOT, compiler, run

SOURCE = """
#include <cstddef>
#include <dlpack/dlpack.h>
#include "bind/exchange.h"
using flashbsr::bind::ExchangeHeader;
using Official = DLPackExchangeAPI;
using Api = flashbsr::bind::ExchangeApi<DLTensor>;
static_assert(sizeof(ExchangeHeader) == sizeof(DLPackExchangeAPIHeader));
static_assert(offsetof(ExchangeHeader, major) == offsetof(DLPackExchangeAPIHeader, version.major));
static_assert(offsetof(ExchangeHeader, minor) == offsetof(DLPackExchangeAPIHeader, version.minor));
static_assert(offsetof(ExchangeHeader, previous) == offsetof(DLPackExchangeAPIHeader, prev_api));
static_assert(offsetof(Api, header) == offsetof(Official, header));
static_assert(offsetof(Api, {field}) == offsetof(Official, dltensor_from_py_object_no_sync));
static_assert(sizeof(Api) <= sizeof(Official));
DLPackDLTensorFromPyObjectNoSync describe(const Api& api) {{ return api.describe; }}
"""


@pytest.mark.parametrize(("field", "right"), [("describe", True), ("others", False)])
def test_the_offsets_are_the_official_ones(field: str, right: bool) -> None:
    package = find_spec("tvm_ffi")
    if package is None and not os.environ.get("CI"):
        pytest.skip("no apache-tvm-ffi, which has dlpack.h")
    assert package is not None and package.origin is not None
    include = Path(package.origin).parent / "include"
    command = [compiler(), "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", "-x", "c++"]
    built = run([*command, f"-I{include}", f"-I{ROOT / 'cpp'}", "-"],
                stdin=SOURCE.format(field=field))  # fmt: skip
    assert (built.status == 0) == right, built.output
