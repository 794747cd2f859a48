# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The classes of latent attention that vLLM sees: what they read of its metadata, and refuse.

They run with vLLM where it is installed, otherwise with the names that stand in for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from flashbsr import errors
from harness import framework

torch = framework("torch")
vllm = importlib.import_module("flashbsr.integrations.vllm")
layers = importlib.import_module("flashbsr.integrations.vllm.layer")
backends = importlib.import_module("test_vllm_backend")
world = importlib.import_module("latent_world")

pytestmark = backends.QUIET
TOPK = 24
ASKED: dict[str, Any] = {**backends.ASKED, "head_size": 576, "use_mla": True}


@pytest.fixture(scope="module")
def mla() -> Iterator[Any]:
    """The module of the classes."""
    yield from backends.beside_vllm("mla")


def builder(mla: Any, chosen: bool = False, device: int | None = None, **options: Any) -> Any:
    """One of a group of two layers, by hand on a GPU that is not there."""
    if chosen:
        options["topk_indices_buffer"] = torch.zeros(64, TOPK, dtype=torch.int32)
    kind = mla.ChosenImpl if chosen else mla.LatentImpl
    made = [SimpleNamespace(impl=world.make(kind=kind, **options)) for _ in range(2)]
    plans = mla.ChosenBuilder if chosen else mla.LatentBuilder
    found = backends.builder_of(plans, made, device)
    assert all(layer.impl.layer is layer for layer in made)
    if device is not None:
        found.steps.place.page_size = 16
    return found


def test_all_rows_of_a_step_are_absorbed(mla: Any) -> None:
    step = builder(mla).build(0, backends.metadata())
    assert (step.num_decodes, step.num_prefills) == (4, 0)
    assert step.num_decode_tokens == step.num_actual_tokens == 8
    assert step.step.rows == 7 and step.prefill is None and step.decode is step.step


def test_on_a_gpu_the_host_reads_what_it_has(mla: Any) -> None:
    on_device = backends.OnDevice
    there = {"seq_lens": on_device(4), "query_start_loc": on_device(5)}
    there |= {"block_table_tensor": on_device(4, 8), "slot_mapping": on_device(8)}
    made = builder(mla, device=0)
    made.steps.plan = lambda batch, slots, rows, stream: SimpleNamespace(  # type: ignore[misc]
        batch=batch, slot_mapping=slots, num_actual_tokens=rows, stream=stream
    )
    step = made.build(0, backends.metadata(**there)).step
    assert step.batch.bounds.tolist() == [44, 18, 9, 0] and step.stream == 5
    assert step.batch.lens is there["seq_lens"]


@pytest.mark.parametrize("device", [None, 0])
def test_rows_over_chosen_tokens_are_requests(mla: Any, device: int | None) -> None:
    """As many as the step has with its padding; bounds are those of requests, and topk."""
    made, given = builder(mla, True, device), []
    plan = made.steps.plan if device is None else lambda *_: SimpleNamespace(
        slot_mapping=None, num_actual_tokens=8
    )  # fmt: skip

    def planned(*args: Any) -> Any:
        given.append(args)
        return plan(*args)

    made.steps.plan = planned
    step = made.build(0, backends.metadata())
    batch, _, rows, stream = given[0]
    assert (rows, stream) == (8, None if device is None else 5)
    assert batch.starts.tolist() == list(range(9)) and not batch.causal
    short = 17 if device is None else 18
    assert batch.bounds.tolist() == [TOPK, short, 9, 9, 9, 9, 9, 0]
    assert step.of_rows.tolist() == [0, 1, 2, 2, 2, 2, 2, -1]
    assert (step.topk_tokens, step.block, step.prefill) == (TOPK, 16, None)
    # A captured run reads the requests of a later step where it read those of its own.
    again = made.build(0, backends.metadata(query_start_loc=torch.tensor([0, 8, 8, 8, 8])))
    assert again.of_rows.data_ptr() == step.of_rows.data_ptr()
    assert step.of_rows.tolist() == [0] * 8


