# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What the CUDA engine's host side promises, on the fake driver; test_fake_cuda.py runs it."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import flashbsr
import numpy as np
import pytest
import torch
from flashbsr import errors

from fake_cuda.fake import Driver, FakeTorch
from fake_cuda.world import (
    CAPACITY,
    DECODE,
    DIM,
    HEADS,
    KV_HEADS,
    PREFILL,
    World,
    check,
    planned,
)

pytestmark = pytest.mark.usefixtures("fake_torch")


# --- what a plan and a run do


def test_run_allocates_copies_and_waits_for_nothing(driver: Driver) -> None:
    """With `out` given a run is a launch: no memory, no copy, no wait."""
    world = World()
    attention, batch, rows = planned(world)
    out, lse = torch.empty(rows, HEADS, DIM, dtype=torch.float16), torch.empty(rows, HEADS)
    names = (
        "cuMemAlloc", "cuMemFree", "cuMemHostAlloc", "cuMemcpyHtoDAsync", "cuStreamSynchronize",
        "cuEventSynchronize", "cuStreamWaitEvent", "cuEventRecord", "cuCtxSynchronize",
        "cuLibraryLoadData",
    )  # fmt: skip
    before = {name: driver.calls(name) for name in names}
    launches = driver.calls("cuLaunchKernelEx")
    result = attention.run(world.q[:rows], world.cache, out=out, lse=lse)
    assert result[0] is out
    assert result[1] is lse
    assert {name: driver.calls(name) for name in names} == before
    assert driver.calls("cuLaunchKernelEx") == launches + 1
    driver.drain()
    check(world, out, batch, rows)


def test_one_copy_per_plan(driver: Driver) -> None:
    """In the steady state a plan is one asynchronous copy, and its mask another."""
    world = World()
    attention = world.attention(causal=False)
    for step in range(16):
        batch = world.batch([40 + step, 9], [3, 2])
        mask = np.random.default_rng(step).random(3 * (40 + step) + 18) < 0.7 if step % 2 else None
        before = [driver.calls(n) for n in ("cuMemcpyHtoDAsync", "cuMemAlloc", "cuMemHostAlloc")]
        attention.plan(batch, custom_mask=mask)
        after = [driver.calls(n) for n in ("cuMemcpyHtoDAsync", "cuMemAlloc", "cuMemHostAlloc")]
        assert after[0] == before[0] + 1 + step % 2
        if step >= 8:
            assert after[1:] == before[1:]
        out = attention.run(world.q[:5], world.cache)
        driver.drain()
        reference = world.attention("cpu", causal=False)
        reference.plan(batch, custom_mask=mask)
        want = reference.run(world.q[:5].numpy(), world.cache.numpy())
        np.testing.assert_allclose(out.numpy().astype("f4"), want.astype("f4"), atol=2e-3)


def test_pinned_buffers_in_flight_are_not_overwritten(driver: Driver) -> None:
    """Plans and runs pile up on a stream that runs later; every run has its own plan."""
    world = World()
    attention, outs = world.attention(), []
    for step in range(7):
        batch = world.batch([30 + 11 * step, 5 + step], seed=step)
        attention.plan(batch)
        outs.append((batch, attention.run(world.q[:2], world.cache)))
    driver.drain()
    for batch, out in outs:
        check(world, out, batch, 2)


