// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What compilers of programs are given of this engine.
#include "../api/numbered.h"
#include "../xla/handlers.h"
#include "array.h"

namespace flashbsr::bind {

namespace {

/// {name: (of the CPU, of CUDA)}
nb::dict xla_targets() {
  nb::dict all;
  const auto capsule = [](xla::Handler handler) {
    return nb::capsule(reinterpret_cast<const void*>(handler));
  };
  for (const xla::Target& target : xla::targets()) {
    all[target.name] = nb::make_tuple(capsule(target.cpu), capsule(target.cuda));
  }
  return all;
}

}  // namespace

void bind_programs(nb::module_& m) {
  m.def("xla_targets", &xla_targets, "Handlers of XLA's foreign function interface.");
  m.def(
      "end_programs",
      [] {
        const nb::gil_scoped_release unlocked;  // a run that compiles takes it
        api::end_programs();
      },
      "Wait for runs of compiled programs, and refuse others from now on.");
}

}  // namespace flashbsr::bind
