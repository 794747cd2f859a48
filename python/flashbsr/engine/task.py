# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What is computed on (`TaskInfo`): head counts and dims, data types, capacity, threads."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from .._check import check_backend, check_int, check_name, is_cuda
from ..arrays.dtypes import (
    FLOAT8,
    NVFP4_GROUP,
    O_DTYPES,
    OUTPUT_DTYPES,
    PACKED_LATENTS,
    Q_DTYPES,
    elements_of,
    normalize_dtype,
)
from ..errors import DTypeError, FlashbsrError, ShapeError, UnsupportedError
from .context import ContextParallel

__all__ = ["TaskInfo"]

MAX_HEAD_DIM = 512
MAX_LATENT_DIM = 576
HEAD_DIM_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """The arrays: head counts and dims, data types, layout, capacity, threads.

    Parameters
    ----------
    num_qo_heads, num_kv_heads : int
        Heads of queries and of keys; the first is a multiple of the second (GQA).
    head_dim_qk : int
        Head dim of queries and keys: a multiple of 8, at most 512, or 576 where `latent`.
    head_dim_vo : int, optional
        Head dim of values and outputs. Default `head_dim_qk`.
    latent : bool
        Multi-head latent attention, absorbed (DeepSeek-V2, 2024): one KV head, whose V are the
        first `head_dim_vo` dims of K. ``run`` takes one array of `head_dim_qk` dims, or a tuple of
        the latent and what follows it (the rotated key). Up to 576 and 512 dims; the spec says its
        ``sm_scale``, which follows from the head dim before absorption.
    kv_layout : {"NHD", "HND"}
        Order of tokens and heads within a page (paged), or in the whole array (ragged).
    q_dtype : data type, optional
        float32 (on the CPU only), float16, bfloat16 or float8_e4m3fn, in any framework's notation.
        None: the query array's. float8 queries need a KV of the same type.
    kv_dtype : data type or tuple of two, optional
        The type of q, or with 16-bit and float32 q float8_e4m3fn / float8_e5m2, or codes with
        scales of every token and head (docs/kv-quantization.md): "int8", "int4", "nvfp4" and the
        float8 types, of which K and V may have two. None: the KV array's, which of uint8 arrays
        ("int4", "nvfp4") nobody can tell. On a GPU the first ``run`` with other types than the plan
        expected (float16 at first) plans once more; say them here where that run is captured into a
        CUDA graph. "fp8_ds_mla" with `latent`: rows of 656 bytes (docs/mla.md).
    o_dtype : data type, optional
        float32, float16, bfloat16, or float8_e4m3fn: rounded once, beyond 448 saturated
        (`o_scale` of ``run``). None: that of q, or float8_e4m3fn where a given ``out`` is; with
        float8 q that of a given ``out``, otherwise bfloat16. "nvfp4": ``run`` returns codes and
        scales; `head_dim_vo` is a multiple of 16 then.
    max_batch_size, max_q_tokens, max_kv_pages : int, optional
        Capacity: requests, rows of q, and entries of ``kv_indices`` (paged) or rows of k (ragged).
        Instead of the last one `max_kv_len`: tokens of the longest request. There is room then for
        `max_batch_size` of them, in pages as the first plan has them. A larger plan raises
        `CapacityError`, and memory, kernel and grid stay as they are from the first plan on, so
        that a captured ``run`` may be replayed over later plans; q may then have more rows than
        the plan names. None: ``plan`` grows as needed (``run`` never does).
    num_workers : int, optional
        Queues of the plan. Default: as many as the backend has use for.
    tile_rows : int, optional
        Packed query rows of a tile, of a kernel that the GPU has: 8, 16, 64, 128 or 192
        (``flashbsr info``). Of a batch of chunks and decodes: of the tiles beside the decodes, 128
        or 192. Default: what the plan's model of costs finds cheapest.
    mixed : bool
        With a capacity: take the kernel for mixed batches, whatever the first plan is. Plans that
        captured runs follow then have shared prefixes and chunks beside decodes at their speed: 64
        decodes that share 8000 tokens and own 256 take 41 us in place of 168 (H200); decodes alone
        take longer, 64 of 1000 tokens 77 us in place of 61 (docs/sharing.md). On compute
        capability 9.0, with 16-bit q and KV, head dims up to 128, at most 8 query heads of a KV
        head, and neither soft-cap, encodings of positions, masks, variants nor fixed or disabled
        splits. Without a capacity plans choose by themselves.
    num_threads : int, optional
        Threads that run the queues. Default: the machine's cores. Results do not depend on it.
    fixed_split_size : int, optional
        Cut every KV range at multiples of this many tokens, so that a request's result does not
        depend on the rest of the batch (batch invariance). None: the scheduler chooses.
    disable_split_kv : bool
        Never split a KV range.
    lse_base : {"e", "2"}
        Base of the LSE that ``run`` returns: natural, or 2 as FlashInfer has it.
    backend : {"auto", "cpu", "cuda", "fa2", "fa3"}
        Where to compute. "auto": on the GPU that the workspace or an index array given to ``plan``
        is on, otherwise where the q of the first ``run`` is; decided once. Arrays of a run are all
        in that memory. "fa2" and "fa3" are "cuda" with one family of attention kernels, which
        "cuda" chooses itself: "fa2" those of every GPU (``mma.sync``), "fa3" those of compute
        capability 9.0 (``wgmma``); what the family does not have raises `UnsupportedError`.
    device : int, optional
        Ordinal of the GPU; only with one of the last three backends. None: that of the arrays.
    check : bool
        Validate the page table on the GPU before each run, which then waits for the verdict and
        raises `IndexRangeError` instead of reading elsewhere. A debugging aid, also switched on by
        ``FLASHBSR_CHECK=1`` in the environment. The CPU always checks.
    context_parallel : ContextParallel or tuple (size, rank, interleave), optional
        The keys of this engine are one rank's share of those of each request. Layouts say what is
        here; causality, windows and encodings go by positions on all ranks, which `Attention.plan`
        is given (``q_positions``). docs/distributed.md.
    dequantize_bytes : int
        Most bytes of GPU memory, beside the workspace, for codes in 16 bits: a plan of many query
        rows, without a capacity and fixed splits, writes them there before attention where that is
        faster (docs/kv-quantization.md). 0: never. 256 MiB hold 64500 tokens of 8 KV heads of 128.
    fp8_accumulation : {"default", "fast"}
        Products of float8 q and KV on tensor cores that truncate as they accumulate (compute
        capability 9.0): how often partial sums are promoted to float32. "default": so often that
        the output over values with a mean is at most 0.25 % too small; "fast": 1.2 %. The same
        wherever sums are exact, the CPU included.

    Raises
    ------
    FlashbsrError, ShapeError, DTypeError
        A value out of its range or an unknown name.
    UnsupportedError
        A backend that this build does not have, a head dim that no kernel has.

    Examples
    --------
    >>> TaskInfo(num_qo_heads=32, num_kv_heads=8, head_dim_qk=128).head_dim_vo
    128
    >>> TaskInfo(num_qo_heads=30, num_kv_heads=8, head_dim_qk=128)
    Traceback (most recent call last):
        ...
    flashbsr.errors.ShapeError: num_qo_heads: got 30; expected a multiple of num_kv_heads=8
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    _: KW_ONLY
    head_dim_vo: int | None = None
    latent: bool = False
    kv_layout: str = "NHD"
    q_dtype: Any = None
    kv_dtype: Any = None
    o_dtype: Any = None
    max_batch_size: int | None = None
    max_q_tokens: int | None = None
    max_kv_pages: int | None = None
    max_kv_len: int | None = None
    num_workers: int | None = None
    tile_rows: int | None = None
    mixed: bool = False
    num_threads: int | None = None
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    lse_base: str = "e"
    backend: str = "auto"
    device: int | None = None
    check: bool = False
    dequantize_bytes: int = 256 << 20
    fp8_accumulation: str = "default"
    context_parallel: ContextParallel | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk"):
            _set(self, name, check_int(name, getattr(self, name), 1))
        if self.num_qo_heads % self.num_kv_heads:
            raise ShapeError(
                "num_qo_heads", self.num_qo_heads, f"a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim_vo is None:
            _set(self, "head_dim_vo", self.head_dim_qk)
        _set(self, "head_dim_vo", check_int("head_dim_vo", self.head_dim_vo, 1))
        _set(self, "latent", bool(self.latent))
        if self.latent and self.num_kv_heads != 1:
            raise ShapeError("num_kv_heads", self.num_kv_heads, "1 with latent=True")
        if self.latent and int(self.head_dim_vo or 0) > self.head_dim_qk:
            raise ShapeError("head_dim_vo", self.head_dim_vo, f"at most {self.head_dim_qk}")
        for name in ("head_dim_qk", "head_dim_vo"):
            dim = getattr(self, name)
            most = MAX_LATENT_DIM if self.latent and name == "head_dim_qk" else MAX_HEAD_DIM
            if dim > most or dim % HEAD_DIM_MULTIPLE:
                raise UnsupportedError(
                    name,
                    dim,
                    f"a multiple of {HEAD_DIM_MULTIPLE}, at most {most} (pad the last "
                    "dimension with zeros and pass sm_scale=1/sqrt(unpadded dim))",
                )
        for name, least in (
            ("max_batch_size", 0),
            ("max_q_tokens", 0),
            ("max_kv_pages", 0),
            ("max_kv_len", 0),
            ("num_workers", 1),
            ("tile_rows", 1),
            ("num_threads", 1),
            ("fixed_split_size", 1),
            ("device", 0),
            ("dequantize_bytes", 0),
        ):
            value = getattr(self, name)
            if value is not None:
                _set(self, name, check_int(name, value, least))
        room = "max_kv_pages" if self.max_kv_len is None else "max_kv_len"
        if room == "max_kv_len" and self.max_kv_pages is not None:
            raise FlashbsrError("max_kv_len", self.max_kv_len, "None beside max_kv_pages")
        capacity = ("max_batch_size", "max_q_tokens", room)
        missing = [name for name in capacity if getattr(self, name) is None]
        if missing and len(missing) < len(capacity):
            raise FlashbsrError(missing[0], None, "a number: a capacity is all three, or none")
        _set(self, "mixed", bool(self.mixed))
        if self.mixed and missing:
            raise FlashbsrError("mixed", True, "False without a capacity: plans choose kernels")
        check_name("kv_layout", self.kv_layout, ("NHD", "HND"))
        _set(self, "q_dtype", normalize_dtype(self.q_dtype, "q_dtype", Q_DTYPES))
        types = elements_of(self.kv_dtype)
        if isinstance(self.kv_dtype, str) and self.kv_dtype == PACKED_LATENTS:
            self._check_packed_latents()
        else:
            _set(self, "kv_dtype", types[0] if types[0] == types[1] else types)
        _set(self, "o_dtype", normalize_dtype(self.o_dtype, "o_dtype", OUTPUT_DTYPES))
        if self.o_dtype == "nvfp4" and int(self.head_dim_vo or 0) % NVFP4_GROUP:
            raise UnsupportedError(
                "o_dtype", f"'nvfp4' with head_dim_vo={self.head_dim_vo}", "a multiple of 16"
            )
        if self.q_dtype in FLOAT8 and self.kv_dtype not in (None, self.q_dtype):
            raise DTypeError(
                "kv_dtype", self.kv_dtype, f"{self.q_dtype} as q_dtype; any KV goes with 16-bit q"
            )
        wide = {x for x in types if x in O_DTYPES}
        if (self.q_dtype and wide - {self.q_dtype}) or (wide and len(set(types)) > 1):
            one = f"{self.q_dtype} as q_dtype, or " if self.q_dtype else ""
            raise DTypeError("kv_dtype", self.kv_dtype, f"{one}float8, int8, int4 or nvfp4")
        _set(self, "disable_split_kv", bool(self.disable_split_kv))
        if self.disable_split_kv and self.fixed_split_size is not None:
            raise FlashbsrError(
                "fixed_split_size", self.fixed_split_size, "None when disable_split_kv=True"
            )
        check_name("lse_base", self.lse_base, ("e", "2"))
        check_name("fp8_accumulation", self.fp8_accumulation, ("default", "fast"))
        check_backend(self.backend)
        if self.device is not None and not is_cuda(self.backend):
            raise FlashbsrError("device", self.device, "None unless backend='cuda', 'fa2' or 'fa3'")
        _set(self, "check", bool(self.check))
        _set(self, "context_parallel", _share(self.context_parallel))

    def _check_packed_latents(self) -> None:
        if not self.latent or (self.head_dim_qk, self.head_dim_vo) != (576, 512):
            raise UnsupportedError(
                "kv_dtype", self.kv_dtype, "latent=True and head dims 576 and 512 with such rows"
            )

    @property
    def share(self) -> ContextParallel:
        """Which keys are here; without `context_parallel` all."""
        share = self.context_parallel
        return share if isinstance(share, ContextParallel) else ContextParallel(1, 0)


def _share(value: Any) -> ContextParallel | None:
    if value is None or isinstance(value, ContextParallel):
        return value
    if not isinstance(value, tuple):
        wanted = "a flashbsr.ContextParallel or (size, rank, interleave)"
        raise DTypeError("context_parallel", type(value).__name__, wanted)
    if not 2 <= len(value) <= 3:
        raise ShapeError("context_parallel", value, "(size, rank) or (size, rank, interleave)")
    return ContextParallel(*value)


def _set(obj: object, name: str, value: object) -> None:
    object.__setattr__(obj, name, value)  # the dataclasses are frozen
