# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The cases that every backend runs: `Case` says what, `build` makes hostile arrays of it.

Hostile means: whatever no request owns is NaN (unused pages, the tails of last pages, the padding
that makes every array strided), pages are permuted, index arrays are longer than used with garbage
behind, outputs are poisoned and surrounded by poison that must survive.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
from dataclasses import dataclass, field
from typing import Any

import flashbsr
import numpy as np
import reference
from reference import DTYPES, NO_HOOKS, Hooks, State, Variant

PLAIN = Variant()
GARBAGE = 2**31 - 1  # an index that crashes whoever follows it


@dataclass(frozen=True)
class Case:
    """One attention problem. Lengths are per request; dtypes are those of q, KV and the output."""

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)  # query and output, KV
    dims: tuple[int, int] = (64, 64)  # qk, vo
    dtypes: tuple[str, str, str] = ("float32", "float32", "float32")
    # ragged, paged (CSR + last_page_len), paged_lens (CSR + kv_lens), table; bounds (planned with
    # more keys than there are, then updated)
    layout: str = "ragged"
    page_size: int = 16
    kv_layout: str = "NHD"
    stacked: bool = True
    decode: bool = False  # plan with qo_indptr=None
    variant: Variant = PLAIN
    mask: str | None = None  # bool, packed; blocks: bool, of blocks that are kept, cut or hidden
    sinks: bool | str = False  # "extreme": also -inf and 100
    slopes: bool = False
    scales: str | None = None  # number, head
    gain: float = 1.0  # on q: 100 makes logits of thousands
    p_type: str | None = None  # that P is held to; None: q's, float32 where q is float8
    task: dict[str, Any] = field(default_factory=dict)  # further fields of TaskInfo
    seed: int = 0

    @property
    def work(self) -> str:
        """Working precision: of P, and so of the tolerance."""
        q_type = self.dtypes[0]
        return self.p_type or ("float32" if q_type.startswith("float8") else q_type)

    def but(self, name: str, **changes: Any) -> Case:
        """This case with changes; `name` is appended."""
        return dataclasses.replace(self, name=f"{self.name}-{name}", **changes)


def poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An array of NaN (every type of ours has one)."""
    return np.full(shape, np.nan, np.float32).astype(DTYPES[dtype])


def strided(x: np.ndarray, dtype: str) -> np.ndarray:
    """`x` as a view into a poisoned array, larger on every dimension and off its alignment."""
    base = poisoned((*(n + 1 for n in x.shape[:-1]), x.shape[-1] + 3), dtype)
    view = base[(*(slice(0, n) for n in x.shape[:-1]), slice(1, 1 + x.shape[-1]))]
    view[...] = x
    return view


def indptr(lens: Any) -> np.ndarray:
    """Offsets of consecutive runs, int32 ``(len(lens) + 1,)``."""
    return np.concatenate([[0], np.cumsum(np.asarray(lens, np.int64))]).astype(np.int32)


def sparse_memory(size: int) -> mmap.mmap:
    """Map `size` bytes of zeros of which only those written take room (Linux)."""
    reserve_nothing = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve_nothing)


@dataclass
class Problem:
    """Arrays of a case: what the engine gets, and each request's rows for the reference."""

    case: Case
    q: np.ndarray  # (nnz_q, num_qo_heads, head_dim_qk)
    kv: Any  # stacked 5-D cache, or (k, v)
    qo_indptr: np.ndarray
    kv_indptr: np.ndarray  # tokens if ragged, otherwise pages
    kv_indices: np.ndarray | None
    last_page_len: np.ndarray | None
    block_tables: np.ndarray | None
    kv_lens: np.ndarray
    custom_mask: np.ndarray | None
    packed_mask: np.ndarray | None
    run_options: dict[str, Any]
    requests: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]]
    kernel: str = ""  # that ran last, where whoever ran it asked

    def spec_fields(self) -> dict[str, Any]:
        """Arguments of ``AttentionSpec``."""
        variant = self.case.variant
        return {field.name: getattr(variant, field.name) for field in dataclasses.fields(variant)}

    def task_fields(self) -> dict[str, Any]:
        """Arguments of ``TaskInfo``."""
        case = self.case
        fields: dict[str, Any] = {
            "num_qo_heads": case.heads[0],
            "num_kv_heads": case.heads[1],
            "head_dim_qk": case.dims[0],
            "head_dim_vo": case.dims[1],
        }
        if case.kv_layout != "NHD":
            fields["kv_layout"] = case.kv_layout
        default = "bfloat16" if case.dtypes[0].startswith("float8") else case.dtypes[0]
        if case.dtypes[2] != default:
            fields["o_dtype"] = case.dtypes[2]
        return fields | case.task

    def layout(self) -> flashbsr.Ragged | flashbsr.Paged | flashbsr.BlockTable | flashbsr.Bounds:
        """Who meets whom, as the case says it."""
        case = self.case
        qo_indptr = None if case.decode else self.qo_indptr
        if case.layout == "ragged":
            return flashbsr.Ragged(qo_indptr, self.kv_indptr)
        size = case.page_size
        if case.layout == "table":
            return flashbsr.BlockTable(qo_indptr, self.block_tables, self.kv_lens, page_size=size)
        if case.layout == "bounds":
            return flashbsr.Bounds(qo_indptr, self.bounds(), page_size=size)
        lens = "kv_lens" if case.layout == "paged_lens" else "last_page_len"
        return flashbsr.Paged(
            qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            page_size=size,
            **{lens: getattr(self, lens)},
        )

    def bounds(self) -> np.ndarray:
        """More KV tokens than requests have: by none, some, or several times as many."""
        rng = np.random.default_rng(self.case.seed)
        more = rng.choice([0, 1, 37, 1000], len(self.kv_lens))
        return (self.kv_lens + more * rng.integers(1, 3, len(more))).astype(np.int32)

    def plan(self, attention: flashbsr.Attention) -> None:
        """Plan the case's layout and mask."""
        masks = {}
        if self.case.mask in ("bool", "blocks"):
            masks["custom_mask"] = self.custom_mask
        elif self.case.mask == "packed":
            masks["packed_custom_mask"] = self.packed_mask
        attention.plan(self.layout(), **masks)
        if self.case.layout == "bounds":
            attention.update(self.kv_lens, self.block_tables)

    def reference(self, work: str | None = None, hooks: Hooks = NO_HOOKS) -> State:
        """The answer, exact or in the working precision `work`; `hooks` are a user's variant."""
        case = self.case
        states = [
            reference.attend(
                q,
                k,
                v,
                case.variant,
                mask=mask,
                hooks=hooks,
                request=b,
                work=work,
                out_dtype=None if work is None else case.dtypes[2],
                **self.run_options_reference(),
            )
            for b, (q, k, v, mask) in enumerate(self.requests)
        ]
        return State.concatenate(states, case.heads[0], case.dims[1])

    def run_options_reference(self) -> dict[str, Any]:
        """The run's options under the reference's names."""
        return {
            ("slopes" if name == "alibi_slopes" else name): value
            for name, value in self.run_options.items()
        }

    def new_outputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Poisoned, strided `out` and `lse`."""
        case = self.case
        out = poisoned((len(self.q), case.heads[0], case.dims[1]), case.dtypes[2])
        return strided(out, case.dtypes[2]), poisoned((len(self.q), case.heads[0]), "float32")


def random_mask(rng: np.random.Generator, q_len: int, kv_len: int) -> np.ndarray:
    """A random mask with a fully hidden row, if there are two or more."""
    mask = rng.random((q_len, kv_len)) < 0.6
    if q_len > 1:
        mask[rng.integers(q_len)] = False
    return mask


def mask_of_blocks(rng: np.random.Generator, q_len: int, kv_len: int) -> np.ndarray:
    """A mask of which blocks of rows by keys are all kept, random, or, most of them, hidden."""
    mask = np.zeros((q_len, kv_len), bool)
    for row in range(0, q_len, 70):
        for key in range(0, kv_len, 130):
            part = mask[row : row + 70, key : key + 130]
            share = rng.choice([0.0, 0.0, 0.5, 1.0])
            part[...] = rng.random(part.shape) < share
    return mask


def paged_cache(
    case: Case, keys: list[np.ndarray], values: list[np.ndarray]
) -> tuple[Any, list[np.ndarray]]:
    """A cache with the requests' tokens on permuted pages, NaN elsewhere; and their page lists."""
    counts = [-(-n // case.page_size) for n in case.kv_lens]
    num_pages, heads, dtype = sum(counts) + 3, case.heads[1], case.dtypes[1]
    # Its own numbers: the same pages whatever else a case has.
    order = np.random.default_rng(case.seed).permutation(num_pages).astype(np.int32)
    owned = [order[a:b] for a, b in itertools.pairwise(indptr(counts))]

    def filled(tokens: list[np.ndarray], dim: int) -> np.ndarray:
        pages = poisoned((num_pages, case.page_size, heads, dim), dtype)
        for x, own in zip(tokens, owned, strict=True):
            for page, start in zip(own, range(0, len(x), case.page_size), strict=True):
                part = x[start : start + case.page_size]
                pages[page, : len(part)] = part
        return pages if case.kv_layout == "NHD" else pages.swapaxes(1, 2)

    k, v = filled(keys, case.dims[0]), filled(values, case.dims[1])
    if case.stacked:
        return strided(np.stack([k, v], axis=1), dtype), owned
    return (strided(k, dtype), strided(v, dtype)), owned


def build(case: Case) -> Problem:
    """Arrays of a case, the same for the same case."""
    rng = np.random.default_rng([case.seed, sum(case.q_lens), sum(case.kv_lens), *case.dims])
    (q_type, kv_type, _), (num_qo_heads, num_kv_heads) = case.dtypes, case.heads

    def normal(rows: int, heads: int, dim: int, dtype: str, gain: float, mean: float) -> np.ndarray:
        x = rng.standard_normal((rows, heads, dim)) * gain + mean
        return x.astype(np.float32).astype(DTYPES[dtype])

    queries = [normal(n, num_qo_heads, case.dims[0], q_type, case.gain, 0) for n in case.q_lens]
    keys = [normal(n, num_kv_heads, case.dims[0], kv_type, 1, 0) for n in case.kv_lens]
    # A mean, because errors in the normalisation cancel in zero-mean values.
    values = [normal(n, num_kv_heads, case.dims[1], kv_type, 1, 0.25) for n in case.kv_lens]
    lens = list(zip(case.q_lens, case.kv_lens, strict=True))
    new_mask = mask_of_blocks if case.mask == "blocks" else random_mask
    masks = [new_mask(rng, *n) if case.mask else None for n in lens]
    flat_mask = packed_mask = None
    if case.mask:
        flat_mask = np.concatenate([np.zeros(0, bool), *(m.ravel() for m in masks)])
        packed_mask, _ = reference.segment_packbits(
            flat_mask, indptr([a * b for a, b in lens]), "little"
        )

    def joined(parts: list[np.ndarray], heads: int, dim: int, dtype: str) -> np.ndarray:
        return np.concatenate([np.zeros((0, heads, dim), DTYPES[dtype]), *parts])

    options: dict[str, Any] = {}
    if case.sinks:
        options["sinks"] = rng.standard_normal(num_qo_heads).astype(np.float32) + 1
        if case.sinks == "extreme":  # no sink, and one that takes everything
            options["sinks"][:2] = -np.inf, 100
    if case.slopes:
        options["alibi_slopes"] = (0.3 * rng.random(num_qo_heads)).astype(np.float32)
    if case.scales == "number":
        options |= {"q_scale": 0.75, "k_scale": 1.5, "v_scale": 0.6}
    elif case.scales == "head":
        for name, count in (("q", num_qo_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
            options[f"{name}_scale"] = (0.5 + rng.random(count)).astype(np.float32)

    q = strided(joined(queries, num_qo_heads, case.dims[0], q_type), q_type)
    kv_indptr, kv_indices, last_page_len, tables = indptr(case.kv_lens), None, None, None
    kv: Any
    if case.layout == "ragged":
        parts = (
            joined(keys, num_kv_heads, case.dims[0], kv_type),
            joined(values, num_kv_heads, case.dims[1], kv_type),
        )
        if case.kv_layout == "HND":
            parts = tuple(x.swapaxes(0, 1) for x in parts)
        kv = tuple(strided(x, kv_type) for x in parts)
    else:
        kv, owned = paged_cache(case, keys, values)
        kv_indptr = indptr([len(own) for own in owned])
        kv_indices = np.concatenate([*owned, np.full(5, GARBAGE)]).astype(np.int32)
        last_page_len = np.array(
            [(n - 1) % case.page_size + 1 if n else 0 for n in case.kv_lens], np.int32
        )
        tables = np.full(
            (len(owned), max((len(own) for own in owned), default=0) + 1), -1, np.int32
        )
        for row, own in zip(tables, owned, strict=True):
            row[: len(own)] = own

    return Problem(
        case,
        q,
        kv,
        indptr(case.q_lens),
        kv_indptr,
        kv_indices,
        last_page_len,
        tables,
        np.array(case.kv_lens, np.int32),
        flat_mask,
        packed_mask,
        options,
        list(zip(queries, keys, values, masks, strict=True)),
    )


F32, F16, BF16 = (3 * ("float32",), 3 * ("float16",), 3 * ("bfloat16",))
FP8 = ("float8_e4m3fn", "float8_e4m3fn", "bfloat16")
MIXED = Case("mixed", (5, 1, 0, 33, 2, 1), (37, 130, 7, 33, 0, 1))
DECODE = Case("decode", 5 * (1,), (1, 300, 17, 0, 64), layout="paged", decode=True, dtypes=BF16)
PREFILL = Case("prefill", (70, 129), (200, 129), variant=Variant(causal=True))
