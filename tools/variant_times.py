# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What a user's variant costs once it is compiled, beside the built-in one and plain attention.

``python tools/variant_times.py`` with PyTorch: a decode of 16 x 4096 tokens and a causal prefill of
4 x 4096, head dim 128, bfloat16, 32 query and 8 KV heads. On a GPU a figure is the median of CUDA
graphs that are replayed in turns, and below the tables stands the host's part of a call;
``--device cpu`` measures 2 x 4096 and 512 after 1536 tokens in turns on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import flashbsr
import numpy as np
from flashbsr.bench.cuda_runner import find_gpu
from flashbsr.bench.cuda_timing import Gpu, measure, measure_limits
from flashbsr.bench.timing import Budget, Side, interleave

__all__ = ["SHAPES", "VARIANTS", "arrays", "attention_of"]

TEXTS = {
    "FlashSigmoid": """
struct FlashSigmoid : VariantBase {
  static constexpr bool use_softmax = false;
  template <class M> auto activation(typename M::Float x) const { return M::sigmoid(x + number); }
};
""",
    "SoftCap": """
struct SoftCap : VariantBase {
  template <class M>
  typename M::Float logits_transform(typename M::Float x, const LogitsAt<M>& at) const {
    return number * M::tanh(x * (1.0f / number));
  }
};
""",
}
NUMBERS = {"FlashSigmoid": -1.5, "SoftCap": 30.0}
VARIANTS = (*TEXTS, "traced ALiBi")
#: What the library has of the same arithmetic.
BUILT_IN: dict[str, dict[str, Any]] = {
    "FlashSigmoid": {"activation": "sigmoid", "sigmoid_bias": NUMBERS["FlashSigmoid"]},
    "SoftCap": {"logits_soft_cap": NUMBERS["SoftCap"]},
    "traced ALiBi": {"pos_encoding_mode": "ALIBI"},
}
HEADS, KV_HEADS, DIM = 32, 8, 128
# Requests, query tokens of each, KV tokens of each.
SHAPES = {
    "cuda": {"decode": (16, 1, 4096), "prefill": (4, 4096, 4096)},
    "cpu": {"decode": (2, 1, 4096), "prefill": (1, 512, 2048)},
}
TINY = (1, 1, 64)  # a kernel that is over before the host has launched the next one
HOST_CALLS, HOST_ROUNDS = 400, 7


