# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What a mask costs on this GPU: as a field, as a function, and in PyTorch's FlexAttention.

``python tools/mask_times.py`` with PyTorch: a sliding window of 1024 over 4 x 4096 tokens, and 8
documents of 2048 in one sequence of 16384, both causal; 32 query and 8 KV heads of 128, bfloat16.
One mask function each, through `span_mask`, `block_mask` and compiled FlexAttention, beside the
fields of `AttentionSpec` that say the same. CUDA graphs; a figure is the median of replays. The
last column is the largest difference from the first row's output.

FlexAttention is compiled with Triton, which needs a C compiler; ``--autotune`` lets it search for
its best tiles, a minute or two. What it cannot run is said in a line, and the rest is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flashbsr
import numpy as np
from flashbsr.bench.cuda_runner import find_gpu
from flashbsr.bench.cuda_timing import Gpu, measure

HEADS, KV_HEADS, DIM = 32, 8, 128
BLOCK = 128  # FlexAttention's default too


@dataclass(frozen=True)
class Problem:
    """A mask function over sequences, and the ragged batch and fields that say the same."""

    name: str
    mask_mod: Callable[..., Any]
    lengths: tuple[int, ...]  #: of the sequences that the function sees
    parts: tuple[int, ...]  #: of the requests that the fields see
    fields: dict[str, Any]


def window(batch: int, length: int, width: int) -> Problem:
    def mask_mod(_b: Any, _h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (q_idx - kv_idx < width)

    lengths = (length,) * batch
    fields = {"causal": True, "window_left": width - 1}
    return Problem(f"window {width}, {batch} x {length}", mask_mod, lengths, lengths, fields)


def documents(count: int, length: int) -> Problem:
    def mask_mod(_b: Any, _h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx // length == kv_idx // length) & (kv_idx <= q_idx)

    name = f"{count} documents of {length}"
    return Problem(name, mask_mod, (count * length,), (length,) * count, {"causal": True})


def arrays(torch: Any, problem: Problem, device: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    tokens = sum(problem.lengths)
    return tuple(
        torch.randn(tokens, heads, DIM, device=device, dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )


def ours(torch: Any, problem: Problem, q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """Plan flashbsr's ways; runs by their names, each with an output of its own."""
    task = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16"}
    if q.is_cuda:
        task["backend"] = "cuda"
    lengths = list(problem.lengths)

    def run(attention: flashbsr.Attention, kv: tuple[Any, Any]) -> Callable[[], Any]:
        out = torch.empty_like(q)
        return lambda: attention.run(q, kv, out=out)

    fields = flashbsr.Attention(
        flashbsr.AttentionSpec(**problem.fields), flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, **task)
    )
    indptr = np.cumsum([0, *problem.parts])
    fields.plan(flashbsr.Ragged(indptr, indptr))

    spans = flashbsr.span_mask(problem.mask_mod, lengths, lengths)
    spanned = flashbsr.Attention(
        flashbsr.AttentionSpec(**spans.fields), flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, **task)
    )
    spanned.plan(spans.layout())

    blocked = flashbsr.Attention(
        flashbsr.AttentionSpec(),
        flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, **task),
    )
    blocks = flashbsr.block_mask(problem.mask_mod, lengths, lengths, block_size=BLOCK)
    blocked.plan(blocks.layout())
    pages = tuple(x.view(-1, BLOCK, KV_HEADS, DIM) for x in (k, v))
    return {
        "fields of AttentionSpec": run(fields, (k, v)),
        "span_mask": run(spanned, (k, v)),
        "block_mask": run(blocked, pages),
    }


def flex(
    torch: Any, problem: Problem, q: Any, k: Any, v: Any, call: Callable[..., Any]
) -> Callable[[], Any]:
    """Call FlexAttention, or what it was compiled to, on (B, H, tokens, D), contiguous."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, length = len(problem.lengths), problem.lengths[0]
    blocks = create_block_mask(
        problem.mask_mod, None, None, length, length, device=q.device, BLOCK_SIZE=BLOCK
    )
    dense = [x.view(batch, length, -1, DIM).transpose(1, 2).contiguous() for x in (q, k, v)]

    def run() -> Any:
        with torch.no_grad():
            return call(*dense, block_mask=blocks, enable_gqa=True)

    return run


def as_rows(out: Any, q: Any) -> Any:
    """FlexAttention's output in the order of q."""
    return out.transpose(1, 2).reshape(q.shape)


def time_flex(gpu: Gpu, problem: Problem, qkv: tuple[Any, Any, Any], autotune: bool) -> Any:
    """Seconds and output of compiled FlexAttention; a line of text where it cannot run."""
    try:
        from torch.nn.attention.flex_attention import flex_attention

        mode = "max-autotune-no-cudagraphs" if autotune else None
        run = flex(gpu.torch, problem, *qkv, gpu.torch.compile(flex_attention, mode=mode))
        seconds = measure(gpu.clock, lambda _: run(), compute_bound=True).median
        return seconds, as_rows(run(), qkv[0])
    except Exception as error:  # of any kind: Triton's, its C compiler's, PyTorch's own
        reason = str(error).strip().splitlines() or [""]
        return f"FlexAttention did not run: {type(error).__name__}: {reason[0]}"


def report(name: str, found: tuple[float, Any], first: tuple[float, Any]) -> None:
    difference = float((found[1].float() - first[1].float()).abs().max())
    print(f"  {name:25} {found[0] * 1e6:8.1f} us  {found[0] / first[0]:5.2f}  {difference:.1e}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--autotune", action="store_true", help="let FlexAttention search tiles")
    options = parser.parse_args()
    gpu = find_gpu()
    print(f"{gpu.torch.cuda.get_device_name()}, PyTorch {gpu.torch.__version__}")
    for problem in (window(4, 4096, 1024), documents(8, 2048)):
        qkv = arrays(gpu.torch, problem, gpu.device)
        print(f"\n{problem.name}: time, over the first, largest difference")
        first = None
        for name, run in ours(gpu.torch, problem, *qkv).items():
            seconds = measure(gpu.clock, lambda _, run=run: run(), compute_bound=True).median
            found = (seconds, run())
            first = first or found
            report(name, found, first)
        peer = time_flex(gpu, problem, qkv, options.autotune)
        if isinstance(peer, str):
            print(f"  {peer}")
        else:
            report("FlexAttention, compiled", peer, first)
    return 0


if __name__ == "__main__":
    sys.exit(main())
