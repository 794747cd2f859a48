# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Cases of tools/engines.py: vLLM on GPUs, its own backend beside flashbsr's.

    python tools/engines.py --engine vllm_gpu --jobs 16             on two GPUs of a host
    python tools/engines.py --engine vllm_gpu --only deepseek       on one

Models, prompts and the comparison are those of the CPU, in bfloat16. Latent attention is compared
with transformers in float32, over lists of chosen tokens, too: logits may be as far from it as from
another backend, and their mean as far as the model in bfloat16 is there, and as much again. `two
ranks ...` are two GPUs that share every request's keys (decode context parallelism); they must
choose the tokens that one GPU chooses.
Generations are processes, which cases share, and which share the GPUs: times mean nothing. Those on
one GPU run first, all at once; then those over ranks, two at a time. A collective goes on only
while both GPUs are its processes': beside other cases V2 took more than 180 seconds in place of 95.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

from engines_vllm import LEAST, LOGS, NGRAM, TIE, TOKENS, compare, error, leave, of_process
from small_models import prompts

PLACE = "gpu"
VERSIONS = ("0.26.0",)
SOURCES = (
    "python/flashbsr/integrations/vllm/*.py", "python/flashbsr/distributed/*.py",
    "tools/engines_vllm.py", "tools/engines_vllm_gpu.py", "tools/processes.py",
    "tools/small_models.py",
)  # fmt: skip
DEVICE, SECONDS = "cuda", 180
# Of logits, not log probabilities: a logit is a number of bfloat16, so that two engines are whole
# steps of 2^-4 apart between 8 and 16, of 2^-5 below; the sum in a log probability moves it too.
APART = TIE["bfloat16"]
AS_FAR = 2  # from float32, as a reference of the model's own type is
THEIRS, OURS = "FLASH_ATTN", "CUSTOM"
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4, 8, 32]}


def version() -> str:
    """Give the version of this Python's vLLM."""
    return importlib.metadata.version("vllm").split("+")[0]


def packages() -> dict[str, str]:
    """Give what else decides, and the GPUs."""
    import torch

    found = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    names = "torch", "transformers", "numpy", "triton"
    versions = {name: importlib.metadata.version(name) for name in names}
    return {**versions, "gpus": ", ".join(found)}


def generate(args: argparse.Namespace) -> None:
    """Generate in this process and its workers."""
    if args.backend == "transformers":
        reference(args)
        return
    from vllm import LLM

    if args.chosen:
        choose_everything()
    over: dict[str, Any] = {} if args.ranks == 1 else {
        "tensor_parallel_size": args.ranks, "decode_context_parallel_size": args.ranks,
        "cp_kv_cache_interleave_size": args.interleave, "dcp_comm_backend": args.merge,
        "distributed_executor_backend": "mp", "disable_custom_all_reduce": True,
    }  # fmt: skip
    llm = LLM(
        args.model, skip_tokenizer_init=True, dtype="bfloat16", kv_cache_dtype=args.kv,
        kv_cache_memory_bytes=256 << 20, gpu_memory_utilization=0.05, block_size=32,
        max_model_len=512, max_num_batched_tokens=64, max_num_seqs=8, enable_chunked_prefill=True,
        enable_prefix_caching=True, speculative_config=NGRAM if args.ngram else None,
        attention_config={"backend": args.backend}, enforce_eager=not args.graphs,
        logprobs_mode="raw_logits",
        compilation_config=GRAPHS if args.graphs else {},
        hf_overrides={"index_topk": 512} if args.chosen else {}, **over,
    )  # fmt: skip
    leave(llm, args.out)


def choose_everything() -> None:
    """Put something in the place of an indexer, whose kernels are no matter here.

    For each row it chooses the whole past, newest first, so that tokens must be those of a model
    without an indexer.
    """
    import torch
    from vllm.model_executor.models import deepseek_v2

    class Everything(torch.nn.Module):
        def __init__(self, vllm_config: Any, config: Any, *rest: Any, **_: Any) -> None:  # noqa: ARG002
            super().__init__()
            self.topk_tokens, self.topk_indices_buffer = config.index_topk, rest[4]

        def forward(self, hidden_states: Any, qr: Any, positions: Any, rotary: Any) -> Any:  # noqa: ARG002
            ago = torch.arange(self.topk_tokens, device=positions.device)
            past = positions.unsqueeze(1) - ago
            self.topk_indices_buffer[: len(past)] = past.clamp(min=-1)
            return self.topk_indices_buffer

    deepseek_v2.Indexer = Everything


