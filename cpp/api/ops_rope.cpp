// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <vector>

#include <flashbsr/cpu/cache_ops.h>
#include <flashbsr/cpu/hadamard.h>

#include "ops_cache.h"

namespace flashbsr::api {

using flashbsr::detail::at;
using flashbsr::detail::bad_index;

namespace {

/// Checks the table and takes its width; `widest` is the smallest head dim. 0 without a table:
/// nothing is turned.
int32_t check_rotation(const RopeSettings& rope, int32_t widest) {
  int32_t rotary_dim = rope.rotary_dim;
  if (!rope.cos_sin && rotary_dim == 0) return 0;
  if (rope.cos_sin) {
    check_element(*rope.cos_sin, {Element::kF32});
    check_rank(*rope.cos_sin, 2, "[max_position, rotary_dim]");
    check_rows(*rope.cos_sin);
    rotary_dim = static_cast<int32_t>(rope.cos_sin->shape[1]);
  }
  if (rotary_dim < 2 || rotary_dim % 2 || rotary_dim > widest) {
    throw Error(ErrorCode::kValue, rope.cos_sin ? "cos_sin_cache" : "rotary_dim",
                std::to_string(rotary_dim) + " rotary dims",
                "an even number in [2, head_dim = " + std::to_string(widest) + "]");
  }
  return rotary_dim;
}

/// `places`: requests or slots of the tokens, of which those below 0 are padding; or null.
void check_table_rows(const Array& cos_sin, const IndexView& positions, const IndexView* places) {
  for (int64_t t = 0; t < positions.size; ++t) {
    if (places && (*places)[t] < 0) continue;
    if (positions[t] < 0 || positions[t] >= cos_sin.shape[0]) {
      bad_index(at("positions", t), positions[t],
                "a row of cos_sin_cache, in [0, " + std::to_string(cos_sin.shape[0]) + ")");
    }
  }
}

/// Cosines and sines of a token, computed or looked up.
class HostRotation {
 public:
  HostRotation(const RopeSettings& rope, int32_t rotary_dim)
      : rotary_dim_(rotary_dim),
        interleave_(rope.interleave),
        table_(rope.cos_sin ? &*rope.cos_sin : nullptr),
        computed_(rope.frequencies, rotary_dim) {}

  void move_to(int64_t position) {
    if (table_) {
      cosines_ = static_cast<const float*>(table_->data) + position * table_->stride[0];
      sines_ = cosines_ + rotary_dim_ / 2;
      return;
    }
    computed_.move_to(position);
    cosines_ = computed_.cosines();
    sines_ = computed_.sines();
  }
  void rotate(const RaggedView& in, const RaggedView& out, int64_t token,
              float scale = 1.0f) const {
    cpu::rotate_token(in, out, token, rotary_dim_, interleave_, cosines_, sines_, scale);
  }

 private:
  int32_t rotary_dim_;
  bool interleave_;
  const Array* table_;
  cpu::TokenRotation computed_;
  const float* cosines_ = nullptr;
  const float* sines_ = nullptr;
};

ops::Rotation device_rotation(const RopeSettings& rope, int32_t rotary_dim) {
  ops::Rotation r;
  r.rotary_dim = rotary_dim;
  r.interleave = rope.interleave;
  if (rope.cos_sin) {
    r.cos_sin = static_cast<const float*>(rope.cos_sin->data);
    r.cos_sin_stride = rope.cos_sin->stride[0];
    r.max_position = rope.cos_sin->shape[0];
    return r;
  }
  if (rotary_dim == 0) {
    static constexpr float kNoAngles = 0;  // a table without rows, which nobody reads
    r.cos_sin = &kNoAngles;
    return r;
  }
  if (rotary_dim > 2 * ops::Rotation::kMaxPairs) {
    throw Error(ErrorCode::kUnsupported, "rotary_dim", std::to_string(rotary_dim),
                "at most " + std::to_string(2 * ops::Rotation::kMaxPairs) +
                    " on a GPU; apply_rope_with_cos_sin_cache has no limit");
  }
  for (int32_t i = 0; i < rotary_dim / 2; ++i) {
    const double turns = rope.frequencies(i, rotary_dim) / (2.0 * M_PI);
    r.turns[i] = static_cast<uint64_t>(std::ldexp(turns - std::floor(turns), 64));
  }
  return r;
}

/// Of heads of q and k, which are of the same dims.
ops::HadamardMatrix hadamard_of(int32_t q_dim, int32_t k_dim, bool cuda) {
  const int order = cpu::Hadamard::order_of(k_dim);
  if (q_dim != k_dim || !order || (cuda && k_dim > ops::kMaxHadamardDim)) {
    throw Error(
        ErrorCode::kUnsupported, "hadamard",
        "head dims " + std::to_string(q_dim) + " of q and " + std::to_string(k_dim) + " of k",
        "the same of both: a power of two, or 12 or 20 times one" +
            (cuda ? ", up to " + std::to_string(ops::kMaxHadamardDim) + " on a GPU"
                  : std::string()));
  }
  return {.scale = 1.0f / std::sqrt(static_cast<float>(k_dim)), .order = order};
}

/// A token's heads as another's, times `scale`.
void move_rows(const RaggedView& from, int64_t of, const RaggedView& to, int64_t token,
               float scale) {
  for (int32_t h = 0; h < from.heads; ++h) {
    cpu::move_elements(from.row(of, h), from.dtype, to.row(token, h), to.dtype, 0, from.dim, scale);
  }
}

/// Rows of a token on their way: heads in float32, turned and transformed there.
class FloatRows {
 public:
  /// @param hadamard  of `dim`, or null
  FloatRows(int32_t heads, int32_t dim, const cpu::Hadamard* hadamard)
      : data_(static_cast<size_t>(heads) * static_cast<size_t>(dim)),
        view_{data_.data(), DType::kF32, 1, heads, dim, int64_t{heads} * dim, dim},
        hadamard_(hadamard) {}

