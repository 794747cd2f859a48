# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays of NumPy, PyTorch and JAX go in without a copy, and come back as the caller's kind."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any

import cases
import flashbsr
import numpy as np
import pytest
from cases import BF16, F32, Case, build
from flashbsr.arrays import adapter_for
from harness import attention_for, compare, has_gpu
from kinds import (
    JAX,
    KINDS,
    Kind,
    all_of,
    by_dtypes,
    by_kind,
    by_mutable_kind,
    jax,
    jnp,
    to_torch,
)
from reference import DTYPES, Variant


@by_kind
@by_dtypes
@pytest.mark.parametrize("layout", ["ragged", "paged", "table"])
def test_kinds(kind: Kind, dtypes: tuple[str, str, str], layout: str) -> None:
    """Inputs, index arrays, masks and options of a kind; results of that kind."""
    problem = build(
        cases.MIXED.but(
            kind.name,
            dtypes=dtypes,
            layout=layout,
            mask="bool",
            sinks=True,
            scales="head",
            stacked=layout == "paged",
        )
    )
    for name in (
        "qo_indptr",
        "kv_indptr",
        "kv_indices",
        "last_page_len",
        "kv_lens",
        "block_tables",
        "custom_mask",
    ):
        value = getattr(problem, name)
        if value is not None:
            setattr(problem, name, kind.put(value))
    attention = attention_for(problem)
    problem.plan(attention)
    q, kv = all_of(kind, problem)
    options = {name: kind.put(value) for name, value in problem.run_options.items()}
    out, lse = attention.run(q, kv, return_lse=True, **options)
    for result, dtype in ((out, dtypes[2]), (lse, "float32")):
        assert isinstance(result, kind.array)
        assert str(result.dtype).removeprefix("torch.") == dtype
    compare(problem, kind.get(out), kind.get(lse))


@by_mutable_kind
@by_dtypes
def test_outputs_are_written_in_place(kind: Kind, dtypes: tuple[str, str, str]) -> None:
    """`out` and `lse` come back as the same objects at the same address, strided or not."""
    problem = build(cases.PREFILL.but(kind.name, dtypes=dtypes, layout="paged"))
    attention = attention_for(problem)
    problem.plan(attention)
    q, kv = all_of(kind, problem)
    memory, lse_memory = problem.new_outputs()
    out, lse = kind.put(memory), kind.put(lse_memory)
    addresses = kind.address(out), kind.address(lse)
    assert addresses == (memory.ctypes.data, lse_memory.ctypes.data)
    result = attention.run(q, kv, out=out, lse=lse, return_lse=True)
    assert result[0] is out
    assert result[1] is lse
    assert (kind.address(out), kind.address(lse)) == addresses
    compare(problem, memory, lse_memory)


class _DLTensor(ctypes.Structure):
    """The head of a DLPack capsule's contents."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def exported_address(exported: Any) -> int:
    """Where the compiled core will read what an adapter exports."""
    if isinstance(exported, tuple):
        exported = exported[0]
    if isinstance(exported, np.ndarray):
        return exported.ctypes.data
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    if hasattr(exported, "__dlpack_c_exchange_api__"):
        # DLPackExchangeAPI: version, previous API, three functions, and the one that describes.
        table = pointer(exported.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
        describe = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[5]
        tensor = _DLTensor()
        function = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_DLTensor))
        assert function(describe)(exported, ctypes.byref(tensor)) == 0
    else:
        tensor = ctypes.cast(pointer(exported, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    return tensor.data + tensor.byte_offset


@by_kind
@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "uint8"]
)
def test_exports_are_views(kind: Kind, dtype: str) -> None:
    """The address that an adapter hands to the core is the array's own, strides included."""
    base = np.arange(6 * 4 * 24).reshape(6, 4, 24).astype(DTYPES.get(dtype, np.dtype(dtype)))
    x = kind.put(base)
    assert exported_address(adapter_for(x).export(x)) == kind.address(x)
    if kind is not JAX:
        view = kind.put(base[1::2, 1:, 3:11])
        assert kind.address(view) != kind.address(x)
        assert exported_address(adapter_for(view).export(view)) == kind.address(view)