def reference(args: argparse.Namespace) -> None:
    """Generate with the weights that an engine in bfloat16 has, by `--compute`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    model = model.to(DEVICE, getattr(torch, args.compute))
    found: dict[str, Any] = {"cached": 0, "tokens": [], "logprobs": []}
    for prompt in prompts():
        ids = torch.tensor([prompt["prompt_token_ids"]], device=DEVICE)
        got = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS,
            min_new_tokens=TOKENS, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        best = [logits[0].topk(2) for logits in got.logits]
        found["tokens"].append(got.sequences[0, ids.shape[1] :].tolist())
        found["logprobs"].append(
            [{str(int(i)): float(x) for x, i in zip(*b, strict=True)} for b in best]
        )
    args.out.write_text(json.dumps({"passes": [found, found], "runs": 0}))


POOL = ThreadPoolExecutor(64)
OVER_RANKS = threading.Semaphore(2)
ALONE: list[Future[Any]] = []  # generations on one GPU
FOLDER = tempfile.TemporaryDirectory()
PLACES = itertools.count()  # generations on one GPU take turns of them
ONCE = threading.RLock()


@cache
def model_of(kind: str) -> Future[Path]:
    """Write a model, once."""

    def save() -> Path:
        path = Path(FOLDER.name) / kind
        code = f"save_model({kind!r}, pathlib.Path({str(path)!r}))"
        code = f"import pathlib; from small_models import save_model; {code}"
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
        return path

    return POOL.submit(save)


@cache
def generated(kind: str, backend: str, peers: bool, options: tuple[tuple[str, Any], ...]) -> Any:
    """Start a generation, once; give what it will have found."""

    def run() -> dict[str, Any]:
        folder = Path(tempfile.mkdtemp(dir=FOLDER.name))
        environment = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        environment["VLLM_USE_V2_MODEL_RUNNER"] = str(dict(options).get("runner", 1) - 1)
        # Free when it was asked for, a port may be another engine's when it is listened on.
        environment["VLLM_PORT"] = str(21000 + 200 * place)
        if not over_ranks:
            environment["CUDA_VISIBLE_DEVICES"] = str(place % gpus())
        if peers:
            environment["FLASHBSR_VLLM_MERGE"] = "peers"
        with ONCE:
            model = model_of(kind)
        given = {"backend": backend, **dict(options)}
        if over_ranks:
            wait(list(ALONE))
        with OVER_RANKS if over_ranks else nullcontext():
            return of_process(
                __file__, folder, model.result(), backend == OURS, environment, SECONDS, **given
            )

    place = next(PLACES)
    over_ranks = "ranks" in dict(options)
    started = POOL.submit(run)
    if not over_ranks:
        ALONE.append(started)
    return started


def start(kind: str, backend: str, *, peers: bool = False, **options: Any) -> Future[Any]:
    """Start a generation unless another case has."""
    with ONCE:
        return generated(kind, backend, peers, tuple(options.items()))


def judged(want: Future[Any], got: Future[Any]) -> dict[str, Any]:
    """Compare both passes of two generations."""
    x, y = want.result(), got.result()
    first, second = (alike(a, b) for a, b in zip(x["passes"], y["passes"], strict=True))
    hits = y["passes"][1]["cached"]
    good = first["ok"] and second["ok"] and hits > 0
    return {**first, "ok": good, "again": second, "cached_tokens": hits, "runs": y["runs"]}


def alike(want: dict[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    """Compare a pass with another; logits may be `APART`."""
    found = compare(want, got, "bfloat16")
    apart = found.pop("logprobs_apart")  # a pass has logits in the place of log probabilities
    largest = max(abs(x) for row in want["logprobs"] for best in row for x in best.values())
    enough = found["compared"] >= LEAST["bfloat16"] * found["tokens"]
    good = not found["wrong"] and enough and apart <= APART
    return {**found, "ok": good, "logits_apart": apart, "largest_logit": largest}


def equal(kind: str, **options: Any) -> dict[str, Any]:
    """Compare with another backend of vLLM."""
    want, got = start(kind, THEIRS), start(kind, OURS, **options)
    return judged(want, got)


def near(kind: str, **options: Any) -> dict[str, Any]:
    """Compare with transformers in float32, beside how far transformers in bfloat16 is from that.

    On a CPU that is 0.016 (sdpa) or 0.020 (eager) in the mean, and 0.07 or 0.09 at most.
    """
    exact, rounded = (start(kind, "transformers", compute=x) for x in ("float32", "bfloat16"))
    got = start(kind, OURS, **options).result()
    want, coarse = exact.result()["passes"][0], rounded.result()["passes"][0]
    first, second = (as_near(want, coarse, x) for x in got["passes"])
    hits = got["passes"][1]["cached"]
    good = first["ok"] and second["ok"] and hits > 0
    return {**first, "ok": good, "again": second, "cached_tokens": hits, "runs": got["runs"]}


def as_near(want: dict[str, Any], coarse: dict[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    """Compare a pass with a finer one, to which a `coarse` one has a distance too."""
    found = alike(want, got)
    most, mean = AS_FAR * error(want, coarse), error(want, got)
    return {**found, "ok": found["ok"] and mean <= most, "mean_error": mean, "most": most,
            "logits_of_bfloat16_apart": alike(want, coarse)["logits_apart"]}  # fmt: skip


def spread(kind: str = "mqa", **options: Any) -> dict[str, Any]:
    """Compare two GPUs that share the keys with one that has them all, over both backends.

    Latent attention over one: vLLM's backends of it need its compiled extensions.
    """
    if gpus() < 2:
        return {"ok": True, "skipped": "one GPU"}
    others = {"alone": start(kind, OURS)}
    if kind == "mqa":
        others["theirs"] = start(kind, THEIRS)
    two = start(kind, OURS, ranks=2, **options)
    found = {name: judged(other, two) for name, other in others.items()}
    return {"ok": all(x["ok"] for x in found.values()), **found}


def scaled(kv: str, other: str, **options: Any) -> dict[str, Any]:
    """Check that one type of the cache is nearer to the model's own than another."""
    exact, coarse, fine = (
        start("deepseek", OURS, **({"kv": kind} if kind else {}), **options)
        for kind in ("", other, kv)
    )
    runs = [x.result() for x in (exact, coarse, fine)]
    far, near = (error(runs[0]["passes"][0], x["passes"][0]) for x in runs[1:])
    return {"ok": 0 < near < far, "mean_error": near, f"mean_error_of_{other}": far,
            "cached_tokens": runs[2]["passes"][1]["cached"]}  # fmt: skip


