# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A step of the build: the wheel's bill of materials, which PEP 770 puts into ``.dist-info/sboms``.

    python sbom.py flashbsr.cdx.json --version 0.1.0 --compiler 'GNU 14.2.1' --cuda 'nvrtc 12.8'

CycloneDX 1.6: what others wrote that is in the compiled module, and the compilers that made it. It
has no date and no random serial number, so that two builds of the same sources are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

# nanobind is linked statically; its hash map is a copy of headers that states no version.
NOTES = {
    "nanobind": ("BSD-3-Clause", "the bindings, linked statically"),
    "robin-map": ("MIT", "headers of the hash map that comes with nanobind"),
}


def component(name: str, number: str | None) -> dict[str, Any]:
    """Describe a library that is in the module."""
    license_id, note = NOTES[name]
    found = {
        "type": "library",
        "bom-ref": name,
        "name": name,
        "description": note,
        "scope": "required",
        "licenses": [{"license": {"id": license_id}}],
    }
    if number:
        found |= {"version": number, "purl": f"pkg:pypi/{name}@{number}"}
    return found


def document(number: str, compiler: str, cuda: str) -> dict[str, Any]:
    """Give the whole bill of materials; `cuda` is empty where there are no CUDA kernels."""
    tools = [compiler, *([cuda] if cuda else [])]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": "flashbsr",
                "name": "flashbsr",
                "version": number,
                "purl": f"pkg:pypi/flashbsr@{number}",
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
            "tools": {
                "components": [
                    {"type": "application", "name": name, "version": text}
                    for name, _, text in (tool.partition(" ") for tool in tools)
                ]
            },
        },
        "components": [
            component("nanobind", version("nanobind")),
            component("robin-map", None),
        ],
        "dependencies": [
            {"ref": "flashbsr", "dependsOn": ["nanobind"]},
            {"ref": "nanobind", "dependsOn": ["robin-map"]},
            {"ref": "robin-map"},
        ],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--version", required=True, help="of flashbsr")
    parser.add_argument("--compiler", required=True, help="of C++, and its version")
    parser.add_argument("--cuda", default="", help="of kernels, and its version")
    args = parser.parse_args(argv)
    text = json.dumps(document(args.version, args.compiler, args.cuda), indent=1) + "\n"
    if not args.output.exists() or args.output.read_text() != text:
        args.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
