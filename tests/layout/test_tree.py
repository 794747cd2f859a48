# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Draft trees: plans whose masks have bits of the last columns only."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import flashbsr
import numpy as np
import pytest
from cases import Case
from compare import assert_attention
from harness import Device, attention_for, compare, execute, needs_cxx
from reference import Hooks, Variant

BF16 = 3 * ("bfloat16",)
FP8_KV = ("bfloat16", "float8_e4m3fn", "bfloat16")


def random_parents(rng: np.random.Generator, count: int) -> np.ndarray:
    """Any tree, several roots among them."""
    return np.array([rng.integers(-1, i) if i else -1 for i in range(count)], np.int32)


def tree_problem(
    device: Device, case: Case, seed: int = 0
) -> tuple[cases.Problem, flashbsr.DraftTrees]:
    """The case's arrays, with a random tree per request as the reference's mask."""
    rng = np.random.default_rng([seed, *case.kv_lens])
    trees = flashbsr.draft_trees([random_parents(rng, n) for n in case.q_lens])
    problem = device.build(case)
    sizes = [q * kv for q, kv in zip(case.q_lens, case.kv_lens, strict=True)]
    masks = np.split(trees.mask(problem.kv_lens), np.cumsum(sizes)[:-1])
    rows = zip(problem.requests, masks, strict=True)
    requests = [(q, k, v, mask.reshape(len(q), len(k))) for (q, k, v, _), mask in rows]
    return dataclasses.replace(problem, requests=requests), trees


def plan_tree(
    problem: cases.Problem, attention: flashbsr.Attention, trees: flashbsr.DraftTrees
) -> None:
    attention.plan(problem.layout(), tree_parents=trees.parents)


def check_tree(device: Device, case: Case, seed: int = 0, **task: Any) -> None:
    problem, trees = tree_problem(device, case, seed)
    attention = attention_for(problem, device.backend, **task)
    plan_tree(problem, attention, trees)
    compare(problem, *execute(problem, attention, device, plan=False))


TREES = Case("tree", (8, 1, 0, 5, 16), (300, 40, 9, 5, 129), dtypes=BF16, layout="paged")
# Where the drafts begin: around the edges of the KV tiles of every kernel.
EDGES = tuple(
    n + d
    for n in (16, 32, 48, 64, 80, 96, 112, 128, 160, 176, 192, 256, 352, 512)
    for d in (-1, 0, 1)
)


@pytest.mark.parametrize("layout", ["ragged", "paged", "paged_lens", "table"])
def test_layouts(layout: str, device: Device) -> None:
    check_tree(device, dataclasses.replace(TREES, layout=layout))


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (8, 2), (8, 1), (24, 1)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 17, 64])
def test_counts(count: int, heads: tuple[int, int], device: Device) -> None:
    """From the tiles of decode to several of prefill's."""
    lens = (count, 257 + count, 1000, 700 + count)
    check_tree(
        device, Case("tree", 4 * (count,), lens, heads, dtypes=BF16, layout="paged"), seed=count
    )


@pytest.mark.parametrize("count", [2, 7, 40])
@pytest.mark.parametrize("types", [BF16, 3 * ("float32",), FP8_KV], ids=lambda x: "-".join(x[:2]))
def test_edges(count: int, types: tuple[str, str, str], device: Device) -> None:
    lens = tuple(count + n for n in EDGES)
    case = Case("edges", len(lens) * (count,), lens, dtypes=types, layout="paged", page_size=1)
    check_tree(device, case, seed=count)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_split(size: int, device: Device) -> None:
    """Parts of a split request: before the drafts, across their beginning, and of nothing else."""
    case = Case("split", (9, 3), (9 + 130, 3 + 64), dtypes=BF16, layout="paged", page_size=3)
    check_tree(device, case, fixed_split_size=size)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128)], ids=str)
def test_head_dims(dims: tuple[int, int], device: Device) -> None:
    stacked = dims[0] == dims[1]
    case = Case("dims", (8, 30), (408, 230), (8, 2), dims, BF16, "paged", stacked=stacked)
    check_tree(device, case)


@pytest.mark.parametrize(
    "changes",
    [
        {"sinks": True},
        {"variant": Variant(logits_soft_cap=5.0)},
        {"variant": Variant(activation="sigmoid", sigmoid_bias=-1.0)},
        {"scales": "head"},
        {"gain": 100.0},
        {"variant": Variant(sm_scale=-0.3)},
        {"variant": Variant(causal=True)},
    ],
    ids=str,
)
def test_with(changes: dict[str, Any], device: Device) -> None:
    """What else there is; a tree replaces causality, as a mask does."""
    check_tree(device, dataclasses.replace(TREES, **changes))


