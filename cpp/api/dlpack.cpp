// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "dlpack.h"

#include <mutex>
#include <set>

namespace flashbsr::api {

const char* kept_name(const std::string& text) {
  static std::mutex mutex;
  static std::set<std::string>* const names = new std::set<std::string>;
  const std::lock_guard<std::mutex> hold(mutex);
  return names->insert(text).first->c_str();
}

const char* dlpack_type_name(int code, int bits) {
  constexpr const char* kKinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  constexpr const char* kSmall[] = {"float8_e3m4",     "float8_e4m3",     "float8_e4m3b11fnuz",
                                    "float8_e4m3fn",   "float8_e4m3fnuz", "float8_e5m2",
                                    "float8_e5m2fnuz", "float8_e8m0fnu",  "float6_e2m3fn",
                                    "float6_e3m2fn",   "float4_e2m1fn"};
  if (code < 7) return kept_name(kKinds[code] + std::to_string(bits));
  if (code < 18) return kept_name(kSmall[code - 7]);
  return kept_name("type code " + std::to_string(code) + " of " + std::to_string(bits) + " bits");
}

Place dlpack_place(const char* name, int device_type, int device_id) {
  constexpr int kCpu = 1, kCuda = 2, kCudaManaged = 13;
  if (device_type == kCpu) return {};
  if (device_type == kCuda || device_type == kCudaManaged) {
    return {.cuda = true, .device = device_id};
  }
  throw Error(ErrorCode::kDevice, name,
              "an array on a device of DLPack type " + std::to_string(device_type),
              "an array in host memory or on a CUDA device");
}

}  // namespace flashbsr::api
