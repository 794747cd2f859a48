# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The three classes that vLLM sees: what they read of its metadata, what they say and refuse.

They run with vLLM where it is installed, otherwise with the names that stand in for it.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import stand_in_vllm
from flashbsr import errors
from harness import framework

torch = framework("torch")
vllm = importlib.import_module("flashbsr.integrations.vllm")
layers = importlib.import_module("flashbsr.integrations.vllm.layer")

QUIET = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning",
                                   "ignore::UserWarning", "ignore::ResourceWarning",
                                   "ignore::SyntaxWarning")  # fmt: skip
pytestmark = QUIET

CAPABILITY = SimpleNamespace(to_int=lambda: 90, major=9, minor=0)
ASKED: dict[str, Any] = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": None,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": CAPABILITY,
    "attn_type": "decoder",
}


def beside_vllm(name: str) -> Iterator[Any]:
    """Import a module of the integration, with vLLM or what stands in for it."""
    stand_in_vllm.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield importlib.import_module(f"flashbsr.integrations.vllm.{name}")
    stand_in_vllm.uninstall()


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    """The module of the classes."""
    yield from beside_vllm("backend")


@pytest.fixture(scope="module")
def chosen(backend: Any) -> Any:
    """The backend of the vLLM that is there."""
    return importlib.import_module("flashbsr.integrations.vllm.current").Backend


class OnDevice:
    """An array that the host must not read."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __getitem__(self, _: Any) -> OnDevice:
        return self

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the host waits for the GPU")

    cpu = numpy = tolist = __array__


def metadata(**changes: Any) -> SimpleNamespace:
    """Three requests and one that pads, of which two decode."""
    starts = torch.tensor([0, 1, 2, 7, 7], dtype=torch.int32)
    fields: dict[str, Any] = {
        "num_reqs": 4,
        "num_actual_tokens": 8,
        "max_seq_len": 100,
        "max_query_len": 5,
        "query_start_loc_cpu": starts,
        "query_start_loc": starts,
        "seq_lens": torch.tensor([40, 17, 9, 55], dtype=torch.int32),
        "seq_lens_cpu_upper_bound": torch.tensor([44, 18, 9, 55], dtype=torch.int32),
        "block_table_tensor": torch.zeros(4, 8, dtype=torch.int32),
        "slot_mapping": torch.zeros(8, dtype=torch.int64),
        "causal": True,
    }
    return SimpleNamespace(**{**fields, **changes})


class Mode:
    """vLLM's CUDAGraphMode: FULL, or decode steps apart."""

    def __init__(self, apart: bool) -> None:
        self.separate_routine = lambda: apart


