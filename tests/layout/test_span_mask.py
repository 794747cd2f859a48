# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Mask functions that are windows and documents: found, checked pair by pair, and run."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from compare import assert_attention
from flashbsr import Attention, AttentionSpec, TaskInfo, UnsupportedError, span_mask
from harness import CPU, DEVICES, framework
from reference import Variant

DOCUMENT = np.repeat(np.arange(5), [50, 1, 90, 99, 60])


def everything(b, h, q, kv):
    return (q >= 0) & (kv >= 0)


def causal(b, h, q, kv, q_position):
    return kv <= q_position


def window(b, h, q, kv):
    return (kv <= q) & (kv >= q - 40)


def wide_window(b, h, q, kv, q_position):
    return kv >= q_position - 33


def document(b, h, q, kv):
    return DOCUMENT[q] == DOCUMENT[kv]


def document_window(b, h, q, kv):
    return (DOCUMENT[q] == DOCUMENT[kv]) & (kv <= q) & (q - kv < 20)


def by_request(b, h, q, kv):
    return (q // (10 * (b + 1)) == kv // (10 * (b + 1))) & (kv <= q)


def itself(b, h, q, kv):
    return q == kv


def padded(b, h, q, kv):
    return (q >= 5) & (q < 20) & (kv >= 5) & (kv <= q)


def nothing(b, h, q, kv):
    return q < 0


SAME = [everything, causal, window, document, document_window, by_request, itself, padded, nothing]


def dense(mask_mod, b, q_len, kv_len):
    q, kv = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    named = (
        {"q_position": kv_len - q_len + q} if "q_position" in mask_mod.__code__.co_varnames else {}
    )
    return np.broadcast_to(np.asarray(mask_mod(b, 0, q, kv, **named), bool), (q_len, kv_len))


def seen(spans, shape):
    """The mask that segments, causality and window stand for."""
    mask = np.zeros(shape, bool)
    for s in range(len(spans.qo_indptr) - 1):
        (q0, q1), (k0, k1) = spans.qo_indptr[s : s + 2], spans.kv_indptr[s : s + 2]
        variant = Variant(causal=spans.causal, window_left=spans.window_left)
        mask[q0:q1, k0:k1] = reference.visible(variant, q1 - q0, k1 - k0, None)
    return mask


def whole(mask_mod, q_lens, kv_lens):
    mask = np.zeros((sum(q_lens), sum(kv_lens)), bool)
    q = k = 0
    for b, (m, n) in enumerate(zip(q_lens, kv_lens, strict=True)):
        mask[q : q + m, k : k + n] = dense(mask_mod, b, m, n)
        q, k = q + m, k + n
    return mask


LENGTHS = [((300,), (300,)), ((30, 0, 120), (30, 0, 120)), ((1,), (1,)), ((0,), (40,)), ((), ())]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask_mod", SAME)
def test_spans_are_the_mask(mask_mod, lengths):
    spans = span_mask(mask_mod, *lengths)
    mask = whole(mask_mod, *lengths)
    np.testing.assert_array_equal(seen(spans, mask.shape), mask)
    assert spans.qo_indptr[-1] == mask.shape[0] and spans.kv_indptr[-1] == mask.shape[1]


@pytest.mark.parametrize("mask_mod", [everything, causal, wide_window, nothing])
@pytest.mark.parametrize("lengths", [((17, 1), (64, 300)), ((100,), (40,)), ((5,), (0,))], ids=str)
def test_queries_and_keys_of_other_lengths(mask_mod, lengths):
    spans = span_mask(mask_mod, *lengths)
    mask = whole(mask_mod, *lengths)
    np.testing.assert_array_equal(seen(spans, mask.shape), mask)


def test_what_is_found():
    spans = span_mask(window, 300, 300)
    assert (spans.causal, spans.window_left, spans.qo_indptr.tolist()) == (True, 40, [0, 300])
    spans = span_mask(document, 300, 300)
    assert spans.fields == {"causal": False, "window_left": -1}
    assert spans.kv_indptr.tolist() == [0, 50, 51, 141, 240, 300]
    # Keys that nobody sees are one segment.
    spans = span_mask(lambda b, h, q, kv: kv < 10, 4, 300)
    assert spans.kv_indptr.tolist() == [0, 10, 300] and spans.qo_indptr.tolist() == [0, 4, 4]


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
@pytest.mark.parametrize("mask_mod", [window, document, document_window, by_request, nothing])
def test_attention(mask_mod, device):
    lengths, dtype = ((300,), (300,)), "float32" if device is CPU else "bfloat16"
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((300, heads, 64)).astype(reference.DTYPES[dtype]) for heads in (4, 2, 2)
    )
    spans = span_mask(mask_mod, *lengths)
    attention = Attention(AttentionSpec(**spans.fields), TaskInfo(4, 2, 64, backend=device.backend))
    attention.plan(spans.layout())
    result = attention.run(*map(device.put, (q,)), tuple(map(device.put, (k, v))), return_lse=True)
    mask = whole(mask_mod, *lengths)
    exact, working = (
        reference.attend(
            q, k, v, Variant(), mask=mask, work=work, out_dtype=dtype if work else None
        )
        for work in (None, dtype)
    )
    assert_attention(*map(device.get, result), exact, working, dtype, mask_mod.__name__)


@pytest.mark.parametrize(
    ("mask_mod", "message"),
    [
        (lambda b, h, q, kv: (kv < 20) | (kv <= q), "is no window and not causal"),
        (lambda b, h, q, kv: kv % 2 == 0, "others between them"),
        (lambda b, h, q, kv: kv == 99 - q, "behind those of a later one"),
        (lambda b, h, q, kv: (kv <= q) & (kv >= q // 2), "is no window"),
        (lambda b, h, q, kv: kv <= q + 3, "is no window and not causal"),
        (lambda b, h, q, kv: (q != 7) & (kv >= 0), "between 0 and 99 of request 0"),
        (lambda b, h, q, kv: kv <= q + h, "a function of the head"),
    ],
)
def test_other_masks_are_refused(mask_mod, message):
    with pytest.raises(UnsupportedError, match=message) as caught:
        span_mask(mask_mod, 100, 100)
    assert "head" in message or "flashbsr.block_mask" in str(caught.value)


def test_plan_wants_its_own_spec():
    spans = span_mask(window, 100, 100)
    with pytest.raises(
        UnsupportedError,
        match=r"^layout: got spans of causal=True, window_left=40; .*window_left=-1",
    ):
        Attention(AttentionSpec(causal=True), TaskInfo(1, 1, 8)).plan(spans.layout())
    spec = AttentionSpec.from_functions(score_mod=lambda s, b, h, q, k: s + k, **spans.fields)
    with pytest.raises(UnsupportedError, match="asks for positions"):
        Attention(spec, TaskInfo(1, 1, 8)).plan(spans.layout())


def test_functions_of_torch():
    torch = framework("torch")
    ids = torch.from_numpy(DOCUMENT)
    spans = span_mask(lambda b, h, q, k: torch.logical_and(ids[q] == ids[k], q >= k), 300, 300)
    assert spans.causal and spans.kv_indptr.tolist() == [0, 50, 51, 141, 240, 300]
