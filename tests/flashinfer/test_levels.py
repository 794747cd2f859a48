# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Levels of shared KV given by hand: what a request sees is its groups' KV, level after level."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import flashbsr
import numpy as np
import pytest
import reference
from base2 import natural
from compare import assert_attention
from harness import CPU, Device
from reference import DTYPES, State, Variant


@dataclass
class Cascade:
    """A batch: for each level the groups' sizes in groups of the next one, and their KV lengths."""

    q_lens: tuple[int, ...]
    groups: list[tuple[int, ...]]  # of all levels but the last
    kv_lens: list[tuple[int, ...]]  # of all levels
    heads: tuple[int, int] = (8, 2)
    page_size: int = 8
    kv_layout: str = "NHD"
    stacked: bool = True
    dtype: str = "float16"
    variant: Variant = field(default_factory=Variant)


class Built:
    """Arrays of a batch, and each request's rows for the reference."""

    def __init__(self, c: Cascade, dim: int = 64, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.case, kind, heads = c, DTYPES[c.dtype], c.heads[1]
        counts = [[-(-n // c.page_size) for n in lens] for lens in c.kv_lens]
        total = sum(map(sum, counts)) + 2
        order = rng.permutation(total).astype(np.int32)
        k, v = (
            np.full((total, c.page_size, heads, dim), np.nan, np.float32).astype(kind) for _ in "kv"
        )
        tokens, self.indptr, self.indices, self.last = [], [], [], []
        for lens, pages in zip(c.kv_lens, counts, strict=True):
            own, level = order[: sum(pages)], []
            order = order[sum(pages) :]
            self.indptr.append(np.cumsum([0, *pages]).astype(np.int32))
            self.indices.append(own)
            self.last.append(np.array([(n - 1) % c.page_size + 1 for n in lens], np.int32))
            for n, first, count in zip(lens, self.indptr[-1], pages, strict=False):
                rows = [rng.standard_normal((n, heads, dim)).astype(kind) for _ in "kv"]
                for x, data in zip((k, v), rows, strict=True):
                    flat = np.full((count * c.page_size, heads, dim), np.nan, np.float32).astype(
                        kind
                    )
                    flat[:n] = data
                    x[own[first : first + count]] = flat.reshape(count, c.page_size, heads, dim)
                level.append(rows)
            tokens.append(level)
        if c.kv_layout == "HND":
            k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k, v))
        self.kv = np.stack([k, v], 1) if c.stacked else (k, v)
        self.q = rng.standard_normal((sum(c.q_lens), c.heads[0], dim)).astype(kind)
        # From the last level up: which requests a group has.
        members = [[b] for b in range(len(c.q_lens))]
        self.qo_indptr = [np.cumsum([0, *c.q_lens]).astype(np.int32)]
        chains: list[list[Any]] = [[rows] for rows in tokens[-1]]
        for level in range(len(c.groups) - 1, -1, -1):
            merged, at = [], 0
            for size in c.groups[level]:
                merged.append([b for m in members[at : at + size] for b in m])
                at += size
            members = merged
            for rows, own in zip(tokens[level], members, strict=True):
                for b in own:
                    chains[b].insert(0, rows)
            ends = [sum(c.q_lens[b] for b in m) for m in members]
            self.qo_indptr.insert(0, np.cumsum([0, *ends]).astype(np.int32))
        self.requests = [
            tuple(np.concatenate([part[i] for part in chain]) for i in range(2)) for chain in chains
        ]

    def reference(self, work: str | None = None, sinks: Any = None) -> State:
        c = self.case
        q = np.split(self.q, np.cumsum(c.q_lens)[:-1])
        states = []
        for rows, (k, v), own in zip(q, self.requests, c.kv_lens[-1], strict=True):
            mask = None
            if c.variant.causal and own < len(rows):  # queries before the own tokens see the levels
                position = len(k) - len(rows) + np.arange(len(rows))[:, None]
                mask = np.arange(len(k)) <= np.maximum(position, len(k) - own - 1)
            states.append(
                reference.attend(
                    rows, k, v, c.variant, mask=mask, sinks=sinks, work=work,
                    out_dtype=None if work is None else c.dtype,
                )
            )  # fmt: skip
        return State.concatenate(states, c.heads[0], self.q.shape[2])

    def plan(
        self, device: Device, **options: Any
    ) -> flashbsr.flashinfer.MultiLevelCascadeAttentionWrapper:
        c = self.case
        wrapper = flashbsr.flashinfer.MultiLevelCascadeAttentionWrapper(
            len(c.kv_lens), kv_layout=c.kv_layout, backend=device.backend
        )
        fields = {
            name: getattr(c.variant, name)
            for name in (
                "causal",
                "window_left",
                "sm_scale",
                "logits_soft_cap",
                "pos_encoding_mode",
            )
        }
        wrapper.plan(
            self.qo_indptr, self.indptr, self.indices, self.last, *c.heads, self.q.shape[2],
            c.page_size, **fields | options,
        )  # fmt: skip
        return wrapper

    def check(self, device: Device, found: Any, sinks: Any = None) -> None:
        out, lse = (device.get(x) for x in found)
        lse = natural(lse)
        work = self.case.dtype
        assert_attention(
            out, lse, self.reference(sinks=sinks), self.reference(work, sinks), work, "levels"
        )


TWO = Cascade(
    (1, 1, 1, 1, 1, 1), [(4, 2)], [(600, 40), (3, 70, 1, 9, 200, 17)]
)  # fmt: skip
THREE = Cascade(
    (5, 1, 0, 30, 2, 7), [(2,), (3, 3)], [(520,), (256, 24), (9, 40, 3, 30, 2, 60)],
    variant=Variant(causal=True),
)  # fmt: skip


def run(built: Built, device: Device, wrapper: Any, **options: Any) -> Any:
    kv = device.put_kv(built.kv)
    return wrapper.run(device.put(built.q), kv, return_lse=True, **options)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("case", [TWO, THREE], ids=["two", "three"])
def test_levels(case: Cascade, kv_layout: str, stacked: bool, device: Device) -> None:
    built = Built(Cascade(**{**vars(case), "kv_layout": kv_layout, "stacked": stacked}))
    wrapper = built.plan(device)
    found = run(built, device, wrapper)
    built.check(device, found)
    again = run(built, device, wrapper)
    assert device.get(again[0]).tobytes() == device.get(found[0]).tobytes()


@pytest.mark.parametrize(
    "variant",
    [
        Variant(causal=True, logits_soft_cap=5.0),
        Variant(causal=True, sm_scale=-0.2),
        Variant(causal=True, window_left=100),
        Variant(causal=True, window_left=9),
        Variant(causal=True, pos_encoding_mode="ROPE_LLAMA"),
        Variant(causal=True, pos_encoding_mode="ALIBI"),
    ],
    ids=str,
)
def test_variants_across_levels(variant: Variant, device: Device) -> None:
    """Windows and positions count through the levels."""
    built = Built(Cascade(**{**vars(THREE), "variant": variant}))
    built.check(device, run(built, device, built.plan(device)))


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_levels_that_end_inside_of_a_page(causal: bool, page_size: int, device: Device) -> None:
    case = Cascade(
        (3, 1, 2, 40), [(1, 3)], [(515, 33), (3, 1, 60, 41)], page_size=page_size,
        variant=Variant(causal=causal),
    )  # fmt: skip
    built = Built(case)
    built.check(device, run(built, device, built.plan(device)))


def test_more_queries_than_own_tokens(device: Device) -> None:
    """All see the levels above, whatever causality leaves of the last one."""
    case = Cascade((5, 1, 9), [(3,)], [(64,), (2, 0, 3)], variant=Variant(causal=True))
    built = Built(case)
    built.check(device, run(built, device, built.plan(device)))


def test_sinks_count_once(device: Device) -> None:
    sinks = np.linspace(-2, 4, 8).astype(np.float32)
    built = Built(TWO)
    built.check(device, run(built, device, built.plan(device), sinks=device.put(sinks)), sinks)


def test_one_level_and_empty_levels(device: Device) -> None:
    """One level is a plain batch; a group may own nothing, a request see nothing."""
    plain = Built(Cascade((3, 1), [], [(40, 9)], variant=Variant(causal=True)))
    plain.check(device, run(plain, device, plain.plan(device)))
    hollow = Built(Cascade((1, 2, 1, 1), [(2, 2)], [(0, 64), (0, 5, 0, 3)]))
    hollow.check(device, run(hollow, device, hollow.plan(device)))


def test_many_share_much(device: Device) -> None:
    """It is loaded once: the plan has a part for it."""
    built = Built(Cascade(24 * (1,), [(24,)], [(2048,), 24 * (20,)], page_size=16))
    wrapper = built.plan(device)
    assert wrapper.plan_info.shared["kv_len"].tolist() == [2048]
    assert wrapper.plan_info.shared["q_len"].tolist() == [24]
    built.check(device, run(built, device, wrapper))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({0: 0}, "qo_indptr_arr"),
        ({1: 0}, "paged_kv_indptr_arr"),
        ({2: 0}, "paged_kv_indices_arr"),
        ({3: 0}, "paged_kv_last_page_len"),
    ],
)
def test_a_list_per_level(change: dict[int, int], name: str) -> None:
    built = Built(TWO)
    lists = [built.qo_indptr, built.indptr, built.indices, built.last]
    at = next(iter(change))
    lists[at] = lists[at][:1]
    wrapper = flashbsr.flashinfer.MultiLevelCascadeAttentionWrapper(2)
    with pytest.raises(flashbsr.ShapeError) as caught:
        wrapper.plan(*lists, 8, 2, 64, 8)
    assert caught.value.argument == name
    with pytest.raises(flashbsr.PlanError):
        wrapper.run(built.q, built.kv)