@pytest.mark.parametrize(("lens", "q_lens", "backend", "kernel"), [
    ([40] * 4, None, "cuda", "decode_sm90_d64_f16_r8_plain"),
    ([40] * 4, [2] * 4, "cuda", "decode_sm90_d64_f16_r8_plain"),
    ([40] * 4, [4] * 4, "cuda", "decode_sm90_d64_f16_r16_plain"),
    ([40] * 4, [16] * 4, "fa2", "prefill_sm80_d64_f16_r64_plain"),
    ([64], [64], "fa2", "prefill_sm80_d64_f16_r128_plain"),
    ([64], [64], "fa3", "hopper_sm90a_d64_f16_r192_plain"),
    ([300, 64, 40, 64], [60, 1, 1, 2], "cuda", "hopper_sm90a_d64_f16_r192_plain"),
    ([300, 64, 40, 64], [60, 1, 1, 2], "fa3", "hopper_sm90a_d64_f16_r192_plain"),
    ([300, 64, 40, 64], [60, 1, 1, 2], "fa2", "prefill_sm80_d64_f16_r64_plain"),
])  # fmt: skip
def test_kernel_follows_the_rows(
    driver: Driver, lens: list[int], q_lens: list[int] | None, backend: str, kernel: str
) -> None:
    world = World()
    rows = len(lens) if q_lens is None else sum(q_lens)
    attention, batch, _ = planned(world, (lens, q_lens, rows), backend=backend)
    out = attention.run(world.q[:rows], world.cache)
    assert attention._engine.kernel_name() == driver.kernel == kernel
    driver.drain()
    check(world, out, batch, rows)


