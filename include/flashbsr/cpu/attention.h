// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// One work item on one CPU thread: a row tile of packed queries against a KV range.
//
//   load Q -> for each KV tile: pack K, V -> for each block of 6 rows: S = Q K^T, softmax, O += P V
//          -> write the output, or the partial state if the tile was split
//
// Softmax is online (Milakov & Gimelshein, 2018) in base 2, and lazy: the accumulator is rescaled
// only when a row's maximum grew by more than 8, so P stays below 2^8 and most tiles skip the pass
// over O.
#pragma once

#include <flashbsr/core/state.h>
#include <flashbsr/cpu/epilogue.h>
#include <flashbsr/cpu/integers.h>
#include <flashbsr/cpu/joined.h>
#include <flashbsr/cpu/kernel_table.h>
#include <flashbsr/cpu/math.h>
#include <flashbsr/cpu/products.h>
#include <flashbsr/cpu/rope.h>
#include <flashbsr/cpu/scratch.h>
#include <flashbsr/variant/variant.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

inline constexpr float kRescaleStep = 8.0f;

template <class Op, class Variant>
  requires AttentionVariant<Variant, VectorMath>
class ItemKernel {
  static_assert(Op::kPerWord == 1 || !(Variant::transforms_queries || Variant::transforms_keys ||
                                       Variant::transforms_values),
                "rows that a variant changes are multiplied in float32");

 public:
  ItemKernel(const Params& params, const Blocks<Op>& blocks, PlanView plan, Activation activation,
             int32_t item, char* memory)
      : p_(params),
        blocks_(blocks),
        plan_(plan),
        h_(plan.header()),
        item_(plan.items()[item]),
        request_(counted(h_, plan.requests()[item_.request])),
        first_position_(flashbsr::first_position(plan.requests()[item_.request])),
        variant_(params),
        activation_(activation),
        keys_(joined_keys<Op>(params)),
        v_(joined_values<Op>(params)),
        mem_(memory, item_.row_count, keys_.dim, params.v.dim),
        q_ld_(padded_words<Op>(keys_.dim)),
        dv_padded_(padded_words<Op>(params.v.dim) * Op::kPerWord),
        joined_(memory + mem_.bytes),
        fold_(joined_ + joined_bytes(params), params),
        integers_(joined_ + joined_bytes(params) + fold_.bytes,
                  kIntegers && item_.row_count <= kFewRows ? item_.row_count : 0, keys_.dim) {
    // Rows that are edited take their scales first; so do packed ones that become floats, whose
    // groups would be multiplied apart.
    const auto take_scales = [](bool edited, DType t) {
      return edited || (Op::kPerWord == 1 && is_packed(t));
    };
    fold_.keys = fold_.keys && !take_scales(KeyEdit{*this}.active(), p_.k.dtype);
    fold_.values = fold_.values && !take_scales(ValueEdit{*this}.active(), p_.v.dtype);
  }

  int64_t scratch_bytes() const {
    return mem_.bytes + joined_bytes(p_) + fold_.bytes + integers_.bytes;
  }

  /// Whether products of few rows with K, or with V, are those of integers.h.
  bool integer_keys() const { return kIntegers && fold_.keys && in_integers(p_.k, p_.k_scales); }
  bool integer_values() const {
    return kIntegers && fold_.values && in_integers(p_.v, p_.v_scales);
  }

  /// Loads Q. The tile before the first is empty.
  void begin() {
    load_queries();
    tile_.begin = item_.kv_begin;
    tile_.count = 0;
  }

  /// Finds the next KV tile. False when none is left.
  bool next_tile() {
    const int32_t begin = tile_.begin + tile_.count;
    const int32_t count = min_of(kKvTile, item_.kv_end - begin);
    if (count <= 0) return false;
    locate(p_, plan_, request_, item_.kv_head, begin, count, tile_);
    if (p_.k_tail.dim) join_keys<Op>(p_, plan_, request_, item_.kv_head, tile_, joined_);
    const auto find_scales = [&](const PagedView& x, const PagedView& scales, bool folded,
                                 const char** rows, const FoldedScales& to) {
      if (!scales.data) return;
      locate_scales(scales, plan_, request_, item_.kv_head, tile_,
                    !folded || is_packed(x.dtype) ? rows : nullptr, folded ? to : FoldedScales{});
    };
    find_scales(p_.k, p_.k_scales, fold_.keys, tile_.k_scale, fold_.k);
    find_scales(p_.v, p_.v_scales, fold_.values, tile_.v_scale, fold_.v);
    return true;
  }

