# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Partial attention states of all ranks become one: the merge of plans, over a process group."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from .._check import check_name
from ..errors import DTypeError, FlashbsrError, ShapeError
from ..ops.state import merge_states

__all__ = ["FLOATS", "PeerError", "check_states", "merge_over_ranks", "together"]

# What the tensor forms are called since PyTorch 2.12, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

METHODS = ("reduce_scatter", "all_to_all")
# Types of outputs, and of what travels.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class PeerError(FlashbsrError):
    """A rank is gone, or did not answer in time. The process group cannot be used again."""

    default_code: ClassVar[str] = "peer"


@contextmanager
def together(what: str, timeout: float | None) -> Iterator[None]:
    """Turn what a process group raises into `PeerError`; `timeout` is only spoken of."""
    try:
        yield
    except RuntimeError as error:
        limit = "the group's limit" if timeout is None else f"{timeout:g} s"
        raise PeerError(
            what, str(error).splitlines()[0][:300], f"an answer of every rank within {limit}"
        ) from error


def wait(work: Any, timeout: float | None) -> None:
    """Wait for a collective: on a GPU its stream does, on the CPU the caller."""
    if work is None:
        return
    if timeout is None:
        work.wait()
    else:
        work.wait(dt.timedelta(seconds=timeout))


def gather(x: torch.Tensor, group: Any, size: int, timeout: float | None) -> torch.Tensor:
    """Bring the tensors of all ranks together, ``(size, *x.shape)``."""
    everyones = x.new_empty((size * x.shape[0], *x.shape[1:]))
    wait(_all_gather(everyones, x.contiguous(), group=group, async_op=True), timeout)
    return everyones.unflatten(0, (size, x.shape[0]))


def merge_over_ranks(
    out: torch.Tensor,
    lse: torch.Tensor,
    group: Any = None,
    *,
    scatter_heads: bool = False,
    method: str = "reduce_scatter",
    dtype: torch.dtype | None = torch.float32,
    lse_base: str = "e",
    timeout: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge what every rank has computed over its share of the keys.

    Each rank calls it with the same shapes. A row that sees no key on a rank has an output of 0 and
    an LSE of -inf there, and weighs nothing.

    Parameters
    ----------
    out : tensor, shape (tokens, num_qo_heads, head_dim)
        This rank's partial output, of all heads; float32, float16 or bfloat16.
    lse : float32 tensor, shape (tokens, num_qo_heads)
        Its log-sum-exp.
    group : process group, optional
        Ranks that share the keys. Default: all.
    scatter_heads : bool
        Return heads ``[rank * H / N, (rank + 1) * H / N)`` only, as tensor parallelism goes on.
        Otherwise every rank gets all of them.
    method : {"reduce_scatter", "all_to_all"}
        "reduce_scatter": LSEs are gathered (4 N T H bytes), each rank weighs its output, and
        outputs are added on the way. "all_to_all": each rank sends the others their heads with
        LSEs, and merges what it receives as plans merge, in float32 and in the order of ranks.
    dtype : torch.dtype, optional
        What outputs travel in; None: their own type, half of the bytes of float32.
    lse_base : {"e", "2"}
        Base of `lse` and of the result.
    timeout : float, optional
        Seconds to wait for the others on the CPU (gloo). Default, and always with NCCL: the limit
        that the group was made with.

    Returns
    -------
    out : tensor, shape (tokens, num_qo_heads or num_qo_heads / N, head_dim)
        Of the type of `out`.
    lse : float32 tensor, of those rows

    Raises
    ------
    PeerError
        A rank is gone, or late.
    ShapeError, DTypeError, FlashbsrError
        Heads that the ranks do not divide, shapes or types that do not fit.

    Notes
    -----
    With ``m = logsumexp_r(lse_r)`` the output is ``sum_r exp(lse_r - m) out_r`` (FlashInfer, MLSys
    2025, section 2.2).
    """
    check_states(out, lse)
    check_name("method", method, METHODS)
    check_name("lse_base", lse_base, ("e", "2"))
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    heads = out.shape[1]
    if heads % size:
        raise ShapeError("out", f"{heads} heads", f"a multiple of the {size} ranks")
    if size == 1:
        return out, lse
    with together("merge_over_ranks", timeout):
        if method == "all_to_all":
            mine = _exchange(out, lse, group, size, dtype, lse_base, timeout)
        else:
            mine = _reduce(out, lse, group, size, rank, dtype, lse_base, timeout)
        if scatter_heads:
            return mine
        return tuple(_all_heads(x, group, size, timeout) for x in mine)


def check_states(out: torch.Tensor, lse: torch.Tensor) -> None:
    """Raise unless shapes and types are those of partial results."""
    if out.ndim != 3:
        raise ShapeError("out", f"shape {tuple(out.shape)}", "(tokens, num_qo_heads, head_dim)")
    if lse.shape != out.shape[:2]:
        raise ShapeError("lse", f"shape {tuple(lse.shape)}", f"{tuple(out.shape[:2])}, that of out")
    if lse.dtype != torch.float32:
        raise DTypeError("lse", str(lse.dtype).removeprefix("torch."), "float32")
    if out.dtype not in FLOATS:
        raise DTypeError(
            "out", str(out.dtype).removeprefix("torch."), "float32, float16 or bfloat16"
        )


def _by_ranks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Bring the heads of each rank together: ``(size, tokens, heads / size, ...)``."""
    return x.unflatten(1, (size, -1)).movedim(1, 0).contiguous()


def _reduce(
    out: torch.Tensor,
    lse: torch.Tensor,
    group: Any,
    size: int,
    rank: int,
    dtype: torch.dtype | None,
    lse_base: str,
    timeout: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    unit = math.log(2) if lse_base == "2" else 1.0
    everyones = gather(lse, group, size, timeout)
    total = torch.logsumexp(everyones * unit, dim=0)
    # Nobody sees a key: the difference of infinities is no number, and nothing weighs 0.
    weight = torch.exp(lse * unit - total).nan_to_num_(nan=0.0)
    weighed = _by_ranks((out.float() * weight[..., None]).to(dtype or out.dtype), size)
    mine = torch.empty_like(weighed[0])
    wait(_reduce_scatter(mine, weighed.flatten(0, 1), group=group, async_op=True), timeout)
    return mine.to(out.dtype), (_by_ranks(total, size)[rank] / unit)


def _exchange(
    out: torch.Tensor,
    lse: torch.Tensor,
    group: Any,
    size: int,
    dtype: torch.dtype | None,
    lse_base: str,
    timeout: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    received = []
    for x in (out.to(dtype or out.dtype), lse):
        sent = _by_ranks(x, size)
        got = torch.empty_like(sent)
        wait(dist.all_to_all_single(got, sent, group=group, async_op=True), timeout)
        received.append(got.movedim(0, 1).contiguous())
    merged, total = merge_states(received[0], received[1], lse_base=lse_base)
    return merged.to(out.dtype), total


def _all_heads(x: torch.Tensor, group: Any, size: int, timeout: float | None) -> torch.Tensor:
    return gather(x, group, size, timeout).movedim(0, 1).flatten(1, 2)
