// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The functions around attention: page appends and tables, rotary embedding, state merging, bit
// packing.
// `stream`: the CUDA stream where the arrays are on a device.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <flashbsr/kernel/ops/args.h>

#include "../api/ops.h"
#include "array.h"
#include "layouts.h"

namespace flashbsr::bind {

namespace {

using Llama31 = std::optional<std::tuple<double, double, double>>;

/// Of any place; written with the second form.
struct In : Import {
  In(nb::handle object, const char* name) : Import(object, name, false, Memory::kAny) {}
};
struct Out : Import {
  Out(nb::handle object, const char* name) : Import(object, name, true, Memory::kAny) {}
};
struct OptionalIn : OptionalImport {
  OptionalIn(nb::handle object, const char* name)
      : OptionalImport(object, name, false, Memory::kAny) {}
};

/// Empty: none.
std::optional<DType> codes_named(const std::string& name) {
  for (int t = 0; t < kNumDTypes; ++t) {
    if (name == dtype_name(static_cast<DType>(t))) return static_cast<DType>(t);
  }
  return std::nullopt;
}

/// Scales of every token and head, and what the bytes of K and V are: (k_scales, v_scales, k_codes,
/// v_codes).
struct Codes {
  OptionalImport k_scales, v_scales;
  std::optional<DType> k, v;

  Codes(const nb::tuple& codes, bool writable)
      : k_scales(codes[0], "k_scale", writable, Memory::kAny),
        v_scales(codes[1], "v_scale", writable, Memory::kAny),
        k(codes_named(nb::cast<std::string>(codes[2]))),
        v(codes_named(nb::cast<std::string>(codes[3]))) {}
};

/// The arrays of an append, alive as long as this.
class AppendImports {
 public:
  /// `places`: slot_mapping, or (batch_indices, kv_indices, kv_indptr, kv_last_page_len).
  AppendImports(nb::handle key, nb::handle value, nb::handle k_cache, nb::handle v_cache,
                nb::handle positions, nb::handle places, const nb::tuple& codes)
      : codes_(codes, true),
        key_(key, "append_key"),
        value_(value, "append_value"),
        k_cache_(k_cache, v_cache.is_none() ? "paged_kv_cache" : "k_cache"),
        v_cache_(v_cache, "v_cache", true, Memory::kAny),
        positions_(positions, "positions") {
    if (nb::isinstance<nb::tuple>(places)) {
      table_.emplace(places);
    } else {
      slots_.emplace(places, "slot_mapping");
    }
  }

  api::AppendArrays arrays(const std::string& kv_layout, double k_scale, double v_scale) const {
    return {.key = key_.array(),
            .value = value_.array(),
            .k_cache = k_cache_.array(),
            .v_cache = v_cache_.copy(),
            .positions = positions_.copy(),
            .table = table_ ? std::optional(table_->arrays()) : std::nullopt,
            .slot_mapping = slots_ ? std::optional(slots_->array()) : std::nullopt,
            .hnd = kv_layout == "HND",
            .k_scale = static_cast<float>(k_scale),
            .v_scale = static_cast<float>(v_scale),
            .k_scales = codes_.k_scales.copy(),
            .v_scales = codes_.v_scales.copy(),
            .k_codes = codes_.k,
            .v_codes = codes_.v};
  }

 private:
  struct Table {
    In batch, indices, indptr, last;
    explicit Table(nb::handle places)
        : batch(places[0], "batch_indices"),
          indices(places[1], "kv_indices"),
          indptr(places[2], "kv_indptr"),
          last(places[3], "kv_last_page_len") {}
    api::AppendTable arrays() const {
      return {batch.array(), indices.array(), indptr.array(), last.array()};
    }
  };

