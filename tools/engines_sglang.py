# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Cases of tools/engines.py: SGLang on the CPU, its torch_native backend beside flashbsr's.

Each case is two processes, one for each backend, with a model of random weights (standard deviation
0.08, or greedy tokens are ties). They generate twice, in chunks of 64 tokens, the second time with
prefixes from the radix cache. What is compared, and how, is as for vLLM.

SGLang's CPU kernels (sgl_kernel) are in no registry, and PyTorch's of the same version have no
torchvision for the CPU. Where they cannot be imported, a module that has every name takes their
place: on the CPU without these kernels SGLang computes with PyTorch, and calls none of the names.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engines_vllm import LOGS, TOKENS, compare
from processes import to_its_end
from small_models import prompts, save_model

VERSIONS = ("0.5.23",)
SOURCES = (
    "python/flashbsr/integrations/sglang/*.py",
    "python/flashbsr/integrations/vllm/kinds.py",
    "python/flashbsr/integrations/vllm/rows.py",
    "python/flashbsr/integrations/vllm/steps.py",
    "tools/engines_sglang.py",
    "tools/processes.py",
    "tools/small_models.py",
)
STAND_IN = """\
import importlib.abc, importlib.machinery, sys, types
__version__, STAND_IN = "0", True
class Anything:
    def __init__(self, name): self.called = name
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return Anything(f"{self.called}.{name}")
    def __call__(self, *a, **k): raise RuntimeError(f"{self.called}: a stand-in was called")
class Inner(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")
class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec): return Inner(spec.name)
    def exec_module(self, module): pass
sys.meta_path.insert(0, Finder())
def __getattr__(name):
    if name.startswith("__") or name == "convert_weight_packed": raise AttributeError(name)
    return Anything(f"{__name__}.{name}")
"""
# The scheduler is a process of its own, which has plug-ins: this one counts, a byte for each run.
# It also has another backend absorb latent attention: torch_native cannot do prompts otherwise. And
# it lets Gemma 3 have a pool for its sliding layers, which SGLang gives no model that can be so
# small, and notes that there is one.
ABSORB, POOLS = "FLASHBSR_ABSORB", "FLASHBSR_POOLS"
COUNTED = """\
import os
import flashbsr
from flashbsr.integrations import sglang
run = flashbsr.Attention.run
def counted(*given, **options):
    with open(os.environ["FLASHBSR_RUNS"], "ab") as out:
        out.write(b".")
    return run(*given, **options)
def register():
    sglang.register()
    flashbsr.Attention.run = counted
    if theirs := os.environ.get("FLASHBSR_ABSORB"):
        from sglang.srt.models.deepseek_common import attention_backend_handler as handler
        method = handler.AttnForwardMethod.MLA
        handler.AttentionBackendRegistry.register(theirs, lambda *_: method)
    if pools := os.environ.get("FLASHBSR_POOLS"):
        from sglang.srt.arg_groups import model_override_base
        from sglang.srt.arg_groups.model_overrides import gemma2_gemma3
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
        model_override_base._MODEL_OVERRIDE_FNS["Gemma3ForCausalLM"].clear()
        keep = SWAKVPool.register_mapping
        def noted(self, mapping):
            open(pools, "w").close()
            keep(self, mapping)
        SWAKVPool.register_mapping = noted
"""


def version() -> str:
    """Give the version of this Python's SGLang."""
    return importlib.metadata.version("sglang")


def packages() -> dict[str, str]:
    """Give what else decides."""
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}


def generate(args: argparse.Namespace, **more: Any) -> None:
    """Generate in this process and SGLang's; tokens and log probabilities go to a file."""
    import sglang

    if args.pools:  # what such models say; Gemma 3's layers are these by turns
        of_windows = {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0, 1]}
        more["json_model_override_args"] = json.dumps(of_windows)
    engine = sglang.Engine(
        model_path=args.model, skip_tokenizer_init=True, dtype=args.dtype,
        attention_backend=args.backend, page_size=args.page, max_total_tokens=8192,
        max_running_requests=8, context_length=512, chunked_prefill_size=64,
        kv_cache_dtype=args.kv,
        enable_mixed_chunk=args.mixed, disable_overlap_schedule=args.apart,
        disable_hybrid_swa_memory=not args.pools, random_seed=0, log_level="error", **more,
    )  # fmt: skip
    how = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    ids = [x["prompt_token_ids"] for x in prompts()]
    passes = []
    for _ in range(2):
        got = engine.generate(
            input_ids=ids, sampling_params=how, return_logprob=True, top_logprobs_num=2,
            logprob_start_len=-1,
        )  # fmt: skip
        metas = [g["meta_info"] for g in got]
        passes.append({
            "cached": sum(m["cached_tokens"] for m in metas),
            "tokens": [g["output_ids"] for g in got],
            "logprobs": [
                [{str(t): p for p, t, *_ in step} for step in m["output_top_logprobs"]]
                for m in metas
            ],
        })  # fmt: skip
    args.out.write_text(json.dumps({"passes": passes}))
    engine.shutdown()


