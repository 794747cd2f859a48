// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of 16 bits to codes, as most caches have them: rows at 16 bytes, groups of 16 elements times
// a power of two. A lane takes runs of 16 elements, so that a group is some neighbouring lanes, and
// has two under way. Results are those of core/quantize.h, bit for bit, in fewer
// instructions: an SM turns four elements a cycle where memory is the limit, which leaves each
// 16 instructions of the integer pipe.
#pragma once

#include <flashbsr/core/quantize.h>
#include <flashbsr/kernel/ops/append.h>
#include <flashbsr/ptx/math.h>

namespace flashbsr::ops {

using Run = float[kRun];

/// For rows that are quantised as they come: no change.
struct AsTheyCome {
  template <class X>
  FLASHBSR_DEVICE void operator()(const QuantizeRows&, bool, int64_t, const char*, int32_t,
                                  X&) const {}
};
template <class Change>
inline constexpr bool kAsTheyCome = false;
template <>
inline constexpr bool kAsTheyCome<AsTheyCome> = true;

FLASHBSR_DEVICE void unpack_run(const uint4 (&bits)[2], DType t, Run& x) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t words[4] = {bits[half].x, bits[half].y, bits[half].z, bits[half].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* const to = x + 8 * half + 2 * i;
      if (t == DType::kBF16) {
        unpack<DType::kBF16>(words[i], to[0], to[1]);
      } else {
        unpack<DType::kF16>(words[i], to[0], to[1]);
      }
    }
  }
}

FLASHBSR_DEVICE void load_run(const char* from, uint4 (&bits)[2]) {
  bits[0] = reinterpret_cast<const uint4*>(from)[0];
  bits[1] = reinterpret_cast<const uint4*>(from)[1];
}

/// The larger, or NaN if one is NaN.
template <int kArch>
FLASHBSR_DEVICE float max_or_nan(float a, float b) {
  if constexpr (kArch >= 80) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }
  return a != a || b <= a ? a : b;
}

/// How far the elements of a group are from 0, upwards and downwards; where codes have a sign, the
/// larger of both.
template <int kArch, DType kCodes>
struct RunRange {
  static constexpr bool kSigned = kCodes != DType::kI4;
  float up = 0, down = 0;

  /// @param raw  whether x is what `bits` has, two elements in a word: an instruction for both
  FLASHBSR_DEVICE RunRange(const Run& x, bool raw, const uint4 (&bits)[2], DType t) {
    if constexpr (kArch >= 80) {
      if (raw) {
        const uint32_t words[8] = {bits[0].x, bits[0].y, bits[0].z, bits[0].w,
                                   bits[1].x, bits[1].y, bits[1].z, bits[1].w};
        t == DType::kBF16 ? add_pairs<DType::kBF16>(words) : add_pairs<DType::kF16>(words);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      up = max_or_nan<kArch>(up, kSigned ? fabsf(x[i]) : x[i]);
      if constexpr (!kSigned) down = max_or_nan<kArch>(down, -x[i]);
    }
  }

  FLASHBSR_DEVICE void reduce(int lanes) {
    for (int step = 1; step < lanes; step *= 2) {
      up = max_or_nan<kArch>(up, __shfl_xor_sync(~0u, up, step));
      if constexpr (!kSigned) down = max_or_nan<kArch>(down, __shfl_xor_sync(~0u, down, step));
    }
  }

  FLASHBSR_DEVICE bool finite() const { return up < infinity() && down < infinity(); }

 private:
  /// The greatest and the least of three words each are one instruction.
  template <DType kT>
  FLASHBSR_DEVICE void add_pairs(const uint32_t (&words)[8]) {
    uint32_t most = words[0], least = words[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) {
      most = ptx::max_or_nan_pairs<kT>(most, words[i]);
      least = ptx::min_or_nan_pairs<kT>(least, words[i]);
    }
    float most_low, most_high, least_low, least_high;
    unpack<kT>(most, most_low, most_high);
    unpack<kT>(least, least_low, least_high);
    up = max_or_nan<kArch>(up, max_or_nan<kArch>(most_low, most_high));
    down = max_or_nan<kArch>(down, max_or_nan<kArch>(-least_low, -least_high));
    if constexpr (kSigned) up = max_or_nan<kArch>(up, down), down = 0;
  }
};

/// The lowest bytes of four words.
FLASHBSR_DEVICE uint32_t low_bytes(const uint32_t* w) {
  return __byte_perm(__byte_perm(w[0], w[1], 0x0040), __byte_perm(w[2], w[3], 0x0040), 0x5410);
}
FLASHBSR_DEVICE uint32_t high_bytes(const float* x) {
  return __byte_perm(__byte_perm(float_bits(x[0]), float_bits(x[1]), 0x0073),
                     __byte_perm(float_bits(x[2]), float_bits(x[3]), 0x0073), 0x5410);
}

/// Where the adder rounds to integers: the last byte of a sum is a code.
inline constexpr float kIntegers = 0x1.8p23f;

/// kIntegers and a code, of e2m1 without its sign: the least of three lines, of steps of 1/2, 1 and
/// 2, each of which is rounded once. The third ends at 7, by a sum that saturates at a size of 6:
/// minima are of the integer pipe, which has half of the lanes. Below a size of 4 its first sum may
/// round, where the second line is the least.
template <DType kCodes>
FLASHBSR_DEVICE float rounded(float x) {
  if constexpr (kCodes == DType::kE2M1) {
    const float size = fabsf(x);
    const float line = ptx::min(__fmaf_rn(size, 2.0f, kIntegers), size + (kIntegers + 2.0f));
    const float end = ptx::fma_saturated(size, 0.125f, 0.25f);
    return ptx::min(line, __fmaf_rn(end, 4.0f, kIntegers + 3.0f));
  } else if constexpr (kCodes == DType::kI4) {
    return ptx::min(x + kIntegers, kIntegers + 15.0f);  // from -1/2 on: the zero point is the least
  } else {
    return ptx::min(ptx::max(x, -127.0f), 127.0f) + kIntegers;
  }
}

/// The codes of a run.
template <int kArch, DType kCodes>
struct RunCodes {
  static constexpr bool kPacked = is_packed(kCodes);
  static constexpr bool kFloat8 = kCodes == DType::kE4M3 || kCodes == DType::kE5M2;
  static constexpr int kWords = kPacked ? 2 : 4;
  uint32_t words[kWords];