  Codes codes_;
  In key_, value_;
  Out k_cache_;
  OptionalImport v_cache_;
  OptionalIn positions_;
  std::optional<Table> table_;
  std::optional<In> slots_;
};

void append(nb::handle key, nb::handle value, nb::handle k_cache, nb::handle v_cache,
            nb::handle positions, nb::handle places, const std::string& kv_layout, double k_scale,
            double v_scale, const nb::tuple& codes, uintptr_t stream) {
  const AppendImports in(key, value, k_cache, v_cache, positions, places, codes);
  const nb::gil_scoped_release unlocked;
  api::append_paged_kv_cache(in.arrays(kv_layout, k_scale, v_scale), stream_of(stream));
}

void dequantize(nb::handle cache, nb::handle scales, const std::string& codes, double number,
                nb::handle out, uintptr_t stream) {
  const In cache_in(cache, "cache"), scales_in(scales, "scale");
  const Out to(out, "out");
  const nb::gil_scoped_release unlocked;
  api::dequantize_kv_cache({cache_in.array(), scales_in.array(), codes_named(codes),
                            static_cast<float>(number), to.array()},
                           stream_of(stream));
}

api::RopeSettings settings(int32_t rotary_dim, bool interleave, double scale, double theta,
                           const Llama31& llama31, const api::Array* cos_sin) {
  api::RopeSettings rope{.rotary_dim = rotary_dim,
                         .interleave = interleave,
                         .frequencies = {.theta = theta, .scale = scale, .given = {}},
                         .cos_sin = std::nullopt};
  if (llama31) {
    RopeFrequencies& f = rope.frequencies;
    f.llama31 = true;
    std::tie(f.low_freq_factor, f.high_freq_factor, f.old_context_len) = *llama31;
  }
  if (cos_sin) rope.cos_sin = *cos_sin;
  return rope;
}

void rope(nb::handle q, nb::handle k, nb::handle q_out, nb::handle k_out, nb::handle positions,
          nb::handle indptr, nb::handle offsets, int32_t rotary_dim, bool interleave, double scale,
          double theta, const Llama31& llama31, nb::handle cos_sin_cache, uintptr_t stream,
          double q_scale, double k_scale) {
  const In q_in(q, "q"), k_in(k, "k");
  const Out q_to(q_out, "q_out"), k_to(k_out, "k_out");
  const OptionalIn position(positions, "positions"), bounds(indptr, "indptr"),
      starts(offsets, "offsets"), table(cos_sin_cache, "cos_sin_cache");
  const nb::gil_scoped_release unlocked;
  api::apply_rope({q_in.array(), k_in.array(), q_to.array(), k_to.array(),
                   static_cast<float>(q_scale), static_cast<float>(k_scale)},
                  {position.copy(), bounds.copy(), starts.copy()},
                  settings(rotary_dim, interleave, scale, theta, llama31, table.get()),
                  stream_of(stream));
}

void rope_append(nb::handle q, nb::handle q_out, nb::handle key, nb::handle value,
                 nb::handle k_cache, nb::handle v_cache, nb::handle positions, nb::handle places,
                 const std::string& kv_layout, double k_scale, double v_scale,
                 const nb::tuple& codes, int32_t rotary_dim, bool interleave, double scale,
                 double theta, const Llama31& llama31, nb::handle cos_sin_cache, uintptr_t stream,
                 double q_scale, bool hadamard) {
  const In q_in(q, "q");
  const Out q_to(q_out, "q_out");
  const AppendImports in(key, value, k_cache, v_cache, positions, places, codes);
  const OptionalIn table(cos_sin_cache, "cos_sin_cache");
  const nb::gil_scoped_release unlocked;
  api::RopeSettings rope = settings(rotary_dim, interleave, scale, theta, llama31, table.get());
  rope.hadamard = hadamard;
  api::rope_append_paged_kv_cache({q_in.array(), q_to.array(), static_cast<float>(q_scale)},
                                  in.arrays(kv_layout, k_scale, v_scale), rope, stream_of(stream));
}

/// [(tokens, [request])], parents before their children.
nb::list find_prefixes(const nb::tuple& layout, bool causal) {
  const LayoutImport laid_out(layout);
  PrefixTree tree;
  api::find_prefixes(tree, laid_out.arrays(), causal);
  nb::list nodes;
  for (const PrefixNode& node : tree.nodes) {
    nb::list requests;
    for (int32_t i = node.first; i < node.last; ++i) {
      requests.append(tree.order[static_cast<size_t>(i)]);
    }
    nodes.append(nb::make_tuple(node.end, requests));
  }
  return nodes;
}

}  // namespace

void bind_ops(nb::module_& m) {
  using namespace nb::literals;
  m.def("append_paged_kv_cache", &append, "append_key"_a, "append_value"_a, "k_cache"_a,
        "v_cache"_a.none(), "positions"_a.none(), "places"_a, "kv_layout"_a, "k_scale"_a,
        "v_scale"_a, "codes"_a, "stream"_a);
  m.def("dequantize_kv_cache", &dequantize, "cache"_a, "scale"_a, "kv_dtype"_a, "number"_a, "out"_a,
        "stream"_a);
  m.def(
      "hadamard",
      [](nb::handle x, nb::handle out, uintptr_t stream) {
        const In in(x, "x");
        const Out to(out, "out");
        const nb::gil_scoped_release unlocked;
        api::hadamard(in.array(), to.array(), stream_of(stream));
      },
      "x"_a, "out"_a, "stream"_a);
  m.def("apply_rope", &rope, "q"_a, "k"_a, "q_out"_a, "k_out"_a, "positions"_a.none(),
        "indptr"_a.none(), "offsets"_a.none(), "rotary_dim"_a, "interleave"_a, "rope_scale"_a,
        "rope_theta"_a, "llama31"_a.none(), "cos_sin_cache"_a.none(), "stream"_a, "q_scale"_a = 1.0,
        "k_scale"_a = 1.0);
  m.def("rope_append_paged_kv_cache", &rope_append, "q"_a, "q_out"_a, "append_key"_a,
        "append_value"_a, "k_cache"_a, "v_cache"_a.none(), "positions"_a, "places"_a, "kv_layout"_a,
        "k_scale"_a, "v_scale"_a, "codes"_a, "rotary_dim"_a, "interleave"_a, "rope_scale"_a,
        "rope_theta"_a, "llama31"_a.none(), "cos_sin_cache"_a.none(), "stream"_a, "q_scale"_a = 1.0,
        "hadamard"_a = false);
  m.def(
      "get_batch_indices_positions",
      [](nb::handle append_indptr, nb::handle seq_lens, nb::handle batch_indices,
         nb::handle positions, uintptr_t stream) {
        const In indptr(append_indptr, "append_indptr"), lens(seq_lens, "seq_lens");
        const Out batch(batch_indices, "batch_indices"), position(positions, "positions");
        api::get_batch_indices_positions(indptr.array(), lens.array(), batch.array(),
                                         position.array(), stream_of(stream));
      },
      "append_indptr"_a, "seq_lens"_a, "batch_indices"_a, "positions"_a, "stream"_a);
  m.def(
      "get_seq_lens",
      [](nb::handle kv_indptr, nb::handle last_page_len, int32_t page_size, nb::handle out,
         uintptr_t stream) {
        const In indptr(kv_indptr, "kv_indptr"), last(last_page_len, "kv_last_page_len");
        const Out lens(out, "out");
        api::get_seq_lens(indptr.array(), last.array(), page_size, lens.array(), stream_of(stream));
      },
      "kv_indptr"_a, "kv_last_page_len"_a, "page_size"_a, "out"_a, "stream"_a);
  m.def("find_prefixes", &find_prefixes, "layout"_a, "causal"_a);
  m.def(
      "packbits",
      [](nb::handle x, nb::handle out, bool little, uintptr_t stream) {
        const In in(x, "x");
        const Out to(out, "out");
        api::packbits(in.array(), to.array(), little, stream_of(stream));
      },
      "x"_a, "out"_a, "little"_a, "stream"_a);
  m.def(
      "segment_packbits",
      [](nb::handle x, nb::handle indptr, nb::handle out, nb::handle out_indptr, bool little,
         nb::handle device_indptr, uintptr_t stream) {
        const In in(x, "x");
        const Import segments(indptr, "indptr");
        const Out to(out, "out"), to_segments(out_indptr, "indptr");
        const OptionalIn there(device_indptr, "indptr");
        api::segment_packbits(in.array(), segments.array(), to.array(), to_segments.array(), little,
                              there.get(), stream_of(stream));
      },
      "x"_a, "indptr"_a, "out"_a, "out_indptr"_a, "little"_a, "device_indptr"_a.none(), "stream"_a);
  m.def(
      "merge_state",
      [](nb::handle v_a, nb::handle s_a, nb::handle v_b, nb::handle s_b, nb::handle v_out,
         nb::handle s_out, bool base2, uintptr_t stream) {
        const In va(v_a, "v_a"), sa(s_a, "s_a"), vb(v_b, "v_b"), sb(s_b, "s_b");
        const Out vo(v_out, "v_out"), so(s_out, "s_out");
        api::merge_state({va.array(), sa.array()}, {vb.array(), sb.array()},
                         {vo.array(), so.array()}, nullptr, base2, stream_of(stream));
      },
      "v_a"_a, "s_a"_a, "v_b"_a, "s_b"_a, "v_out"_a, "s_out"_a, "base2"_a, "stream"_a);
  m.def(
      "merge_state_in_place",
      [](nb::handle v, nb::handle s, nb::handle v_other, nb::handle s_other, nb::handle mask,
         bool base2, uintptr_t stream) {
        const Out va(v, "v"), sa(s, "s");
        const In vb(v_other, "v_other"), sb(s_other, "s_other");
        const OptionalIn keep(mask, "mask");
        api::merge_state({va.array(), sa.array()}, {vb.array(), sb.array()},
                         {va.array(), sa.array()}, keep.get(), base2, stream_of(stream));
      },
      "v"_a, "s"_a, "v_other"_a, "s_other"_a, "mask"_a.none(), "base2"_a, "stream"_a);
  m.def(
      "merge_states",
      [](nb::handle v, nb::handle s, nb::handle v_out, nb::handle s_out, bool base2,
         uintptr_t stream) {
        const In vi(v, "v"), si(s, "s");
        const Out vo(v_out, "v_out"), so(s_out, "s_out");
        api::merge_states({vi.array(), si.array()}, {vo.array(), so.array()}, base2,
                          stream_of(stream));
      },
      "v"_a, "s"_a, "v_out"_a, "s_out"_a, "base2"_a, "stream"_a);
  nb::class_<api::Peers>(m, "Peers")
      .def(
          "__init__",
          [](api::Peers* self, const std::vector<uintptr_t>& inboxes, int32_t rank, int64_t rows,
             int64_t row_bytes, uintptr_t control, uintptr_t missed, int64_t timeout_ms) {
            new (self) api::Peers{inboxes, rank, rows, row_bytes, control, missed, timeout_ms};
          },
          "inboxes"_a, "rank"_a, "rows"_a, "row_bytes"_a, "control"_a, "missed"_a, "timeout_ms"_a);
  m.def("inbox_bytes", &api::inbox_bytes, "ranks"_a, "rows"_a, "row_bytes"_a);
  m.attr("MAX_PEERS") = ops::kMaxPeers;
  m.def(
      "merge_peers",
      [](nb::handle v, nb::handle s, nb::handle v_out, nb::handle s_out, const api::Peers& peers,
         const std::string& travel, bool base2, uintptr_t stream) {
        const In vi(v, "out"), si(s, "lse");
        const Out vo(v_out, "merged"), so(s_out, "merged_lse");
        api::merge_peers({vi.array(), si.array()}, {vo.array(), so.array()}, peers,
                         *codes_named(travel), base2, stream_of(stream));
      },
      "out"_a, "lse"_a, "merged"_a, "merged_lse"_a, "peers"_a, "travel"_a, "base2"_a, "stream"_a);
}

}  // namespace flashbsr::bind
