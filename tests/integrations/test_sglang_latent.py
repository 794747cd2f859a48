# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""SGLang's backend over a cache of latents (MLA), compared with float64; as test_sglang.py."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
from flashbsr import errors
from harness import framework

torch = framework("torch")
stand_in = importlib.import_module("stand_in_sglang")
plain = importlib.import_module("test_sglang")
door = importlib.import_module("flashbsr.integrations.sglang")

pytestmark = pytest.mark.filterwarnings("ignore")
HEADS, LATENT, ROTATED = plain.HEADS, 512, 64


@pytest.fixture(scope="module", autouse=True)
def sglang() -> Iterator[None]:
    """SGLang, or what stands in for it."""
    stand_in.install()
    door.register()
    if stand_in.INSTALLED:  # its pool asks whether the cache is spread over ranks
        with plain.part("runtime_context").get_parallel().override(dcp_enabled=False):
            yield
    else:
        yield
    stand_in.uninstall()


class Serving(plain.Serving):  # type: ignore[misc]
    """Two layers with absorbed queries; each has one over expanded keys beside it."""

    def make(self, first: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        radix = plain.part("layers.radix_attention").RadixAttention
        pool = plain.part("mem_cache.memory_pool").MLATokenToKVPool
        self.options = [{}, {}]
        absorbed = {"v_head_dim": LATENT, **first}
        self.layers = [
            radix(HEADS, LATENT + ROTATED, 0.1, 1, layer_id=i, **absorbed) for i in range(2)
        ]
        self.expanded = [radix(HEADS, 192, 0.1, HEADS, layer_id=i, v_head_dim=128)
                         for i in range(2)]  # fmt: skip
        self.pool = pool(
            plain.SLOTS, self.page, self.kv_type, LATENT, ROTATED, 2, "cpu",
            enable_memory_saver=False,
        )  # fmt: skip
        return [*self.layers, *self.expanded], self.pool.kv_buffer

    def rows(self, n: int, heads: int, dim: int = LATENT + ROTATED) -> Any:
        return super().rows(n, heads, dim)

    def keys(self, n: int) -> tuple[Any, Any]:
        k = self.rows(n, 1)
        return k, k[..., :LATENT]


def test_latents_of_eight_bits() -> None:
    """SGLang divides latents by nothing."""
    serving = Serving(16, "bfloat16", kv="float8_e4m3fn")
    plain.mixed_steps(serving)
    serving.step("DECODE", [1, 2, 0], [1, 1, 1])


def test_latents_in_e5m2_are_refused() -> None:
    with pytest.raises(errors.UnsupportedError, match="latents in float8_e5m2"):
        Serving(kv="float8_e5m2")


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_of_a_server(dtype: str, page: int) -> None:
    serving = Serving(page, dtype)
    plain.mixed_steps(serving)
    serving.step("DECODE", [1, 2, 0], [1, 1, 1])
    serving.step("TARGET_VERIFY", [1, 0], [4, 4], custom_mask=None, topk=1)


def test_captured_steps_follow_later_plans() -> None:
    serving = Serving()
    serving.add()
    serving.add()
    serving.step("EXTEND", [0, 1], [30, 5])
    serving.backend.init_cuda_graph_state(2, 2)
    for turn in range(2):
        fb = serving.batch("DECODE", [0, 1], [1, 1])
        serving.backend.init_forward_metadata_out_graph(fb, in_capture=turn == 0)
        assert serving.backend.forward_metadata[False].captured
        serving.run(fb, [0, 1], [1, 1])


def test_queries_of_all_steps_are_absorbed() -> None:
    """SGLang is told so; a layer over expanded keys says what is wrong."""
    serving = Serving()
    registry = plain.part("models.deepseek_common.attention_backend_handler")
    method = registry.AttentionBackendRegistry.get_handler(door.NAME)(None, None)
    assert method is registry.AttnForwardMethod.MLA
    serving.add()
    fb = serving.batch("EXTEND", [0], [3])
    serving.backend.init_forward_metadata(fb)
    q = torch.zeros(3, HEADS * 192)
    with pytest.raises(errors.UnsupportedError, match="qk_head_dim"):
        serving.backend.forward_extend(q, None, None, serving.expanded[0], fb)


@pytest.mark.parametrize(
    "options", [{"sliding_window_size": 9}, {"logit_cap": 2.0}, {"use_irope": True}]
)
def test_layers_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(errors.UnsupportedError, match=next(iter(options))):
        Serving(first=options)
