# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Which kernel and height of tiles a batch gets on as many SMs as an H200 has; test_fake_cuda.py
runs it."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
import torch

from fake_cuda.fake import Driver


def kernel(count: int, q_len: int, kv_len: int, heads: int = 32, **task: Any) -> str:
    """Name of the kernel for equal requests."""
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=True),
        flashbsr.TaskInfo(
            heads, 8, 128, backend="cuda", **{"q_dtype": "bfloat16", "kv_dtype": "bfloat16"} | task
        ),
    )
    steps = np.arange(count + 1)
    attention.plan(flashbsr.Ragged(steps * q_len, steps * kv_len))
    return str(attention._engine.kernel_name())


@pytest.mark.parametrize(("count", "q_len", "kv_len", "rows"), [
    (16, 64, 8192, 128),  # 256 rows a head: two tiles of 128, or one of 192 and a third of one
    (1, 512, 4096, 128),  # 128 tiles, one for each SM, where 88 leave a third of them idle
    (3, 256, 8192, 128),
    (1, 256, 30000, 128),  # 64 tiles in two parts each
    (4, 4096, 4096, 192),  # many tiles: what the last one of a request wastes is little
])  # fmt: skip
def test_the_price_decides(count: int, q_len: int, kv_len: int, rows: int) -> None:
    assert kernel(count, q_len, kv_len) == f"hopper_sm90a_d128_bf16_r{rows}_plain"


@pytest.mark.parametrize(("count", "q_len", "kv_len", "rows"), [
    (16, 64, 8192, 128),  # 222 us, in tiles of 192 rows 294
    (13, 64, 30000, 128),  # 685 and 894
    (1, 512, 4096, 128),  # 62 and 74
    (4, 512, 8192, 192),  # 455 and 416
    (4, 1500, 3000, 192),  # 376 and 355
])  # fmt: skip
def test_the_price_decides_over_float8(count: int, q_len: int, kv_len: int, rows: int) -> None:
    name = kernel(count, q_len, kv_len, kv_dtype="float8_e4m3fn")
    assert name == f"hopper_sm90a_d128_bf16xe4m3_r{rows}_plain"


@pytest.mark.parametrize("task", [
    {"fixed_split_size": 4096},
    {"max_batch_size": 16, "max_q_tokens": 1024, "max_kv_pages": 1 << 18},
], ids=["fixed splits", "a capacity"])  # fmt: skip
def test_where_the_kernel_must_not_depend_on_the_batch(task: dict[str, Any]) -> None:
    assert "_r128_" not in kernel(16, 64, 8192, **task)


@pytest.mark.parametrize("rows", [64, 128, 192])
def test_tiles_that_are_asked_for(rows: int) -> None:
    family = "prefill_sm80" if rows == 64 else "hopper_sm90a"
    assert kernel(3, 256, 8192, tile_rows=rows) == f"{family}_d128_bf16_r{rows}_plain"


def test_few_rows_of_one_head_keep_the_usual_tile() -> None:
    """One warpgroup has them in either."""
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(),
        flashbsr.TaskInfo(64, 1, 128, q_dtype="bfloat16", kv_dtype="bfloat16", backend="cuda"),
    )
    lengths = np.cumsum([0, *(71 + 151 * i for i in range(37))])
    attention.plan(flashbsr.Ragged(None, lengths))
    assert attention._engine.kernel_name() == "hopper_sm90a_d128_bf16_r192_plain"


@pytest.mark.usefixtures("fake_torch")
@pytest.mark.parametrize("known", [False, True], ids=["types unknown", "types known"])
def test_scales_in_float16_take_the_kernel_that_reads_them(driver: Driver, known: bool) -> None:
    types = {"q_dtype": "bfloat16", "kv_dtype": "int8"} if known else {}
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(), flashbsr.TaskInfo(4, 2, 64, backend="cuda", **types)
    )
    q = torch.zeros(40, 4, 64, dtype=torch.bfloat16)
    k = torch.zeros(90, 2, 64, dtype=torch.int8)
    names = []
    for scales in ("float32", "float16", "float32"):
        attention.plan(flashbsr.Ragged([0, 40], [0, 90]))
        scale = torch.ones(90, 2, dtype=getattr(torch, scales))
        attention.run(q, (k, k), k_scale=scale, v_scale=scale)
        driver.drain()
        names.append(driver.kernel.split("_sm")[0])
    # Who has brought float16 once may do so again, perhaps in a graph.
    assert names == ["hopper_scaled", "prefill_scaled", "prefill_scaled"]


