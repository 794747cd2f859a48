// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What `flashbsr info` says of CUDA. A build without CUDA answers too: it has no rows.
#include <nanobind/stl/string.h>

#include "../cuda/backend.h"
#include "../cuda/driver.h"
#include "../cuda/registry.h"
#include "array.h"

namespace flashbsr::bind {

namespace {

nb::object number_or_none(int value) { return value ? nb::object(nb::int_(value)) : nb::none(); }
nb::object name_or_none(const char* name) {
  return *name != '-' ? nb::object(nb::str(name)) : nb::none();
}

nb::list cuda_kernels() {
  nb::list rows;
  for (const cuda::KernelRow& row : cuda::kernel_rows()) {
    nb::dict d;
    d["name"] = row.name;
    d["family"] = row.family;
    d["arch"] = "sm" + std::to_string(row.arch) + (row.exact ? "a" : "");
    d["head_dim"] = number_or_none(row.head_dim);
    d["head_dim_vo"] = number_or_none(row.head_dim_vo);
    d["kv"] = name_or_none(row.kv);
    d["rows"] = number_or_none(row.rows);
    d["variant"] = name_or_none(row.variant);
    d["targets"] = row.targets();
    d["threads"] = number_or_none(row.shape.threads);
    d["smem_bytes"] = row.shape.smem_bytes;
    d["blocks_per_sm"] = number_or_none(row.shape.blocks_per_sm);
    d["kv_tile"] = number_or_none(row.shape.kv_tile);
    d["image_bytes"] = row.image_end - row.image;
    rows.append(d);
  }
  return rows;
}

nb::list cuda_devices() {
  nb::list rows;
  for (const cuda::DeviceInfo& info : cuda::devices()) {
    nb::dict d;
    d["name"] = info.name;
    d["compute_capability"] = nb::make_tuple(info.cc / 10, info.cc % 10);
    d["sm_count"] = info.sm_count;
    d["max_smem_per_block"] = info.max_smem_per_block;
    d["l2_bytes"] = info.l2_bytes;
    d["memory_bytes"] = info.memory_bytes;
    int runs = 0;
    for (const cuda::KernelRow& row : cuda::kernel_rows()) {
      runs += row.runs_on(info.cc) && row.shape.smem_bytes <= info.max_smem_per_block;
    }
    d["kernels"] = runs;
    rows.append(d);
  }
  return rows;
}

}  // namespace

void bind_cuda(nb::module_& m) {
  m.def("cuda_kernels", &cuda_kernels, "One row per CUDA kernel of this build.");
  m.def("cuda_devices", &cuda_devices, "The GPUs that the CUDA driver sees.");
  m.def("cuda_driver_version", &cuda::driver_version,
        "CUDA version that the driver supports, 13000 for 13.0; 0 without one.");
  m.def("cuda_problem", &cuda::why_unavailable, "Why CUDA cannot be used; empty where it can.");
}

}  // namespace flashbsr::bind
