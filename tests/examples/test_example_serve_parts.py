# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The serving example's parts: page allocator, sampling, tokenizer, weights, training."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from harness import framework
from serve import dense, weights, workload
from serve.pages import OutOfPagesError, PagePool, page_digests
from serve.sampling import sample
from serve.tokenizer import END, Tokenizer, train_merges


@given(st.data())
def test_allocator_states(data: st.DataObject) -> None:
    """Random holders of random token prefixes: no page has two contents or is lost."""
    pool = PagePool(num_pages=data.draw(st.integers(1, 9)), page_size=2)
    holders: list[list[int]] = []
    content: dict[int, bytes] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        if holders and data.draw(st.booleans()):
            pool.release(holders.pop(data.draw(st.integers(0, len(holders) - 1))))
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=8))
            digests = page_digests(tokens, 2, len(tokens) // 2)
            pages = pool.share(digests)
            assert [content[page] for page in pages] == digests[: len(pages)]
            for digest in digests[len(pages) :]:
                if not pool.available:
                    with pytest.raises(OutOfPagesError):
                        pool.allocate()
                    break
                page = pool.allocate()
                assert page not in itertools.chain(pages, *holders)
                content[page] = digest
                pool.publish(page, digest)
                pages.append(page)
            holders.append(pages)
        pool.check()
        counts = [sum(page in pages for pages in holders) for page in range(pool.num_pages)]
        assert counts == pool.references
    for pages in holders:
        pool.release(pages)
    assert pool.available == pool.num_pages


def test_allocator_refuses_what_nobody_holds() -> None:
    pool = PagePool(2, 4)
    page = pool.allocate()
    pool.release([page])
    with pytest.raises(ValueError, match="nobody holds"):
        pool.release([page])
    with pytest.raises(ValueError, match="nobody holds"):
        pool.publish(page, b"digest")


def test_prefixes_outlive_their_tails() -> None:
    """When a released text is partly overwritten, its end goes first."""
    pool = PagePool(3, 1)
    digests = page_digests([1, 2, 3], 1, 3)
    pages = [pool.allocate() for _ in digests]
    for page, digest in zip(pages, digests, strict=True):
        pool.publish(page, digest)
    pool.release(pages)
    assert pool.allocate() == pages[2]
    assert pool.share(digests) == pages[:2]


def test_digests_name_the_whole_prefix() -> None:
    a, b = page_digests([1, 2, 3, 4, 5], 2, 2), page_digests([9, 2, 3, 4], 2, 2)
    assert len({*a, *b}) == 4
    assert page_digests([1, 2, 3, 4, 5, 6], 2, 3, known=a)[:2] == a
    assert page_digests([1, 2, 3, 4], 2, 1, known=a) == a[:1]


def test_sampling() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=50).astype(np.float32)
    assert sample(logits, 0.0, 1.0, rng) == sample(logits, 1.0, 1e-9, rng) == logits.argmax()
    for temperature, top_p in ((1.0, 1.0), (0.5, 0.8)):
        p = dense.softmax(logits.astype(np.float64) / temperature)
        order = np.argsort(-p)
        kept = order[: np.searchsorted(np.cumsum(p[order]), top_p) + 1]
        drawn = np.bincount(
            [sample(logits, temperature, top_p, rng) for _ in range(4000)], minlength=50
        )
        assert set(np.flatnonzero(drawn)) <= set(kept)
        expected = np.where(np.isin(np.arange(50), kept), p, 0)
        assert np.abs(drawn / 4000 - expected / expected.sum()).max() < 0.04


@given(st.text(max_size=60))
def test_tokenizer_round_trip(text: str) -> None:
    tokenizer = Tokenizer.load(weights.TOKENIZER)
    ids = tokenizer.encode(text)
    assert tokenizer.decode([END, *ids, END]) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_merges_by_frequency() -> None:
    merges = train_merges(["abab abab abab", "cd"], 257 + 3)
    assert merges == [("a", "b"), ("ab", "ab"), ("\u0120", "abab")]  # the package's blank
    assert Tokenizer(merges).encode("abab ab") == [258, 32, 257]