def test_bad_levels() -> None:
    built = Built(TWO)
    lists = [built.qo_indptr, built.indptr, built.indices, built.last]
    wrapper = flashbsr.flashinfer.MultiLevelCascadeAttentionWrapper(2)
    decode = Built(Cascade((2, 2), [(2,)], [(64,), (5, 9)]))
    with pytest.raises(flashbsr.IndexRangeError, match="qo_indptr_arr"):  # a group cuts a request
        wrapper.plan(
            [np.array([0, 1, 4]), decode.qo_indptr[1]], [np.array([0, 8, 8]), decode.indptr[1]],
            decode.indices, [np.array([8, 1]), decode.last[1]], 8, 2, 64, 8,
        )  # fmt: skip
    with pytest.raises(flashbsr.UnsupportedError, match="use_cuda_graph"):
        flashbsr.flashinfer.MultiLevelCascadeAttentionWrapper(2, use_cuda_graph=True)
    wrapper.plan(*lists, 8, 2, 64, 8, use_fp16_qk_reduction=True)
    with pytest.raises(flashbsr.FlashbsrError, match="num_levels"):
        flashbsr.flashinfer.MultiLevelCascadeAttentionWrapper(0)
    cut = Built(Cascade((2, 2), [(2,)], [(61,), (5, 9)], variant=Variant(window_left=9)))
    with pytest.raises(flashbsr.UnsupportedError, match=r"paged_kv_last_page_len.*whole pages"):
        cut.plan(CPU)
    lists[3] = [built.last[0], built.last[1] * 0 + 9]
    with pytest.raises(flashbsr.IndexRangeError, match="paged_kv_last_page_len"):
        wrapper.plan(*lists, 8, 2, 64, 8)


