# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed batches that no kernel does both kinds of, on the fake driver: decodes first, then chunks.

test_fake_cuda.py runs this file.
"""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
import torch
from kv_codes import FP8, INT4, INT8, NVFP4, Kind, decode, encode

from fake_cuda.fake import Driver, FakeTorch

pytestmark = pytest.mark.usefixtures("fake_torch")

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 128, 16
CHUNKS, DECODES = [(300, 1000), (129, 700)], [(1, 900), (2, 1500), (1, 33)]
KINDS = (INT8, FP8, INT4, NVFP4)


class Problem:
    """Chunks between decodes over codes; requests without keys or rows among them."""

    def __init__(
        self,
        kind: Kind,
        lengths: list[tuple[int, int]],
        heads: int = HEADS,
        q_positions: np.ndarray | None = None,
    ) -> None:
        random = np.random.default_rng(0)
        self.kind, self.heads, self.q_positions = kind, heads, q_positions
        self.q_lens, self.kv_lens = (np.array(x) for x in zip(*lengths, strict=True))
        counts = -(-self.kv_lens // PAGE)
        pages = int(counts.sum())
        self.layout = flashbsr.Paged(
            np.concatenate([[0], np.cumsum(self.q_lens)]),
            np.concatenate([[0], np.cumsum(counts)]),
            random.permutation(pages).astype(np.int32),
            kv_lens=self.kv_lens.astype(np.int32),
            page_size=PAGE,
        )
        shape = pages, PAGE, KV_HEADS, DIM
        self.values = [random.standard_normal(shape).astype(np.float32) for _ in "kv"]
        self.q = torch.from_numpy(
            random.standard_normal((self.q_lens.sum(), heads, DIM)).astype(np.float32)
        ).bfloat16()
        self.codes = [encode(x, kind) for x in self.values]

    def attention(self, **task: Any) -> flashbsr.Attention:
        options = {"q_dtype": "bfloat16", "kv_dtype": self.kind.dtype, "backend": "cuda", **task}
        return flashbsr.Attention(
            flashbsr.AttentionSpec(causal=True),
            flashbsr.TaskInfo(self.heads, KV_HEADS, DIM, **options),
        )

    def arrays(self) -> tuple[Any, dict[str, Any]]:
        kv, scales = zip(*self.codes, strict=True)
        return tuple(map(_tensor, kv)), {
            name: _tensor(x) for name, x in zip(("k_scale", "v_scale"), scales, strict=True)
        }

    def expected(self, kv: tuple[np.ndarray, ...] | None = None) -> np.ndarray:
        """The CPU's in float32, over what the codes mean or other values."""
        kv = kv or tuple(decode(*x, self.kind).astype(np.float32) for x in self.codes)
        reference = self.attention(backend="cpu", q_dtype="float32", kv_dtype="float32")
        reference.plan(self.layout, q_positions=self.q_positions)
        return reference.run(self.q.float().numpy(), kv)


def _tensor(x: np.ndarray) -> torch.Tensor:
    if x.dtype.itemsize == 1 and x.dtype.kind not in "iu":
        return torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(x)


def settled(problem: Problem, **task: Any) -> flashbsr.Attention:
    """Planned with what a first run brings of the scales.

    So few tokens are worth one launch more only where the height of the chunks' tiles is asked for.
    """
    attention = problem.attention(**{"tile_rows": 128, **task})
    kv, scales = problem.arrays()
    attention.plan(problem.layout, q_positions=problem.q_positions)
    attention.run(problem.q, kv, **scales)
    attention.plan(problem.layout, q_positions=problem.q_positions)
    return attention


def run(driver: Driver, problem: Problem, room: int) -> tuple[torch.Tensor, int, str]:
    """Give the output, the number of launches and the kernel of the chunks."""
    attention = settled(problem, dequantize_bytes=room)
    kv, scales = problem.arrays()
    out = torch.full((len(problem.q), HEADS, DIM), float("nan"), dtype=torch.bfloat16)
    launches = driver.calls("cuLaunchKernelEx")
    attention.run(problem.q, kv, out=out, **scales)
    launches = driver.calls("cuLaunchKernelEx") - launches
    driver.drain()
    few, wide = attention._engine.kernel_name().split(" + ")
    assert few.startswith("decode_scaled_")
    h = attention.plan_info.header
    assert h.num_narrow_workers > 0 == h.num_narrow_blocks
    return out, launches, wide


