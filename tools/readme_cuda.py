# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The README's figures of the CUDA engine; tools/readme_figures.py puts them there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_hash

ROOT = Path(__file__).resolve().parents[1]

MACHINE = """\
One {name} (driver {driver}): {copy:.2f} TB/s copied, {read:.2f} TB/s read and {matmul:.0f} TFLOP/s
of bf16 product (8192^3) in the same run; bf16, head dim 128, 32 query and 8 KV heads, pages of 16
in random order unless said, from CUDA graphs, K and V never from L2. Record:
[{record}](../benchmarks/results/{record}), {date}.{stale}"""

DECODE = """\
Decode: time of a call, GB/s of the least bytes, and the fraction of the read bandwidth. PyTorch is
the faster of its flash and cuDNN backends on the same lengths, dense and contiguous:"""

PREFILL = """\
Prefill, causal: TFLOP/s of the pairs that the mask keeps, ragged and paged, and those of PyTorch's
backends on dense tensors:"""

SPECIAL = """\
Other masks, head dims, variants and types, causal and ragged 4 x 4096 unless said; the last column
has the time of variants over plain attention, and the rate with e4m3 K and V as a part of that with
bf16 ones, in the same run:"""

VERIFY = """\
Verifying 4 tokens of 16 requests, 4096 tokens each, takes {} us ({} of the read bandwidth)."""

TREE = """\
Trees of 8 drafts instead take {} us, {} against 8 tokens in a row."""

MIXED = """\
4 prefill chunks of 512 tokens and 60 decodes, all over 4096 tokens, take {} us in one launch; apart
the prefills take {} us and the decodes {} us."""

SHARE = """\
Decodes of requests that begin with the same pages, found by `plan` and loaded once, against
`share_prefixes="off"` in the same run:"""

SPARSE = """\
Block-sparse, 8192 queries by 8192 keys, a quarter of the blocks at random:"""

REST = """\
Appending to a paged cache copies at {append} of the copy bandwidth, `merge_states` at {merge}.
`plan()` takes {plan_16} us at batch 16 and {plan_1024} us at batch 1024, the host's part of `run()`
{host} us."""

# Name in the record -> the words of its row.
ROWS = {
    "decode-16x8192": "16 x 8192",
    "decode-64x4096": "64 x 4096",
    "decode-1x131072": "1 x 131072",
    "decode-128x1024": "128 x 1024",
    "decode-mha-16x4096": "16 x 4096, 32 KV heads",
    "decode-gqa8-16x4096": "16 x 4096, 64 query heads",
    "decode-page1-16x8192": "16 x 8192, pages of 1",
    "decode-16x1024": "16 x 1024",
    "decode-uniform": "16, uniform 512 to 1024",
    "decode-zipf": "16, Zipf, mean 1024",
    "decode-skewed": "63 x 512 and 1 x 131072",
    "fp8-16x8192": "16 x 8192, e4m3",
    "fp8-64x4096": "64 x 4096, e4m3",
    "fp8-16x1024": "16 x 1024, e4m3",
    "fp8-zipf": "16, Zipf, mean 1024, e4m3",
}
# The same for prefill: shapes that are run ragged and paged, and what is not plain causal bf16.
SHAPES = {
    "1x8192": "1 x 8192",
    "4x4096": "4 x 4096",
    "1x32768": "1 x 32768",
    "16x1024": "16 x 1024",
    "uniform": "16, uniform 512 to 1024",
    "zipf": "16, Zipf, mean 1024",
}
OPTIONS = {
    "prefill-page1-4x4096": "pages of 1",
    "prefill-no-mask-4x4096": "no mask",
    "prefill-d64-4x4096": "head dim 64",
    "prefill-d256-4x4096": "head dim 256",
    "prefill-window-4x4096": "window of 1024",
    "prefill-soft-cap-4x4096": "soft-cap",
    "prefill-alibi-4x4096": "ALiBi",
    "prefill-sinks-4x4096": "sinks",
    "prefill-mask-4x4096": "the causal mask in bits",
    "prefill-sigmoid-4x4096": "sigmoid",
    "prefill-e4m3-4x4096": "e4m3 q, k and v",
    "prefill-e4m3-1x32768": "e4m3 q, k and v, 1 x 32768",
    "prefill-e4m3-fast-4x4096": "the same, fast accumulation",
    "prefill-e4m3-fast-1x32768": "the same, fast accumulation, 1 x 32768",
    "prefill-paged-e4m3kv-4x4096": "bf16 q, e4m3 K and V, paged",
    "extend-4x512": "4 x 512 queries on 8192 tokens, paged",
}

SHARED = {
    "share-64x8192-own-256": "64 share 8192 tokens, 256 own",
    "share-three-levels": "128 share 4096, groups of 16 2048 more, 512 own",
    "share-nothing": "64 of 4096 that share nothing",
}
BLOCKS = {f"sparse-{r}x{c}": f"{r} x {c}" for r, c in ((128, 128), (128, 16), (64, 64), (16, 16))}


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def is_stale(path: Path, record: dict[str, Any], headers: str) -> bool:
    """Whether kernels changed since: by the GPU record of the same run, else by the headers."""
    kept = ROOT / "tests" / "records" / path.name
    if kept.exists():
        bench = json.loads(kept.read_text())["steps"].get("bench")
        figures = {result["name"]: result["metrics"] for result in record["results"]}
        if bench is not None and bench.get("figures") == figures:
            return bool(bench["source_hash"] != gpu_hash.source_hash())
    return bool(record["machine"]["source_hash"] != headers)