  FLASHBSR_DEVICE RunCodes(Run& x, const GroupScale& s, bool finite) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) x[i] = s.code_of(x[i]);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kFloat8) {
        words[i] = pack4_float8<kArch, kCodes>(x + 4 * i);
      } else if constexpr (kPacked) {
        // A sum for an "or": a shift and a sum are one instruction.
        const uint32_t low = bytes(x + 8 * i), high = bytes(x + 8 * i + 4);
        words[i] = __byte_perm(low + (low >> 4), high + (high >> 4), 0x6420);
      } else {
        words[i] = bytes(x + 4 * i);
      }
      if (!kFloat8 && !finite) words[i] = 0;
    }
  }

  FLASHBSR_DEVICE void store(char* to) const {
    if constexpr (kPacked) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

 private:
  /// Codes of four elements.
  FLASHBSR_DEVICE static uint32_t bytes(const float* x) {
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = float_bits(rounded<kCodes>(x[i]));
    const uint32_t low = low_bytes(codes);
    return kCodes == DType::kE2M1 ? low | (high_bytes(x) >> 4 & 0x08080808u) : low;
  }
};

/// A run of a row: where it is read, and where in its head it is.
struct RunPlace {
  const char* row;
  int32_t head, at;
  uint4 bits[2];
};

/// Where a token's codes and scales go: its first head.
struct RunTarget {
  char* codes;
  char* scales;

  FLASHBSR_DEVICE RunTarget(const QuantizeRows& r, const Slot& slot)
      : codes(r.cache.row(slot.page, slot.token, 0)),
        scales(r.scales.row(slot.page, slot.token, 0)) {}
};

/// As scale_of; e4m3 by instructions, where each lane has a scale of its own.
template <int kArch, DType kCodes>
FLASHBSR_DEVICE GroupScale scale_of_run(const RunRange<kArch, kCodes>& range, DType scales) {
  if constexpr (kCodes == DType::kE2M1) {
    GroupScale s;
    s.stored = not_a_number();
    if (!range.finite()) return s;
    const float scale = range.up / largest_code(kCodes);
    uint32_t low, high;
    ptx::float8_to_f16<kArch, DType::kE4M3>(pack_float8<kArch, DType::kE4M3>(scale, 0), low, high);
    s.stored = ptx::unpack_low<DType::kF16>(low);
    s.inverse = inverse_of(s.stored);
    return s;
  }
  return scale_of(-range.down, range.up, range.finite(), kCodes, scales);
}

