// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The module: errors, what this build and machine have.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <flashbsr/cpu/bandwidth.h>
#include <flashbsr/cpu/engine.h>

#include "../cpu/dispatch.h"
#include "array.h"

namespace flashbsr::bind {

namespace {

/// flashbsr::Error becomes the class of flashbsr.errors that its code names.
void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& e) {
    const nb::object cls = nb::module_::import_("flashbsr.errors").attr(error_name(e.code));
    PyErr_SetObject(cls.ptr(), cls(e.argument, e.actual, e.expected).ptr());
  }
}

nb::list isa_levels() {
  nb::list names;
  for (const cpu::KernelTable* t : cpu::available_tables()) names.append(t->isa);
  return names;
}

std::string isa_flags(const std::string& isa) { return cpu::level_flags(isa); }

/// A row per kernel that this machine can run.
nb::list kernels() {
  nb::list rows;
  const auto row = [&](const cpu::KernelTable& t, const char* compute, const char* variant,
                       const std::vector<const char*>& q, const std::vector<const char*>& kv) {
    nb::dict d;
    nb::list q_list, kv_list;
    for (const char* name : q) q_list.append(name);
    for (const char* name : kv) kv_list.append(name);
    d["backend"] = "cpu";
    d["isa"] = t.isa;
    d["compute"] = compute;
    d["variant"] = variant;
    d["q_dtypes"] = q_list;
    d["kv_dtypes"] = kv_list;
    d["head_dims"] = "8..512, multiples of 8";
    rows.append(d);
  };
  const char* variants[] = {"softmax", "sigmoid"};
  for (const cpu::KernelTable* t : cpu::available_tables()) {
    for (const char* variant : variants) {
      row(*t, "float32", variant, {"float32", "float16", "bfloat16", "float8_e4m3fn"},
          {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"});
      if (t->has_bf16_dot) {
        row(*t, "bfloat16", variant, {"bfloat16"}, {"bfloat16", "float8_e4m3fn", "float8_e5m2"});
      }
    }
  }
  return rows;
}

nb::dict measure_bandwidth(int64_t bytes, int threads) {
  cpu::Bandwidth measured;
  {
    const nb::gil_scoped_release unlocked;
    measured = cpu::measure_bandwidth(bytes, threads > 0 ? threads : cpu::available_cores());
  }
  nb::dict d;
  d["triad_gbs"] = measured.triad / 1e9;
  d["read_gbs"] = measured.read / 1e9;
  return d;
}

}  // namespace

}  // namespace flashbsr::bind

NB_MODULE(_core, m) {
  using namespace flashbsr;
  using namespace nanobind::literals;
  // Engines call back into the interpreter that made them. Python 3.12 refuses others by itself.
  static nanobind::detail::nb_internals* main_internals = nullptr;
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
    nanobind::detail::internals = main_internals;  // those of this import go with it
    throw nanobind::import_error(
        "flashbsr: got a sub-interpreter; expected the main one, of as many processes as are "
        "needed");
  }
  main_internals = nanobind::detail::internals;
  m.doc() = "Compiled core of flashbsr. The documented interface is the package.";
  m.attr("__version__") = FLASHBSR_VERSION;
  nanobind::register_exception_translator(&bind::translate, nullptr);
  m.def("isa_flags", &bind::isa_flags, "isa"_a, "Compiler flags of a SIMD level.");
  m.def("isa_levels", &bind::isa_levels,
        "SIMD levels of this build that this CPU runs, best last.");
  m.def("isa", [] { return cpu::chosen_table().isa; }, "The SIMD level in use.");
  m.def("num_threads", &cpu::available_cores, "Threads that a run uses by default.");
  m.def("kernels", &bind::kernels, "One row per kernel shipped that this machine can run.");
  m.def("measure_bandwidth", &bind::measure_bandwidth, "bytes"_a, "threads"_a = 0,
        "Memory bandwidth in GB/s over arrays of `bytes` each: STREAM triad, and a plain read.");
  bind::bind_buffers(m);
  bind::bind_cuda(m);
  bind::bind_engine(m);
  bind::bind_ops(m);
  bind::bind_programs(m);
}
