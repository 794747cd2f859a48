// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Uninitialised memory that speaks DLPack: results for frameworks whose arrays cannot be written.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <new>
#include <numeric>

#include "../cuda/device_array.h"
#include "array.h"

namespace flashbsr::bind {

namespace {

int64_t bytes_of(const std::vector<size_t>& shape, nb::dlpack::dtype type) {
  return static_cast<int64_t>(std::accumulate(shape.begin(), shape.end(), size_t{type.bits} / 8,
                                              std::multiplies<size_t>()));
}

/// 64-byte aligned: JAX copies otherwise.
nb::object empty_dlpack(const std::vector<size_t>& shape, const std::string& dtype) {
  const nb::dlpack::dtype type = dlpack_type(dtype);
  constexpr std::align_val_t kAlign{64};
  void* data =
      ::operator new(static_cast<size_t>(max_of<int64_t>(bytes_of(shape, type), 1)), kAlign);
  const nb::capsule owner(data, [](void* p) noexcept { ::operator delete(p, kAlign); });
  return nb::cast(nb::ndarray<nb::array_api, nb::device::cpu>(data, shape.size(), shape.data(),
                                                              owner, nullptr, type));
}

/// What a DLPack consumer holds; the memory goes with the last holder.
struct DeviceMemory {
  int device;
  void* data;

  DeviceMemory(int device, int64_t bytes) : device(device), data(cuda::allocate(device, bytes)) {}
  ~DeviceMemory() { cuda::release(device, data); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
};

/// The same on a GPU.
nb::object empty_on_device(const std::vector<size_t>& shape, const std::string& dtype, int device) {
  const nb::dlpack::dtype type = dlpack_type(dtype);
  auto memory = std::make_unique<DeviceMemory>(device, bytes_of(shape, type));
  void* data = memory->data;
  const nb::capsule owner(memory.get(),
                          [](void* p) noexcept { delete static_cast<DeviceMemory*>(p); });
  memory.release();
  return nb::cast(nb::ndarray<nb::array_api, nb::device::cuda>(
      data, shape.size(), shape.data(), owner, nullptr, type, nb::device::cuda::value, device));
}

}  // namespace

void bind_buffers(nb::module_& m) {
  using namespace nb::literals;
  m.def("empty_dlpack", &empty_dlpack, "shape"_a, "dtype_name"_a,
        "An uninitialised host array that speaks DLPack.");
  m.def("empty_on_device", &empty_on_device, "shape"_a, "dtype_name"_a, "device"_a,
        "An uninitialised array in the memory of a GPU that speaks DLPack.");
  m.def("use_exchange_api", &use_exchange_api, "type"_a, "capsule"_a,
        "Describe objects of this type by DLPack's C exchange API; whether it can be used.");
  m.def(
      "synchronize",
      [](int device, uintptr_t stream) {
        const nb::gil_scoped_release unlocked;
        cuda::synchronize(device, reinterpret_cast<void*>(stream));
      },
      "device"_a, "stream"_a, "Wait for the work that is on a CUDA stream now.");
}

}  // namespace flashbsr::bind