  const KvTile& tile() const { return tile_; }

  /// All rows against the tile, packed first.
  void attend() {
    pack_keys<Op>(tile_, key_rows(), KeyEdit{*this}, mem_.pack, mem_.kt);
    if constexpr (Variant::transforms_values) {
      pack_edited_values(tile_, value_rows(), ValueEdit{*this}, mem_.vp);
    } else {
      pack_values<Op>(tile_, value_rows(), mem_.pack, mem_.vp);
    }
    for (int32_t r = 0; r < item_.row_count; r += kBlockRows) attend_block(tile_, r);
  }

  // The same in two steps for few rows, on K and V where they lie.

  /// P = softmax(Q K^T).
  void score() {
    if (integer_keys()) {
      multiply_integer_keys();
    } else {
      products_.keys_in_place(tile_, key_rows(), KeyEdit{*this});
    }
    const int vecs = ceil_div(tile_.count, kLanes);
    for (int32_t r = 0; r < item_.row_count; ++r) softmax_row(tile_, r, r, 0, vecs);
  }

  /// O += P V.
  void accumulate() {
    if (integer_values()) {
      multiply_integer_values();
    } else {
      products_.values_in_place(tile_, value_rows(), ValueEdit{*this});
    }
  }

  /// Writes the output, or the partial state of a split tile.
  void finish() {
    for (int32_t r = 0; r < item_.row_count; ++r) {
      const Row& row = mem_.row[r];
      float* o = mem_.o + static_cast<int64_t>(r) * dv_padded_;
      float lse = 0;
      if (zipped()) unzip_columns(o, dv_padded_);
      if (softmax()) {
        const float sum = reduce_add(mem_.sum[r]);
        lse = sum == 0 ? -infinity() : row.max + __builtin_log2f(sum);
        const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
        for (int d = 0; d < dv_padded_; d += kLanes) store(o + d, load(o + d) * inverse);
      }
      if (item_.slot < 0) {
        write_row(p_, variant_, softmax(), row_at(row, p_.v.dim), item_.kv_head, o, lse);
      } else {
        const int64_t at = static_cast<int64_t>(item_.slot) + r;
        std::memcpy(p_.partial_out + at * p_.v.dim, o, static_cast<size_t>(p_.v.dim) * 4);
        p_.partial_lse[at] = lse;
      }
    }
  }

 private:
  static constexpr bool kIntegers = kHasIntegers && Op::kPerWord == 2;

  void multiply_integer_keys() {
    if constexpr (kIntegers) {
      with_integers(p_.k.dtype, [&]<DType T>() {
        score_integers<T>(key_rows(), tile_.count, fold_.k.scale, kKvTile, item_.row_count,
                          integers_, mem_.s, kKvTile);
      });
    }
  }

  void multiply_integer_values() {
    if constexpr (kIntegers) {
      with_integers(p_.v.dtype, [&]<DType T>() {
        int8_t* v = reinterpret_cast<int8_t*>(mem_.vp);
        interleave_values<T>(value_rows(), tile_.count, v);
        accumulate_integers<T>(value_rows(), tile_.count, mem_.s, kKvTile, fold_.v.scale, kKvTile,
                               item_.row_count, v, integers_, mem_.o, dv_padded_);
      });
    }
  }

  bool softmax() const { return has_softmax<Variant>(activation_); }
  bool rotates() const { return p_.rope.fine != nullptr; }
  Operand key_rows() const { return {keys_, p_.k_scales, tile_.k, tile_.k_scale, !fold_.keys}; }
  Operand value_rows() const { return {v_, p_.v_scales, tile_.v, tile_.v_scale, !fold_.values}; }

  /// A row of K while it is packed: the variant's hook, then RoPE.
  struct KeyEdit {
    const ItemKernel& kernel;

    FLASHBSR_FN bool active() const { return Variant::transforms_keys || kernel.rotates(); }
    FLASHBSR_FN void operator()(float* row, int32_t position) const {
      const Params& p = kernel.p_;
      if constexpr (Variant::transforms_keys) {
        kernel.variant_.key_transform(row, kernel.kv_row_at(position, kernel.keys_.dim));
      }
      if (kernel.rotates()) {
        rope_row(row, kernel.keys_.dim, key_position(kernel.h_, position), p.rope);
      }
    }
  };

