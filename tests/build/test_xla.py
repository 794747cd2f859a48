# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The structs of cpp/xla/ffi.h are XLA's: every offset and number, against jaxlib's own header."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from toolchain import ROOT, compiler, run

# Ours: fields of ours = fields of XLA's.
STRUCTS = {
    "Version=XLA_FFI_Api_Version": "bytes=struct_size extensions=extension_start "
    "major=major_version minor=minor_version",
    "Buffer=XLA_FFI_Buffer": "bytes=struct_size extensions=extension_start type=dtype data=data "
    "rank=rank dims=dims",
    "Buffers=XLA_FFI_Args": "bytes=struct_size size=size kinds=types items=args",
    "Buffers=XLA_FFI_Rets": "bytes=struct_size size=size kinds=types items=rets",
    "Text=XLA_FFI_ByteSpan": "data=ptr size=len",
    "Scalar=XLA_FFI_Scalar": "type=dtype value=value",
    "Attributes=XLA_FFI_Attrs": "bytes=struct_size size=size kinds=types names=names items=attrs",
    "NewFailure=XLA_FFI_Error_Create_Args": "bytes=struct_size text=message code=errc",
    "GetStream=XLA_FFI_Stream_Get_Args": "bytes=struct_size context=ctx stream=stream",
    "GetDevice=XLA_FFI_DeviceOrdinal_Get_Args": "bytes=struct_size context=ctx "
    "ordinal=device_ordinal",
    "Api=XLA_FFI_Api": "bytes=struct_size version=api_version internal=internal_api "
    "new_failure=XLA_FFI_Error_Create get_stream=XLA_FFI_Stream_Get "
    "get_device=XLA_FFI_DeviceOrdinal_Get",
    "Frame=XLA_FFI_CallFrame": "bytes=struct_size extensions=extension_start api=api context=ctx "
    "stage=stage operands=args results=rets attributes=attrs",
    "Metadata=XLA_FFI_Metadata": "bytes=struct_size version=api_version traits=traits",
    "MetadataExtension=XLA_FFI_Metadata_Extension": "base=extension_base metadata=metadata",
    "Extension=decltype(XLA_FFI_Metadata_Extension::extension_base)": "bytes=struct_size "
    "kind=type next=next",
}
NUMBERS = {
    "kScalar": "XLA_FFI_AttrType_SCALAR",
    "kText": "XLA_FFI_AttrType_STRING",
    "kExecute": "XLA_FFI_ExecutionStage_EXECUTE",
    "kCapturable": "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE",
    "kMajor": "XLA_FFI_API_MAJOR",
    "1": "XLA_FFI_Extension_Metadata",
    "3": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
}
# Those of cpp/xla/node.cpp.
TYPES = {
    "F32": 11, "F16": 10, "BF16": 16, "F8E4M3FN": 20, "F8E5M2": 19, "S32": 4, "S64": 5, "U8": 6,
    "PRED": 1, "F64": 12,
}  # fmt: skip


def _source(wrong: str = "") -> str:
    lines = ["#include <cstddef>", "#include <xla/ffi/api/c_api.h>", '#include "xla/ffi.h"']
    lines.append("namespace ours = flashbsr::xla;")
    for structs, fields in STRUCTS.items():
        mine, theirs = structs.split("=")
        for field in fields.split():
            a, b = field.split("=")
            lines.append(f"static_assert(offsetof(ours::{mine}, {a}) == offsetof({theirs}, {b}));")
        # What a function of XLA's is handed has its size, too.
        if mine.startswith(("New", "Get", "Version", "Buffers", "Text", "Scalar")):
            lines.append(f"static_assert(sizeof(ours::{mine}) == sizeof({theirs}));")
    for mine, theirs in NUMBERS.items():
        scope = "" if mine.isdigit() else "ours::"
        lines.append(f"static_assert({scope}{mine} == (int){theirs});")
    for name, number in TYPES.items():
        lines.append(f"static_assert(XLA_FFI_DataType_{name} == {number});")
    lines.append("static_assert(XLA_FFI_API_MINOR >= ours::kFirstMinor);")
    return "\n".join(lines) + wrong


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("", True),
        ("\nstatic_assert(offsetof(ours::Api, more) == offsetof(XLA_FFI_Api, XLA_FFI_Stream_Get));",
         False),
    ],
)  # fmt: skip
def test_the_layouts_are_xlas(wrong: str, right: bool) -> None:
    package = find_spec("jaxlib")
    if package is None and not os.environ.get("CI"):
        pytest.skip("no jaxlib, which has XLA's header")
    assert package is not None and package.origin is not None
    include = Path(os.environ.get("XLA_INCLUDE") or Path(package.origin).parent / "include")
    command = [compiler(), "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", "-x", "c++"]
    built = run([*command, f"-I{include}", f"-I{ROOT / 'cpp'}", "-"], stdin=_source(wrong))
    assert (built.status == 0) == right, built.output


def test_the_types_of_the_test_are_those_of_the_node() -> None:
    text = (ROOT / "cpp/xla/node.cpp").read_text()
    row = text[text.index("constexpr TypeRow kTypes") : text.index("kFloat64 = 12")]
    for name, element in (
        ("F32", "kF32"), ("F16", "kF16"), ("BF16", "kBF16"), ("F8E4M3FN", "kE4M3"),
        ("F8E5M2", "kE5M2"), ("S32", "kI32"), ("S64", "kI64"), ("U8", "kU8"), ("PRED", "kBool"),
    ):  # fmt: skip
        assert f"{{{TYPES[name]}, Element::{element}}}" in row
