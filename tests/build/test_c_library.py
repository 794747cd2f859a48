# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""libflashbsr, built without Python, installed, found by CMake and pkg-config, and called."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashbsr
import numpy as np
import pytest
from flashbsr import Attention, AttentionSpec, TaskInfo
from test_consumer import tool
from toolchain import ROOT, compiler, run

EXAMPLE = ROOT / "examples/c"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed libflashbsr; processes of one test run share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "libflashbsr"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "prefix").exists():
            options = ["C=ON", "PYTHON=OFF", "CUDA=OFF"]
            build(ROOT, folder / "build", *(f"-DFLASHBSR_{option}" for option in options),
                  "-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON")  # fmt: skip
            install = [tool("cmake"), "--install", folder / "build", "--prefix"]
            outcome = run([*install, folder / "prefix"])
            assert outcome.status == 0, outcome.output
    return folder / "prefix"


def build(source: Path, folder: Path, *options: str) -> None:
    configure = [tool("cmake"), "-S", source, "-B", folder, "-G", "Ninja"]
    # What is looked at is not how fast it is: optimised, the C++ takes three times as long.
    configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DCMAKE_BUILD_TYPE=Debug", *options]
    for command in (configure, [tool("cmake"), "--build", folder]):
        outcome = run(command)
        assert outcome.status == 0, outcome.output