def shared_prefix(device: Device, prefix: int, q_lens: tuple[int, ...], causal: bool) -> Any:
    """A tuple cache whose prefix lies in consecutive pages."""
    case = Cascade(
        q_lens, [(len(q_lens),)], [(prefix,), tuple(9 * n + 3 for n in q_lens)], stacked=False,
        variant=Variant(causal=causal),
    )  # fmt: skip
    built = Built(case)
    # Swap the prefix's pages to where they follow one another.
    count, (k, v) = len(built.indices[0]), built.kv
    total = len(k)
    new = np.zeros(total, np.int64)
    rest = [p for p in range(total) if p not in set(built.indices[0].tolist())]
    new[np.r_[built.indices[0], rest].astype(int)] = np.r_[3 : 3 + count, :3, 3 + count : total]
    k, v = (x[np.argsort(new)] for x in (k, v))
    built.kv, built.indices[1] = (k, v), new[built.indices[1]].astype(np.int32)
    kv = device.put_kv(built.kv)
    at = [x.reshape(-1, 2, 64)[3 * 8 : 3 * 8 + prefix] for x in kv]
    return built, kv, at


@pytest.mark.parametrize("prefix", [512, 509, 8, 3])
def test_decode_with_shared_prefix(prefix: int, device: Device) -> None:
    built, kv, at = shared_prefix(device, prefix, 5 * (1,), False)
    wrapper = flashbsr.flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(
        backend=device.backend
    )
    wrapper.begin_forward(built.indptr[1], built.indices[1], built.last[1], 8, 2, 64, 8)
    for _ in range(2):
        out = wrapper.forward(device.put(built.q), *at, kv)
        built.check(
            device, (out, device.put((built.reference().lse / np.log(2)).astype(np.float32)))
        )
    wrapper.end_forward()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("prefix", [512, 77])
