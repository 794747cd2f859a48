# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Shares of keys, and queries that are anywhere, on a GPU."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
from cases import indptr
from flashbsr import ContextParallel
from harness import DEVICES, framework
from reference import Variant
from shares import PAGE, VARIANTS, Batch, attention_of, latent_twice, merged, paged, shares

if not any(device.is_cuda for device in DEVICES):
    pytest.skip("no GPU, or a build or a PyTorch without CUDA", allow_module_level=True)

torch = framework("torch")
GPU: dict[str, Any] = {"backend": "cuda", "o_dtype": "float32"}


def there(x: np.ndarray) -> Any:
    return torch.from_numpy(np.ascontiguousarray(x)).cuda()


def half(x: np.ndarray) -> Any:
    return there(x).half()


def batch_of(rng: np.random.Generator, dim: int) -> Batch:
    """Numbers that float16 has."""
    batch = Batch.random(rng, 2000, (8, 2), dim)
    batch.q = batch.q.astype(np.float16).astype(np.float32)
    batch.kv = [tuple(x.astype(np.float16).astype(np.float32) for x in kv) for kv in batch.kv]
    return batch


def on_host(states: list[Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [tuple(x.cpu().numpy() for x in state) for state in states]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("layout", ["table", "bounds"])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", range(4))
def test_shares_add_up(seed: int, name: str, layout: str, dim: int) -> None:
    rng = np.random.default_rng(seed)
    variant, batch = VARIANTS[name], batch_of(rng, dim)
    states = []
    for share in shares(int(rng.choice([2, 3, 5])), int(rng.choice([1, 3, PAGE, 64]))):
        attention = attention_of(variant, share, heads=(8, 2), dim=dim, **GPU)
        cache, table = paged(batch.share(share), rng)
        lens = share.local_lens(batch.kv_lens)
        qo = indptr(batch.q_lens)
        if layout == "table":
            plan: Any = flashbsr.BlockTable(qo, np.maximum(table, 0), lens, page_size=PAGE)
            attention.plan(plan, q_positions=batch.positions)
        else:
            bounds = lens + rng.integers(0, 50, lens.size)
            anywhere = rng.integers(0, 200, lens.size)
            if name == "rope":  # whose tables end at the furthest of these
                anywhere += batch.positions
            attention.plan(flashbsr.Bounds(qo, bounds, page_size=PAGE), q_positions=anywhere)
            on_device = (there(x.astype(np.int32)) for x in (lens, np.maximum(table, 0)))
            attention.update(*on_device, q_positions=there(batch.positions.astype(np.int32)))
        states.append(attention.run(half(batch.q), half(cache), return_lse=True))
        if name in ("alibi", "rope"):
            assert attention.explain().kernel.startswith("decode")
    batch.check(*merged(on_host(states)), variant, "float16")


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("name", ["causal", "window", "window alone", "soft cap"])
@pytest.mark.parametrize("backend", ["fa2", "cuda"])
@pytest.mark.parametrize(("dim", "interleave"), [(64, 1), (128, 16), (256, 5)])
def test_chunks_of_prompts(
    dim: int, interleave: int, backend: str, name: str, bounded: bool
) -> None:
    """Hundreds of queries over shares, by the kernels of prompts: every row ends at its own key."""
    rng, variant = np.random.default_rng(dim), VARIANTS[name]
    batch = batch_of(rng, dim)
    kv_lens, batch.q_lens = np.array([1200, 333, 1, 0, 700]), np.array([300, 333, 1, 0, 129])
    numbers = lambda n, heads: (
        rng.standard_normal((n, heads, dim)).astype(np.float16).astype(np.float32)
    )
    batch.kv = [(numbers(n, 2), numbers(n, 2)) for n in kv_lens]
    batch.q = numbers(int(batch.q_lens.sum()), 8)
    states = []
    for share in shares(3, interleave):
        attention = attention_of(
            variant, share, heads=(8, 2), dim=dim, **{**GPU, "backend": backend}
        )
        cache, table = paged(batch.share(share), rng)
        lens, table = share.local_lens(kv_lens), np.maximum(table, 0)
        qo = indptr(batch.q_lens)
        if bounded:
            plan: Any = flashbsr.Bounds(qo, lens + 40, page_size=PAGE)
            attention.plan(plan, q_positions=batch.positions + 60)
            now = [there(x.astype(np.int32)) for x in (lens, table, batch.positions)]
            attention.update(now[0], now[1], q_positions=now[2])
        else:
            plan = flashbsr.BlockTable(qo, table, lens, page_size=PAGE)
            attention.plan(plan, q_positions=batch.positions)
        assert not attention.explain().kernel.startswith("decode")
        states.append(attention.run(half(batch.q), half(cache), return_lse=True))
    batch.check(*merged(on_host(states)), variant, "float16")


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize(("heads", "tokens"), [(16, 1), (16, 7), (64, 3), (128, 40)])
@pytest.mark.parametrize("backend", ["fa2", "cuda"])
def test_latents(backend: str, heads: int, tokens: int, codes: bool) -> None:
    """Several tokens over a share: as many requests of one token each, bit for bit or nearly."""
    rng, page = np.random.default_rng(heads + tokens), 64
    q = there(rng.standard_normal((3 * tokens, heads, 576)).astype(np.float32)).bfloat16()
    given = {"q_dtype": "bfloat16", "kv_dtype": "float8_e4m3fn" if codes else "bfloat16"}
    for share in shares(3, 16):
        cache = there(rng.standard_normal((33, page, 576)).astype(np.float32))
        cache = cache.to(torch.float8_e4m3fn if codes else torch.bfloat16)
        task = flashbsr.TaskInfo(
            heads, 1, 576, head_dim_vo=512, latent=True, context_parallel=share,
            **{**GPU, "backend": backend}, **given,
        )  # fmt: skip
        results = latent_twice(task, np.array([700, 64, tokens]), tokens, page, q, cache)
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("seed", range(4))
def test_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = batch_of(rng, 128)
    parents = [rng.integers(-1, np.maximum(np.arange(n), 0), n) for n in batch.q_lens]
    masks = []
    for above, n, position in zip(parents, batch.q_lens, batch.positions, strict=True):
        mask = np.zeros((n, position + n), bool)
        mask[:, :position] = True
        for t in range(n):
            mask[t] |= mask[above[t]] if above[t] >= 0 else False
            mask[t, position + t] = True
        masks.append(mask)
    states = []
    for share in shares(2, int(rng.choice([1, 2, 16]))):
        attention = attention_of(Variant(causal=True), share, heads=(8, 2), dim=128, **GPU)
        cache, table = paged(batch.share(share), rng)
        lens = share.local_lens(batch.kv_lens)
        attention.plan(
            flashbsr.BlockTable(indptr(batch.q_lens), np.maximum(table, 0), lens, page_size=PAGE),
            tree_parents=np.concatenate([*parents, np.zeros(0, np.int64)]),
            q_positions=batch.positions,
        )
        states.append(attention.run(half(batch.q), half(cache), return_lse=True))
    batch.check(*merged(on_host(states)), Variant(), "float16", mask=masks)


@pytest.mark.parametrize("family", ["fa2", "auto"])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tokens", [3, 300])
def test_a_chunk_of_a_prompt_meets_keys_from_anywhere(name: str, family: str, tokens: int) -> None:
    """By every kernel: positions are what they subtract, encodings among them."""
    rng, variant = np.random.default_rng(3), VARIANTS[name]
    whole = batch_of(rng, 64)
    numbers = lambda n, heads: (
        rng.standard_normal((n, heads, 64)).astype(np.float16).astype(np.float32)
    )
    whole.kv = [(numbers(1000, 2), numbers(1000, 2))]
    whole.q, whole.q_lens = numbers(tokens, 8), np.array([tokens])
    position = 1000 - tokens
    task = {**GPU, "backend": "fa2" if family == "fa2" else "cuda"}
    attention = attention_of(variant, ContextParallel(1, 0), heads=(8, 2), dim=64, **task)
    states = []
    for begin, end in ((0, 200), (200, 777), (777, 1000)):
        k, v = (half(x[begin:end]) for x in whole.kv[0])
        plan = flashbsr.Ragged([0, tokens], [0, end - begin])
        attention.plan(plan, q_positions=[position - begin])
        states.append(attention.run(half(whole.q), (k, v), return_lse=True))
    whole.check(*merged(on_host(states)), variant, "float16")


def test_captured_shares_follow_positions_on_the_device() -> None:
    rng = np.random.default_rng(5)
    share = ContextParallel(2, 1, 4)
    attention = attention_of(
        VARIANTS["causal"], share, heads=(8, 2), dim=128, **GPU,
        max_batch_size=4, max_q_tokens=16, max_kv_len=512,
    )  # fmt: skip
    lens, tables = np.array([500, 3, 0, 77]), rng.permutation(4 * 32).reshape(4, 32)
    q = there(rng.standard_normal((16, 8, 128)).astype(np.float16))
    cache = there(rng.standard_normal((128, 2, PAGE, 2, 128)).astype(np.float16))
    out = torch.empty((16, 8, 128), device="cuda")
    kv_lens, pages, positions = (
        there(x.astype(np.int32)) for x in (share.local_lens(lens), tables, lens - 4)
    )
    qo = np.arange(5) * 4
    attention.plan(flashbsr.Bounds(qo, [256] * 4, page_size=PAGE), q_positions=lens - 4)
    attention.update(kv_lens, pages, q_positions=positions)
    attention.run(q, cache, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.update(kv_lens, pages, q_positions=positions)
        attention.run(q, cache, out=out)
    for lens in ([33, 500, 4, 8], [256, 0, 64, 499]):
        now = np.array(lens)
        kv_lens.copy_(there(share.local_lens(now).astype(np.int32)))
        positions.copy_(there((now - 4).astype(np.int32)))
        out.fill_(float("nan"))
        graph.replay()
        other = attention_of(VARIANTS["causal"], share, heads=(8, 2), dim=128, **GPU)
        table = flashbsr.BlockTable(qo, tables, share.local_lens(now), page_size=PAGE)
        other.plan(table, q_positions=now - 4)
        torch.testing.assert_close(out, other.run(q, cache), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("options", [{"rope_interleave": True}, {"rotary_dim": 64}])
def test_other_rotations_of_shares(options: dict[str, Any]) -> None:
    """Neighbours that turn together, and dims that stay: against the same rank on the CPU."""
    rng = np.random.default_rng(7)
    batch, share = batch_of(rng, 128), ContextParallel(3, 1, 2)
    spec = flashbsr.AttentionSpec(causal=True, pos_encoding_mode="ROPE_LLAMA", **options)
    cache, table = paged(batch.share(share), rng)
    plan = flashbsr.BlockTable(
        indptr(batch.q_lens), np.maximum(table, 0), share.local_lens(batch.kv_lens), page_size=PAGE
    )
    found = []
    for place, of in (({"backend": "cpu"}, np.asarray), (GPU, half)):
        task = flashbsr.TaskInfo(8, 2, 128, context_parallel=share, **place)
        attention = flashbsr.Attention(spec, task)
        attention.plan(plan, q_positions=batch.positions)
        found.append(attention.run(of(batch.q), of(cache), return_lse=True))
    for x, y in zip(found[0], on_host(found[1:])[0], strict=True):
        np.testing.assert_allclose(x, y, rtol=4e-3, atol=4e-3)


def test_rotary_tables_end_where_plan_was_told() -> None:
    rng = np.random.default_rng(0)
    q, cache = (half(rng.standard_normal(x)) for x in ((2, 8, 64), (4, 2, PAGE, 2, 64)))
    variant = Variant(pos_encoding_mode="ROPE_LLAMA")
    attention = attention_of(variant, ContextParallel(1, 0), heads=(8, 2), dim=64, **GPU)
    attention.plan(flashbsr.Bounds([0, 2], [64], page_size=PAGE), q_positions=[100])
    for asked, counts_as in ((1 << 30, 100), (-5000, -102)):
        found = []
        for position in (asked, counts_as):
            attention.update([40], np.arange(4)[None], q_positions=[position])
            found.append(attention.run(q, cache))
        torch.testing.assert_close(*found, rtol=0, atol=0)


def test_what_a_gpu_does_not_do() -> None:
    rotates = VARIANTS["rope"]
    with pytest.raises(flashbsr.UnsupportedError, match="context_parallel"):
        attention_of(
            rotates, ContextParallel(2, 0), dim=64, kv_dtype="float8_e4m3fn", q_dtype="float16",
            **GPU,
        ).plan(flashbsr.Ragged([0, 2], [0, 9]), q_positions=[3])  # fmt: skip