def test_example_by_find_package(prefix: Path, tmp_path: Path) -> None:
    """The example compares itself with float64, linked to either library."""
    build(EXAMPLE, tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    outcome = run([tool("ctest"), "--test-dir", tmp_path, "--verbose", "--no-tests=error"])
    assert outcome.status == 0, outcome.output
    assert outcome.output.count("largest error") == 2


def test_example_by_pkg_config(prefix: Path, tmp_path: Path) -> None:
    """The prefix may have moved since it was installed; C11, no warning, no C++ compiler."""
    pkg_config, cc = shutil.which("pkg-config"), shutil.which("cc") or shutil.which("gcc")
    if (pkg_config is None or cc is None) and not os.environ.get("CI"):
        pytest.skip("no pkg-config or no C compiler on this machine")
    assert pkg_config is not None and cc is not None
    moved = tmp_path / "moved"
    shutil.copytree(prefix, moved, symlinks=True)
    path = f"PKG_CONFIG_PATH={moved}/lib/pkgconfig"
    flags = run(["env", path, pkg_config, "--cflags", "--libs", "flashbsr >= 0.1"])
    assert flags.status == 0, flags.output
    strict = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    program = tmp_path / "attend"
    command = [cc, *strict, EXAMPLE / "attend.c", "-o", program, *flags.output.split(), "-lm"]
    built = run([*command, f"-Wl,-rpath,{moved}/lib"])
    assert built.status == 0, built.output
    done = run([program])
    assert done.status == 0, done.output
    assert "largest error" in done.output


def test_nothing_but_the_interface_is_exported(prefix: Path) -> None:
    listed = run(["nm", "-D", "--defined-only", "--format=posix", prefix / "lib/libflashbsr.so"])
    assert listed.status == 0, listed.output
    names = {line.split()[0].partition("@")[0] for line in listed.output.splitlines()}
    header = (ROOT / "include/flashbsr/c_api.h").read_text()
    declared = {
        part.split("(")[0].split()[-1].lstrip("*") for part in header.split("FBSR_API ")[2:]
    }
    assert len(declared) > 20
    assert names - {"FLASHBSR_1"} == declared


def test_the_tensor_is_dlpacks(tmp_path: Path) -> None:
    """Every offset, against the official header; and the official type where that came first."""
    package = pytest.importorskip("tvm_ffi", reason="no apache-tvm-ffi, which has dlpack.h")
    include = Path(package.__file__).parent / "include"
    fields = ("data", "device", "ndim", "dtype", "shape", "strides", "byte_offset")
    same = "".join(
        f"static_assert(offsetof(fbsr_tensor, {f}) == offsetof(DLTensor, {f}));" for f in fields
    )
    ours = "#include <flashbsr/c_api.h>\n#include <dlpack/dlpack.h>\n" + same
    ours += "static_assert(sizeof(fbsr_tensor) == sizeof(DLTensor));"
    theirs = "#include <dlpack/dlpack.h>\n#include <flashbsr/c_api.h>\n"
    theirs += "DLTensor t; const fbsr_tensor* p = &t;"
    for text in (ours, theirs):
        command = [compiler(), "-std=c++20", "-fsyntax-only", f"-I{include}", f"-I{ROOT}/include"]
        outcome = run([*command, "-x", "c++", "-"], stdin="#include <cstddef>\n" + text)
        assert outcome.status == 0, outcome.output


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64),
    ]  # fmt: skip

    @classmethod
    def of(cls, x: np.ndarray) -> Tensor:
        code = {"i": 0, "u": 1, "f": 2, "b": 6}[x.dtype.kind]
        t = cls(x.ctypes.data, (1, 0), x.ndim, code, 8 * x.itemsize, 1)
        t.kept = (x, np.array(x.shape, np.int64), np.array(x.strides, np.int64) // x.itemsize)
        t.shape, t.strides = t.kept[1].ctypes.data, t.kept[2].ctypes.data
        return t


@pytest.fixture(scope="module")
def library(prefix: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(prefix / "lib/libflashbsr.so"))
    lib.fbsr_last_error.restype = lib.fbsr_version.restype = ctypes.c_char_p
    lib.fbsr_status_name.restype = ctypes.c_char_p
    return lib


def merge(lib: ctypes.CDLL, *arrays: np.ndarray) -> int:
    tensors = [Tensor.of(x) for x in arrays]
    return int(lib.fbsr_merge_state(*map(ctypes.byref, tensors), 0, None))


def test_merge_is_that_of_python(library: ctypes.CDLL) -> None:
    """Strided arrays, the same bits."""
    rng = np.random.default_rng(0)
    v = rng.standard_normal((2, 5, 6, 64)).astype(np.float32)[:, :, ::2]
    s = rng.standard_normal((2, 5, 3)).astype(np.float32)
    v_out, s_out = np.full((5, 3, 64), np.nan, np.float32), np.full((5, 3), np.nan, np.float32)
    assert merge(library, v[0], s[0], v[1], s[1], v_out, s_out) == 0
    expected = flashbsr.merge_state(v[0], s[0], v[1], s[1])
    np.testing.assert_array_equal(v_out, expected[0])
    np.testing.assert_array_equal(s_out, expected[1])


def bad_merge(change: Callable[[list[np.ndarray]], None]) -> list[np.ndarray]:
    v, s = np.zeros((5, 3, 64), np.float32), np.zeros((5, 3), np.float32)
    arrays = [v, s, v.copy(), s.copy(), v.copy(), s.copy()]
    change(arrays)
    return arrays


@pytest.mark.parametrize("wrong", [(0, np.zeros((5, 64), np.float32)),
                                   (3, np.zeros((5, 2), np.float32)),
                                   (1, np.zeros((5, 3), np.float64)),
                                   (2, np.zeros((4, 3, 64), np.float32))])  # fmt: skip
def test_errors_are_pythons(library: ctypes.CDLL, wrong: tuple[int, np.ndarray]) -> None:
    """The same sentence and the same class."""
    arrays = bad_merge(lambda a: a.__setitem__(*wrong))
    status = merge(library, *arrays)
    with pytest.raises(flashbsr.FlashbsrError) as error:
        flashbsr.merge_state(*arrays[:4])
    assert library.fbsr_last_error().decode() == str(error.value)
    assert library.fbsr_status_name(status).decode() == type(error.value).__name__


def test_null_and_structs_without_init_are_errors(library: ctypes.CDLL) -> None:
    zeros = (ctypes.c_char * 1024)()
    handle = ctypes.c_void_p()
    for call, text in [
        (lambda: library.fbsr_run(None, zeros), "arguments.size: got 0"),
        (lambda: library.fbsr_run(None, None), "arguments: got NULL"),
        (lambda: library.fbsr_attention_create(zeros, ctypes.byref(handle)), "options.size: got 0"),
        (lambda: library.fbsr_merge_state(*[None] * 6, 0, None), ": got NULL; expected a tensor"),
        (lambda: library.fbsr_layout_init(zeros, 8), "size: got 8"),
    ]:
        assert call() == 1
        assert text in library.fbsr_last_error().decode()
    library.fbsr_attention_destroy(None)


def program(prefix: Path, folder: Path, text: str) -> str:
    """Compile a C program with the shared library and run it."""
    (folder / "program.c").write_text(text)
    cc = shutil.which("cc") or shutil.which("gcc")
    assert cc is not None, "no C compiler"
    flags = [f"-I{prefix}/include", f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib", "-lflashbsr"]
    built = run([cc, "-std=c11", "-Wall", "-Werror", folder / "program.c", "-o", folder / "program",
                 *flags])  # fmt: skip
    assert built.status == 0, built.output
    done = run([folder / "program"])
    assert done.status == 0, done.output
    return done.output


OPTIONS: list[dict[str, Any]] = [
    {"num_qo_heads": 30},
    {"head_dim_qk": 60},
    {"head_dim_qk": 520},
    {"latent": 1, "sm_scale": 0.1},
    {"rotary_dim": 32},
    {"sigmoid_bias": 1.0},
    {"disable_split_kv": 1, "fixed_split_size": 64},
    {"device": 1},
    {"max_batch_size": 4},
    {"max_batch_size": 4, "max_kv_len": 8, "max_kv_pages": 8},
]


def test_options_are_refused_as_python_does(prefix: Path, tmp_path: Path) -> None:
    """Each set alone: argument and what is expected of it are Python's."""
    calls, expected = [], []
    for given in OPTIONS:
        sets = "".join(f"o.{name} = {value};" for name, value in given.items())
        calls.append(f"start(&o); {sets} finish(&o);")
        everything = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128, **given}
        spec = {n: everything.pop(n) for n in ("rotary_dim", "sigmoid_bias", "sm_scale")
                if n in everything}  # fmt: skip
        with pytest.raises(flashbsr.FlashbsrError) as error:
            Attention(AttentionSpec(**spec), TaskInfo(**everything))
        expected.append((error.value.argument, str(error.value.expected)))
    text = f"""
#include <flashbsr/c_api.h>
#include <stdio.h>
static void start(fbsr_attention_options* o) {{
  fbsr_attention_options_init(o, sizeof *o);
  o->num_qo_heads = 32; o->num_kv_heads = 8; o->head_dim_qk = 128;
}}
static void finish(fbsr_attention_options* o) {{
  fbsr_attention* a;
  if (fbsr_attention_create(o, &a) == FBSR_OK) puts("no error");
  else puts(fbsr_last_error());
}}
int main(void) {{ fbsr_attention_options o; {" ".join(calls)} return 0; }}
"""
    lines = program(prefix, tmp_path, text).splitlines()
    assert len(lines) == len(expected)
    for line, (argument, wanted) in zip(lines, expected, strict=True):
        assert line.startswith(f"{argument}: got "), line
        assert line.endswith(f"expected {wanted}"), (line, wanted)


LENGTHS = r"""
#include <flashbsr/c_api.h>
#include <math.h>
#include <stdio.h>
static fbsr_tensor of(void* data, int code, int bits, int ndim, int64_t* shape) {
  fbsr_tensor t = {data, {1, 0}, ndim, {(uint8_t)code, (uint8_t)bits, 1}, shape, NULL, 0};
  return t;
}
static void say(fbsr_status s) { printf("%s|%s\n", fbsr_status_name(s), fbsr_last_error()); }
int main(void) {
  static float q[2 * 2 * 16], k[4 * 8 * 16], a[2 * 2 * 16], b[2 * 2 * 16];
  for (int i = 0; i < 64; ++i) q[i] = (float)(i % 7) - 3;
  for (int i = 0; i < 512; ++i) k[i] = i < 128 ? NAN : (float)(i % 11) / 11;  /* page 0: nobody's */
  int32_t table[] = {2, 1, 3, -7}, lens[] = {11, 5}, bounds[] = {16, 16};
  int64_t q_s[] = {2, 2, 16}, k_s[] = {4, 8, 1, 16}, t_s[] = {2, 2}, l_s[] = {2};
  fbsr_tensor qt = of(q, 2, 32, 3, q_s), kt = of(k, 2, 32, 4, k_s), at = of(a, 2, 32, 3, q_s),
              bt = of(b, 2, 32, 3, q_s), tt = of(table, 0, 32, 2, t_s),
              lt = of(lens, 0, 32, 1, l_s),
              ut = of(bounds, 0, 32, 1, l_s);
  fbsr_attention_options o;
  fbsr_attention_options_init(&o, sizeof o);
  o.num_qo_heads = 2; o.num_kv_heads = 1; o.head_dim_qk = 16;
  fbsr_attention* x;
  if (fbsr_attention_create(&o, &x)) return 1;
  fbsr_run_arguments r;
  fbsr_run_arguments_init(&r, sizeof r);
  r.q = &qt; r.k = r.v = &kt; r.out = &at;
  say(fbsr_run(x, &r));
  fbsr_layout l;
  fbsr_layout_init(&l, sizeof l);
  l.kind = FBSR_BLOCK_TABLE; l.page_size = 8; l.block_tables = &tt; l.kv_lens = &lt;
  if (fbsr_plan(x, &l, NULL) || fbsr_run(x, &r)) return 2;
  l.kind = FBSR_BOUNDS;
  say(fbsr_plan(x, &l, NULL));
  l.block_tables = NULL; l.kv_lens = &ut;
  if (fbsr_plan(x, &l, NULL)) return 3;
  fbsr_lengths g;
  fbsr_lengths_init(&g, sizeof g);
  g.kv_lens = &lt; g.block_tables = &tt;
  r.lengths = &g; r.out = &bt;
  if (fbsr_run(x, &r)) return 4;
  int32_t places[] = {10, 4};
  fbsr_tensor pt = of(places, 0, 32, 1, l_s);
  fbsr_plan_options p;
  fbsr_plan_options_init(&p, sizeof p);
  p.q_positions = &pt;
  for (int i = 0; i < 64; ++i) b[i] = NAN;
  if (fbsr_plan(x, &l, &p)) return 5;
  say(fbsr_run(x, &r));
  g.q_positions = &pt;
  if (fbsr_run(x, &r)) return 6;
  r.stream = &r;
  say(fbsr_run(x, &r));
  o.context_size = 2; o.context_rank = 2;
  fbsr_attention* y;
  say(fbsr_attention_create(&o, &y));
  double worst = 0;
  for (int i = 0; i < 64; ++i) if (!(fabs(a[i] - b[i]) <= worst)) worst = fabs(a[i] - b[i]);
  fbsr_attention_destroy(x);
  puts(a[0] > 0 && worst < 1e-6 ? "equal" : "different");
  return 0;
}
"""


def test_lengths_that_come_with_the_run(prefix: Path, tmp_path: Path) -> None:
    """Bounds with lengths are the table planned with them; what does not belong is refused."""
    unplanned, other, places, stream, rank, verdict = program(
        prefix, tmp_path, LENGTHS
    ).splitlines()
    assert unplanned.startswith("PlanError|run: got no plan; expected plan() first")
    assert other == ("FlashbsrError|block_tables: got a tensor; expected NULL with FBSR_BOUNDS")
    assert places.startswith("FlashbsrError|q_positions: got None; expected an array")
    assert rank == "FlashbsrError|context_rank: got 2; expected from 0, below context_size=2"
    assert stream.startswith("UnsupportedError|stream: got a value")
    assert verdict == "equal"


def test_no_kernels_is_said(prefix: Path, tmp_path: Path) -> None:
    """Asked for a GPU, a build without kernels answers what it is, and what would have them."""
    text = r"""
#include <flashbsr/c_api.h>
#include <stdio.h>
int main(void) {
  fbsr_attention_options o;
  fbsr_attention* a = NULL;
  fbsr_attention_options_init(&o, sizeof o);
  o.num_qo_heads = o.num_kv_heads = 1; o.head_dim_qk = 64; o.backend = FBSR_BACKEND_CUDA;
  fbsr_status status = fbsr_attention_create(&o, &a);
  printf("%s\n%s\n%s\n", fbsr_cuda_problem(), fbsr_status_name(status), fbsr_last_error());
  return a != NULL;
}
"""
    problem, status, said = program(prefix, tmp_path, text).splitlines()
    assert problem.startswith("this build has no CUDA kernels; ")
    assert status == "UnsupportedError"
    assert said == f"backend: got 'cuda'; expected 'auto' or 'cpu': {problem}"


def test_as_a_subdirectory_without_python(tmp_path: Path) -> None:
    """As FetchContent does it; of the SIMD levels, which take longest, the baseline."""
    without = ["-DFLASHBSR_CUDA=OFF", "-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON"]
    levels = ("AVX2", "AVX512", "AVX512_BF16", "AVX512_AMX")
    without += [f"-DFLASHBSR_COMPILER_HAS_{level}=OFF" for level in levels]
    build(EXAMPLE, tmp_path, f"-DFLASHBSR_SOURCE={ROOT}", *without)
    done = run([tmp_path / "attend_c"])
    assert done.status == 0, done.output


def test_programs_of_the_page(prefix: Path, tmp_path: Path) -> None:
    """Whoever copies them has all that they need."""
    page = (ROOT / "docs/c.md").read_text()
    programs = re.findall(r"^```c\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert programs
    for text in programs:
        assert program(prefix, tmp_path, text).startswith(f"flashbsr {flashbsr.__version__}: ")
