// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Device memory for results of frameworks whose arrays cannot be written. Part of the seam: builds
// without CUDA have it too.
#pragma once

#include <cstdint>

namespace flashbsr::cuda {

/// At least one byte, aligned to 256.
void* allocate(int device, int64_t bytes);
/// Waits for the work that uses it.
void release(int device, void* memory) noexcept;
/// Waits for the work that is on a stream now.
void synchronize(int device, void* stream);

}  // namespace flashbsr::cuda
