# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Measures vLLM on a GPU over flashbsr and over its own backends, and keeps a record.

    python tools/vllm_speed.py                     writes tests/records/vllm-<device>.json
    python tools/vllm_speed.py --only small        engines whose name begins so, nothing is written
    python tools/vllm_speed.py --check             no GPU: is the record good and current?

Every engine (a model, a backend, a model runner of vLLM) is a process. All start at once, wait for
each other, and take turns on a quiet host, four times, forth and back: a host whose speed changes
changes it for all. From the first turn on they share a few of its cores, which may not be equally
fast: their neighbours belong to others. Each generates greedily in vLLM's default mode:

- ``mixed``: 64 prompts of 200 to 2000 tokens; ``long``: 8 of 16000; without a prefix cache, whose
  hashes would be half of a prefill's time,
- ``shared``: 64 prompts that begin with the same 8000 tokens, which the prefix cache has; over
  flashbsr with cascade attention and without.

``first`` is the time to the first token, ``step`` that of each later one (in brackets the least and
the most of a turn), ``build`` what the host takes to prepare attention for a step. The profiler
counts waits for the GPU, and tells how long that was busy, with the first tokens and in a step,
whatever the host does. Two engines in bfloat16 part after a few tokens, so the same weights in
float32 judge: how many of the tokens that an engine chose would they have chosen, after the same
tokens? The record is good if flashbsr's are as many as FlashAttention's but for 2 %. Goals are told
of, and are no failures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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
import speed_records

SOURCES = (
    "python/flashbsr/integrations/vllm/*.py",
    "tools/vllm_speed.py",
    "tools/speed_records.py",
)
VOCAB, TOKENS, ROUNDS = 8192, 64, 4
CORES, STEPS = 4, 8  # STEPS: of the shorter of two generations that the profiler sees
JUDGED = {"mixed": 24, "long": 4, "shared": 4}  # requests: float32 is slow
LESS = 0.02
START, TURN = 240, 60  # seconds that all starts and one turn may take
MODELS: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
              "num_key_value_heads": 4, "num_hidden_layers": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
           "num_key_value_heads": 8, "num_hidden_layers": 8},
}  # fmt: skip
OURS, THEIRS = "CUSTOM", "FLASH_ATTN"
APART, CACHED = ("mixed", "long"), ("shared",)


@dataclass(frozen=True)
class Engine:
    """A model, a backend, a model runner of vLLM, and what it generates."""

    model: str
    backend: str
    runner: int = 1
    workloads: tuple[str, ...] = APART
    cascade: bool = False

    @property
    def base(self) -> str:
        """Name of the engine that this one's times are told over."""
        kind = "cached " if self.workloads == CACHED else "V2 " if self.runner == 2 else ""
        return f"{self.model} {kind}{THEIRS}"


ENGINES = {
    "small FLASH_ATTN": Engine("small", THEIRS),
    "small TRITON_ATTN": Engine("small", "TRITON_ATTN"),
    "small flashbsr": Engine("small", OURS),
    "small V2 FLASH_ATTN": Engine("small", THEIRS, runner=2),
    "small V2 flashbsr": Engine("small", OURS, runner=2),
    "small cached FLASH_ATTN": Engine("small", THEIRS, workloads=CACHED),
    "small cached flashbsr": Engine("small", OURS, workloads=CACHED, cascade=True),
    "small cached flashbsr apart": Engine("small", OURS, workloads=CACHED),
    "8b FLASH_ATTN": Engine("8b", THEIRS),
    "8b flashbsr": Engine("8b", OURS),
    "8b cached FLASH_ATTN": Engine("8b", THEIRS, workloads=CACHED),
    "8b cached flashbsr": Engine("8b", OURS, workloads=CACHED, cascade=True),
    "8b cached flashbsr apart": Engine("8b", OURS, workloads=CACHED),
}
# Over FLASH_ATTN of the same model: first tokens, later ones, all.
GOALS = {"mixed": (1.15, 1.0, 1.05), "long": (1.2, 1.0, 1.12), "shared": (1.0, 1.3, 1.0)}


