# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Operators of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ...arrays.dtypes import output_dtype
from ...engine.attention import Attention
from ...engine.call import attention
from ...engine.live import behind
from ...errors import UnsupportedError
from .library import operator

__all__: list[str] = []

# Which Attention: an operand, so that any number of them share one program. Over CUDA tensors a
# number, which is part of the program: what a CUDA graph captures is one Attention, and a compiler
# may move an operand to the GPU, where reading it would wait.
_ARRAYS = "Tensor q, Tensor k, Tensor? v, Tensor(a!) out, Tensor(b!)? lse"
_MORE = (
    "Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, float? q_factor, float? k_factor, "
    "float? v_factor, Tensor? sinks, Tensor? alibi_slopes, bool? enable_pdl, bool kv_ready, "
    "Tensor? kv_lens, Tensor? block_tables, Tensor? qo_indptr, Tensor? q_positions, "
    "str[] array_names, Tensor[] arrays, str[] number_names, float[] numbers"
)
_PLAIN: tuple[Any, ...] = (
    *[None] * 9,
    False,
    *[None] * 4,
    (),
    (),
    (),
    (),
)  # those, where none is given


def _on_host_only(*args: Any, **more: Any) -> NoReturn:  # noqa: ARG001
    raise UnsupportedError("operand", "a tensor, over CUDA tensors", "the overload with a number")


def _follows_plans(number: int) -> Attention:
    """Find an Attention on a GPU; refuse a captured run that would not follow later plans."""
    attention: Attention = behind(number)
    if attention.task.max_batch_size is None and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "max_batch_size",
            "None, in a compiled program that is captured into a CUDA graph",
            "a capacity (TaskInfo), so that replays follow later plans, or a mode without graphs",
        )
    return attention


@operator(f"run(Tensor operand, {_ARRAYS}) -> ()", on_gpu=_on_host_only)
def run(
    operand: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor | None,
) -> None:  # fmt: skip
    """Compute the planned attention; without `v`, `k` is a stacked cache."""
    attention = behind(operand.item())
    if attention._extras:
        _run_with(attention, q, k, v, out, lse, *_PLAIN)
        return
    attention._engine.run(q, k, v, out, lse, None, None, None, None, None, (), 0, 0)
    attention._open = False


def _run_number_on_gpu(number: int, *args: Any) -> None:
    _run_with(_follows_plans(number), *args, *_PLAIN)


@operator(f"run.number(SymInt number, {_ARRAYS}) -> ()", on_gpu=_run_number_on_gpu)
def _run_number(number: int, *args: Any) -> None:
    _run_with(behind(number), *args, *_PLAIN)


@operator(f"run_with(Tensor operand, {_ARRAYS}, {_MORE}) -> ()", on_gpu=_on_host_only)
def run_with(operand: torch.Tensor, *args: Any) -> None:
    """Compute it with scales, sinks, slopes, and the extras of the spec's variant."""
    _run_with(behind(operand.item()), *args)


def _run_with_number_on_gpu(number: int, *args: Any) -> None:
    _run_with(_follows_plans(number), *args)


@operator(
    f"run_with.number(SymInt number, {_ARRAYS}, {_MORE}) -> ()", on_gpu=_run_with_number_on_gpu
)
def _run_with_number(number: int, *args: Any) -> None:
    _run_with(behind(number), *args)


def _run_with(
    attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor | None, q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, q_factor: float | None,
    k_factor: float | None, v_factor: float | None, sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None, enable_pdl: bool | None, kv_ready: bool,
    kv_lens: torch.Tensor | None, block_tables: torch.Tensor | None,
    qo_indptr: torch.Tensor | None, q_positions: torch.Tensor | None,
    array_names: Sequence[str], arrays: Sequence[torch.Tensor], number_names: Sequence[str],
    numbers: Sequence[float],
) -> None:  # fmt: skip
    extras: dict[str, Any] = dict(zip(array_names, arrays, strict=True))
    whole = {extra.name for extra in attention._extras if extra.dtype == "int32"}
    for name, value in zip(number_names, numbers, strict=True):
        extras[name] = int(value) if name in whole and value.is_integer() else value
    attention.run(
        q, k if v is None else (k, v), out=out, lse=lse,
        q_scale=q_factor if q_scale is None else q_scale,
        k_scale=k_factor if k_scale is None else k_scale,
        v_scale=v_factor if v_scale is None else v_scale,
        sinks=sinks, alibi_slopes=alibi_slopes, enable_pdl=enable_pdl, kv_ready=kv_ready,
        kv_lens=kv_lens, block_tables=block_tables, qo_indptr=qo_indptr,
        q_positions=q_positions, **extras,
    )  # fmt: skip


def _attention_fake(q: torch.Tensor, _: Any, v: torch.Tensor, *args: Any) -> Any:
    dtype = getattr(torch, output_dtype(str(q.dtype).removeprefix("torch.")))
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    return out, q.new_empty(q.shape[:-1] if args[6] else (0,), dtype=torch.float32)


def _attend_on_gpu(*args: Any) -> Any:
    return attend(*args)


@operator(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, SymInt window_left, float? sm_scale, "
    "float? logits_soft_cap, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, bool return_lse, "
    "Tensor? sinks) -> (Tensor, Tensor)",
    fake=_attention_fake,
    on_gpu=_attend_on_gpu,
)
def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window_left: int,
    sm_scale: float | None, logits_soft_cap: float | None, cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None, return_lse: bool, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Plan and compute in one call; without `return_lse` the second result is empty."""
    result = attention(
        q, k, v, causal=causal, window_left=window_left, sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        return_lse=return_lse, sinks=sinks,
    )  # fmt: skip
    if return_lse:
        return result[0], result[1]
    return result, q.new_empty((0,), dtype=torch.float32)


def _like(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(x)


# Of the gradient too: what needs none a compiler would compute on the way forward.
@operator("no_gradient(Tensor gradient, Tensor x) -> Tensor", fake=_like)
def no_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """Raise: the way back through a result ends here, when it is gone and not when it is read."""
    raise UnsupportedError(
        "backward",
        "a gradient through flashbsr",
        "forward passes only: torch.no_grad(), or inputs that are detached",
    )
