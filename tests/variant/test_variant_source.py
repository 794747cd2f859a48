# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Variants from C++ text: every hook, every kind of extra, and what is refused."""

from __future__ import annotations

import shutil
import threading
import time

import cases
import ml_dtypes
import numpy as np
import pytest
from flashbsr import (
    Attention,
    AttentionSpec,
    DeviceError,
    DTypeError,
    FlashbsrError,
    Ragged,
    ShapeError,
    TaskInfo,
    UnsupportedError,
)
from flashbsr.jit import cache, cxx
from harness import CPU, DEVICES, check_variant
from reference import Hooks, Variant

CAUSAL = Variant(causal=True)
# Few rows and many, tiles that are split, three types of products.
SHAPES = [
    cases.MIXED,
    cases.DECODE,
    cases.PREFILL.but("bf16", dtypes=cases.BF16),
    cases.DECODE.but("split", dtypes=cases.F16, task={"fixed_split_size": 64}),
    cases.PREFILL.but("split", task={"fixed_split_size": 32}, dims=(72, 40)),
]


pytestmark = pytest.mark.usefixtures("kernel_cache")


def sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


FLASH_SIGMOID = """
struct FlashSigmoid : flashbsr::VariantBase {
  static constexpr bool use_softmax = false;
  template <class M> auto activation(typename M::Float x) const { return M::sigmoid(x + bias); }
};
"""

SOFT_CAP = """
// Of the logit, then a bias by head and by distance.
struct SoftCap : VariantBase {
  template <class M>
  typename M::Float logits_transform(typename M::Float x, const LogitsAt<M>& at) const {
    return cap * M::tanh(x * (1.0f / cap)) +
           M::gather(table, at.q_head, M::min(M::abs(at.kv_position - at.q_position),
                                              M::splat(limit)));
  }
  template <class M>
  typename M::Bool logits_mask(const LogitsAt<M>& at) const {
    return M::logical_not(M::gather(hidden, at.kv_position));
  }
};
"""

ROWS = """
/* Every row of everything. */
struct Rows : public flashbsr::VariantBase {
  template <class Row>
  void normalise(Row x, int dim) const {
    float sum = 0;
    for (int d = 0; d < dim; ++d) sum += x[d] * x[d];
    const float scale = 1.0f / sqrt_of(sum / dim + 1e-6f);
    for (int d = 0; d < dim; ++d) x[d] = x[d] * scale * weight(d);
  }
  template <class Row> void query_transform(Row x, const RowAt& at) const { normalise(x, at.dim); }
  template <class Row> void key_transform(Row x, const RowAt& at) const { normalise(x, at.dim); }
  template <class Row> void value_transform(Row x, const RowAt& at) const {
    for (int d = 0; d < at.dim; ++d) x[d] = x[d] * (at.token % 2 == 0 ? 1.0f : -0.5f);
  }
  template <class Row> void output_transform(Row x, const RowAt& at) const {
    for (int d = 0; d < at.dim; ++d) x[d] = x[d] + 0.25f * at.position + at.head;
  }
};
"""


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.name)
def test_flash_sigmoid(case, device):
    spec = AttentionSpec.from_source(
        FLASH_SIGMOID, extras={"bias": "float32"}, causal=case.variant.causal
    )
    hooks = Hooks(activation=lambda x: sigmoid(x - 1.5))
    check_variant(spec, hooks, case, device, bias=-1.5)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.name)