@needs_cxx
def test_users_mask(device: Device) -> None:
    """A variant's own mask has no part that kernels may leave out."""
    problem, trees = tree_problem(device, TREES)
    spec = flashbsr.AttentionSpec.from_functions(mask_mod=lambda b, h, q_idx, kv_idx: h < 3)
    task = flashbsr.TaskInfo(**{**problem.task_fields(), "backend": device.backend})
    attention = flashbsr.Attention(spec, task)
    plan_tree(problem, attention, trees)
    on_device = device.upload(problem)
    out, lse = map(device.put, problem.new_outputs())
    attention.run(on_device.q, on_device.kv, out=out, lse=lse, **on_device.run_options)
    hooks = Hooks(mask=lambda b, h, q_idx, kv_idx: np.array(h < 3))
    exact, working = problem.reference(hooks=hooks), problem.reference("bfloat16", hooks)
    assert_attention(device.get(out), device.get(lse), exact, working, "bfloat16", "users_mask")


def test_chain_is_causal(device: Device) -> None:
    """A tree without branches is an append, to the last bit of a weight."""
    problem = device.build(dataclasses.replace(TREES, variant=Variant(causal=True)))
    chains = flashbsr.draft_trees([np.arange(-1, n - 1, dtype=np.int32) for n in TREES.q_lens])
    attention = attention_for(problem, device.backend)
    plan_tree(problem, attention, chains)
    compare(problem, *execute(problem, attention, device, plan=False))


def test_as_a_mask(device: Device) -> None:
    """`DraftTrees.mask` says the same."""
    problem, trees = tree_problem(device, TREES)
    attention = attention_for(problem, device.backend)
    attention.plan(problem.layout(), custom_mask=trees.mask(problem.kv_lens))
    compare(problem, *execute(problem, attention, device, plan=False))


def test_a_mask_after_a_tree(device: Device) -> None:
    """Nothing of a tree is left when the next plan has a mask, or none."""
    problem, trees = tree_problem(device, TREES)
    masked = device.build(dataclasses.replace(TREES, mask="packed"))
    attention = attention_for(problem, device.backend)
    for _ in range(2):
        plan_tree(problem, attention, trees)
        compare(problem, *execute(problem, attention, device, plan=False))
        compare(masked, *execute(masked, attention, device))
        plain = device.build(TREES)
        compare(plain, *execute(plain, attention, device))


@pytest.mark.parametrize("drafts", [2, 4])
def test_shared_context(drafts: int, device: Device) -> None:
    """Requests that begin with the same pages: up to the first draft they are loaded once."""
    case = Case(
        "shared", 32 * (drafts,), 32 * (drafts + 2064,), (8, 2), dtypes=BF16, layout="paged"
    )
    problem, trees = tree_problem(device, case)
    p, common = problem, 128 * 16  # the first 128 pages of all are those of the first
    for b in range(1, 32):
        at, pages = p.kv_indptr[b], p.kv_indices
        pages[at : at + 128] = pages[:128]
    requests = [
        (q, np.concatenate([p.requests[0][1][:common], k[common:]]),
         np.concatenate([p.requests[0][2][:common], v[common:]]), mask)
        for q, k, v, mask in p.requests
    ]  # fmt: skip
    problem = dataclasses.replace(problem, requests=requests)
    attention = attention_for(problem, device.backend)
    plan_tree(problem, attention, trees)
    if not device.is_cuda:  # where it depends on the GPU whether it pays
        assert attention.plan_info.shared["kv_len"].tolist() == [2048]
    compare(problem, *execute(problem, attention, device, plan=False))


def test_drafts_are_not_shared(device: Device) -> None:
    """Of equal pages those with drafts stay each request's own, whatever the tree."""
    case = Case("equal", 32 * (16,), 32 * (16 + 2048,), (8, 2), dtypes=BF16, layout="paged")
    problem, trees = tree_problem(device, case)
    p = problem
    count = p.kv_indptr[1]
    for b in range(1, 32):
        p.kv_indices[p.kv_indptr[b] : p.kv_indptr[b + 1]] = p.kv_indices[:count]
    requests = [(q, *p.requests[0][1:3], mask) for q, _, _, mask in p.requests]
    problem = dataclasses.replace(problem, requests=requests)
    attention = attention_for(problem, device.backend)
    plan_tree(problem, attention, trees)
    shared = attention.plan_info.shared["kv_len"]
    assert (shared <= 2048).all()
    assert device.is_cuda or shared.tolist() == [2048]
    compare(problem, *execute(problem, attention, device, plan=False))


def test_the_plan_has_few_bits() -> None:
    """8 drafts behind 131072 tokens: 8 bytes, not 131080."""
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), flashbsr.TaskInfo(4, 2, 64))
    trees = flashbsr.draft_trees([np.full(8, -1)] * 3)
    layout = flashbsr.Ragged(trees.qo_indptr, np.arange(4) * 131080)
    attention.plan(layout, tree_parents=trees.parents)
    requests = attention.plan_info.requests
    assert requests["mask_lo"].tolist() == [0, 8, 16]
    assert requests["mask_begin"].tolist() == 3 * [131072]