@cache
def gpus() -> int:
    """Count them."""
    import torch

    return max(torch.cuda.device_count(), 1)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "llama": partial(equal, "llama"),
    "llama graphs": partial(equal, "llama", graphs=True),
    "gemma3": partial(equal, "gemma3"),
    "deepseek": partial(near, "deepseek"),
    "deepseek graphs": partial(near, "deepseek", graphs=True),
    "deepseek fp8": partial(scaled, "fp8_ds_mla", "fp8"),
    "deepseek chosen": partial(near, "deepseek", chosen=True),
    "deepseek chosen graphs": partial(near, "deepseek", chosen=True, graphs=True),
    "deepseek chosen fp8": partial(scaled, "fp8_ds_mla", "fp8", chosen=True),
    "two ranks": partial(spread),
    "two ranks V2": partial(spread, graphs=True, runner=2),
    "two ranks graphs": partial(spread, graphs=True, interleave=16),
    "two ranks ngram": partial(spread, ngram=True, interleave=16, merge="a2a"),
    "two ranks ngram graphs": partial(spread, ngram=True, graphs=True),
    "two ranks deepseek": partial(spread, "deepseek", interleave=16),
    "two ranks deepseek graphs": partial(spread, "deepseek", graphs=True),
    "two ranks peers": partial(spread, peers=True, interleave=16),
    "two ranks peers graphs": partial(spread, peers=True, graphs=True),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One generation, for tools/engines.py.")
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--compute", default="float32", help="transformers: in which type")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--ngram", action="store_true")
    parser.add_argument("--chosen", action="store_true", help="tokens of lists, all of the past")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--interleave", type=int, default=1)
    parser.add_argument("--merge", default="ag_rs")
    parser.add_argument("--runner", type=int, default=1, help="vLLM's model runner")
    given = parser.parse_args()
    if LOGS in os.environ:  # of all processes, also of those that hang
        options = [f"{k}_{v}" for k, v in vars(given).items() if k not in ("model", "out") and v]
        peers = os.environ.get("FLASHBSR_VLLM_MERGE", "")
        name = "-".join([Path(given.model).name, *options, peers])
        log = os.open(Path(os.environ[LOGS], f"{name}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
    generate(given)
