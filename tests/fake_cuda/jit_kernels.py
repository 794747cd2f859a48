# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled at run time, on the fake driver. test_fake_cuda.py runs this file.

NVRTC is replaced: what is tested is which kernels are asked for, when, and what they are given. The
fake GPU computes a user's variant with the CPU's code of it.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flashbsr
import numpy as np
import pytest
import torch
from flashbsr import errors
from flashbsr.jit import cuda as jit_cuda
from flashbsr.jit.kernel_source import Wish
from flashbsr.jit.provider import Provider
from flashbsr.warm import warm

from fake_cuda.fake import Driver, FakeTorch
from fake_cuda.world import CAPACITY, DECODE, DIM, HEADS, KV_HEADS, PAGE, PREFILL, World

pytestmark = pytest.mark.usefixtures("fake_torch", "wishes")

# Logits get a bias by head and KV position, and a number; every third key is masked.
TEXT = """
struct Biased : VariantBase {
  template <class M>
  FLASHBSR_FN typename M::Float logits_transform(typename M::Float x,
                                                 const LogitsAt<M>& at) const {
    return x + slope * M::gather(table, at.q_head, at.kv_position);
  }
  template <class M>
  FLASHBSR_FN typename M::Bool logits_mask(const LogitsAt<M>& at) const {
    return at.kv_position - 3 * M::floor_div(at.kv_position, M::splat(3)) != 0;
  }
};
"""
EXTRAS = {"slope": "float32", "table": ("float32", 2)}
SPEC = flashbsr.AttentionSpec.from_source(TEXT, extras=EXTRAS, causal=True)
TABLE = np.random.default_rng(3).standard_normal((HEADS, 512)).astype(np.float32)


@pytest.fixture
def wishes(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Wish]]:
    """What NVRTC would have been asked for."""
    asked: list[Wish] = []

    def compile_nothing(wish: Wish, text: str, struct: str) -> bytes:
        assert bool(text) == bool(struct) == wish.variant.startswith("custom")
        asked.append(wish)
        return b"not empty"

    monkeypatch.setattr(jit_cuda, "cuda_kernel", compile_nothing)
    yield asked
    driver.drain()


def spec(tag: str) -> Any:
    """`SPEC` as a variant that no test before has compiled: kernels are kept for the process."""
    text = TEXT.replace("struct", f"// {tag}\nstruct")
    return flashbsr.AttentionSpec.from_source(text, extras=EXTRAS, causal=True)


def computes(driver: Driver, mine: Any) -> str:
    """Let the fake GPU, whose own level is the lowest, compute such a variant; its name."""
    name = Provider(mine.variant).name
    driver.variant(name, Provider(SPEC.variant).cpu_library("baseline"))
    return name


def expected(world: World, batch: flashbsr.Paged, rows: int) -> np.ndarray:
    reference = attention(SPEC, "cpu")
    reference.plan(batch)
    return reference.run(world.q[:rows].numpy(), world.cache.numpy(), **extras(on_gpu=False))


def close(out: Any, want: np.ndarray) -> None:
    got = out.numpy().astype(np.float32)
    np.testing.assert_allclose(got, want.astype(np.float32), atol=2e-3, rtol=2e-3)


def attention(spec: Any, backend: str = "cuda", dim: int = DIM, **task: Any) -> Any:
    sizes = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim_qk": dim}
    return flashbsr.Attention(spec, flashbsr.TaskInfo(**sizes, backend=backend, **task))


def extras(on_gpu: bool = True) -> dict[str, Any]:
    return {"slope": 0.5, "table": torch.from_numpy(TABLE) if on_gpu else TABLE}


@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_variant_has_its_extras(driver: Driver, wishes: list[Wish], shape: Any) -> None:
    mine = spec(f"extras {len(shape[0])}")
    name = computes(driver, mine)
    lens, q_lens, rows = shape
    world, gpu = World(), attention(mine, kv_dtype="float16")
    batch = world.batch(lens, q_lens)
    gpu.plan(batch)
    out = gpu.run(world.q[:rows], world.cache, **extras())
    driver.drain()
    assert driver.kernel.endswith(f"{name}_gather" if shape is PREFILL else name)
    want = expected(world, batch, rows)
    close(out, want)
    assert len(wishes) == 1
    # And the variant does something.
    plain = world.expected(batch, rows)
    assert np.abs(plain.astype(float) - want).max() > 0.1


