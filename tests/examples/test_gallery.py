# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The gallery of variants, against float64: what each file makes, and its own example."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import cases
import numpy as np
import pytest
import reference
from cases import Case, Problem
from compare import SINGLE, UNIT, assert_attention
from flashbsr import Attention, AttentionSpec, FlashbsrError, Paged, TaskInfo
from harness import check_variant, framework
from reference import Hooks, State, Variant

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "variants"
sys.path.insert(0, str(FOLDER.parent))

import variants.__main__ as gallery  # noqa: E402
from variants import (  # noqa: E402
    alibi,
    differential,
    documents,
    flash_sigmoid,
    learned_sinks,
    logits_bias,
    prefix_lm,
    qk_norm,
    quest,
    relative_bias,
    soft_cap,
    streaming,
    tree_mask,
)

FILES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("__"))
CAUSAL = Variant(causal=True)
RAGGED = Case("ragged", (5, 70, 0, 1), (37, 150, 3, 64), dims=(64, 64))
DECODE = cases.DECODE.but("f16", dtypes=cases.F16)  # with an empty request; paged, shuffled
both = pytest.mark.parametrize("case", [RAGGED, DECODE], ids=lambda c: c.name)


pytestmark = pytest.mark.usefixtures("kernel_cache")


def position(case: Case, b: int, q: np.ndarray) -> np.ndarray:
    return case.kv_lens[b] - case.q_lens[b] + q


@pytest.mark.parametrize("name", FILES)
def test_example_of_the_file(name):
    if name == "top_pages":
        framework("torch")
    result = doctest.testmod(importlib.import_module(f"variants.{name}"))
    assert result.attempted and not result.failed


def test_readme_lists_every_file():
    text = (FOLDER / "README.md").read_text()
    assert [name for name in FILES if f"]({name}.py)" in text] == FILES
    assert text.count(".py)") == len(FILES)


