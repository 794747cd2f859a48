// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The functions around attention (api/ops.h) for C.
#include "../api/ops.h"

#include "guard.h"

namespace flashbsr::c {

namespace {

void append(const fbsr_append_arguments& a) {
  const std::pair<const char*, const fbsr_tensor*> table[] = {
      {"batch_indices", a.batch_indices},
      {"positions", a.positions},
      {"kv_indices", a.kv_indices},
      {"kv_indptr", a.kv_indptr},
      {"kv_last_page_len", a.kv_last_page_len}};
  for (const auto& [name, tensor] : table) {
    if (a.slot_mapping && tensor) {
      throw Error(ErrorCode::kValue, "slot_mapping", std::string("slot_mapping and ") + name,
                  "one or the other: slots say where rows go without a page table");
    }
    if (!a.slot_mapping && !tensor) {
      throw Error(ErrorCode::kValue, name, "NULL",
                  "an array; or slot_mapping without a page table");
    }
  }
  api::AppendArrays arrays{.key = array(a.key, "append_key"),
                           .value = array(a.value, "append_value"),
                           .k_cache = array(a.k_cache, a.v_cache ? "k_cache" : "paged_kv_cache"),
                           .v_cache = maybe_array(a.v_cache, "v_cache"),
                           .positions = maybe_array(a.positions, "positions"),
                           .table = std::nullopt,
                           .slot_mapping = maybe_array(a.slot_mapping, "slot_mapping"),
                           .hnd = choice("kv_layout", a.kv_layout, FBSR_NHD, FBSR_HND) == FBSR_HND,
                           .k_scale = a.k_scale,
                           .v_scale = a.v_scale,
                           .k_scales = maybe_array(a.k_scales, "k_scale"),
                           .v_scales = maybe_array(a.v_scales, "v_scale"),
                           .k_codes = dtype("k_dtype", a.k_dtype),
                           .v_codes = dtype("v_dtype", a.v_dtype)};
  if (!a.slot_mapping) {
    arrays.table = api::AppendTable{
        array(a.batch_indices, "batch_indices"), array(a.kv_indices, "kv_indices"),
        array(a.kv_indptr, "kv_indptr"), array(a.kv_last_page_len, "kv_last_page_len")};
  }
  api::append_paged_kv_cache(arrays, a.stream);
}

}  // namespace

}  // namespace flashbsr::c

using namespace flashbsr;

fbsr_status fbsr_append_arguments_init(fbsr_append_arguments* arguments, size_t size) {
  fbsr_append_arguments defaults{};
  defaults.k_scale = defaults.v_scale = 1;
  return c::initialise(arguments, size, defaults);
}

fbsr_status fbsr_append(const fbsr_append_arguments* arguments) {
  return c::guarded([&] { c::append(c::checked(arguments, "arguments")); });
}

fbsr_status fbsr_batch_indices_positions(const fbsr_tensor* append_indptr,
                                         const fbsr_tensor* seq_lens,
                                         const fbsr_tensor* batch_indices,
                                         const fbsr_tensor* positions, void* stream) {
  return c::guarded([&] {
    api::get_batch_indices_positions(
        c::array(append_indptr, "append_indptr"), c::array(seq_lens, "seq_lens"),
        c::array(batch_indices, "batch_indices"), c::array(positions, "positions"), stream);
  });
}

fbsr_status fbsr_merge_state(const fbsr_tensor* v_a, const fbsr_tensor* s_a, const fbsr_tensor* v_b,
                             const fbsr_tensor* s_b, const fbsr_tensor* v_out,
                             const fbsr_tensor* s_out, int32_t base2, void* stream) {
  return c::guarded([&] {
    api::merge_state({c::array(v_a, "v_a"), c::array(s_a, "s_a")},
                     {c::array(v_b, "v_b"), c::array(s_b, "s_b")},
                     {c::array(v_out, "v_out"), c::array(s_out, "s_out")}, nullptr,
                     c::boolean("base2", base2), stream);
  });
}

fbsr_status fbsr_merge_states(const fbsr_tensor* v, const fbsr_tensor* s, const fbsr_tensor* v_out,
                              const fbsr_tensor* s_out, int32_t base2, void* stream) {
  return c::guarded([&] {
    api::merge_states({c::array(v, "v"), c::array(s, "s")},
                      {c::array(v_out, "v_out"), c::array(s_out, "s_out")},
                      c::boolean("base2", base2), stream);
  });
}
