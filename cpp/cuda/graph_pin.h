// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What CUDA graphs hold on to. A captured launch has pointers into memory of the library; the
// graph, and every executable made of it, keeps that memory by a user object of the driver's, so
// that a replay finds it whatever has become of the object that launched. For sources of cpp/cuda
// only.
#pragma once

#include <memory>

#include "api.h"

namespace flashbsr::cuda {

/// A capture that is under way on a stream.
struct Capture {
  unsigned long long id = 0;  ///< of this capture in the process; 0: none
  CUgraph graph = nullptr;

  explicit operator bool() const { return id != 0; }
};

Capture capture_of(CUstream stream);

/// The graph of `capture` shares `kept` until it and its executables are gone. `alive` goes at once
/// then, `kept` when somebody sweeps: the driver, which tells, may not be called.
void pin(const Capture& capture, std::shared_ptr<void> kept, std::shared_ptr<void> alive);

/// Lets go of what the graphs that are gone have kept. It may free device memory, and take the lock
/// of an interpreter whose objects were kept.
void sweep_pins();

}  // namespace flashbsr::cuda
