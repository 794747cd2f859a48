# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Variants that programs declare by FlashInfer's means, as what they are here.

Its CUDA text is not compiled. Of ``jit_args`` two declarations are known by their names: sinks and
sigmoids, both built in. Multi-item scoring is a mask function over the caller's arrays.
"""

from __future__ import annotations

import math
from typing import Any

from ..arrays import adapter_for
from ..arrays.types import Array
from ..engine.attention import Attention
from ..engine.known import sm_scale_of
from ..errors import FlashbsrError, ShapeError, UnsupportedError

__all__ = ["Declared", "items", "read_jit_args"]

SINK, SIGMOID = "AttentionSink", "FlashSigmoid"


class Declared:
    """The variant of a wrapper, and what its runs take.

    Attributes
    ----------
    name : str
        Of FlashInfer's declaration; empty: none.
    bias : float
        Of sigmoids, from the last run: the engine has it in its plan.
    arrays : dict
        By the names of a variant's extras, for every run of the plan.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.bias = 0.0
        self.arrays: dict[str, Array] = {}

    def complete(self, spec: dict[str, Any]) -> None:
        """Put the variant into the fields of a spec."""
        if self.name == SIGMOID:
            spec |= {"activation": "sigmoid", "sigmoid_bias": self.bias}

    def values(self, args: tuple[Any, ...], attention: Attention) -> tuple[Any, Any, Any, Any]:
        """Make q_scale, k_scale, v_scale and sinks of what a run takes by position."""
        count = 2 if self.name else 3
        if len(args) != count:
            names = {"": "scale_q, scale_k, scale_v", SINK: "sink, sm_scale"}
            what = names.get(self.name, "logits_scale, sigmoid_bias")
            raise FlashbsrError("args", f"{len(args)} of them", f"{count}: {what}")
        if not self.name:
            return (*args, None)
        scale, sinks = (args[1], args[0]) if self.name == SINK else (args[0], None)
        if self.name == SIGMOID:
            self.bias = float(args[1])
        planned = sm_scale_of(attention.spec.sm_scale, attention.task.head_dim_qk)
        return (None if scale is None else float(scale) / planned), None, None, sinks


def read_jit_args(jit_args: Any) -> Declared:
    """Find the variant that ``jit_args`` declares.

    Raises
    ------
    UnsupportedError
        Another than the two that are known.
    """
    if jit_args is None:
        return Declared()
    known = [x for x in jit_args if isinstance(x, str) and x in (SINK, SIGMOID)]
    if not known:
        raise UnsupportedError(
            "jit_args",
            "a declaration in CUDA",
            f"one of {SINK} or {SIGMOID}: AttentionSpec.from_source and from_functions take "
            "variants of your own (docs/variants.md)",
        )
    return Declared(known[0])


def items(prefix_len: Array, positions: Array, length: int, batch: int) -> dict[str, Array]:
    """Make the extras of `sees_items` of FlashInfer's arrays."""
    found = []
    for name, x, count in (
        ("prefix_len_ptr", prefix_len, batch),
        ("token_pos_in_items_ptr", positions, batch * length),
    ):
        if x is None:
            raise FlashbsrError(name, None, "an array, as the other one of multi-item scoring")
        adapter = adapter_for(x, name)
        size = math.prod(x.shape)
        if size < count:
            raise ShapeError(name, f"{size} elements", f"{count}: of {batch} requests")
        found.append(adapter.cast(x.reshape(-1), "int32")[:count])
    return {"before": found[0], "within": found[1].reshape(batch, length)}