def test_a_plan_with_a_mask_has_a_kernel_of_its_own(driver: Driver, wishes: list[Wish]) -> None:
    mine = spec("masked")
    name = computes(driver, mine)
    lens, q_lens, rows = PREFILL
    world, gpu, cpu = World(), attention(mine, kv_dtype="float16"), attention(SPEC, "cpu")
    batch = world.batch(lens, q_lens)
    pairs = sum(q * kv for q, kv in zip(q_lens, lens, strict=True))
    mask = np.random.default_rng(4).random(pairs) < 0.7
    gpu.plan(batch, custom_mask=mask)
    cpu.plan(batch, custom_mask=mask)
    out = gpu.run(world.q[:rows], world.cache, **extras())
    driver.drain()
    assert driver.kernel.endswith(f"{name}_masked_gather")
    assert [wish.variant for wish in wishes] == ["custom_masked"]
    close(out, cpu.run(world.q[:rows].numpy(), world.cache.numpy(), **extras(on_gpu=False)))


def test_wishes_name_the_tile_that_the_table_prefers(wishes: list[Wish]) -> None:
    world, mine = World(), spec("tiles")
    for shape, family, arch, target, rows in (
        (DECODE, "decode", "sm90", "sm_90", 8),
        (PREFILL, "hopper", "sm90a", "sm_90a", 192),
    ):
        gathers = family == "hopper"  # pages of 4 tokens
        attention(mine, kv_dtype="bfloat16").plan(world.batch(*shape[:2]))
        wish = wishes.pop()
        assert not wishes
        assert (wish.family, wish.arch, wish.target, wish.rows) == (family, arch, target, rows)
        assert (wish.q, wish.kv, wish.variant) == ("bfloat16", "bfloat16", "custom")
        assert (wish.head_dim, wish.head_dim_vo) == (64, 64)
        name = Provider(mine.variant).name
        assert wish.name == f"{family}_{arch}_d64_bf16_r{rows}_{name}" + "_gather" * gathers
        assert wish.copies == ("rows" if gathers else "boxes")


@pytest.mark.parametrize(("dim", "padded"), [(8, 64), (72, 128), (200, 256), (264, 512)])
def test_head_dims_are_padded_to_a_template(wishes: list[Wish], dim: int, padded: int) -> None:
    attention(spec(f"dims {dim}"), dim=dim, kv_dtype="float16").plan(World.batch([5, 9]))
    assert [(wish.head_dim, wish.head_dim_vo) for wish in wishes] == [(padded, padded)]


@pytest.mark.parametrize("kv", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_wide_heads_are_compiled(wishes: list[Wish], shape: Any, kv: str) -> None:
    """The build has none above 256, plain attention neither; Hopper's own family none at all."""
    sizes = {"q_dtype": "bfloat16", "kv_dtype": kv, "dim": 512}
    attention(flashbsr.AttentionSpec(), **sizes).plan(World.batch(*shape[:2]))
    family, arch, rows = ("decode", "sm90", 8) if shape is DECODE else ("prefill", "sm80", 64)
    short = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}[kv]
    name = f"{family}_{arch}_d512_{short}_r{rows}_plain"
    assert {wish.name for wish in wishes} <= {name}  # no other test asks for it
    assert len(wishes) == 1
    with pytest.raises(errors.UnsupportedError, match="512"):
        attention(flashbsr.AttentionSpec(), backend="fa3", **sizes).plan(World.batch(*shape[:2]))