@pytest.mark.skipif(sys.platform != "linux", reason="sparse anonymous memory, /proc")
@by_mutable_kind
def test_huge_inputs_are_not_copied(kind: Kind) -> None:
    """A cache of 8 GiB of which a few pages exist: a copy would fill the machine."""
    pages, page_size, heads, dim = 1 << 18, 16, 1, 256
    memory = cases.sparse_memory(pages * 2 * page_size * heads * dim * 4)
    cache = np.frombuffer(memory, np.float32).reshape(pages, 2, page_size, heads, dim)
    cache[pages - 1, 1] = 3.0
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(),
        flashbsr.TaskInfo(num_qo_heads=1, num_kv_heads=1, head_dim_qk=dim),
    )
    table = np.array([0, 2]), np.array([pages - 1, 7])
    attention.plan(flashbsr.Paged(None, *table, last_page_len=np.array([16]), page_size=page_size))
    q, x = kind.put(np.ones((1, 1, dim), np.float32)), kind.put(cache)

    def resident() -> int:
        pages_in_memory = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages_in_memory * mmap.PAGESIZE

    before = resident()
    out = attention.run(q, x)
    assert resident() - before < 64 << 20
    assert (kind.get(out) == 1.5).all()


@by_kind
def test_outputs_of_consecutive_runs_are_apart(kind: Kind) -> None:
    """A result that the caller holds is not overwritten by the next run."""
    problem = build(cases.DECODE)
    attention = attention_for(problem)
    problem.plan(attention)
    q, kv = all_of(kind, problem)
    first = attention.run(q, kv)
    kept = np.array(kind.get(first))
    second = attention.run(kind.put((-problem.q).astype(problem.q.dtype)), kv)
    np.testing.assert_array_equal(kind.get(first), kept)
    assert (kind.get(second) != kept).any()


# --- JAX


def test_jax_results_are_adopted() -> None:
    """An array that is still being computed goes in; the result is JAX's, usable in jit."""
    x = jax.random.normal(jax.random.key(0), (1, 40, 2, 16))
    q = jax.jit(lambda y: y @ jnp.eye(16))(x)
    out = flashbsr.attention(q, x, x, causal=True)
    assert isinstance(out, jax.Array)
    assert out.devices() == q.devices()
    twice = jax.jit(lambda y: 2 * y)(out)
    np.testing.assert_array_equal(np.asarray(twice), 2 * np.asarray(out))
    del x, q
    np.testing.assert_array_equal(np.asarray(out)[0], np.asarray(out)[0])


def test_jax_arrays_are_immutable() -> None:
    x = jnp.ones((3, 2, 8))
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), flashbsr.TaskInfo(2, 2, 8))
    attention.plan(flashbsr.Ragged(np.array([0, 3]), np.array([0, 3])))
    with pytest.raises(flashbsr.FlashbsrError, match=r"^out\b"):
        attention.run(x, (x, x), out=jnp.zeros((3, 2, 8)))
    with pytest.raises(flashbsr.FlashbsrError, match=r"^lse\b"):
        attention.run(x, (x, x), lse=jnp.zeros((3, 2)), return_lse=True)
    with pytest.raises(flashbsr.FlashbsrError, match=r"^q\b"):
        flashbsr.apply_rope_pos_ids_inplace(x, x, np.arange(3))


def test_jax_tracers_are_refused() -> None:
    x = jnp.ones((1, 3, 2, 8))
    with pytest.raises(TypeError, match=r"^q\b.*traced"):
        jax.jit(lambda q: flashbsr.attention(q, x, x))(x)
    rows = x[0]
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), flashbsr.TaskInfo(2, 2, 8))
    attention.plan(flashbsr.Ragged(np.array([0, 3]), np.array([0, 3])))
    with pytest.raises(TypeError, match=r"^q\b.*traced"):
        jax.jit(lambda q: attention.run(q, (rows, rows)))(rows)


