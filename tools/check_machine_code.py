# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Disassembles the Hopper kernels of a build and checks what makes them fast.

    python tools/check_machine_code.py build/cuda

Every `hopper` kernel has asynchronous products (HGMMA, QGMMA of float8) and copies by the tensor
memory accelerator (UTMALDG), nothing in local memory (LDL, STL), and no note of ptxas that it had
to wait for each product (C7510 to C7520 in the kernel's .log). Between the instructions of one
product of a `plain` kernel no matrix descriptor comes from a vector register (R2UR): that stalls.
Products of more than eight instructions (head dims above 128) have more descriptors than there are
uniform registers; theirs are reported only.
Needs cuobjdump and nvdisasm: of the toolkit, or ``pip install 'flashbsr[disassembly]'``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kernel_registers import natural

LONG_PRODUCT = 8  # instructions
FUNCTION = re.compile(r"^\s*Function : (\w+)$", re.MULTILINE)
# /*01f0*/  @!P0 BRA 0x18ef0 ;
INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)([^;\n]*);", re.MULTILINE
)
# ptxas serialises the products of a function where registers of one are in use between them.
SERIALISED = re.compile(r"\(C75(?:1\d|20)\)[^\n]*")
PRODUCTS = ("HGMMA", "QGMMA")
LOCAL = ("LDL", "STL")


class CodeError(RuntimeError):
    """What cannot be read."""


@dataclass(frozen=True)
class Product:
    """A group of asynchronous instructions, up to the one that closes it."""

    kind: str
    length: int
    moves: int  # R2UR between them


@dataclass(frozen=True)
class Code:
    """A kernel's machine code."""

    kernel: str
    counts: Counter[str]
    products: tuple[Product, ...]

    def row(self) -> str:
        """Print as a line of the report."""
        lengths = " ".join(f"{p.length}" + f"/{p.moves}" * bool(p.moves) for p in self.products)
        local = sum(self.counts[name] for name in LOCAL)
        total = sum(self.counts.values())
        return f"{self.kernel:<44} {total:>6} {self.counts['UTMALDG']:>4} {local:>6}  {lengths}"


HEADING = (
    f"{'kernel':<44} {'instr.':>6} {'TMA':>4} {'local':>6}  instructions of each product[/R2UR]"
)


def parse(text: str) -> list[Code]:
    """Read cuobjdump's listing: functions and their instructions, in the order of addresses."""
    found = []
    parts = FUNCTION.split(text)[1:]
    for kernel, body in zip(parts[::2], parts[1::2], strict=True):
        counts: Counter[str] = Counter()
        products = []
        length = moves = 0
        for name, rest in INSTRUCTION.findall(body):
            counts[name] += 1
            if name in PRODUCTS:
                length += 1
                if "gsb0" in rest:  # the barrier of a group: its last instruction
                    products.append(Product(name, length, moves))
                    length = moves = 0
            elif name == "R2UR" and length:
                moves += 1
        if length:
            raise CodeError(f"{kernel}: a product without an end")
        found.append(Code(kernel, counts, tuple(products)))
    return found


def check(code: Code, log: str) -> list[str]:
    """Say what is wrong with a kernel, given what ptxas said of it."""
    wanted = "QGMMA" if "_e4m3_" in code.kernel else "HGMMA"
    problems = [f"no {name}" for name in (wanted, "UTMALDG") if not code.counts[name]]
    problems += [f"{code.counts[name]} {name}" for name in LOCAL if code.counts[name]]
    problems += [f"products wait for each other {note[0]}" for note in SERIALISED.finditer(log)]
    moves = sum(product.moves for product in code.products if product.length <= LONG_PRODUCT)
    if moves and code.kernel.endswith("_plain"):
        problems.append(f"{moves} R2UR inside of products")
    return [f"{code.kernel}: {problem}" for problem in problems]


def find_cuobjdump() -> str:
    """Prefer the Python package, whose version is pinned; nvdisasm lies beside it."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("cu*/bin/cuobjdump"), reverse=True):
            if path.with_name("nvdisasm").exists():
                return str(path)
    path_found = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")
    if path_found is None:
        raise CodeError("no cuobjdump: pip install 'flashbsr[disassembly]'")
    return path_found


def disassemble(cuobjdump: str, fatbin: Path) -> str:
    """List every image of a fatbin, which is compressed."""
    done = subprocess.run(
        [cuobjdump, "-sass", str(fatbin)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CodeError(f"{fatbin.name}: cuobjdump failed: {done.stderr.strip()}")
    return done.stdout


def read_build(build: Path, cuobjdump: str) -> list[tuple[Code, str]]:
    """Disassemble the Hopper kernels of a build; each with its log."""
    manifest = build / "kernels/manifest.txt"
    if not manifest.exists():
        raise CodeError(f"{manifest} is missing; expected a build with FLASHBSR_CUDA=ON")
    names = [
        name
        for name in manifest.read_text().split("\n")[1:]
        if name.startswith(("hopper_", "mixed_", "latent_")) and "_sm90a_" in name
    ]
    if not names:
        raise CodeError("no Hopper kernels; expected a build whose FLASHBSR_CUDA_ARCHS has 90")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        read = partial(read_kernel, build / "kernels", cuobjdump)
        return list(pool.map(read, sorted(names, key=natural)))


def read_kernel(folder: Path, cuobjdump: str, name: str) -> tuple[Code, str]:
    """Disassemble a kernel."""
    fatbin = folder / f"{name}.fatbin"
    if not fatbin.exists():
        raise CodeError(f"{fatbin} is missing; build the CUDA kernels first")
    codes = parse(disassemble(cuobjdump, fatbin))
    if [code.kernel for code in codes] != [name]:
        raise CodeError(f"{fatbin.name}: expected one image of one kernel")
    return codes[0], fatbin.with_suffix(".log").read_text()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path, help="a build directory with FLASHBSR_CUDA=ON")
    parser.add_argument("--cuobjdump", help="default: pip's package, then the toolkit's")
    args = parser.parse_args(argv)
    try:
        kernels = read_build(args.build, args.cuobjdump or find_cuobjdump())
    except (OSError, CodeError) as error:
        print(f"machine code: {error}")
        return 2
    print(HEADING)
    for code, _ in kernels:
        print(code.row())
    problems = [problem for code, log in kernels for problem in check(code, log)]
    for problem in problems:
        print(problem)
    print(f"machine code: {len(kernels)} kernels, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
