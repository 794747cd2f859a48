# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels compiled at run time, as far as no GPU is needed: NVRTC, source, cache, messages."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flashbsr
import pytest
from flashbsr import errors
from flashbsr.jit import cache, cuda, notice
from flashbsr.jit import nvrtc as jit_nvrtc
from flashbsr.jit.kernel_source import Wish, kernel_source
from flashbsr.jit.provider import Provider

F16, BF16, E4M3 = "float16", "bfloat16", "float8_e4m3fn"
WISHES = {
    wish.name: wish
    for wish in (
        Wish("decode90", "decode", "sm90", "sm_90", 128, 128, BF16, BF16, 8, "custom"),
        Wish("decode80", "decode", "sm80", "sm_86", 64, 64, F16, E4M3, 8, "custom"),
        Wish("hopper", "hopper", "sm90a", "sm_90a", 128, 128, BF16, BF16, 192, "custom"),
        Wish("prefill", "prefill", "sm80", "sm_80", 128, 128, F16, F16, 64, "custom"),
        Wish("wide", "prefill", "sm80", "sm_90", 512, 512, BF16, BF16, 64, "custom"),
        Wish("wide8", "prefill", "sm80", "sm_80", 512, 512, F16, E4M3, 64, "custom"),
        Wish("wide_decode90", "decode", "sm90", "sm_90", 512, 512, BF16, E4M3, 8, "custom"),
        Wish("wide_decode80", "decode", "sm80", "sm_80", 512, 512, F16, F16, 8, "custom"),
        Wish("turing", "prefill", "sm75", "sm_75", 64, 64, F16, F16, 64, "custom"),
        Wish("turing8", "prefill", "sm75", "sm_75", 128, 128, F16, E4M3, 64, "custom"),
        Wish("turing4", "prefill_scaled", "sm75", "sm_75", 128, 128, F16, "int4", 64, "custom"),
    )
}
# Every hook of logits, an array and a number, and no word about hosts and devices.
TEXT = """
struct Mine : flashbsr::VariantBase {
  template <class M>
  auto logits_transform(typename M::Float x, const LogitsAt<M>& at) const {
    auto bias = M::gather(table, at.q_head, at.kv_position);
    return M::select(at.kv_position > at.q_position, x, cap * M::tanh(x / cap) + bias);
  }
  template <class M>
  auto logits_mask(const LogitsAt<M>& at) const {
    return (at.kv_position & 1) == 0;
  }
};
"""
SIGMOID = """
struct Mine : flashbsr::VariantBase {
  static constexpr bool use_softmax = false;
  template <class M> auto activation(typename M::Float x) const { return M::sigmoid(x + cap); }
};
"""
ROWS = """
struct Mine : flashbsr::VariantBase {
  template <class Row> void query_transform(Row x, const RowAt& at) const {
    for (int d = 0; d < at.dim; ++d) x[d] *= table(at.head, d);
  }
  template <class Row> void key_transform(Row x, const RowAt& at) const { x[0] = at.position; }
  template <class Row> void value_transform(Row x, const RowAt& at) const { x[0] = at.token; }
  template <class Row> void output_transform(Row x, const RowAt& at) const { x[1] += x[0]; }
};
"""
EXTRAS = {"cap": "float32", "table": ("bfloat16", 2)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHBSR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHBSR_QUIET", "1")


@pytest.fixture
def compiler() -> jit_nvrtc.Nvrtc:
    """Load NVRTC, or skip; in CI its absence is an error."""
    try:
        return jit_nvrtc.nvrtc()
    except errors.UnsupportedError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def code(wish: Wish, text: str = TEXT) -> bytes:
    spec = flashbsr.AttentionSpec.from_source(text, extras=EXTRAS)
    provider = Provider(spec.variant)
    return cuda.machine_code(wish, provider._text, provider._struct, 0)


def is_cubin(image: bytes, name: str) -> bool:
    return image[:4] == b"\x7fELF" and f".text.{name}\0".encode() in image


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("types", [F16, BF16])
@pytest.mark.usefixtures("compiler")
def test_hooks_of_rows_compile_where_they_are_served(dim: int, types: str) -> None:
    wish = Wish("rows", "prefill", "sm80", "sm_90", dim, dim, types, types, 64, "custom")
    assert is_cubin(code(wish, ROWS), "rows")


@pytest.mark.parametrize("name", WISHES)
@pytest.mark.parametrize("text", [TEXT, SIGMOID], ids=["softmax", "without"])
@pytest.mark.usefixtures("compiler")
def test_one_struct_serves_every_family(name: str, text: str) -> None:
    assert is_cubin(code(WISHES[name], text), name)


@pytest.mark.parametrize("dims", [(320, 256), (320, 320), (448, 384), (512, 512)])
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("arch", [("sm80", "sm_86"), ("sm90", "sm_90")], ids=lambda x: x[0])
@pytest.mark.usefixtures("compiler")
def test_latents_of_other_dims_compile(
    arch: tuple[str, str], dims: tuple[int, int], rows: int
) -> None:
    wish = Wish("latent", "latent_mma", *arch, *dims, BF16, BF16, rows, "standard")
    assert is_cubin(cuda.machine_code(wish, "", "", 0), "latent")


def refuse(*_: Any) -> bytes:
    raise AssertionError("compiled again")


@pytest.mark.parametrize("text", [TEXT, SIGMOID], ids=["softmax", "without"])
@pytest.mark.usefixtures("compiler")
def test_hopper_multiplies_logits_late(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The second attempt, with floats, is for texts that need those; errors are its own."""
    monkeypatch.setattr(jit_nvrtc.Nvrtc, "compile", refuse)
    assert code(WISHES["hopper"], text)
    floats = text.replace("return ", "return x < 0 ? 0.0f : ", 1)
    assert floats != text
    with pytest.raises(AssertionError, match="compiled again"):
        code(WISHES["hopper"], floats)
    monkeypatch.undo()
    assert code(WISHES["hopper"], floats)


@pytest.mark.usefixtures("compiler")
def test_code_for_masks_and_rope_is_there_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = flashbsr.AttentionSpec.from_source(SIGMOID, extras=EXTRAS)
    plain, rotating = Provider(spec.variant), Provider(spec.variant, rotates=True)
    assert plain.name != rotating.name
    for name in ("decode90", "hopper"):
        wish = WISHES[name]
        masked = dataclasses.replace(wish, variant="custom_masked")
        sizes = [
            len(cuda.machine_code(w, p._text, p._struct, 0))
            for w, p in ((wish, plain), (masked, plain), (masked, rotating))
        ]
        assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("types", [(BF16, BF16), (BF16, E4M3)], ids="{0[1]}".format)
@pytest.mark.usefixtures("compiler")
def test_a_hopper_kernel_copies_in_one_way(types: tuple[str, str]) -> None:
    """TMA's code is in one, the gather's in the other. Which runs: fake_cuda/jit_copies.py."""
    wish = dataclasses.replace(WISHES["hopper"], q=types[0], kv=types[1])
    boxes, rows = (code(dataclasses.replace(wish, copies=x), SIGMOID) for x in ("boxes", "rows"))
    assert boxes != rows


@pytest.mark.parametrize("text", [TEXT, SIGMOID], ids=["softmax", "without"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_products_are_asynchronous(compiler: jit_nvrtc.Nvrtc, text: str, masked: bool) -> None:
    """In the one body of the main loop that users' variants have: ptxas would tell (C7510 ...)."""
    wish = WISHES["hopper"]
    if masked:
        wish = dataclasses.replace(wish, variant="custom_masked")
    provider = Provider(flashbsr.AttentionSpec.from_source(text, extras=EXTRAS).variant)
    include = Path(flashbsr.get_include())
    source = kernel_source(wish, include.parent / "kernels", provider._text, provider._struct)
    image, messages = compiler.try_compile(source, wish.name, wish.target, include)
    assert image
    assert "C75" not in messages


@pytest.mark.usefixtures("compiler")
def test_a_second_process_finds_it_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    wish = WISHES["decode90"]
    first = code(wish)
    monkeypatch.setattr(jit_nvrtc.Nvrtc, "compile", refuse)
    assert code(wish) == first
    assert [entry.label.split()[0] for entry in cache.entries()] == [wish.name]
    # Whatever changes the code changes the key.
    for other in (
        dataclasses.replace(wish, head_dim=64, head_dim_vo=64),
        dataclasses.replace(wish, target="sm_100"),
        dataclasses.replace(wish, name="another"),
    ):
        with pytest.raises(AssertionError, match="compiled again"):
            code(other)
    with pytest.raises(AssertionError, match="compiled again"):
        code(wish, TEXT.replace("tanh", "exp"))


@pytest.mark.parametrize("name", ["decode90", "hopper"])
@pytest.mark.usefixtures("compiler")
def test_an_error_shows_the_users_own_line(name: str) -> None:
    broken = TEXT.replace("cap * M::tanh", "cap * tanhh")
    line = broken.split("\n").index(next(x for x in broken.split("\n") if "tanhh" in x)) + 1
    with pytest.raises(errors.FlashbsrError) as error:
        code(WISHES[name], broken)
    assert f"Mine({line}): error" in str(error.value)
    _, message, own = str(error.value).splitlines()  # nothing of our headers
    assert "tanhh" in message and own.strip() == broken.split("\n")[line - 1].strip()
    assert not cache.entries()


@pytest.mark.usefixtures("compiler")
def test_a_hook_of_another_type_is_refused() -> None:
    wrong = TEXT.replace("return (at.kv_position & 1) == 0;", "return at;")
    for name in ("decode90", "hopper"):
        with pytest.raises(errors.FlashbsrError) as error:
            code(WISHES[name], wrong)
        assert "Mine(9): error" in str(error.value)
        assert "expected template <class M> typename M::Bool logits_mask(" in str(error.value)


def test_targets(compiler: jit_nvrtc.Nvrtc) -> None:
    assert compiler.target_for(90) == "sm_90"
    assert compiler.target_for(89) == "sm_89"
    newest = max(compiler.targets)
    assert compiler.target_for(newest) == f"sm_{newest}"
    with pytest.raises(errors.UnsupportedError, match=r"NVRTC.*sm_21.*flashbsr\[jit\]"):
        compiler.target_for(21)


@pytest.fixture
def forget_libraries() -> Iterator[None]:
    """What was found stays known for the process."""
    known = (jit_nvrtc.find_library, jit_nvrtc.nvrtc)
    for function in known:
        function.cache_clear()
    yield
    for function in known:
        function.cache_clear()


@pytest.mark.usefixtures("forget_libraries")
def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_nvrtc, "_candidates", lambda: iter([Path("libnvrtc.so.none")]))
    with pytest.raises(
        errors.UnsupportedError, match=r"NVRTC.*cannot open.*pip install 'flashbsr\[jit\]'"
    ):
        code(WISHES["decode90"])


@pytest.mark.usefixtures("forget_libraries")
def test_a_newer_nvrtc_than_the_driver_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine code would not load."""
    names = ["libnvrtc.so.12", "libnvrtc.so.13", "/there/libnvrtc.so.12", "/there/libnvrtc.so.14"]
    monkeypatch.setattr(jit_nvrtc, "_candidates", lambda: iter(map(Path, names)))
    for major, name in ((0, names[3]), (14, names[3]), (12, names[2]), (13, names[2])):
        assert jit_nvrtc.find_library(major) == Path(name)
    with pytest.raises(errors.UnsupportedError, match=r"CUDA 11.*nvrtc-cu11"):
        jit_nvrtc.find_library(11)


def test_headers_and_templates_ship() -> None:
    include = Path(flashbsr.get_include())
    templates = {path.name for path in (include.parent / "kernels").glob("*.cu.in")}
    assert {"decode.cu.in", "hopper.cu.in", "prefill.cu.in", "prefill_sm75.cu.in"} <= templates


def test_the_notice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("FLASHBSR_QUIET")
    with notice.compiling("thing for sm_90"):
        assert capsys.readouterr().err == ""  # no terminal: the line comes in one piece
    assert capsys.readouterr().err == "flashbsr: compiling thing for sm_90 ... 0.0 s\n"
    with pytest.raises(RuntimeError), notice.compiling("thing"):
        raise RuntimeError
    assert capsys.readouterr().err == "flashbsr: compiling thing ... failed\n"
    monkeypatch.setenv("FLASHBSR_QUIET", "1")
    with notice.compiling("thing"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("FLASHBSR_QUIET")
    monkeypatch.setattr(sys, "stderr", None)  # pythonw and some services
    with notice.compiling("thing"):
        pass


def test_the_notice_counts_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    monkeypatch.delenv("FLASHBSR_QUIET")
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with notice.compiling("thing"):
            assert os.read(master, 100).decode() == "flashbsr: compiling thing ..."
            terminal.flush()
            counted = os.read(master, 100).decode()
        assert counted.startswith("\rflashbsr: compiling thing ... 0.")
        monkeypatch.undo()
        rest = ""
        while "\n" not in rest:
            rest += os.read(master, 200).decode()
        assert rest.endswith(" s\r\n")
    os.close(master)