def test_logits_and_mask_with_arrays(case, device):
    extras = {"cap": "float32", "limit": "int32", "table": ("float16", 2), "hidden": ("bool", 1)}
    spec = AttentionSpec.from_source(
        SOFT_CAP, extras=extras, causal=case.variant.causal, window_left=150
    )
    case = case.but("window", variant=Variant(causal=case.variant.causal, window_left=150))
    rng = np.random.default_rng(1)
    # Strided: every other column of a wider table, from the last head to the first.
    table = rng.standard_normal((4, 80)).astype(np.float16)[::-1, ::2]
    hidden = rng.random(300) < 0.3

    def position(case, b, q):
        return case.kv_lens[b] - case.q_lens[b] + q

    def score(x, b, h, q, kv):
        distance = np.minimum(np.abs(kv - position(case, b, q)), 30)
        return 5 * np.tanh(x / 5) + table[h, distance].astype(x.dtype)

    hooks = Hooks(score=score, mask=lambda *at: ~hidden[at[-1]])
    values = {"table": device.put(table), "hidden": device.put(hidden)}
    check_variant(spec, hooks, case, device, cap=5, limit=np.int64(30), **values)


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.name)
@pytest.mark.parametrize("rope", ["NONE", "ROPE_LLAMA"])
def test_rows(case, rope):
    spec = AttentionSpec.from_source(
        ROWS,
        extras={"weight": ("bfloat16", 1)},
        causal=case.variant.causal,
        pos_encoding_mode=rope,
    )
    variant = Variant(causal=case.variant.causal, pos_encoding_mode=rope)
    weight = np.random.default_rng(2).random(case.dims[0]).astype(ml_dtypes.bfloat16)

    def normalise(x, position):
        scale = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)
        return x * scale * weight.astype(x.dtype)

    hooks = Hooks(
        query=normalise,
        key=normalise,
        value=lambda x, at: x * np.where(at % 2 == 0, 1.0, -0.5)[:, None, None],
        output=lambda x, at: x + 0.25 * at[:, None, None] + np.arange(x.shape[1])[:, None],
    )
    check_variant(spec, hooks, case.but(rope, variant=variant), weight=weight)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
def test_custom_mask_and_sinks_go_with_a_variant(device):
    case = device.adapt(cases.MIXED.but("masked", mask="bool", sinks=True))
    text = """struct Doubled : flashbsr::VariantBase {
      template <class M> auto logits_transform(typename M::Float x, const LogitsAt<M>&) const {
        return x * 2.0f;
      } };"""
    hooks = Hooks(score=lambda x, *_: 2 * x)
    check_variant(AttentionSpec.from_source(text), hooks, case, device)


ELEMENTS = """
struct Elements : flashbsr::VariantBase {
  template <class M>
  typename M::Float logits_transform(typename M::Float, const LogitsAt<M>& at) const {
    const auto i = at.kv_position;
    return M::gather(a, i) + M::gather(b, i) + M::gather(c, i) + M::to_float(M::gather(d, i)) +
           M::to_float(M::gather(e, i)) + M::to_float(M::gather(f, i)) +
           M::select(M::gather(g, i), M::splat(4.0f), M::splat(0.0f)) +
           M::gather(h, at.q_head, at.request->index, i, at.q_token) + s + M::to_float(M::splat(n));
  }
};
"""


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
def test_every_element_type_and_four_dimensions(device):
    kinds = ["float32", "float16", "bfloat16", "int32", "int64", "uint8", "bool"]
    extras = {name: (kind, 1) for name, kind in zip("abcdefg", kinds, strict=True)}
    extras |= {"h": ("float32", 4), "s": "float32", "n": "int32"}
    case = cases.MIXED
    rng = np.random.default_rng(3)
    values = {}
    for name, kind in zip("abcdefg", kinds, strict=True):
        low = 0 if kind in ("uint8", "bool") else -4
        array = rng.integers(low, 2 if kind == "bool" else 5, 130)
        dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.dtype(kind)
        values[name] = array.astype(dtype)
    values["h"] = rng.standard_normal((4, 6, 130, 33)).astype(np.float32).transpose(0, 1, 2, 3)

    def score(x, b, h, q, kv):
        total = sum(values[name][kv].astype(x.dtype) for name in "abcdef")
        total = total + 4 * values["g"][kv] + values["h"][h, b, kv, q].astype(x.dtype)
        return total + x.dtype.type(0.5) - 3

    spec = AttentionSpec.from_source(ELEMENTS, extras=extras)
    moved = {name: device.put(array) for name, array in values.items()}
    check_variant(spec, Hooks(score=score), case, device, s=0.5, n=-3, **moved)