def environment_of(folder: Path, more: dict[str, str], plugin: str = COUNTED) -> dict[str, str]:
    """Give the environment of SGLang's processes; what they import besides is put into `folder`.

    flashbsr is found by its entry point, as by users.
    """
    info = folder / "flashbsr_under_test-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashbsr-under-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nflashbsr_counted = flashbsr_counted:register\n"
    )
    (folder / "flashbsr_counted.py").write_text(plugin)
    for name in ("sgl_kernel", "torchvision"):
        if importlib.util.find_spec(name) is None:
            (folder / f"{name}.py").write_text(f"__path__ = []\n{STAND_IN}")
    runs = folder / "runs"
    runs.write_bytes(b"")
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)]),
        "HF_HUB_OFFLINE": "1", "FLASHBSR_RUNS": str(runs), "SGLANG_PLUGINS": "flashbsr_counted",
        **more,
    }  # fmt: skip


def child(
    program: str, folder: Path, model: Path, environment: dict[str, str], plugin: str = COUNTED,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Generate in processes of their own."""
    environment = environment_of(folder, environment, plugin)
    out, runs = folder / "out.json", Path(environment["FLASHBSR_RUNS"])
    pools = folder / "pools"
    if options.get("pools"):
        environment[POOLS] = str(pools)
    for path in out, pools:
        path.unlink(missing_ok=True)
    command = [sys.executable, program, str(model), str(out)]
    command += [f"--{name}={value}" for name, value in options.items() if value is not True]
    command += [f"--{name}" for name, value in options.items() if value is True]
    status, said = to_its_end(command, environment, 300)
    if not out.exists():
        if LOGS in os.environ:
            name = "_".join(f"{name}_{value}" for name, value in options.items())
            Path(os.environ[LOGS], f"{Path(program).stem}_{name}.log").write_text(said)
        raise RuntimeError(f"exit status {status}: {said[-1500:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    found["runs"] = runs.stat().st_size
    if (found["runs"] > 0) != (options["backend"] == "flashbsr"):
        raise RuntimeError(f"flashbsr ran {found['runs']} times")
    if pools.exists() != bool(options.get("pools")):
        raise RuntimeError(f"a pool for sliding layers: {pools.exists()}")
    return found


def equal(kind: str, dtype: str = "float32", **options: Any) -> dict[str, Any]:
    """Generate with both backends and compare both passes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(kind, folder / "model")
        environment = {"SGLANG_USE_CPU_ENGINE": "1"}
        if kind.startswith("deepseek"):
            environment[ABSORB] = "torch_native"
        both = [
            child(__file__, folder, folder / "model", environment, backend=backend, dtype=dtype,
                  **options)
            for backend in ("torch_native", "flashbsr")
        ]  # fmt: skip
    want, got = (found["passes"] for found in both)
    first, second = (compare(x, y, dtype) for x, y in zip(want, got, strict=True))
    cached = got[1]["cached"]
    good = first["ok"] and second["ok"] and cached > 0
    return {**first, "ok": good, "again": second, "cached_tokens": cached, "runs": both[1]["runs"]}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "llama": partial(equal, "llama"),
    "pages of 16": partial(equal, "llama", page=16),
    "mixed": partial(equal, "qwen3", mixed=True),
    "apart": partial(equal, "qwen3", page=64, apart=True),
    "gemma3": partial(equal, "gemma3"),
    "gemma3 pools": partial(equal, "gemma3", pools=True),
    "bfloat16": partial(equal, "llama", dtype="bfloat16"),
    "deepseek": partial(equal, "deepseek yarn"),
    "deepseek pages of 16": partial(equal, "deepseek yarn", page=16),
}


def arguments() -> argparse.ArgumentParser:
    """Describe one generation."""
    parser = argparse.ArgumentParser(description="One generation, for tools/engines.py.")
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--backend", default="flashbsr")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--page", type=int, default=1)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--pools", action="store_true", help="sliding layers have their own")
    return parser


if __name__ == "__main__":
    generate(arguments().parse_args(), device="cpu")