LENGTHS = [DECODES[0], (0, 50), CHUNKS[0], DECODES[1], (3, 0), CHUNKS[1], DECODES[2]]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_both_kernels_compute_their_part(driver: Driver, kind: Kind) -> None:
    problem = Problem(kind, LENGTHS)
    out, launches, _ = run(driver, problem, 0)
    assert launches == 2
    assert np.abs(out.float().numpy() - problem.expected()).max() < 2e-2


def test_codes_of_chunks_are_widened_between_the_two(driver: Driver) -> None:
    """Theirs alone, for which there is room to the byte, and which lie one behind the other."""
    problem = Problem(NVFP4, LENGTHS)
    pages = sum(-(-n // PAGE) for q, n in LENGTHS if q > 8)
    room = pages * PAGE * KV_HEADS * 2 * 2 * DIM
    out, launches, wide = run(driver, problem, room)
    assert launches == 3
    assert wide == "hopper_sm90a_d128_bf16_r128_plain"
    assert np.abs(out.float().numpy() - problem.expected()).max() < 2e-2
    assert run(driver, problem, room - 1)[1] == 2


def test_chunks_are_told_by_their_tokens_wherever_they_are(driver: Driver) -> None:
    """Chunks that begin at their last key, where a plan says 1 for them; decodes at the first."""
    positions = np.array([n - 1 if q > 8 else 0 for q, n in LENGTHS], np.int32)
    problem = Problem(NVFP4, LENGTHS, q_positions=positions)
    out, launches, _ = run(driver, problem, 1 << 30)
    assert launches == 3
    assert np.abs(out.float().numpy() - problem.expected()).max() < 2e-2


def test_many_heads_of_a_kv_head(driver: Driver) -> None:
    """16 of them: decodes of one token are narrow, in tiles of 16 rows."""
    problem = Problem(FP8, [(1, 20000)] * 30 + [(200, 300)], heads=32)
    kv = tuple(torch.from_numpy(x).bfloat16() for x in problem.values)
    attention = problem.attention(kv_dtype="bfloat16")
    attention.plan(problem.layout)
    out = attention.run(problem.q, kv)
    driver.drain()
    assert attention._engine.kernel_name().startswith("decode_sm90_d128_bf16_r16_plain + hopper_")
    want = problem.expected(tuple(x.float().numpy() for x in kv))
    np.testing.assert_allclose(out.float().numpy(), want, atol=2e-2)


def test_a_graph_keeps_both(driver: Driver, fake_torch: FakeTorch) -> None:
    problem = Problem(INT8, CHUNKS + DECODES)
    attention = settled(problem)
    kv, scales = problem.arrays()
    fake_torch.current = stream = driver.stream()
    out = torch.zeros(len(problem.q), HEADS, DIM, dtype=torch.bfloat16)
    with driver.capture(stream) as graph:
        attention.run(problem.q, kv, out=out, **scales)
    other = Problem(INT8, [(50, 60), (1, 4000)])
    attention.plan(other.layout)
    attention.run(other.q, other.arrays()[0], **other.arrays()[1])
    driver.replay(graph, stream)
    driver.synchronize(stream)
    assert np.abs(out.float().numpy() - problem.expected()).max() < 2e-2


@pytest.mark.parametrize("task", [
    {"max_batch_size": 8, "max_q_tokens": 512, "max_kv_len": 2000}, {"fixed_split_size": 512},
    {"disable_split_kv": True}, {"num_workers": 8},
], ids=str)  # fmt: skip
def test_what_has_one_launch(task: dict[str, Any]) -> None:
    problem = Problem(INT8, CHUNKS + DECODES)
    attention = settled(problem, **task)
    assert " + " not in attention._engine.kernel_name()


def test_chunks_alone_and_decodes_alone_have_one_launch() -> None:
    for lengths in (CHUNKS, DECODES, [*CHUNKS, (0, 100)], [*CHUNKS, (1, 0)]):
        assert " + " not in settled(Problem(INT8, lengths))._engine.kernel_name()
