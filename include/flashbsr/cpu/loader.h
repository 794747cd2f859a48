// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The loader: finds the rows of a KV tile through the page table and packs them for the
// micro-kernel.
//
//   K [tokens, D]  -> kt[D words][kKvTile]           transposed: columns are tokens
//   V [tokens, D]  -> vp[tokens / per word][D padded] rows are (pairs of) tokens
//
// Packing converts, rotates (RoPE) and zero-fills: slots past the request's end are never read, so
// NaN or garbage there cannot reach an output. It costs one pass over the tile, shared by all rows.
#pragma once

#include <cstring>

#include <flashbsr/core/params.h>
#include <flashbsr/cpu/codes.h>
#include <flashbsr/cpu/convert.h>
#include <flashbsr/cpu/in_place.h>
#include <flashbsr/cpu/kernel_table.h>
#include <flashbsr/cpu/transpose.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// KV tokens per tile. Against 64: 4 % on prefill and decode, from fewer turns; packed K and V of a
/// 128-wide bf16 head are 64 KB and stream from L2.
inline constexpr int kKvTile = 128;

/// Row pointers of one KV tile.
struct KvTile {
  int32_t begin = 0;  ///< KV position of the first token
  int32_t count = 0;
  const char* k[kKvTile];
  const char* v[kKvTile];
  const char* k_scale[kKvTile];  ///< where there are scales of every token
  const char* v_scale[kKvTile];
};

/// Row pointers of `count` tokens that lie `step` bytes apart. A running pointer, not a product per
/// row: the compiler would vectorise the products into 64-bit multiplies, which doubled decode's
/// time.
FLASHBSR_FN void place_rows(const char** rows, const char* first, int64_t step, int count) {
#pragma GCC unroll 1
  for (int i = 0; i < count; ++i, first += step) rows[i] = first;
}

/// Looks up the pages of tokens [begin, begin + count). One division per tile, then page by page:
/// calls f(index in the tile, page, first token in the page, tokens).
template <class F>
FLASHBSR_FN void for_each_run(const PlanView& plan, const Request& request, int32_t begin,
                              int32_t count, const F& f) {
  const bool paged = plan.header().flags & kPlanPaged;
  // Ragged KV is one page that starts at the request's first token row.
  const int32_t page_size = paged ? plan.header().page_size : request.kv_len;
  const int32_t* pages = plan.kv_indices() + request.kv_begin;
  int32_t index = begin / page_size, slot = begin % page_size;
  for (int i = 0; i < count; slot = 0) {
    const int run = min_of(page_size - slot, count - i);
    f(i, paged ? pages[index++] : int64_t{request.kv_begin}, slot, run);
    i += run;
  }
}

/// Bytes from a token's row to the next one's of its page.
FLASHBSR_FN int64_t token_step(const PlanView& plan, const PagedView& x) {
  const bool paged = plan.header().flags & kPlanPaged;
  return (paged ? x.stride_token : x.stride_page) * dtype_size(x.dtype);
}

FLASHBSR_FN void locate(const Params& p, const PlanView& plan, const Request& request,
                        int32_t kv_head, int32_t begin, int32_t count, KvTile& tile) {
  tile.begin = begin;
  tile.count = count;
  const int64_t k_step = token_step(plan, p.k), v_step = token_step(plan, p.v);
  for_each_run(plan, request, begin, count, [&](int i, int64_t page, int slot, int run) {
    place_rows(tile.k + i, p.k.row(page, 0, kv_head) + slot * k_step, k_step, run);
    place_rows(tile.v + i, p.v.row(page, 0, kv_head) + slot * v_step, v_step, run);
  });
}

/// The scales of K or V of a located tile: for whoever reads rows with their scales or zero points
/// where they are (`rows`, or null), and for logits or weights, with zeros up to a whole vector
/// (`folded`, without a place for scales: none).
FLASHBSR_FN void locate_scales(const PagedView& scales, const PlanView& plan,
                               const Request& request, int32_t kv_head, const KvTile& tile,
                               const char** rows, const FoldedScales& folded) {
  const int64_t step = token_step(plan, scales);
  for_each_run(plan, request, tile.begin, tile.count, [&](int i, int64_t page, int slot, int run) {
    const char* first = scales.row(page, 0, kv_head) + slot * step;
    if (rows) place_rows(rows + i, first, step, run);
    if (folded.scale) load_scales(scales, first, step, run, folded.from(i));
  });
  if (!folded.scale) return;
  for (int g = 0; g < scales.dim; ++g) {
    for (int i = tile.count; i < round_up(tile.count, kLanes); ++i) {
      folded.scale[g * folded.stride + i] = 0;
      if (folded.lift) folded.lift[g * folded.stride + i] = 16;
    }
  }
}

