# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The names under which transformers finds the functions of this package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from .compiled import in_programs
from .dense import mask
from .paged import keep_for_attention, paged_attention, without_graphs

__all__ = ["NAME", "continuous", "register"]

NAME = "fbsr"
"""For ``attn_implementation``. transformers takes any name with "flash" for FlashAttention."""

# What continuous batching lets in: up to 5.19 at least names with a prefix, later its own and
# those with "flash", which are then never looked up.
_PAGED, _LATER = f"paged|{NAME}", f"flash_{NAME}"


def register() -> str:
    """Tell transformers about flashbsr; a second call changes nothing.

    Returns
    -------
    str
        `NAME`, for ``model.set_attn_implementation`` or ``from_pretrained(attn_implementation=)``.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import flashbsr.integrations.transformers as door
    >>> config = LlamaConfig(
    ...     vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
    ...     num_attention_heads=4, num_key_value_heads=2,
    ... )
    >>> model = LlamaForCausalLM(config).eval()
    >>> model.set_attn_implementation(door.register())
    >>> model.config._attn_implementation
    'fbsr'
    """
    # The others work on the host, where compilers stop.
    AttentionInterface.register(NAME, in_programs())
    AttentionMaskInterface.register(NAME, torch.compiler.disable(mask))
    for name in (_PAGED, _LATER):
        AttentionInterface.register(name, torch.compiler.disable(paged_attention))
        AttentionMaskInterface.register(name, _no_mask)
    return NAME


@contextlib.contextmanager
def continuous(model: Any) -> Iterator[Any]:
    """Let ``model.generate_batch`` run on flashbsr, over its paged cache.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Any whose continuous batching works with ``sdpa``. Its attention is as before at the end.

    Yields
    ------
    transformers.PreTrainedModel
        The model.
    """
    register()
    keep_for_attention((_PAGED, _LATER))
    without_graphs((_PAGED, _LATER))
    name = _PAGED if "paged|sdpa" in AttentionInterface._global_mapping else _LATER
    # What set_attn_implementation() does after it has looked names with "flash" up on the hub.
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(x): x for x in found if hasattr(x, "_attn_implementation_internal")}
    held = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        for config, _ in held:
            config._attn_implementation_internal = name
        yield model
    finally:
        for config, before in held:
            config._attn_implementation_internal = before


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Pages say who meets whom."""
