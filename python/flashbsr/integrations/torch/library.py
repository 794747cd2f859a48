# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The library of operators: how one is made.

``torch.library.Library`` without libtorch: a call costs 1.6 us, where ``custom_op`` costs 5 and an
operator of C++ 1.2. An operator is what a call of the public API hands to the core, with what the
call returns already made. It passes tensors as they are: an adapter's look at one takes 0.3 us, and
what it refuses the dispatcher has resolved (negated views) or sent elsewhere (other devices).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...arrays import torch as adapter
from ...errors import UnsupportedError

__all__ = ["operator"]

if not adapter._EXCHANGES:
    raise UnsupportedError("torch", torch.__version__, "2.10 or later for compiled programs")

# It stays for the life of the process: operators go with it.
_LIBRARY = torch.library.Library("flashbsr", "DEF")

F = TypeVar("F", bound=Callable[..., Any])


def _nothing(*args: Any) -> None:
    """Return what an operator does that writes into its arguments."""


def operator(
    schema: str,
    fake: Callable[..., Any] = _nothing,
    on_gpu: Callable[..., Any] | None = None,
    *,
    plans: bool = False,
) -> Callable[[F], F]:
    """Make an operator of a function whose last argument is a stream, of its own or the current.

    Parameters
    ----------
    schema : str
        Name, arguments but the stream, which of them are written, results.
    fake : callable
        Makes the results without values.
    on_gpu : callable, optional
        What runs over CUDA tensors; default: the function, with the current stream.
    plans : bool
        It plans on the host, so that no CUDA graph may hold it: inductor cuts its graphs there.
    """
    name = schema.partition("(")[0]

    def make(function: F) -> F:
        # K and V are views with strides of their own, which a compiler must not change.
        tags = [torch.Tag.needs_exact_strides]
        _LIBRARY.define(schema, tags=(*tags, *[torch.Tag.cudagraph_unsafe] * plans))
        _LIBRARY.impl(name, function, "CPU")
        _LIBRARY.impl(name, on_gpu or _on_current_stream(function), "CUDA")
        torch.library.register_fake(f"flashbsr::{name}", fake, lib=_LIBRARY)
        return function

    return make


def _on_current_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function of tensors, the first of which says where, on PyTorch's stream there."""

    def launch(x: torch.Tensor, *args: Any) -> Any:
        return function(x, *args, stream=adapter.stream(x.get_device()))

    return launch