def test_indices_outside_of_an_array_are_clamped():
    """Nothing outside of it is read: its neighbours are NaN."""
    text = """struct Outside : flashbsr::VariantBase {
      template <class M> auto logits_transform(typename M::Float x, const LogitsAt<M>& at) const {
        return x + M::gather(near, at.kv_position - 40) + near(at.q_token + 1000) + near(-7);
      } };"""
    around = np.full(64, np.nan, np.float32)
    near = around[20:40]
    near[:] = np.arange(20)
    hooks = Hooks(score=lambda x, *at: x + np.clip(at[3] - 40, 0, 19).astype(x.dtype) + 19)
    spec = AttentionSpec.from_source(text, extras={"near": ("float32", 1)})
    check_variant(spec, hooks, cases.MIXED, near=near)


def test_a_constructor_of_its_own_and_several_structs():
    text = """
struct Helper : flashbsr::VariantBase { };
struct Scaled : flashbsr::VariantBase {
  float factor;
  explicit Scaled(const flashbsr::Params& p) : VariantBase(p), factor(2.0f * half) {}
  template <class M>
  FLASHBSR_FN typename M::Float logits_transform(typename M::Float x,
                                                 const flashbsr::LogitsAt<M>&) const {
    return x * factor;
  }
};
"""
    spec = AttentionSpec.from_source(text, name="Scaled", extras={"half": "float32"})
    check_variant(spec, Hooks(score=lambda x, *_: 3 * x), cases.MIXED, half=1.5)
    with pytest.raises(FlashbsrError, match="2 structs"):
        AttentionSpec.from_source(text)
    with pytest.raises(FlashbsrError, match="'Other'"):
        AttentionSpec.from_source(text, name="Other")


def test_the_source_can_be_printed():
    source = AttentionSpec.from_source(FLASH_SIGMOID, extras={"bias": "float32"}).source
    assert FLASH_SIGMOID.strip() in source and "float bias;" in source
    with pytest.raises(FlashbsrError, match="variant"):
        _ = AttentionSpec().source


def small_attention(spec: AttentionSpec) -> tuple[Attention, tuple]:
    attention = Attention(spec, TaskInfo(num_qo_heads=1, num_kv_heads=1, head_dim_qk=8))
    attention.plan(Ragged(None, [0, 3]))
    q, k = np.ones((1, 1, 8), np.float32), np.ones((3, 1, 8), np.float32)
    return attention, (q, (k, k))


def test_compile_errors_show_the_users_lines():
    text = """struct Wrong : flashbsr::VariantBase {
  template <class M>
  auto logits_transform(typename M::Float x, const LogitsAt<M>&) const {
    return x + undefined_thing;
  }
};
"""
    attention, arrays = small_attention(AttentionSpec.from_source(text))
    with pytest.raises(FlashbsrError, match=r"Wrong:4:\d+: error: .*undefined_thing") as caught:
        attention.run(*arrays)
    assert str(caught.value).splitlines()[1:] == [
        str(caught.value).splitlines()[1],  # one error, and its line; nothing of our headers
        "    return x + undefined_thing;",
    ]
    assert not cache.entries() or all("Wrong" not in e.label for e in cache.entries())


@pytest.mark.parametrize(
    ("hook", "wanted"),
    [
        (
            "template <class M> float logits_transform(typename M::Float, LogitsAt<M>) const;",
            "typename M::Float logits_transform(typename M::Float x, const LogitsAt<M>& at) const",
        ),
        (
            "template <class M> auto logits_transform(typename M::Float x) const { return x; }",
            "logits_transform(typename M::Float x, const LogitsAt<M>& at) const",
        ),
        (
            "template <class M> auto logits_mask(const LogitsAt<M>& at) { return M::all(); }",
            "typename M::Bool logits_mask(const LogitsAt<M>& at) const",
        ),
        (
            "template <class Row> void key_transform(Row x) const { x[0] = 0; }",
            "template <class Row> void key_transform(Row x, const RowAt& at) const",
        ),
    ],
    ids=["type", "arguments", "const", "row"],
)
def test_a_wrong_signature_is_shown_with_the_right_one(hook, wanted):
    text = f"/* logits_mask(\n key_transform( */\nstruct Wrong : VariantBase {{\n  {hook}\n}};"
    attention, arrays = small_attention(AttentionSpec.from_source(text))
    with pytest.raises(FlashbsrError) as caught:
        attention.run(*arrays)
    error, line = str(caught.value).splitlines()[1:]
    assert error.startswith("Wrong:4:") and wanted in error
    assert line.strip() == hook


