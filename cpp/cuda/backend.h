// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The CUDA engine as the rest of the library sees it. A build without CUDA has it too (absent.cpp):
// it says so.
#pragma once

#include <memory>
#include <string>

#include "../api/backend.h"
#include "../api/options.h"

namespace flashbsr::cuda {

/// Why no GPU can be used in this process; empty where one can.
std::string why_unavailable();

/// Lets go of what CUDA graphs kept that are gone; it may take the lock of an interpreter.
void sweep();

/// The device of the calling thread's current context, otherwise 0.
int current_device();

/// Throws Error(kUnsupported) where there is no CUDA, Error(kDevice) for an ordinal that is none.
std::unique_ptr<api::Backend> make_backend(const api::AttentionOptions& options, int device);

}  // namespace flashbsr::cuda
