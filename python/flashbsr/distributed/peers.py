# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Partial attention states of the GPUs of a host, merged through each other's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import flashbsr._core as _core

from .._check import check_int, check_name
from ..errors import CapacityError, DTypeError, FlashbsrError, ShapeError, UnsupportedError
from ..ops.call import Call
from .merge import FLOATS, PeerError, check_states, together

__all__ = ["PeerMerge"]

WAY_OUT = 'merge_over_ranks(method="reduce_scatter") serves any process group'
# Of the machine since it was started: alike in all of its containers.
BOOT = Path("/proc/sys/kernel/random/boot_id")


class PeerMerge:
    """`merge_over_ranks` on GPUs of one host in a single launch, without a collective.

    Each GPU writes its partial results over NVLink into memory of the others, waits for theirs, and
    merges. A merge can be captured in a CUDA graph, and replayed any number of times. Every rank
    makes one, with the same arguments, and calls `merge` as often as the others do, with the same
    shapes.

    Parameters
    ----------
    max_tokens : int
        Most query tokens of a merge.
    num_qo_heads, head_dim : int
        Of the partial results: all heads, of their output's dims.
    group : process group, optional
        Ranks that share the keys, of one host, each with the GPU that is current. Default: all.
    dtype : torch.dtype
        What float32 outputs travel in. Others travel as they are, which loses nothing.
    timeout : float
        Seconds that a GPU waits for the others' results.
    memory : {"ipc", "symmetric"}
        How GPUs get at each other's memory: CUDA IPC, or PyTorch's symmetric memory, which wants a
        GPU of its own for every rank. NVLink multicast is never used.

    Attributes
    ----------
    size, rank : int
        Of the group.
    max_tokens : int
    device : torch.device
        Of the arrays that it takes.

    Raises
    ------
    UnsupportedError
        No GPU, ranks on several hosts, more than 16 of them, GPUs that do not reach each other.
    ShapeError, DTypeError, FlashbsrError
        Heads that the ranks do not divide, a head dim that is no multiple of 8; ranks that do not
        agree.
    PeerError
        A rank is gone.

    Notes
    -----
    It takes ``2 * N * max_tokens * num_qo_heads * (head_dim * itemsize + 4)`` bytes of each GPU.
    """

    def __init__(
        self,
        max_tokens: int,
        num_qo_heads: int,
        head_dim: int,
        group: Any = None,
        *,
        dtype: torch.dtype = torch.float32,
        timeout: float = 5.0,
        memory: str = "ipc",
    ) -> None:
        for name, value in (
            ("max_tokens", max_tokens),
            ("num_qo_heads", num_qo_heads),
            ("head_dim", head_dim),
        ):
            check_int(name, value, 1)
        check_name("memory", memory, tuple(MEMORY))
        if dtype not in FLOATS:
            raise DTypeError("dtype", str(dtype), "torch.float32, float16 or bfloat16")
        if head_dim % 8:
            raise ShapeError("head_dim", head_dim, "a multiple of 8")
        if timeout <= 0:
            raise FlashbsrError("timeout", timeout, "seconds, above 0")
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if num_qo_heads % self.size:
            raise ShapeError("num_qo_heads", num_qo_heads, f"a multiple of the {self.size} ranks")
        if self.size > _core.MAX_PEERS:
            raise UnsupportedError(
                "group", f"{self.size} ranks", f"at most {_core.MAX_PEERS}; {WAY_OUT}"
            )
        if not torch.cuda.is_available():
            raise UnsupportedError("PeerMerge", "a machine without a GPU", f"GPUs; {WAY_OUT}")
        self.heads, self.dim, self.dtype, self.timeout = num_qo_heads, head_dim, dtype, timeout
        self.max_tokens = max_tokens
        self._checked: Any = None  # shapes, types and device of the last merge, which passed
        self._group = group
        self.device = torch.device("cuda", torch.cuda.current_device())
        rows, row_bytes = max_tokens * num_qo_heads, head_dim * dtype.itemsize
        count = _core.inbox_bytes(self.size, rows, row_bytes)
        self._everyone((count, rows, row_bytes))
        # All ones is what says that nothing has come.
        self._memory, inboxes = MEMORY[memory](self, count, 0xFF)
        self._control = torch.zeros(4, dtype=torch.int32, device=self.device)
        self._missed = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._missed_rank = self._missed.numpy()
        self._peers = _core.Peers(
            inboxes,
            self.rank,
            rows,
            row_bytes,
            self._control.data_ptr(),
            self._missed.data_ptr(),
            max(round(timeout * 1000), 1),
        )
        torch.cuda.synchronize(self.device)
        self._gathered(None)  # all are ready

    def merge(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        scatter_heads: bool = False,
        lse_base: str = "e",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge what every rank has computed over its share of the keys.

        The work is put on the current stream; nothing waits on the host. All ranks get the same
        bits: those of `merge_states` over what travels, in the order of ranks.

        Parameters
        ----------
        out : tensor, shape (tokens, num_qo_heads, head_dim)
            This rank's partial output, of all heads; float32, float16 or bfloat16. Rows begin at
            multiples of 16 bytes.
        lse : float32 tensor, shape (tokens, num_qo_heads)
            Its log-sum-exp.
        scatter_heads : bool
            Return heads ``[rank * H / N, (rank + 1) * H / N)`` only, and send each rank its own.
        lse_base : {"e", "2"}
            Base of `lse` and of the result.

        Returns
        -------
        out : tensor, shape (tokens, num_qo_heads or num_qo_heads / N, head_dim)
            Of the type of `out`. NaN where a rank did not answer in time.
        lse : float32 tensor, of those rows

        Raises
        ------
        PeerError
            A rank did not answer a merge before this one. Rows that lacked it are NaN.
        ShapeError, DTypeError, DeviceError, CapacityError
        """
        shapes = (out.shape, lse.shape, out.dtype, lse.dtype, out.device)
        if shapes != self._checked:
            self._check(out, lse)
            self._checked = shapes
        check_name("lse_base", lse_base, ("e", "2"))
        self._raise_if_missed()
        if self.size == 1:
            return out, lse
        if scatter_heads:
            heads = self.heads // self.size
            merged = out.new_empty((out.shape[0], heads, self.dim))
            total = lse.new_empty((out.shape[0], heads))
        else:
            merged = torch.empty_like(out, memory_format=torch.contiguous_format)
            total = torch.empty_like(lse, memory_format=torch.contiguous_format)
        travel = self.dtype if out.dtype == torch.float32 else out.dtype
        call = Call(out, "out")
        _core.merge_peers(
            call.export(out, "out"),
            call.export(lse, "lse"),
            call.export(merged, "merged", True),
            call.export(total, "merged_lse", True),
            self._peers,
            str(travel).removeprefix("torch."),
            lse_base == "2",
            call.stream,
        )
        return merged, total

    def _check(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        check_states(out, lse)
        if out.shape[1:] != (self.heads, self.dim):
            raise ShapeError(
                "out", f"shape {tuple(out.shape)}", f"(tokens, {self.heads}, {self.dim})"
            )
        if out.shape[0] > self.max_tokens:
            raise CapacityError(
                "out", f"{out.shape[0]} tokens", f"at most max_tokens={self.max_tokens}"
            )
        if out.device != self.device:
            raise UnsupportedError("out", f"on {out.device}", f"on {self.device}; {WAY_OUT}")
        if out.dtype != torch.float32 and self.dtype not in (torch.float32, out.dtype):
            raise DTypeError("out", str(out.dtype), f"float32 or {self.dtype}, which travels")

    def check(self, *, wait: bool = True) -> None:
        """Wait for the merges on the current stream, and raise if one has missed a rank.

        Parameters
        ----------
        wait : bool
            False: only those count that are done; a look at memory of the host.

        Raises
        ------
        PeerError
        """
        if wait:
            torch.cuda.current_stream(self.device).synchronize()
        self._raise_if_missed()

    def _raise_if_missed(self) -> None:
        if self._missed_rank[0]:
            raise PeerError(
                "PeerMerge",
                f"nothing from rank {self._missed_rank[0] - 1}",
                f"an answer of every rank within {self.timeout:g} s. What was merged since is NaN; "
                "make another PeerMerge when all ranks are there",
            )

    def _gathered(self, x: Any) -> list[Any]:
        """Bring something of all ranks together."""
        everyones: list[Any] = [None] * self.size
        with together("PeerMerge", None):
            dist.all_gather_object(everyones, x, group=self._group)
        return everyones

    def _everyone(self, wanted: tuple[int, ...]) -> None:
        """Raise on all ranks unless they are on one host and want the same."""
        facts = self._gathered((BOOT.read_text() if BOOT.exists() else None, wanted))
        if any(host != facts[0][0] or host is None for host, _ in facts):
            raise UnsupportedError("group", "ranks on several hosts", f"one host; {WAY_OUT}")
        if any(theirs != wanted for _, theirs in facts):
            raise FlashbsrError(
                "PeerMerge", "other arguments on other ranks", "the same on all of them"
            )

    def _all_can(self, reach: Callable[[], list[int]]) -> list[int]:
        """Addresses of all inboxes, or the same error on all ranks."""
        addresses, problem = [], ""
        try:
            addresses = reach()
        except RuntimeError as error:
            problem = str(error).splitlines()[0][:300]
        if problems := [text for text in self._gathered(problem) if text]:
            raise UnsupportedError(
                "memory", problems[0], f"GPUs that reach each other's memory; {WAY_OUT}"
            )
        return addresses


def _ipc(merge: PeerMerge, count: int, fill: int) -> tuple[Any, list[int]]:
    """Memory that every process opens by a handle of the driver."""
    mine = torch.full((count,), fill, dtype=torch.uint8, device=merge.device)
    torch.cuda.synchronize(merge.device)
    kept: list[Any] = [mine]
    shared: list[Any] = []

    def share() -> list[int]:
        shared[:] = mine.untyped_storage()._share_cuda_()[1:]
        return []

    def reach() -> list[int]:
        found = []
        for rank, handle in enumerate(handles):
            if rank == merge.rank:
                found.append(mine.data_ptr())
                continue
            # As memory of the GPU that is to reach it; its own index may mean another one here.
            theirs = torch.UntypedStorage._new_shared_cuda(merge.device.index, *handle)
            kept.append(theirs)
            found.append(theirs.data_ptr())
        return found

    merge._all_can(share)
    handles = merge._gathered(tuple(shared))
    return kept, merge._all_can(reach)


def _symmetric(merge: PeerMerge, count: int, fill: int) -> tuple[Any, list[int]]:
    """Memory of `torch.distributed._symmetric_memory`."""
    from torch.distributed import _symmetric_memory as symmetric

    kept: list[Any] = []

    def reach() -> list[int]:
        mine = symmetric.empty(count, dtype=torch.uint8, device=merge.device)
        mine.fill_(fill)
        torch.cuda.synchronize(merge.device)
        group = dist.group.WORLD if merge._group is None else merge._group
        handle = symmetric.rendezvous(mine, group)
        kept.extend([mine, handle])
        offset = mine.data_ptr() - handle.buffer_ptrs[merge.rank]
        return [address + offset for address in handle.buffer_ptrs]

    return kept, merge._all_can(reach)


MEMORY: dict[str, Callable[[PeerMerge, int, int], tuple[Any, list[int]]]] = {
    "ipc": _ipc,
    "symmetric": _symmetric,
}
