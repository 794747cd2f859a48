# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""How long a new variant takes from its text to its first result, and how fast it runs then.

``python tools/first_result.py`` on a machine with a GPU: processes with an empty cache, with a full
one, and with the built-in kernel; head dim 128, bfloat16, 32 query and 8 KV heads. The clock starts
with frameworks imported and a context on the GPU. ``--device cpu`` measures the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

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
VARIANTS = (*TEXTS, "traced ALiBi")
# Requests, query tokens of each, KV tokens of each.
SHAPES = {"decode": (16, 1, 4096), "prefill": (4, 4096, 4096)}

CHILD = """
import json, sys, time
import numpy as np, torch, flashbsr
what, shape, device, text = json.loads(sys.argv[1])
requests, q_len, kv_len = shape
if device == "cpu":
    requests, q_len, kv_len = 1, min(q_len, 512), 512
q = torch.randn(requests * q_len, 32, 128).to(device, torch.bfloat16)
k = torch.randn(requests * kv_len, 8, 128).to(device, torch.bfloat16)
wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
torch.empty(1, device=device)
wait()
qo, kv = (np.arange(requests + 1) * n for n in (q_len, kv_len))
fields, values = {"causal": q_len > 1}, {}
begin = time.perf_counter()
if what == "built in":
    spec = flashbsr.AttentionSpec(**fields)
elif what == "traced ALiBi":
    def alibi(score, b, h, q_idx, kv_idx):
        return score + 0.125 * (kv_idx - q_idx)
    spec = flashbsr.AttentionSpec.from_functions(score_mod=alibi, **fields)
else:
    spec = flashbsr.AttentionSpec.from_source(text, extras={"number": "float32"}, **fields)
    values = {"number": 20.0}
task = flashbsr.TaskInfo(32, 8, 128, q_dtype="bfloat16", kv_dtype="bfloat16")
attention = flashbsr.Attention(spec, task)
attention.settle(q)
attention.plan(qo if q_len > 1 else None, kv)
out = attention.run(q, (k, k), **values)
wait()
first = time.perf_counter() - begin
times = []
for _ in range(30):
    begin = time.perf_counter()
    attention.run(q, (k, k), out=out, **values)
    wait()
    times.append(time.perf_counter() - begin)
print(json.dumps([first, sorted(times)[len(times) // 2], attention._engine.kernel_name()]))
"""


def measure(what: str, shape: str, device: str, folder: str) -> tuple[float, float, str]:
    """Seconds to the first result, of a run after that, and the kernel's name."""
    environment = {
        **os.environ,
        "FLASHBSR_CACHE_DIR": folder,
        "FLASHBSR_QUIET": "1",
        # NVRTC has a cache of its own, which would make every text but the first an old one.
        "CUDA_CACHE_DISABLE": "1",
    }
    arguments = json.dumps([what, SHAPES[shape], device, TEXTS.get(what, "")])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    first, run, kernel = json.loads(done.stdout)
    return first, run, kernel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--times", type=int, default=3, help="processes of each; medians")
    args = parser.parse_args()
    print(
        "| shape | variant | new, s | cached, ms | built in, ms | run, us | built in, us | kernel |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as none:
            plain = [measure("built in", shape, args.device, none) for _ in range(args.times)]
        for what in VARIANTS:
            new, cached = [], []
            for _ in range(args.times):
                with tempfile.TemporaryDirectory() as folder:
                    new.append(measure(what, shape, args.device, folder))
                    cached.append(measure(what, shape, args.device, folder))
            first, again, built_in = (
                statistics.median(seconds for seconds, *_ in x) for x in (new, cached, plain)
            )
            run, plain_run = (statistics.median(x[1] for x in y) for y in (cached, plain))
            print(
                f"| {shape} | {what} | {first:.2f} | {again * 1e3:.0f} | {built_in * 1e3:.0f} | "
                f"{run * 1e6:.0f} | {plain_run * 1e6:.0f} | {cached[-1][2]} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