def builder_of(
    plans: Any, made: list[Any], device: int | None = None, model: Any = (), **parallel: Any
) -> Any:
    """A builder of class `plans` for two layers, by hand on a GPU that is not there."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, rswa_window=None, **dict(model)),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, **parallel),
        scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=256),
        compilation_config=SimpleNamespace(
            static_forward_context=dict(zip("ab", made, strict=True)),
            cudagraph_mode=Mode(apart=True),
            cudagraph_capture_sizes=[8, 32],
        ),
    )
    found = plans(SimpleNamespace(block_size=16), ["a", "b"], config, torch.device("cpu"))
    if device is not None:
        found.steps = Recorder(found.steps.kinds, device)
        found._stream = lambda: 5
    return found


def builder(backend: Any, device: int | None = None, **options: Any) -> Any:
    """One of a group of two layers."""
    made = [SimpleNamespace(impl=layers.Layer(4, 64, 0.1, 2, **options)) for _ in range(2)]
    return builder_of(backend.FlashbsrBuilder, made, device)


class Recorder:
    """Steps of a GPU: what is asked for."""

    def __init__(self, kinds: Any, device: int) -> None:
        self.kinds = kinds
        self.place = SimpleNamespace(device=device, fixed_split_size=None, ranks=None)
        self.drafts = self.cascades = False
        self.captured: list[Any] = []

    def captures(self, *run: Any, **capacity: int) -> None:
        self.captured.append((*run, capacity))

    def plan(self, *args: Any) -> Any:
        return args


def test_layers_of_a_group_share_a_plan(backend: Any) -> None:
    step = builder(backend).build(0, metadata())
    assert len(step.slots) == 1
    assert (step.rows, step.num_actual_tokens, step.captured) == (7, 8, False)


def test_on_the_cpu_lengths_are_read_where_they_are(backend: Any) -> None:
    """Not the bounds; a request without rows has no length, whatever an earlier step left."""
    found = builder(backend).batch(metadata(seq_lens_cpu_upper_bound=None))
    assert found.bounds.tolist() == [40, 17, 9, 0]
    assert found.starts.tolist() == [0, 1, 2, 7, 7]


def test_on_a_gpu_the_host_reads_what_it_has(backend: Any) -> None:
    there = {"seq_lens": OnDevice(4), "query_start_loc": OnDevice(5)}
    there |= {"block_table_tensor": OnDevice(4, 8), "slot_mapping": OnDevice(8)}
    made = builder(backend, device=0)
    found = made.batch(metadata(**there))
    assert found.bounds.tolist() == [44, 18, 9, 0]
    assert found.lens is there["seq_lens"] and found.query_starts is there["query_start_loc"]
    unknown = made.batch(metadata(**there, seq_lens_cpu_upper_bound=None))
    assert unknown.bounds.tolist() == [100, 100, 100, 0]
    batch, _, tokens, stream = made.build(0, metadata(**there))
    assert (batch.tables, tokens, stream) == (there["block_table_tensor"], 8, 5)


def test_what_graphs_read_by_themselves(backend: Any) -> None:
    """Arrays that lie where they lay at the capture: not those of halves of a batch."""
    made = [SimpleNamespace(impl=layers.Layer(4, 64, 0.1, 2)) for _ in range(2)]
    assert builder_of(backend.FlashbsrBuilder, made).steps.fixed
    assert not builder_of(backend.FlashbsrBuilder, made, use_ubatching=True).steps.fixed


def test_who_may_tell_of_a_prefix(backend: Any) -> None:
    """Where cascade attention is not switched off; and where there is the kernel: not here."""
    made = [SimpleNamespace(impl=layers.Layer(4, 64, 0.1, 2)) for _ in range(2)]
    steps = importlib.import_module("flashbsr.integrations.vllm.steps")
    asked: list[Any] = []

    class Asked(steps.Steps):  # type: ignore[misc]
        def __init__(self, *given: Any, cascades: bool, **how: Any) -> None:
            asked.append(cascades)
            super().__init__(*given, cascades=cascades, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "Steps", Asked)
        assert not builder_of(backend.FlashbsrBuilder, made).steps.cascades
        model = {"disable_cascade_attn": False}
        assert not builder_of(backend.FlashbsrBuilder, made, model=model).steps.cascades
    assert asked == [False, True]


def test_lengths_of_an_encoder_are_not_those_of_the_decoder(backend: Any) -> None:
    made = builder(backend, device=0, attn_type="encoder_decoder")
    found = made.batch(metadata(seq_lens=OnDevice(4), causal=False))
    assert found.bounds.tolist() == [100, 100, 100, 0] and not found.causal


def capacity(requests: int, tokens: int, pages: int) -> dict[str, int]:
    return {"requests": requests, "tokens": tokens, "pages": pages}


@pytest.mark.parametrize(
    ("apart", "starts", "expected"),
    [
        (True, [0, 1, 2, 3, 4], (1, True, 8, capacity(32, 32, 32 * 8))),
        (True, [0, 4, 8, 12, 16], (4, True, 16, capacity(16, 64, 16 * 8))),
        (False, [0, 1, 2, 3, 4], ("mixed", True, 8, capacity(16, 32, 16 * 8))),
    ],
)
def test_what_graphs_are_captured_for(
    backend: Any, apart: bool, starts: list[int], expected: tuple[Any, ...]
) -> None:
    made = builder(backend, device=0)
    made.vllm_config.compilation_config.cudagraph_mode = Mode(apart)
    given = torch.tensor(starts, dtype=torch.int32)
    made.build_for_cudagraph_capture(metadata(query_start_loc_cpu=given))
    assert made.steps.captured == [expected]


def test_graphs_of_decode_steps_take_no_others(backend: Any) -> None:
    with pytest.raises(errors.UnsupportedError, match="cudagraph_mode"):
        builder(backend, device=0).build_for_cudagraph_capture(metadata())


def test_which_steps_a_graph_may_be_replayed_for(backend: Any) -> None:
    def support(mode: Any, spec: Any = None) -> str:
        config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
        return backend.FlashbsrBuilder.get_cudagraph_support(config, spec).name

    assert support(Mode(apart=True)) == "UNIFORM_BATCH"
    assert support(Mode(apart=False)) == "ALWAYS"
    assert support(None) == "UNIFORM_BATCH"
    spec = object.__new__(backend.EncoderOnlyAttentionSpec)
    assert support(Mode(apart=False), spec) == "NEVER"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"causal": torch.tensor([True, False])}, "causal"),
        ({"mm_req_doc_ranges": {0: [(3, 9)]}}, "mm_req_doc_ranges"),
    ],
)
def test_steps_that_are_refused(backend: Any, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=named):
        builder(backend).build(0, metadata(**changes))


def test_no_images_in_a_step_of_such_a_model(backend: Any) -> None:
    builder(backend).build(0, metadata(mm_req_doc_ranges={}))


def test_models_that_are_refused(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = builder(backend)
    config = made.vllm_config
    again = backend.FlashbsrBuilder
    config.model_config.rswa_window = 512
    with pytest.raises(errors.UnsupportedError, match="rswa_window"):
        again(made.kv_cache_spec, ["a"], config, torch.device("cpu"))


@pytest.fixture
def dcp_group(backend: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The third of three ranks that share a cache."""
    group = SimpleNamespace(world_size=3, rank_in_group=2, device_group=object())
    monkeypatch.setattr(
        importlib.import_module("vllm.distributed.parallel_state"),
        "get_dcp_group",
        lambda: group,
    )
    return group


