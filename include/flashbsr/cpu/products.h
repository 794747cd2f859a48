// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The two products of an item and a KV tile, S = Q K^T and O += P V: of few rows with K and V where
// they lie, of many with packed ones. Scales of every token are multiplied into logits and weights,
// a group of dims at a time.
#pragma once

#include <flashbsr/cpu/blocks.h>
#include <flashbsr/cpu/scratch.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// A vector of weights, of which `dst` has those of a row.
template <class Op>
FLASHBSR_FN void store_weights(float* dst, int vec, FloatV w) {
  if constexpr (Op::kPerWord == 2) {
    store_as<DType::kBF16>(reinterpret_cast<char*>(dst) + vec * kLanes * 2, w);
  } else {
    store(dst + vec * kLanes, w);
  }
}

template <class Op>
class Products {
 public:
  /// @param q_ld, dv_padded  words of a row of queries, columns of one of the output
  Products(const Params& params, const Blocks<Op>& blocks, const Scratch<Op>& memory,
           const Folding& fold, int64_t q_ld, int64_t dv_padded, int32_t rows)
      : p_(params),
        blocks_(blocks),
        mem_(memory),
        fold_(fold),
        q_ld_(q_ld),
        dv_padded_(dv_padded),
        rows_(rows) {}

  /// Logits of all rows, at most kFewRows, with the tile's keys.
  template <class Edit>
  void keys_in_place(KvTile& tile, const Operand& keys, const Edit& edit) const {
    const bool staged = !in_place<Op>(keys.x) || edit.active();
    const DType type = staged ? kWordType<Op> : keys.x.dtype;
    for_each_stage(tile, staged, [&](int first, int count) {
      if (staged) {
        stage_rows<Op>(tile.k + first, count, keys.from(first), edit, tile.begin + first,
                       reinterpret_cast<char*>(mem_.kt));
      }
      const int tokens = round_up(count, kDotTokens);
      for (int i = count; i < tokens; ++i) {
        tile.k[first + i] = tile.k_scale[first + i] = mem_.zeros;
      }
      const auto dot = [&](int g, int begin, int end, float* s) {
        const TokenRows at = rows_of(tile.k, tile.k_scale, fold_.k, g, first);
        for_each_block([&](int32_t r, int rows) {
          with_row_type<Op>(type, [&]<DType T>() {
            blocks_.template in_place<T>().dot[rows - 1](mem_.q + r * q_ld_, q_ld_, at, tokens,
                                                         begin, end, s + r * kKvTile + first,
                                                         kKvTile);
          });
        });
      };
      const int words = static_cast<int>(q_ld_);
      if (!fold_.keys) return dot(0, 0, words, mem_.s);
      const int group = words / p_.k_scales.dim;
      for (int g = 0; g < p_.k_scales.dim; ++g) {
        dot(g, g * group, (g + 1) * group, fold_.part);
        add_group(g, rows_, first / kLanes, ceil_div(first + count, kLanes));
      }
    });
  }

  /// The tile's values by the weights of all rows.
  template <class Edit>
  void values_in_place(KvTile& tile, const Operand& values, const Edit& edit) const {
    const bool staged = !in_place<Op>(values.x) || edit.active();
    const DType type = staged ? kWordType<Op> : values.x.dtype;
    for_each_stage(tile, staged, [&](int first, int count) {
      if (staged) {
        stage_rows<Op>(tile.v + first, count, values.from(first), edit, tile.begin + first,
                       reinterpret_cast<char*>(mem_.vp));
      }
      const int tokens = round_up(count, Op::kPerWord);
      for (int i = count; i < tokens; ++i) {
        tile.v[first + i] = tile.v_scale[first + i] = mem_.zeros;
      }
      for_each_value_group([&](int g, int column, int columns) {
        const TokenRows at = rows_of(tile.v, tile.v_scale, fold_.v, g, first);
        for_each_block([&](int32_t r, int rows) {
          if (fold_.values) {
            weigh(g, r, rows, first / kLanes, ceil_div(first + count, kLanes));
          }
          with_row_type<Op>(type, [&]<DType T>() {
            blocks_.template in_place<T>().outputs.run({mem_.p + r * kLd + first / Op::kPerWord,
                                                        kLd,
                                                        {at, column},
                                                        mem_.o + r * dv_padded_ + column,
                                                        dv_padded_,
                                                        tokens / Op::kPerWord},
                                                       rows, columns / kLanes);
          });
        });
      });
    });
  }

