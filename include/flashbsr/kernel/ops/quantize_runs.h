// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of 16 bits to codes, as most caches have them: rows at 16 bytes, groups of 16 elements times
// a power of two. A lane takes runs of 16 elements, so that a group is some neighbouring lanes.
// Results are those of core/quantize.h, bit for bit, in fewer instructions: where memory is the
// limit an SM of an H200 turns six elements a cycle, which leaves each some 20 instructions of a
// lane, ten of them of the integer pipe. So a warp stays at one place of the rows of several
// tokens: each lane looks up the slot of one, and addresses are sums.
#pragma once

#include <flashbsr/core/quantize.h>
#include <flashbsr/kernel/ops/append.h>
#include <flashbsr/kernel/ops/runs_ahead.h>
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

/// How far elements are from 0, upwards and downwards; NaN where one is.
struct Extent {
  float up = 0, down = 0;

  FLASHBSR_DEVICE bool finite() const { return up < infinity() && down < infinity(); }
};

template <DType kT>
FLASHBSR_DEVICE void unpack_run(const uint4 (&bits)[2], Run& x) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t words[4] = {bits[half].x, bits[half].y, bits[half].z, bits[half].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unpack<kT>(words[i], x[8 * half + 2 * i], x[8 * half + 2 * i + 1]);
    }
  }
}
FLASHBSR_DEVICE void unpack_run(const uint4 (&bits)[2], DType t, Run& x) {
  t == DType::kBF16 ? unpack_run<DType::kBF16>(bits, x) : unpack_run<DType::kF16>(bits, x);
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

/// Of a run as it was read: the greatest and the least of three words each are one instruction.
template <int kArch, DType kT>
FLASHBSR_DEVICE Extent extent_of(const uint4 (&bits)[2]) {
  const uint32_t words[8] = {bits[0].x, bits[0].y, bits[0].z, bits[0].w,
                             bits[1].x, bits[1].y, bits[1].z, bits[1].w};
  uint32_t most = words[0], least = words[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    most = ptx::max_or_nan_pairs<kT>(most, words[i]);
    least = ptx::min_or_nan_pairs<kT>(least, words[i]);
  }
  float most_low, most_high, least_low, least_high;
  unpack<kT>(most, most_low, most_high);
  unpack<kT>(least, least_low, least_high);
  return {max_or_nan<kArch>(0, max_or_nan<kArch>(most_low, most_high)),
          max_or_nan<kArch>(0, max_or_nan<kArch>(-least_low, -least_high))};
}

/// Of a run that was changed. Where codes have a sign, the larger of both ways is all that counts.
template <int kArch, bool kSigned>
FLASHBSR_DEVICE Extent extent_of(const Run& x) {
  Extent e;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    e.up = max_or_nan<kArch>(e.up, kSigned ? fabsf(x[i]) : x[i]);
    if constexpr (!kSigned) e.down = max_or_nan<kArch>(e.down, -x[i]);
  }
  return e;
}

/// Of the group: some neighbouring lanes.
template <int kArch, bool kSigned>
FLASHBSR_DEVICE Extent extent_of_group(Extent e, int32_t lanes_log2) {
  if constexpr (kSigned) e = {max_or_nan<kArch>(e.up, e.down), 0};
#pragma unroll
  for (int step = 0; step < 5; ++step) {
    if (step >= lanes_log2) break;
    e.up = max_or_nan<kArch>(e.up, __shfl_xor_sync(~0u, e.up, 1 << step));
    if constexpr (!kSigned) {
      e.down = max_or_nan<kArch>(e.down, __shfl_xor_sync(~0u, e.down, 1 << step));
    }
  }
  return e;
}

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

/// The largest size that `rounded` takes.
template <DType kCodes>
inline constexpr float kLargestSize = kCodes == DType::kI8 ? 127.0f : 6.0f;

/// Whether an element over this scale may be larger by more than its code hides: up to a half, or
/// one of e2m1. No, as long as the scale, of 11 bits or of 4, was rounded and not cut off. Minima
/// and maxima of each element would be a sixth of all instructions.
template <DType kCodes>
FLASHBSR_DEVICE bool may_exceed(float scale) {
  if constexpr (kCodes == DType::kI8) return !(scale >= 0x1p-14f && scale < 65504.0f);
  if constexpr (kCodes == DType::kE2M1) return !(scale >= 0x1p-6f && scale < 448.0f);
  return false;
}

