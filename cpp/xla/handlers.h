// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Nodes of XLA's programs: the entry points of cpp/api over XLA's buffers, without Python.
#pragma once

#include <vector>

#include "ffi.h"

namespace flashbsr::xla {

struct Target {
  const char* name;
  Handler cpu, cuda;
};

const std::vector<Target>& targets();

}  // namespace flashbsr::xla
