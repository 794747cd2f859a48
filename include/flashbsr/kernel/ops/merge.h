// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The merge of attention states (core/state.h) of equal rows: two states of two arrays, or any
// number along a dimension. A group of lanes, a power of two, takes a row; each lane two times 16
// bytes of it, of up to four states at once: the weights cost as much as the rows, so that fewer
// lanes per row are better. Accumulated in float in the order of the states.
#pragma once

#include <flashbsr/kernel/ops/unit.h>
#include <flashbsr/ptx/math.h>

namespace flashbsr::ops {

/// States that a lane has in flight.
inline constexpr int kMergeChunk = 4;

/// Elements of a lane: 16 bytes, or one element where rows are not made of 16-byte units. Kept as
/// they come until they are added up, so that states in flight cost few registers.
template <DType kType, bool kAligned>
struct MergeUnit {
  static constexpr int kElements = 16 / dtype_size(kType);
  static constexpr int kOutBytes = 16;
  uint4 bits;

  FLASHBSR_DEVICE static MergeUnit load(const char* p) {
    return {*reinterpret_cast<const uint4*>(p)};
  }

  FLASHBSR_DEVICE void add_to(float (&sum)[kElements], float weight) const {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kType == DType::kF32) {
        sum[i] += weight * bits_float(words[i]);
      } else {
        sum[2 * i] += weight * ptx::unpack_low<kType>(words[i]);
        sum[2 * i + 1] += weight * ptx::unpack_high<kType>(words[i]);
      }
    }
  }

  template <int kArch>
  FLASHBSR_DEVICE static void store(char* p, const float (&x)[kElements]) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kType == DType::kF32) {
        words[i] = float_bits(x[i]);
      } else {
        words[i] = pack<kArch, kType>(x[2 * i], x[2 * i + 1]);
      }
    }
    *reinterpret_cast<uint4*>(p) = make_uint4(words[0], words[1], words[2], words[3]);
  }
};

template <DType kType>
struct MergeUnit<kType, false> {
  static constexpr int kElements = 1;
  static constexpr int kOutBytes = dtype_size(kType);
  float x;

  FLASHBSR_DEVICE static MergeUnit load(const char* p) { return {load_as_float(p, 0, kType)}; }
  FLASHBSR_DEVICE void add_to(float (&sum)[1], float weight) const { sum[0] += weight * x; }
  template <int kArch>
  FLASHBSR_DEVICE static void store(char* p, const float (&x)[1]) {
    store_from_float(p, 0, kType, x[0]);
  }
};

/// What states in memory have in common: units lie where they are, and are there.
template <class States>
struct StatesInMemory {
  template <class MUnit>
  FLASHBSR_DEVICE MUnit unit(int32_t i, int64_t index) const {
    return MUnit::load(static_cast<const States*>(this)->row(i) + index * MUnit::kOutBytes);
  }
  template <class... Loaded>
  FLASHBSR_DEVICE bool missing(Loaded&&...) const {
    return false;
  }
};

/// State i of a row in one array.
struct StackedStates : StatesInMemory<StackedStates> {
  const char* v;
  const float* s;
  int64_t v_stride;  ///< bytes
  int64_t s_stride;

  FLASHBSR_DEVICE StackedStates(const char* rows, const float* lses, int64_t v_step, int64_t s_step)
      : v(rows), s(lses), v_stride(v_step), s_stride(s_step) {}
  FLASHBSR_DEVICE const char* row(int32_t i) const { return v + i * v_stride; }
  FLASHBSR_DEVICE float lse(int32_t i) const { return s[i * s_stride]; }
};

/// Two states of two arrays.
struct TwoStates : StatesInMemory<TwoStates> {
  const char* v[2];
  const float* s[2];

  FLASHBSR_DEVICE TwoStates(const char* v_a, const float* s_a, const char* v_b, const float* s_b)
      : v{v_a, v_b}, s{s_a, s_b} {}
  FLASHBSR_DEVICE const char* row(int32_t i) const { return i ? v[1] : v[0]; }
  FLASHBSR_DEVICE float lse(int32_t i) const { return i ? *s[1] : *s[0]; }
};

/// A lane's units of a row: `first`, and kMergeUnits - 1 more, `group` apart.
struct LaneUnits {
  int32_t first;
  int32_t group;
  int32_t count;  ///< of the row

  FLASHBSR_DEVICE bool live(int i) const { return first + i * group < count; }
  FLASHBSR_DEVICE int64_t index(int i) const { return first + i * group; }
};

/// Merges `count` states of a lane's units. Returns the merged LSE.
///
/// States that travel are asked for until they are there.
/// A state of weight 0 is skipped, not multiplied: where its LSE is -inf its O may be anything.
template <int kArch, class MUnit, int kChunk, class States>
FLASHBSR_DEVICE float merge_units(States& states, int32_t count, const LaneUnits& units, char* out,
                                  const MergeArgs& a) {
  constexpr int kElements = MUnit::kElements;
  float acc[kMergeUnits][kElements] = {};
  float top = -infinity(), sum = 0.0f;
  for (int32_t first = 0; first < count; first += kChunk) {
    float lse[kChunk];
    MUnit in[kChunk][kMergeUnits];
    do {
#pragma unroll
      for (int s = 0; s < kChunk; ++s) {
        lse[s] = -infinity();
        if (first + s >= count) continue;
        lse[s] = states.lse(first + s);
#pragma unroll
        for (int i = 0; i < kMergeUnits; ++i) {
          if (units.live(i)) in[s][i] = states.template unit<MUnit>(first + s, units.index(i));
        }
      }
    } while (states.missing(first, count, units, lse, in));
    float chunk_top = top;
#pragma unroll
    for (int s = 0; s < kChunk; ++s) chunk_top = ptx::max(chunk_top, lse[s]);
    if (first > 0 && chunk_top > top) {
      const float rescale = exp2f((top - chunk_top) * a.per_unit);
      sum *= rescale;
#pragma unroll
      for (int i = 0; i < kMergeUnits; ++i) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) acc[i][j] *= rescale;
      }
    }
    top = chunk_top;
