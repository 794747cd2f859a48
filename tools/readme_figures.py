# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the figures of docs/benchmarks.md and the README's sentence, so that no number is typed.

    python tools/readme_figures.py            rewrite what is between the markers, and the picture
    python tools/readme_figures.py --check    exit 1 if a page and record differ; say if it is stale

The records are the newest of benchmarks/results/*.json, one of the CPU and one of a GPU. Their hash
of the engine's headers is compared with the sources: a record that was taken on other kernels is
named, on the page as well.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import readme_cuda
import readme_speed
from readme_cuda import table

ROOT = Path(__file__).resolve().parents[1]
MARKERS = {"cpu": "figures", "cuda": "cuda-figures"}


def source_hash() -> str:
    """Hash the headers as `flashbsr.bench` does for a record."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "include").rglob("flashbsr/**/*.h")):
        digest.update(path.relative_to(ROOT / "include").as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def metric(results: dict[str, Any], name: str, key: str, form: str) -> str:
    """One cell; a dash where it was not measured."""
    value = results.get(name, {}).get("metrics", {}).get(key)
    return "-" if value is None else form.format(value)


MACHINE = """\
{cores} cores of an {cpu} ({isa}), {triad:.0f} GB/s triad and {read:.0f} GB/s read in the same run,
PyTorch {torch}; 32 query and 8 KV heads, head dim 128. Record:
[{record}](../benchmarks/results/{record}), {date}.{stale}"""

PREFILL = """\
Prefill, causal: GFLOP/s of the pairs that the mask keeps, and the speed-up over
`scaled_dot_product_attention`:"""

DECODE = """\
Decode, 16 requests, pages of 16 in random order: GB/s with K and V counted once, the fraction of
the triad measured around it, and the speed-up over `scaled_dot_product_attention` on padded
batches, called in its fastest exact form (the query heads of a KV head folded into rows):"""

BESIDE = """\
Chunks of 256 queries behind 8192 tokens, four at once, reach {chunk_fp32} (fp32) and {chunk_bf16}
(bf16) of a whole prompt's GFLOP/s; decode over latents, 16 x 4096 tokens and 128 heads, reaches
{latent} and is {latent_speedup} times as fast as `scaled_dot_product_attention` over the same heads
of one request. Decode over caches of codes takes as long as over bf16 divided by {kv8} (int8),
{kv4} (int4) and {nvfp4} (NVFP4)."""

REST = """\
Zipf lengths cost {skew} against equal ones of the same total. With one request of 65,536 tokens
among 63 of 512 the threads are busy to within {gap} of each other. `plan()` takes {plan_16} us at
batch 16 and {plan_1024} us at batch 1024, `run()` {overhead} us above the kernel."""


def figures(path: Path) -> str:
    """Render the part between the markers."""
    record = json.loads(path.read_text())
    results = {r["name"]: r for r in record["results"]}
    machine, limits = record["machine"], record["limits"]

    def cell(name: str, key: str, form: str) -> str:
        return metric(results, name, key, form)

    prefill, decode = [], []
    for n in (512, 1024, 2048, 4096, 8192):
        prefill.append([str(n)])
        for name in (f"prefill-{n}-fp32", f"prefill-{n}-bf16"):
            prefill[-1] += [cell(name, "gflops", "{:.0f}"), cell(name, "speedup", "{:.1f}x")]
    for n in (1024, 2048, 4096, 8192):
        decode.append([str(n)])
        for name in (f"decode-{n}-fp32", f"decode-{n}-bf16"):
            decode[-1] += [cell(name, "kv_gbs", "{:.0f}"), cell(name, "triad_fraction", "{:.0%}")]
            decode[-1] += [cell(name, "speedup", "{:.1f}x")]
    parts = [
        MACHINE.format(
            cores=machine["cores"],
            cpu=f"{machine['cpu']['name']}, family {machine['cpu']['family']}",
            isa=machine["isa"],
            triad=limits["triad_gbs"],
            read=limits["read_gbs"],
            torch=machine["versions"].get("torch", "-"),
            record=path.name,
            date=machine["date"][:10],
            stale="" if machine["source_hash"] == source_hash() else " **Kernels changed since.**",
        ),
        PREFILL,
        table(["tokens", "fp32", "x torch", "bf16", "x torch"], prefill),
        DECODE,
        table(["KV tokens", "fp32", "of triad", "x torch", "bf16", "of triad", "x torch"], decode),
        BESIDE.format(
            chunk_fp32=cell("chunk-4x256-8192-fp32", "prefill_fraction", "{:.0%}"),
            chunk_bf16=cell("chunk-4x256-8192-bf16", "prefill_fraction", "{:.0%}"),
            latent=cell("mla-16x4096-bf16", "prefill_fraction", "{:.0%}"),
            latent_speedup=cell("mla-16x4096-bf16", "speedup", "{:.0f}"),
            kv8=cell("kv8-4096-int8", "over_bf16", "{:.2f}"),
            kv4=cell("kv4-4096-int4", "over_bf16", "{:.2f}"),
            nvfp4=cell("nvfp4-4096", "over_bf16", "{:.2f}"),
        ),
        REST.format(
            skew=cell("zipf-1024-bf16", "skew_penalty", "{:+.1%}"),
            gap=cell("one64k-bf16", "busy_gap", "{:.1%}"),
            plan_16=cell("plan-16", "plan_us", "{:.0f}"),
            plan_1024=cell("plan-1024", "plan_us", "{:.0f}"),
            overhead=cell("run-overhead-numpy", "overhead_us", "{:.1f}"),
        ),
        f"![Measured](../benchmarks/results/{path.stem}.png)",
    ]
    return "\n\n".join(parts)


def newest(device: str) -> Path | None:
    """Find the latest record of a device."""
    found = []
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        record = json.loads(path.read_text())
        if record.get("device", "cpu") == device:
            found.append((record["machine"]["date"], path))
    return max(found)[1] if found else None


def between(text: str, marker: str, content: str) -> str:
    """Replace what is between the markers."""
    begin, end = f"<!-- {marker} -->\n", f"<!-- /{marker} -->"
    before, rest = text.split(begin, 1)
    return f"{before}{begin}{content}{end}{rest.split(end, 1)[1]}"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args().check
    cpu, cuda = newest("cpu"), newest("cuda")
    if cpu is None or cuda is None:
        print("readme_figures: benchmarks/results lacks a record of a CPU or of a GPU")
        return 1
    pages = {
        path: path.read_text() for path in (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
    }
    page, readme = pages
    wanted = {page: between(pages[page], MARKERS["cpu"], figures(cpu) + "\n")}
    filled = readme_cuda.figures(cuda, source_hash()) + "\n"
    wanted[page] = between(wanted[page], MARKERS["cuda"], filled)
    wanted[readme] = between(pages[readme], "speed", readme_speed.sentence(cuda, cpu) + "\n")
    if not check:
        for path, text in wanted.items():
            path.write_text(text)
        readme_speed.draw(cuda, ROOT / "docs" / "img" / "speed.png")
        return 0
    stale = json.loads(cpu.read_text())["machine"]["source_hash"] != source_hash()
    print(f"readme_figures: {cpu.name} is {'STALE' if stale else 'current'}")
    stale = readme_cuda.is_stale(cuda, json.loads(cuda.read_text()), source_hash())
    print(f"readme_figures: {cuda.name} is {'STALE' if stale else 'current'}")
    for path, text in wanted.items():
        if pages[path] != text:
            print(f"readme_figures: {path.name} differs from a record: run tools/readme_figures.py")
    return int(pages != wanted)


if __name__ == "__main__":
    sys.exit(main())
