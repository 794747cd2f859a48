# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Dense caches: any strides, padding on both sides, lengths that come later. NaN in the padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flashbsr
import numpy as np
import pytest
from compare import assert_attention
from flashbsr import AttentionSpec, Padded, TaskInfo
from harness import CPU, Device, framework
from reference import State, Variant, attend

HEADS, KV_HEADS = 6, 2
DIMS = 64, 64
TYPE = "float16"
CAUSAL = Variant(causal=True)


@dataclass
class Dense:
    """A dense batch; of `k` and `v`, ``(rows, capacity, H_kv, D)``, the padding is NaN."""

    q: Any
    k: Any
    v: Any
    q_lens: list[int]
    lens: list[int]
    begins: list[int]
    rows: list[int]

    @property
    def qo_indptr(self) -> np.ndarray:
        return np.cumsum([0, *self.q_lens])

    def check(self, out: Any, lse: Any, variant: Variant = CAUSAL) -> None:
        """Compare with float64."""
        states = []
        for work in (None, TYPE):
            found = []
            for b, (row, begin) in enumerate(zip(self.rows, self.begins, strict=True)):
                end = begin + self.lens[b]
                q = self.q[self.qo_indptr[b] : self.qo_indptr[b + 1]]
                kv = (x[row, begin:end] for x in (self.k, self.v))
                found.append(attend(q, *kv, variant, work=work, out_dtype=work and TYPE))
            states.append(State.concatenate(found, HEADS, self.v.shape[-1]))
        exact, working = states
        assert_attention(out, lse, exact, working, TYPE, "padded")


def dense(
    capacity: int, q_lens: list[int], lens: list[int], begins: list[int] | None = None,
    rows: list[int] | None = None, seed: int = 0,
) -> Dense:  # fmt: skip
    """Random numbers where requests are, NaN elsewhere."""
    rng = np.random.default_rng(seed)
    begins = begins or [0] * len(lens)
    rows = rows or list(range(len(lens)))
    q = rng.standard_normal((sum(q_lens), HEADS, DIMS[0])).astype(TYPE)
    k, v = (np.full((max(rows) + 1, capacity, KV_HEADS, dim), np.nan, TYPE) for dim in DIMS)
    for row, begin, length in zip(rows, begins, lens, strict=True):
        for x in (k, v):
            x[row, begin : begin + length] = rng.standard_normal((length, *x.shape[2:]))
    return Dense(q, k, v, q_lens, lens, begins, rows)


def stored(x: np.ndarray, how: str, put: Any) -> Any:
    """The same array ``(rows, capacity, heads, dim)``, in memory that lies otherwise."""
    count, capacity, heads, dim = x.shape
    if how == "BSHD":
        return put(x)
    if how == "BHSD":
        return put(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2)
    if how == "longer":  # a part of a static cache
        wide = np.full((count, heads, 2 * capacity, dim), np.nan, x.dtype)
        wide[:, :, capacity:] = x.swapaxes(1, 2)
        return put(wide)[:, :, capacity:].swapaxes(1, 2)
    # Heads of a fused product, between those of others.
    wide = np.full((count, capacity, 3 * heads, dim), np.nan, x.dtype)
    wide[:, :, heads : 2 * heads] = x
    return put(wide)[:, :, heads : 2 * heads]


def run(
    batch: Dense, device: Device, how: str, order: str, variant: Variant = CAUSAL, **options: Any
) -> Padded:
    """Plan, run and compare; every view is of the same memory."""
    k, v = (stored(x, how, device.put) for x in (batch.k, batch.v))
    if order == "HND":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    given = {} if not any(batch.begins) else {"kv_begin": np.array(batch.begins)}
    layout = Padded(
        np.array(batch.qo_indptr), np.array(batch.lens), kv=(k, v), kv_layout=order, **given,
        **options,
    )  # fmt: skip
    attention = flashbsr.Attention(
        AttentionSpec(causal=variant.causal, window_left=variant.window_left),
        TaskInfo(HEADS, KV_HEADS, *DIMS[:1], head_dim_vo=DIMS[1], kv_layout=order,
                 q_dtype=TYPE, kv_dtype=TYPE, backend=device.backend),
    )  # fmt: skip
    attention.plan(layout)
    pages = layout.pages(k, v)
    if device is CPU:
        assert all(np.shares_memory(a, b) for a, b in zip(pages, (k, v), strict=True))
    out, lse = attention.run(device.put(batch.q), pages, return_lse=True)
    batch.check(device.get(out), device.get(lse), variant)
    return layout


