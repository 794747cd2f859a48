// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Loads a kernel when it is first used, once per process, and launches it.
#pragma once

#include <flashbsr/plan/limits.h>

#include <type_traits>

#include "driver.h"
#include "registry.h"

namespace flashbsr::cuda {

/// Where and how wide. Zeros are taken from the row's shape.
struct Launch {
  int device = 0;
  Stream stream = nullptr;
  int grid_x = 1;
  int grid_y = 1;
  int threads = 0;
  int smem_bytes = -1;  ///< dynamic; -1: the row's
  /// Lets the kernel start before the one ahead of it in the stream has finished; it must wait for
  /// that itself (griddepcontrol.wait). Without effect below compute capability 9.0.
  bool overlap = false;
  int cluster = 1;  ///< blocks of a cluster
};

/// Loads the kernel and readies it for a device, so that a later launch does neither: a launch that
/// is being captured into a CUDA graph must find it loaded. Cheap when repeated.
/// Throws Error(kUnsupported) where the kernel's shared memory does not fit the device, and
/// Error(kCuda) where the driver refuses.
void prepare(const KernelRow& row, int device);

/// Of a prepared kernel, by a call of the driver for each size.
ClusterBlocks cluster_blocks(const KernelRow& row, int device);

/// Launches a kernel whose parameters are `params`, a pointer to each. An empty grid is nothing to
/// do. Asynchronous; prepares the kernel first if that was not done. `row` is one of kernel_rows(),
/// or of jit.h.
void launch(const KernelRow& row, const Launch& where, void** params);

/// The same for a kernel of one parameter.
template <class Args>
void launch(const KernelRow& row, const Launch& where, const Args& args) {
  static_assert(std::is_trivially_copyable_v<Args> && !std::is_pointer_v<Args>);
  void* params[] = {const_cast<Args*>(&args)};
  launch(row, where, static_cast<void**>(params));
}

}  // namespace flashbsr::cuda