def test_the_gallery_runs_as_a_program(capsys):
    assert gallery.NAMES == FILES
    assert gallery.main(["alibi", "soft_cap"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line[0] != " "] == [
        ["alibi", "ok"], ["soft_cap", "ok"],
    ]  # fmt: skip
    assert all(len(line) < 80 for line in lines)
    with pytest.raises(SystemExit):
        gallery.main(["nothing"])


@both
def test_flash_sigmoid(case, device):
    hooks = Hooks(activation=lambda x: 1 / (1 + np.exp(-(x - x.dtype.type(2.5)))))
    case = case.but("sigmoid", variant=CAUSAL)
    check_variant(flash_sigmoid.flash_sigmoid(causal=True), hooks, case, device, bias=-2.5)


@both
@pytest.mark.parametrize("gain", [1.0, 100.0])  # logits of thousands are at the cap
def test_soft_cap(case, gain, device):
    hooks = Hooks(score=lambda x, *_: 5 * np.tanh(x / 5))
    check_variant(soft_cap.soft_cap(), hooks, case.but(str(gain), gain=gain), device, cap=5.0)


@both
def test_alibi(case, device):
    slopes = np.array([0.5, -0.25, 0.0, 3.0], np.float32)

    def score(x, b, h, q, k):
        return x + x.dtype.type(slopes[h]) * (k - position(case, b, q))

    spec = alibi.alibi(device.put(slopes), causal=True)
    check_variant(spec, Hooks(score=score), case.but("causal", variant=CAUSAL), device)


@both
def test_logits_bias(case, device):
    wide = np.random.default_rng(0).standard_normal((140, 600)).astype(np.float32)
    wide[:, 20::50] = -np.inf  # a bias that hides, as a mask of floats does
    bias = wide[::-2, ::2]
    hooks = Hooks(score=lambda x, b, h, q, k: x + bias[q, k].astype(x.dtype))
    check_variant(logits_bias.logits_bias(), hooks, case, device, bias=device.put(bias))


def bucket(far: int, count: int, max_distance: int) -> int:
    """T5's bucket in whole numbers: step s begins where far / exact = (max / exact)^(s / n)."""
    exact = count // 2
    if far < exact:
        return far
    n = count - exact
    steps = (s for s in range(n) if far**n * exact**s >= exact**n * max_distance**s)
    return exact + max(steps)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets", [(32, 128), (32, 64), (16, 100), (64, 512)], ids=str)
def test_buckets_of_distances(buckets, bidirectional):
    count, max_distance = buckets
    table = np.arange(count)[:, None]
    found = relative_bias.by_distance(
        table, 700, bidirectional=bidirectional, max_distance=max_distance
    )
    half = count // 2 if bidirectional else count
    for d, b in zip(range(-699, 700), found[0], strict=True):
        far = abs(d) if bidirectional else max(-d, 0)
        sign = half if bidirectional and d > 0 else 0
        assert b == sign + bucket(far, half, max_distance), d


@both
def test_relative_bias(case, device):
    table = np.random.default_rng(1).standard_normal((32, 4)).astype(np.float32)

    def score(x, b, h, q, k):
        d = k - position(case, b, q)
        rows = [[bucket(abs(n), 16, 128) + 16 * (n > 0) for n in row] for row in d.tolist()]
        return x + table[np.array(rows, int).reshape(d.shape), h].astype(x.dtype)

    bias = device.put(relative_bias.by_distance(table, 300))
    case = case.but("t5", variant=Variant(sm_scale=1.0))
    check_variant(relative_bias.relative_bias(bias), Hooks(score=score), case, device)


@both
def test_prefix_lm(case, device):
    prefix = np.array([9, 120, 0, 1000, -3][: len(case.q_lens)], np.int32)

    def mask(b, h, q, k):
        return (k < prefix[b]) | (k <= position(case, b, q))

    check_variant(prefix_lm.prefix_lm(), Hooks(mask=mask), case, device, prefix=device.put(prefix))


@both
@pytest.mark.parametrize("rope", ["NONE", "ROPE_LLAMA"])
@pytest.mark.parametrize("gain", [1.0, 0.0])  # rows of zeros are divided by epsilon's root
def test_qk_norm(case, rope, gain, device):
    weights = np.random.default_rng(2).random((2, 64)).astype(np.float32) + 0.5

    def normalise(weight):
        return lambda x, _: (
            x
            / np.sqrt((x**2).mean(axis=-1, keepdims=True) + x.dtype.type(1e-6))
            * weight.astype(x.dtype)
        )

    case = case.but(rope, variant=Variant(causal=True, pos_encoding_mode=rope), gain=gain)
    hooks = Hooks(query=normalise(weights[0]), key=normalise(weights[1]))
    there = dict(zip(("q_weight", "k_weight"), map(device.put, weights), strict=True))
    spec = qk_norm.qk_norm(causal=True, pos_encoding_mode=rope)
    check_variant(spec, hooks, case, device, epsilon=1e-6, **there)


@both
@pytest.mark.parametrize("sinks", [True, "extreme"])
@pytest.mark.parametrize("window", [None, 20])
def test_learned_sinks(case, sinks, window, device):
    variant = Variant(causal=True, window_left=-1 if window is None else 19)
    case = case.but(str(window), variant=variant, sinks=sinks)
    check_variant(learned_sinks.learned_sinks(window), Hooks(), case, device)


def states(problem: Problem, parts, variant: Variant = cases.PLAIN) -> list[State]:
    """Exact and working answers to parts (q, k, v, mask), requests or slices of them."""
    dtype = problem.case.dtypes[0]
    return [
        State.concatenate(
            [
                reference.attend(q, k, v, variant, mask=mask, work=work, out_dtype=work)
                for q, k, v, mask in parts
            ],
            parts[0][0].shape[1],
            parts[0][2].shape[2],
        )
        for work in (None, dtype)
    ]


def attention_for(problem: Problem, spec: AttentionSpec, device) -> Attention:
    return Attention(spec, TaskInfo(**problem.task_fields(), backend=device.backend))


@pytest.mark.parametrize("lengths", [(50, 1, 90, 99, 60), (128,), (1, 1, 1)], ids=str)
def test_documents(lengths, device):
    document = np.repeat(np.arange(len(lengths))[::-1], lengths)  # numbers need no order
    problem = device.build(Case("documents", (sum(lengths),), (sum(lengths),)))
    spans = documents.documents(document)
    assert np.diff(spans.kv_indptr).tolist() == list(lengths)
    attention = attention_for(problem, AttentionSpec(**spans.fields), device)
    attention.plan(spans.layout())
    there = device.upload(problem)
    found = attention.run(there.q, there.kv, return_lse=True)
    [(q, k, v, _)] = problem.requests
    same = (document[:, None] == document) & np.tri(len(document), dtype=bool)
    expected = states(problem, [(q, k, v, same)])
    assert_attention(*map(device.get, found), *expected, problem.case.work, "documents")


TREES = [[-1, 0, 0, 1, 1, 2, 5], [-1], [-1, -1, -1, 2], [], [-1, 0, 1, 2]]


@pytest.mark.parametrize("dtypes", [cases.F32, cases.BF16], ids=lambda d: d[0])
def test_tree_mask(dtypes, device):
    lens = tuple(map(len, TREES))
    case = Case("tree", lens, (57, 300, 4, 9, 36), heads=(8, 2), layout="paged", dtypes=dtypes)
    problem = device.build(case)
    masks = [tree_mask.tree_mask(tree, n) for tree, n in zip(TREES, case.kv_lens, strict=True)]
    joined = np.concatenate([mask.ravel() for mask in masks])
    problem = dataclasses.replace(problem, custom_mask=joined)
    problem = dataclasses.replace(problem, case=dataclasses.replace(problem.case, mask="bool"))
    attention = attention_for(problem, AttentionSpec(), device)
    problem.plan(attention)
    there = device.upload(problem)
    found = attention.run(there.q, there.kv, return_lse=True)

    parts = []
    for tree, (q, k, v, _) in zip(TREES, problem.requests, strict=True):
        context = len(k) - len(tree)
        seen = np.arange(len(k)) < context + np.zeros((len(tree), 1))
        for i in range(len(tree)):
            at = i
            while at >= 0:
                seen[i, context + at] = True
                at = tree[at]
        parts.append((q, k, v, seen))
    expected = states(problem, parts)
    assert_attention(*map(device.get, found), *expected, problem.case.work, "tree")


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 2, 0], [-2]], ids=str)
def test_trees_that_are_none(parents):
    with pytest.raises(FlashbsrError, match=r"parents\[\d\]: got"):
        tree_mask.tree_mask(parents, 20)


