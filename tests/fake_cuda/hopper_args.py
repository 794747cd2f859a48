# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What Hopper kernels are launched with, on the fake driver; test_fake_cuda.py runs it.

The driver refuses maps that the real one refuses, and launches whose maps lead to other rows than
the arrays that they are of.
"""

from __future__ import annotations

import ctypes
from typing import Any

import flashbsr
import numpy as np
import pytest
import torch
from flashbsr import _core

from fake_cuda.fake import Driver

pytestmark = [
    pytest.mark.usefixtures("fake_torch"),
    pytest.mark.skipif(
        not any(kernel["family"] == "hopper" for kernel in _core.cuda_kernels()),
        reason="this build has no Hopper kernels",
    ),
]

Q_LENS, KV_LENS = [40, 3], [70, 33]


def padded(shape: tuple[int, ...], order: tuple[int, ...], pad: int) -> torch.Tensor:
    """Random values; dims lie in memory as `order` says, each `pad` longer than it seems."""
    random = torch.Generator().manual_seed(len(shape))
    memory = torch.randn([shape[i] + pad for i in order], generator=random).half()
    view = memory.permute([order.index(i) for i in range(len(order))])
    return view[tuple(slice(n) for n in shape)]


def attend(
    backend: str, heads: tuple[int, int], dims: tuple[int, int], arrays: Any, page_size: int | None
) -> torch.Tensor:
    """Run a batch over `arrays`: q, k, v."""
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=True),
        flashbsr.TaskInfo(*heads, dims[0], head_dim_vo=dims[1], backend=backend),
    )
    qo_indptr = np.cumsum([0, *Q_LENS]).astype(np.int32)
    if page_size is None:
        attention.plan(flashbsr.Ragged(qo_indptr, np.cumsum([0, *KV_LENS]).astype(np.int32)))
    else:
        counts = [-(-n // page_size) for n in KV_LENS]
        pages = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
        indptr = np.cumsum([0, *counts]).astype(np.int32)
        lens = np.array(KV_LENS, np.int32)
        attention.plan(flashbsr.Paged(qo_indptr, indptr, pages, kv_lens=lens, page_size=page_size))
    return attention.run(arrays[0], (arrays[1], arrays[2]))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 1, 3), (1, 0, 2, 3)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (96, 40), (256, 200)])
@pytest.mark.parametrize("heads", [(8, 2), (5, 5), (6, 1)])
@pytest.mark.parametrize(
    ("page_size", "path"),
    [(16, "paged"), (8, "paged"), (24, "paged"), (6, "gather"), (7, "gather"), (1, "gather")],
)
def test_paged(
    driver: Driver, heads: Any, dims: Any, order: Any, page_size: int, path: str
) -> None:
    """Tokens, heads and pages in any order; pages of few tokens are gathered."""
    pages = sum(-(-n // page_size) for n in KV_LENS)
    q = padded((sum(Q_LENS), heads[0], dims[0]), (1, 0, 2), 8)
    k, v = (padded((pages, page_size, heads[1], d), order, 8) for d in dims)
    out = attend("fa3", heads, dims, (q, k, v), page_size)
    assert driver.kernel.startswith(("hopper_", "mixed_"))
    assert driver.path == path
    driver.drain()
    expected = attend("cpu", heads, dims, [x.numpy() for x in (q, k, v)], page_size)
    np.testing.assert_allclose(out.numpy().astype("f4"), expected.astype("f4"), atol=2e-3)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)])
def test_ragged(driver: Driver, dims: Any, order: Any) -> None:
    heads = (8, 2)
    q = padded((sum(Q_LENS), heads[0], dims[0]), order, 8)
    k, v = (padded((sum(KV_LENS), heads[1], d), order, 16) for d in dims)
    out = attend("fa3", heads, dims, (q, k, v), None)
    assert driver.path == "ragged"
    driver.drain()
    expected = attend("cpu", heads, dims, [x.numpy() for x in (q, k, v)], None)
    np.testing.assert_allclose(out.numpy().astype("f4"), expected.astype("f4"), atol=2e-3)


def test_rows_too_far_apart_to_gather(driver: Driver) -> None:
    """Places of rows are 32-bit numbers of the largest power of two that divides all strides."""
    q = padded((sum(Q_LENS), 8, 128), (0, 1, 2), 8)
    memory = np.zeros((1, 1, 2, 128), np.float16)
    far = np.lib.stride_tricks.as_strided(  # nobody reads there
        memory, (sum(KV_LENS), 1, 2, 128), ((1 << 37) + 16, 16, 256, 2)
    )
    k = torch.from_numpy(far)
    with pytest.raises(flashbsr.UnsupportedError, match=r"2\^31 x 16 bytes apart.*backend='fa2'"):
        attend("cuda", (8, 2), (128, 128), (q, k, k), 1)


@pytest.mark.parametrize(
    ("n", "path", "box"), [(64, "paged", 16), (72, "paged", 8), (88, "paged", 8), (76, "gather", 0)]
)
def test_short_last_page(driver: Driver, n: int, path: str, box: int) -> None:
    """K and V as tokens, a matrix for each head: no box goes beyond the last token."""
    heads, dim, page, rows = (8, 2), 64, 16, 40
    columns = -(-n // page)
    indptr, indices = np.array([0, 2, 2 + columns], np.int32), [0, columns - 1, *range(columns)]
    q = padded((rows, heads[0], dim), (1, 0, 2), 8)
    k, v = (padded((n, heads[1], dim), (0, 1, 2), 8) for _ in "kv")
    results = []
    for backend, arrays in (("fa3", (q, k, v)), ("cpu", [x.numpy() for x in (q, k, v)])):
        attention = flashbsr.Attention(
            flashbsr.AttentionSpec(),
            flashbsr.TaskInfo(*heads, dim, backend=backend),
        )
        blocks = np.array(indices, np.int32)
        attention.plan(flashbsr.Bsr(indptr, blocks, (rows, n), (rows, page), per_head=True))
        results.append(attention.run(arrays[0], tuple(arrays[1:])))
        if backend == "fa3":
            assert driver.path == path
            if box:
                assert driver.box == box
            driver.drain()
    np.testing.assert_allclose(results[0].numpy().astype("f4"), results[1].astype("f4"), atol=2e-3)


def test_maps_of_the_run_before(driver: Driver) -> None:
    """A map is encoded again when anything of its array is new, and only then."""
    heads, dim, page_size, pages = (8, 2), 64, 16, 8
    random = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).half()

    memory = normal(2 * sum(Q_LENS), heads[0], dim)
    q, cache = memory[: sum(Q_LENS)], normal(pages, 2, page_size, heads[1], dim)
    other_order = torch.empty(sum(Q_LENS), heads[0], dim, dtype=torch.float16)
    attentions = []
    for backend in ("fa3", "cpu"):
        attention = flashbsr.Attention(
            flashbsr.AttentionSpec(causal=True),
            flashbsr.TaskInfo(*heads, dim, backend=backend),
        )
        attention.plan(
            flashbsr.Paged(
                np.cumsum([0, *Q_LENS]).astype(np.int32),
                np.array([0, 5, 8], np.int32),
                np.arange(8, dtype=np.int32)[::-1].copy(),
                kv_lens=np.array(KV_LENS, np.int32),
                page_size=page_size,
            )
        )
        attentions.append(attention)
    longer = torch.cat([cache, cache])
    calls = [  # q, cache, out, maps that are new
        (q, cache, other_order, 4),
        (q, cache, other_order, 0),
        (memory[1 : 1 + sum(Q_LENS)], cache, other_order, 1),
        (memory[::2], cache, other_order, 1),
        (memory[::2], cache.clone(), other_order, 2),
        (memory[::2], longer[:pages], other_order, 2),
        (memory[::2], longer, other_order, 2),
        (memory[::2], longer, torch.empty_like(other_order), 1),
        (memory[::2], longer[:, [1, 0]], torch.empty_like(other_order), 3),
    ]
    for q, cache, out, new in calls:
        before = driver.calls("cuTensorMapEncodeTiled")
        out.fill_(float("nan"))
        attentions[0].run(q, cache, out=out)
        assert driver.calls("cuTensorMapEncodeTiled") == before + new
        driver.drain()
        expected = attentions[1].run(q.numpy(), cache.numpy())
        np.testing.assert_allclose(out.numpy().astype("f4"), expected.astype("f4"), atol=2e-3)


#: A map that is encoded, and what the driver refuses of it.
GOOD: dict[str, Any] = {
    "type": 6, "rank": 4, "address": 1 << 20, "extents": (64, 4, 9, 2), "strides": (128, 512, 64),
    "box": (64, 4, 8, 1), "steps": (1, 1, 1, 1), "interleave": 0, "swizzle": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"address": (1 << 20) + 8}, False),
        ({"strides": (128, 520, 64)}, False),
        ({"strides": (128, 1 << 40, 64)}, False),
        ({"extents": (64, 0, 9, 2)}, False),
        ({"extents": (64, 4, (1 << 32) + 1, 2)}, False),
        ({"box": (64, 4, 257, 1)}, False),
        ({"box": (64, 4, 256, 1)}, True),
        ({"box": (64, 4, 0, 1)}, False),
        ({"box": (72, 4, 8, 1)}, False),
        ({"box": (4, 4, 8, 1)}, False),
        ({"box": (128, 4, 8, 1), "type": 0}, True),
        ({"steps": (1, 9, 1, 1)}, False),
        ({"rank": 3}, False),
        ({"swizzle": 0}, False),
    ],
    ids=str,
)
def test_what_the_driver_refuses(driver: Driver, change: dict[str, Any], taken: bool) -> None:
    """As cuda.h documents it, of the layouts that are used here."""
    asked = {**GOOD, **change}
    memory = ctypes.create_string_buffer(192)
    at = (ctypes.addressof(memory) + 63) // 64 * 64

    def longs(values: tuple[int, ...]) -> Any:
        return (ctypes.c_uint64 * len(values))(*values)

    def ints(values: tuple[int, ...]) -> Any:
        return (ctypes.c_uint32 * len(values))(*values)

    status = driver.library.cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), asked["type"], asked["rank"], ctypes.c_void_p(asked["address"]),
        longs(asked["extents"]), longs(asked["strides"]), ints(asked["box"]), ints(asked["steps"]),
        asked["interleave"], asked["swizzle"], 2, 0,
    )  # fmt: skip
    assert (status == 0) == taken
    assert (b"TnsorMap" in memory.raw) == taken