def source_hash() -> str:
    """Give 16 hex digits over the integration and this program; kernels have their own record."""
    return engines.source_hash(SOURCES)


def prompts() -> dict[str, list[list[int]]]:
    """Make the token ids of every workload."""
    numbers = random.Random(1)

    def some(count: int) -> list[int]:
        return [numbers.randrange(3, VOCAB) for _ in range(count)]

    system = some(8000)
    return {
        "mixed": [some(numbers.randint(200, 2000)) for _ in range(64)],
        "long": [some(16000) for _ in range(8)],
        "shared": [system + some(numbers.randint(16, 64)) for _ in range(64)],
    }


def save_model(name: str, out: Path) -> None:
    """Write a Llama of random weights whose greedy tokens are no ties.

    Weights have a standard deviation of 0.08; those of queries and keys 0.03, or their logits are
    so large that rounding to bfloat16 alone changes one token in four.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, head_dim=128, max_position_embeddings=32768, bos_token_id=0,
        eos_token_id=1, **MODELS[name],
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter, tensor in model.named_parameters():
            if tensor.ndim == 2:
                tensor.normal_(0, 0.03 if "q_proj" in parameter or "k_proj" in parameter else 0.08)
    model.generation_config.eos_token_id = None
    model.save_pretrained(out)


def timed_builds(backend: str) -> list[float]:
    """Make the backend's builder note the seconds of every call of `build`."""
    took: list[float] = []
    if backend == OURS:
        from flashbsr.integrations.vllm.backend import FlashbsrBuilder as Builder
    elif backend == THEIRS:
        from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder as Builder
    else:
        return took
    build = Builder.build

    def timed(*args: Any, **more: Any) -> Any:
        begin = time.perf_counter()
        made = build(*args, **more)
        took.append(time.perf_counter() - begin)
        return made

    Builder.build = timed
    return took


@dataclass(frozen=True)
class Seen:
    """What the profiler saw of a call: waits of the host for the GPU, and when that was busy."""

    waits: int
    gpu_ms: float


def profiled(call: Any) -> Seen:
    """Look at a call."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()  # of all calls that are compared
    names = "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"
    events = list(seen.events())
    spans = [(e.time_range.start, e.time_range.end) for e in events
             if e.device_type == DeviceType.CUDA]  # fmt: skip
    return Seen(sum(event.name in names for event in events), covered(spans) * 1e-3)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Give the length of what spans cover: kernels begin before those ahead of them end."""
    total = reached = 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def stay_on_cores() -> None:
    """Keep all threads of this process on the first cores that it may use."""
    some = sorted(os.sched_getaffinity(0))[:CORES]
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), some)