def test_prefill_with_shared_prefix(prefix: int, causal: bool, device: Device) -> None:
    built, kv, at = shared_prefix(device, prefix, (5, 1, 30), causal)
    wrapper = flashbsr.flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(
        backend=device.backend
    )
    wrapper.begin_forward(
        built.qo_indptr[1], built.indptr[1], built.indices[1], built.last[1], 8, 2, 64, 8
    )
    lse = device.put((built.reference().lse / np.log(2)).astype(np.float32))
    out = wrapper.forward(device.put(built.q), *at, kv, causal=causal)
    built.check(device, (out, lse))
    wrapper.forward(device.put(built.q), *at, kv, causal=not causal)
    built.check(device, (wrapper.forward(device.put(built.q), *at, kv, causal=causal), lse))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("prefix", [64, 77])
def test_prefix_beside_the_cache(prefix: int, causal: bool, device: Device) -> None:
    """Two launches, whose states are merged in float32: the result is rounded once."""
    built, kv, at = shared_prefix(device, prefix, (5, 1, 30), causal)
    k, v = (device.put(np.ascontiguousarray(device.get(x))) for x in at)
    make = flashbsr.flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper
    wrapper = make(backend=device.backend)
    wrapper.begin_forward(
        built.qo_indptr[1], built.indptr[1], built.indices[1], built.last[1], 8, 2, 64, 8
    )
    q, lse = device.put(built.q), device.put(built.reference().lse / np.log(2))
    out = wrapper.forward(q, k, v, kv, causal=causal)
    assert device.get(out).dtype == built.q.dtype
    built.check(device, (out, lse))
    built.check(device, (wrapper.forward(q, *at, kv, causal=causal), lse))  # one launch again
    built.check(device, (wrapper.forward(q, k, v, list(kv), causal=causal), lse))


def test_bad_prefixes() -> None:
    built, kv, (k, v) = shared_prefix(CPU, 64, (1, 1), False)
    wrapper = flashbsr.flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper()
    with pytest.raises(flashbsr.PlanError, match="begin_forward"):
        wrapper.forward(built.q, k, v, kv)
    wrapper.begin_forward(built.indptr[1], built.indices[1], built.last[1], 8, 2, 64, 8)
    with pytest.raises(flashbsr.IndexRangeError, match=r"^v_shared\b"):
        wrapper.forward(built.q, k[:40], v[:33], kv)
    with pytest.raises(flashbsr.ShapeError, match=r"^k_shared\b"):
        wrapper.forward(built.q, k[0], v, kv)
    with pytest.raises(flashbsr.ShapeError):
        wrapper.begin_forward(np.zeros(0, int), built.indices[1], built.last[1], 8, 2, 64, 8)
    with pytest.raises(flashbsr.PlanError, match="begin_forward"):
        wrapper.forward(built.q, k, v, kv)
