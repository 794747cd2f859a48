# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's tensors may be: views, with a gradient, without memory."""

from __future__ import annotations

from collections.abc import Callable

import cases
import flashbsr
import numpy as np
import pytest
from cases import build
from harness import attention_for
from kinds import TORCH, all_of, by_dtypes, torch


@by_dtypes
def test_torch_without_the_exchange_api(
    dtypes: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch before 2.10 hands over capsules: the same bits."""
    from flashbsr.arrays import torch as adapter

    problem = build(cases.PREFILL.but("torch", dtypes=dtypes, layout="paged"))
    attention = attention_for(problem)
    problem.plan(attention)
    q, kv = all_of(TORCH, problem)
    results = []
    for exchanges in (adapter._EXCHANGES, False):
        monkeypatch.setattr(adapter, "_EXCHANGES", exchanges)
        assert (adapter.export(q) is q) == exchanges
        results.append([TORCH.get(x) for x in attention.run(q, kv, return_lse=True)])
    for one, other in zip(*results, strict=True):
        assert one.tobytes() == other.tobytes()


def test_torch_packed_qkv_slices() -> None:
    """q, k, v as views of one projection's output, no copy in between."""
    tokens, heads, dim = 50, 4, 64
    qkv = torch.randn(tokens, 3 * heads * dim, generator=torch.Generator().manual_seed(0))
    q, k, v = qkv.view(tokens, 3, heads, dim).unbind(1)
    assert not q.is_contiguous()
    out, lse = flashbsr.attention(q[None], k[None], v[None], causal=True, return_lse=True)
    out, lse = out[0], lse[0]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1).double() for x in (q, k, v)), is_causal=True
    )
    torch.testing.assert_close(out.double(), expected.transpose(0, 1), rtol=1e-5, atol=1e-5)
    assert lse.shape == (tokens, heads)


def test_torch_gradients() -> None:
    """Tensors that require a gradient are read; they cannot be written."""
    x = torch.ones(3, 2, 8, requires_grad=True)
    y = x * 2  # has a history
    parameter = torch.nn.Parameter(torch.ones(1, 3, 2, 8))
    out = flashbsr.attention(y[None], x[None], parameter)
    assert out.requires_grad  # and raises when one is asked for, below
    assert (out == 1).all()
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), flashbsr.TaskInfo(2, 2, 8))
    attention.plan(flashbsr.Ragged(np.array([0, 3]), np.array([0, 3])))
    with pytest.raises(TypeError, match="out.*gradient"):
        attention.run(y, (x, x), out=torch.zeros(3, 2, 8, requires_grad=True))


def test_torch_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.randn(1, 3, 2, 8)
        out = flashbsr.attention(x, x, x)
    assert torch.isfinite(out).all()
    x = torch.ones(1, 3, 2, 8)
    assert flashbsr.attention(x, x, x).equal(x)


def fake_tensor() -> torch.Tensor:
    """What torch.compile traces with: a shape on a device, and a null pointer."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(1, 3, 2, 8)


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (lambda: torch.ones(1, 3, 2, 8, device="meta"), flashbsr.errors.DeviceError),
        (lambda: torch._neg_view(torch.ones(1, 3, 2, 8)), flashbsr.errors.DTypeError),
        (
            lambda: torch.ones(1, 3, 2, 8, dtype=torch.complex64).conj().imag,
            flashbsr.errors.DTypeError,
        ),
        (lambda: torch.ones(1, 3, 2, 8).to_mkldnn(), flashbsr.errors.DTypeError),
        (lambda: torch.ones(1, 3, 2, 8).to_sparse(), flashbsr.errors.DTypeError),
        (lambda: torch.ones(1, 3, 2, 8, dtype=torch.complex64), flashbsr.errors.DTypeError),
        (lambda: torch.ones(1, 3, 2, 8, dtype=torch.float64), flashbsr.errors.DTypeError),
    ],
    ids=[
        "meta",
        "negative bit",
        "negative imag",
        "opaque",
        "sparse",
        "complex",
        "float64",
    ],
)
def test_torch_tensors_without_usable_memory(
    tensor: Callable[[], torch.Tensor], error: type
) -> None:
    x = torch.ones(1, 3, 2, 8)
    for args, name in (((tensor(), x, x), "q"), ((x, tensor(), x), "k"), ((x, x, tensor()), "v")):
        with pytest.raises(error, match=rf"^{name}\b"):
            flashbsr.attention(*args)


def test_torch_tensors_without_values() -> None:
    """Shapes only, as compilers have them: all of them make a result of that kind, some raise."""
    x = torch.ones(1, 3, 2, 8)
    for args, name in (((x, fake_tensor(), x), "k"), ((x, x, fake_tensor()), "v")):
        with pytest.raises(flashbsr.errors.DeviceError, match=rf"^{name}\b.*without values"):
            flashbsr.attention(*args)
    fake = fake_tensor()
    with fake.fake_mode:
        out, lse = flashbsr.attention(fake, fake, fake, return_lse=True)
    assert type(out) is type(lse) is type(fake)
    assert (out.shape, lse.shape, lse.dtype) == ((1, 3, 2, 8), (1, 3, 2), torch.float32)


def test_a_gradient_raises_when_it_is_asked_for() -> None:
    """A tensor that requires one computes forward; the way back says that there is none."""
    q, k, v = (torch.randn(n, h, 64, requires_grad=True) for n, h in ((3, 4), (5, 2), (5, 2)))
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), flashbsr.TaskInfo(4, 2, 64))
    attention.plan(flashbsr.Ragged(np.array([0, 3]), np.array([0, 5])))
    plain = attention.run(q.detach(), (k.detach(), v.detach()))
    for arrays in ((q, k.detach(), v.detach()), (q.detach(), k.detach(), v)):
        out, lse = attention.run(arrays[0], arrays[1:], return_lse=True)
        torch.testing.assert_close(out.detach(), plain)
        for result in (out, lse):
            with pytest.raises(flashbsr.UnsupportedError, match=r"^backward: .*torch\.no_grad"):
                (result * 2).sum().backward(retain_graph=True)
    with torch.no_grad():
        assert not attention.run(q, (k, v)).requires_grad
    v_a, s_a = torch.randn(2, 3, 4, 64, requires_grad=True), torch.zeros(2, 3, 4)
    merged, _ = flashbsr.merge_state(v_a[0], s_a[0], v_a[1], s_a[1])
    with pytest.raises(flashbsr.UnsupportedError, match=r"^backward"):
        merged.sum().backward()