/// kIntegers and a code, of e2m1 without its sign: the least of three lines, of steps of 1/2, 1 and
/// 2, each of which is rounded once.
template <DType kCodes>
FLASHBSR_DEVICE float rounded(float x) {
  if constexpr (kCodes == DType::kE2M1) {
    const float size = fabsf(x);
    const float line = ptx::min(__fmaf_rn(size, 2.0f, kIntegers), size + (kIntegers + 2.0f));
    return ptx::min(line, __fmaf_rn(size, 0.5f, kIntegers + 4.0f));
  } else if constexpr (kCodes == DType::kI4) {
    return ptx::min(x + kIntegers, kIntegers + 15.0f);  // from -1/2 on: the zero point is the least
  } else {
    return x + kIntegers;
  }
}

/// The codes of a run, as GroupScale::code_of has them.
template <int kArch, DType kCodes>
struct RunCodes {
  static constexpr bool kPacked = is_packed(kCodes);
  static constexpr bool kFloat8 = kCodes == DType::kE4M3 || kCodes == DType::kE5M2;
  static constexpr int kWords = kPacked ? 2 : 4;
  uint32_t words[kWords];

  FLASHBSR_DEVICE RunCodes(Run& x, const GroupScale& s) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      x[i] = __fmul_rn(x[i], s.inverse);
      if constexpr (kCodes == DType::kI4) x[i] = __fadd_rn(x[i], s.zero);
    }
    if (may_exceed<kCodes>(s.stored)) {
      constexpr float kMost = kLargestSize<kCodes>;
#pragma unroll
      for (int i = 0; i < kRun; ++i) x[i] = ptx::min(ptx::max(x[i], -kMost), kMost);
    }
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
      if (!(s.inverse > 0)) words[i] = 0;
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

/// float32 as float16 and back, and no more than its largest.
template <int kArch>
FLASHBSR_DEVICE uint32_t to_half(float x) {
  return pack<kArch, DType::kF16>(ptx::min(x, 65504.0f), 0);
}

/// A sixth, rounded once where it is no subnormal, which e4m3 has none of: the quotient by the
/// rounded inverse, and what that leaves over.
FLASHBSR_DEVICE float sixth_of(float x) {
  constexpr float kSixth = 1.0f / 6.0f;
  const float quotient = __fmul_rn(x, kSixth);
  return __fmaf_rn(__fmaf_rn(-6.0f, quotient, x), kSixth, quotient);
}

/// 1 / x of what e4m3 has, rounded once, and NaN of 0: the approximation, and what that leaves
/// over.
FLASHBSR_DEVICE float inverse_of_e4m3(float x) {
  const float inverse = ptx::reciprocal(x);
  return __fmaf_rn(__fmaf_rn(-x, inverse, 1.0f), inverse, inverse);
}

/// As scale_of, by instructions of the types that scales of such codes have.
template <int kArch, DType kCodes>
FLASHBSR_DEVICE GroupScale scale_of_run(const Extent& e, DType scales) {
  if constexpr (kCodes == DType::kI4) return scale_of(-e.down, e.up, e.finite(), kCodes, scales);
  GroupScale s;
  if constexpr (kCodes == DType::kE2M1) {
    // A scale for each run: without branches, and without divisions that look out for subnormals,
    // 20 instructions less. Of 0 and NaN the inverse is NaN, which makes no codes.
    const float scale = e.finite() ? sixth_of(e.up) : not_a_number();
    uint32_t low, high;
    ptx::float8_to_f16<kArch, DType::kE4M3>(pack_float8<kArch, DType::kE4M3>(scale, 0), low, high);
    s.stored = ptx::unpack_low<DType::kF16>(low);
    s.inverse = inverse_of_e4m3(s.stored);
    return s;
  }
  s.stored = not_a_number();
  if (!e.finite()) return s;
  s.stored = e.up / largest_code(kCodes);
  if (scales == DType::kF16) {
    s.stored = ptx::unpack_low<DType::kF16>(to_half<kArch>(s.stored));
  }
  s.inverse = inverse_of(s.stored);
  return s;
}

