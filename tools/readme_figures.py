# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the README's figures from a record of `flashbsr bench`, so that no number is typed.

    python tools/readme_figures.py            rewrite the part between the markers
    python tools/readme_figures.py --check    exit 1 if README and record differ; say if it is stale

The record is the newest of benchmarks/results/*.json. Its hash of the engine's headers is compared
with the sources: a record that was taken on other kernels is named, in the README as well.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->"


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


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def figures(path: Path) -> str:
    """The text between the markers."""
    record = json.loads(path.read_text())
    results = {r["name"]: r for r in record["results"]}
    machine, limits = record["machine"], record["limits"]

    def pair(name: str, key: str, form: str) -> list[str]:
        return [metric(results, name, key, form), metric(results, name, "speedup", "{:.1f}x")]

    prefill = [
        [str(n)]
        + pair(f"prefill-{n}-fp32", "gflops", "{:.0f}")
        + pair(f"prefill-{n}-bf16", "gflops", "{:.0f}")
        for n in (512, 1024, 2048, 4096, 8192)
    ]
    decode = []
    for n in (1024, 2048, 4096, 8192):
        row = [str(n)]
        for dtype in ("fp32", "bf16"):
            name = f"decode-{n}-{dtype}"
            row += [
                metric(results, name, "kv_gbs", "{:.0f}"),
                metric(results, name, "triad_fraction", "{:.0%}"),
                metric(results, name, "speedup", "{:.1f}x"),
            ]
        decode.append(row)
    versions = machine["versions"]
    stale = "" if machine["source_hash"] == source_hash() else " **The kernels changed since.**"
    return "\n\n".join(
        [
            f"{machine['cores']} cores of an {machine['cpu']['name']} (family "
            f"{machine['cpu']['family']}, {machine['isa']}), {limits['triad_gbs']:.0f} GB/s triad and "
            f"{limits['read_gbs']:.0f} GB/s read in the same run, against PyTorch "
            f"{versions.get('torch', '-')}; 32 query and 8 KV heads, head dim 128; "
            f"[{path.name}](benchmarks/results/{path.name}), {machine['date'][:10]}.{stale}",
            "Prefill, causal, GFLOP/s of the pairs that the mask keeps, and the speed-up over "
            "`scaled_dot_product_attention`:",
            table(["tokens", "fp32", "x torch", "bf16", "x torch"], prefill),
            "Decode, 16 requests, pages of 16 in random order, GB/s of K and V counted once, the "
            "fraction of the triad, and the speed-up over padded "
            "`scaled_dot_product_attention`:",
            table(
                ["KV tokens", "fp32", "of triad", "x torch", "bf16", "of triad", "x torch"], decode
            ),
            "Zipf lengths cost "
            f"{metric(results, 'zipf-1024-bf16', 'skew_penalty', '{:+.1%}')} of the time of equal "
            "lengths; with one request of 65,536 tokens among 63 of 512 the threads are busy to within "
            f"{metric(results, 'one64k-bf16', 'busy_gap', '{:.1%}')}. `plan()` takes "
            f"{metric(results, 'plan-16', 'plan_us', '{:.0f}')} us at batch 16 and "
            f"{metric(results, 'plan-1024', 'plan_us', '{:.0f}')} us at batch 1024, `run()` "
            f"{metric(results, 'run-overhead-numpy', 'overhead_us', '{:.1f}')} us above the kernel.",
            f"![Measured](benchmarks/results/{path.stem}.png)",
        ]
    )


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args().check
    records = sorted(
        (ROOT / "benchmarks" / "results").glob("*.json"),
        key=lambda p: json.loads(p.read_text())["machine"]["date"],
    )
    if not records:
        print("readme_figures: no record in benchmarks/results")
        return 1
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    wanted = f"{before}{BEGIN}{figures(records[-1])}\n{END}{after}"
    if not check:
        readme.write_text(wanted)
        return 0
    stale = json.loads(records[-1].read_text())["machine"]["source_hash"] != source_hash()
    print(f"readme_figures: {records[-1].name} is {'STALE' if stale else 'current'}")
    if text != wanted:
        print("readme_figures: README.md differs from the record: run tools/readme_figures.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
