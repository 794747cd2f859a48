# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The host's side of the CUDA engine on a fake driver: no GPU needed, see fake_cuda/driver.cpp."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from fake_cuda.build import driver_folder, run_tests
from harness import framework

__all__ = ["driver_folder"]  # a fixture

torch = framework("torch")


@pytest.mark.parametrize(
    ("files", "selection", "device"),
    [
        (["fake_cuda/host_path.py", "fake_cuda/captured_runs.py"], "", {}),
        (["fake_cuda/captured_walk.py"], "", {}),
        (["fake_cuda/bounds_runs.py"], "", {}),
        (["fake_cuda/vllm_steps.py"], "", {}),
        pytest.param(
            ["fake_cuda/transformers_steps.py"],
            "",
            {},
            marks=pytest.mark.skipif(
                importlib.util.find_spec("transformers") is None,
                reason="transformers is not installed",
            ),
        ),
        (["fake_cuda/vllm_latents.py", "fake_cuda/vllm_prefixes.py"], "", {"FAKE_CUDA_SMS": "132"}),
        (["fake_cuda/xla_nodes.py"], "", {}),
        (["fake_cuda/peer_merges.py"], "", {"FAKE_CUDA_SMS": "132"}),
        (["layout/test_bounds.py", "layout/test_padded.py"], "cuda", {"FAKE_CUDA_SMS": "132"}),
        (["fake_cuda/hopper_args.py"], "", {}),
        # What a plan chooses depends on how many there are: as on an H200.
        (["fake_cuda/kernel_cases.py"], "", {"FAKE_CUDA_SMS": "132"}),
        (
            ["fake_cuda/tile_rows.py", "fake_cuda/mixed_capacity.py"],
            "",
            {"FAKE_CUDA_SMS": "132"},
        ),
        (["fake_cuda/nvfp4_outputs.py"], "", {}),
        (["fake_cuda/apart.py"], "", {"FAKE_CUDA_SMS": "132"}),
        (["fake_cuda/dense_pages.py", "fake_cuda/pairs.py"], "", {"FAKE_CUDA_SMS": "132"}),
        (["fake_cuda/jit_kernels.py", "fake_cuda/jit_copies.py", "fake_cuda/jit_rare.py"], "", {}),
        (["fake_cuda/jit_other_gpu.py"], "", {"FAKE_CUDA_CAPABILITY": "89"}),
        *[
            (
                ["fake_cuda/latent_rows.py"],
                "",
                {"FAKE_CUDA_CAPABILITY": capability, "FAKE_CUDA_SMS": "132"},
            )
            for capability in ("80", "89", "90", "120")
        ],
        *[
            (["fake_cuda/shares.py"], "", {"FAKE_CUDA_CAPABILITY": x, "FAKE_CUDA_SMS": "132"})
            for x in ("80", "90")
        ],
        # Some of the cases that a real GPU runs: layouts, variants, types, outputs.
        (["engine/test_attention.py"], "cuda and (mixed or positions or new_outputs or one_)", {}),
        (
            ["engine/test_latent.py"],
            "cuda and (parts or bounds or no_keys)",
            {"FAKE_CUDA_SMS": "132"},
        ),
        (
            ["engine/test_latent_float8.py"],
            "cuda and (bounds or masks or wrong)",
            {"FAKE_CUDA_SMS": "132"},
        ),
        (["engine/test_kv_codes_cuda.py", "engine/test_kv_codes_ends_cuda.py"], "cuda", {}),
        (
            ["fake_cuda/turing.py", "engine/test_kv_codes_cuda.py"],
            "codes or layouts or split or kernel or hooks or says_so or float8",
            {"FAKE_CUDA_CAPABILITY": "75"},
        ),
        (["engine/test_kv_codes_two_types_cuda.py"], "arrays or layouts or split", {}),
        (
            ["engine/test_kv_pairs_cuda.py"],
            "(layouts and (nvfp4 or int464)) or groups or queues or nan or prefixes or themselves",
            {"FAKE_CUDA_SMS": "132"},
        ),
        (
            ["engine/test_float8_out_cuda.py"],
            "beside or nan or (hopper_sm90a and bf16_r192_plain) or d128_bf16_r8_plain",
            {"FAKE_CUDA_SMS": "132"},
        ),
        (["engine/test_kv_codes_prefill_cuda.py"], "chunks or few_rows or rope", {}),
        (
            ["engine/test_beside_cpu.py"],
            "cuda",
            {"FAKE_CUDA_SMS": "132", "FLASHBSR_TEST_SEEDS": "12"},
        ),
        (["engine/test_plan_of.py"], "cuda and its_own", {"FAKE_CUDA_SMS": "132"}),
        (["engine/test_float8_q.py"], "without_kernels or families", {}),
        (["layout/test_block_mask.py", "layout/test_layouts.py"], "cuda and (mask or bsr)", {}),
    ],
    ids=[
        "host path",
        "captures",
        "bounds, captured",
        "vLLM",
        "transformers",
        "vLLM, latents",
        "XLA",
        "merges of GPUs",
        "bounds",
        "tensor maps",
        "every kernel",
        "tile rows",
        "outputs in NVFP4",
        "two kernels",
        "NVFP4 in 16 bits",
        "jit",
        "jit, other GPU",
        "latent, 8.0",
        "latent, 8.9",
        "latent, 9.0",
        "latent, 12.0",
        "shares, 8.0",
        "shares, 9.0",
        "cases",
        "latent",
        "latent, eight bits",
        "ends of codes",
        "codes, 7.5",
        "codes of two types",
        "pairs of heads",
        "float8 outputs",
        "chunks over codes",
        "beside the CPU",
        "plans of others",
        "float8 queries",
        "block-sparse",
    ],
)
def test_on_the_fake_driver(
    driver_folder: Path, files: list[str], selection: str, device: dict[str, str]
) -> None:
    run_tests(driver_folder, files, selection, device)