LAYOUTS = ["BSHD", "BHSD", "longer", "fused"]


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("q_len", [1, 20])
def test_rows(how: str, order: str, q_len: int, device: Device) -> None:
    """Without left padding a row is a page, however many tokens of it are in use."""
    batch = dense(70, [q_len] * 4, [70, 0, 33, 20])
    assert run(batch, device, how, order).page_size == 70


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize(
    ("capacity", "begins", "page_size"),
    [
        (64, [0, 48, 16, 0], 16),
        (64, [7, 0, 1, 63], 1),
        (63, [21, 0, 42, 62], 1),
        (60, [12, 36, 12, 36], 12),
    ],
)
def test_left_padding(
    capacity: int, begins: list[int], page_size: int, how: str, order: str, device: Device
) -> None:
    """Pages are as large as the beginnings allow."""
    lens = [capacity - begin for begin in begins]
    assert run(dense(capacity, [1] * 4, lens, begins), device, how, order).page_size == page_size


@pytest.mark.parametrize("how", LAYOUTS)
def test_both_sides(how: str, device: Device) -> None:
    """Prefill with padding in q: its rows are requests of their own, without keys."""
    batch = dense(
        96, [5, 27, 0, 32, 32, 0], [0, 27, 0, 40, 0, 30], [0, 13, 0, 24, 0, 3], [0, 0, 1, 1, 2, 2]
    )
    run(batch, device, how, "HND", rows=np.array(batch.rows))
    run(batch, device, how, "NHD", Variant(causal=True, window_left=9), rows=np.array(batch.rows))
    run(batch, device, how, "NHD", Variant(), rows=np.array(batch.rows))


@pytest.mark.parametrize("begins", [[0, 0, 0], [16, 5, 40]])
def test_lengths_that_come_later(begins: list[int], device: Device) -> None:
    """A static cache that grows by a token a step: one plan, lengths on the device."""
    capacity = 64
    full = dense(capacity, [1] * 3, [capacity - begin for begin in begins], begins)
    k, v = (stored(x, "BHSD", device.put).swapaxes(1, 2) for x in (full.k, full.v))
    layout = Padded(
        None, np.array(full.lens), kv=(k, v), kv_layout="HND", kv_begin=np.array(begins)
    )
    attention = flashbsr.Attention(
        AttentionSpec(causal=True),
        TaskInfo(HEADS, KV_HEADS, DIMS[0], kv_layout="HND", q_dtype=TYPE, kv_dtype=TYPE,
                 backend=device.backend),
    )  # fmt: skip
    attention.plan(layout.bounds())
    tables, pages = device.put(layout.block_tables), layout.pages(k, v)
    for step in range(1, 25, 5):
        lens = [step, 0, step + 3]
        batch = Dense(full.q, full.k, full.v, [1] * 3, lens, begins, full.rows)
        out, lse = attention.run(
            device.put(full.q), pages, return_lse=True,
            kv_lens=device.put(np.array(lens, np.int32)), block_tables=tables,
        )  # fmt: skip
        batch.check(device.get(out), device.get(lse))


