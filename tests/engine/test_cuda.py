# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What only a GPU shows: frameworks' arrays and streams, CUDA graphs, threads, several GPUs.

Numbers are the business of the other files, which run their cases on every device. Here a result is
compared with the CPU engine's.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda_world import DIM, HEADS, WORLD, on_gpu
from flashbsr import errors
from harness import DEVICES, framework

if not any(device.is_cuda for device in DEVICES):
    pytest.skip("no GPU, or a build or a PyTorch without CUDA", allow_module_level=True)

torch = framework("torch")

CAPACITY = {"max_batch_size": 32, "max_q_tokens": 256, "max_kv_pages": 500}
DECODE = ([700, 16, 1, 333], None, 4)
PREFILL = ([700, 300], [150, 40], 190)


# --- kinds of arrays


def _jax() -> Any:
    jax = framework("jax")
    if not any(d.platform == "gpu" for d in jax.local_devices()):
        pytest.skip("JAX sees no GPU")
    return jax


def _cupy() -> Any:
    return importlib.import_module("cupy") if _has("cupy") else pytest.skip("no CuPy")


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _jax_kind() -> Kind:
    jax = _jax()
    return (
        lambda x: jax.device_put(x, jax.local_devices()[0]),
        lambda x: x.unsafe_buffer_pointer(),
    )