def byte_pairs(text: str, merges: list[tuple[bytes, bytes]]) -> list[int]:
    """Token ids by the definition: of a word, the pair that was learnt first is merged first."""
    rank = {pair: i for i, pair in enumerate(merges)}
    number = {bytes([i]): i for i in range(256)} | {a + b: 257 + i for (a, b), i in rank.items()}
    ids = []
    for word in re.findall(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s", text, re.ASCII):
        parts = [bytes([byte]) for byte in word.encode()]
        while pairs := [pair for pair in pairwise(parts) if pair in rank]:
            best = min(pairs, key=rank.__getitem__)
            merged: list[bytes] = []
            while parts:
                if tuple(parts[:2]) == best:
                    merged.append(parts[0] + parts[1])
                    del parts[:2]
                else:
                    merged.append(parts.pop(0))
            parts = merged
        ids += [number[part] for part in parts]
    return ids


def test_token_ids_are_those_that_the_model_was_trained_on() -> None:
    tokenizer = Tokenizer.load(weights.TOKENIZER)
    saved = json.loads(weights.TOKENIZER.read_text("utf-8"))["model"]
    number, merges = saved["vocab"], saved["merges"]
    assert [number[a + b] for a, b in merges] == [*range(257, tokenizer.vocab_size)]
    parts = [tuple(tokenizer.token_bytes(number[token]) for token in pair) for pair in merges]
    rng = random.Random(0)
    planes = [(0x01, 0x80), (0x80, 0x250), (0x300, 0xD800), (0xE000, 0x110000)]
    texts = ["".join(chr(rng.randrange(*rng.choice(planes))) for _ in range(60)) for _ in range(99)]
    texts += [
        "".join(rng.choices(" \t\n\f\v\x1c\x85\u2003\xa0aB9\xe9,;|", k=60)) for _ in range(99)
    ]
    texts += [path.read_text("utf-8") for path in sorted(weights.FOLDER.glob("*.md"))]
    texts += [path.read_text("utf-8") for path in sorted(weights.FOLDER.glob("*.py"))]
    for text in [*texts, "end of text"]:
        assert tokenizer.encode(text) == byte_pairs(text, parts)


def test_safetensors_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "tiny.safetensors"
    shape = weights.Config(vocab_size=300, hidden=16, layers=1, q_heads=2, kv_heads=1, ffn=8)
    rng = np.random.default_rng(0)
    half = {name: rng.normal(size=s).astype(np.float16) for name, s in shape.shapes().items()}
    weights.save(path, shape, half, note="x")
    config, tensors = weights.load(path)
    assert config == shape
    assert sorted(tensors) == sorted(half)
    for name, tensor in half.items():
        np.testing.assert_array_equal(tensors[name], tensor)
    del half["norm"]
    weights.save_file(half, path, {"config": json.dumps(dataclasses.asdict(shape))})
    with pytest.raises(ValueError, match="do not fit"):
        weights.load(path)


def test_the_model_has_learnt_english() -> None:
    assert weights.WEIGHTS.stat().st_size <= 5_000_000
    config, tensors = weights.load()
    ids = workload.encode_prompt(
        "The optional argument is the name of the file. If the file cannot be opened, an exception "
        "is raised.",
        Tokenizer.load(weights.TOKENIZER),
    )
    p = dense.softmax(dense.forward(config, tensors, ids))
    loss = -np.log(p[np.arange(len(ids) - 1), ids[1:]]).mean()
    assert loss < 3.5  # nats per token; a uniform guess has 7.3


def test_training_writes_what_the_dense_forward_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = framework("torch")
    from serve import train

    (tmp_path / "corpus.json").write_text(json.dumps(["The lock is released. " * 40] * 50))
    arguments = ["--corpus", str(tmp_path / "corpus.json"), "--steps", "2", "--batch", "1"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two that wait for each other take minutes on a busy machine
    train.main([*arguments, "--vocab", "270", "--sample", "2", "--out", str(tmp_path)])
    torch.set_num_threads(threads)
    assert "step     2/2" in capsys.readouterr().out
    config, tensors = weights.load(tmp_path / "model.safetensors")
    assert config.vocab_size == Tokenizer.load(tmp_path / "tokenizer.json").vocab_size == 270
    model = train.Transformer(config, dropout=0.0)
    with torch.no_grad():
        for name, tensor in tensors.items():
            model.w(name).copy_(torch.tensor(tensor.astype(np.float32)))
        ids = np.arange(60) * 4
        logits = model(torch.tensor(ids)[None])[0].numpy()
    np.testing.assert_allclose(logits, dense.forward(config, tensors, ids), atol=1e-5)