@pytest.mark.parametrize(("count", "q_len", "kv_len", "heads", "dim", "types", "us"), [
    (4, 512, 8192, (32, 8), 128, ("bfloat16", "float8_e4m3fn"), 405),
    (1, 512, 8192, (32, 8), 128, ("bfloat16", "float8_e4m3fn"), 115),
    (3, 256, 8192, (32, 8), 128, ("bfloat16", "float8_e4m3fn"), 190),
    (5, 200, 12345, (28, 4), 128, ("bfloat16", "float8_e4m3fn"), 292),
    (1, 256, 30000, (32, 8), 128, ("bfloat16", "float8_e4m3fn"), 204),
    (16, 64, 8192, (32, 8), 128, ("bfloat16", "float8_e4m3fn"), 222),
    (13, 64, 30000, (32, 8), 128, ("bfloat16", "float8_e4m3fn"), 685),
    (2, 256, 30000, (32, 8), 128, ("bfloat16", "float8_e4m3fn"), 390),
    (4, 1500, 3000, (32, 8), 128, ("bfloat16", "float8_e4m3fn"), 348),
    (4, 512, 8192, (32, 8), 128, ("float8_e4m3fn", "float8_e4m3fn"), 317),
    (3, 256, 30000, (32, 8), 128, ("float8_e4m3fn", "float8_e4m3fn"), 509),
    (5, 200, 12345, (28, 4), 128, ("float8_e4m3fn", "float8_e4m3fn"), 239),
    (4, 512, 8192, (64, 8), 64, ("bfloat16", "float8_e4m3fn"), 586),
    (3, 700, 5000, (16, 2), 64, ("bfloat16", "float8_e4m3fn"), 104),
    (4, 512, 8192, (64, 8), 64, ("bfloat16", "bfloat16"), 511),
    (1, 512, 8192, (64, 8), 64, ("bfloat16", "bfloat16"), 139),
    (3, 256, 8192, (64, 8), 64, ("bfloat16", "bfloat16"), 179),
    (5, 200, 12345, (28, 4), 64, ("bfloat16", "bfloat16"), 177),
    (16, 64, 8192, (32, 8), 64, ("bfloat16", "bfloat16"), 167),
    (2, 256, 30000, (32, 8), 64, ("bfloat16", "bfloat16"), 260),
    (4, 1500, 3000, (32, 8), 64, ("bfloat16", "bfloat16"), 214),
    (4, 512, 8192, (32, 8), 128, ("bfloat16", "int8"), 466),
    (16, 64, 8192, (32, 8), 128, ("bfloat16", "int8"), 292),
    (13, 64, 30000, (32, 8), 128, ("bfloat16", "int8"), 881),
    (2, 256, 30000, (32, 8), 128, ("bfloat16", "int8"), 514),
    (1, 512, 4096, (32, 8), 128, ("bfloat16", "int8"), 72),
    (5, 200, 12345, (28, 4), 128, ("bfloat16", "int8"), 355),
    (4, 1500, 3000, (32, 8), 128, ("bfloat16", "int8"), 355),
    (1, 2048, 8192, (32, 8), 128, ("bfloat16", "int8"), 369),
    (2, 4096, 4096, (32, 8), 128, ("bfloat16", "int8"), 415),
    (1, 1024, 30000, (32, 8), 128, ("bfloat16", "int8"), 761),
])  # fmt: skip
def test_prices_are_what_an_h200_takes(
    count: int, q_len: int, kv_len: int, heads: tuple[int, int], dim: int,
    types: tuple[str, str], us: float,
) -> None:  # fmt: skip
    """Within 12 %, over float8 and by halves of 128 dims: they decide how a batch is cut."""
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=True),
        flashbsr.TaskInfo(*heads, dim, backend="cuda", q_dtype=types[0], kv_dtype=types[1]),
    )
    steps, pages = np.arange(count + 1), -(-kv_len // 16)
    attention.plan(
        flashbsr.Paged(
            steps * q_len, steps * pages, np.arange(count * pages), page_size=16,
            kv_lens=np.full(count, kv_len),
        )
    )  # fmt: skip
    header = attention.plan_info.header
    assert header.price / header.units_per_us == pytest.approx(us, rel=0.12)


def test_tiles_that_no_kernel_has() -> None:
    with pytest.raises(flashbsr.UnsupportedError, match="tile_rows: got 96 in cuda:0"):
        kernel(3, 256, 8192, tile_rows=96)
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(), flashbsr.TaskInfo(4, 4, 64, backend="cpu", tile_rows=128)
    )
    with pytest.raises(flashbsr.UnsupportedError, match="tile_rows: got 128 in host memory"):
        attention.plan(flashbsr.Ragged([0, 3], [0, 9]))


