# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`python examples/serve`: requests arrive, are served, are checked."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from contextlib import closing
from pathlib import Path

# The model's matrices are small: a second BLAS thread gains little, and where another program keeps
# its core busy, waiting for it made a step 10 to 25 times slower (NumPy reads this when imported).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from serve import check, workload
from serve.display import Display, table
from serve.engine import Engine, Request, Sequence
from serve.model import Model
from serve.pages import PagePool
from serve.tokenizer import Tokenizer
from serve.weights import TOKENIZER, load


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python examples/serve",
        description="Serve a small language model over a paged KV cache and check what it wrote.",
    )
    add = parser.add_argument
    add("--requests", type=int, default=100, help="number of requests (default %(default)s)")
    add("--rate", type=float, default=32.0, help="mean arrivals per second (%(default)s)")
    add("--pages", type=int, default=72, help="pages of the KV cache (%(default)s)")
    add("--page-size", type=int, default=16, help="tokens in a page (%(default)s)")
    add("--max-new-tokens", type=int, default=320, help="longest answer (%(default)s)")
    add("--budget", type=int, default=128, help="tokens computed per step (%(default)s)")
    add("--seed", type=int, default=0, help="of the arrivals and of the sampling (%(default)s)")
    add("--prompt", action="append", help="serve this text instead; may be repeated")
    add("--samples", type=int, default=1, help="answers to each --prompt (%(default)s)")
    add("--prompt-tokens", type=int, help="repeat or cut each --prompt to this many tokens")
    add("--ignore-end", action="store_true", help="write --max-new-tokens after a --prompt")
    add(
        "--sharing",
        choices=("all", "pages", "none"),
        default="all",
        help="of equal beginnings: pages and their loads, pages alone, nothing (%(default)s)",
    )
    add("--no-check", action="store_true", help="skip the comparison with the dense forward")
    args = parser.parse_args(argv)
    args.prompt = args.prompt or ([workload.LONG[0]] if args.prompt_tokens else [])
    if args.samples > 1 and not args.prompt:
        parser.error("--samples: expected --prompt or --prompt-tokens beside it")
    numbers = ("requests", "rate", "pages", "page_size", "max_new_tokens", "budget", "samples")
    for name in (*numbers, *(["prompt_tokens"] if args.prompt_tokens is not None else [])):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(args, name)}; expected > 0")
    return args


def serve(
    engine: Engine, requests: list[Request], display: Display
) -> tuple[list[Sequence], float]:
    """Feeds the requests to the engine when they arrive; the sequences and the seconds in steps."""
    started, busy = engine.clock(), 0.0
    sequences: list[Sequence] = []
    while engine.busy or len(sequences) < len(requests):
        now = engine.clock() - started
        while len(sequences) < len(requests) and requests[len(sequences)].arrival <= now:
            request = requests[len(sequences)]
            sequences.append(engine.submit(request, started + request.arrival))
        if not engine.busy:
            time.sleep(max(0.0, requests[len(sequences)].arrival - now))
            continue
        before = engine.clock()
        step = engine.step()
        busy += engine.clock() - before
        display.step(step, engine)
    return sequences, busy


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    tokenizer = Tokenizer.load(TOKENIZER)
    config, tensors = load()
    if args.prompt:
        requests = workload.custom(
            args.prompt,
            args.max_new_tokens,
            args.seed,
            tokenizer,
            samples=args.samples,
            prompt_tokens=args.prompt_tokens,
            ignore_end=args.ignore_end,
        )
        if args.prompt_tokens:  # to see how fast it is; the model was trained on fewer positions
            longest = args.prompt_tokens + args.max_new_tokens
            config = dataclasses.replace(config, context=max(config.context, longest))
    else:
        requests = workload.poisson(
            args.requests, args.rate, args.max_new_tokens, args.seed, tokenizer
        )
    share_prefixes = "auto" if args.sharing == "all" else "off"
    model = Model(config, tensors, args.pages, args.page_size, share_prefixes)
    pool = PagePool(args.pages, args.page_size)
    engine = Engine(
        model, pool, args.budget, record=not args.no_check, share=args.sharing != "none"
    )
    display = Display(sys.stdout, tokenizer, len(requests), stream=len(requests) == 1)
    size = sum(tensor.size for tensor in tensors.values())
    display.line(
        f"{size / 1e6:.1f} M parameters, {config.layers} layers, {config.q_heads} query heads on "
        f"{config.kv_heads} KV heads; {args.pages} pages of {args.page_size} tokens"
    )
    display.line("So few parameters write nonsense. What counts is how fast they are served,")
    display.line("and that tokens and logits are those of the dense forward.")
    started = time.perf_counter()
    try:
        with closing(display):
            sequences, busy = serve(engine, requests, display)
    except ValueError as error:  # a request that does not fit the cache or the model
        display.line(f"error: {error}")
        return 2
    wall = time.perf_counter() - started
    report = None
    if not args.no_check:
        total = len(sequences)
        with closing(display):
            report = check.compare(
                config,
                tensors,
                model,
                sequences,
                lambda done: display.progress(
                    f"checking against the dense float64 forward: {done}/{total}"
                ),
            )
    display.line()
    display.table(table(engine, sequences, wall, busy, report))
    if report is None or report.passed:
        return 0
    for text in report.wrong[:20]:
        display.line(f"error: {text}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