  /// Logits of rows [first, first + rows) with packed keys, in vectors [vec_begin, vec_end). `dim`:
  /// the keys'.
  void packed_keys(int32_t first, int rows, int dim, int vec_begin, int vec_end) const {
    const int column = vec_begin * kLanes, words = dim / Op::kPerWord;
    const auto dot = [&](int begin, int count, float* s) {
      blocks_.logits.run({mem_.q + first * q_ld_ + begin,
                          q_ld_,
                          {mem_.kt + begin * kKvTile + column, kKvTile},
                          s + column,
                          kKvTile,
                          count},
                         rows, vec_end - vec_begin);
    };
    if (!fold_.keys) return dot(0, words, mem_.s);
    const int group = words / p_.k_scales.dim;
    for (int g = 0; g < p_.k_scales.dim; ++g) {
      dot(g * group, group, fold_.part);
      add_group(g, rows, vec_begin, vec_end);
    }
  }

  /// Packed values by their weights. Columns from token `end` on hold zero weights, but their
  /// packed values are stale.
  void packed_values(int32_t first, int rows, int end, int vec_begin, int vec_end) const {
    const int words_begin = vec_begin * kLanes / Op::kPerWord;
    const int words_end = ceil_div(end, Op::kPerWord);
    for_each_value_group([&](int g, int at, int columns) {
      if (fold_.values) weigh(g, 0, rows, vec_begin, vec_end);
      blocks_.outputs.run(
          {mem_.p + words_begin,
           kLd,
           {mem_.vp + static_cast<int64_t>(words_begin) * dv_padded_ + at, dv_padded_},
           mem_.o + first * dv_padded_ + at,
           dv_padded_,
           words_end - words_begin},
          rows, columns / kLanes);
    });
  }

 private:
  static constexpr int64_t kLd = kKvTile / Op::kPerWord;  ///< words of a row of weights

  /// A tile's rows from token `first` on, for products with group `g` of their dims.
  static TokenRows rows_of(const char* const* rows, const char* const* scales,
                           const FoldedScales& folded, int g, int first) {
    const uint16_t* const lift = folded.lift ? folded.lift + g * kKvTile + first : nullptr;
    return {rows + first, lift, scales + first};
  }

  /// Logits of `rows` rows take the scales of one group of K's dims.
  void add_group(int g, int rows, int vec_begin, int vec_end) const {
    const float* scale = fold_.k.scale + g * kKvTile;
    for (int r = 0; r < rows; ++r) {
      for (int c = vec_begin * kLanes; c < vec_end * kLanes; c += kLanes) {
        const FloatV x = load(fold_.part + r * kKvTile + c) * load(scale + c);
        store(mem_.s + r * kKvTile + c, g == 0 ? x : load(mem_.s + r * kKvTile + c) + x);
      }
    }
  }

  /// Weights of rows, which softmax left in `s`, take the scales of one group of V's dims.
  void weigh(int g, int first, int rows, int vec_begin, int vec_end) const {
    const float* scale = fold_.v.scale + g * kKvTile;
    for (int r = first; r < first + rows; ++r) {
      for (int v = vec_begin; v < vec_end; ++v) {
        store_weights<Op>(mem_.p + r * kLd, v,
                          load(mem_.s + r * kKvTile + v * kLanes) * load(scale + v * kLanes));
      }
    }
  }

  /// Calls f(group, first column of the output, columns).
  template <class F>
  void for_each_value_group(const F& f) const {
    const int groups = fold_.values ? p_.v_scales.dim : 1;
    const int columns = static_cast<int>(dv_padded_) / groups;
    for (int g = 0; g < groups; ++g) f(g, g * columns, columns);
  }

  /// Calls f(first token, tokens) for a tile, or, where rows are converted first, for as many as
  /// stay in L1 until they are multiplied.
  template <class F>
  void for_each_stage(const KvTile& tile, bool staged, const F& f) const {
    constexpr int kStagedTokens = 32;
    const int most = staged ? kStagedTokens : kKvTile;
    for (int first = 0; first < tile.count; first += most) {
      f(first, min_of(most, tile.count - first));
    }
  }

  /// Calls f(first row, rows) for rows that are multiplied side by side.
  template <class F>
  void for_each_block(const F& f) const {
    for (int32_t r = 0; r < rows_; r += kBlockRows) f(r, min_of(kBlockRows, rows_ - r));
  }

  const Params& p_;
  const Blocks<Op>& blocks_;
  const Scratch<Op>& mem_;
  const Folding& fold_;
  const int64_t q_ld_, dv_padded_;
  const int32_t rows_;
};

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
