# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The tolerance rule itself: it passes an honest kernel and rejects small errors.

The honest kernel is another formula than the reference: an online softmax over blocks of 32 keys,
with P rounded against the running maximum, and partial states merged.
"""

from __future__ import annotations

import cases
import ml_dtypes
import numpy as np
import pytest
import reference
from cases import BF16, F16, F32, Case, Problem
from compare import MismatchError, assert_attention, assert_close
from reference import DTYPES, State, Variant, rounded

LONG = Case("long", (1, 40), (900, 700), heads=(6, 2), layout="paged", variant=Variant(causal=True))
SHORT = Case("short", (1, 1, 2, 3), (1, 2, 2, 5), heads=(2, 1), dims=(8, 8))


def online(problem: Problem, block: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """An honest kernel for plain, causal and windowed softmax: blocks, split in two, merged."""
    case = problem.case
    work = case.dtypes[0]
    outs, lses = [], []
    for q, k, v, mask in problem.requests:
        (q_len, heads, dim), kv_len = q.shape, len(k)
        allowed = reference.visible(case.variant, q_len, kv_len, mask)
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
        out, lse = np.zeros((q_len, heads, v.shape[2])), np.full((q_len, heads), -np.inf)
        for h in range(heads):
            kv_head = h // (heads // k.shape[1])
            halves = []
            for begin, end in ((0, kv_len // 2), (kv_len // 2, kv_len)):
                top = np.full(q_len, -np.inf, np.float32)
                total = np.zeros(q_len, np.float32)
                o = np.zeros((q_len, v.shape[2]), np.float32)
                for at in range(begin, end, block):
                    keys = slice(at, min(at + block, end))
                    x = q[:, h] @ k[keys, kv_head].T * np.float32(np.log2(np.e) / np.sqrt(dim))
                    x = np.where(allowed[:, keys], x, -np.inf).astype(np.float32)
                    new = np.maximum(top, x.max(axis=1))
                    safe = np.where(np.isfinite(new), new, 0)
                    p, decay = np.exp2(x - safe[:, None]), np.exp2(top - safe)
                    total = total * decay + p.sum(axis=1)
                    o = o * decay[:, None] + rounded(p, work) @ v[keys, kv_head]
                    top = new
                with np.errstate(divide="ignore", invalid="ignore"):
                    halves.append(
                        (
                            np.where(total[:, None] > 0, o / total[:, None], 0)[:, None],
                            ((top + np.log2(total)) * np.log(2))[:, None],
                        )
                    )
            merged, at = reference.merge(*zip(*halves, strict=True))
            out[:, h], lse[:, h] = merged[:, 0], at[:, 0]
        outs.append(out)
        lses.append(lse)
    return np.concatenate(outs).astype(DTYPES[case.dtypes[2]]), np.concatenate(lses)


def states(problem: Problem) -> tuple[State, State]:
    return problem.reference(), problem.reference(problem.case.dtypes[0])


@pytest.mark.parametrize("dtypes", [F32, F16, BF16, ("bfloat16", "float8_e4m3fn", "bfloat16")])
@pytest.mark.parametrize("base", [LONG, SHORT, cases.MIXED, cases.DECODE, cases.PREFILL])
def test_honest_kernel_passes(base: Case, dtypes: tuple[str, str, str]) -> None:
    for seed in range(10):
        for dims in ((8, 8), (64, 64)):
            case = base.but(f"{dtypes}-{seed}", dtypes=dtypes, seed=seed, dims=dims)
            problem = cases.build(case)
            exact, working = states(problem)
            assert_attention(*online(problem), exact, working, dtypes[0], case.name)


def test_honest_kernel_passes_extreme_logits() -> None:
    for dtypes in (F32, F16, BF16):
        problem = cases.build(LONG.but("extreme", dtypes=dtypes, gain=1200.0))
        exact, working = states(problem)
        assert_attention(*online(problem), exact, working, dtypes[0], dtypes[0])


def drop_key(problem: Problem) -> None:
    """The last request loses one key in the middle."""
    q, k, v, _ = problem.requests[-1]
    mask = reference.visible(problem.case.variant, len(q), len(k), None)
    mask[:, len(k) // 2] = False
    problem.requests[-1] = (q, k, v, mask)


def scale_off(problem: Problem) -> None:
    """The softmax scale is 1 % off."""
    scale = 1.01 / np.sqrt(problem.case.dims[0])
    problem.case = problem.case.but("scale", variant=Variant(causal=True, sm_scale=scale))


def wrong_page(problem: Problem) -> None:
    """One page of one request is another one."""
    q, k, v, mask = problem.requests[-1]
    k, v = k.copy(), v.copy()
    k[32:48], v[32:48] = k[:16], v[:16]
    problem.requests[-1] = (q, k, v, mask)


def causal_off_by_one(problem: Problem) -> None:
    """Every row sees one key less."""
    for i, (q, k, v, _) in enumerate(problem.requests):
        mask = np.tri(len(q), len(k), len(k) - len(q) - 1, dtype=bool)
        problem.requests[i] = (q, k, v, mask)


def wrong_kv_head(problem: Problem) -> None:
    """One query head of one request reads the neighbour's KV head."""
    q, k, v, mask = problem.requests[0]
    q = q.copy()
    q[:, [2, 3]] = q[:, [3, 2]]
    problem.requests[0] = (q, k, v, mask)


