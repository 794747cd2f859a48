# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Cases of tools/engines.py: SGLang on a GPU, its triton backend beside flashbsr's.

    python tools/engines.py --engine sglang_gpu --jobs 16

Models and prompts are those of the CPU, in bfloat16 or float16, and so are the processes. Tokens
must be those of triton up to the first tie. Log probabilities of both are compared with those of
transformers in float32, over weights of the engine's type: flashbsr's may be as far from them, in
the mean and at most, as triton's are, and as much again. Both have logits in float32.

Where SGLang's CUDA kernels (sgl_kernel) cannot be imported, a module that has every name takes
their place, and what SGLang would compile when it runs is refused: it computes with PyTorch then,
and with Triton, over both backends. Generations are processes, which cases share, and which share
the GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from typing import Any

import engines_sglang
from engines_sglang import ABSORB, COUNTED, arguments, child
from engines_vllm import LEAST, LOGS, TOKENS, compare, error
from engines_vllm_gpu import AS_FAR, FOLDER, ONCE, POOL, model_of
from small_models import prompts

PLACE = "gpu"
VERSIONS = engines_sglang.VERSIONS
SOURCES = (*engines_sglang.SOURCES, "tools/engines_sglang_gpu.py")
version = engines_sglang.version
THEIRS, OURS, EXACT = "triton", "flashbsr", "transformers"
AT_ONCE = threading.Semaphore(10)  # three processes each, of 3 GB together
PORTS = itertools.count(24000, 50)  # SGLang's own choice may be another engine's before it listens
NATIVE = (
    COUNTED
    + """\
    import sgl_kernel
    if hasattr(sgl_kernel, "STAND_IN"):
        use_pytorch()
def use_pytorch():
    import sgl_kernel.utils
    from sglang.kernels import fused_op
    from sglang.kernels.jit.utils.compile import loader
    from sglang.srt.layers.dual_gemm import DualGemm
    from sglang.srt.models import utils
    def refuse(module_args, **_):
        raise RuntimeError(f"{module_args[0]}: to be compiled when it runs")
    fused_op.set_fused_op_backend(fused_op.KernelBackend.TORCH)
    loader.BuildSpec = refuse
    sgl_kernel.utils.is_arch_support_pdl = bool
    DualGemm._select_mode = lambda *_: None
    utils.enable_fused_set_kv_buffer = lambda *_: False  # rotations that also write the cache
"""
)

ON_GPU = {"TORCHDYNAMO_DISABLE": "1"}  # a few small functions, compiled for each process
if importlib.util.find_spec("sgl_kernel") is None:
    ON_GPU["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"] = "1"
# What `sglang.Engine` gets besides, so that it needs none of its kernels.
OPTIONS = {
    "device": "cuda", "sampling_backend": "pytorch", "grammar_backend": "none",
    "disable_flashinfer_autotune": True, "disable_custom_all_reduce": True,
}  # fmt: skip


def packages() -> dict[str, str]:
    """Give what else decides, and the GPU."""
    import torch

    versions = {
        name: importlib.metadata.version(name) for name in (*engines_sglang.packages(), "triton")
    }
    return {**versions, "gpu": torch.cuda.get_device_name()}


def generate(args: argparse.Namespace) -> None:
    """Generate in this process, or in SGLang's."""
    if args.backend == EXACT:
        reference(args)
        return
    graphs: dict[str, Any] = {"disable_cuda_graph": True}
    if args.graphs:
        graphs = {"disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": [1, 2, 4, 8]}
    engines_sglang.generate(
        args, mem_fraction_static=0.5, nccl_port=args.port, enable_fp32_lm_head=True, **OPTIONS,
        **graphs,
    )  # fmt: skip