def test_positions() -> None:
    trees = flashbsr.draft_trees([[-1, 0, 0, 1, -1], [], [-1, 0, 1, 2]])
    assert trees.depths.tolist() == [0, 1, 1, 2, 0, 0, 1, 2, 3]
    lens = np.array([5, 3, 104])
    assert trees.positions(lens).tolist() == [0, 1, 1, 2, 0, 100, 101, 102, 103]
    assert trees.qo_indptr.dtype == trees.parents.dtype == trees.positions(lens).dtype == np.int32
    none = flashbsr.draft_trees([])
    assert none.qo_indptr.tolist() == [0]
    assert none.mask(np.zeros(0, np.int32)).shape == (0,)


def test_rotated_by_depth(device: Device) -> None:
    """Verifying a branch in a tree is decoding it alone, RoPE included."""
    rng = np.random.default_rng(7)
    dtype = np.float16
    parents = [-1, 0, 0, 1, 2, 3]
    context, branch = 37, [0, 1, 3, 5]
    k, q = (rng.standard_normal((context + 6, h, 64)).astype(dtype) for h in (2, 4))
    v = rng.standard_normal((context + 6, 2, 64)).astype(dtype)
    trees = flashbsr.draft_trees([parents])
    places = np.concatenate([np.arange(context), trees.positions(np.array([context + 6]))])
    q_turned, k_turned = flashbsr.apply_rope_pos_ids(
        device.put(q), device.put(k), device.put(places.astype(np.int32))
    )
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(), flashbsr.TaskInfo(4, 2, 64, backend=device.backend)
    )
    layout = flashbsr.Ragged(trees.qo_indptr, np.array([0, context + 6]))
    attention.plan(layout, tree_parents=trees.parents)
    out = device.get(attention.run(q_turned[context:], (k_turned, device.put(v))))
    own = [*range(context), *(context + i for i in branch)]
    spec = flashbsr.AttentionSpec(causal=True, pos_encoding_mode="ROPE_LLAMA")
    alone = flashbsr.attention(*(device.put(x[None, own]) for x in (q, k, v)), spec=spec)[0]
    # Twice the rounding of q and k, which is where the two differ.
    np.testing.assert_allclose(
        out[branch].astype(np.float32), device.get(alone)[-4:].astype(np.float32), atol=4e-3
    )


@pytest.mark.parametrize(
    ("parents", "name"),
    [
        ([0], "tree_parents[0]"),
        ([-1, 1], "tree_parents[1]"),
        ([-2, 0], "tree_parents[0]"),
        ([-1, 0, 2], "tree_parents[2]"),
        ([-1, 0, 2**40], "tree_parents[2]"),
    ],
)
def test_bad_parents(parents: list[int], name: str) -> None:
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), flashbsr.TaskInfo(4, 2, 64))
    layout = flashbsr.Ragged([0, len(parents)], [0, 100])
    with pytest.raises(flashbsr.IndexRangeError) as caught:
        attention.plan(layout, tree_parents=np.array(parents))
    assert caught.value.argument == name
    with pytest.raises(flashbsr.IndexRangeError, match=r"parents\[1\]"):
        flashbsr.draft_trees([[], parents])


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode"),
        ({"window_left": 5}, "window_left"),
    ],
)
def test_positions_are_depths(spec: dict[str, Any], name: str) -> None:
    task = flashbsr.TaskInfo(4, 2, 64)
    attention = flashbsr.Attention(flashbsr.AttentionSpec(**spec), task)
    for layout in (
        flashbsr.Paged([0, 1], [0, 1], [0], kv_lens=[1], page_size=16),
        flashbsr.BlockTable([0, 1], np.array([[0]]), [1], page_size=16),
    ):
        with pytest.raises(flashbsr.UnsupportedError) as caught:
            attention.plan(layout, tree_parents=[-1])
        assert caught.value.argument == name


def test_bad_calls() -> None:
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), flashbsr.TaskInfo(4, 2, 64))
    with pytest.raises(flashbsr.ShapeError, match="tree_parents"):
        attention.plan(flashbsr.Ragged([0, 2], [0, 9]), tree_parents=[-1])
    with pytest.raises(flashbsr.FlashbsrError, match="tree_parents.*KV that include"):
        attention.plan(flashbsr.Ragged([0, 2], [0, 1]), tree_parents=[-1, 0])
    one = flashbsr.Ragged([0, 1], [0, 1])
    with pytest.raises(flashbsr.FlashbsrError, match="tree_parents.*mask"):
        attention.plan(one, tree_parents=[-1], custom_mask=np.ones(1, bool))
    with pytest.raises(flashbsr.DTypeError, match="tree_parents"):
        attention.plan(one, tree_parents=np.array([-1.0]))
    with pytest.raises(flashbsr.FlashbsrError, match="parents"):
        flashbsr.draft_trees(np.array([-1]))
    trees = flashbsr.draft_trees([[-1, 0]])
    with pytest.raises(flashbsr.ShapeError, match="kv_lens"):
        trees.positions(np.array([5, 5]))
    with pytest.raises(flashbsr.IndexRangeError, match=r"kv_lens\[0\]"):
        trees.mask(np.array([1]))