  /// Those of a token, turned.
  const RaggedView& turn(const RaggedView& from, int64_t token, const HostRotation& rotation) {
    move_rows(from, token, view_, 0, 1.0f);
    rotation.rotate(view_, view_, 0);
    for (int32_t h = 0; hadamard_ && h < view_.heads; ++h) {
      (*hadamard_)(reinterpret_cast<float*>(view_.row(0, h)));
    }
    return view_;
  }

 private:
  std::vector<float> data_;
  RaggedView view_;
  const cpu::Hadamard* hadamard_;
};

void check_out(const Array& out, const Array& in, const RaggedView& view) {
  check_shape(out, {view.tokens, view.heads, view.dim});
  check_element(out, {in.element, Element::kE4M3, Element::kE5M2});
  check_no_overlap(out);
}

float inverse_of(float scale, const char* name) {
  const float inverse = 1.0f / scale;
  if (!(scale > 0) || std::isinf(scale) || std::isinf(inverse)) {
    throw Error(ErrorCode::kValue, name, std::to_string(scale),
                "a positive number whose inverse is one");
  }
  return inverse;
}

}  // namespace

void apply_rope(const RopeArrays& a, const RopePositions& at_token, const RopeSettings& rope,
                void* stream) {
  const Array* table = rope.cos_sin ? &*rope.cos_sin : nullptr;
  const Array* positions = at_token.positions ? &*at_token.positions : nullptr;
  const Array* indptr = positions ? nullptr : &*at_token.indptr;
  const Array* offsets = positions ? nullptr : &*at_token.offsets;
  const Place place =
      common_place({&a.q, &a.k, &a.q_out, &a.k_out, positions, indptr, offsets, table});
  const RaggedView q = ragged_view(a.q), k = ragged_view(a.k), q_out = ragged_view(a.q_out, true),
                   k_out = ragged_view(a.k_out, true);
  check_shape(a.k, {q.tokens, -1, -1});
  check_out(a.q_out, a.q, q);
  check_out(a.k_out, a.k, k);
  const int32_t rotary_dim = check_rotation(rope, min_of(q.dim, k.dim));
  const float q_inverse = inverse_of(a.q_scale, "q_scale"),
              k_inverse = inverse_of(a.k_scale, "k_scale");
  if (positions) {
    flashbsr::detail::check_length("positions", indices(*positions).size, q.tokens,
                                   "one per token");
  } else {
    flashbsr::detail::check_length("offsets", indices(*offsets).size,
                                   requests_of("indptr", indices(*indptr)), "one per request");
  }

  if (place.cuda) {
    if (positions && table && checking()) {
      check_table_rows(*table, HostIndices(*positions, stream).view(), nullptr);
    }
    ops::RopeArgs args;
    args.q = {.in = q, .out = q_out, .inverse_scale = q_inverse};
    args.k = {.in = k, .out = k_out, .inverse_scale = k_inverse};
    if (positions) {
      args.positions = device_indices(indices(*positions));
    } else {
      args.indptr = device_indices(indices(*indptr));
      args.offsets = device_indices(indices(*offsets));
      if (args.offsets.size == 0) return;  // no requests, and so no tokens
    }
    args.rotation = device_rotation(rope, rotary_dim);
    return cuda::rope(args, q.tokens, {place.device, stream});
  }
  const IndexView host = indices(*positions);
  if (table) check_table_rows(*table, host, nullptr);
  HostRotation rotation(rope, rotary_dim);
  for (int64_t t = 0; t < q.tokens; ++t) {
    rotation.move_to(host[t]);
    rotation.rotate(q, q_out, t, q_inverse);
    rotation.rotate(k, k_out, t, k_inverse);
  }
}

void rope_append_paged_kv_cache(const RopeQueries& queries, const AppendArrays& a,
                                const RopeSettings& rope, void* stream) {
  const Array &q_in = queries.q, &q_to = queries.out;
  const float q_inverse = inverse_of(queries.scale, "q_scale");
  const Array* table = rope.cos_sin ? &*rope.cos_sin : nullptr;
  const Place place = common_place({&a.key, &q_in, &q_to, table});
  const RaggedView q = ragged_view(q_in), q_out = ragged_view(q_to, true);
  float_dtype(a.key);  // what is rotated is not quantised yet
  check_out(q_to, q_in, q);
  const AppendViews v = check_append(a, stream);
  check_shape(q_in, {v.key.tokens, -1, -1});
  const int32_t rotary_dim = check_rotation(rope, min_of(q.dim, v.key.dim));
  if (table && (!place.cuda || checking())) {
    const HostIndices places(v.by_slots ? *a.slot_mapping : a.table->batch_indices, stream),
        positions(*a.positions, stream);
    check_table_rows(*table, positions.view(), &places.view());
  }

  ops::HadamardMatrix matrix{};
  if (rope.hadamard) matrix = hadamard_of(q.dim, v.key.dim, place.cuda);
  if (place.cuda) {
    const cuda::Queue queue{place.device, stream};
    ops::RopeArgs args;
    args.q = {.in = q, .out = q_out, .inverse_scale = q_inverse};
    args.matrix = matrix;
    args.append = true;
    args.slots = device_slots(v);
    args.positions = device_indices(v.positions);
    args.rotation = device_rotation(rope, rotary_dim);
    const float k_inverse = 1.0f / a.k_scale, v_inverse = 1.0f / a.v_scale;
    if (v.scales.k.data) {
      ops::RopeQuantizeArgs coded{
          .append = {}, .positions = args.positions, .rotation = args.rotation, .matrix = matrix};
      coded.append.k = {v.key, v.cache.k, v.scales.k, k_inverse};
      coded.append.v = {v.value, v.cache.v, v.scales.v, v_inverse};
      coded.append.slots = args.slots;
      cuda::rope_append_quantize(coded, v.key.tokens, queue);
    } else {
      args.k = {.in = v.key, .inverse_scale = k_inverse};
      args.v = {.in = v.value, .inverse_scale = v_inverse};
      args.k_cache = v.cache.k;
      args.v_cache = v.cache.v;
    }
    return cuda::rope(args, v.key.tokens, queue);
  }
  HostRotation rotation(rope, rotary_dim);
  std::optional<cpu::Hadamard> hadamard;
  if (rope.hadamard) hadamard.emplace(v.key.dim);
  // A key is rotated in float and rounded once, to the type of the cache.
  FloatRows keys(v.key.heads, v.key.dim, hadamard ? &*hadamard : nullptr);
  FloatRows queries_turned(q.heads, q.dim, hadamard ? &*hadamard : nullptr);
  for (int64_t t = 0; t < v.key.tokens; ++t) {
    const std::optional<cpu::Slot> slot = v.slot_of(t);
    const int64_t position = v.positions[t];
    const bool known = !table || (position >= 0 && position < table->shape[0]);
    // A slot of -1 says nothing of the query: its key may belong to another rank.
    if (slot || (v.by_slots && known)) {
      rotation.move_to(position);
      if (hadamard) {
        move_rows(queries_turned.turn(q, t, rotation), 0, q_out, t, q_inverse);
      } else {
        rotation.rotate(q, q_out, t, q_inverse);
      }
    } else {
      move_rows(q, t, q_out, t, q_inverse);
    }
    if (!slot) continue;
    cpu::store_token(keys.turn(v.key, t, rotation), 0, v.cache.k, v.scales.k, slot->page,
                     slot->offset, 1.0f / a.k_scale);
    cpu::store_token(v.value, t, v.cache.v, v.scales.v, slot->page, slot->offset, 1.0f / a.v_scale);
  }
}

}  // namespace flashbsr::api
