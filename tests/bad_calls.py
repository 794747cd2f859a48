# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The table of bad calls: each row changes one thing of a call that is good.

`GOOD` are the calls, which read their arrays from a `World`; a row says which call, the name that
the error must give, and the change. Arrays are made and changed in NumPy; `World.call` takes them
to the world's device, and the world remembers what must not change.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import flashbsr
import ml_dtypes
import numpy as np
import pytest
from harness import CPU, Device

F32 = np.float32
I32 = np.int32
BF16 = ml_dtypes.bfloat16
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
HUGE = 2**40


def i32(*values: int) -> np.ndarray:
    return np.array(values, I32)


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


class World:
    """A batch of three requests (3, 1, 2 query tokens; 10, 4, 3 KV tokens), 4 query heads on 2.

    Attention is float32 on the CPU, float16 on CUDA, which has no float32 kernels.
    """

    def __init__(self, device: Device = CPU) -> None:
        self.device = device
        self._sent: list[tuple[np.ndarray, Any]] = []
        rng = np.random.default_rng(0)
        dtype = np.float16 if device.is_cuda else F32

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(dtype)

        self.q = normal(6, 4, 16)
        self.k, self.v = normal(17, 2, 16), normal(17, 2, 16)
        self.cache = normal(7, 2, 4, 2, 16)
        self.k_cache, self.v_cache = normal(7, 4, 2, 16), normal(7, 4, 2, 16)
        self.out, self.lse = np.full((6, 4, 16), np.nan, dtype), np.full((6, 4), np.nan, F32)
        self.rows = normal(5, 2, 16)
        self.states = normal(6, 4, 16)
        self.state_lse = normal(6, 4).astype(F32)
        self.before = self.bits()

    def bits(self) -> list[bytes]:
        return [x.tobytes() for x in vars(self).values() if isinstance(x, np.ndarray)]

    def send(self, x: Any) -> Any:
        """Take an array, or a tuple of arrays, to the device with its strides; else `x` itself."""
        if isinstance(x, tuple):
            return tuple(map(self.send, x))
        if self.device is CPU or not isinstance(x, np.ndarray):
            return x
        if x.dtype.kind == "O" or not x.dtype.isnative:
            return x  # no tensor can hold it
        # From the first element to the last, whatever lies between.
        steps = [stride // x.itemsize for stride in x.strides]
        last = sum((n - 1) * step for n, step in zip(x.shape, steps, strict=True))
        count = last + 1 if x.size else 0
        bits = x.view(np.uint8) if x.itemsize == 1 else x  # as_strided does not know float8
        span = np.lib.stride_tricks.as_strided(bits, (count,), (x.itemsize,)).view(x.dtype)
        sent = self.device.put(span).as_strided(x.shape, steps, 0)
        self._sent.append((x, sent))
        return sent

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function` of arguments on the device."""
        return function(
            *map(self.send, args), **{name: self.send(value) for name, value in kwargs.items()}
        )

    def untouched(self) -> bool:
        """Whether the world and everything that was sent are what they were."""
        return self.bits() == self.before and all(
            self.device.get(sent).tobytes() == x.tobytes() for x, sent in self._sent
        )


PAGED: dict[str, Any] = {
    "qo_indptr": i32(0, 3, 4, 6),
    "kv_indptr": i32(0, 3, 4, 5),
    "kv_indices": i32(6, 0, 2, 5, 1),
    "last_page_len": i32(2, 4, 3),
    "page_size": 4,
}
RAGGED: dict[str, Any] = {"qo_indptr": i32(0, 3, 4, 6), "kv_indptr": i32(0, 10, 14, 17)}
TABLE: dict[str, Any] = {
    "qo_indptr": i32(0, 3, 4, 6),
    "kv_lens": i32(10, 4, 3),
    "block_tables": np.array([[6, 0, 2], [5, -1, -1], [1, -1, -1]], I32),
    "page_size": 4,
}
LEVELS: dict[str, Any] = {
    "qo_indptr": (i32(0, 6), i32(0, 3, 4, 6)),
    "kv_indptr": (i32(0, 2), i32(0, 1, 2, 3)),
    "kv_indices": (i32(6, 0), i32(2, 5, 1)),
    "last_page_len": (i32(4), i32(2, 4, 3)),
    "page_size": 4,
}
BSR: dict[str, Any] = {
    "indptr": i32(0, 2, 3),
    "indices": i32(0, 3, 1),
    "shape": (6, 16),
    "block": (3, 4),
}
TASK: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 16}


def engine(w: World, spec: dict[str, Any] | None = None, **task: Any) -> flashbsr.Attention:
    return flashbsr.Attention(
        flashbsr.AttentionSpec(**(spec or {})),
        flashbsr.TaskInfo(**{**TASK, "backend": w.device.backend, **task}),
    )


def make_spec(w: World, **changes: Any) -> Any:
    return w.call(flashbsr.AttentionSpec, **changes)


def make_yarn(w: World, **changes: Any) -> Any:
    return w.call(flashbsr.YarnScaling, **{"old_context_len": 4096, **changes})


def make_task(w: World, **changes: Any) -> Any:
    return w.call(flashbsr.TaskInfo, **{**TASK, **changes})


def make_engine(w: World, **changes: Any) -> Any:
    arguments = {
        "spec": flashbsr.AttentionSpec(),
        "task": flashbsr.TaskInfo(**TASK, backend=w.device.backend),
        "workspace": None,
    }
    return w.call(flashbsr.Attention, **{**arguments, **changes})


def planned(
    w: World,
    layout: Any,
    fields: dict[str, Any],
    attention: flashbsr.Attention,
    changes: dict[str, Any],
) -> flashbsr.Attention:
    """Plan the layout of `fields` with `changes`, of which those it has not are plan's."""
    names = {field.name for field in dataclasses.fields(layout)}
    own = {name: value for name, value in changes.items() if name in names}
    options = {name: value for name, value in changes.items() if name not in names}
    w.call(attention.plan, w.call(layout, **{**fields, **own}), **options)
    return attention


def plan_paged(w: World, task: dict[str, Any] | None = None, **changes: Any) -> Any:
    return planned(w, flashbsr.Paged, PAGED, engine(w, **(task or {})), changes)


def plan_ragged(w: World, task: dict[str, Any] | None = None, **changes: Any) -> Any:
    return planned(w, flashbsr.Ragged, RAGGED, engine(w, **(task or {})), changes)


def plan_table(w: World, task: dict[str, Any] | None = None, **changes: Any) -> Any:
    return planned(w, flashbsr.BlockTable, TABLE, engine(w, **(task or {})), changes)


def plan_levels(w: World, task: dict[str, Any] | None = None, **changes: Any) -> Any:
    return planned(w, flashbsr.Levels, LEVELS, engine(w, **(task or {})), changes)


def plan_bsr(w: World, task: dict[str, Any] | None = None, **changes: Any) -> Any:
    return planned(w, flashbsr.Bsr, BSR, engine(w, **(task or {})), changes)


def plan_anything(w: World, layout: Any = None) -> Any:
    engine(w).plan(flashbsr.Ragged(**RAGGED) if layout is None else layout)


def run_paged(
    w: World, spec: dict[str, Any] | None = None, task: dict[str, Any] | None = None, **changes: Any
) -> Any:
    attention = planned(w, flashbsr.Paged, PAGED, engine(w, spec, **(task or {})), {})
    return w.call(attention.run, **{"q": w.q, "kv": w.cache, **changes})


def run_pair(w: World, task: dict[str, Any] | None = None, k: Any = None, v: Any = None) -> Any:
    attention = planned(w, flashbsr.Paged, PAGED, engine(w, **(task or {})), {})
    return w.call(
        attention.run, w.q, (w.k_cache if k is None else k, w.v_cache if v is None else v)
    )


def run_ragged(w: World, spec: dict[str, Any] | None = None, **changes: Any) -> Any:
    attention = planned(w, flashbsr.Ragged, RAGGED, engine(w, spec), {})
    return w.call(attention.run, **{"q": w.q, "kv": (w.k, w.v), **changes})


def run_unplanned(w: World) -> Any:
    return w.call(engine(w).run, w.q, (w.k, w.v))


def run_out(w: World, **changes: Any) -> Any:
    """Writes into scratch copies, so that the world stays."""
    return run_ragged(
        w, **{"out": w.out.copy(), "lse": w.lse.copy(), "return_lse": True, **changes}
    )


APPEND: dict[str, Any] = {
    "batch_indices": i32(0, 0, 1, 2, -1),
    "positions": i32(8, 9, 3, 2, 99),
    "kv_indices": PAGED["kv_indices"],
    "kv_indptr": PAGED["kv_indptr"],
    "kv_last_page_len": PAGED["last_page_len"],
}


def append(w: World, **changes: Any) -> Any:
    """Into a copy of the cache if the call is good, into the cache itself if it is bad."""
    arguments = {
        "append_key": w.rows,
        "append_value": w.rows,
        "paged_kv_cache": w.cache if changes else w.cache.copy(),
        **APPEND,
    }
    return w.call(flashbsr.append_paged_kv_cache, **{**arguments, **changes})


def rope_append(w: World, **changes: Any) -> Any:
    """Likewise."""
    arguments = {
        "q": w.rows,
        "append_key": w.rows,
        "append_value": w.rows,
        "paged_kv_cache": w.cache if changes else w.cache.copy(),
        **APPEND,
    }
    return w.call(flashbsr.rope_append_paged_kv_cache, **{**arguments, **changes})


def merge(w: World, **changes: Any) -> Any:
    arguments = {"v_a": w.states, "s_a": w.state_lse, "v_b": w.states, "s_b": w.state_lse}
    return w.call(flashbsr.merge_state, **{**arguments, **changes})


def merge_in_place(w: World, **changes: Any) -> Any:
    v, s = (w.states, w.state_lse) if changes else (w.states.copy(), w.state_lse.copy())
    arguments = {"v": v, "s": s, "v_other": w.out, "s_other": w.state_lse}
    return w.call(flashbsr.merge_state_in_place, **{**arguments, **changes})


def merge_many(w: World, **changes: Any) -> Any:
    arguments = {"v": np.stack([w.states] * 3, 1), "s": np.stack([w.state_lse] * 3, 1)}
    return w.call(flashbsr.merge_states, **{**arguments, **changes})


def rope(w: World, **changes: Any) -> Any:
    arguments = {"q": w.q, "k": w.q, "indptr": i32(0, 4, 6), "offsets": i32(0, 5)}
    return w.call(flashbsr.apply_rope, **{**arguments, **changes})


def rope_ids(w: World, **changes: Any) -> Any:
    arguments = {"q": w.q, "k": w.q, "pos_ids": i32(0, 1, 2, 3, 4, 5)}
    return w.call(flashbsr.apply_rope_pos_ids, **{**arguments, **changes})


def rope_cache(w: World, **changes: Any) -> Any:
    arguments = {
        "positions": i32(0, 1, 2, 3, 4, 5),
        "query": w.q.reshape(6, -1),
        "key": w.q.reshape(6, -1),
        "head_size": 16,
        "cos_sin_cache": np.ones((8, 16), F32),
    }
    return w.call(flashbsr.apply_rope_with_cos_sin_cache, **{**arguments, **changes})


def bits(w: World, **changes: Any) -> Any:
    return w.call(flashbsr.packbits, **{"x": np.ones(9, bool), **changes})


def segment_bits(w: World, **changes: Any) -> Any:
    arguments = {"x": np.ones(9, bool), "indptr": i32(0, 4, 9)}
    return w.call(flashbsr.segment_packbits, **{**arguments, **changes})


def seq_lens(w: World, **changes: Any) -> Any:
    arguments = {"kv_indptr": i32(0, 2, 3), "kv_last_page_len": i32(1, 4), "page_size": 4}
    return w.call(flashbsr.get_seq_lens, **{**arguments, **changes})


def batch_positions(w: World, **changes: Any) -> Any:
    arguments = {"append_indptr": i32(0, 2, 3), "seq_lens": i32(5, 4), "nnz": 4}
    return w.call(flashbsr.get_batch_indices_positions, **{**arguments, **changes})


GOOD: list[Callable[..., Any]] = [
    make_spec,
    make_yarn,
    make_task,
    make_engine,
    plan_paged,
    plan_ragged,
    plan_table,
    plan_levels,
    plan_bsr,
    plan_anything,
    run_paged,
    run_pair,
    run_ragged,
    run_out,
    append,
    rope_append,
    merge,
    merge_in_place,
    merge_many,
    rope,
    rope_ids,
    rope_cache,
    bits,
    segment_bits,
    seq_lens,
    batch_positions,
]


class Bad(NamedTuple):
    """A bad call: `names` is a pattern for the argument that the message must begin with."""

    call: Callable[..., Any]
    names: str
    why: str
    changes: dict[str, Any] | Callable[[World], dict[str, Any]]
    #: Only who reads the array can see it: the helper functions bring it back from a GPU if asked.
    contents: bool = False
    #: About what the CPU has not got, or before any array.
    cpu_only: bool = False


def check_good(call: Callable[..., Any], device: Device) -> None:
    """A call is good until something is changed, and leaves the world alone as well."""
    world = World(device)
    call(world)
    assert world.bits() == world.before


def check_bad(bad: Bad, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises, names the argument, and leaves every array as it was."""
    if device.is_cuda and (bad.cpu_only or bad.call in (make_spec, make_task)):
        pytest.skip("not a matter of arrays on a GPU")
    if bad.contents:
        monkeypatch.setenv("FLASHBSR_CHECK", "1")  # the CPU looks anyway
    world = World(device)
    changes = bad.changes(world) if callable(bad.changes) else bad.changes
    with pytest.raises(flashbsr.FlashbsrError) as caught:
        bad.call(world, **changes)
    error = caught.value
    assert re.fullmatch(rf"(?:{bad.names})\b.*", error.argument), error
    assert str(error) == f"{error.argument}: got {error.actual}; expected {error.expected}"
    assert error.expected
    assert error.code in {
        "value",
        "shape",
        "dtype",
        "device",
        "index",
        "capacity",
        "plan",
        "unsupported",
    }
    assert world.untouched()