Kind = tuple[Callable[[np.ndarray], Any], Callable[[Any], int]]  # to the GPU; address
KINDS: dict[str, Callable[[], Kind]] = {
    "torch": lambda: (on_gpu, lambda x: x.data_ptr()),
    "cupy": lambda: (_cupy().asarray, lambda x: x.data.ptr),
    "jax": _jax_kind,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_kinds(kind: str, shape: Any) -> None:
    """Results are of q's kind, on its device; index arrays may be there too."""
    put, _ = KINDS[kind]()
    lens, q_lens, rows = shape
    batch = WORLD.batch(lens, q_lens)
    attention = WORLD.attention("auto")
    on_gpu_too = {name: put(x) for name, x in batch.arrays()}
    attention.plan(dataclasses.replace(batch, **on_gpu_too))
    q, cache = put(WORLD.q[:rows]), put(WORLD.cache)
    out, lse = attention.run(q, cache, return_lse=True)
    assert type(out) is type(q)
    assert type(lse) is type(q)
    assert str(out.device) == str(q.device)
    WORLD.check(out.cpu() if kind == "torch" else out, batch, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_exports_are_views(kind: str) -> None:
    """The core gets the array's own address: nothing is copied."""
    put, address = KINDS[kind]()
    x = put(WORLD.cache)
    from flashbsr.arrays import adapter_for

    adapter = adapter_for(x)
    exported = adapter.export(x)
    again = torch.from_dlpack(exported)
    assert again.data_ptr() == address(x)
    made = adapter.empty(x, (4, 8), "float32")
    kept = adapter.finish(made)
    assert tuple(kept.shape) == (4, 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_extended_types_of_jax(dtype: str) -> None:
    jax = _jax()
    cache = jax.numpy.asarray(WORLD.cache).astype(dtype)
    q = jax.numpy.asarray(WORLD.q[:4]).astype("bfloat16")
    attention = WORLD.attention("auto")
    attention.plan(WORLD.batch(DECODE[0]))
    out = attention.run(q, cache)
    reference = WORLD.attention("cpu")
    reference.plan(WORLD.batch(DECODE[0]))
    want = reference.run(np.asarray(q), np.asarray(cache))
    np.testing.assert_allclose(np.asarray(out, "f4"), np.asarray(want, "f4"), atol=3e-2, rtol=3e-2)


def test_memory_of_jax_results_is_given_back() -> None:
    jax = _jax()
    put, _ = KINDS["jax"]()
    attention = WORLD.attention("auto")
    attention.plan(WORLD.batch(DECODE[0]))
    q, cache = put(WORLD.q[:4]), put(WORLD.cache)
    for _ in range(50):
        out = attention.run(q, cache)
        twice = jax.jit(lambda x: 2 * x)(out)
    np.testing.assert_array_equal(np.asarray(twice), 2 * np.asarray(out))
    growth = []
    for _ in range(5):  # other processes on the GPU take memory, too, and give it back
        free = torch.cuda.mem_get_info()[0]
        for _ in range(500):
            out = attention.run(q, cache)
        del out
        growth.append(free - torch.cuda.mem_get_info()[0])
    assert sorted(growth)[2] < 64 << 20


def test_torch_bfloat16_and_out() -> None:
    """`out` and `lse` are written where they are, strided or not."""
    q, cache = on_gpu(WORLD.q[:4]).bfloat16(), on_gpu(WORLD.cache).bfloat16()
    attention = WORLD.attention(kv_dtype=torch.bfloat16)
    attention.plan(WORLD.batch(DECODE[0]))
    wide = torch.full((4, HEADS, 2 * DIM), torch.nan, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(4, HEADS, device="cuda")
    out = wide[..., :DIM]
    result = attention.run(q, cache, out=out, lse=lse)
    assert result[0] is out
    assert result[1] is lse
    assert wide[..., DIM:].isnan().all()
    assert not out.isnan().any()


def test_no_memory_is_taken_by_a_run() -> None:
    """With `out` given neither PyTorch's allocator nor the driver gives memory away."""
    q, cache, out = on_gpu(WORLD.q[:4]), on_gpu(WORLD.cache), on_gpu(WORLD.q[:4])
    attention = WORLD.attention()
    attention.plan(WORLD.batch(DECODE[0]))
    attention.run(q, cache, out=out)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]

    def taken() -> int:
        free = torch.cuda.mem_get_info()[0]
        for _ in range(100):
            attention.run(q, cache, out=out)
        torch.cuda.synchronize()
        return int(free - torch.cuda.mem_get_info()[0])

    # Other processes of the suite use the GPU too; runs that took memory would do so every time.
    assert any(taken() == 0 for _ in range(20))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations


# --- streams


def test_current_stream_is_honoured() -> None:
    """Inputs made late on a side stream, plans on another one: each waits for what it needs."""
    attention = WORLD.attention()
    q, cache = on_gpu(WORLD.q), on_gpu(WORLD.cache)
    late = torch.empty_like(cache)
    sides = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for step in range(6):
        rows = 3 + step
        batch = WORLD.batch([200 + 30 * step] * rows)
        attention.plan(batch, stream=sides[2])
        side = sides[step % 2]
        with torch.cuda.stream(side):
            late.zero_()
            torch.cuda._sleep(2_000_000)
            late.copy_(cache)
            out = attention.run(q[:rows], late)
            host = out.cpu()  # waits for this stream only
        WORLD.check(host, batch, rows)
    explicit = attention.run(q[:rows], cache, stream=sides[0])
    sides[0].synchronize()
    WORLD.check(explicit.cpu(), batch, rows)


def test_plans_pile_up() -> None:
    """Many plans and runs behind a busy stream: pinned buffers in flight stay as they are."""
    attention = WORLD.attention()
    q, cache = on_gpu(WORLD.q), on_gpu(WORLD.cache)
    attention.plan(WORLD.batch([5]))
    attention.run(q[:1], cache)
    torch.cuda._sleep(20_000_000)
    pending = []
    for step in range(12):
        batch = WORLD.batch([40 * (step + 1), 7])
        attention.plan(batch)
        pending.append((batch, attention.run(q[:2], cache)))
    for batch, out in pending:
        WORLD.check(out.cpu(), batch, 2)


def test_cupy_streams() -> None:
    cupy = _cupy()
    attention = WORLD.attention("auto")
    q, cache = cupy.asarray(WORLD.q[:4]), cupy.asarray(WORLD.cache)
    cupy.cuda.Device().synchronize()
    for step in range(5):  # streams come and go
        batch = WORLD.batch([100 + step, 5, 6, 7])
        with cupy.cuda.Stream(non_blocking=True) as stream:
            attention.plan(batch)
            out = attention.run(q, cache)
            stream.synchronize()
        WORLD.check(out, batch, 4)


# --- CUDA graphs


@pytest.mark.parametrize("task", [{}, CAPACITY], ids=["alone", "capacity"])
def test_cupy_captures(task: dict[str, int]) -> None:
    """CuPy's graphs: with a capacity they replay over later plans, without one over their own."""
    cupy = _cupy()
    attention, first, later = WORLD.attention("auto", **task), WORLD.batch([700, 16, 1, 333]), None
    q, cache = cupy.asarray(WORLD.q[:4]), cupy.asarray(WORLD.cache)
    out = cupy.zeros_like(q)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        attention.plan(first)
        attention.run(q, cache, out=out)
        stream.begin_capture()
        attention.run(q, cache, out=out)
        graph = stream.end_capture()
        for lens in ([5, 6, 7, 8], [1000, 2, 300, 4]):
            out.fill(cupy.nan)
            later = WORLD.batch(lens)
            attention.plan(later)
            graph.launch(stream)
            stream.synchronize()
            WORLD.check(out, later if task else first, 4)


def capture(attention: Any, q: Any, cache: Any, out: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(q, cache, out=out)
    return graph


@pytest.mark.parametrize(("first", "later"), [
    (DECODE, [([900], None, 1), ([64] * 32, None, 32), ([1] * 7, None, 7), ([], None, 0), DECODE]),
    (PREFILL, [([400] * 4, [64] * 4, 256), ([1], [1], 1), ([800, 5], [7, 5], 12), PREFILL]),
], ids=["decode", "prefill"])  # fmt: skip
def test_replays_over_later_plans(first: Any, later: list[Any]) -> None:
    """One captured run serves every batch size and length up to the capacity."""
    attention = WORLD.attention(**CAPACITY)
    q, cache, out = on_gpu(WORLD.q), on_gpu(WORLD.cache), on_gpu(WORLD.q)
    attention.plan(WORLD.batch(*first[:2]))
    attention.run(q, cache, out=out)
    graph = capture(attention, q, cache, out)
    for lens, q_lens, rows in later:
        batch = WORLD.batch(lens, q_lens)
        attention.plan(batch)
        out.fill_(torch.nan)
        graph.replay()
        host = out.cpu()
        WORLD.check(host, batch, rows)
        assert host[rows:].isnan().all(), "rows of no request are not written"


def test_capture_without_out() -> None:
    """The result lives in the graph's own memory pool."""
    attention = WORLD.attention(**CAPACITY)
    q, cache = on_gpu(WORLD.q[:4]), on_gpu(WORLD.cache)
    batch = WORLD.batch(DECODE[0])
    attention.plan(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # layers
            out, lse = attention.run(q, cache, return_lse=True)
    graph.replay()
    WORLD.check(out.cpu(), batch, 4)
    assert not lse.isnan().any()


# --- threads, devices, workspace


def test_threads() -> None:
    """Engines of several threads on streams of their own, and one that they share."""
    q, cache = on_gpu(WORLD.q), on_gpu(WORLD.cache)
    shared, failures = WORLD.attention(), []
    shared_batch = WORLD.batch(PREFILL[0], PREFILL[1])
    shared.plan(shared_batch)
    torch.cuda.synchronize()

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                own = WORLD.attention()
                for step in range(10):
                    batch = WORLD.batch([100 * seed + 17 * step + 1, 5, 9])
                    own.plan(batch)
                    out, other = own.run(q[:3], cache), shared.run(q[:190], cache)
                    WORLD.check(out.cpu(), batch, 3)
                    WORLD.check(other.cpu(), shared_batch, 190)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_two_plans_in_flight() -> None:
    q, cache = on_gpu(WORLD.q), on_gpu(WORLD.cache)
    engines = []
    for lens, q_lens, rows in (DECODE, PREFILL):
        attention, batch = WORLD.attention(), WORLD.batch(lens, q_lens)
        attention.plan(batch)
        engines.append((attention, batch, rows))
    results = [(a.run(q[:rows], cache), batch, rows) for a, batch, rows in engines * 4]
    for out, batch, rows in results:
        WORLD.check(out.cpu(), batch, rows)


def test_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    results = []
    for ordinal in (0, 1):
        attention = WORLD.attention("auto")
        attention.plan(WORLD.batch(DECODE[0]))
        q, cache = (on_gpu(x).to(f"cuda:{ordinal}") for x in (WORLD.q[:4], WORLD.cache))
        results.append((attention.run(q, cache), q, cache, attention))
    for ordinal, (out, *_) in enumerate(results):
        assert out.device.index == ordinal
        WORLD.check(out.cpu(), WORLD.batch(DECODE[0]), 4)
    with pytest.raises(errors.DeviceError, match=r"^q\b.*cuda:1.*cuda:0"):
        results[0][3].run(*results[1][1:3])


def test_workspace_is_exact() -> None:
    """The size that any plan tells is enough, and what is behind it stays as it is."""
    sized = WORLD.attention(device=0, **CAPACITY)
    sized.plan(WORLD.batch([1]))
    size = sized.workspace_size()
    memory = torch.full((size + 256,), 0xAB, dtype=torch.uint8, device="cuda")
    attention = WORLD.attention("auto", memory[:size], **CAPACITY)
    q, cache = on_gpu(WORLD.q), on_gpu(WORLD.cache)
    for lens, q_lens, rows in (DECODE, PREFILL, ([8000], None, 1), ([3000, 4000], [1, 9], 10)):
        batch = WORLD.batch(lens, q_lens)
        attention.plan(batch)
        WORLD.check(attention.run(q, cache).cpu(), batch, rows)
    assert (memory[size:] == 0xAB).all()


def test_wrong_places() -> None:
    attention = WORLD.attention()
    attention.plan(WORLD.batch(DECODE[0]))
    q, cache = on_gpu(WORLD.q[:4]), on_gpu(WORLD.cache)
    for match, arrays, options in (
        (r"^q\b.*host memory", (q.cpu(), cache.cpu()), {}),
        (r"^kv\b.*host memory.*cuda:0", (q, cache.cpu()), {}),
        (r"^kv\b.*host memory.*cuda:0", (q, WORLD.cache), {}),
        (r"^out\b.*host memory.*cuda:0", (q, cache), {"out": q.cpu()}),
        (r"^sinks\b.*host memory.*cuda:0", (q, cache), {"sinks": np.zeros(HEADS, np.float32)}),
    ):
        with pytest.raises(errors.DeviceError, match=match):
            attention.run(*arrays, **options)
    with pytest.raises(errors.UnsupportedError, match=r"^q\b.*float32"):
        attention.run(q.float(), cache.float())
    with pytest.raises(errors.ShapeError, match=r"^q\b.*16-byte"):
        attention.run(
            torch.zeros(4 * HEADS * DIM + 1, device="cuda").half()[1:].view(q.shape), cache
        )
