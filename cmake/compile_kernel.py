# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A step of the build: one CUDA kernel, by nvcc or, without a toolkit, by NVRTC of Python packages.

    python compile_kernel.py SOURCE.cu OUTPUT.fatbin --include include --sass 80 90 --ptx 90
        --compiler 'nvcc 13.0.88' --nvcc /usr/local/cuda/bin/nvcc --ccbin g++
        --compiler 'nvrtc 12.8'

Writes a fatbin of compressed machine code and PTX, ptxas' report (.log, for
tools/kernel_registers.py), and a digest of all that decided it (.key). Where that has not changed,
nothing is compiled, whatever paths or times have: isolated builds move the compiler each time. A
folder of ``--cache`` serves builds for several Pythons.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FLAGS = {
    # An unknown host compiler preprocesses device code as well as any.
    "nvcc": ("-std=c++20", "-O3", "-Xptxas=-v", "-allow-unsupported-compiler"),
    # As in python/flashbsr/jit/nvrtc.py: kernels compiled ahead of time and at run time are one.
    "nvrtc": ("-std=c++20", "-default-device", "--ptxas-options=-v"),
}
# Before the toolkit's headers: what nvcc includes of these, in short.
NVCC_HEADERS = Path(__file__).parent / "nvcc"
INCLUDE = re.compile(r"^\s*#\s*include\s*[<\"](flashbsr/[^>\"]+)[>\"]", re.MULTILINE)
PARTS = (".fatbin", ".log")


def dependencies(source: str, include: Path) -> list[Path]:
    """Every header that a source includes, directly or not: all of them are flashbsr's."""
    found: set[Path] = set()
    texts = [source]
    while texts:
        for name in INCLUDE.findall(texts.pop()):
            path = include / name
            if path not in found:
                found.add(path)
                texts.append(path.read_text())
    return sorted(found)


def key_of(args: argparse.Namespace, headers: list[Path]) -> str:
    """Digest of what decides the result: compiler, flags, targets, text."""
    settings = (args.compiler, *FLAGS[args.kind], args.compress, *args.sass, args.ptx)
    digest = hashlib.sha256("\0".join(settings).encode())
    here = Path(__file__)
    steps = (here, here.with_name("nvrtc_packages.py"), NVCC_HEADERS / "cuda_runtime.h")
    for path in (args.source, *headers, *steps):
        content = path.read_bytes()
        digest.update(f"\0{path.name} {len(content)}\0".encode() + content)
    return digest.hexdigest()


def compile_by_nvcc(args: argparse.Namespace) -> str:
    targets = []
    for target in args.sass:
        # From the PTX that is kept, where that is of an older architecture.
        older = args.ptx != "0" and int(args.ptx) < int(target.rstrip("a"))
        targets += ["-gencode", f"arch=compute_{args.ptx if older else target},code=sm_{target}"]
    if args.ptx != "0":
        targets += ["-gencode", f"arch=compute_{args.ptx},code=compute_{args.ptx}"]
    command = [args.nvcc, "-fatbin", *targets, *FLAGS["nvcc"], *args.compress.split()]
    command += ["-ccbin", args.ccbin, f"-I{NVCC_HEADERS}", f"-I{args.include}"]
    command += [args.source, "-o", args.output]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{done.stdout}{args.source.stem}: nvcc failed ({done.returncode})")
    return done.stdout


def compile_kernel(args: argparse.Namespace) -> str:
    """Write the fatbin; returns the report."""
    if args.kind == "nvcc":
        return compile_by_nvcc(args)
    # Where it is needed only: this script starts once per kernel.
    from nvrtc_packages import Images, compile_by_nvrtc, find

    wanted = Images(args.source, args.include, tuple(args.sass), args.ptx, FLAGS["nvrtc"])
    content, log = compile_by_nvrtc(find(), wanted)
    args.output.write_bytes(content)
    return log


def summary(name: str, log: str) -> str:
    """Say in a line what came out, and warnings."""
    text = name
    facts = r"for '(sm_\w+)'|(\d+) bytes spill stores|Used (\d+) registers"
    for target, spills, registers in re.findall(facts, log):
        text += f"  {target}" * bool(target)
        text += f" SPILLS {spills} bytes" if spills.strip("0") else ""
        text += f" {registers} registers" * bool(registers)
    return "\n".join([text, *(line for line in log.splitlines() if "warning" in line)])


def store(outputs: list[Path], stored: Path) -> None:
    """Put a result where other builds find it, whole or not at all."""
    stored.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=stored.parent) as folder:
        new = Path(folder, "kernel")
        new.mkdir()
        for path in outputs:
            shutil.copyfile(path, new / f"kernel{path.suffix}")
        if not stored.exists():
            new.rename(stored)


def build(args: argparse.Namespace) -> str:
    """Make it, or find it made; returns what to say."""
    name = args.source.stem
    outputs = [args.output.with_suffix(suffix) for suffix in PARTS]
    noted = args.output.with_suffix(".key")
    headers = dependencies(args.source.read_text(), args.include)
    key = key_of(args, headers)
    if noted.exists() and noted.read_text() == key and all(path.exists() for path in outputs):
        for path in outputs:
            path.touch()
        return f"{name}  unchanged"
    noted.unlink(missing_ok=True)
    stored = Path(args.cache, key) if args.cache else None
    if stored and stored.exists():
        for path in outputs:
            shutil.copyfile(stored / f"kernel{path.suffix}", path)
        said = f"{name}  of the cache"
    else:
        log = compile_kernel(args)
        args.output.with_suffix(".log").write_text(log)
        said = summary(name, log)
        if stored:
            store(outputs, stored)
    noted.write_text(key)
    return said


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--include", type=Path, required=True)
    parser.add_argument("--compiler", required=True, help="nvcc or nvrtc, and its version")
    parser.add_argument("--nvcc", help="its path")
    parser.add_argument("--ccbin", help="nvcc's host compiler")
    parser.add_argument("--compress", default="", help="nvcc's option for it")
    parser.add_argument("--sass", nargs="+", required=True, help="machine code for, such as 90a")
    parser.add_argument(
        "--ptx", default="0", help="and PTX, of one of them, from which nvcc assembles higher ones"
    )
    parser.add_argument("--cache", default="", help="a folder of kernels that other builds made")
    args = parser.parse_args(argv)
    args.kind = args.compiler.split()[0]
    try:
        print(build(args))
    except (RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
