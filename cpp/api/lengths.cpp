// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "lengths.h"

namespace flashbsr::api {

namespace {

Indices flat(const Array& a, int64_t size) {
  return {.data = a.data, .size = size, .wide = a.element == Element::kI64};
}

void check_size(const Array& a, int64_t wanted, const char* meaning) {
  check_contiguous(a);
  if (a.size() != wanted) bad_shape(a, std::to_string(wanted) + " elements, " + meaning);
}

/// Rows may be apart, ids of a row follow each other.
void take_table(const Array& a, const PlanHeader& plan, Lengths& to) {
  const bool per_head = plan.flags & kPlanPerHead;
  if (per_head) {
    check_rank(a, 3, "[batch_size, num_kv_heads, max_pages]");
    if (a.shape[1] != plan.num_kv_heads || a.stride[0] != a.shape[1] * a.stride[1]) {
      bad_shape(a, "contiguous rows of " + std::to_string(plan.num_kv_heads) + " KV heads");
    }
  } else {
    check_rank(a, 2, "[batch_size, max_pages]");
  }
  check_rows(a);
  const int last = a.ndim - 1;
  const int64_t rows = per_head ? a.shape[0] * a.shape[1] : a.shape[0];
  if (rows != plan.num_requests) {
    bad_shape(a, "tables of " + std::to_string(plan.num_requests) + " requests, as planned");
  }
  to.row = a.shape[last - 1] > 1 || per_head ? a.stride[last - 1] : a.shape[last];
  to.pages = flat(a, rows > 0 ? (rows - 1) * to.row + a.shape[last] : 0);
}

}  // namespace

LengthViews length_views(const LengthArrays& arrays, const PlanHeader& plan, Place place) {
  arrays.each([&](const Array& a) {
    check_element(a, {Element::kI32, Element::kI64});
    if (a.place.cuda) check_place(a, place, "where the plan computes");
  });
  LengthViews to;
  Lengths& now = to.lengths;
  const auto note = [&](Indices Lengths::* field, const Array& a) {
    to.views[to.count++] = {field, !a.place.cuda};
  };
  check_size(arrays.kv_lens, plan.num_requests, "one per request of the plan (and KV head)");
  now.kv_lens = flat(arrays.kv_lens, arrays.kv_lens.size());
  note(&Lengths::kv_lens, arrays.kv_lens);
  if (!arrays.block_tables == !arrays.kv_indices) {
    throw Error(ErrorCode::kValue, "block_tables", arrays.block_tables ? "kv_indices too" : "None",
                "the pages of the lengths: block_tables, or kv_indptr and kv_indices");
  }
  if (!arrays.kv_indptr != !arrays.kv_indices) {
    throw Error(ErrorCode::kValue, "kv_indptr", arrays.kv_indptr ? "an array" : "None",
                "kv_indptr and kv_indices together");
  }
  if (arrays.block_tables) {
    take_table(*arrays.block_tables, plan, now);
    note(&Lengths::pages, *arrays.block_tables);
  }
  if (arrays.kv_indices) {
    check_size(*arrays.kv_indptr, int64_t{plan.num_requests} + 1, "where requests' pages begin");
    check_contiguous(*arrays.kv_indices);
    now.kv_indptr = flat(*arrays.kv_indptr, arrays.kv_indptr->size());
    now.pages = flat(*arrays.kv_indices, arrays.kv_indices->size());
    note(&Lengths::kv_indptr, *arrays.kv_indptr);
    note(&Lengths::pages, *arrays.kv_indices);
  }
  if (arrays.qo_indptr) {
    if (plan.common_prefix > 0) {
      throw Error(ErrorCode::kUnsupported, "qo_indptr", "an array",
                  "None with common_prefix: which rows share it was planned");
    }
    const int64_t batch = plan.num_requests / (plan.flags & kPlanPerHead ? plan.num_kv_heads : 1);
    check_size(*arrays.qo_indptr, batch + 1, "one more than requests");
    now.qo_indptr = flat(*arrays.qo_indptr, arrays.qo_indptr->size());
    note(&Lengths::qo_indptr, *arrays.qo_indptr);
  }
  const bool placed = plan.flags & kPlanPlaced;
  if (placed != arrays.q_positions.has_value()) {
    throw Error(ErrorCode::kValue, "q_positions", placed ? "None" : "an array",
                placed ? "an array, as plan() had" : "None, as plan() had");
  }
  if (placed) {
    check_size(*arrays.q_positions, plan.num_requests, "one per request of the plan");
    now.q_positions = flat(*arrays.q_positions, arrays.q_positions->size());
    note(&Lengths::q_positions, *arrays.q_positions);
  }
  return to;
}

}  // namespace flashbsr::api
