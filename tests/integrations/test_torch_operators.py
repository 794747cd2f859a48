# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The operators themselves: what they promise, exported programs, and how a process ends."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import flashbsr
import pytest
from harness import framework
from llama import Block

torch = framework("torch")
importlib.import_module("flashbsr.integrations.torch")  # its operators are called by name

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

PLANNED = flashbsr.Attention(flashbsr.AttentionSpec(), flashbsr.TaskInfo(4, 2, 16))
PLANNED.plan(flashbsr.Ragged([0, 2, 3], [0, 2, 5]))


def arrays() -> tuple[Any, ...]:
    """q, k, v, out and lse of the plan."""
    q, k = torch.randn(3, 4, 16), torch.randn(5, 2, 16)
    return q, k, torch.randn(5, 2, 16), torch.empty(3, 4, 16), torch.empty(3, 4)


def more() -> tuple[Any, ...]:
    return (None, torch.rand(2), None, 2.0, None, 0.5, torch.randn(4), None, None, False,
            None, None, None, None, [], [], [], [])  # fmt: skip


def new_rows(by_slots: bool = False) -> tuple[Any, ...]:
    cache, row = torch.zeros(3, 2, 4, 2, 16), torch.randn(3, 2, 16)
    table = [torch.tensor(x) for x in ([0, 0, 1], [2, 0, 1], [0, 2, 3], [1, 1])]
    places = (torch.tensor([11, 0, -1]), *[None] * 4) if by_slots else (None, *table)
    return row, row + 1, cache, None, torch.tensor([3, 4, 0]), *places, "NHD", 2.0, 1.0


FREQUENCIES = 16, False, 1.0, 1e4, None
STATES = torch.randn(3, 2, 8), torch.randn(3, 2)

CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "run": lambda: (PLANNED._operand, *arrays()),
    "run.number": lambda: (PLANNED._number, *arrays()),
    "run_with": lambda: (PLANNED._operand, *arrays(), *more()),
    "run_with.number": lambda: (PLANNED._number, *arrays(), *more()),
    "attention": lambda: (*(x[None] for x in arrays()[:3]), False, -1, None, None, None, None, True,
                          None),
    "append_paged_kv_cache": new_rows,
    "append_paged_kv_cache by slots": lambda: new_rows(True),
    "rope_append_paged_kv_cache": lambda: (torch.randn(3, 4, 16), torch.empty(3, 4, 16),
                                           *new_rows(), *FREQUENCIES, None),
    "apply_rope": lambda: (torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.empty(3, 4, 16),
                           torch.empty(3, 2, 16), torch.arange(3), None, None, *FREQUENCIES),
    "apply_rope_inplace": lambda: (torch.randn(3, 4, 16), torch.randn(3, 2, 16), None,
                                   torch.tensor([0, 3]), torch.tensor([5]), *FREQUENCIES),
    "apply_rope_with_cos_sin_cache": lambda: (
        torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.empty(3, 4, 16), torch.empty(3, 2, 16),
        torch.arange(3), torch.randn(5, 16), True),
    "apply_rope_with_cos_sin_cache_inplace": lambda: (
        torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.arange(3), torch.randn(5, 16), True),
    "merge_state": lambda: (*STATES, *STATES, torch.empty(3, 2, 8), torch.empty(3, 2), True),
    "merge_state_in_place": lambda: (*(x.clone() for x in STATES), *STATES,
                                     torch.tensor([True, False, True]), False),
    "merge_states": lambda: (torch.randn(3, 5, 2, 8), torch.randn(3, 5, 2), torch.empty(3, 2, 8),
                             torch.empty(3, 2), False),
    "get_batch_indices_positions": lambda: (
        torch.tensor([0, 1, 3]), torch.tensor([5, 2]), torch.empty(4, dtype=torch.int32),
        torch.empty(4, dtype=torch.int32)),
    "get_seq_lens": lambda: (torch.tensor([0, 2, 3]), torch.tensor([3, 1]), 16,
                             torch.empty(2, dtype=torch.int32)),
}  # fmt: skip


def operator(name: str) -> Any:
    packet, _, overload = name.partition(" ")[0].partition(".")
    return getattr(getattr(torch.ops.flashbsr, packet), overload or "default")


@pytest.mark.parametrize("name", CALLS)
def test_promises(name: str) -> None:
    """Schema, what is written, results without values, and the way through AOTAutograd."""
    torch.library.opcheck(operator(name), CALLS[name]())


def test_every_operator_is_checked() -> None:
    names = {
        schema.name.removeprefix("flashbsr::")
        + (f".{schema.overload_name}" * bool(schema.overload_name))
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("flashbsr::")
    }
    # Those of transformers: test_transformers_compiled.py.
    elsewhere = {f"transformers_{x}" for x in ("dense", "tell", "step")} | {"no_gradient"}
    assert names - elsewhere == {name.partition(" ")[0] for name in CALLS}


def test_operators_keep_strides() -> None:
    """K and V are views: a compiler that made them contiguous would copy a cache in each layer."""
    for name in CALLS:
        assert torch.Tag.needs_exact_strides in operator(name).tags