/// Reads one word of every cache line of `count` rows of `bytes` each, a multiple of 8, so that the
/// arithmetic that follows finds them in L2.
///
/// Decode is bound by memory latency, not by bandwidth, unless the core has enough misses in
/// flight, and arithmetic between the loads is what keeps it from that. So the two are separated.
/// Eight places are read in turn because a hardware prefetcher starts anew on every 4 KB page.
/// Measured on a Zen 5 core (docs/cpu.md): 12 GB/s without, 12.5 reading in order, 20 with eight
/// streams; prefetch instructions do not do it, the core drops those that find its miss queue full.
FLASHBSR_FN void touch_rows(const char* const* rows, int count, int64_t bytes) {
  constexpr int kStreams = 8;
  const int part = ceil_div(count, kStreams);
  uint64_t sum = 0;
  for (int i = 0; i < part; ++i) {
    for (int64_t b = 0; b < bytes; b += 64) {
#pragma GCC unroll 8
      for (int s = 0; s < kStreams; ++s) {
        sum += load<uint64_t>(rows[min_of(s * part + i, count - 1)] + b);
      }
    }
  }
  asm volatile("" : : "r"(sum));
}

/// What happens to rows of K or V on their way into the micro-kernel: nothing.
struct NoEdit {
  FLASHBSR_FN bool active() const { return false; }
  FLASHBSR_FN void operator()(float*, int32_t) const {}
};

/// Float row -> words: floats, or bf16 pairs. Pads with zeros to whole vectors.
template <class Op>
FLASHBSR_FN void words_from_float(float* row, int dim, char* dst) {
  const int padded = round_up(dim, kLanes * Op::kPerWord);
  for (int i = dim; i < padded; ++i) row[i] = 0;
  for (int i = 0; i < padded; i += kLanes) {
    if constexpr (Op::kPerWord == 2) {
      store_as<DType::kBF16>(dst + i * 2, load(row + i));
    } else {
      store(dst + i * 4, load(row + i));
    }
  }
}

/// Words of a row of `dim` elements, padded to whole vectors.
template <class Op>
FLASHBSR_FN int padded_words(int dim) {
  return round_up(dim, kLanes * Op::kPerWord) / Op::kPerWord;
}

/// `stage` holds kLanes rows of padded words; `zeros` one row of zero words.
struct PackBuffers {
  char* stage;
  const char* zeros;
};

/// `edit(row, position)` changes a row of floats.
template <class Op, class Edit>
FLASHBSR_FN void pack_keys(const KvTile& tile, const Operand& keys, const Edit& edit,
                           const PackBuffers& buffers, float* kt) {
  const PagedView& k = keys.x;
  const int words = k.dim / Op::kPerWord;
  const int padded = padded_words<Op>(k.dim);
  const bool direct = k.dtype == kWordType<Op> && !edit.active() && words == padded;
  const RowReader read = row_reader(k.dtype);
  for (int first = 0; first < tile.count; first += kLanes) {
    const int live = min_of(kLanes, tile.count - first);
    const char* rows[kLanes];
    for (int j = 0; j < kLanes; ++j) rows[j] = j < live ? tile.k[first + j] : buffers.zeros;
    if (!direct) {
      float row[kMaxHeadDim + 2 * kLanes];
      for (int j = 0; j < live; ++j) {
        read(keys, first + j, row);
        if (edit.active()) edit(row, tile.begin + first + j);
        char* staged = buffers.stage + static_cast<int64_t>(j) * padded * 4;
        words_from_float<Op>(row, k.dim, staged);
        rows[j] = staged;
      }
    }
    for (int w = 0; w < padded; w += kLanes) {
      transpose_words(rows, w, kt + static_cast<int64_t>(w) * kKvTile + first, kKvTile);
    }
  }
}

