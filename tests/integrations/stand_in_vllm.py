# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Where vLLM is not installed: the names of it that the backend imports, and what they promise."""

from __future__ import annotations

import enum
import importlib.util
import sys
from types import ModuleType
from typing import Any

INSTALLED = importlib.util.find_spec("vllm") is not None


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    NEVER = 0


class AttentionBackend:
    """Of the generation that names the cache's shape; reasons in the order of vLLM."""

    supported_dtypes: tuple[Any, ...] = ()
    supported_kv_cache_dtypes: tuple[str, ...] = ()

    get_kv_cache_shape = None

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def is_sparse(cls) -> bool:
        return False

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in cls.get_supported_head_sizes()  # type: ignore[attr-defined]

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == "decoder"

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:
        named = {
            "head_size": cls.supports_head_size(asked["head_size"]),
            "dtype": asked["dtype"] in cls.supported_dtypes,
            "kv_cache_dtype": asked["kv_cache_dtype"] in cls.supported_kv_cache_dtypes,
            ("MLA" if asked["use_mla"] else "non-MLA"): asked["use_mla"] == cls.is_mla(),
            "sparse": asked["use_sparse"] == cls.is_sparse(),
            "partial multimodal token full attention": not asked["use_mm_prefix"],
            "per-head quant scales": not asked["use_per_head_quant_scales"],
            "attention type": cls.supports_attn_type(asked["attn_type"]),
        }
        reasons = [f"{name} not supported" for name, good in named.items() if not good]
        names = (
            "head_size dtype kv_cache_dtype block_size use_mla has_sink use_sparse use_mm_prefix"
        )
        together = [asked[n] for n in (*names.split(), "device_capability")]
        found = cls.supports_combination(*together)  # type: ignore[attr-defined]
        return reasons + ([found] if found else [])


class MLACommonBackend(AttentionBackend):
    @classmethod
    def is_mla(cls) -> bool:
        return True


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device


class AttentionImpl:
    pass


class MLAAttentionImpl:
    pass


def get_current_vllm_config_or_none() -> Any:
    return None


def get_dcp_group() -> Any:
    raise AssertionError("decode context model parallel group is not initialized")


class EncoderOnlyAttentionSpec:
    pass


kFp8StaticTensorSym = "float8, one scale of the weights"  # noqa: N816


class AttentionBackendEnum(enum.Enum):
    CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    FLASHMLA = "vllm.v1.attention.backends.mla.flashmla.FlashMLABackend"
    FLASHINFER_MLA_SPARSE_SM120 = (
        "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120.FlashInferMLASparseSM120Backend"
    )
    FLASHMLA_SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
    CUSTOM = None


OVERRIDES: dict[Any, str] = {}


def register_backend(backend: Any, path: str) -> None:
    OVERRIDES[backend] = path


def install() -> None:
    """Put the names where vLLM has them, unless it is there itself."""
    if INSTALLED or "vllm" in sys.modules:
        return
    here = globals()
    content = {
        "vllm": [],
        "vllm.config": ["get_current_vllm_config_or_none"],
        "vllm.envs": [],
        "vllm.distributed": [],
        "vllm.distributed.parallel_state": ["get_dcp_group"],
        "vllm.model_executor": [],
        "vllm.model_executor.layers": [],
        "vllm.model_executor.layers.attention": [],
        "vllm.model_executor.layers.attention.mla_attention": ["MLACommonBackend"],
        "vllm.model_executor.layers.quantization": [],
        "vllm.model_executor.layers.quantization.utils": [],
        "vllm.model_executor.layers.quantization.utils.quant_utils": ["kFp8StaticTensorSym"],
        "vllm.v1": [],
        "vllm.v1.attention": [],
        "vllm.v1.attention.backend": [
            "AttentionBackend", "AttentionCGSupport", "AttentionImpl", "AttentionMetadataBuilder",
            "MLAAttentionImpl", "MultipleOf",
        ],
        "vllm.v1.attention.backends": [],
        "vllm.v1.attention.backends.registry": ["AttentionBackendEnum", "register_backend"],
        "vllm.v1.kv_cache_interface": ["EncoderOnlyAttentionSpec"],
    }  # fmt: skip
    for name, members in content.items():
        module = sys.modules[name] = ModuleType(name)
        for member in members:
            setattr(module, member, here[member])
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    sys.modules["vllm.envs"].VLLM_BATCH_INVARIANT = False  # type: ignore[attr-defined]


def uninstall() -> None:
    """Leave no trace for the tests of other modules."""
    if not INSTALLED:
        for name in [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]:
            del sys.modules[name]
        for name in ("backend", "current", "mla", "v0_26", "v0_32"):
            sys.modules.pop(f"flashbsr.integrations.vllm.{name}", None)
