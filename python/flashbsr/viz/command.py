# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""``flashbsr plan``: who does what, for given lengths."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.attention import Attention
from ..engine.context import ContextParallel
from ..engine.task import TaskInfo
from ..errors import FlashbsrError
from ..layout.layouts import Paged, Ragged
from ..terminal import rich_console, show
from ..variant.spec import AttentionSpec
from .lanes import plot_plan
from .matrix import plot_bsr
from .page import write_page
from .text import render_bsr, render_lanes, render_parts

if TYPE_CHECKING:
    import argparse

    from ..engine.plan import Plan

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Plan the batch, on every rank, and show it as the options say. Returns the exit status."""
    if args.ranks > 1 and (args.out is not None or args.bsr is not None):
        wanted = "--html or the terminal with --ranks: a picture has one plan"
        raise FlashbsrError("--out", args.out or args.bsr, wanted)
    plans = [_plan(args, rank) for rank in range(args.ranks)]
    for rank, plan in enumerate(plans):
        if args.ranks > 1:
            print(f"rank {rank}")
        _print(args, plan)
    if args.out is not None:
        plot_plan(plans[0], args.out)
        print(f"lanes: {args.out}")
    if args.bsr is not None:
        plot_bsr(plans[0], args.bsr)
        print(f"matrix: {args.bsr}")
    if args.html is not None:
        names = [f"Rank {rank}" if args.ranks > 1 else "" for rank in range(args.ranks)]
        write_page(dict(zip(names, plans, strict=True)), args.html)
        print(f"page: {args.html}")
    return 0


def _plan(args: argparse.Namespace, rank: int) -> Plan:
    kv_lens = np.asarray(args.kv_lens, np.int64)
    qo_lens = np.ones_like(kv_lens) if args.qo_lens is None else np.asarray(args.qo_lens, np.int64)
    if len(qo_lens) != len(kv_lens):
        raise FlashbsrError(
            "--qo-lens", f"{len(qo_lens)} lengths", f"{len(kv_lens)}, as many as --kv-lens"
        )
    if args.shared_prefix and args.page_size is None:
        raise FlashbsrError("--shared-prefix", args.shared_prefix, "--page-size with it")
    share = ContextParallel(args.ranks, rank, args.interleave)
    attention = Attention(
        AttentionSpec(causal=args.causal, window_left=args.window_left),
        TaskInfo(
            num_qo_heads=args.num_qo_heads,
            num_kv_heads=args.num_kv_heads,
            head_dim_qk=args.head_dim,
            q_dtype=args.dtype,
            kv_dtype=args.dtype,
            num_workers=args.workers,
            fixed_split_size=args.fixed_split_size,
            disable_split_kv=args.disable_split_kv,
            context_parallel=share,
        ),
    )
    positions = kv_lens - qo_lens if args.ranks > 1 else None
    kv_lens = share.local_lens(kv_lens)
    qo_indptr = np.concatenate(([0], np.cumsum(qo_lens)))
    layout: Any = Ragged(qo_indptr, np.concatenate(([0], np.cumsum(kv_lens))))
    if args.page_size is not None:
        table = _page_table(kv_lens, args.page_size, share.local_lens(args.shared_prefix))
        layout = Paged(qo_indptr, *table, kv_lens=kv_lens, page_size=args.page_size)
    attention.plan(layout, q_positions=positions, share_prefixes=args.share_prefixes)
    return attention.plan_info


def _print(args: argparse.Namespace, plan: Plan) -> None:
    print(plan)
    color = rich_console(sys.stdout) is not None  # which knows the terminal's colours, and NO_COLOR
    width = shutil.get_terminal_size((100, 24)).columns
    texts: dict[str, Callable[[], str]] = {
        "parts": lambda: render_parts(plan),
        "bsr": lambda: render_bsr(plan, width, color=color),
        "lanes": lambda: render_lanes(plan, width, color=color),
    }
    views = args.view
    if views is None:
        drawn = any(path is not None for path in (args.out, args.bsr, args.html))
        views = [] if drawn else ["lanes"]
    elif not views:
        views = [*texts]
    for view in views:
        show("\n" + texts[view]())


def _page_table(kv_lens: Any, page_size: int, shared_prefix: int) -> tuple[Any, Any]:
    """Hand out pages in order; whole pages of the first `shared_prefix` tokens belong to all."""
    pages = -(-kv_lens // page_size)
    indptr = np.concatenate(([0], np.cumsum(pages)))
    shared = np.minimum(shared_prefix // page_size, kv_lens // page_size)
    indices = np.empty(int(indptr[-1]), np.int64)
    unused = int(shared.max(initial=0))
    for begin, count, common in zip(indptr[:-1], pages, shared, strict=True):
        own = count - common
        indices[begin : begin + common] = np.arange(common)
        indices[begin + common : begin + count] = unused + np.arange(own)
        unused += own
    return indptr, indices