/// Of the types that scales of such codes have.
template <int kArch, DType kCodes>
FLASHBSR_DEVICE void store_scale(const PagedView& scales, char* row, int64_t at, float scale) {
  if constexpr (kCodes == DType::kE2M1) {
    row[at] = static_cast<char>(pack_float8<kArch, DType::kE4M3>(scale, 0));
  } else if (kCodes == DType::kI4 || scales.dtype == DType::kF32) {
    reinterpret_cast<float*>(row)[at] = scale;
  } else {
    reinterpret_cast<uint16_t*>(row)[at] = float_to_f16(scale);
  }
}

/// A group is some neighbouring lanes.
/// @param live  whether this lane has a run
/// @param raw  whether x is what `place` has
template <int kArch, DType kCodes>
FLASHBSR_DEVICE void quantize_run(const QuantizeRows& r, const RunTarget& to, const RunPlace& place,
                                  bool live, bool raw, Run& x) {
  RunRange<kArch, kCodes> range(x, raw, place.bits, r.in.dtype);
  range.reduce(1 << r.group_log2);
  const GroupScale s = scale_of_run(range, r.scales.dtype);
  const RunCodes<kArch, kCodes> codes(x, s, range.finite());
  if (!live) return;
  const int32_t group = place.at >> r.group_log2;
  codes.store(to.codes + place.head * r.cache.stride_head +
              place.at * (is_packed(kCodes) ? kRun / 2 : kRun));
  if (group << r.group_log2 == place.at) {
    store_scale<kArch, kCodes>(r.scales, to.scales, place.head * r.scales.stride_head + group,
                               s.stored);
  }
}

/// Runs first, first + 32, .. of a token's row of K or V; `first` is this lane's. All of a warp are
/// of one token. One piece of code for all runs and, before the types of codes, for all of them:
/// unrolled, RoPE's kernel took 34 seconds to compile.
template <int kArch, class Change>
FLASHBSR_DEVICE void quantize_runs(const QuantizeArgs& a, const QuantizeRows& r, bool is_v,
                                   int64_t token, int32_t first, const Change& change) {
  const char* const in = r.in.row(token, 0);
  RunPlace places[kRunsInFlight];
#pragma unroll
  for (int i = 0; i < kRunsInFlight; ++i) {
    RunPlace& place = places[i];
    const int32_t nth = min_of(first + 32 * i, r.runs - 1);  // a lane too many repeats the last
    place.head = r.head_runs.quotient(nth);
    place.at = r.head_runs.remainder(nth, place.head);
    place.row = in + 2 * place.head * r.in.stride_head;
    load_run(place.row + 2 * kRun * place.at, place.bits);
  }
  const Slot slot = find_slot(a.slots, token);
  if (!slot.valid) return;
  const RunTarget to(r, slot);
#pragma unroll 1
  for (int i = 0; i < kRunsInFlight; ++i) {
    const bool live = first + 32 * i < r.runs;
    if (!__any_sync(~0u, live)) return;
    const RunPlace place = places[0];
    Run x;
    unpack_run(place.bits, r.in.dtype, x);
    change(r, is_v, token, place.row, kRun * place.at, x);
    const bool raw = kAsTheyCome<Change> && r.inverse_scale == 1.0f;
    if (r.inverse_scale != 1.0f) {
#pragma unroll
      for (int j = 0; j < kRun; ++j) x[j] *= r.inverse_scale;
    }
    switch (r.cache.dtype) {
      case DType::kI8: quantize_run<kArch, DType::kI8>(r, to, place, live, raw, x); break;
      case DType::kE4M3: quantize_run<kArch, DType::kE4M3>(r, to, place, live, raw, x); break;
      case DType::kE5M2: quantize_run<kArch, DType::kE5M2>(r, to, place, live, raw, x); break;
      case DType::kI4: quantize_run<kArch, DType::kI4>(r, to, place, live, raw, x); break;
      default: quantize_run<kArch, DType::kE2M1>(r, to, place, live, raw, x);
    }
#pragma unroll
    for (int j = 1; j < kRunsInFlight; ++j) places[j - 1] = places[j];
  }
}

template <int kArch, class Change>
FLASHBSR_DEVICE void quantize_runs(const QuantizeArgs& a, const Change& change) {
  for_each_item<kRunsInFlight>(a, [&](const QuantizeRows& r, int64_t token, int32_t first) {
    quantize_runs<kArch>(a, r, &r == &a.v, token, first, change);
  });
}

}  // namespace flashbsr::ops
