// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The module: errors, what this build and machine have, buffers for JAX.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <numeric>

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
    constexpr const char* kClasses[] = {"FlashbsrError", "ShapeError",       "DTypeError",
                                        "DeviceError",   "IndexRangeError",  "CapacityError",
                                        "PlanError",     "UnsupportedError", "CudaError"};
    const nb::object cls =
        nb::module_::import_("flashbsr.errors").attr(kClasses[static_cast<int>(e.code)]);
    PyErr_SetObject(cls.ptr(), cls(e.argument, e.actual, e.expected).ptr());
  }
}

nb::list isa_levels() {
  nb::list names;
  for (const cpu::KernelTable* t : cpu::available_tables()) names.append(t->isa);
  return names;
}

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
    d["head_dims"] = "8..256, multiples of 8";
    rows.append(d);
  };
  const char* variants[] = {"softmax", "sigmoid"};
  for (const cpu::KernelTable* t : cpu::available_tables()) {
    for (const char* variant : variants) {
      row(*t, "float32", variant, {"float32", "float16", "bfloat16"},
          {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"});
      if (t->has_bf16_dot) {
        row(*t, "bfloat16", variant, {"bfloat16"}, {"bfloat16", "float8_e4m3fn", "float8_e5m2"});
      }
    }
  }
  return rows;
}

/// An uninitialised host array that speaks DLPack, for frameworks whose arrays are immutable.
/// 64-byte aligned: JAX copies otherwise.
nb::object empty_dlpack(const std::vector<size_t>& shape, const std::string& dtype) {
  struct Row {
    const char* name;
    nb::dlpack::dtype type;
  };
  static constexpr Row kRows[] = {
      {"float32", {2, 32, 1}},       {"float16", {2, 16, 1}},     {"bfloat16", {4, 16, 1}},
      {"float8_e4m3fn", {10, 8, 1}}, {"float8_e5m2", {12, 8, 1}}, {"int32", {0, 32, 1}},
      {"int64", {0, 64, 1}},         {"uint8", {1, 8, 1}},        {"bool", {6, 8, 1}}};
  for (const Row& r : kRows) {
    if (dtype != r.name) continue;
    const size_t count =
        std::accumulate(shape.begin(), shape.end(), size_t{1}, std::multiplies<size_t>());
    constexpr std::align_val_t kAlign{64};
    void* data = ::operator new(max_of<size_t>(count * r.type.bits / 8, 1), kAlign);
    const nb::capsule owner(data, [](void* p) noexcept { ::operator delete(p, kAlign); });
    return nb::cast(nb::ndarray<nb::array_api, nb::device::cpu>(data, shape.size(), shape.data(),
                                                                owner, nullptr, r.type));
  }
  throw Error(ErrorCode::kDType, "dtype_name", dtype, "a data type of flashbsr");
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
  m.doc() = "Compiled core of flashbsr. The documented interface is the package.";
  m.attr("__version__") = FLASHBSR_VERSION;
  nanobind::register_exception_translator(&bind::translate, nullptr);
  m.def("isa_levels", &bind::isa_levels,
        "SIMD levels of this build that this CPU runs, best last.");
  m.def("isa", [] { return cpu::chosen_table().isa; }, "The SIMD level in use.");
  m.def("num_threads", &cpu::available_cores, "Threads that a run uses by default.");
  m.def("kernels", &bind::kernels, "One row per kernel shipped that this machine can run.");
  m.def("empty_dlpack", &bind::empty_dlpack, "shape"_a, "dtype_name"_a,
        "An uninitialised host array that speaks DLPack.");
  m.def("measure_bandwidth", &bind::measure_bandwidth, "bytes"_a, "threads"_a = 0,
        "Memory bandwidth in GB/s over arrays of `bytes` each: STREAM triad, and a plain read.");
  bind::bind_cuda(m);
  bind::bind_engine(m);
  bind::bind_ops(m);
}
