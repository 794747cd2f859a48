// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// An append, checked: shared by the plain one and the one with RoPE.
#pragma once

#include <optional>

#include <flashbsr/cpu/cache_ops.h>

#include "cache.h"
#include "ops.h"
#include "ops_common.h"

namespace flashbsr::api {

struct AppendViews {
  RaggedView key, value;
  CacheViews cache;
  CacheViews scales;  ///< of every token and head; without data: none
  int32_t page_size = 1;
  bool by_slots = false;
  IndexView slots;                                        ///< by slots
  IndexView batch, kv_indices, kv_indptr, last_page_len;  ///< by a page table
  IndexView positions;  ///< by a page table, and of the angles of RoPE
  Place place;

  /// Nothing where the row goes nowhere. Index arrays are on the host, and checked.
  std::optional<cpu::Slot> slot_of(int64_t token) const;
};

/// Checks shapes and types, and with `FLASHBSR_CHECK=1` or on the host the values of the indices
/// that name slots.
AppendViews check_append(const AppendArrays& a, void* stream);

ops::Slots device_slots(const AppendViews& v);

}  // namespace flashbsr::api