  /// A row of V.
  struct ValueEdit {
    const ItemKernel& kernel;

    FLASHBSR_FN bool active() const { return Variant::transforms_values; }
    FLASHBSR_FN void operator()(float* row, int32_t position) const {
      if constexpr (Variant::transforms_values) {
        kernel.variant_.value_transform(row, kernel.kv_row_at(position, kernel.p_.v.dim));
      }
    }
  };

  RowAt row_at(const Row& row, int32_t dim) const {
    return {&request_, row.token, position(row), row.q_head, dim};
  }
  RowAt kv_row_at(int32_t position, int32_t dim) const {
    return {&request_, position, key_position(h_, position), item_.kv_head, dim};
  }

  void load_queries() {
    std::memset(mem_.zeros, 0, kMaxHeadDim * 4 + 64);
    const int32_t group = h_.group_size;
    float staged[kMaxHeadDim + 2 * kLanes];
    for (int32_t r = 0; r < item_.row_count; ++r) {
      const int32_t packed = item_.row_begin + r;
      Row& row = mem_.row[r];
      row.token = packed / group;
      row.q_head = item_.kv_head * group + packed % group;
      row.span = request_.shared() ? Span{0, request_.kv_len}
                                   : visible_keys(h_, position(row), request_.kv_len);
      row.scale = p_.sm_scale * (p_.q_head_scale ? p_.q_head_scale[row.q_head] : 1.0f) *
                  (p_.k_head_scale ? p_.k_head_scale[item_.kv_head] : 1.0f);
      row.max = -infinity();
      mem_.sum[r] = FloatV{};
      const char* src = p_.q.row(query_row(request_, row.token, plan_.q_rows()), row.q_head);
      with_dtype(p_.q.dtype, [&]<DType T>() { row_to_float<T>(src, staged, p_.q.dim); });
      if constexpr (Variant::transforms_queries) {
        variant_.query_transform(&staged[0], row_at(row, p_.q.dim));
      }
      if (rotates()) rope_row(staged, p_.q.dim, position(row), p_.rope);
      words_from_float<Op>(staged, p_.q.dim, reinterpret_cast<char*>(mem_.q + r * q_ld_));
      if (item_.row_count <= kFewRows) put_among_few(staged, r);
    }
    std::memset(mem_.o, 0, static_cast<size_t>(item_.row_count) * dv_padded_ * 4);
  }

  /// What products with codes want of a query row besides.
  void put_among_few(const float* x, int32_t r) {
    if constexpr (Op::kPerWord == 2) {
      if (keys_.dtype == DType::kI8 && in_place<Op>(keys_)) {
        swap_queries(x, p_.q.dim, mem_.q + r * q_ld_);
      }
    }
    if constexpr (kIntegers) {
      if (integer_keys()) split_query(x, p_.q.dim, r, item_.row_count, integers_);
    }
  }

  /// Whether columns of O are in the order of the values' codes.
  bool zipped() const {
    return Op::kPerWord == 2 && item_.row_count <= kFewRows && is_packed(v_.dtype) &&
           in_place<Op>(v_) && !integer_values();
  }

  int32_t position(const Row& row) const { return first_position_ + row.token; }

  /// Six rows against one packed tile. Only the columns that some row sees are computed.
  void attend_block(const KvTile& tile, int32_t first) {
    const int rows = min_of(kBlockRows, item_.row_count - first);
    int32_t low = tile.count, high = 0;
    for (int r = 0; r < rows; ++r) {
      const Span& span = mem_.row[first + r].span;
      low = min_of(low, max_of(span.begin - tile.begin, 0));
      high = max_of(high, min_of(span.end - tile.begin, tile.count));
    }
    if (low >= high) return;
    const int vec_begin = low / kLanes, vec_end = ceil_div<int>(high, kLanes);
    products_.packed_keys(first, rows, keys_.dim, vec_begin, vec_end);
    for (int r = 0; r < rows; ++r) softmax_row(tile, first + r, r, vec_begin, vec_end);
    products_.packed_values(first, rows, min_of(vec_end * kLanes, tile.count), vec_begin, vec_end);
  }

  /// Where V has scales, weights stay floats in place of the logits until they take them.
  FLASHBSR_FN void put_weights(float* s, float* weights, int vec, FloatV w) {
    if (fold_.values) {
      store(s + vec * kLanes, w);
    } else {
      store_weights<Op>(weights, vec, w);
    }
  }

