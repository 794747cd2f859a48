// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// An append, checked: shared by the plain one and the one with RoPE.
#pragma once

#include "cache.h"
#include "ops.h"
#include "ops_common.h"

namespace flashbsr::api {

struct AppendViews {
  RaggedView key, value;
  CacheViews cache;
  int32_t page_size = 1;
  IndexView batch, positions, kv_indices, kv_indptr, last_page_len;
  Place place;
};

/// Checks shapes and types, and with `FLASHBSR_CHECK=1` or on the host the values of the indices.
AppendViews check_append(const AppendArrays& a, void* stream);

ops::Slots device_slots(const AppendViews& v);

}  // namespace flashbsr::api
