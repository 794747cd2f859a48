# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The table of arguments and what is made of it; the size of the door."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flashbsr
import flashbsr.flashinfer as flashinfer
import numpy as np
import pytest
from flashbsr.flashinfer._arguments import ARGUMENTS, argument

CLASSES = [getattr(flashinfer, name) for name in flashinfer.__all__ if "Wrapper" in name]
CLASSES += [flashinfer.BatchAttention, flashinfer.mla.BatchMLAPagedAttentionWrapper]
GRAPHS = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper  # needs a GPU
KINDS = {"spec", "task", "layout", "key", "plan", "run", "wrapper", "op", "nothing", "refused"}


def methods() -> Iterator[tuple[str, Callable[..., Any], tuple[str, ...]]]:
    """Constructors and public methods of the wrappers, with where their rows are looked up."""
    for cls in CLASSES:
        yield cls.__name__, cls.__init__, cls._context
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_"):
                yield f"{cls.__name__}.{name}", method, (name, *cls._context)


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    modules = [getattr(flashinfer, name) for name in flashinfer.__all__]
    for module in (flashinfer, *filter(inspect.ismodule, modules)):
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if inspect.isfunction(thing):
                yield f"{module.__name__}.{name}", thing


def test_rows() -> None:
    """Each says what it becomes, and the fields that it names exist."""
    fields = {
        "spec": {field.name for field in dataclasses.fields(flashbsr.AttentionSpec)},
        "task": {field.name for field in dataclasses.fields(flashbsr.TaskInfo)},
    }
    for name, row in ARGUMENTS.items():
        what, _, field = row.becomes.partition(":")
        assert what in KINDS, name
        assert row.kind and row.meaning, name
        assert row.meaning.endswith((".", ")")), name
        if what in fields:
            assert (field or name.rpartition(".")[2].removesuffix("_p")) in fields[what], name


def test_every_argument_has_a_row_and_every_row_an_argument() -> None:
    used = set()
    signatures = [*methods(), *((name, f, ()) for name, f in functions())]
    contexts = {"one", "single", "tables", "cudnn", "merge", "states", "cuda"}
    for name, function, context in signatures:
        for parameter in list(inspect.signature(function).parameters):
            if parameter == "self":
                continue
            own = "flashbsr.ops" not in function.__module__
            for where in (context, *((c,) for c in contexts)):
                for key in (*(f"{x}.{parameter}" for x in where), parameter):
                    used.add(key)
                    used.add(key.removesuffix("_p").removesuffix("_d"))
            if own and context:
                assert argument(parameter, context), (name, parameter)
    assert set(ARGUMENTS) <= used, set(ARGUMENTS) - used


