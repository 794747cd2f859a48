// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What a build without CUDA answers.
#include <flashbsr/core/error.h>

#include "backend.h"
#include "device_array.h"

namespace flashbsr::cuda {

std::string why_unavailable() {
  return "this build has no CUDA kernels; install from source where nvcc 12.4 or later is found";
}

int current_device() { return 0; }

std::unique_ptr<api::Backend> make_backend(const api::AttentionOptions&, int) {
  throw Error(ErrorCode::kUnsupported, "backend", "'cuda'",
              "'auto' or 'cpu': " + why_unavailable());
}

void* allocate(int, int64_t) {
  throw Error(ErrorCode::kUnsupported, "device", "a GPU", "host memory: " + why_unavailable());
}

void release(int, void*) noexcept {}

void synchronize(int, void*) {}

}  // namespace flashbsr::cuda
