# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The command ``flashbsr``: ``info``, ``bench``, ``plan``, ``warm`` and ``cache``.

An error is one line on stderr and exit status 2. Each command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["main", "parse_lengths"]

_EPILOG = """examples:
  flashbsr info
  flashbsr bench --quick
  flashbsr bench --only 'decode-*-bf16' --json decode.json --plot decode.png
  flashbsr plan --kv-lens 512x2,65536 --num-qo-heads 32 --num-kv-heads 8 --head-dim 128
  flashbsr plan --kv-lens 300,4096 --qo-lens 300,1 --causal --page-size 16 --out plan.png
  flashbsr plan --kv-lens 1280x6 --shared-prefix 1024 --page-size 16 --view parts bsr
"""


class _Parser(argparse.ArgumentParser):
    """Errors in one line; argparse would print the usage too."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} ('{self.prog} --help' explains)\n")


def parse_lengths(text: str) -> list[int]:
    """``512x2,65536`` -> [512, 512, 65536]: lengths separated by commas, ``LENGTHxTIMES`` repeats.

    Raises
    ------
    argparse.ArgumentTypeError
    """
    lengths: list[int] = []
    for part in text.split(","):
        length, _, times = part.strip().partition("x")
        if not length.isdecimal() or (times and not times.isdecimal()) or part.strip()[-1:] == "x":
            raise argparse.ArgumentTypeError(
                f"got {part.strip()!r}; expected LENGTH or LENGTHxTIMES, separated by commas"
            )
        lengths += [int(length)] * int(times or 1)
    return lengths


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a positive integer")
    return int(text)


def _info(args: argparse.Namespace) -> int:
    from .info import cuda_summary, engine_info

    info = engine_info()
    cuda = info["cuda"]
    if args.json:
        print(json.dumps(info, indent=2))
        return 0
    print(f"flashbsr {info['version']}")
    print(f"  backends  {', '.join(info['backends'])}")
    others = [isa for isa in info["isas"] if isa != info["isa"]]
    print(
        f"  ISA       {info['isa']} in use"
        + (f"; also here: {', '.join(others)}" if others else "")
    )
    print(f"  CPU       {info['cores']} cores, {info['threads']} threads")
    print(f"  JIT       {_compilers(info['jit'])}")
    print(f"  CUDA      {cuda['problem'] or _count(len(cuda['devices']), 'device')}")
    for ordinal, device in enumerate(cuda["devices"]):
        major, minor = device["compute_capability"]
        print(
            f"            cuda:{ordinal} {device['name']}, {major}.{minor}, "
            f"{device['sm_count']} SMs, "
            f"{device['memory_bytes'] / 2**30:.0f} GiB, "
            f"runs {device['kernels']} of {_count(len(cuda['kernels']), 'kernel')}"
        )
    heading = ("backend", "isa", "compute", "variant", "q_dtypes", "kv_dtypes", "head_dims")
    print(f"\nCPU kernels: {len(info['kernels'])}")
    _print_table(heading, info["kernels"])
    if cuda["kernels"]:
        print(f"\nCUDA kernels: {len(cuda['kernels'])}")
        summary = cuda_summary(cuda["kernels"])
        _print_table(tuple(summary[0]), summary)
    return 0


def _compilers(jit: dict[str, str | None]) -> str:
    return f"{jit['cxx'] or 'no C++ compiler'}; {jit['nvrtc'] or 'no NVRTC'}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _print_table(heading: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    from .terminal import print_table

    cells = [[row[name] for name in heading] for row in rows]
    print_table(
        [name.replace("_", " ") for name in heading],
        [[c if isinstance(c, str) else ", ".join(map(str, c)) for c in row] for row in cells],
    )


def _plan(args: argparse.Namespace) -> int:
    from .viz.command import run

    return run(args)


def _bench(args: argparse.Namespace) -> int:
    from .bench.command import run

    return run(args)


def _warm(args: argparse.Namespace) -> int:
    from .warm import run

    return run(args)


def _cache(args: argparse.Namespace) -> int:
    from .jit import cache
    from .terminal import print_table

    if args.action == "clear":
        print(f"removed {_count(cache.clear(), 'kernel')} from {cache.folder()}")
        return 0
    entries = cache.entries()
    total = sum(entry.size for entry in entries) / 2**20
    print(f"{cache.folder()}: {_count(len(entries), 'kernel')}, {total:.1f} MiB")
    if entries:
        print_table(
            ("file", "size", "used", "kernel"),
            [
                (
                    entry.path.name[:12],
                    f"{entry.size / 1024:.0f} KiB",
                    dt.datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M"),
                    entry.label,
                )
                for entry in entries
            ],
            right=(1,),
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="flashbsr",
        description="Attention engine for LLM inference over block-sparse-row KV layouts.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)

    info = commands.add_parser(
        "info",
        help="version, backends, instruction set, GPUs, kernels shipped",
        description="Print the version, the backends, instruction set, GPUs and kernels.",
    )
    info.add_argument("--json", action="store_true", help="print as JSON")
    info.set_defaults(run=_info)

    bench = commands.add_parser(
        "bench",
        help="run named workloads against this machine's limits and PyTorch",
        description=(
            "Measure named workloads: medians, interleaved with PyTorch's SDPA where installed, "
            "beside this machine's memory bandwidth and matrix product rate."
        ),
    )
    bench.add_argument("--list", action="store_true", help="name the workloads and stop")
    bench.add_argument(
        "--only", metavar="NAME,...", help="names, kinds or patterns like 'decode-*'"
    )
    bench.add_argument("--quick", action="store_true", help="a short list with short budgets")
    bench.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where to run (default: cpu)"
    )
    bench.add_argument("--no-peer", action="store_true", help="do not time PyTorch")
    bench.add_argument(
        "--json", type=Path, metavar="FILE", help="write results and machine to FILE"
    )
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw the results (.png, .svg)")
    bench.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write a page with tables, bars and limits (.html)",
    )
    bench.add_argument(
        "--goals", action="store_true", help="goals in the report, and by how much they are missed"
    )
    bench.set_defaults(run=_bench)

    plan = commands.add_parser(
        "plan",
        help="draw the plan for given lengths",
        description=(
            "Plan a batch and show who does what: in the terminal, or as pictures with --out and "
            "--bsr. In the terminal a character is a slice of a worker's time (lanes), or a page "
            "that a row of queries reads (bsr), and names the request; #@*%&+=$ are shared parts."
        ),
    )
    plan.add_argument(
        "--kv-lens",
        type=parse_lengths,
        required=True,
        metavar="N,...",
        help="KV tokens per request; 512x31,65536 repeats 512 31 times",
    )
    plan.add_argument(
        "--qo-lens",
        type=parse_lengths,
        metavar="N,...",
        help="query tokens per request (default: 1)",
    )
    plan.add_argument("--num-qo-heads", type=_positive, default=32, metavar="N", help="default 32")
    plan.add_argument("--num-kv-heads", type=_positive, default=8, metavar="N", help="default 8")
    plan.add_argument("--head-dim", type=_positive, default=128, metavar="N", help="default 128")
    plan.add_argument("--page-size", type=_positive, metavar="N", help="paged KV (default: ragged)")
    plan.add_argument("--dtype", default="float32", help="of q and KV (default: float32)")
    plan.add_argument("--causal", action="store_true", help="bottom-right aligned causal mask")
    plan.add_argument(
        "--window-left", type=int, default=-1, metavar="N", help="sliding window; -1: off"
    )
    plan.add_argument("--workers", type=_positive, metavar="N", help="lanes (default: the threads)")
    plan.add_argument(
        "--fixed-split-size", type=_positive, metavar="N", help="KV tokens of a part, at most"
    )
    plan.add_argument("--disable-split-kv", action="store_true", help="never split a request's KV")
    plan.add_argument(
        "--shared-prefix",
        type=_positive,
        default=0,
        metavar="N",
        help="tokens whose pages all requests share (with --page-size)",
    )
    plan.add_argument(
        "--share-prefixes",
        choices=["auto", "off"],
        default="auto",
        help="load shared pages once where that pays (default: auto)",
    )
    plan.add_argument(
        "--view",
        nargs="*",
        choices=["parts", "bsr", "lanes"],
        help=(
            "what to print: the list of shared parts, the block-sparse matrix, the lanes; all of "
            "them where none is named (default: lanes, where no picture is asked for)"
        ),
    )
    plan.add_argument("--out", type=Path, metavar="FILE", help="draw the lanes (.png, .svg)")
    plan.add_argument("--bsr", type=Path, metavar="FILE", help="draw the block-sparse matrix")
    plan.add_argument(
        "--html", type=Path, metavar="FILE", help="write the lanes as a page that zooms"
    )
    plan.add_argument(
        "--ranks",
        type=_positive,
        default=1,
        metavar="N",
        help="GPUs that share the keys of each request, one plan for each",
    )
    plan.add_argument(
        "--interleave",
        type=_positive,
        default=1,
        metavar="N",
        help="tokens in a row that one of them has (default: 1)",
    )
    plan.set_defaults(run=_plan)

    warm = commands.add_parser(
        "warm",
        help="compile what a spec needs ahead of the first request",
        description=(
            "Compile the kernels that a spec needs and this build lacks, such as those of a user's "
            "variant, into this machine's cache."
        ),
    )
    warm.add_argument(
        "--spec",
        action="append",
        required=True,
        metavar="MODULE:NAME",
        help="an AttentionSpec of a module or of a file (attention.py:NAME); may be repeated",
    )
    for name in ("--num-qo-heads", "--num-kv-heads", "--head-dim"):
        warm.add_argument(name, type=_positive, required=True, metavar="N")
    warm.add_argument("--head-dim-vo", type=_positive, metavar="N", help="default: --head-dim")
    warm.add_argument("--page-size", type=_positive, metavar="N", help="default: ragged KV")
    warm.add_argument("--dtype", required=True, help="of q")
    warm.add_argument("--kv-dtype", help="default: that of q")
    warm.add_argument(
        "--backend", choices=["cpu", "cuda", "fa2", "fa3"], help="default: cuda where there is one"
    )
    warm.add_argument(
        "--qo-lens",
        type=parse_lengths,
        default=[1, 512],
        metavar="N,...",
        help="query tokens of a request, of which each may be a kernel of a GPU (default: 1,512)",
    )
    warm.set_defaults(run=_warm)

    cache = commands.add_parser(
        "cache",
        help="list or clear the kernels that were compiled at run time",
        description=(
            "The kernels that were compiled at run time, the last used first. They are in "
            "$FLASHBSR_CACHE_DIR, or in flashbsr under $XDG_CACHE_HOME or ~/.cache."
        ),
    )
    cache.add_argument("action", choices=["list", "clear"])
    cache.set_defaults(run=_cache)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.version:
        import flashbsr

        print(f"flashbsr {flashbsr.__version__}")
        return 0
    if not hasattr(args, "run"):
        parser.print_help()
        return 0
    from .errors import FlashbsrError

    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Who read has enough (`flashbsr info | head`): Python would say so at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (FlashbsrError, OSError) as error:
        print(f"flashbsr: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("flashbsr: interrupted", file=sys.stderr)
        return 130