/// Converts the rows of a tile to words and lets their pointers, `rows`, follow.
template <class Op, class Edit>
FLASHBSR_FN void stage_rows(const char** rows, int count, const Operand& from, const Edit& edit,
                            int32_t position, char* stage) {
  const int64_t bytes = static_cast<int64_t>(padded_words<Op>(from.x.dim)) * 4;
  const RowReader read = row_reader(from.x.dtype);
  float apart[kMaxHeadDim + 2 * kLanes];
  for (int i = 0; i < count; ++i, stage += bytes) {
    float* const row = Op::kPerWord == 1 ? reinterpret_cast<float*>(stage) : apart;
    read(from, i, row);
    if (edit.active()) edit(row, position + i);
    if constexpr (Op::kPerWord == 1) {
      for (int64_t d = from.x.dim; d < bytes / 4; ++d) row[d] = 0;
    } else {
      words_from_float<Op>(row, from.x.dim, stage);
    }
    rows[i] = stage;
  }
}

template <class Op, DType T>
FLASHBSR_FN void pack_value_row(const char* const* rows, int dim, int padded, float* dst) {
  int d = 0;
  if constexpr (Op::kPerWord == 2 && T == DType::kBF16) {
    for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
      FloatV first, second;
      interleave16(rows[0] + d * 2, rows[1] + d * 2, first, second);
      store(dst + d, first);
      store(dst + d + kLanes, second);
    }
  }
  for (; d + kLanes <= dim; d += kLanes) {
    const int64_t at = static_cast<int64_t>(d) * dtype_size(T);
    const FloatV low = load_as<T>(rows[0] + at);
    if constexpr (Op::kPerWord == 2) {
      // Exact for bf16 and both fp8 types: their floats have zeros in the lower half.
      const FloatV high = load_as<T>(rows[1] + at);
      store(dst + d, as_float(bits(low) >> 16 | (bits(high) & 0xffff0000u)));
    } else {
      store(dst + d, low);
    }
  }
  for (; d < dim; ++d) {
    const uint32_t low = float_bits(load_as_float(rows[0], d, T));
    if constexpr (Op::kPerWord == 2) {
      const uint32_t high = float_bits(load_as_float(rows[1], d, T));
      dst[d] = bits_float(low >> 16 | (high & 0xffff0000u));
    } else {
      dst[d] = bits_float(low);
    }
  }
  for (; d < padded; ++d) dst[d] = 0;
}

/// `stage`: two rows of padded words.
template <class Op>
FLASHBSR_FN void pack_values(const KvTile& tile, const Operand& values, const PackBuffers& buffers,
                             float* vp) {
  const PagedView& v = values.x;
  const int padded = padded_words<Op>(v.dim) * Op::kPerWord;
  const auto pack = [&]<DType T>(const auto& row_of) {
    for (int j = 0; j < tile.count; j += Op::kPerWord) {
      const char* rows[2] = {row_of(j, 0), j + 1 < tile.count ? row_of(j + 1, 1) : buffers.zeros};
      pack_value_row<Op, T>(rows, v.dim, padded,
                            vp + static_cast<int64_t>(j / Op::kPerWord) * padded);
    }
  };
  with_codes(v.dtype, [&]<DType T>() {
    if constexpr (is_packed(T)) {
      float row[kMaxHeadDim + 2 * kLanes];
      pack.template operator()<kWordType<Op>>([&](int j, int place) -> const char* {
        char* words = buffers.stage + int64_t{place} * padded_words<Op>(v.dim) * 4;
        codes_to_float<T>(values, j, row);
        words_from_float<Op>(row, v.dim, words);
        return words;
      });
    } else {
      pack.template operator()<T>([&](int j, int) { return tile.v[j]; });
    }
  });
}

/// The same for values that are changed on the way: rows of floats.
template <class Edit>
FLASHBSR_FN void pack_edited_values(const KvTile& tile, const Operand& values, const Edit& edit,
                                    float* vp) {
  const PagedView& v = values.x;
  const int padded = padded_words<F32Op>(v.dim);
  const RowReader read = row_reader(v.dtype);
  float row[kMaxHeadDim + 2 * kLanes];
  for (int j = 0; j < tile.count; ++j) {
    read(values, j, row);
    edit(row, tile.begin + j);
    words_from_float<F32Op>(row, v.dim,
                            reinterpret_cast<char*>(vp + static_cast<int64_t>(j) * padded));
  }
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
