# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Measures SGLang on a GPU over flashbsr and over its own triton backend, and keeps a record.

    python tools/sglang_speed.py           writes tests/records/sglang-<device>.json
    python tools/sglang_speed.py --check   no GPU: is the record good and current?

A Llama of random weights in bfloat16 (16 layers, 32 query and 8 KV heads of 128) generates
greedily, decode steps in CUDA graphs, without the radix cache. Every engine is processes of its
own. All start at once, wait for each other, and take turns, forth and back:

- ``mixed``: 60 prompts of 200 to 2000 tokens, which SGLang pads to the 64 of a graph,
- ``long``: 16 prompts of 8000.

``first`` is the time to the first token, ``step`` that of each later one (in brackets the least and
the most of a turn). Two engines in bfloat16 part after a few tokens, so the same weights in float32
judge: how many of the tokens that an engine chose would they have chosen, after the same tokens?
The record is good if flashbsr's are as many as triton's but for 3 %.

Where SGLang's CUDA kernels (sgl_kernel) cannot be imported, both engines compute the rest with
PyTorch, as in tools/engines.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
import engines_sglang
import engines_sglang_gpu
import speed_records
from engines_sglang_gpu import OURS, THEIRS
from transformers_speed import LESS, agreement
from vllm_speed import take_turn

SOURCES = (
    *engines_sglang_gpu.SOURCES,
    "tools/sglang_speed.py",
    "tools/speed_records.py",
    "tools/transformers_speed.py",
)
VOCAB, TOKENS, ROUNDS = 8192, 64, 4
JUDGED = {"mixed": 8, "long": 4}  # requests: float32 is slow
START = 180  # seconds that all starts may take
PORT = 25000


@dataclass(frozen=True)
class Engine:
    """A backend, and the tokens of a page."""

    backend: str
    page: int


ENGINES = {
    THEIRS: Engine(THEIRS, 1),
    OURS: Engine(OURS, 1),
    f"{OURS} pages of 16": Engine(OURS, 16),
}


def source_hash() -> str:
    """Give 16 hex digits over the integration and this program; kernels have their own record."""
    return engines.source_hash(SOURCES)


def prompts() -> dict[str, list[list[int]]]:
    """Make the token ids of every workload."""
    numbers = random.Random(1)

    def some(count: int) -> list[int]:
        return [numbers.randrange(3, VOCAB) for _ in range(count)]

    return {
        "mixed": [some(numbers.randint(200, 2000)) for _ in range(60)],
        "long": [some(8000) for _ in range(16)],
    }