template <int kArch, DType kCodes>
FLASHBSR_DEVICE void store_scale(char* to, DType t, float scale) {
  if constexpr (kCodes == DType::kE2M1) {
    *to = static_cast<char>(pack_float8<kArch, DType::kE4M3>(scale, 0));
  } else if (kCodes == DType::kI4 || t == DType::kF32) {
    *reinterpret_cast<float*>(to) = scale;
  } else {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(pack<kArch, DType::kF16>(scale, 0));
  }
}

/// A lane's place in the rows of K or V: its run, and where that lies of a token whose row begins
/// the array.
struct RunPlace {
  int32_t element;  ///< of its head, the first
  int64_t in;       ///< bytes
  char* codes;
  char* scale;
  bool live;   ///< whether there is one
  bool first;  ///< of its group: it writes the scale

  FLASHBSR_DEVICE RunPlace(const QuantizeRows& r, int32_t nth) {
    live = nth < r.runs;
    nth = min_of(nth, r.runs - 1);  // a lane too many repeats the last
    const int32_t head = r.head_runs.quotient(nth), at = r.head_runs.remainder(nth, head);
    const int32_t group = at >> r.group_log2;
    first = group << r.group_log2 == at;
    element = kRun * at;
    in = 2 * (head * r.in.stride_head + element);
    codes = r.cache.row(0, 0, head) + (is_packed(r.cache.dtype) ? element / 2 : element);
    scale = r.scales.row(0, 0, head) + group * dtype_size(r.scales.dtype);
  }
};

/// Where a lane's run of the token at hand goes. Each lane has a token's offsets, from one whose
/// rows begin the arrays.
struct RunTarget {
  const RunPlace& place;
  int64_t codes, scales;
  int32_t token;  ///< the lane that has its offsets

  FLASHBSR_DEVICE char* code_row() const { return place.codes + __shfl_sync(~0u, codes, token); }
  FLASHBSR_DEVICE char* scale_row() const { return place.scale + __shfl_sync(~0u, scales, token); }
};

/// @param e  of the group
template <int kArch, DType kCodes>
FLASHBSR_DEVICE void store_run(const QuantizeRows& r, const RunTarget& to, const Extent& e,
                               Run& x) {
  const GroupScale s = scale_of_run<kArch, kCodes>(e, r.scales.dtype);
  const RunCodes<kArch, kCodes> codes(x, s);
  char* const row = to.code_row();
  char* const scale = to.scale_row();
  if (!to.place.live) return;
  codes.store(row);
  if (to.place.first) store_scale<kArch, kCodes>(scale, r.scales.dtype, s.stored);
}

/// Products are ordered as what they are of, so that the extent, too, is theirs.
FLASHBSR_DEVICE void multiply(Run& x, float number) {
  if (number == 1.0f) return;
#pragma unroll
  for (int i = 0; i < kRun; ++i) x[i] *= number;
}

/// A run as it was read.
template <int kArch, DType kCodes, DType kIn>
FLASHBSR_DEVICE void quantize_run(const QuantizeRows& r, const RunTarget& to, const RunBits& run) {
  Run x;
  unpack_run<kIn>(run.half, x);
  Extent e = extent_of<kArch, kIn>(run.half);
  multiply(x, r.inverse_scale);
  if (r.inverse_scale != 1.0f) e = {e.up * r.inverse_scale, e.down * r.inverse_scale};
  constexpr bool kSigned = kCodes != DType::kI4;
  store_run<kArch, kCodes>(r, to, extent_of_group<kArch, kSigned>(e, r.group_log2), x);
}

/// A run that was changed.
template <int kArch, DType kCodes>
FLASHBSR_DEVICE void quantize_run(const QuantizeRows& r, const RunTarget& to, Run& x) {
  constexpr bool kSigned = kCodes != DType::kI4;
  const Extent e = extent_of<kArch, kSigned>(x);
  store_run<kArch, kCodes>(r, to, extent_of_group<kArch, kSigned>(e, r.group_log2), x);
}

