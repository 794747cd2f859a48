# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""One tolerance rule for the whole suite.

A result may be as far from the exact (float64) answer as twice the error of the same formula in the
working precision, row by row, plus a slack. The slack is there because that error can be luckily
small, even zero: a row of eight numbers that all happen to round well. It is derived, not tuned:

* the output is rounded once: at most ``u_out |O|``, u the unit roundoff;
* P is rounded once: independent relative errors within u_work, so a standard deviation of at most
  0.41 u_work * noise (a uniform error in +-u/sqrt(2) on average over a binade); 2 u_work * noise is
  five of them. ``noise`` is ``sqrt(sum (p_j v_j)^2)``;
* a float32 logit is off by a few times 2^-24 of ``sum |q_d k_d|`` and P by that relative error; one
  of float8 products on tensor cores by a few times 2^-14: they keep 14 bits of a sum and truncate.
  A kernel that makes bfloat16 q two matrices of e4m3 has such logits too. Its LSE is held to them,
  its outputs are not: rounding P to bfloat16 costs more;
* adding n such terms up in float32 is off by about 2^-24 sqrt(n) times their size;
* RoPE inside attention rounds the rotated q and k: 3 u_work * logit_noise on the logit, five of its
  standard deviations.

A maximum alone would let small systematic errors through (1 % on the scale hides below a rounding
of bf16). So the root mean square of the error, in units of the slack, must stay below twice that of
the working precision as well, plus what rounding alone makes: about 1/4 over many rows, and up to 1
in a single row, whose elements share the rounding of P.
"""

from __future__ import annotations

import numpy as np
from reference import DTYPES, State

SINGLE = 2.0**-24
FLOAT8_SUM = 2.0**-14
UNIT: dict[str, float] = {
    "float64": 2.0**-53,
    "float32": SINGLE,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
# Below this, errors are absolute: half of the smallest subnormal, or where that is float32's, those
# of probabilities that would be subnormal, which a kernel may clamp or flush.
TINY: dict[str, float] = {
    "float64": 0.0,
    "float32": 2.0**-118,
    "float16": 2.0**-25,
    "bfloat16": 2.0**-118,
    "float8_e4m3fn": 2.0**-10,
    "float8_e5m2": 2.0**-17,
}


class MismatchError(AssertionError):
    """A result outside of its tolerance."""


def splits_queries(kernel: str) -> bool:
    """Whether the kernel of this name, or one of two, multiplies bfloat16 q with e4m3 in e4m3."""
    names = kernel.split(" + ")
    return any(name.startswith("hopper_") and "_bf16xe4m3_" in name for name in names)


def dtype_name(x: np.ndarray) -> str:
    """The project's name of an array's dtype."""
    for name, dtype in DTYPES.items():
        if x.dtype == dtype:
            return name
    return str(x.dtype)


def assert_close(
    actual: np.ndarray,
    exact: np.ndarray,
    working: np.ndarray,
    slack: np.ndarray,
    label: str,
) -> None:
    """The rule. Rows are all dimensions but the last.

    Parameters
    ----------
    actual, exact, working : arrays of one shape
        What came out, the float64 answer, and the same formula in the working precision.
    slack : array, broadcastable
        Error that rounding alone may make at each element.
    label : str
        Named in the message.

    Raises
    ------
    Mismatch
        With the worst element: where, what it was, what it should be, error over bound.
    """
    if actual.shape != exact.shape:
        raise MismatchError(f"{label}: shape {actual.shape}, expected {exact.shape}")
    if actual.size == 0:
        return
    actual, exact, working = (np.asarray(x).astype(np.float64) for x in (actual, exact, working))
    slack = np.broadcast_to(slack, exact.shape)

    for kind, test in (("nan", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = test(actual) != test(exact)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise MismatchError(
                f"{label}: {kind} differs at {wrong.sum()} of {wrong.size} elements, first {at}: "
                f"got {actual[at]}, expected {exact[at]}"
            )

    finite = np.isfinite(exact)
    error = np.where(finite, np.abs(np.where(finite, actual, 0) - np.where(finite, exact, 0)), 0)
    honest = np.where(
        finite & np.isfinite(working),
        np.abs(np.where(finite, working, 0) - np.where(finite, exact, 0)),
        0,
    )
    bound = 2 * honest.max(axis=-1, keepdims=True) + slack
    if (error > bound).any():
        over = np.divide(error, bound, out=np.full_like(error, np.inf), where=bound > 0)
        over = np.where(error > bound, over, 0)
        at = tuple(int(i) for i in np.unravel_index(np.argmax(over), over.shape))
        raise MismatchError(
            f"{label}: {int((error > bound).sum())} of {error.size} elements out of tolerance; "
            f"worst {at}: got {actual[at]:.9g}, expected {exact[at]:.9g}, error {error[at]:.3g} is "
            f"{over[at]:.3g} times the bound {bound[at]:.3g}"
        )

    unit = np.where(slack > 0, slack, np.inf)
    rms, rms_honest = (float(np.sqrt(np.mean((e / unit) ** 2))) for e in (error, honest))
    rows = error.size // error.shape[-1]
    limit = 2 * rms_honest + 0.25 + 0.75 / np.sqrt(rows)
    if rms > limit:
        raise MismatchError(
            f"{label}: each element is within its bound, but the errors are too large on the "
            f"whole: "
            f"rms {rms:.3g} of the slack, expected at most {limit:.3g} "
            f"(working precision {rms_honest:.3g})"
        )


def assert_attention(
    out: np.ndarray,
    lse: np.ndarray | None,
    exact: State,
    working: State,
    work_dtype: str,
    label: str,
    kernel: str = "",
    floor: float = 0.0,
) -> None:
    """`assert_close` for an attention state; `lse` in natural logarithm, None skips it.

    `kernel` is the name of the one that ran, where it may be one that `splits_queries`. `floor`:
    how large a part of its row's largest term every term of an output may be off by, where weights
    are integers (docs/numerics.md).
    """
    out_dtype = dtype_name(out)
    # A case is held to P in float8 only where its products are float8's.
    sums = FLOAT8_SUM if work_dtype.startswith("float8") else SINGLE
    size, noise = 1 + exact.logit_size, 3 * UNIT[work_dtype] * exact.logit_noise
    logit = 4 * sums * size + noise
    slack = (
        UNIT[out_dtype] * np.abs(exact.out)
        + (2 * UNIT[work_dtype] + logit[..., None]) * exact.noise
        + SINGLE * exact.sum_size
        + TINY[out_dtype]
        + floor * exact.noise.max(axis=-1, keepdims=True)
    )
    assert_close(out, exact.out, working.out, slack, f"{label} out")
    if lse is not None:
        finite = np.where(np.isfinite(exact.lse), np.abs(exact.lse), 0)
        if splits_queries(kernel):
            logit = 4 * FLOAT8_SUM * size + noise
        # A row of the rule is a query token here, its elements the heads.
        assert_close(lse, exact.lse, working.lse, logit + 4 * SINGLE * finite, f"{label} lse")


def assert_rounded(
    actual: np.ndarray, exact: np.ndarray, working: np.ndarray, size: np.ndarray, label: str
) -> None:
    """`assert_close` for element-wise results (merge, RoPE): computed in float32, rounded once.

    `size` is the magnitude of the terms that were added up to each element.
    """
    name = dtype_name(actual)
    slack = UNIT[name] * np.abs(exact) + 4 * SINGLE * size + TINY[name]
    assert_close(actual, exact, working, slack, label)
