# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Handlers of XLA's programs for CUDA, on the fake driver. test_fake_cuda.py runs this file.

`call` stands in for XLA: it makes the frame of a node as cpp/xla/ffi.h declares it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import flashbsr
import numpy as np
import pytest
import torch
from flashbsr import _core

from fake_cuda.fake import Driver
from fake_cuda.world import DIM, HEADS, PAGE, PAGES, World, check, planned

pytestmark = pytest.mark.usefixtures("fake_torch")

P, I32, I64, SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t


def _struct(name: str, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


HEAD = {"bytes": SIZE, "extensions": P}
Version = _struct("Version", **HEAD, major=I32, minor=I32)
Buffer = _struct("Buffer", **HEAD, type=I32, data=P, rank=I64, dims=P)
Buffers = _struct("Buffers", **HEAD, size=I64, kinds=P, items=P)
Text = _struct("Text", data=ctypes.c_char_p, size=SIZE)
Scalar = _struct("Scalar", type=I32, value=P)
Attributes = _struct("Attributes", **HEAD, size=I64, kinds=P, names=P, items=P)
NewFailure = _struct("NewFailure", **HEAD, text=ctypes.c_char_p, code=I32)
GetStream = _struct("GetStream", **HEAD, context=P, stream=P)
GetDevice = _struct("GetDevice", **HEAD, context=P, ordinal=I32)
FAILS = ctypes.CFUNCTYPE(P, ctypes.POINTER(NewFailure))
STREAM = ctypes.CFUNCTYPE(P, ctypes.POINTER(GetStream))
DEVICE = ctypes.CFUNCTYPE(P, ctypes.POINTER(GetDevice))
Api = _struct(
    "Api", **HEAD, version=Version, internal=P, new_failure=FAILS, others=P * 3, get_stream=STREAM,
    more=P * 12, get_device=DEVICE,
)  # fmt: skip
Frame = _struct(
    "Frame", **HEAD, api=P, context=P, stage=I32, operands=Buffers, results=Buffers,
    attributes=Attributes,
)  # fmt: skip
Metadata = _struct("Metadata", bytes=SIZE, version=Version, traits=ctypes.c_uint32)
Extension = _struct("Extension", bytes=SIZE, kind=I32, next=P, metadata=P)

TYPES = {"float32": 11, "float16": 10, "int32": 4, "int64": 5}


def handler(name: str, on_cuda: bool) -> Any:
    capsule = _core.xla_targets()[name][on_cuda]
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = P, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.CFUNCTYPE(P, P)(get(capsule, None))


def _made(struct: Any, **values: Any) -> Any:
    return struct(bytes=ctypes.sizeof(struct), **values)


class Call:
    """A node, and what XLA would keep for it; the memory of arrays is the fake GPU's."""

    def __init__(self, stream: int = 0, device: int = 0, size: int | None = None) -> None:
        self.errors: list[str] = []
        self.kept: list[Any] = []

        def fails(args: Any) -> int:
            self.errors.append(args.contents.text.decode())
            return 1

        def get_stream(args: Any) -> None:
            args.contents.stream = stream

        def get_device(args: Any) -> None:
            args.contents.ordinal = device

        self.api = _made(
            Api, version=Version(ctypes.sizeof(Version), None, 0, 9), new_failure=FAILS(fails),
            get_stream=STREAM(get_stream), get_device=DEVICE(get_device),
        )  # fmt: skip
        self.api.bytes = size or self.api.bytes

    def _array(self, ctype: Any, values: list[Any]) -> Any:
        array = (ctype * max(len(values), 1))(*values)
        self.kept.append(array)
        return ctypes.addressof(array)

    def _buffers(self, arrays: list[np.ndarray]) -> Any:
        items = []
        for x in arrays:
            assert x.flags.c_contiguous
            dims = self._array(I64, list(x.shape))
            self.kept += [
                x,
                _made(Buffer, type=TYPES[x.dtype.name], data=x.ctypes.data, rank=x.ndim, dims=dims),
            ]
            items.append(ctypes.addressof(self.kept[-1]))
        size = len(items)
        return _made(
            Buffers, size=size, kinds=self._array(I32, [1] * size), items=self._array(P, items)
        )

    def _attributes(self, attributes: dict[str, Any]) -> Any:
        kinds, names, items = [], [], []
        for name, value in attributes.items():
            self.kept.append(Text(name.encode(), len(name)))
            names.append(ctypes.addressof(self.kept[-1]))
            if isinstance(value, str):
                kinds.append(4)
                self.kept.append(Text(value.encode(), len(value)))
            else:
                kinds.append(3)
                number = ctypes.c_double(value)
                self.kept += [number, Scalar(12, ctypes.addressof(number))]
            items.append(ctypes.addressof(self.kept[-1]))
        return _made(
            Attributes, size=len(items), kinds=self._array(I32, kinds),
            names=self._array(P, names), items=self._array(P, items),
        )  # fmt: skip

    def __call__(
        self, name: str, operands: dict[str, Any], results: list[Any], **attributes: Any
    ) -> str:
        """Text of the error, or nothing."""
        frame = _made(
            Frame, api=ctypes.addressof(self.api), stage=3,
            operands=self._buffers(list(operands.values())), results=self._buffers(results),
            attributes=self._attributes({"names": ",".join(operands), **attributes}),
        )  # fmt: skip
        failed = handler(name, True)(ctypes.addressof(frame))
        assert bool(failed) == bool(self.errors)
        return "".join(self.errors)


def _named(attention: flashbsr.Attention) -> str:
    attention._engine.enter(attention._number, attention._how)
    return str(attention._number)


def _halves(world: World) -> dict[str, np.ndarray]:
    cache = world.cache.numpy()
    return {"k": cache[:, 0].copy(), "v": cache[:, 1].copy()}


def test_runs_are_put_on_the_stream_of_the_program(driver: Driver) -> None:
    world = World()
    attention, batch, rows = planned(world)
    stream = driver.stream()
    out, lse = np.zeros((rows, HEADS, DIM), np.float16), np.zeros((rows, HEADS), np.float32)
    operands = {"q": world.q[:rows].numpy(), **_halves(world)}
    call = Call(stream)
    assert not call("flashbsr_run", operands, [out, lse], numbers=_named(attention))
    assert not out.any()  # nothing was waited for
    driver.synchronize(stream)
    check(world, torch.from_numpy(out), batch, rows)
    assert np.isfinite(lse).all() and lse.any()
    assert attention.device == 0


def test_a_stacked_cache_and_later_plans(driver: Driver) -> None:
    world = World()
    attention, _, _ = planned(world)
    stream, number = driver.stream(), _named(attention)
    for lens in ([3, 90], [17], [1, 2, 3, 4, 5]):
        batch = world.batch(lens, seed=len(lens))
        attention.plan(batch)
        out = np.zeros((len(lens), HEADS, DIM), np.float16)
        operands = {"q": world.q[: len(lens)].numpy(), "kv": world.cache.numpy()}
        assert not Call(stream)("flashbsr_run", operands, [out], numbers=number)
        driver.synchronize(stream)
        check(world, torch.from_numpy(out), batch, len(lens))


def test_lengths_and_tables_come_from_the_program(driver: Driver) -> None:
    world = World()
    attention = world.attention()
    attention.plan(flashbsr.Bounds(None, [40, 40], page_size=PAGE))
    stream, tables = driver.stream(), np.arange(20, dtype=np.int32).reshape(2, 10)
    for lens in ([1, 40], [33, 7]):
        out = np.zeros((2, HEADS, DIM), np.float16)
        arrays = {"kv_lens": np.array(lens, np.int32), "block_tables": tables}
        operands = {"q": world.q[:2].numpy(), **_halves(world), **arrays}
        call = Call(stream)
        assert not call("flashbsr_run", operands, [out], numbers=_named(attention))
        driver.synchronize(stream)
        pages = [tables[i, : -(-n // PAGE)] for i, n in enumerate(lens)]
        batch = flashbsr.Paged(
            None, np.cumsum([0, *map(len, pages)]), np.concatenate(pages),
            kv_lens=np.array(lens), page_size=PAGE,
        )  # fmt: skip
        check(world, torch.from_numpy(out), batch, 2)


def test_a_program_of_two_gpus_has_an_attention_for_each(driver: Driver) -> None:
    world = World()
    first, batch, rows = planned(world)
    second, _, _ = planned(world)
    numbers = f"{_named(first)},{_named(second)}"
    operands = {"q": world.q[:rows].numpy(), **_halves(world)}
    for device in (0, 1):
        out = np.zeros((rows, HEADS, DIM), np.float16)
        stream = driver.stream()
        call = Call(stream, device)
        assert not call("flashbsr_run", operands, [out], numbers=numbers, attentions=2)
        driver.drain()
        check(world, torch.from_numpy(out), batch, rows)
    assert (first.device, second.device) == (0, 1)
    text = Call(0, 2)("flashbsr_run", operands, [out], numbers=numbers, attentions=2)
    assert "DeviceError: attention: got a node on device 2; expected one Attention" in text


def test_the_other_nodes_come_as_far_as_their_kernels() -> None:
    """The fake driver computes attention only, and a launch that fails is an error by name."""
    x, cache = np.zeros((3, 2, DIM), np.float16), np.zeros((PAGES, PAGE, 2, DIM), np.float16)
    rows, s = np.zeros(3, np.int32), np.zeros((3, 2), np.float32)
    append = {
        "append_key": x, "append_value": x, "k_cache": cache, "v_cache": cache, "slot_mapping": rows
    }  # fmt: skip
    nodes = {
        "append_paged_kv": ("flashbsr_append", append, [cache, cache], {}),
        "rope": ("flashbsr_rope", {"q": x, "k": x, "pos_ids": rows}, [x, x], {"rotary_dim": DIM}),
        "merge_state": ("flashbsr_merge", {"v_a": x, "s_a": s, "v_b": x, "s_b": s}, [x, s], {}),
    }
    for kernel, (name, operands, results, attributes) in nodes.items():
        text = Call(device=1)(name, operands, results, **attributes)
        assert f"CudaError: cuLaunchKernelEx of {kernel}" in text
        assert "on cuda:1" in text


def test_what_a_gpus_program_cannot_have_is_said() -> None:
    world = World()
    attention, _, rows = planned(world)
    out = np.zeros((rows, HEADS, DIM), np.float16)
    operands = {"q": world.q[:rows].numpy(), **_halves(world)}
    number = _named(attention)
    handle = {"handle": np.array(int(number), np.int32)}
    text = Call()("flashbsr_run", {**handle, **operands}, [out])
    assert "UnsupportedError: attention: got a handle in a GPU's program" in text
    old = Call(size=type(Call().api).more.offset)  # an interface without devices
    text = old("flashbsr_run", operands, [out], numbers=number)
    assert "UnsupportedError: jaxlib: got one that does not say where a node is" in text
    text = Call()("flashbsr_run", {"q": operands["q"], "k": operands["k"]}, [out], numbers=number)
    assert "v: got no operand" in text
    wrong = {**operands, "q": operands["q"][:1].copy()}
    text = Call()("flashbsr_run", wrong, [out[:1].copy()], numbers=number)
    assert f"PlanError: q: got 1 query rows; expected {rows}" in text
    assert not out.any()


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize(("theirs", "answer"), [(0, 1), (1, 1), (3, 3), (5, 5), (9, 5)])
def test_versions_and_traits(on_cuda: bool, theirs: int, answer: int) -> None:
    """Of the versions that are known, XLA's own; replayed may be whatever follows no plan."""
    for name in _core.xla_targets():
        metadata = _made(Metadata, traits=7)
        extension = Extension(ctypes.sizeof(Extension), 1, None, ctypes.addressof(metadata))
        call = Call()
        call.api.version.minor = theirs
        frame = _made(
            Frame, extensions=ctypes.addressof(extension), api=ctypes.addressof(call.api), stage=3
        )
        assert not handler(name, on_cuda)(ctypes.addressof(frame))
        assert (metadata.version.major, metadata.version.minor) == (0, answer)
        assert metadata.traits == int(on_cuda and name != "flashbsr_run")