def test_mixed_batches(driver: Driver) -> None:
    """Wide items first, narrow ones with workers of their own, several in a block."""
    world = World()
    shape = [300, 64, 40, 64], [60, 1, 1, 2], 64
    attention, batch, rows = planned(world, shape, tile_rows=128)
    out = attention.run(world.q[:rows], world.cache)
    plan = attention.plan_info
    h = plan.header
    assert driver.kernel.startswith("mixed_")
    num_wide_workers = h.num_workers - h.num_narrow_workers
    assert num_wide_workers + h.num_narrow_blocks == driver.grid
    assert h.num_narrow_workers == h.num_narrow_blocks * -(-h.tile_rows // 64) > 0
    wide = plan.items["row_count"] > h.narrow_rows
    assert wide.tolist() == (np.arange(h.num_items) < h.num_wide_items).tolist()
    assert 0 < h.num_wide_items < h.num_items
    for worker in range(h.num_workers):
        assert (wide[plan.queue(worker)] == (worker < num_wide_workers)).all()
    driver.drain()
    check(world, out, batch, rows)
    # What the kernel has no code for, and what must not depend on the batch, has other kernels.
    for options in (
        {"logits_soft_cap": 5.0}, {"fixed_split_size": 64}, {"num_workers": 4},
        {"max_batch_size": 4, "max_q_tokens": 64, "max_kv_pages": 200},
    ):  # fmt: skip
        planned(world, shape, **options)[0].run(world.q[:rows], world.cache)
        assert not driver.kernel.startswith("mixed_")
        driver.drain()


@pytest.mark.parametrize(("options", "hopper", "others"), [
    ({"logits_soft_cap": 5.0}, "standard", "standard"), ({"window_left": 9}, "plain", "plain"),
    ({"pos_encoding_mode": "ALIBI"}, "alibi", "alibi"),
    ({"activation": "sigmoid"}, "sigmoid_alone_gather", "sigmoid_alone"),
    ({"activation": "sigmoid", "logits_soft_cap": 5.0}, "sigmoid_gather", "sigmoid"),
    ({"pos_encoding_mode": "ROPE_LLAMA"}, "standard", "standard"),
    ({"pos_encoding_mode": "ROPE_LLAMA", "rotary_dim": 32}, "standard", "standard"),
    ({"pos_encoding_mode": "ROPE_LLAMA", "rope_interleave": True}, "standard", "standard"),
])  # fmt: skip
@pytest.mark.parametrize("shape", [DECODE, PREFILL])
def test_variants(
    driver: Driver, options: dict[str, Any], hopper: str, others: str, shape: Any
) -> None:
    """Slopes and rotary tables reach the kernel, also when they grow."""
    world = World()
    attention, batch, rows = planned(world, shape, **options)
    for longer in (0, 150, 400):
        if longer:
            batch = world.batch([longer, *shape[0][1:]], shape[1])
            attention.plan(batch)
        out = attention.run(world.q[:rows], world.cache)
        kernel = hopper if driver.kernel.startswith("hopper") else others
        assert driver.kernel.endswith(f"_{kernel}")
        driver.drain()
        check(world, out, batch, rows, **options)


def test_overlap_options(driver: Driver) -> None:
    world = World()
    attention, _, rows = planned(world)
    for options, overlap in (
        ({}, 1), ({"enable_pdl": True}, 1), ({"enable_pdl": False}, 0), ({"kv_ready": True}, 2),
    ):  # fmt: skip
        attention.run(world.q[:rows], world.cache, **options)
        assert driver.overlap == overlap
        assert driver.programmatic == (overlap > 0)
    with pytest.raises(errors.FlashbsrError, match="^kv_ready"):
        attention.run(world.q[:rows], world.cache, enable_pdl=False, kv_ready=True)


def test_empty_batches(driver: Driver) -> None:
    world = World()
    attention = world.attention()
    attention.plan(world.batch([], []))
    launches = driver.calls("cuLaunchKernelEx")
    assert attention.run(world.q[:0], world.cache).shape == (0, HEADS, DIM)
    assert driver.calls("cuLaunchKernelEx") == launches


def test_workers_and_grid(driver: Driver) -> None:
    """The grid is the device's, unless TaskInfo says another number of queues."""
    world = World()
    for options, grid in (({}, 6), ({"num_workers": 11}, 11)):
        attention, batch, rows = planned(world, **options)
        out = attention.run(world.q[:rows], world.cache)
        assert driver.grid == attention.plan_info.header.num_workers == grid
        driver.drain()
        check(world, out, batch, rows)


# --- streams, threads, plans in flight


def test_uses_on_different_streams_follow_each_other(driver: Driver, fake_torch: FakeTorch) -> None:
    """Upload, run and next upload on three streams, one of which is gone by then."""
    world = World()
    attention, checks = world.attention(), []
    for step in range(6):
        streams = [driver.stream(), driver.stream()]
        batch = world.batch([50 + 20 * step, 9], seed=step)
        attention.plan(batch, stream=streams[0])
        fake_torch.current = streams[1]
        checks.append((batch, attention.run(world.q[:2], world.cache), streams))
    for batch, out, streams in reversed(checks):  # the last first: the others by its waits
        driver.synchronize(streams[1])
        check(world, out, batch, 2)
    for _, _, streams in checks:
        for stream in streams:
            driver.destroy(stream)


def test_plan_uses_the_frameworks_stream(driver: Driver, fake_torch: FakeTorch) -> None:
    """After the first array of a framework, plan copies on its current stream: no waits needed."""
    world = World()
    attention, _, rows = planned(world)
    attention.run(world.q[:rows], world.cache)
    fake_torch.current = driver.stream()
    attention.plan(world.batch([20, 21]))
    waits = driver.calls("cuStreamWaitEvent")
    out = attention.run(world.q[:2], world.cache)
    assert driver.calls("cuStreamWaitEvent") == waits
    driver.synchronize(fake_torch.current)
    check(world, out, world.batch([20, 21]), 2)


def test_default_stream_is_not_interrupted_by_events(driver: Driver) -> None:
    """An event behind a run would keep the next kernel from overlapping with it."""
    world = World()
    attention, _, rows = planned(world)
    records = driver.calls("cuEventRecord")
    for _ in range(3):
        attention.run(world.q[:rows], world.cache)
    assert driver.calls("cuEventRecord") == records


def test_two_plans_in_flight(driver: Driver) -> None:
    world = World()
    engines = [planned(world, shape) for shape in (DECODE, PREFILL)]
    results = [(a.run(world.q[:rows], world.cache), b, rows) for a, b, rows in engines * 3]
    driver.drain()
    for out, batch, rows in results:
        check(world, out, batch, rows)


def test_threads(driver: Driver) -> None:
    """Several threads plan and run engines of their own, and run one that they share."""
    world = World()
    shared, shared_batch, shared_rows = planned(world)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            own = world.attention()
            for step in range(8):
                batch = world.batch([10 + seed + 9 * step, 5], seed=seed)
                own.plan(batch)
                out = own.run(world.q[:2], world.cache)
                other = shared.run(world.q[:shared_rows], world.cache)
                driver.drain()
                check(world, out, batch, 2)
                check(world, other, shared_batch, shared_rows)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_devices(driver: Driver, fake_torch: FakeTorch) -> None:
    """Two GPUs in one process; an engine belongs to one of them."""
    world, other = World(), World()
    fake_torch.other = {x.data_ptr(): 1 for x in (other.q, other.cache)}
    first, batch, rows = planned(world)
    second = other.attention(device=1)
    second.plan(batch)
    out = torch.empty(rows, HEADS, DIM, dtype=torch.float16)
    fake_torch.other[out.data_ptr()] = 1
    check_out = first.run(world.q[:rows], world.cache)
    second.run(other.q[:rows], other.cache, out=out)
    driver.drain()
    check(world, check_out, batch, rows)
    check(other, out, batch, rows)
    with pytest.raises(errors.DeviceError, match=r"^q\b.*cuda:1.*cuda:0"):
        first.run(other.q[:rows], other.cache)
    with pytest.raises(errors.DeviceError, match=r"^kv\b.*cuda:1.*cuda:0"):
        first.run(world.q[:rows], other.cache)
    with pytest.raises(errors.DeviceError, match=r"^device\b.*cuda:7"):
        world.attention(device=7)


# --- where to compute


def test_auto_is_decided_by_the_first_run(driver: Driver) -> None:
    world = World()
    attention, batch, rows = planned(world, backend="auto")
    assert attention._engine.place() is None
    out = attention.run(world.q[:rows], world.cache)
    assert attention._engine.place() == 0
    driver.drain()
    check(world, out, batch, rows)
    attention.plan(world.batch([5, 6, 7]))
    with pytest.raises(errors.DeviceError, match=r"^q\b.*host memory.*cuda:0.*decided by q"):
        attention.run(world.q[:3].numpy(), world.cache.numpy())


def test_auto_stays_on_the_cpu(driver: Driver) -> None:
    world = World()
    attention, _, rows = planned(world, backend="auto")
    attention.run(world.q[:rows].numpy(), world.cache.numpy())
    with pytest.raises(errors.DeviceError, match=r"^q\b.*cuda:0.*host memory"):
        attention.run(world.q[:rows], world.cache)


@pytest.mark.parametrize("what", ["kv_indices", "kv_indptr", "workspace"])
def test_auto_is_decided_by_arrays_on_the_gpu(driver: Driver, what: str) -> None:
    world = World()
    batch = world.batch([40, 7])
    workspace = torch.empty(1 << 22, dtype=torch.uint8) if what == "workspace" else None
    attention = world.attention("auto", workspace)
    if workspace is None:
        batch = dataclasses.replace(batch, **{what: torch.from_numpy(getattr(batch, what))})
    attention.plan(batch)
    assert attention._engine.place() == 0
    out = attention.run(world.q[:2], world.cache)
    driver.drain()
    check(world, out, world.batch([40, 7]), 2)


def test_a_type_that_the_plan_did_not_expect(driver: Driver) -> None:
    """Without TaskInfo.kv_dtype a plan expects 16 bits of float16; the first run corrects it.

    It reads no array of the caller's again.
    """
    world = World(torch.bfloat16)
    attention, batch, rows = planned(world)
    ids: Any = batch.kv_indices
    wanted = ids.copy()
    ids[:] = -1
    attention.run(world.q[:rows], world.cache)
    np.testing.assert_array_equal(attention.plan_info.kv_indices, wanted)
    assert driver.kernel == "decode_sm90_d64_bf16_r8_plain"
    copies = driver.calls("cuMemcpyHtoDAsync")
    attention.plan(world.batch([9, 9]))
    attention.run(world.q[:2], world.cache)
    assert driver.calls("cuMemcpyHtoDAsync") == copies + 1
    fp8 = world.cache.to(torch.float8_e4m3fn)
    attention.run(world.q[:2], fp8)
    assert driver.kernel == "decode_sm90_d64_e4m3_r8_plain"


@pytest.mark.parametrize(("dim", "accumulation", "options", "kernel"), [
    (128, "default", {}, "hopper_sm90a_d128_e4m3_r192_plain"),
    (128, "fast", {}, "hopper_fast_sm90a_d128_e4m3_r192_plain"),
    (96, "fast", {}, "hopper_fast_sm90a_d128_e4m3_r192_plain"),
    (64, "fast", {}, "hopper_sm90a_d64_e4m3_r192_plain"),
    (256, "fast", {}, "hopper_sm90a_d256_e4m3_r128_plain"),
    (128, "fast", {"logits_soft_cap": 5.0}, "hopper_sm90a_d128_e4m3_r192_standard"),
    (128, "fast", {"activation": "sigmoid"}, "hopper_sm90a_d128_e4m3_r192_sigmoid"),
])  # fmt: skip
def test_long_sums_of_float8(
    driver: Driver, dim: int, accumulation: str, options: dict[str, Any], kernel: str
) -> None:
    """Allowed is not asked for: what has no kernel of its own has the other one."""
    x = torch.zeros(9, 2, dim).to(torch.float8_e4m3fn)
    task = flashbsr.TaskInfo(2, 2, dim, backend="cuda", fp8_accumulation=accumulation)
    attention = flashbsr.Attention(flashbsr.AttentionSpec(**options), task)
    attention.plan(flashbsr.Ragged([0, 9], [0, 9]))
    attention.run(x, (x, x))
    assert driver.kernel == attention._engine.kernel_name() == kernel


# --- workspace


def test_workspace(driver: Driver, fake_torch: FakeTorch) -> None:
    """With a capacity any plan tells its size, without an array; it is enough exactly."""
    world = World()
    # Hopper's kernels would split nothing as short as what is in the cache.
    sized = world.attention("fa2", device=0, **CAPACITY)
    with pytest.raises(errors.PlanError):
        sized.workspace_size()
    sized.plan(world.batch([1]))
    size = sized.workspace_size()
    assert size > 0
    memory = torch.full((size,), 0xFF, dtype=torch.uint8)
    attention = world.attention("fa2", memory, **CAPACITY)
    batch = world.batch([700, 3])
    attention.plan(batch)
    assert attention.workspace_size() == size
    assert attention.plan_info.header.num_slots > 0
    out = attention.run(world.q[:2], world.cache)
    driver.drain()
    check(world, out, batch, 2)
    assert (memory != 0xFF).any()
    short = torch.empty(size - 1, dtype=torch.uint8)
    with pytest.raises(errors.CapacityError, match=rf"^workspace.*{size - 1}.*{size} bytes"):
        world.attention("fa2", short, **CAPACITY).plan(batch)
    with pytest.raises(errors.CapacityError, match="^workspace"):
        world.attention("fa2", size - 1, device=0, **CAPACITY).plan(batch)
    with pytest.raises(errors.DeviceError, match="^workspace.*host memory"):
        world.attention("cuda", np.empty(size, np.uint8), **CAPACITY)
    attention = world.attention("cuda", torch.empty(64, dtype=torch.uint8), fixed_split_size=16)
    with pytest.raises(errors.CapacityError, match="^workspace.*64 bytes"):
        attention.plan(world.batch([1000]))


# --- bad calls that only a GPU knows


def bad_run(world: World, match: str, error: type = errors.FlashbsrError, **arrays: Any) -> None:
    attention, _, rows = planned(world)
    call = {"q": world.q[:rows], "kv": world.cache, **arrays}
    with pytest.raises(error, match=match):
        attention.run(call.pop("q"), call.pop("kv"), **call)


def test_arrays_of_the_wrong_kind(fake_torch: FakeTorch) -> None:
    world = World()
    q, cache = world.q[:4], world.cache
    host = torch.empty(4, HEADS, DIM, dtype=torch.float16)
    fake_torch.on_host.add(host.data_ptr())
    bad_run(world, r"^q\b.*host memory", errors.DeviceError, q=q.numpy(), kv=cache.numpy())
    bad_run(world, r"^kv\b.*host memory.*cuda:0", errors.DeviceError, kv=cache.numpy())
    bad_run(world, r"^out\b.*host memory.*cuda:0", errors.DeviceError, out=host)
    bad_run(world, r"^lse\b.*host memory", errors.DeviceError, lse=np.empty((4, HEADS), np.float32))
    bad_run(world, r"^sinks\b.*host memory", errors.DeviceError, sinks=np.zeros(HEADS, np.float32))
    bad_run(
        world, r"^k_scale\b.*host memory", errors.DeviceError,
        k_scale=np.ones(KV_HEADS, np.float32),
    )  # fmt: skip
    bad_run(world, r"^v_scale\b.*memory of a GPU", errors.UnsupportedError, v_scale=torch.ones(1))
    bad_run(
        world, r"^q\b.*float32.*float16", errors.UnsupportedError, q=q.float(), kv=cache.float()
    )
    odd = torch.empty(4 * HEADS * DIM + 8, dtype=torch.float16)[1 : 1 + 4 * HEADS * DIM]
    bad_run(world, r"^q\b.*16-byte aligned", errors.ShapeError, q=odd.view(4, HEADS, DIM))
    wide = torch.empty(4, HEADS, DIM + 4, dtype=torch.float16)[..., :DIM]
    bad_run(world, r"^out\b.*stride.*16-byte aligned", errors.ShapeError, out=wide)
    bad_run(world, r"^stream\b", TypeError, stream="main")


def test_computations_without_a_kernel() -> None:
    world = World()
    with pytest.raises(errors.UnsupportedError, match="^kv_dtype.*float32"):
        world.attention(kv_dtype="float32").plan(world.batch([4]))
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(pos_encoding_mode="ROPE_LLAMA"),
        flashbsr.TaskInfo(HEADS, KV_HEADS, 96, backend="cuda"),
    )
    with pytest.raises(errors.UnsupportedError, match=r"^pos_encoding_mode.*96.*apply_rope"):
        attention.plan(world.batch([4]))
    partial = world.attention(pos_encoding_mode="ROPE_LLAMA", rotary_dim=48)
    with pytest.raises(errors.UnsupportedError, match=r"^rotary_dim: got 48 .*multiple of 32"):
        partial.plan(world.batch([4]))


def test_gpu_options_on_the_host() -> None:
    world = World()
    attention, _, rows = planned(world, backend="cpu")
    for option in ({"enable_pdl": True}, {"kv_ready": True}, {"stream": 0}):
        with pytest.raises(errors.UnsupportedError, match=f"^{next(iter(option))}"):
            attention.run(world.q[:rows].numpy(), world.cache.numpy(), **option)
    with pytest.raises(errors.FlashbsrError, match="^device"):
        world.attention("cpu", device=0)


def test_page_check(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option, or FLASHBSR_CHECK, validates the ids that are in device memory."""
    world = World()
    for enable in ("option", "environment"):
        if enable == "environment":
            monkeypatch.setenv("FLASHBSR_CHECK", "1")
        attention, batch, rows = planned(world, check=enable == "option")
        out = attention.run(world.q[:rows], world.cache)
        assert driver.calls("cuStreamSynchronize") > 0
        driver.drain()
        check(world, out, batch, rows)
        driver.corrupt_page(2, -5)
        with pytest.raises(errors.IndexRangeError, match=r"^kv_indices\[2\].*-5.*256"):
            attention.run(world.q[:rows], world.cache)