def test_what_graphs_are_captured_for(mla: Any) -> None:
    given = torch.arange(5, dtype=torch.int32)
    made = builder(mla, device=0)
    made.steps.plan = lambda *args: SimpleNamespace(slot_mapping=None, num_actual_tokens=4)
    made.build_for_cudagraph_capture(backends.metadata(query_start_loc_cpu=given))
    assert made.steps.captured == [(1, True, 8, backends.capacity(32, 32, 32 * 8))]
    made = builder(mla, True, device=0)
    made.steps.plan = lambda *args: SimpleNamespace(slot_mapping=None, num_actual_tokens=4)
    made.build_for_cudagraph_capture(backends.metadata())  # a step of any sort
    assert made.steps.captured == [(1, False, 8, backends.capacity(32, 32, 32 * TOPK))]
    made.vllm_config.compilation_config.cudagraph_capture_sizes = None
    made.build_for_cudagraph_capture(backends.metadata())
    assert made.steps.captured[1] == (1, False, 8, backends.capacity(8, 8, 8 * TOPK))


def test_which_steps_a_graph_may_be_replayed_for(mla: Any) -> None:
    for kind in (mla.LatentBuilder, mla.ChosenBuilder):
        for apart, name in ((True, "UNIFORM_BATCH"), (False, "ALWAYS")):
            mode = SimpleNamespace(cudagraph_mode=backends.Mode(apart))
            config = SimpleNamespace(compilation_config=mode)
            assert kind.get_cudagraph_support(config, None).name == name


def test_heads_over_eight_bits_on_a_gpu(mla: Any) -> None:
    made = builder(mla, kv_cache_dtype="fp8_ds_mla", num_heads=96)  # the CPU has any
    config, spec = made.vllm_config, made.kv_cache_spec
    with pytest.raises(errors.UnsupportedError, match="num_heads"):
        mla.LatentBuilder(spec, ["a"], config, torch.device("cuda:0"))


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The second of two that share tokens by turns, as vLLM's configuration has them."""
    group = SimpleNamespace(world_size=2, rank_in_group=1, device_group=object())
    state = importlib.import_module("vllm.distributed.parallel_state")
    monkeypatch.setattr(state, "get_dcp_group", lambda: group)
    return SimpleNamespace(
        decode_context_parallel_size=2, cp_kv_cache_interleave_size=1, dcp_comm_backend="ag_rs"
    )


def test_rows_over_a_share_are_requests(mla: Any, two_ranks: SimpleNamespace) -> None:
    """Of all heads, and each sees what of the share is not behind it."""
    made = builder(mla)
    made.vllm_config.parallel_config = two_ranks
    made.vllm_config.scheduler_config.max_num_batched_tokens = 64
    cpu = torch.device("cpu")
    spread = mla.LatentBuilder(made.kv_cache_spec, ["a"], made.vllm_config, cpu)
    impl = made.vllm_config.compilation_config.static_forward_context["a"].impl
    assert impl.kind.num_qo_heads == 2 * impl.num_heads and impl.supports_dcp
    metadata = backends.metadata()
    step = spread.build(0, metadata)
    lens, starts = metadata.seq_lens, metadata.query_start_loc_cpu
    seen = [
        (lens[i] - (starts[i + 1] - 1 - row)) // 2
        for i in range(4)
        for row in range(starts[i], starts[i + 1])
    ]
    assert step.seq_lens.tolist() == [*map(int, seen), 0]  # and one row that pads the step
    assert step.gives_lse and step.num_decodes == step.num_decode_tokens == 8
    assert step.query_start_loc.tolist() == list(range(9))