def save_model(out: Path) -> None:
    """Write a Llama of random weights whose greedy tokens are no ties.

    Weights have a standard deviation of 0.08; those of queries and keys 0.03, or their logits are
    so large that rounding to bfloat16 alone changes one token in four.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=2048, intermediate_size=4096, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=16384,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim == 2:
                tensor.normal_(0, 0.03 if "q_proj" in name or "k_proj" in name else 0.08)
    model.save_pretrained(out)


def generate(name: str, folder: Path) -> None:
    """Be an engine: get ready, wait, take a turn, leave a file."""
    import sglang

    engine = ENGINES[name]
    server = sglang.Engine(
        model_path=str(folder / "model"), skip_tokenizer_init=True, dtype="bfloat16",
        attention_backend=engine.backend, page_size=engine.page, max_total_tokens=150000,
        max_running_requests=64, context_length=9000, chunked_prefill_size=8192, random_seed=0,
        log_level="error", mem_fraction_static=0.4, disable_radix_cache=True,
        disable_prefill_cuda_graph=True, cuda_graph_bs_decode=[16, 32, 64],
        nccl_port=PORT + 50 * list(ENGINES).index(name), **engines_sglang_gpu.OPTIONS,
    )  # fmt: skip

    def run(batch: list[list[int]], tokens: int) -> Any:
        how = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        begin = time.perf_counter()
        got = server.generate(input_ids=batch, sampling_params=how)
        return time.perf_counter() - begin, [list(g["output_ids"]) for g in got]

    asked = prompts()
    found: dict[str, Any] = {w: {"first": [], "total": []} for w in asked}
    (folder / f"{name}.ready").touch()
    for number in range(ROUNDS + 1):
        while not (folder / f"{name}.{number}").exists():
            time.sleep(0.01)
        for workload, batch in asked.items():
            noted = found[workload]
            if number == 0:  # loads kernels
                noted["tokens"] = run(batch, TOKENS)[1][: JUDGED[workload]]
                continue
            noted["first"].append(run(batch, 1)[0])
            noted["total"].append(run(batch, TOKENS)[0])
        if number == ROUNDS:
            (folder / f"{name}.json").write_text(json.dumps(found))
        (folder / f"{name}.{number}.done").touch()
    server.shutdown()


def start(name: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start an engine in processes of its own."""
    place = folder / f"{name} imports"
    place.mkdir()
    environment = engines_sglang.environment_of(
        place, engines_sglang_gpu.ON_GPU, engines_sglang_gpu.NATIVE
    )
    command = [sys.executable, __file__, "--engine", name, str(folder)]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT,
                                start_new_session=True)  # fmt: skip


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Give what a record keeps of the rounds: medians, over all requests of a workload."""
    asked = prompts()
    for workload, noted in found.items():
        rounds = [noted.pop(key) for key in ("first", "total")]
        steps = [(b - a) / (TOKENS - 1) * 1e3 for a, b in zip(*rounds, strict=True)]
        first, total = map(statistics.median, rounds)
        noted |= {
            "first_ms": first * 1e3,
            "step_ms": statistics.median(steps),
            "step_ms_least_and_most": [min(steps), max(steps)],
            "total_ms": total * 1e3,
            "tokens_per_s": len(asked[workload]) * TOKENS / total,
        }
    return found


def measure(folder: Path) -> dict[str, Any]:
    """Run all engines; what each found, or its problem."""
    save_model(folder / "model")
    running = {name: start(name, folder) for name in ENGINES}
    begin = time.monotonic()
    while time.monotonic() - begin < START and not all(
        (folder / f"{name}.ready").exists() or process.poll() is not None
        for name, process in running.items()
    ):
        time.sleep(0.5)
    print(f"{len(list(folder.glob('*.ready')))} of {len(ENGINES)} engines ready in "
          f"{time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
    names = list(ENGINES)
    for number in range(ROUNDS + 1):
        for name in names if number % 2 else names[::-1]:
            take_turn(running[name], folder / f"{name}.{number}")
    outcomes: dict[str, Any] = {}
    for name, process in running.items():
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):  # the scheduler is in the group, too
            os.killpg(process.pid, signal.SIGKILL)
        path = folder / f"{name}.json"
        outcomes[name] = summary(json.loads(path.read_text())) if path.exists() else {
            "problem": (folder / f"{name}.log").read_text(errors="replace")[-1500:]
        }  # fmt: skip
        runs = (folder / f"{name} imports" / "runs").stat().st_size
        if (runs > 0) != (ENGINES[name].backend == OURS):
            outcomes[name] = {"problem": f"flashbsr ran {runs} times"} | outcomes[name]
    return outcomes


def judge(outcomes: dict[str, Any], folder: Path) -> None:
    """Replace the tokens by the part of them that the same weights in float32 choose, too."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).cuda()
    for outcome in outcomes.values():
        for workload, batch in prompts().items():
            if "problem" not in outcome:
                tokens = outcome[workload].pop("tokens")
                outcome[workload]["agreement"] = agreement(model, batch, tokens)


def lines(outcomes: dict[str, Any]) -> tuple[bool, list[str]]:
    """Say how it went, and whether it is good."""
    good, said = True, []
    base = outcomes.get(THEIRS, {})
    for name, outcome in outcomes.items():
        if "problem" in outcome:
            good = False
            said.append(f"{name}: FAILED: {outcome['problem']}")
            continue
        said.append(f"{name}:")
        for workload in JUDGED:
            r = outcome[workload]
            least, most = r["step_ms_least_and_most"]
            text = (
                f"  {workload:<6} first {r['first_ms']:7.1f} ms, "
                f"step {r['step_ms']:5.2f} ms ({least:.2f} to {most:.2f}), "
                f"{r['tokens_per_s']:6.0f} tokens/s, as float32 {r['agreement']:.1%}"
            )
            if name != THEIRS and workload in base:
                b = base[workload]
                times = [b[key] / r[key] for key in ("first_ms", "step_ms", "total_ms")]
                text += "; " + ", ".join(f"{x:.2f}" for x in times) + " times as fast"
                wrong = r["agreement"] < b["agreement"] - LESS
                good &= not wrong
                text += "  WRONG" * wrong
            said.append(text)
    return good, said


def record() -> int:
    """Measure, and keep what all engines found."""
    with tempfile.TemporaryDirectory() as name:
        outcomes = measure(Path(name))
        judge(outcomes, Path(name))
    good, said = lines(outcomes)
    print("\n".join(said))
    speed_records.keep("sglang", outcomes, source_hash())
    return 0 if good else 1


def check(folder: Path = speed_records.RECORDS) -> int:
    """Print the verdict on every record; 0 only if there is one and all are good and current."""
    return speed_records.check("sglang", list(ENGINES), source_hash(), lines, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="judge the record")
    parser.add_argument("--engine", choices=list(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.check:
        return check()
    if args.engine:
        generate(args.engine, args.folder)
        return 0
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("sglang_speed: needs a GPU (--check does not)")
    return record()


if __name__ == "__main__":
    sys.exit(main())