def alibi(score: Any, _b: Any, _h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Add one slope for all heads: what is traced."""
    return score + 0.125 * (kv_idx - q_idx)


def attention_of(
    what: str, built_in: bool = False, **fields: Any
) -> tuple[flashbsr.Attention, dict[str, float]]:
    """Make attention with one of `VARIANTS`, as a user writes it or built in; ``"plain"``: neither.

    Returns
    -------
    Attention
    dict
        What ``run`` takes beside the arrays.
    """
    values: dict[str, float] = {}
    if what == "plain" or built_in:
        spec = flashbsr.AttentionSpec(**fields, **BUILT_IN.get(what, {}))
    elif what in TEXTS:
        values = {"number": NUMBERS[what]}
        spec = flashbsr.AttentionSpec.from_source(
            TEXTS[what], extras={"number": "float32"}, **fields
        )
    else:
        spec = flashbsr.AttentionSpec.from_functions(score_mod=alibi, **fields)
    task = flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, q_dtype="bfloat16", kv_dtype="bfloat16")
    return flashbsr.Attention(spec, task), values


def arrays(torch: Any, shape: tuple[int, int, int], device: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    requests, q_len, kv_len = shape
    return tuple(
        torch.randn(tokens, heads, DIM, device=device, dtype=torch.bfloat16)
        for tokens, heads in (
            (requests * q_len, HEADS), (requests * kv_len, KV_HEADS), (requests * kv_len, KV_HEADS)
        )
    )  # fmt: skip


def planned(
    torch: Any, shape: tuple[int, int, int], q: Any, k: Any, v: Any, what: str, built_in: bool
) -> tuple[Callable[[], Any], str]:
    """Plan a side; its call, and its kernel's name."""
    requests, q_len, kv_len = shape
    attention, values = attention_of(what, built_in, causal=q_len > 1)
    attention.settle(q)
    qo, kv = (np.arange(requests + 1) * n for n in (q_len, kv_len))
    attention.plan(flashbsr.Ragged(qo if q_len > 1 else None, kv))
    out = torch.empty_like(q)

    def call() -> None:
        attention.run(q, (k, v), out=out, **values)

    call()
    return call, attention._engine.kernel_name()


def sides(
    torch: Any, shape: tuple[int, int, int], device: str
) -> dict[tuple[str, bool], tuple[Callable[[], Any], str]]:
    """Every variant as written and built in, and plain attention first."""
    q, k, v = arrays(torch, shape, device)
    names = [
        ("plain", True),
        *((what, built_in) for what in VARIANTS for built_in in (True, False)),
    ]
    return {name: planned(torch, shape, q, k, v, *name) for name in names}


def graph_seconds(
    gpu: Gpu, calls: dict[tuple[str, bool], Callable[[], Any]], rounds: int, compute_bound: bool
) -> dict[tuple[str, bool], float]:
    """Median of the rounds' medians; sides take turns."""
    found: dict[tuple[str, bool], list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            timed = measure(gpu.clock, lambda _, c=call: c(), compute_bound=compute_bound)
            found[name].append(timed.median)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def host_seconds(
    gpu: Gpu, calls: dict[tuple[str, bool], Callable[[], Any]]
) -> dict[tuple[str, bool], float]:
    """Seconds that a call keeps the host, the least of some rounds."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(HOST_ROUNDS):
        for name, call in calls.items():
            gpu.clock.synchronize()
            begin = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            found[name] = min(found[name], (time.perf_counter() - begin) / HOST_CALLS)
    return found


def cpu_seconds(
    calls: dict[tuple[str, bool], Callable[[], Any]], rounds: int
) -> dict[tuple[str, bool], float]:
    def side(call: Callable[[], Any]) -> Side:
        return Side(lambda _: call())

    timed = interleave(
        {str(name): side(call) for name, call in calls.items()},
        Budget(seconds=1e9, min_rounds=8 * rounds, max_rounds=8 * rounds),
    )
    return {name: min(timed[str(name)].seconds) for name in calls}


def table(title: str, seconds: dict[tuple[str, bool], float], kernels: dict[Any, str]) -> None:
    plain = seconds["plain", True]
    print(f"\n| {title}: plain {plain * 1e6:.1f} us | as written, us | built in, us | to built in "
          "| to plain | kernel |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    for what in VARIANTS:
        mine, theirs = seconds[what, False], seconds[what, True]
        print(
            f"| {what} | {mine * 1e6:.1f} | {theirs * 1e6:.1f} | {mine / theirs:.3f} | "
            f"{mine / plain:.3f} | {kernels[what, False]} |",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    import torch

    gpu = find_gpu() if args.device == "cuda" else None
    for name, shape in SHAPES[args.device].items():
        found = sides(torch, shape, args.device)
        calls = {side: call for side, (call, _) in found.items()}
        kernels = {side: kernel for side, (_, kernel) in found.items()}
        if gpu is None:
            seconds = cpu_seconds(calls, args.rounds)
        else:
            seconds = graph_seconds(gpu, calls, args.rounds, compute_bound=name == "prefill")
        table(name, seconds, kernels)
    if gpu is not None:
        found = sides(torch, TINY, args.device)
        calls = {side: call for side, (call, _) in found.items()}
        kernels = {side: kernel for side, (_, kernel) in found.items()}
        table("host", host_seconds(gpu, calls), kernels)
        print("\nlimits:", measure_limits(gpu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