template <DType kT>
struct OfType {
  static constexpr DType kType = kT;
};
template <class Visit>
FLASHBSR_DEVICE void with_codes(DType t, const Visit& visit) {
  switch (t) {
    case DType::kI8: return visit(OfType<DType::kI8>{});
    case DType::kE4M3: return visit(OfType<DType::kE4M3>{});
    case DType::kE5M2: return visit(OfType<DType::kE5M2>{});
    case DType::kI4: return visit(OfType<DType::kI4>{});
    default: return visit(OfType<DType::kE2M1>{});
  }
}
template <class Visit>
FLASHBSR_DEVICE void with_halves(DType t, const Visit& visit) {
  t == DType::kBF16 ? visit(OfType<DType::kBF16>{}) : visit(OfType<DType::kF16>{});
}

/// Run `nth` of `count` tokens' rows of K or V. All lanes of a warp are at the same token.
template <int kArch, class Change>
FLASHBSR_DEVICE void quantize_runs(const QuantizeArgs& a, const QuantizeRows& r, bool is_v,
                                   int64_t token, int32_t count, int32_t nth,
                                   const Change& change) {
  const RunPlace place(r, nth);
  const char* const in = r.in.row(token, 0) + place.in;
  const int64_t step = 2 * r.in.stride_token;
  RunsAhead<kArch> runs(in, step, count);
  // Of a lane's own token.
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const Slot slot = find_slot(a.slots, token + min_of(lane, count - 1));
  const uint32_t valid = __ballot_sync(~0u, slot.valid);
  const auto offset = [&](const PagedView& x) {
    return (slot.page * x.stride_page + slot.token * x.stride_token) * dtype_size(x.dtype);
  };
  const int64_t codes = offset(r.cache), scales = offset(r.scales);
  const auto each = [&](const auto& body) {
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      const RunBits run = runs.next(i, count);
      if (valid >> i & 1) body(RunTarget{place, codes, scales, i}, run);
    }
  };
  if constexpr (kAsTheyCome<Change> && kArch >= 80) {
    // A loop for each pair of types: to choose in the loop takes a dozen of 290 instructions.
    with_codes(r.cache.dtype, [&](auto t) {
      with_halves(r.in.dtype, [&](auto half) {
        each([&](const RunTarget& to, const RunBits& run) {
          quantize_run<kArch, decltype(t)::kType, decltype(half)::kType>(r, to, run);
        });
      });
    });
  } else {
    // One piece of code before the types of codes: unrolled, RoPE's kernel took 34 seconds to
    // compile.
    each([&](const RunTarget& to, const RunBits& run) {
      Run x;
      unpack_run(run.half, r.in.dtype, x);
      const char* const row = in + to.token * step - 2 * place.element;
      change(r, is_v, token + to.token, row, place.element, x);
      multiply(x, r.inverse_scale);
      with_codes(r.cache.dtype, [&](auto t) { quantize_run<kArch, decltype(t)::kType>(r, to, x); });
    });
  }
}

/// Warps take 32 runs of some tokens' K, then of their V.
template <int kArch, class Change>
FLASHBSR_DEVICE void quantize_runs(const QuantizeArgs& a, const Change& change) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t k_items = a.spans * static_cast<int32_t>(a.k.parts.divisor);
  const int32_t items = k_items + a.spans * static_cast<int32_t>(a.v.parts.divisor);
  const int32_t stride = static_cast<int32_t>(gridDim.x) * kWarps;
  int32_t item = static_cast<int32_t>(blockIdx.x) * kWarps + static_cast<int32_t>(threadIdx.x) / 32;
  for (; item < items; item += stride) {
    const bool is_v = item >= k_items;
    const QuantizeRows& r = is_v ? a.v : a.k;
    const int32_t of_rows = is_v ? item - k_items : item;
    const int32_t span = r.parts.quotient(of_rows), part = r.parts.remainder(of_rows, span);
    const int32_t first = span * a.span;
    quantize_runs<kArch>(a, r, is_v, a.first_token + first, min_of(a.span, a.tokens - first),
                         32 * part + lane, change);
  }
}

}  // namespace flashbsr::ops
