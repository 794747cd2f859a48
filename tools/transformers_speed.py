# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Measures transformers on a GPU over flashbsr and over its own sdpa, and keeps a record.

    python tools/transformers_speed.py           writes tests/records/transformers-<device>.json
    python tools/transformers_speed.py --check   no GPU: is the record good and current?

A Llama of random weights in bfloat16 (16 layers, 32 query and 8 KV heads of 64, as Llama 3.2 1B)
generates greedily with each attention in turns, after a turn that warms up. Two models in bfloat16
part after a few tokens, so the same weights in float32 judge: of the tokens that each attention
chose, how many would they have chosen, after the same tokens? A row is good if flashbsr's are as
many but for 3 %. Goals are tokens per second over those of sdpa; a missed one is told of, and no
failure. Each row is a process, and may take `LIMIT` seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
import gpu_hash
import speed_records

EXAMPLE = gpu_hash.ROOT / "examples" / "engines" / "transformers_generate.py"
SOURCES = (
    "python/flashbsr/integrations/transformers/*.py",
    "tools/transformers_speed.py",
    "tools/speed_records.py",
    "examples/engines/transformers_generate.py",
)
TURNS, SECONDS = 3, 20.0  # turns of a row, and more while they fit: hosts vary by a fifth
LIMIT = 180
LAYERS, HIDDEN = 16, 2048
JUDGED = 8  # requests of a row: float32 is slow
LESS = 0.03


@dataclass(frozen=True)
class Row:
    """A batch: `shortest` to `longest` tokens of each prompt, and new ones of each request."""

    way: str
    requests: int
    shortest: int
    longest: int
    tokens: int
    goal: float


ROWS = {
    "generate 8 x 100 to 200": Row("padded", 8, 100, 200, 64, 0.95),
    "generate 16 x 8000": Row("padded", 16, 8000, 8000, 64, 1.0),
    "generate_batch 8 x 100 to 200": Row("continuous", 8, 100, 200, 64, 0.95),
    "generate_batch 16 x 8000": Row("continuous", 16, 8000, 8000, 64, 1.0),
}


def source_hash() -> str:
    """Give 16 hex digits over the integration and this program; kernels have their own record."""
    return engines.source_hash(SOURCES)


def example() -> Any:
    """Import the example, which makes models and generates."""
    spec = importlib.util.spec_from_file_location("transformers_generate", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def agreement(judge: Any, prompts: list[list[int]], tokens: list[list[int]]) -> float:
    """Tell which part of the new tokens the model in float32 would have chosen, too."""
    import torch

    same = count = 0
    with torch.inference_mode():
        for prompt, new in zip(prompts[:JUDGED], tokens, strict=False):
            ids = torch.tensor([prompt + new], device=judge.device)
            logits = judge(ids, logits_to_keep=len(new) + 1).logits[0, :-1]
            same += int((logits.argmax(-1).cpu() == torch.tensor(new)).sum())
            count += len(new)
    return same / count


def measure(row: Row, program: Any, model: Any) -> dict[str, Any]:
    """Generate with both attentions in turns."""
    import torch
    from flashbsr.integrations import transformers as door

    numbers = random.Random(0)
    lengths = [numbers.randint(row.shortest, row.longest) for _ in range(row.requests)]
    prompts = [[numbers.randrange(3, program.VOCAB) for _ in range(n)] for n in lengths]
    way = getattr(program, row.way)
    seconds: dict[str, list[float]] = {"sdpa": [], door.register(): []}
    tokens: dict[str, Any] = {}
    start = time.perf_counter()
    while len(seconds["sdpa"]) <= TURNS or time.perf_counter() - start < SECONDS:
        for name, took in seconds.items():
            model.set_attn_implementation(name)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            tokens[name] = way(model, prompts, row.tokens)[0]
            torch.cuda.synchronize()
            took.append(time.perf_counter() - begin)
    model.set_attn_implementation("sdpa")
    judge = model.float()
    agree = {name: agreement(judge, prompts, found) for name, found in tokens.items()}
    new = row.requests * row.tokens
    speed = {name: new / statistics.median(took[1:]) for name, took in seconds.items()}
    return {
        "ok": agree[door.NAME] >= agree["sdpa"] - LESS,
        "tokens_per_s": speed,
        "times": speed[door.NAME] / speed["sdpa"],
        "seconds": {name: took[1:] for name, took in seconds.items()},
        "goal": row.goal,
        "agreement": agree,
    }


def measured_apart(name: str) -> dict[str, Any]:
    """Measure a row in a process of its own."""
    command = [sys.executable, __file__, "--row", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return {"ok": False, "problem": f"took longer than {LIMIT} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"ok": False, "problem": done.stderr[-1500:]}
    return dict(json.loads(lines[-1]))


def line(name: str, outcome: dict[str, Any]) -> str:
    """Say how a row went."""
    if "problem" in outcome:
        return f"{name:<30} FAILED: {outcome['problem']}"
    own, ours = outcome["tokens_per_s"].values()
    theirs, our = outcome["agreement"].values()
    said = "" if outcome["ok"] else "  WRONG"
    said += "" if outcome["times"] >= outcome["goal"] else "  goal missed"
    return (
        f"{name:<30} sdpa {own:8.1f}  fbsr {ours:8.1f} tokens/s  {outcome['times']:5.2f} times "
        f"(goal {outcome['goal']}); as float32: {theirs:.1%}, {our:.1%}{said}"
    )


def lines(outcomes: dict[str, Any]) -> tuple[bool, list[str]]:
    """Say how all went, and whether it is good."""
    good = all(outcome["ok"] for outcome in outcomes.values())
    return good, [line(name, outcome) for name, outcome in outcomes.items()]


def record() -> int:
    """Measure all rows and keep them."""
    outcomes: dict[str, Any] = {}
    for name in ROWS:
        outcomes[name] = measured_apart(name)
        print(line(name, outcomes[name]), flush=True)
    speed_records.keep("transformers", outcomes, source_hash())
    return 0 if lines(outcomes)[0] else 1


def check(folder: Path = speed_records.RECORDS) -> int:
    """Print the verdict on every record; 0 only if there is one and all are good and current."""
    return speed_records.check("transformers", list(ROWS), source_hash(), lines, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="judge the record")
    parser.add_argument("--row", choices=list(ROWS), help="measure one, print it as JSON")
    args = parser.parse_args(argv)
    if args.check:
        return check()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("transformers_speed: needs a GPU (--check does not)")
    if args.row is None:
        return record()
    program = example()
    model = program.make_model(LAYERS, HIDDEN, torch.bfloat16)
    # With 0.08 logits are so large that rounding to bfloat16 alone changes two tokens in five.
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "q_proj" in parameter_name or "k_proj" in parameter_name:
                parameter.normal_(0, 0.03)
    print(json.dumps(measure(ROWS[args.row], program, model)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