def _decode_row(words: str, result: dict[str, Any]) -> list[str]:
    metrics, times = result["metrics"], result["times"]
    peers = [times[name]["median_s"] * 1e6 for name in ("flash", "cudnn") if name in times]
    return [
        words,
        f"{metrics['us']:.1f} us",
        f"{metrics['gbs']:.0f}",
        f"{metrics['read_fraction']:.0%}",
        f"{min(peers):.1f} us" if peers else "-",
    ]


def figures(path: Path, headers: str) -> str:
    """Render the part between the markers; `headers` is the hash of the headers now."""
    record = json.loads(path.read_text())
    results = {r["name"]: r for r in record["results"] if r["times"]}
    limits, machine = record["limits"], record["machine"]

    def cell(name: str, key: str, form: str) -> str:
        value = results.get(name, {}).get("metrics", {}).get(key)
        return "-" if value is None else form.format(value)

    def span(prefix: str) -> str:
        found = [r["metrics"]["copy_fraction"] for n, r in results.items() if n.startswith(prefix)]
        return (
            " to ".join(dict.fromkeys(f"{x:.0%}" for x in (min(found), max(found))))
            if found
            else "-"
        )

    prefill = [
        [
            words,
            cell(f"prefill-{shape}", "tflops", "{:.0f}"),
            cell(f"prefill-{shape}", "matmul_fraction", "{:.0%}"),
            cell(f"prefill-paged-{shape}", "tflops", "{:.0f}"),
            cell(f"prefill-{shape}", "flash_tflops", "{:.0f}"),
            cell(f"prefill-{shape}", "cudnn_tflops", "{:.0f}"),
        ]
        for shape, words in SHAPES.items()
        if f"prefill-{shape}" in results
    ]
    special = [
        [
            words,
            cell(name, "tflops", "{:.0f}"),
            cell(name, "kv16_fraction", "{:.0%}")
            if name == "prefill-paged-e4m3kv-4x4096"
            else cell(name, "variant_penalty", "{:+.1%}"),
        ]
        for name, words in OPTIONS.items()
        if name in results
    ]
    verify = [cell("verify-16x4", *x) for x in (("us", "{:.1f}"), ("read_fraction", "{:.0%}"))]
    tree = [cell("tree-16x8", *x) for x in (("us", "{:.1f}"), ("variant_penalty", "{:+.1%}"))]
    mixed = [cell("mixed-4x512-60", x, "{:.0f}") for x in ("us", "prefill_us", "decode_us")]
    decode = [_decode_row(words, results[name]) for name, words in ROWS.items() if name in results]
    shared = [
        [
            words,
            cell(name, "us", "{:.0f} us"),
            cell(name, "apart_us", "{:.0f} us"),
            cell(name, "sharing_gain", "{:.2f}x"),
        ]
        for name, words in SHARED.items()
        if name in results
    ]
    sparse = [
        [words, cell(name, "us", "{:.0f} us"), cell(name, "tflops", "{:.0f}")]
        for name, words in BLOCKS.items()
        if name in results
    ]
    stale = is_stale(path, record, headers)
    parts = [
        MACHINE.format(
            name=machine["device"]["name"],
            driver=machine["device"]["driver"],
            copy=limits["copy_gbs"] / 1e3,
            read=limits["read_gbs"] / 1e3,
            matmul=limits["matmul_tflops"],
            record=path.name,
            date=machine["date"][:10],
            stale=" **Kernels changed since.**" if stale else "",
        ),
        DECODE,
        table(["KV tokens", "time", "GB/s", "of read", "PyTorch"], decode),
        PREFILL,
        table(["tokens", "ragged", "of product", "paged", "flash", "cuDNN"], prefill),
        *(
            [
                SPECIAL,
                table(["prefill", "TFLOP/s", "same run"], special),
                VERIFY.format(*verify)
                + (f" {TREE.format(*tree)}" if "tree-16x8" in results else ""),
            ]
            if special
            else []
        ),
        *([MIXED.format(*mixed)] if "mixed-4x512-60" in results else []),
        *([SHARE, table(["requests", "shared", "apart", "gain"], shared)] if shared else []),
        *([SPARSE, table(["blocks", "time", "TFLOP/s"], sparse)] if sparse else []),
        REST.format(
            append=span("append-"),
            merge=span("merge-"),
            plan_16=cell("plan-16", "plan_us", "{:.0f}"),
            plan_1024=cell("plan-1024", "plan_us", "{:.0f}"),
            host=cell("run-host", "host_us", "{:.1f}"),
        ),
        f"![Measured](../benchmarks/results/{path.stem}.png)",
    ]
    return "\n\n".join(parts)