@pytest.mark.parametrize(
    "types",
    [
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float8_e4m3fn"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_shapes_are_those_of_the_builds_kernels(
    driver: Driver, wishes: list[Wish], shape: Any, dim: int, types: tuple[str, str]
) -> None:
    """Threads, shared memory and grid of a variant's kernel, and of a variant in the table."""
    lens, q_lens, rows = shape
    dtypes = [getattr(torch, name) for name in types]
    q = torch.zeros(rows, HEADS, dim, dtype=dtypes[0])
    cache = torch.zeros(256, 2, PAGE, KV_HEADS, dim).to(dtypes[1])
    launched = []
    # Of head dim 64 the table has ALiBi alone, of 256 soft-cap alone.
    ready = {"pos_encoding_mode": "ALIBI"} if dim == 64 else {"logits_soft_cap": 30.0}
    of_table = flashbsr.AttentionSpec(causal=True, **ready)
    for which, values in ((of_table, {}), (SPEC, extras())):
        layer = attention(which, dim=dim, q_dtype=types[0], kv_dtype=types[1])
        layer.plan(World.batch(lens, q_lens))
        layer.run(q, cache, **values)
        launched.append((driver.kernel.split("_r")[0], driver.block, driver.grid))
        driver.drain()
    assert f"_d{dim}_" in launched[0][0]
    assert launched[0] == launched[1]


def test_a_kernel_is_compiled_once_in_a_process(driver: Driver, wishes: list[Wish]) -> None:
    world, mine = World(), spec("once")
    loaded = driver.calls("cuLibraryLoadData")
    for _ in range(3):
        layer = attention(mine, kv_dtype="float16")
        for lens in ([4], [9, 9]):
            layer.plan(world.batch(lens))
    # Another text is another variant, though its struct has the same name.
    attention(spec("once more"), kv_dtype="float16").plan(world.batch([4]))
    assert len(wishes) == 2
    assert wishes[0].name != wishes[1].name
    assert driver.calls("cuLibraryLoadData") == loaded + 2


def test_types_that_are_not_known_are_not_compiled_for(wishes: list[Wish]) -> None:
    """Until the first run tells them: a guess would cost a second."""
    world = World(torch.bfloat16)
    layer = attention(spec("types"))
    layer.plan(world.batch([4, 4]))
    assert not wishes
    layer.run(world.q[:2], world.cache, **extras())
    assert [wish.kv for wish in wishes] == ["bfloat16"]
    layer.plan(world.batch([400], [300]))
    assert [wish.family for wish in wishes] == ["decode", "hopper"]
    guessed = attention(spec("a guess that was right"))
    guessed.plan(World.batch([4, 4]))
    right = World(torch.float16)
    guessed.run(right.q[:2], right.cache, **extras())
    assert [wish.kv for wish in wishes[2:]] == ["float16"]


def test_arrays_of_a_variant_are_not_kept() -> None:
    """Kernels stay for the process; what a function captured goes with its spec."""

    def captured() -> weakref.ref[torch.Tensor]:
        slopes = torch.ones(HEADS)

        def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + slopes[h] * (kv_idx - q_idx)

        mine = flashbsr.AttentionSpec.from_functions(score_mod=alibi)
        attention(mine, kv_dtype="float16").plan(World.batch([4]))
        return weakref.ref(slopes)

    kept = captured()
    gc.collect()
    assert kept() is None


def test_a_kernel_that_fails_to_compile_is_asked_for_again(
    driver: Driver, wishes: list[Wish], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> bytes:
        raise errors.FlashbsrError("Biased", "source that does not compile", "line 3")

    world, mine = World(), spec("failure")
    layer = attention(mine, kv_dtype="float16")
    with monkeypatch.context() as patch:
        patch.setattr(jit_cuda, "cuda_kernel", fail)
        for _ in range(2):
            with pytest.raises(errors.FlashbsrError, match="does not compile.*line 3"):
                layer.plan(world.batch([4]))
            with pytest.raises(errors.PlanError):
                layer.run(world.q[:1], world.cache, **extras())
    assert not wishes
    layer.plan(world.batch([4]))
    layer.run(world.q[:1], world.cache, **extras())
    assert len(wishes) == 1


def test_threads_that_ask_at_once(wishes: list[Wish], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for Python's lock while holding one that the compiling thread needs."""
    world, mine = World(), spec("threads")
    started, go = threading.Barrier(8, timeout=30), threading.Event()

    def slow(wish: Wish, *_: Any) -> bytes:
        go.wait(0.2)
        return b"code"

    monkeypatch.setattr(jit_cuda, "cuda_kernel", slow)
    shared = attention(mine, kv_dtype="float16")
    plain = attention(flashbsr.AttentionSpec(), kv_dtype="float16")

    def work(i: int) -> None:
        started.wait()
        layer = (shared, plain, attention(mine, kv_dtype="float16"))[i % 3]
        for _ in range(5):
            layer.plan(world.batch([4 + i]))
            assert layer.device is not None  # takes the lock too

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_what_the_build_has_is_never_compiled(wishes: list[Wish]) -> None:
    world = World()
    for shape in (DECODE, PREFILL):
        for spec in (
            flashbsr.AttentionSpec(),
            flashbsr.AttentionSpec(logits_soft_cap=30.0),
        ):
            attention(spec, kv_dtype="bfloat16").plan(world.batch(*shape[:2]))
    odd = attention(flashbsr.AttentionSpec(), "fa3", q_dtype="float16", kv_dtype="float8_e5m2")
    with pytest.raises(errors.UnsupportedError, match="cpp/instances.txt"):
        odd.plan(world.batch([4]))
    assert not wishes


def test_sigmoids_are_compiled(wishes: list[Wish]) -> None:
    world, spec = World(), flashbsr.AttentionSpec(activation="sigmoid")
    for shape in (DECODE, PREFILL):
        attention(spec, kv_dtype="float16").plan(world.batch(*shape[:2]))
    assert {wish.variant for wish in wishes} == {"sigmoid_alone"}


def test_captured_runs_replay(driver: Driver, fake_torch: FakeTorch, wishes: list[Wish]) -> None:
    mine = spec("captured")
    computes(driver, mine)
    world, out = World(), torch.zeros(64, HEADS, DIM, dtype=torch.float16)
    layer = attention(mine, kv_dtype="float16", **CAPACITY)
    layer.plan(world.batch([10, 20, 30]))
    values = extras()
    fake_torch.current = stream = driver.stream()
    with driver.capture(stream) as graph:
        layer.run(world.q, world.cache, out=out, **values)
    for lens in ([9], [70, 1, 3]):
        batch = world.batch(lens)
        layer.plan(batch)
        driver.replay(graph, stream)
        driver.synchronize(stream)
        close(out[: len(lens)], expected(world, batch, len(lens)))
    assert len(wishes) == 1


def test_what_no_template_does_is_refused(wishes: list[Wish]) -> None:
    world = World()
    rows = flashbsr.AttentionSpec.from_source(
        "struct Rows : VariantBase { template <class Row> FLASHBSR_FN void "
        "query_transform(Row x, const RowAt& at) const { x[0] = 1.0f; } };"
    )
    for backend, types in (("fa3", ("float16", "float16")), ("cuda", ("float16", "float8_e4m3fn"))):
        refused = attention(rows, backend, q_dtype=types[0], kv_dtype=types[1])
        with pytest.raises(errors.UnsupportedError, match=r"variant.*16-bit.*whole rows"):
            refused.plan(world.batch([4]))
    assert not wishes
    attention(rows, kv_dtype="float16").plan(world.batch([4]))
    assert [wish.family for wish in wishes] == ["prefill"]


def test_warm_compiles_what_lengths_ask_for(wishes: list[Wish]) -> None:
    types = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16"}
    task = flashbsr.TaskInfo(HEADS, KV_HEADS, 128, backend="cuda", **types)
    mine = spec("warm")
    names = warm(mine, task, page_size=16)
    assert names == [wish.name for wish in wishes]
    assert [wish.family for wish in wishes] == ["decode", "hopper"]
    assert warm(mine, task, [512]) == names[1:]
    assert len(wishes) == 2


def test_a_variants_kernel_is_not_in_the_table() -> None:
    attention(spec("table"), kv_dtype="float16").plan(World.batch([4]))
    names = {kernel["name"] for kernel in flashbsr._core.cuda_kernels()}
    assert not any("Biased" in name for name in names)


def test_wishes_are_those_of_the_header() -> None:
    """The provider's parameters are in the order in which the core gives them."""
    fields = [field.name for field in dataclasses.fields(Wish)]
    code = Provider.cuda_kernel.__code__
    assert list(code.co_varnames[1 : code.co_argcount]) == fields