@pytest.mark.parametrize("name", ["logit_transform", "LogitsTransform", "logits_masks"])
def test_a_name_that_is_nearly_a_hook_is_refused(name):
    """Nobody would call it: the run would be plain attention."""
    text = f"""struct Silent : VariantBase {{
      template <class M> auto {name}(typename M::Float x, const LogitsAt<M>&) const {{ return x; }}
    }};"""
    with pytest.raises(FlashbsrError, match=rf"text: got a function {name}.*expected logits_"):
        AttentionSpec.from_source(text)


def test_helpers_may_be_called_like_the_hooks_that_are_there():
    text = """struct Helped : VariantBase {
      template <class M> auto logits_transforms(typename M::Float x) const { return x; }
      template <class M> auto logits_transform(typename M::Float x, const LogitsAt<M>&) const {
        return logits_transforms<M>(x);
      }
    };"""
    assert AttentionSpec.from_source(text).variant.hooks == {"logits_transform"}


def test_no_compiler(monkeypatch):
    text = "struct Fresh : flashbsr::VariantBase { float never_compiled_before = 1; };"
    attention, arrays = small_attention(AttentionSpec.from_source(text))
    monkeypatch.setenv("CXX", "/nowhere/c++ -m64")
    with pytest.raises(
        UnsupportedError, match=r"CXX: got '/nowhere/c\+\+ -m64'.*apt install g\+\+"
    ):
        attention.run(*arrays)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnsupportedError, match=r"no c\+\+, g\+\+ or clang\+\+"):
        attention.run(*arrays)
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("c++ --no-such-option", "ended with status 1.*C[+][+]20.*no-such-option"),
        ("false", r"ended with status 1.*command: \S+false -std=c[+][+]20"),
        ("true", r"ended with status 0.*shared object"),
        ("c++ -nostdinc -nostdinc++", "ended with status 1.*fatal error: .*No such file"),
        ("c++ 'x", "expected a command .No closing quotation"),
    ],
    ids=lambda text: text if " " not in text else None,
)
def test_a_compiler_that_is_none(monkeypatch, given, message):
    """It is CXX that is blamed, not the user's text."""
    text = "struct Fresh : flashbsr::VariantBase { float not_for_this_compiler = 1; };"
    attention, arrays = small_attention(AttentionSpec.from_source(text))
    monkeypatch.setenv("CXX", given)
    with pytest.raises(FlashbsrError, match=f"(?s)CXX: got .*{message}"):
        attention.run(*arrays)


def test_compiler_of_the_environment(monkeypatch):
    monkeypatch.setenv("CXX", f"{shutil.which('g++')} -DSOMETHING")
    assert cxx.compiler() == [shutil.which("g++"), "-DSOMETHING"]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({}, FlashbsrError, "bias: got nothing"),
        ({"bias": 1.0}, FlashbsrError, "table: got nothing"),
        ({"bias": 1.0, "table": 0, "other": 1}, DTypeError, "table: got int"),
        ({"bias": "1", "table": 0}, DTypeError, "bias: got '1'"),
        ({"bias": True, "table": 0}, DTypeError, "bias: got True"),
        ({"bias": 1e300, "table": 0}, FlashbsrError, "bias: got 1e"),
        ({"bias": 1.0, "table": np.zeros((2, 2))}, DTypeError, "table: got .*float64|float64"),
        ({"bias": 1.0, "table": np.zeros((2, 2), np.int32)}, DTypeError, "int32; expected float32"),
        ({"bias": 1.0, "table": np.zeros(4, np.float32)}, ShapeError, "2 dimensions"),
        ({"bias": 1.0, "table": np.zeros((0, 4), np.float32)}, ShapeError, "extents in"),
        (
            {"bias": 1.0, "table": np.zeros((2, 2), np.float32), "other": 1},
            FlashbsrError,
            "other: got a value; expected no such argument; the spec's extras: bias, table",
        ),
    ],
)
def test_bad_extras_of_a_run(values, error, message):
    text = "struct Unused : flashbsr::VariantBase {};"
    extras = {"bias": "float32", "table": ("float32", 2)}
    attention, arrays = small_attention(AttentionSpec.from_source(text, extras=extras))
    with pytest.raises(error, match=message):
        attention.run(*arrays, **values)