def spread_builder(backend: Any, spec: Any = None, heads: int = 1, **options: Any) -> Any:
    """A builder of one layer whose cache is spread over three ranks."""
    config = builder(backend).vllm_config
    config.parallel_config = SimpleNamespace(
        decode_context_parallel_size=3, cp_kv_cache_interleave_size=4, dcp_comm_backend="a2a"
    )
    layer = layers.Layer(4, 64, 0.1, heads, **options)
    config.compilation_config.static_forward_context = {"a": SimpleNamespace(impl=layer)}
    spec = spec or SimpleNamespace(block_size=16, dcp_sharded=True)
    return backend.FlashbsrBuilder(spec, ["a"], config, torch.device("cpu"))


def test_caches_that_are_spread_over_ranks(backend: Any, dcp_group: Any) -> None:
    """Requests of 40, 17 and 9 tokens in fours, of which the third rank has 12, 4 and 1."""
    made = spread_builder(backend)
    step = made.build(0, metadata())
    assert step.ranks.group is dcp_group.device_group and step.ranks.method == "all_to_all"
    assert (step.ranks.share.size, step.ranks.share.rank, step.ranks.share.interleave) == (3, 2, 4)
    engine = step.attention(made.steps.kinds[0])
    assert engine.task.num_qo_heads == 12 and engine.task.o_dtype == "float32"
    assert engine.plan_info.requests["kv_len"].tolist() == [12, 4, 1, 0]
    made.steps.place = dataclasses.replace(made.steps.place, device=0)
    batch = made.batch(metadata()).on(step.ranks.share)
    assert batch.bounds.tolist() == [12, 4, 1, 0] and batch.first.tolist() == [43, 17, 4, 0]
    # The last request pads, and has whatever an earlier step left.
    assert batch.lens.tolist()[:3] == [12, 4, 1] and batch.positions.tolist()[:3] == [39, 16, 4]


def test_the_whole_cache_of_a_draft_model(backend: Any, dcp_group: Any) -> None:
    spec = SimpleNamespace(block_size=16, dcp_sharded=False)
    assert spread_builder(backend, spec, heads=2).build(0, metadata()).ranks is None


def test_spread_caches_that_are_refused(backend: Any, dcp_group: Any) -> None:
    for options in ({"attn_type": "encoder_decoder"}, {"attn_type": "encoder_only"}):
        with pytest.raises(errors.UnsupportedError, match="decode_context_parallel_size"):
            spread_builder(backend, **options)
    with pytest.raises(errors.UnsupportedError, match="num_kv_heads"):
        spread_builder(backend, heads=2)


