# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Bad calls raise, name the argument, and leave every array as it was."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import flashbsr
import numpy as np
import pytest
from bad_calls import (
    GOOD,
    HUGE,
    PAGED,
    RAGGED,
    Bad,
    World,
    check_bad,
    check_good,
    engine,
    i32,
    i64,
    make_task,
    plan_paged,
    plan_ragged,
    run_unplanned,
)
from bad_plans import MASK
from bad_table import BAD
from harness import Device


@pytest.mark.parametrize("good", GOOD, ids=lambda call: call.__name__)
def test_good_call(good: Callable[..., Any], device: Device) -> None:
    check_good(good, device)


@pytest.mark.parametrize(
    "bad", BAD, ids=lambda bad: f"{bad.call.__name__}-{bad.names.split('|')[0]}-{bad.why}"
)
def test_bad_call(bad: Bad, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    check_bad(bad, device, monkeypatch)


def test_table_is_long_enough() -> None:
    assert len(BAD) >= 70
    assert len({(bad.call, bad.names, bad.why) for bad in BAD}) == len(BAD)


@pytest.mark.parametrize(
    ("error", "call", "changes"),
    [
        (flashbsr.errors.ShapeError, make_task, {"num_qo_heads": 5}),
        (flashbsr.errors.DTypeError, make_task, {"q_dtype": "float64"}),
        (flashbsr.errors.IndexRangeError, plan_paged, {"last_page_len": i32(2, 0, 3)}),
        (flashbsr.errors.IndexRangeError, plan_ragged, {"qo_indptr": i32(0, 4, 3, 6)}),
        (flashbsr.errors.IndexRangeError, plan_ragged, {"qo_indptr": i64(0, 3, 4, HUGE)}),
        (flashbsr.errors.PlanError, run_unplanned, {}),
        (flashbsr.errors.UnsupportedError, make_task, {"backend": "trtllm-gen"}),
        (
            flashbsr.errors.CapacityError,
            plan_paged,
            {"task": {"max_batch_size": 2, "max_q_tokens": 6, "max_kv_pages": 5}},
        ),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_classes(error: type, call: Callable[..., Any], changes: dict[str, Any]) -> None:
    """What callers catch: the class says what kind of thing was wrong; all are ValueError."""
    with pytest.raises(error) as caught:
        call(World(), **changes)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TypeError) == (error is flashbsr.errors.DTypeError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value)
    assert str(again) == str(caught.value)


def test_values_and_positions_are_in_the_message() -> None:
    """Enough to find the mistake in a batch of thousands."""
    with pytest.raises(flashbsr.FlashbsrError) as caught:
        plan_paged(World(), last_page_len=i32(2, 9, 3))
    assert "9" in str(caught.value)
    assert "1" in str(caught.value)
    assert "4" in str(caught.value)  # the page size
    with pytest.raises(flashbsr.FlashbsrError) as caught:
        plan_paged(World(), kv_indices=i32(6, 0, -77, 5, 1))
    assert "-77" in str(caught.value)


def test_failed_plan_leaves_no_plan(device: Device) -> None:
    """After a `plan` that raised, `run` refuses: the old plan is not the caller's batch."""
    w = World(device)
    attention = engine(w)
    attention.plan(flashbsr.Ragged(**RAGGED))
    w.call(attention.run, w.q, (w.k, w.v))
    decreasing = {**RAGGED, "qo_indptr": i32(0, 4, 3, 6)}
    for fields, options in ((decreasing, {}), (RAGGED, {"custom_mask": MASK[:-1]})):
        with pytest.raises(flashbsr.FlashbsrError):
            attention.plan(flashbsr.Ragged(**fields), **options)
        with pytest.raises(flashbsr.errors.PlanError):
            w.call(attention.run, w.q, (w.k, w.v))
    attention.plan(flashbsr.Ragged(**RAGGED))
    w.call(attention.run, w.q, (w.k, w.v))


def test_failed_run_leaves_the_plan_and_the_outputs(device: Device) -> None:
    w = World(device)
    attention = engine(w)
    attention.plan(flashbsr.Paged(**PAGED))
    expected = device.get(w.call(attention.run, w.q, w.cache))
    for bad in (w.q[:5], w.q.astype(np.float64)):
        with pytest.raises(flashbsr.FlashbsrError):
            w.call(attention.run, bad, w.cache, out=w.out, lse=w.lse, return_lse=True)
    assert w.untouched()
    np.testing.assert_array_equal(device.get(w.call(attention.run, w.q, w.cache)), expected)


def test_oversized_indices_are_not_read(device: Device) -> None:
    """Index arrays may be longer than used; what lies behind is nobody's business."""
    w = World(device)
    attention = engine(w)
    attention.plan(flashbsr.Paged(**PAGED))
    expected = device.get(w.call(attention.run, w.q, w.cache))
    padded = np.concatenate([PAGED["kv_indices"], i32(-1, 2**31 - 1, 7, 100)])
    attention.plan(flashbsr.Paged(**{**PAGED, "kv_indices": padded}))
    np.testing.assert_array_equal(device.get(w.call(attention.run, w.q, w.cache)), expected)


def test_page_beyond_the_cache_is_caught_by_run(device: Device) -> None:
    """`plan` does not know the cache; `run` compares its pages with the highest page id."""
    w = World(device)
    attention = engine(w)
    attention.plan(flashbsr.Paged(**{**PAGED, "kv_indices": i32(6, 0, 7, 5, 1)}))
    with pytest.raises(flashbsr.FlashbsrError, match=r"^(kv|k)\b.*7.*8"):
        w.call(attention.run, w.q, w.cache)
    w.call(attention.run, w.q, np.concatenate([w.cache, w.cache]))