@pytest.mark.usefixtures("fake_torch")
@pytest.mark.parametrize("given", [{}, {"q_dtype": "float16"}], ids=["guessed", "float16"])
def test_tiles_that_only_scales_of_tokens_have(driver: Driver, given: dict[str, str]) -> None:
    """Whether float8 has them the first run says, and then whether there are such tiles."""
    types = {"kv_dtype": "float8_e4m3fn", **given}
    task = flashbsr.TaskInfo(8, 2, 128, backend="fa3", tile_rows=128, dequantize_bytes=0, **types)
    q = torch.zeros(300, 8, 128, dtype=torch.float16)
    k = torch.zeros(900, 2, 128).to(torch.float8_e4m3fn)
    scale = torch.ones(900, 2)
    attention = flashbsr.Attention(flashbsr.AttentionSpec(causal=True), task)
    for _ in range(2):
        attention.plan(flashbsr.Ragged([0, 300], [0, 900]))
        attention.run(q, (k, k), k_scale=scale, v_scale=scale)
        driver.drain()
        assert driver.kernel == "hopper_scaled_sm90a_d128_f16xe4m3_r128_plain"
    without = flashbsr.Attention(flashbsr.AttentionSpec(causal=True), task)
    without.plan(flashbsr.Ragged([0, 300], [0, 900]))
    for _ in range(2):
        with pytest.raises(flashbsr.UnsupportedError, match="tile_rows: got 128 in cuda:0"):
            without.run(q, (k, k))


def test_few_decodes_beside_a_chunk() -> None:
    """A kernel for mixed batches takes 3 us longer to begin than it saves."""
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=True),
        flashbsr.TaskInfo(28, 4, 128, q_dtype="bfloat16", kv_dtype="bfloat16", backend="cuda"),
    )
    for tokens, decodes, family in ((200, 4, "hopper_"), (2000, 60, "mixed_")):
        lens = np.array([0, *range(1, decodes + 1), decodes + tokens])
        attention.plan(flashbsr.Ragged(lens, np.arange(decodes + 2) * 16 * tokens // 8))
        assert attention._engine.kernel_name().startswith(family)


@pytest.mark.parametrize("q_len", [1, 64])
@pytest.mark.parametrize(("dim", "kernel"), [
    (64, "d64_f16_%s_standard"), (96, "d128_f16_%s_soft_cap"), (128, "d128_f16_%s_soft_cap"),
])  # fmt: skip
def test_a_head_dim_of_its_own_comes_first(dim: int, kernel: str, q_len: int) -> None:
    """There is no kernel of soft caps alone for head dim 64: twice as wide it would do as well."""
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=True, logits_soft_cap=5.0),
        flashbsr.TaskInfo(8, 2, dim, backend="cuda", q_dtype="float16", kv_dtype="float16"),
    )
    attention.plan(flashbsr.Ragged(np.array([0, q_len]), np.array([0, 300])))
    assert attention._engine.kernel_name().endswith(kernel % ("r8" if q_len == 1 else "r192"))
