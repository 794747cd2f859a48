# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What the ported programs share: a paged batch in float16 tensors, and exact answers."""

from __future__ import annotations

from typing import Any

import flashbsr.flashinfer as flashinfer
import numpy as np
import reference
from harness import Device, framework
from reference import State, Variant

__all__ = [
    "DIM",
    "HEADS",
    "KV_HEADS",
    "LENS",
    "PAGE",
    "PLAIN",
    "Q_LENS",
    "SIZES",
    "Batch",
    "decode",
    "near",
    "place",
    "prefill",
    "read",
    "workspace",
]  # fmt: skip

torch = framework("torch")

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
PLAIN = Variant()


_places: list[Device] = []  # where the running test's arrays are


def place(device: Device) -> str:
    """The device as PyTorch's programs name it; the fake driver's memory is the host's."""
    _places[:] = [device]
    return "cuda" if device.is_cuda and torch.cuda.is_available() else "cpu"


def read(x: Any) -> np.ndarray:
    """A result on the host, when it is there, in float64."""
    if _places[0].is_cuda:
        return np.asarray(_places[0].get(x), np.float64)
    return x.double().numpy()


class Batch:
    """Requests with KV on permuted pages of one cache, as FlashInfer's programs make it."""

    def __init__(
        self, where: str, kv_lens: Any, q_lens: Any = None, page: int = PAGE, layout: str = "NHD",
        dtype: Any = torch.float16, seed: int = 0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.kv_lens, self.q_lens = list(kv_lens), list(q_lens or [1] * len(kv_lens))
        self.where, self.page, self.layout = where, page, layout
        counts = [-(-n // page) for n in self.kv_lens]
        total = sum(counts) + 2
        cache = rng.standard_normal((total, 2, page, KV_HEADS, DIM))
        q = rng.standard_normal((sum(self.q_lens), HEADS, DIM))
        order = rng.permutation(total)[: sum(counts)]
        self.cache = torch.tensor(cache, dtype=dtype, device=where)
        self.q = torch.tensor(q, dtype=dtype, device=where)
        ends = np.cumsum([0, *counts])
        exact_cache, self.exact_q = (x.double().cpu().numpy() for x in (self.cache, self.q))
        self.pages = [order[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        self.exact_kv = [
            tuple(exact_cache[own, half].reshape(-1, KV_HEADS, DIM)[:n] for half in (0, 1))
            for own, n in zip(self.pages, self.kv_lens, strict=True)
        ]
        if layout == "HND":
            self.cache = self.cache.transpose(2, 3).contiguous()
        self.qo_indptr = self.ints(np.cumsum([0, *self.q_lens]))
        self.indptr, self.indices = self.ints(ends), self.ints(order)
        self.last = self.ints([(n - 1) % page + 1 for n in self.kv_lens])
        self.lens = self.ints(self.kv_lens)

    def ints(self, values: Any, dtype: Any = torch.int32) -> Any:
        return torch.tensor(np.asarray(values), dtype=dtype, device=self.where)

    @property
    def table(self) -> tuple[Any, Any, Any]:
        return self.indptr, self.indices, self.last

    @property
    def blocks(self) -> Any:
        """Dense block table."""
        width = max(len(own) for own in self.pages)
        return self.ints([[*own, *[0] * (width - len(own))] for own in self.pages])

    def exact(self, variant: Variant = PLAIN, masks: Any = None, **options: Any) -> State:
        states, row = [], 0
        for b, (count, (k, v)) in enumerate(zip(self.q_lens, self.exact_kv, strict=True)):
            q = self.exact_q[row : row + count]
            mask = None if masks is None else masks[b]
            states.append(reference.attend(q, k, v, variant, mask=mask, **options))
            row += count
        return State.concatenate(states, HEADS, DIM)


def near(found: Any, exact: State, lse: Any = None, atol: float = 4e-3) -> None:
    """An output in float16, and an LSE in base 2, are those of the exact state."""
    out = read(found)
    np.testing.assert_allclose(out, exact.out.reshape(out.shape), atol=atol, rtol=4e-3)
    if lse is not None:
        assert lse.dtype == torch.float32
        expected = exact.lse.reshape(tuple(lse.shape)) / np.log(2)
        np.testing.assert_allclose(read(lse), expected, atol=4e-3, rtol=1e-3)


LENS, Q_LENS = (1, 130, 40, 64), (1, 30, 7, 3)
SIZES = HEADS, KV_HEADS, DIM, PAGE


def workspace(where: str, megabytes: int = 16, dtype: Any = torch.uint8) -> Any:
    size = megabytes << 20
    return torch.empty(
        size // torch.empty(0, dtype=dtype).element_size(), dtype=dtype, device=where
    )


def decode(where: str, batch: Batch, **options: Any) -> Any:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(where), "NHD", use_tensor_cores=True
    )
    wrapper.plan(*batch.table, *SIZES, **options)
    return wrapper


def prefill(where: str, batch: Batch, **options: Any) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(where), batch.layout)
    wrapper.plan(batch.qo_indptr, *batch.table, *SIZES, **options)
    return wrapper