def test_halves_of_a_page(device: Device) -> None:
    """K and V side by side in the last dimension, in pages that are not neighbours in memory."""
    rng = np.random.default_rng(1)
    page_size, dim = 16, DIMS[0]
    whole = np.full((9, 3, KV_HEADS, page_size, 2 * dim), np.nan, TYPE)
    order, lens, q = [5, 2, 7, 0], [30, 25], rng.standard_normal((2, HEADS, dim)).astype(TYPE)
    rows = [rng.standard_normal((n, KV_HEADS, 2 * dim)).astype(TYPE) for n in lens]
    for b, tokens in enumerate(rows):
        for t, token in enumerate(tokens):
            whole[order[2 * b + t // page_size], 1, :, t % page_size] = token
    cache = device.put(whole)[:, 1]
    k, v = cache[..., :dim], cache[..., dim:]
    attention = flashbsr.Attention(
        AttentionSpec(),
        TaskInfo(HEADS, KV_HEADS, dim, kv_layout="HND", q_dtype=TYPE, kv_dtype=TYPE,
                 backend=device.backend),
    )  # fmt: skip
    table = np.array(order).reshape(2, 2)
    attention.plan(flashbsr.BlockTable(None, table, np.array(lens), page_size=page_size))
    out, lse = attention.run(device.put(q), (k, v), return_lse=True)
    states = [
        State.concatenate(
            [attend(q[b : b + 1], x[..., :dim], x[..., dim:], Variant(), work=work,
                    out_dtype=work and TYPE) for b, x in enumerate(rows)], HEADS, dim,
        ) for work in (None, TYPE)
    ]  # fmt: skip
    assert_attention(device.get(out), device.get(lse), *states, TYPE, "halves")


def test_tensors() -> None:
    """PyTorch's tensors, expanded ones among them: rows may be the same memory."""
    torch = framework("torch")
    batch = dense(32, [1] * 3, [20, 20, 20], [12, 12, 12])
    batch.k[:], batch.v[:] = batch.k[:1], batch.v[:1]
    k, v = (
        torch.from_numpy(np.ascontiguousarray(x[:1].swapaxes(1, 2))).expand(3, -1, -1, -1)
        for x in (batch.k, batch.v)
    )
    layout = Padded(
        None, torch.tensor(batch.lens), kv=(k, v), kv_layout="HND", kv_begin=torch.tensor([12] * 3)
    )
    attention = flashbsr.Attention(
        AttentionSpec(causal=True), TaskInfo(HEADS, KV_HEADS, DIMS[0], kv_layout="HND")
    )
    attention.plan(layout)
    pages = layout.pages(k, v)
    assert [x.data_ptr() for x in pages] == [k.data_ptr(), v.data_ptr()]
    out, lse = attention.run(torch.from_numpy(batch.q), pages, return_lse=True)
    batch.check(out.numpy(), lse.numpy())


def test_refused() -> None:
    """What a dense cache is not, by name."""
    k = np.zeros((3, 2, 8, 64), np.float16)
    first = np.array([1, 0, 0])

    def padded(lens: Any = (1, 2, 3), kv: Any = (k, k), **options: Any) -> Padded:
        return Padded(None, np.array(lens), kv=kv, kv_layout="HND", **options)

    for kind, name, call in (
        (flashbsr.IndexRangeError, "kv_lens", lambda: padded((9, 1, 1))),
        (flashbsr.IndexRangeError, "kv_lens", lambda: padded((-1, 1, 1))),
        (flashbsr.IndexRangeError, "kv_begin", lambda: padded(kv_begin=np.array([-1, 0, 0]))),
        (flashbsr.IndexRangeError, "kv_begin", lambda: padded(kv_begin=np.array([0, 0, 6]))),
        (flashbsr.IndexRangeError, "rows", lambda: padded(rows=np.array([0, 1, 3]))),
        (flashbsr.IndexRangeError, "rows", lambda: padded((1, 1, 1, 1))),
        (flashbsr.ShapeError, "kv_begin", lambda: padded(kv_begin=np.array([1]))),
        (flashbsr.ShapeError, "k", lambda: padded(kv=(k[0], k[0]))),
        (flashbsr.FlashbsrError, "kv_layout", lambda: Padded(None, first, kv=(k, k), kv_layout="")),
        (flashbsr.ShapeError, "v", lambda: padded().pages(k, k[:2])),
        (flashbsr.ShapeError, "k", lambda: padded().pages(k[:, :, :7], k)),
    ):  # fmt: skip
        with pytest.raises(kind, match=f"^{name}"):
            call()
    # Rows of K and V lie differently: they share no page table, unless a row is a page.
    other = np.zeros((3, 8, 2, 64), np.float16).swapaxes(1, 2)
    assert padded(kv=(k, other)).page_size == 8
    with pytest.raises(flashbsr.UnsupportedError, match=r"^kv_begin.*contiguous"):
        padded(kv=(k, other), kv_begin=first)
    with pytest.raises(flashbsr.UnsupportedError, match="^k: got rows 8 tokens"):
        padded(kv_begin=first).pages(other, k)


def test_arrays_without_views() -> None:
    """JAX's: rows are pages, but padding on the left asks for views."""
    jax = framework("jax")
    k = jax.numpy.zeros((3, 2, 8, 64), "float16")
    lens = np.array([8, 2, 3])
    layout = Padded(None, lens, kv=(k, k), kv_layout="HND")
    assert layout.pages(k, k) == (k, k)
    layout = Padded(None, lens, kv=(k, k), kv_layout="HND", kv_begin=np.array([0, 4, 4]))
    with pytest.raises(flashbsr.UnsupportedError, match="^k: got an array of jax"):
        layout.pages(k, k)
