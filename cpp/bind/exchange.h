// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// DLPackExchangeAPI of dlpack.h (DLPack 1.3), up to what is used: a table of functions that a
// framework offers to C code. tests/build/test_dlpack.py holds it against the official header.
#pragma once

#include <cstdint>

namespace flashbsr::bind {

struct ExchangeHeader {
  uint32_t major, minor;
  const ExchangeHeader* previous;
};

/// `Tensor` is DLPack's DLTensor. describe() is dltensor_from_py_object_no_sync: it fills in a view
/// of an array, which owns nothing, in a tenth of the time that a capsule takes (PyTorch 2.13, Zen
/// 5: 30 and 300 ns).
template <class Tensor>
struct ExchangeApi {
  ExchangeHeader header;
  void* others[3];
  int (*describe)(void* object, Tensor* out);
};

}  // namespace flashbsr::bind
