# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a wheel is what may be published: with kernels, for every Linux, small, and nothing else.

    python tools/check_wheel.py wheelhouse/*.whl

A release that has no CUDA kernels, or bundles a library, or runs only where it was built, is an
error: none of that would show before a user's first run.
"""

from __future__ import annotations

import argparse
import re
import struct
import sys
import zipfile
from pathlib import Path

MEGABYTES = 25
POLICY = (2, 28)  # glibc of manylinux_2_28
SBOM = ".dist-info/sboms/flashbsr.cdx.json"
KERNELS = 150  # of cpp/instances.txt, at least; some have images for several architectures
FATBIN = bytes.fromhex("50ed55ba")
NEEDED = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1",
          "libstdc++.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}  # fmt: skip
PARTS = (
    "flashbsr/_core.pyi",
    "flashbsr/include/flashbsr/config.h",
    "flashbsr/kernels/decode.cu.in",
    "flashbsr/py.typed",
)


class Elf:
    """Sections of a shared object of 64 bits, little-endian."""

    def __init__(self, content: bytes) -> None:
        if content[:6] != b"\x7fELF\x02\x01":
            raise ValueError("no shared object of Linux")
        (offset,) = struct.unpack_from("<Q", content, 0x28)
        size, count, names = struct.unpack_from("<HHH", content, 0x3A)
        headers = [struct.unpack_from("<IIQQQQIIQQ", content, offset + i * size)
                   for i in range(count)]  # fmt: skip
        texts = content[headers[names][4] :][: headers[names][5]]
        self.sections = {
            texts[h[0] : texts.index(b"\0", h[0])].decode(): content[h[4] : h[4] + h[5]]
            for h in headers
            if h[1] != 8  # NOBITS
        }

    def needed(self) -> list[str]:
        """Name the libraries that it is linked with."""
        texts = self.sections[".dynstr"]
        entries = struct.iter_unpack("<qQ", self.sections[".dynamic"])
        return [texts[at : texts.index(b"\0", at)].decode() for tag, at in entries if tag == 1]

    def newest_glibc(self) -> tuple[int, ...]:
        """Name the newest version of a symbol of glibc."""
        found = re.findall(rb"\0GLIBC_(\d+(?:\.\d+)+)", self.sections[".dynstr"])
        versions = [tuple(int(x) for x in text.decode().split(".")) for text in found]
        return max(versions, default=(0,))


def check(path: Path) -> tuple[str, list[str]]:
    """Look at one wheel; returns what to say of it, and what is wrong."""
    problems = []
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        modules = [name for name in names if re.fullmatch(r"flashbsr/_core\..*so", name)]
        if len(modules) != 1:
            return "", [f"{len(modules)} compiled modules; expected one"]
        elf = Elf(wheel.read(modules[0]))
    problems += [f"{part} is missing" for part in PARTS if part not in names]
    if not any(name.endswith(SBOM) for name in names):
        problems.append(f"*{SBOM} is missing")
    others = [name for name in names if re.search(r"\.so(\.|$)", name) and name not in modules]
    problems += [f"{name} is bundled" for name in others]
    problems += [f"linked with {name}" for name in elf.needed() if name not in NEEDED]
    kernels = elf.sections.get(".nv_fatbin", b"").count(FATBIN)
    if kernels < KERNELS:
        problems.append(f"{kernels} CUDA kernels; expected {KERNELS} or more")
    glibc = elf.newest_glibc()
    if glibc > POLICY:
        problems.append("needs glibc {}.{}; expected {}.{} at most".format(*glibc[:2], *POLICY))
    if "manylinux_{}_{}_".format(*POLICY) not in path.name:
        problems.append("its name is not manylinux_{}_{}'s: auditwheel repair".format(*POLICY))
    size = path.stat().st_size / 1e6
    if size > MEGABYTES:
        problems.append(f"{size:.1f} MB; expected {MEGABYTES} at most")
    version = ".".join(map(str, glibc))
    return f"{size:.1f} MB, {kernels} CUDA kernels, glibc {version}, {modules[0]}", problems


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", type=Path, nargs="+")
    failed = 0
    for path in parser.parse_args(argv).wheels:
        try:
            facts, problems = check(path)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            facts, problems = "", [f"cannot be read: {error!r}"]
        print(f"{path.name}: {facts}")
        for problem in problems:
            print(f"  {problem}")
        failed += bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