@pytest.mark.parametrize(
    ("name", "function"),
    [(cls.__name__, cls) for cls in CLASSES]
    + [(name, method) for name, method, _ in methods() if not method.__name__.startswith("_")]
    + list(functions()),
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_docstrings(name: str, function: Any) -> None:
    """Every public callable describes each of its arguments, and nothing else."""
    doc = inspect.getdoc(function)
    assert doc, name
    target = function.__init__ if inspect.isclass(function) else function
    parameters = [p for p in inspect.signature(target).parameters if p != "self"]
    described = re.findall(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*) ?:? ?.*$", section(doc), re.MULTILINE)
    names = {n.strip("* ") for entry in described for n in entry.split(",")}
    assert names == set(parameters) or "flashbsr.ops" in target.__module__, names ^ set(parameters)
    for parameter in parameters:
        assert re.search(rf"\b{parameter}\b", doc), (name, parameter)


def section(doc: str) -> str:
    """Parameters of a docstring."""
    parts = re.split(r"\n(\w+)\n-+\n", doc)
    return dict(zip(parts[1::2], parts[2::2], strict=True)).get("Parameters", "")


def test_refused_options_are_refused() -> None:
    """Of every method with options that are: by name, with the reason."""
    planned = flashinfer.BatchPrefillWithPagedKVCacheWrapper()
    one = np.array([0, 1])
    planned.plan(one, one, np.array([0]), np.array([1]), 1, 1, 64, 4)
    q, cache = np.ones((1, 1, 64), np.float16), np.ones((1, 2, 4, 1, 64), np.float16)
    seen = set()
    for name, function, context in methods():
        for parameter in inspect.signature(function).parameters:
            if parameter == "self" or argument(parameter, context).becomes != "refused":
                continue
            cls = next(cls for cls in CLASSES if cls.__name__ == name.partition(".")[0])
            method, option = function.__name__, {parameter: 2}
            if parameter == "args" or issubclass(cls, GRAPHS):
                continue
            seen.add((cls.__name__, method, parameter))
            with pytest.raises(flashbsr.UnsupportedError) as caught:
                call(cls, method, option, q, cache)
            assert caught.value.argument == parameter
            assert argument(parameter, context).meaning in caught.value.expected
    assert len(seen) > 10
    table: Any = {
        "block_tables": np.zeros((1, 1), int),
        "seq_lens": np.ones(1, int),
        "max_seq_len": 1,
    }
    for parameter in ("mask", "o_sf_scale", "bmm1_scale_log2"):
        with pytest.raises(flashbsr.UnsupportedError, match=rf"^{parameter}\b"):
            flashinfer.trtllm_batch_decode_with_kv_cache(
                q, cache, None, **table, **{parameter: np.ones(1)}
            )


def call(cls: Any, method: str, option: dict[str, Any], q: Any, cache: Any) -> None:
    """Call a method with one option beside what it needs."""
    one, page = np.array([0, 1]), np.array([0])
    needed: dict[str, Any] = {
        "num_levels": 1, "qo_indptr": one, "indptr": one, "kv_indptr": one, "paged_kv_indptr": one,
        "indices": page, "kv_indices": page, "paged_kv_indices": page, "last_page_len": page + 1,
        "paged_kv_last_page_len": page + 1, "kv_len_arr": page + 1, "num_qo_heads": 1,
        "num_kv_heads": 1, "head_dim": 64, "head_dim_qk": 64, "head_dim_vo": 64, "page_size": 4,
        "M": 1, "N": 4, "R": 1, "C": 4, "q": q, "paged_kv_cache": cache, "kv_cache": cache,
        "k": q, "v": q, "block_mask_map": np.ones((1, 1, 1), bool), "sink": np.ones(1, np.float32),
        "block_row_sz": np.ones((1, 1), int), "block_col_sz": np.ones((1, 1), int),
        "workspace_buffer": None, "indptr_buffer": None, "indices_buffer": None,
        "last_page_len_buffer": None, "qo_indptr_arr": [one], "paged_kv_indptr_arr": [one],
        "paged_kv_indices_arr": [page], "num_heads": 1, "head_dim_ckv": 512, "head_dim_kpe": 64,
        "causal": False, "sm_scale": 1.0, "q_data_type": "float16", "q_nope": q, "q_pe": q,
        "ckv_cache": cache, "kpe_cache": cache,
    }  # fmt: skip

    def of(function: Any) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters
        return {
            name: needed[name]
            for name, p in parameters.items()
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and name != "self"
        }

    if method == "__init__":
        cls(**of(cls.__init__), **option)
        return
    wrapper = cls(**of(cls.__init__))
    if method == "run":
        given = of(cls.plan)
        if "qo_indptr_arr" in given:
            given["paged_kv_last_page_len"] = [page + 1]
        wrapper.plan(**given)
    getattr(wrapper, method)(**of(getattr(cls, method)), **option)


def test_the_door_is_small() -> None:
    folder = Path(inspect.getfile(flashinfer)).parent
    sizes = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.py")}
    assert max(sizes.values()) < 400, sizes
    assert sizes.pop("mla.py") < 200  # of a kind of attention of its own
    # What writes codes, and float8 with a rotation.
    assert sizes.pop("quantized.py") < 200
    assert sizes.pop("rope.py") < 220
    assert sum(sizes.values()) < 3000, sizes