def values_off(problem: Problem) -> None:
    """The values of one request are 1 % too large."""
    q, k, v, mask = problem.requests[-1]
    problem.requests[-1] = (q, k, (v.astype(np.float32) * 1.01).astype(np.float32), mask)


@pytest.mark.parametrize("dtypes", [F32, F16, BF16])
@pytest.mark.parametrize(
    "harm",
    [drop_key, scale_off, wrong_page, causal_off_by_one, wrong_kv_head, values_off],
    ids=lambda harm: harm.__name__,
)
def test_small_errors_are_rejected(harm: object, dtypes: tuple[str, str, str]) -> None:
    problem = cases.build(LONG.but(dtypes[0], dtypes=dtypes))
    exact, working = states(problem)
    out, lse = online(problem)
    assert_attention(out, lse, exact, working, dtypes[0], "unharmed")
    harm(problem)  # type: ignore[operator]
    out, lse = online(problem)
    if harm is scale_off:  # the honest kernel takes the scale from the head dim
        state = problem.reference(dtypes[0])
        out, lse = state.out.astype(DTYPES[dtypes[2]]), state.lse
    with pytest.raises(MismatchError):
        assert_attention(out, None, exact, working, dtypes[0], "harmed")
    if harm is not values_off:
        with pytest.raises(MismatchError):
            assert_attention(exact.out.astype(np.float32), lse, exact, working, dtypes[0], "lse")


def test_sums_of_float8_widen_the_lse_of_their_kernels_only() -> None:
    """By 14 bits instead of 24: 2e-4 here passes, 2e-3 does not, and nothing for outputs."""
    problem = cases.build(LONG.but("split", dtypes=("bfloat16", "float8_e4m3fn", "bfloat16")))
    exact, working = states(problem)
    out, lse = online(problem)
    split = "hopper_sm90a_d128_bf16xe4m3_r192_plain"
    assert_attention(out, lse, exact, working, "bfloat16", "unharmed")
    assert_attention(out, lse + 2e-4, exact, working, "bfloat16", "split", split)
    for other in ("", "decode_sm90a_d128_bf16xe4m3_r16_plain", split.replace("xe4m3", "")):
        with pytest.raises(MismatchError, match="lse"):
            assert_attention(out, lse + 2e-4, exact, working, "bfloat16", "other", other)
    with pytest.raises(MismatchError, match="lse"):
        assert_attention(out, lse + 2e-3, exact, working, "bfloat16", "too far", split)
    harmed = (1.01 * exact.out).astype(out.dtype)
    with pytest.raises(MismatchError, match="out"):
        assert_attention(harmed, lse, exact, working, "bfloat16", "out", split)


def test_nan_inf_and_shape_are_rejected() -> None:
    exact = np.ones((4, 8))
    for bad in (np.nan, np.inf, -np.inf):
        actual = exact.copy()
        actual[2, 3] = bad
        with pytest.raises(MismatchError, match=r"\(2, 3\)"):
            assert_close(actual, exact, exact, np.array(1e30), "x")
    with pytest.raises(MismatchError, match="shape"):
        assert_close(exact[:3], exact, exact, np.array(1e30), "x")
    expected = exact.copy()
    expected[1, 1] = -np.inf
    assert_close(expected, expected, expected, np.array(1e-6), "x")
    with pytest.raises(MismatchError, match="-inf differs"):
        assert_close(exact, expected, expected, np.array(1e30), "x")


def test_systematic_error_within_the_bound_is_rejected() -> None:
    """Errors that each stay within the bound, but are all as large as it."""
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((200, 64))
    working = exact.astype(ml_dtypes.bfloat16).astype(np.float64)
    slack = np.abs(exact) * 2.0**-7
    assert_close(working, exact, working, slack, "rounded")
    with pytest.raises(MismatchError, match="on the whole"):
        assert_close(exact + 0.99 * slack, exact, working, slack, "biased")


def test_worst_element_is_reported() -> None:
    exact = np.zeros((5, 7))
    actual = exact.copy()
    actual[3, 2], actual[1, 1] = 0.5, 0.25
    with pytest.raises(
        MismatchError, match=r"2 of 35 .* worst \(3, 2\): got 0.5, expected 0, .* 5 times"
    ):
        assert_close(actual, exact, exact, np.array(0.1), "x")
