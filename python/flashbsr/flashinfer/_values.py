# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Single values, and variants, in FlashInfer's form, as the engine takes them.

Its CUDA text is not compiled. Of ``jit_args`` two declarations are known by their names: sinks and
sigmoids, both built in. Multi-item scoring is a mask function over the caller's arrays.
"""

from __future__ import annotations

from typing import Any

from .._check import check_int, check_one_array
from ..arrays.types import Array
from ..engine.attention import Attention
from ..engine.known import sm_scale_of
from ..errors import FlashbsrError, UnsupportedError
from ._arguments import Default
from .quantized import as_nvfp4

__all__ = ["SINK", "Declared", "as_tuple", "pages_to_tokens", "read_jit_args", "types"]


def types(given: dict[str, Any]) -> dict[str, Any]:
    """Element types: FlashInfer's defaults, where nothing is given, are those of the arrays."""
    q, kv, both = given["q_data_type"], given["kv_data_type"], given.get("data_type")
    out = check_one_array("o_data_type", given.get("o_data_type"))
    q = both if q is None or isinstance(q, Default) else q
    kv = both if kv is None or isinstance(kv, Default) else kv
    if isinstance(out, Default):
        out = None if q is None else str(out)
    return {"q_dtype": q, "kv_dtype": q if kv is None else as_nvfp4(kv), "o_dtype": out}


def as_tuple(cache: Any) -> Any:
    """Make a tuple of K and V that came as a list."""
    return tuple(cache) if isinstance(cache, list) else cache


def pages_to_tokens(fixed_split_size: int | None, page_size: int) -> int | None:
    """Convert FlashInfer's split size, in pages, to that of `TaskInfo`, in tokens."""
    if fixed_split_size is None:
        return None
    check_int("page_size", page_size, 1)
    return check_int("fixed_split_size", fixed_split_size, 1) * page_size


SINK, SIGMOID = "AttentionSink", "FlashSigmoid"


class Declared:
    """The variant of a wrapper, and what its runs take."""

    def __init__(self, name: str = "") -> None:
        self.name = name  # of FlashInfer's declaration
        self.bias = 0.0  # of sigmoids, from the last run: the engine has it in its plan
        self.arrays: dict[str, Array] = {}  # extras of a variant, for every run of the plan

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
    """Find the variant that ``jit_args`` declares."""
    if jit_args is None:
        return Declared()
    known = [x for x in jit_args if isinstance(x, str) and x in (SINK, SIGMOID)]
    if not known:
        way_out = "AttentionSpec.from_source and from_functions take your own (docs/variants.md)"
        raise UnsupportedError("jit_args", "CUDA text", f"{SINK} or {SIGMOID}: {way_out}")
    return Declared(known[0])