def generate(name: str, model: Path, folder: Path) -> None:
    """Be an engine: get ready, wait, take a turn, leave a file."""
    engine = ENGINES[name]
    builds = timed_builds(engine.backend)
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=20000,
        kv_cache_memory_bytes=(3 if engine.model == "small" else 6) << 30,
        gpu_memory_utilization=0.05, max_num_batched_tokens=8192, max_num_seqs=64, block_size=16,
        disable_log_stats=True, enable_prefix_caching=engine.workloads == CACHED,
        disable_cascade_attn=not engine.cascade,
        compilation_config={"cudagraph_capture_sizes": [1, 8, 16, 32, 64]},
        attention_config={"backend": engine.backend},
    )  # fmt: skip

    def run(batch: list[list[int]], tokens: int) -> Any:
        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        got = llm.generate([{"prompt_token_ids": ids} for ids in batch], how, use_tqdm=False)
        return time.perf_counter() - begin, [list(g.outputs[0].token_ids) for g in got]

    stay_on_cores()
    asked = prompts()
    found: dict[str, Any] = {w: {"first": [], "total": [], "build": []} for w in engine.workloads}
    (folder / f"{name}.ready").touch()
    for number in range(ROUNDS + 2):
        while not (folder / f"{name}.{number}").exists():
            time.sleep(0.01)
        for workload in engine.workloads if number <= ROUNDS else ():
            batch, noted = asked[workload], found[workload]
            if number == 0:  # loads kernels, and fills the cache
                noted["tokens"] = run(batch, TOKENS)[1][: JUDGED[workload]]
                continue
            noted["first"].append(run(batch, 1)[0])
            noted["total"].append(run(batch, TOKENS)[0])
            noted["build"] += builds[-TOKENS:]
        if number <= ROUNDS:
            (folder / f"{name}.{number}.done").touch()
    for workload in engine.workloads:
        first, few, many = (
            profiled(lambda w=workload, n=n: run(asked[w], n))
            for n in (1, 1 + STEPS, 1 + 3 * STEPS)
        )
        found["waits_per_step"] = (many.waits - few.waits) / (2 * STEPS)
        found[workload] |= {
            "gpu_first_ms": first.gpu_ms, "gpu_step_ms": (many.gpu_ms - few.gpu_ms) / (2 * STEPS)
        }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(found))
    os._exit(0)  # an orderly end takes vLLM seconds