@pytest.mark.parametrize("kept", [(1, 3), (2, 1), (0, 2), (1, 100)], ids=str)
@pytest.mark.parametrize("q_len", [1, 3])
def test_streaming(kept, q_len, device):
    sink_pages, recent_pages = kept
    case = Case("streaming", 5 * (q_len,), (300, 16, 7, 64, 129), layout="paged")
    problem = device.build(case.but("rope", variant=Variant(pos_encoding_mode="ROPE_LLAMA")))
    indptr, indices = streaming.streaming_pages(
        problem.kv_indptr, problem.kv_indices, sink_pages=sink_pages, recent_pages=recent_pages
    )
    attention = attention_for(problem, streaming.streaming(rope_theta=5e3), device)
    last = problem.last_page_len
    attention.plan(Paged(problem.qo_indptr, indptr, indices, last_page_len=last, page_size=16))
    there = device.upload(problem)
    found = attention.run(there.q, there.kv, return_lse=True)

    parts = []
    for q, k, v, _ in problem.requests:
        token = np.arange(len(k))
        last = -(-len(k) // 16) * 16
        of = (token < 16 * sink_pages) | (token >= last - 16 * recent_pages)
        parts.append((q, k[of], v[of], None))
    variant = Variant(causal=True, pos_encoding_mode="ROPE_LLAMA", rope_theta=5e3)
    expected = states(problem, parts, variant)
    assert_attention(*map(device.get, found), *expected, problem.case.work, "streaming")


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("window", [(1, 3), (2, 1), (0, 2), (3, 5)])
def test_streaming_decode(window, page_size, device):
    """Token by token through a ring of pages: as attention over the tokens that are left."""
    sink_pages, recent_pages = window
    how = {"sink_pages": sink_pages, "recent_pages": recent_pages}
    rng = np.random.default_rng(3)
    lead = (0, 7)  # tokens that the requests are apart
    case = Case("streaming", (1, 1), (1, 1), heads=(4, 2), decode=True, layout="paged")
    case = device.adapt(case.but("ring", variant=Variant(pos_encoding_mode="ROPE_LLAMA")))
    (heads, kv_heads), dim, types = (
        case.heads,
        case.dims[0],
        [reference.DTYPES[t] for t in case.dtypes],
    )
    steps = 12 * page_size + 5
    text = rng.standard_normal((2, 2, steps + 8, kv_heads, dim)).astype(types[1])  # request, k or v
    cache = np.full((2 * sum(window), 2, page_size, kv_heads, dim), np.nan).astype(types[1])
    task = TaskInfo(heads, kv_heads, dim, backend=device.backend)
    attention = Attention(streaming.streaming(rope_theta=5e3), task)
    variant = Variant(causal=True, pos_encoding_mode="ROPE_LLAMA", rope_theta=5e3)
    for step in range(1 - max(lead), steps):
        lengths = [max(step + extra, 1) for extra in lead]
        pages, places = streaming.streaming_slots(lengths, page_size, **how)
        for b, length in enumerate(lengths):
            cache[pages[b], :, places[b]] = text[b, :, length - 1]
        if step < 1 or step % 5:
            continue
        indptr, indices, last = streaming.streaming_table(lengths, page_size, **how)
        q = rng.standard_normal((2, heads, dim)).astype(types[0])
        attention.plan(Paged(None, indptr, indices, last_page_len=last, page_size=page_size))
        found = attention.run(device.put(q), device.put(cache), return_lse=True)
        parts = []
        for b, length in enumerate(lengths):
            token = np.arange(length)
            first = -(-length // page_size) - recent_pages  # page of the text
            left = (token < sink_pages * page_size) | (token >= first * page_size)
            parts.append((q[b : b + 1], *text[b, :, token[left]].swapaxes(0, 1), None))
        results = states(SimpleNamespace(case=case), parts, variant)
        assert_attention(*map(device.get, found), *results, case.work, f"step {step}")


def test_counts_of_pages_that_leave_out_the_newest():
    with pytest.raises(FlashbsrError, match="recent_pages: got 0"):
        streaming.streaming_pages([0, 2], [0, 1], sink_pages=1, recent_pages=0)
    with pytest.raises(FlashbsrError, match="recent_pages: got 0"):
        streaming.streaming_slots([3], 16, sink_pages=1, recent_pages=0)
    q, k = np.ones((1, 4, 8)), np.ones((2, 2, 16, 8))
    with pytest.raises(FlashbsrError, match="keep: got 0"):
        quest.choose_pages(q, quest.page_bounds(k), [0, 2], [0, 1], keep=0)


def run_quest(problem: Problem, keep: int, device) -> tuple[np.ndarray, np.ndarray]:
    """`out` and `lse` of requests (b, KV head), with the chosen pages' cache as it lies there."""
    case = problem.case
    (h, kv_heads), dim = case.heads, case.dims[0]
    k, v = map(np.ascontiguousarray, problem.kv)
    q = np.ascontiguousarray(problem.q)
    indptr, indices = quest.choose_pages(
        q, quest.page_bounds(k), problem.kv_indptr, problem.kv_indices, keep=keep
    )
    task = TaskInfo(h // kv_heads, 1, dim, kv_layout="HND", backend=device.backend)
    attention = Attention(AttentionSpec(), task)
    last_page_len = np.repeat(problem.last_page_len, kv_heads)
    attention.plan(Paged(None, indptr, indices, last_page_len=last_page_len, page_size=16))
    there = [device.put(x.reshape(-1, 1, 16, dim)) for x in (k, v)]
    found = attention.run(
        device.put(q.reshape(-1, h // kv_heads, dim)), tuple(there), return_lse=True
    )
    return tuple(map(device.get, found))


@pytest.mark.parametrize("keep", [1, 4, 100])
def test_quest(keep, device):
    case = Case("quest", 5 * (1,), (300, 1, 0, 64, 129), heads=(6, 2), dtypes=cases.F16)
    case = case.but("hnd", layout="paged", kv_layout="HND", stacked=False)
    problem = device.build(case)
    found = run_quest(problem, keep, device)

    parts = []
    for (q, k, v, _), head in itertools.product(problem.requests, range(2)):
        rows, own = q[:, 3 * head : 3 * head + 3], slice(head, head + 1)
        pages = [np.arange(at, min(at + 16, len(k))) for at in range(0, len(k), 16)]
        importance = []
        for page in pages[:-1]:
            keys, group = k[page, head].astype(np.float64), rows[0].astype(np.float64)
            most = np.maximum(group * keys.min(axis=0), group * keys.max(axis=0)).sum(axis=1)
            assert (most >= (group @ keys.T).max(axis=1)).all()  # a bound
            importance.append(most.max())
        best = sorted(np.argsort(importance)[len(importance) - min(keep - 1, len(importance)) :])
        seen = np.concatenate([np.zeros(0, int), *(pages[i] for i in best), *pages[-1:]])
        parts.append((rows, k[seen, own], v[seen, own], None))
    assert_attention(*found, *states(problem, parts), problem.case.work, "quest")


def test_quest_finds_the_one_key(device):
    """A key that takes all of the softmax is found, whatever page it lies on."""
    case = Case("needle", (1,), (320,), heads=(2, 2), dtypes=cases.F16, seed=3)
    case = case.but("hnd", layout="paged", kv_layout="HND", stacked=False)
    problem = device.build(case)
    [(q, _, v, _)] = problem.requests
    for head, token in ((0, 37), (1, 211)):  # another page for each head
        page, slot = problem.kv_indices[token // 16], token % 16
        problem.kv[0][page, head, slot] = 50 * np.sign(q[0, head])
    out, _ = run_quest(problem, 2, device)
    np.testing.assert_array_equal(out[0, 0], v[37, 0])
    np.testing.assert_array_equal(out[1, 0], v[211, 1])


@pytest.mark.parametrize("weight", [0.8, 1.0])
def test_differential(weight, device):
    case = Case("differential", (5, 70, 0, 1), (37, 150, 3, 64), dims=(64, 128), variant=CAUSAL)
    one = device.build(case)
    two = device.build(dataclasses.replace(case, seed=1))
    attention = attention_for(one, AttentionSpec(causal=True), device)
    one.plan(attention)
    (q1, (k1, v)), (q2, (k2, _)) = ((x.q, x.kv) for x in map(device.upload, (one, two)))
    found = device.get(differential.differential(attention, (q1, q2), (k1, k2), v, weight=weight))

    second = [
        (q, k, mine[2], None) for (q, k, *_), mine in zip(two.requests, one.requests, strict=True)
    ]
    pairs = zip(states(one, one.requests, CAUSAL), states(one, second, CAUSAL), strict=True)
    unit = UNIT[one.case.dtypes[2]]

    def difference(a: State, b: State) -> State:
        # Both outputs are rounded, and so are the product and the difference.
        rounding = 3 * unit / SINGLE * (abs(a.out) + weight * abs(b.out))
        return State(
            a.out - weight * b.out,
            a.lse,
            a.noise + weight * b.noise,
            a.sum_size + weight * b.sum_size + rounding,
            np.maximum(a.logit_size, b.logit_size),
            np.maximum(a.logit_noise, b.logit_noise),
        )

    expected = [difference(a, b) for a, b in pairs]
    assert_attention(found, None, *expected, one.case.work, "differential")