  /// Turns a row of raw dot products into weights: scale, transform, mask, activation.
  void softmax_row(const KvTile& tile, int32_t index, int block_row, int vec_begin, int vec_end) {
    Row& row = mem_.row[index];
    float* s = mem_.s + block_row * kKvTile;
    float* weights = mem_.p + block_row * (kKvTile / Op::kPerWord);
    const int32_t low = row.span.begin - tile.begin;
    const int32_t high = min_of(row.span.end - tile.begin, tile.count);
    const bool whole = low <= vec_begin * kLanes && high >= vec_end * kLanes;
    const float scale = row.scale * kLog2e;

    FloatV peak = splat(-infinity());
    float factor = scale;  // what pass 2 still has to multiply by
    const bool unmasked =
        !variant_.masks_logits() ||
        (whole && variant_.keeps_all(request_, row.token, tile.begin + vec_begin * kLanes,
                                     tile.begin + vec_end * kLanes));
    if (softmax() && whole && scale > 0 && !variant_.transforms_logits() && unmasked) {
      for (int v = vec_begin; v < vec_end; ++v) peak = max(peak, load(s + v * kLanes));
      peak = peak * scale;
    } else {
      factor = 1.0f;
      for (int v = vec_begin; v < vec_end; ++v) {
        const FloatV x = masked_logits(tile, row, load(s + v * kLanes), v * kLanes, low, high);
        store(s + v * kLanes, x);
        peak = max(peak, x);
      }
    }

    if (softmax()) {
      const float top = reduce_max(peak);
      if (!(top <= row.max + kRescaleStep)) {
        rescale(row, top, mem_.sum[index], mem_.o + int64_t{index} * dv_padded_, dv_padded_);
      }
      const float base = row.max == -infinity() ? 0.0f : row.max;
      FloatV sum = mem_.sum[index];
      for (int v = vec_begin; v < vec_end; ++v) {
        const FloatV w = exp2_clamped(load(s + v * kLanes) * factor - base);
        sum += w;
        put_weights(s, weights, v, w);
      }
      mem_.sum[index] = sum;
    } else {
      for (int v = vec_begin; v < vec_end; ++v) {
        const FloatV x = load(s + v * kLanes);
        const IntV dropped = x == splat(-infinity());
        const FloatV w = variant_.template activation<VectorMath>(x * kLn2);
        put_weights(s, weights, v, select(dropped, FloatV{}, w));
      }
    }
  }

  /// Logits in base-2 units, -inf where the row does not see the position.
  FLASHBSR_FN FloatV masked_logits(const KvTile& tile, const Row& row, FloatV raw, int column,
                                   int32_t low, int32_t high) {
    const IntV lane = iota() + column;
    IntV keep = (lane >= low) & (lane < high);
    FloatV x = raw * row.scale;
    if (variant_.transforms_logits() || variant_.masks_logits()) {
      const LogitsAt<VectorMath> at{.request = &request_,
                                    .q_token = row.token,
                                    .q_position = position(row),
                                    .q_head = row.q_head,
                                    .kv_head = item_.kv_head,
                                    .kv_first = tile.begin + column,
                                    .lanes = min_of(kLanes, tile.count - column),
                                    .kv_position = key_positions(lane + tile.begin),
                                    .row_value = variant_.row_value(row.q_head)};
      if (variant_.transforms_logits()) {
        x = variant_.template logits_transform<VectorMath>(x, at);
      }
      if (variant_.masks_logits()) keep &= variant_.template logits_mask<VectorMath>(at);
    }
    return select(keep, x * kLog2e, splat(-infinity()));
  }

  IntV key_positions(IntV keys) const {
    for (int i = 0; h_.context_size > 1 && i < kLanes; ++i) keys[i] = key_position(h_, keys[i]);
    return keys;
  }

  const Params& p_;
  const Blocks<Op>& blocks_;
  PlanView plan_;
  const PlanHeader& h_;
  const WorkItem item_;
  const Request request_;
  const int32_t first_position_;
  const Variant variant_;
  const Activation activation_;
  const PagedView keys_, v_;
  const Scratch<Op> mem_;
  const int64_t q_ld_, dv_padded_;
  char* const joined_;  ///< joined_bytes()
  Folding fold_;
  const IntegerMemory integers_;
  const Products<Op> products_{p_, blocks_, mem_, fold_, q_ld_, dv_padded_, item_.row_count};
  KvTile tile_;
};

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