#pragma unroll
    for (int s = 0; s < kChunk; ++s) {
      const float weight = lse[s] == -infinity() ? 0.0f : exp2f((lse[s] - top) * a.per_unit);
      sum += weight;
      if (weight == 0.0f) continue;
#pragma unroll
      for (int i = 0; i < kMergeUnits; ++i) {
        if (units.live(i)) in[s][i].add_to(acc[i], weight);
      }
    }
  }
  const float inverse = sum == 0.0f ? 0.0f : ptx::reciprocal(sum);
#pragma unroll
  for (int i = 0; i < kMergeUnits; ++i) {
    if (!units.live(i)) continue;
#pragma unroll
    for (int j = 0; j < kElements; ++j) acc[i][j] *= inverse;
    MUnit::template store<kArch>(out + units.index(i) * MUnit::kOutBytes, acc[i]);
  }
  return sum == 0.0f ? -infinity() : top + log2f(sum) * a.unit;
}

/// The same for a whole row, however long.
template <int kArch, class MUnit, int kChunk, class States>
FLASHBSR_DEVICE float merge_row(States& states, int32_t count, LaneUnits units, char* out,
                                const MergeArgs& a) {
  float lse = 0.0f;
  for (; units.first < units.count; units.first += units.group * kMergeUnits) {
    lse = merge_units<kArch, MUnit, kChunk>(states, count, units, out, a);
  }
  return lse;
}

/// Rows of `a`, a group of lanes each.
template <int kArch, DType kType, bool kAligned, bool kStacked>
FLASHBSR_DEVICE void merge_rows(const MergeArgs& a) {
  using MUnit = MergeUnit<kType, kAligned>;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t group = 1 << a.group_log2;
  const int32_t in_group = lane & (group - 1);
  const int32_t units = a.out.v.dim / MUnit::kElements;
  const int32_t rows_of_warp = 32 >> a.group_log2;
  const int32_t stride = static_cast<int32_t>(gridDim.x) * kWarps * rows_of_warp;
  const int32_t warp = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
  for (int32_t base = warp * rows_of_warp; base < a.rows; base += stride) {
    const int32_t row = base + (lane >> a.group_log2);
    const int32_t t = a.heads.quotient(row);
    const int64_t token = a.first_token + t;
    const int32_t head = a.heads.remainder(row, t);
    const bool live = row < a.rows && (a.mask == nullptr || a.mask[token] != 0);
    float lse = 0.0f;
    if (live) {
      char* out = a.out.v.row(token, head);
      const char* v = a.a.v.row(token, head);
      const float* s = a.a.s + token * a.a.s_stride_token + head * a.a.s_stride_head;
      const LaneUnits lane_units{in_group, group, units};
      if constexpr (kStacked) {
        StackedStates states(v, s, a.v_step, a.s_stride_state);
        lse = merge_row<kArch, MUnit, kMergeChunk>(states, a.count, lane_units, out, a);
      } else {
        TwoStates states(v, s, a.b.v.row(token, head),
                         a.b.s + token * a.b.s_stride_token + head * a.b.s_stride_head);
        lse = merge_row<kArch, MUnit, 2>(states, 2, lane_units, out, a);
      }
    }
    __syncwarp();  // in place, the LSE written is what the other lanes of the group have read
    if (live && in_group == 0) {
      a.s_out[token * a.out.s_stride_token + head * a.out.s_stride_head] = lse;
    }
  }
}

template <int kArch, bool kStacked>
FLASHBSR_DEVICE void merge(const MergeArgs& a) {
  switch (a.out.v.dtype) {
    case DType::kF32:
      a.aligned ? merge_rows<kArch, DType::kF32, true, kStacked>(a)
                : merge_rows<kArch, DType::kF32, false, kStacked>(a);
      break;
    case DType::kF16:
      a.aligned ? merge_rows<kArch, DType::kF16, true, kStacked>(a)
                : merge_rows<kArch, DType::kF16, false, kStacked>(a);
      break;
    case DType::kBF16:
      a.aligned ? merge_rows<kArch, DType::kBF16, true, kStacked>(a)
                : merge_rows<kArch, DType::kBF16, false, kStacked>(a);
      break;
    default: break;  // the host refuses float8 states
  }
}

template <int kArch>
FLASHBSR_DEVICE void merge_state(const MergeArgs& a) {
  merge<kArch, false>(a);
}

template <int kArch>
FLASHBSR_DEVICE void merge_states(const MergeArgs& a) {
  merge<kArch, true>(a);
}

}  // namespace flashbsr::ops
