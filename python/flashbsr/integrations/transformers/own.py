# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Models that do not ask transformers for their attention, whatever implementation is set.

They add masks to their logits: spans as numbers, and booleans as 0 and 1, which masks nothing.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from ...errors import UnsupportedError

__all__ = ["refuse_own_attention"]

# Those of whose attentions some ask, and some add masks.
_PARTLY = ("bigbird_pegasus", "gemma4_audio", "git", "informer")
# Its layers for images get no mask, and say that they are causal, which `eager` does not read.
_UNTRUE = "bridgetower"
_asks: dict[type, bool] = {}


def refuse_own_attention(config: Any) -> None:
    """Raise for the config of a model that would add our masks to its logits, or misleads us.

    Raises
    ------
    UnsupportedError
        ``from_pretrained(attn_implementation=)`` takes every registered name for such models.
    """
    kind = type(config)
    if getattr(config, "model_type", None) == _UNTRUE:
        raise UnsupportedError(
            "attn_implementation",
            "'fbsr'",
            f"'eager' for {_UNTRUE}, whose layers for images say that they are causal",
        )
    asks = _asks.get(kind)
    if asks is None:
        asks = getattr(config, "model_type", None) not in _PARTLY
        found = _modules(kind)
        asks = asks and not (found and all(_has_its_own(x) for x in found))
        if found:  # else they are elsewhere, or not loaded yet
            _asks[kind] = asks
    if not asks:
        raise UnsupportedError(
            "attn_implementation",
            "'fbsr'",
            f"'eager' for {config.model_type}, which has an attention of its own (for a part of a "
            "model: a dict of sub-configs)",
        )


def _modules(kind: type) -> list[ModuleType]:
    """List modules of models that a config of transformers is of: loaded, for a model runs."""
    package, _, name = kind.__module__.rpartition(".")
    if not name.startswith("configuration_"):
        return []
    prefix = f"{package}.modeling_"
    every = [module for name, module in list(sys.modules.items()) if name.startswith(prefix)]
    return [module for module in every if _is_of(module, kind)] or every


def _classes(module: ModuleType, base: type) -> list[Any]:
    """List classes that a module defines."""
    found = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, base)]
    return [x for x in found if x.__module__ == module.__name__]


def _is_of(module: ModuleType, kind: type) -> bool:
    return any(x.config_class is kind for x in _classes(module, PreTrainedModel))


def _has_its_own(module: ModuleType) -> bool:
    """Tell whether a module has layers of attention, and does not ask for what they compute."""
    if any(isinstance(x, AttentionInterface) for x in vars(module).values()):
        return False
    layers = [x for x in _classes(module, torch.nn.Module) if "Attention" in x.__name__]
    return any("forward" in vars(x) for x in layers)  # else it is another module's, which may ask
