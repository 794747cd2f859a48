// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The CUDA driver, opened at run time: the module imports, and answers, on a machine without one.
// Nothing of the CUDA runtime is used. Only sources of cpp/cuda include <cuda.h>, through api.h.
#pragma once

#include <string>
#include <vector>

struct CUstream_st;  // what CUstream points to

namespace flashbsr::cuda {

using Stream = CUstream_st*;

/// Whether there is a driver that serves and at least one device. Decided once per process.
bool available();
/// Why not; empty where available().
const std::string& unavailable_reason();

struct DeviceInfo {
  std::string name;
  int cc = 0;  ///< compute capability, 90 for 9.0
  int sm_count = 0;
  int max_smem_per_block = 0;  ///< after opting in, without what the system reserves
  int max_smem_per_sm = 0;
  int l2_bytes = 0;
  int64_t memory_bytes = 0;
};

/// Every device, read once. Empty where not available().
const std::vector<DeviceInfo>& devices();
/// Throws Error(kDevice) for an ordinal that is none.
const DeviceInfo& device_info(int device);

/// CUDA version that the driver supports, 13000 for 13.0; 0 without a driver.
int driver_version();

}  // namespace flashbsr::cuda
