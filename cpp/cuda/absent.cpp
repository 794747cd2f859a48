// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What a build without CUDA answers.
#include <flashbsr/core/error.h>

#include "backend.h"
#include "device_array.h"
#include "driver.h"
#include "ops.h"
#include "registry.h"

namespace flashbsr::cuda {

std::string why_unavailable() {
  return "this build has no CUDA kernels; install from source where nvcc 12.4 or later is found";
}

std::span<const KernelRow> kernel_rows() { return {}; }

const std::vector<DeviceInfo>& devices() {
  static const std::vector<DeviceInfo> none;
  return none;
}

void sweep() {}

int current_device() { return 0; }

int driver_version() { return 0; }

std::unique_ptr<api::Backend> make_backend(const api::AttentionOptions&, int) {
  throw Error(ErrorCode::kUnsupported, "backend", "'cuda'",
              "'auto' or 'cpu': " + why_unavailable());
}

void* allocate(int, int64_t) {
  throw Error(ErrorCode::kUnsupported, "device", "a GPU", "host memory: " + why_unavailable());
}

void release(int, void*) noexcept {}

void synchronize(int, void*) {}

// The checks refuse arrays on a device before these are reached.
void launch_op(const char* family, const Queue&, const OpGrid&, const void*) {
  throw Error(ErrorCode::kUnsupported, family, "a GPU", "host memory: " + why_unavailable());
}

std::vector<int64_t> download(const Indices&, const Queue&) {
  throw Error(ErrorCode::kUnsupported, "device", "a GPU", "host memory: " + why_unavailable());
}

}  // namespace flashbsr::cuda
