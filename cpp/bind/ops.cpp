// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The functions around attention: page appends, rotary embedding, state merging, bit packing.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "../api/ops.h"
#include "array.h"

namespace flashbsr::bind {

namespace {

using Llama31 = std::optional<std::tuple<double, double, double>>;

void append(nb::handle key, nb::handle value, nb::handle batch_indices, nb::handle positions,
            nb::handle k_cache, nb::handle v_cache, nb::handle kv_indices, nb::handle kv_indptr,
            nb::handle last_page_len, const std::string& kv_layout, double k_scale,
            double v_scale) {
  const Import k(key, "append_key"), v(value, "append_value"),
      batch(batch_indices, "batch_indices"), position(positions, "positions"),
      cache(k_cache, v_cache.is_none() ? "paged_kv_cache" : "k_cache", true),
      indices(kv_indices, "kv_indices"), indptr(kv_indptr, "kv_indptr"),
      last(last_page_len, "kv_last_page_len");
  const OptionalImport v_in(v_cache, "v_cache", true);
  const api::AppendArrays arrays{.key = k.array(),
                                 .value = v.array(),
                                 .batch_indices = batch.array(),
                                 .positions = position.array(),
                                 .k_cache = cache.array(),
                                 .v_cache = v_in.copy(),
                                 .kv_indices = indices.array(),
                                 .kv_indptr = indptr.array(),
                                 .kv_last_page_len = last.array()};
  const nb::gil_scoped_release unlocked;
  api::append_paged_kv_cache(arrays, kv_layout == "HND", static_cast<float>(k_scale),
                             static_cast<float>(v_scale));
}

void rope(nb::handle q, nb::handle k, nb::handle q_out, nb::handle k_out, nb::handle positions,
          int32_t rotary_dim, bool interleave, double scale, double theta, const Llama31& llama31) {
  const Import q_in(q, "q"), k_in(k, "k"), q_to(q_out, "q_out", true), k_to(k_out, "k_out", true),
      position(positions, "positions");
  RopeFrequencies f{.theta = theta, .scale = scale};
  if (llama31) {
    f.llama31 = true;
    std::tie(f.low_freq_factor, f.high_freq_factor, f.old_context_len) = *llama31;
  }
  const nb::gil_scoped_release unlocked;
  api::apply_rope({q_in.array(), k_in.array(), q_to.array(), k_to.array()}, position.array(),
                  rotary_dim, interleave, f);
}

void rope_cos_sin(nb::handle q, nb::handle k, nb::handle q_out, nb::handle k_out,
                  nb::handle positions, nb::handle cos_sin_cache, bool interleave) {
  const Import q_in(q, "q"), k_in(k, "k"), q_to(q_out, "q_out", true), k_to(k_out, "k_out", true),
      position(positions, "positions"), cache(cos_sin_cache, "cos_sin_cache");
  const nb::gil_scoped_release unlocked;
  api::apply_rope_cos_sin({q_in.array(), k_in.array(), q_to.array(), k_to.array()},
                          position.array(), cache.array(), interleave);
}

}  // namespace

void bind_ops(nb::module_& m) {
  using namespace nb::literals;
  m.def("append_paged_kv_cache", &append, "append_key"_a, "append_value"_a, "batch_indices"_a,
        "positions"_a, "k_cache"_a, "v_cache"_a.none(), "kv_indices"_a, "kv_indptr"_a,
        "kv_last_page_len"_a, "kv_layout"_a, "k_scale"_a = 1.0, "v_scale"_a = 1.0);
  m.def("apply_rope", &rope, "q"_a, "k"_a, "q_out"_a, "k_out"_a, "positions"_a, "rotary_dim"_a,
        "interleave"_a, "rope_scale"_a, "rope_theta"_a, "llama31"_a.none());
  m.def("apply_rope_cos_sin", &rope_cos_sin, "q"_a, "k"_a, "q_out"_a, "k_out"_a, "positions"_a,
        "cos_sin_cache"_a, "interleave"_a);
  m.def(
      "get_batch_indices_positions",
      [](nb::handle append_indptr, nb::handle seq_lens, nb::handle batch_indices,
         nb::handle positions) {
        const Import indptr(append_indptr, "append_indptr"), lens(seq_lens, "seq_lens"),
            batch(batch_indices, "batch_indices", true), position(positions, "positions", true);
        api::get_batch_indices_positions(indptr.array(), lens.array(), batch.array(),
                                         position.array());
      },
      "append_indptr"_a, "seq_lens"_a, "batch_indices"_a, "positions"_a);
  m.def(
      "get_seq_lens",
      [](nb::handle kv_indptr, nb::handle last_page_len, int32_t page_size, nb::handle out) {
        const Import indptr(kv_indptr, "kv_indptr"), last(last_page_len, "kv_last_page_len"),
            lens(out, "out", true);
        api::get_seq_lens(indptr.array(), last.array(), page_size, lens.array());
      },
      "kv_indptr"_a, "kv_last_page_len"_a, "page_size"_a, "out"_a);
  m.def(
      "packbits",
      [](nb::handle x, nb::handle out, bool little) {
        const Import in(x, "x"), to(out, "out", true);
        api::packbits(in.array(), to.array(), little);
      },
      "x"_a, "out"_a, "little"_a);
  m.def(
      "segment_packbits",
      [](nb::handle x, nb::handle indptr, nb::handle out, nb::handle out_indptr, bool little) {
        const Import in(x, "x"), segments(indptr, "indptr"), to(out, "out", true),
            to_segments(out_indptr, "out_indptr");
        api::segment_packbits(in.array(), segments.array(), to.array(), to_segments.array(),
                              little);
      },
      "x"_a, "indptr"_a, "out"_a, "out_indptr"_a, "little"_a);
  m.def(
      "merge_state",
      [](nb::handle v_a, nb::handle s_a, nb::handle v_b, nb::handle s_b, nb::handle v_out,
         nb::handle s_out, bool base2) {
        const Import va(v_a, "v_a"), sa(s_a, "s_a"), vb(v_b, "v_b"), sb(s_b, "s_b"),
            vo(v_out, "v_out", true), so(s_out, "s_out", true);
        api::merge_state({va.array(), sa.array()}, {vb.array(), sb.array()},
                         {vo.array(), so.array()}, nullptr, base2);
      },
      "v_a"_a, "s_a"_a, "v_b"_a, "s_b"_a, "v_out"_a, "s_out"_a, "base2"_a);
  m.def(
      "merge_state_in_place",
      [](nb::handle v, nb::handle s, nb::handle v_other, nb::handle s_other, nb::handle mask,
         bool base2) {
        const Import va(v, "v", true), sa(s, "s", true), vb(v_other, "v_other"),
            sb(s_other, "s_other");
        const OptionalImport keep(mask, "mask");
        api::merge_state({va.array(), sa.array()}, {vb.array(), sb.array()},
                         {va.array(), sa.array()}, keep.get(), base2);
      },
      "v"_a, "s"_a, "v_other"_a, "s_other"_a, "mask"_a.none(), "base2"_a);
  m.def(
      "merge_states",
      [](nb::handle v, nb::handle s, nb::handle v_out, nb::handle s_out, bool base2) {
        const Import vi(v, "v"), si(s, "s"), vo(v_out, "v_out", true), so(s_out, "s_out", true);
        api::merge_states({vi.array(), si.array()}, {vo.array(), so.array()}, base2);
      },
      "v"_a, "s"_a, "v_out"_a, "s_out"_a, "base2"_a);
}

}  // namespace flashbsr::bind