def reference(args: argparse.Namespace) -> None:
    """Generate in float32 with the weights that an engine has."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model = model.to("cuda", torch.float32)
    found: dict[str, Any] = {"cached": 0, "tokens": [], "logprobs": []}
    for prompt in prompts():
        ids = torch.tensor([prompt["prompt_token_ids"]], device="cuda")
        got = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS,
            min_new_tokens=TOKENS, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        best = [logits[0].log_softmax(0).topk(2) for logits in got.logits]
        found["tokens"].append(got.sequences[0, ids.shape[1] :].tolist())
        found["logprobs"].append(
            [{str(int(i)): float(x) for x, i in zip(*b, strict=True)} for b in best]
        )
    args.out.write_text(json.dumps({"passes": [found, found]}))


@cache
def generated(kind: str, backend: str, options: tuple[tuple[str, Any], ...]) -> Future[Any]:
    """Start a generation, once; give what it will have found."""
    model, port = model_of(kind), next(PORTS)
    # Both absorb: over expanded keys, which triton has too, SGLang needs its kernels.
    environment = {**ON_GPU, **({ABSORB: THEIRS} if kind.startswith("deepseek") else {})}

    def run() -> dict[str, Any]:
        folder = Path(tempfile.mkdtemp(dir=FOLDER.name))
        with AT_ONCE:
            return child(
                __file__, folder, model.result(), environment, NATIVE, backend=backend, port=port,
                **dict(options),
            )  # fmt: skip

    return POOL.submit(run)


def start(kind: str, backend: str, **options: Any) -> Future[Any]:
    """Start a generation unless another case has."""
    with ONCE:
        return generated(kind, backend, tuple(options.items()))


def equal(kind: str, dtype: str = "bfloat16", **options: Any) -> dict[str, Any]:
    """Compare both passes with triton's, and how far both are from float32."""
    exact, want = (start(kind, backend, dtype=dtype) for backend in (EXACT, THEIRS))
    got = start(kind, OURS, dtype=dtype, **options).result()
    passes = zip(exact.result()["passes"], want.result()["passes"], got["passes"], strict=True)
    first, second = (judged(*three) for three in passes)
    cached = got["passes"][1]["cached"]
    good = first["ok"] and second["ok"] and cached > 0
    return {**first, "ok": good, "again": second, "cached_tokens": cached, "runs": got["runs"]}


def judged(exact: dict[str, Any], want: dict[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    """Compare a pass."""
    found = compare(want, got, "bfloat16")
    far, near = (compare(exact, x, "bfloat16")["logprobs_apart"] for x in (want, got))
    mean_far, mean_near = (error(exact, x) for x in (want, got))
    enough = found["compared"] >= LEAST["bfloat16"] * found["tokens"]
    good = near <= AS_FAR * far and mean_near <= AS_FAR * mean_far
    return {**found, "ok": good and enough and not found["wrong"], "mean_error": mean_near,
            "mean_error_of_triton": mean_far, "largest_error": near,
            "largest_error_of_triton": far}  # fmt: skip


def quantized(kind: str, kv: str, dtype: str = "bfloat16", **options: Any) -> dict[str, Any]:
    """Compare both over a cache of eight bits with float32, whose own rounding parts their tokens.

    flashbsr may be as far from it, in the mean, as triton is, and as much again.
    """
    exact = start(kind, EXACT, dtype=dtype)
    want, got = (
        start(kind, backend, dtype=dtype, kv=kv, **options).result() for backend in (THEIRS, OURS)
    )
    far, near = (error(exact.result()["passes"][0], x["passes"][0]) for x in (want, got))
    cached = got["passes"][1]["cached"]
    return {"ok": near <= AS_FAR * far and cached > 0, "mean_error": near,
            "mean_error_of_triton": far, "cached_tokens": cached, "runs": got["runs"]}  # fmt: skip


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "llama": partial(equal, "llama"),
    "pages of 16": partial(equal, "llama", page=16),
    "graphs": partial(equal, "llama", graphs=True),
    "float16": partial(equal, "llama", dtype="float16"),
    "fp8": partial(quantized, "llama", "fp8_e4m3"),
    "fp8 graphs": partial(quantized, "qwen3", "fp8_e4m3", graphs=True, page=16),
    "mixed": partial(equal, "qwen3", mixed=True),
    "apart": partial(equal, "qwen3", page=64, apart=True),
    "gemma3": partial(equal, "gemma3"),
    "gemma3 graphs": partial(equal, "gemma3", graphs=True, page=16),
    "gemma3 pools": partial(equal, "gemma3", pools=True),
    "gemma3 pools graphs": partial(equal, "gemma3", pools=True, graphs=True, page=16),
    "deepseek": partial(equal, "deepseek"),
    "deepseek graphs": partial(equal, "deepseek", graphs=True, page=64),
}


if __name__ == "__main__":
    parser = arguments()
    parser.add_argument("--graphs", action="store_true", help="decode in CUDA graphs")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    if LOGS in os.environ:  # of all processes, also of those that hang
        options = [f"{k}_{v}" for k, v in vars(given).items() if k not in ("model", "out") and v]
        path = Path(os.environ[LOGS], f"{'-'.join([Path(given.model).name, *options])}.log")
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
    generate(given)