def test_a_number_that_is_gone() -> None:
    with pytest.raises(flashbsr.PlanError, match="keep the Attention"):
        torch.ops.flashbsr.run.default(torch.tensor(10**9), *arrays())


def test_a_capture_needs_a_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of a compiled program would not follow later plans, and nobody would see it."""
    from flashbsr.integrations.torch import attend

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(flashbsr.UnsupportedError, match="max_batch_size.*capacity"):
        attend._run_number_on_gpu(PLANNED._number, *arrays())
    bounded = flashbsr.Attention(
        flashbsr.AttentionSpec(),
        flashbsr.TaskInfo(4, 2, 16, max_batch_size=2, max_q_tokens=8, max_kv_pages=8),
    )
    bounded.plan(flashbsr.Ragged([0, 2, 3], [0, 2, 5]))
    given = arrays()
    attend._run_number_on_gpu(bounded._number, *given)
    torch.testing.assert_close(given[3], bounded.run(given[0], given[1:3]))


def test_plans_in_inference_mode_serve_outside() -> None:
    """The operand is a tensor that PyTorch also takes where it records."""
    with torch.inference_mode():
        one = flashbsr.Attention(flashbsr.AttentionSpec(), flashbsr.TaskInfo(4, 2, 16))
        one.plan(flashbsr.Ragged([0, 2, 3], [0, 2, 5]))
    q, k, v, *_ = arrays()
    q.requires_grad_()
    compiled = torch.compile(lambda q: one.run(q, (k, v)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q).detach(), one.run(q, (k, v)).detach())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_export(strict: bool, grad: bool) -> None:
    """Any number of rows; parameters may require gradients. The cache is written."""
    import numpy as np

    torch.manual_seed(0)
    block = Block("apart", hidden=64, heads=4, kv_heads=2, head_dim=16, inner=96)
    past = torch.randn(64, 2, 4, 2, 16)
    sizes = ([2, 3, 4], [7, 3, 9]), ([1, 5, 5, 2], [1, 9, 6, 2])
    batches = [(sum(q), block.plan(np.array(q), np.array(kv))) for q, kv in sizes]
    rows, requests = torch.export.Dim("rows"), torch.export.Dim("requests")
    dims = {0: rows}, {}, {0: rows}, {0: rows}, {0: torch.export.Dim("pages")}, {0: requests + 1}
    with torch.set_grad_enabled(grad):
        block.plan(*map(np.array, sizes[0]))
        program = torch.export.export(
            block, (torch.randn(batches[0][0], 64), past, *batches[0][1]),
            dynamic_shapes=(dims[0], {}, (*dims[2:], {0: requests})), strict=strict,
        )  # fmt: skip
        for program_ in (program, program.run_decompositions()):
            for (q_lens, kv_lens), (tokens, batch) in zip(sizes, batches, strict=True):
                block.plan(np.array(q_lens), np.array(kv_lens))
                x = torch.randn(tokens, 64)
                caches = [past.clone(), past.clone()]
                found = program_.module()(x, caches[0], *batch)
                torch.testing.assert_close(found, block(x, caches[1], *batch))
                torch.testing.assert_close(*caches)
                assert not torch.equal(caches[0], past)


def test_tensors_without_values_elsewhere() -> None:
    """What has no operator says where it belongs."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.ones(3, dtype=torch.int64)
    for call in (
        lambda: PLANNED.plan(flashbsr.Ragged(x, x)),
        lambda: flashbsr.packbits(x),
        lambda: PLANNED.settle(x) or PLANNED.run(torch.ones(3, 4, 16), (x, x)),
    ):
        with pytest.raises(flashbsr.DeviceError, match="without values.*before the compiled"):
            call()


ENDS = {
    "an operator made by hand": """
@torch.library.custom_op("by_hand::run", mutates_args=("out",))
def run(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> None:
    attention.run(q, (k, k), out=out)
run(q, k, torch.empty_like(q))
""",
    "a compiled program": """
f = torch.compile(lambda q, k: attention.run(q, (k, k)), fullgraph=True, backend="aot_eager")
f(q, k)
""",
    "an exported program": """
class Model(torch.nn.Module):
    def forward(self, q, k):
        return attention.run(q, (k, k))
torch.export.export(Model(), (q, k)).module()(q, k)
""",
    "a reference that is never let go of": """
import ctypes
ctypes.pythonapi.Py_IncRef(ctypes.py_object(attention))
""",
    "a call after the end": """
def late():
    try:
        attention.run(q, (k, k))
        print("it ran")
    except flashbsr.PlanError as error:
        print(error)
""",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_ends_without_a_word(how: str) -> None:
    """nanobind calls what an ended interpreter still holds a leak."""
    program = f"""
import atexit
late = lambda: None
atexit.register(lambda: late())  # after all that is registered later
import flashbsr, torch
attention = flashbsr.Attention(flashbsr.AttentionSpec(), flashbsr.TaskInfo(1, 1, 8))
attention.plan(flashbsr.Ragged([0, 1], [0, 1]))
q = k = torch.randn(1, 1, 8)
{ENDS[how]}"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        ""
        if how != "a call after the end"
        else "run: got a call while the interpreter ends; expected calls before that\n"
    )