def test_extras_without_a_variant():
    attention, arrays = small_attention(AttentionSpec())
    with pytest.raises(FlashbsrError, match="bias: .*the spec's extras: none"):
        attention.run(*arrays, bias=1)


@pytest.mark.parametrize(
    ("extras", "error"),
    [
        ({"two words": "float32"}, FlashbsrError),
        ({"q": "float32"}, FlashbsrError),
        ({"use_softmax": "float32"}, FlashbsrError),
        ({"x": "float64"}, DTypeError),
        ({"x": "bool"}, DTypeError),
        ({"x": ("float64", 1)}, DTypeError),
        ({"x": ("float32", 5)}, FlashbsrError),
        ({"x": ("float32", -1)}, FlashbsrError),
        ({"x": ("float32", 1, 2)}, FlashbsrError),
        ({f"x{i}": "float32" for i in range(9)}, UnsupportedError),
        ({f"x{i}": ("float32", 1) for i in range(9)}, UnsupportedError),
    ],
)
def test_bad_declarations(extras, error):
    with pytest.raises(error):
        AttentionSpec.from_source("struct A : flashbsr::VariantBase {};", extras=extras)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("struct A {};", "0 structs"),
        ("// struct A : flashbsr::VariantBase {};", "0 structs"),
        ("#include <vector>\nstruct A : flashbsr::VariantBase {};", "#include"),
        ("struct A : VariantBase { float activation(float) const; };", "use_softmax = false"),
    ],
)
def test_bad_texts(text, message):
    with pytest.raises(FlashbsrError, match=message):
        AttentionSpec.from_source(text)
    with pytest.raises(DTypeError, match="text"):
        AttentionSpec.from_source(text.encode())


@pytest.mark.parametrize(
    "fields",
    [{"logits_soft_cap": 30.0}, {"pos_encoding_mode": "ALIBI"}, {"activation": "sigmoid"}],
)
def test_fields_that_a_variant_replaces(fields):
    with pytest.raises(FlashbsrError, match=next(iter(fields))):
        AttentionSpec.from_source("struct A : flashbsr::VariantBase {};", **fields)


def test_no_lse_and_no_sinks_without_softmax():
    spec = AttentionSpec.from_source(FLASH_SIGMOID, extras={"bias": "float32"})
    attention, arrays = small_attention(spec)
    with pytest.raises(UnsupportedError, match="return_lse"):
        attention.run(*arrays, bias=0.0, return_lse=True)
    with pytest.raises(UnsupportedError, match="sinks"):
        attention.run(*arrays, bias=0.0, sinks=np.zeros(1, np.float32))


def test_specs_are_values():
    a, b = (AttentionSpec.from_source(FLASH_SIGMOID, extras={"bias": "float32"}) for _ in "ab")
    assert a == b and hash(a) == hash(b) and a != AttentionSpec()
    assert a != AttentionSpec.from_source(FLASH_SIGMOID, extras={"bias": "int32"})


def test_threads_may_ask_while_another_compiles():
    """The lock is held while the compiler runs: whoever waits for it must not hold the GIL."""
    text = """struct Slow : flashbsr::VariantBase {
      template <class M> auto logits_transform(typename M::Float x, const LogitsAt<M>&) const {
        return x + 1.0f;
      } };"""
    attention, arrays = small_attention(AttentionSpec.from_source(text))
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(attention.run(*arrays)), daemon=True)
        for _ in range(3)
    ]
    threads += [
        threading.Thread(target=lambda f=f: results.append(f()), daemon=True)
        for f in (
            attention.workspace_size,
            attention.run_stats,
            lambda: attention.plan_info,
            lambda: attention.device,
            lambda: attention.plan(Ragged(None, [0, 3])),
        )
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == len(threads)


def test_arrays_on_another_device():
    cuda = [device for device in DEVICES if device is not CPU]
    if not cuda:
        pytest.skip("needs a GPU")
    spec = AttentionSpec.from_source(
        "struct A : flashbsr::VariantBase {};", extras={"x": ("float32", 1)}
    )
    attention, arrays = small_attention(spec)
    with pytest.raises(DeviceError, match="x: "):
        attention.run(*arrays, x=cuda[0].put(np.zeros(3, np.float32)))