def test_what_is_not_there_over_a_share(
    mla: Any, two_ranks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chosen, name in ((True, "decode_context_parallel_size"), (False, "FLASHBSR_VLLM_MERGE")):
        made = builder(mla, chosen)
        made.vllm_config.parallel_config = two_ranks
        made.vllm_config.scheduler_config.max_num_batched_tokens = 64
        plans = mla.ChosenBuilder if chosen else mla.LatentBuilder
        with pytest.raises(errors.UnsupportedError, match=name):
            plans(made.kv_cache_spec, ["a"], made.vllm_config, torch.device("cpu"))
        monkeypatch.setenv("FLASHBSR_VLLM_MERGE", "peers")


def capability(number: int) -> Any:
    return SimpleNamespace(to_int=lambda: number, major=number // 10, minor=number % 10)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": False}, "non-MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"head_size": 320}, "head_size"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8_ds_mla", "device_capability": capability(89)}, "9.0"),
        ({"kv_cache_dtype": "fp8", "device_capability": capability(100)}, "9.0"),
        ({"device_capability": capability(75), "dtype": torch.float16}, "8.0"),
        ({"dtype": torch.float32}, "CPU only"),
        ({"dtype": torch.float16, "kv_cache_dtype": "bfloat16"}, "needs bfloat16"),
        ({"attn_type": "encoder"}, "attention type"),
    ],
)
def test_configurations_that_are_refused(mla: Any, changes: dict[str, Any], reason: str) -> None:
    """Each with its reason, and only that."""
    assert mla.LatentBackend.validate_configuration(**ASKED) == []
    (said,) = mla.LatentBackend.validate_configuration(**{**ASKED, **changes})
    assert reason in said


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_ds_mla", "dtype": torch.float16},
        {"device_capability": capability(80), "block_size": 64},
        {"device_capability": capability(120), "kv_cache_dtype": "bfloat16"},
    ],
)
def test_configurations_that_are_taken(mla: Any, changes: dict[str, Any]) -> None:
    assert mla.LatentBackend.validate_configuration(**{**ASKED, **changes}) == []
    sparse = {**ASKED, **changes, "use_sparse": True}
    assert mla.ChosenBackend.validate_configuration(**sparse) == []
    assert mla.ChosenBackend.validate_configuration(**{**ASKED, **changes}) != []


def test_the_cache_that_is_asked_for(mla: Any) -> None:
    for backend in (mla.LatentBackend, mla.ChosenBackend):
        assert backend.get_kv_cache_shape(7, 16, 1, 576) == (7, 16, 576)
        assert backend.get_kv_cache_shape(7, 16, 1, 576, "fp8") == (7, 16, 576)
        assert backend.get_kv_cache_shape(7, 16, 1, 576, "fp8_ds_mla") == (7, 16, 656)
        for layered in (False, True):
            assert sorted(backend.get_kv_cache_stride_order(layered)) == list(range(3 + layered))
        assert [m.base for m in backend.get_supported_kernel_block_sizes()] == [16]
        assert [backend.get_preferred_block_size(n) for n in (16, 128)] == [64, 128]
        assert backend.get_name() == "CUSTOM"
        impl = backend.get_impl_cls()
        assert impl.is_sparse == backend.is_sparse()
        assert impl.supports_dcp != impl.is_sparse
        assert not (impl.supports_pcp or impl.supports_quant_query_input)
        assert backend.get_builder_cls().__name__.replace("Builder", "Impl") == impl.__name__


def test_one_name_for_models_of_all_kinds(mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM gets by the path that is registered goes by the model that it is making."""
    module, _, name = vllm.BACKEND.rpartition(".")
    current = importlib.import_module(module)
    config = SimpleNamespace(model_config=None)
    monkeypatch.setattr(current, "get_current_vllm_config_or_none", lambda: config)
    plain = getattr(current, name)
    assert plain is current.GENERATION and not plain.is_mla()
    config.model_config = SimpleNamespace(use_mla=False, hf_text_config=SimpleNamespace())
    assert getattr(current, name) is plain
    config.model_config.use_mla = True
    assert getattr(current, name) is mla.LatentBackend
    config.model_config.hf_text_config.index_topk = 2048
    assert getattr(current, name) is mla.ChosenBackend
    monkeypatch.setattr(current, "get_current_vllm_config_or_none", lambda: None)
    assert getattr(current, name) is plain
    with pytest.raises(AttributeError, match="Front"):
        current.Front  # noqa: B018
    for path, kind in ((vllm.LATENT_BACKEND, "Latent"), (vllm.CHOSEN_BACKEND, "Chosen")):
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name) is getattr(mla, f"{kind}Backend")