def start(name: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start an engine in a process of its own."""
    engine = ENGINES[name]
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_USE_V2_MODEL_RUNNER": str(engine.runner - 1),
        # Free when it was asked for, a port may be another engine's when it is listened on.
        "VLLM_PORT": str(21000 + 200 * list(ENGINES).index(name)),
    }  # fmt: skip
    command = [sys.executable, __file__, "--engine", name, str(folder / engine.model), str(folder)]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def take_turn(process: subprocess.Popen[bytes], turn: Path) -> None:
    """Let an engine have the host for itself, until it is done or leaves; one that hangs ends."""
    turn.touch()
    begin = time.monotonic()
    while process.poll() is None and not turn.with_name(f"{turn.name}.done").exists():
        if time.monotonic() - begin > TURN:
            process.kill()
        time.sleep(0.01)


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Give what a record keeps of the rounds: medians, over all requests of a workload."""
    asked = prompts()
    for workload, noted in found.items():
        if workload == "waits_per_step":
            continue
        rounds = [noted.pop(key) for key in ("first", "total")]
        steps = [(b - a) / (TOKENS - 1) * 1e3 for a, b in zip(*rounds, strict=True)]
        first, total = map(statistics.median, rounds)
        builds = noted.pop("build")
        noted |= {
            "first_ms": first * 1e3,
            "step_ms": statistics.median(steps),
            "step_ms_least_and_most": [min(steps), max(steps)],
            "total_ms": total * 1e3,
            "tokens_per_s": len(asked[workload]) * TOKENS / total,
            "build_us": statistics.median(builds) * 1e6 if builds else None,
        }
    return found


def measure(names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run all engines; what each found, or its problem."""
    for kind in {ENGINES[name].model for name in names}:
        save_model(kind, folder / kind)
    running = {name: start(name, folder) for name in names}
    begin = time.monotonic()
    while time.monotonic() - begin < START:
        if all((folder / f"{n}.ready").exists() or p.poll() is not None
               for n, p in running.items()):  # fmt: skip
            break
        time.sleep(0.5)
    print(f"{len(list(folder.glob('*.ready')))} of {len(names)} engines ready in "
          f"{time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
    for number in range(ROUNDS + 2):
        for name in names if number % 2 else names[::-1]:
            take_turn(running[name], folder / f"{name}.{number}")
    outcomes: dict[str, Any] = {}
    for name, process in running.items():
        process.kill()
        path = folder / f"{name}.json"
        outcomes[name] = summary(json.loads(path.read_text())) if path.exists() else {
            "problem": (folder / f"{name}.log").read_text()[-1500:]
        }  # fmt: skip
    return outcomes


def judge(outcomes: dict[str, Any], folder: Path) -> None:
    """Replace the tokens by the part of them that the same weights in float32 choose, too."""
    import torch
    from transformers import AutoModelForCausalLM

    asked = prompts()
    for kind in MODELS:
        mine = [o for n, o in outcomes.items() if ENGINES[n].model == kind and "problem" not in o]
        if not mine:
            continue
        model = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float32).cuda()
        for outcome in mine:
            for workload, batch in asked.items():
                if workload not in outcome:
                    continue
                same = count = 0
                for prompt, new in zip(batch, outcome[workload].pop("tokens"), strict=False):
                    ids = torch.tensor([prompt + new], device="cuda")
                    with torch.inference_mode():
                        logits = model(ids, logits_to_keep=len(new) + 1).logits[0, :-1]
                    same += int((logits.argmax(-1).cpu() == torch.tensor(new)).sum())
                    count += len(new)
                outcome[workload]["agreement"] = same / count
        del model


def lines(outcomes: dict[str, Any]) -> tuple[bool, list[str]]:
    """Say how it went, and whether it is good."""
    good, said = True, []
    for name, outcome in outcomes.items():
        engine = ENGINES[name]
        if "problem" in outcome:
            good = False
            said.append(f"{name}: FAILED: {outcome['problem']}")
            continue
        said.append(f"{name}: waits for the GPU {outcome['waits_per_step']:.1f} times a step")
        base = outcomes.get(engine.base, {})
        for workload in engine.workloads:
            goals, r = GOALS[workload], outcome[workload]
            build = "" if r["build_us"] is None else f", build {r['build_us']:.0f} us"
            least, most = r["step_ms_least_and_most"]
            text = (
                f"  {workload:<6} first {r['first_ms']:7.1f} ms, "
                f"step {r['step_ms']:5.2f} ms ({least:.2f} to {most:.2f}), "
                f"{r['tokens_per_s']:6.0f} tokens/s{build}, GPU {r['gpu_first_ms']:.1f} and "
                f"{r['gpu_step_ms']:.2f} ms, as float32 {r['agreement']:.1%}"
            )
            if engine.backend == OURS and workload in base:
                b = base[workload]
                text += "; GPU " + ", ".join(
                    f"{b[key] / r[key]:.2f}" for key in ("gpu_first_ms", "gpu_step_ms")
                )
                times = [b[key] / r[key] for key in ("first_ms", "step_ms", "total_ms")]
                text += "; " + ", ".join(
                    f"{x:.2f}" + f" (goal {goal})" * (x < goal)
                    for x, goal in zip(times, goals, strict=True)
                )
                wrong = r["agreement"] < b["agreement"] - LESS
                good &= not wrong
                text += "  WRONG" * wrong
            said.append(text)
    return good, said


def record(names: Sequence[str]) -> int:
    """Measure, and keep what all engines found."""
    with tempfile.TemporaryDirectory() as name:
        outcomes = measure(names, Path(name))
        judge(outcomes, Path(name))
    good, said = lines(outcomes)
    print("\n".join(said))
    if set(names) == set(ENGINES):
        speed_records.keep("vllm", outcomes, source_hash())
    return 0 if good else 1


def check(folder: Path = speed_records.RECORDS) -> int:
    """Print the verdict on every record; 0 only if there is one and all are good and current."""
    return speed_records.check("vllm", list(ENGINES), source_hash(), lines, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="judge the record")
    parser.add_argument("--only", default="", metavar="PREFIX", help="of the names of engines")
    parser.add_argument("--engine", nargs=3, metavar=("NAME", "MODEL", "FOLDER"),
                        help="be one of the processes")  # fmt: skip
    args = parser.parse_args(argv)
    if args.check:
        return check()
    if args.engine:
        name, model, folder = args.engine
        generate(name, Path(model), Path(folder))
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("vllm_speed: needs a GPU (--check does not)")
    return record([name for name in ENGINES if name.startswith(args.only)])


if __name__ == "__main__":
    sys.exit(main())