def test_batch_invariance_is_fixed_splits(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert builder(backend).steps.place.fixed_split_size is None
    monkeypatch.setattr(backend.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert builder(backend, sliding_window=8).steps.place.fixed_split_size == 2048


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": True}, "MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_per_head_quant_scales": True}, "per-head"),
        ({"head_size": 60}, "head_size"),
        ({"head_size": 576}, "head_size"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        ({"dtype": torch.float32}, "CPU only"),
        ({"dtype": torch.float16, "kv_cache_dtype": "bfloat16"}, "needs bfloat16"),
        ({"use_batch_invariant": True, "has_sliding_window": True}, "batch invariance"),
    ],
)
def test_configurations_that_are_refused(chosen: Any, changes: dict[str, Any], reason: str) -> None:
    """Each with its reason, and only that."""
    assert chosen.validate_configuration(**ASKED) == []
    (said,) = chosen.validate_configuration(**{**ASKED, **changes})
    assert reason in said


@pytest.mark.parametrize(
    "changes",
    [
        {"head_size": 72},
        {"head_size": 512, "has_sink": True},
        {"kv_cache_dtype": "fp8", "has_sliding_window": True},
        {"kv_cache_dtype": "fp8_e5m2", "head_size": 64},
        {"use_batch_invariant": True},
        {"attn_type": "encoder_only"},
        {"attn_type": "encoder_decoder", "use_non_causal": True},
        {"block_size": 48, "use_kv_connector": True},
    ],
)
def test_configurations_that_are_taken(chosen: Any, changes: dict[str, Any]) -> None:
    assert chosen.validate_configuration(**{**ASKED, **changes}) == []


@dataclasses.dataclass(frozen=True)
class Spec:
    """What vLLM's specification of a cache has of it."""

    head_size: int
    kv_quant_mode: Any
    state_content_bytes: int | None = None


def test_the_cache_that_is_asked_for(chosen: Any) -> None:
    """Both generations: K and V side by side, which is what layers split."""
    if hasattr(chosen, "get_kv_cache_shape"):
        shape = chosen.get_kv_cache_shape(7, 16, 2, 64, "fp8")
        assert shape == (7, 2, 16, 128)
        shape = chosen.get_kv_cache_shape(7, 16, 2, 64, "int8_per_token_head")
        assert shape == (7, 2, 16, 136)
        assert chosen.get_kv_cache_shape(7, 16, 2, 64, "int4_per_token_head")[3] == 72
        asked = {**ASKED, "kv_cache_dtype": "int8_per_token_head"}
        assert "align" in "".join(chosen.validate_configuration(**asked))
        assert chosen.get_required_kv_cache_layout() == "HND"
        for layered in (False, True):
            order = chosen.get_kv_cache_stride_order(layered)
            assert sorted(order) == list(range(4 + layered))
    else:
        assert chosen.supported_kv_cache_layouts() is None
        spec = Spec(64, SimpleNamespace(name="INT8_PER_TOKEN_HEAD"))
        assert chosen.customize_spec(spec).state_content_bytes == 144  # 136, aligned
        plain = Spec(64, SimpleNamespace(name="NONE"))
        assert chosen.customize_spec(plain) is plain
        asked = {**ASKED, "kv_cache_dtype": "int8_per_token_head"}
        assert chosen.validate_configuration(**asked) == []
    assert [m.base for m in chosen.get_supported_kernel_block_sizes()] == [16]
    assert not chosen.forward_includes_kv_cache_update
    impl = chosen.get_impl_cls()
    assert impl.supports_dcp and impl.can_return_lse_for_decode and not impl.supports_pcp
    assert impl.supports_mtp_with_cp_non_trivial_interleave_size


def test_outputs_are_offered_in_float8_where_one_scale_fits(chosen: Any) -> None:
    """To vLLM's fusion of attention and quantisation; ranks that share keys merge behind it."""
    utils = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
    key = utils.kFp8StaticTensorSym
    impl = chosen.get_impl_cls()(4, 64, 0.1, 2)
    assert impl.fused_output_quant_supported(key)
    assert not impl.fused_output_quant_supported("another")
    impl.dcp_world_size = 2
    assert not impl.fused_output_quant_supported(key)
    codes = chosen.get_impl_cls()(4, 64, 0.1, 2, kv_cache_dtype="int8_per_token_head")
    assert not codes.fused_output_quant_supported(key)


def test_registering(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as vLLM likes; overrides from the environment; a name that is not there is told."""
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    registered: dict[str, str] = {}
    monkeypatch.setattr(
        registry, "register_backend", lambda member, path: registered.update({member.name: path})
    )
    vllm.register()
    vllm.register()
    assert registered == {"CUSTOM": vllm.BACKEND}
    monkeypatch.setenv(vllm.OVERRIDE, "CPU_ATTN, ")
    vllm.register()
    assert registered == dict.fromkeys(("CUSTOM", "CPU_ATTN"), vllm.BACKEND)
    vllm.register(["FLASHMLA", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"])
    assert registered["FLASHMLA"] == vllm.LATENT_BACKEND
    for name in ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"):
        assert registered[name] == vllm.CHOSEN_BACKEND
    with pytest.warns(UserWarning, match="no attention backend 'FLASH'"):
        vllm.register(["FLASH"])
    module, _, name = vllm.BACKEND.rpartition(".")
    assert getattr(importlib.import_module(module), name).get_name() == "CUSTOM"


def test_a_vllm_without_a_list_of_backends_is_left_alone(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    monkeypatch.delattr(registry, "register_backend")
    with pytest.warns(UserWarning, match="no backend of this vLLM"):
        vllm.register()