# --- mixed


@pytest.mark.parametrize("q_kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("kv_kind", KINDS, ids=lambda kind: kind.name)
def test_mixed_kinds(q_kind: Kind, kv_kind: Kind) -> None:
    """The result is of q's kind, wherever the cache comes from."""
    for dtypes in (F32, BF16):
        problem = build(cases.DECODE.but("mixed", dtypes=dtypes, sinks=True))
        attention = attention_for(problem)
        problem.plan(attention)
        out, lse = attention.run(
            q_kind.put(problem.q),
            kv_kind.put(problem.kv),
            return_lse=True,
            sinks=kv_kind.put(problem.run_options["sinks"]),
        )
        assert isinstance(out, q_kind.array)
        assert isinstance(lse, q_kind.array)
        compare(problem, q_kind.get(out), q_kind.get(lse))


def test_out_of_another_kind() -> None:
    """`out` is what is given, whatever q is."""
    problem = build(cases.PREFILL)
    attention = attention_for(problem)
    problem.plan(attention)
    memory, _ = problem.new_outputs()
    out = to_torch(memory)
    assert attention.run(problem.q, problem.kv, out=out) is out
    compare(problem, memory, None)


def test_numpy_subclasses_and_read_only_arrays(tmp_path: Path) -> None:
    """Memmap is an ndarray; inputs may be read-only, outputs may not."""
    problem = build(Case("memmap", (5,), (9,), variant=Variant(causal=True)))
    q = np.memmap(tmp_path / "q", np.float32, "w+", shape=problem.q.shape)
    q[...] = problem.q
    k, v = (x.copy() for x in problem.kv)
    for x in (q, k, v):
        x.flags.writeable = False
    attention = attention_for(problem)
    problem.plan(attention)
    compare(problem, *attention.run(q, (k, v), return_lse=True))
    out = np.zeros((5, 4, 64), np.float32)
    out.flags.writeable = False
    with pytest.raises(TypeError, match=r"^out\b.*read-only"):
        attention.run(q, (k, v), out=out)
    assert (out == 0).all()


# --- the other functions


@by_kind
def test_merge(kind: Kind) -> None:
    rng = np.random.default_rng(0)
    v = [rng.standard_normal((5, 2, 16)).astype(DTYPES["bfloat16"]) for _ in range(2)]
    s = [rng.standard_normal((5, 2)).astype(np.float32) for _ in range(2)]
    expected = flashbsr.merge_state(v[0], s[0], v[1], s[1])
    result = flashbsr.merge_state(*map(kind.put, (v[0], s[0], v[1], s[1])))
    states = flashbsr.merge_states(kind.put(np.stack(v, 1)), kind.put(np.stack(s, 1)))
    for got, also, want in zip(result, states, expected, strict=True):
        assert isinstance(got, kind.array)
        assert isinstance(also, kind.array)
        np.testing.assert_array_equal(kind.get(got), want)
        np.testing.assert_array_equal(kind.get(also), want)
    if kind is not JAX:
        v0, s0 = kind.put(v[0]), kind.put(s[0])
        flashbsr.merge_state_in_place(v0, s0, kind.put(v[1]), kind.put(s[1]))
        np.testing.assert_array_equal(kind.get(v0), expected[0])
        np.testing.assert_array_equal(kind.get(s0), expected[1])


@by_kind
def test_rope(kind: Kind) -> None:
    x = np.random.default_rng(0).standard_normal((5, 2, 16)).astype(DTYPES["bfloat16"])
    positions = np.arange(5, dtype=np.int32)
    expected = flashbsr.apply_rope_pos_ids(x, x, positions)[0]
    q, k = flashbsr.apply_rope_pos_ids(kind.put(x), kind.put(x), kind.put(positions))
    for got in (q, k):
        assert isinstance(got, kind.array)
        np.testing.assert_array_equal(kind.get(got), expected)


@by_kind
def test_bits(kind: Kind) -> None:
    x = np.random.default_rng(0).random(100) < 0.5
    packed = flashbsr.packbits(kind.put(x), "little")
    assert isinstance(packed, kind.array)
    np.testing.assert_array_equal(kind.get(packed), np.packbits(x, bitorder="little"))
    packed, indptr = flashbsr.segment_packbits(
        kind.put(x), kind.put(np.array([0, 3, 100], np.int32)), "little"
    )
    assert isinstance(packed, kind.array)
    assert isinstance(indptr, kind.array)
    np.testing.assert_array_equal(kind.get(indptr), [0, 1, 14])


@by_mutable_kind
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_append(kind: Kind, dtype: str) -> None:
    """The cache is written where it lies."""
    memory = np.zeros((3, 2, 4, 1, 8), DTYPES[dtype])
    cache = kind.put(memory)
    rows = np.ones((2, 1, 8), np.float32).astype(DTYPES[dtype])
    indices = (
        np.array([0, 0]),
        np.array([3, 4]),
        np.array([2, 0]),
        np.array([0, 2]),
        np.array([1]),
    )
    batch_indices, positions, kv_indices, kv_indptr, last = (
        kind.put(x.astype(np.int32)) for x in indices
    )
    flashbsr.append_paged_kv_cache(
        kind.put(rows), kind.put(rows), batch_indices, positions, cache, kv_indices, kv_indptr, last
    )
    expected = np.zeros(memory.shape, np.float32)
    expected[2, :, 3] = expected[0, :, 0] = 1
    np.testing.assert_array_equal(memory.astype(np.float32), expected)


@by_kind
def test_index_functions(kind: Kind) -> None:
    lens = flashbsr.get_seq_lens(
        kind.put(np.array([0, 2, 2, 5], np.int32)), kind.put(np.array([3, 0, 4], np.int32)), 4
    )
    assert isinstance(lens, kind.array)
    assert kind.get(lens).tolist() == [7, 0, 12]
    batch_indices, positions = flashbsr.get_batch_indices_positions(
        kind.put(np.array([0, 1, 1, 3], np.int32)), lens, 4
    )
    assert isinstance(positions, kind.array)
    assert kind.get(batch_indices).tolist() == [0, 2, 2, -1]
    assert kind.get(positions).tolist()[:3] == [6, 10, 11]


@pytest.mark.skipif(has_gpu(), reason="the stand-in's memory is the host's")
def test_cupy_arrays_are_refused_by_name() -> None:
    """Without a GPU a CuPy array is refused, naming it. (A stand-in: CuPy itself needs a GPU.)"""
    memory = np.ones((1, 3, 2, 8), np.float16)

    class Ordinal:
        id = 1

    class ndarray:  # noqa: N801
        device = Ordinal

        def __init__(self, x: np.ndarray) -> None:
            self.x, self.dtype, self.shape, self.strides = x, x.dtype, x.shape, x.strides

        def reshape(self, shape: tuple[int, ...]) -> ndarray:
            return ndarray(self.x.reshape(shape))

        def __dlpack__(self, stream: int) -> Any:
            assert stream == -1
            capsule = self.x.__dlpack__()
            pointer = ctypes.pythonapi.PyCapsule_GetPointer
            pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            head = ctypes.cast(pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
            head.device[:] = 2, 1
            return capsule

    ndarray.__module__ = "cupy"
    there = ndarray(memory)
    for args in ((there, memory, memory), (there, there, there)):
        with pytest.raises(flashbsr.errors.DeviceError, match=r"^q\b.*cuda:1.*host memory"):
            flashbsr.attention(*args)
    with pytest.raises(flashbsr.errors.DeviceError, match=r"^k\b.*cuda:1.*host memory"):
        flashbsr.attention(memory, there, memory)
