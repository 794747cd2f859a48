// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Codes to 16 bits, for the requests of a plan. The page that the plan names i-th is written as
// page i, so that attention reads it by a list of 0, 1, ... Slots behind a request's end are
// neither read nor written.
//
// NVFP4 becomes its values, exactly: a code times its scale has six bits. Of other types V become
// their values, rounded to bf16, and K codes, which are exact: keys that are rounded move logits by
// 2^-9 of their size. K's scales go along, one or two of a row, as factors `a` and `b` of
// S = (S_0 a + S_1) b, S_0 and S_1 of the halves of the dims (sm90a/traits.h, kKeyHalves).
#pragma once

#include <flashbsr/core/math.h>
#include <flashbsr/kernel/ops/args.h>
#include <flashbsr/kernel/ops/indices.h>
#include <flashbsr/ptx/convert.h>

namespace flashbsr::ops {

/// Of codes that a thread has under way: a look-up, then codes, are two waits for memory.
/// 40 registers; 32 bytes would take 80, and leave half of the warps.
inline constexpr int kBytesInFlight = 16;

/// The codes of kCodeGroup elements of a row, and what they are made of.
template <DType kCodes>
struct CodeUnit {
  uint32_t words[kCodes == DType::kI8 || kCodes == DType::kE4M3 ? 4 : 2];
  float zero = 0, factor = 1;  ///< values are (code - zero) x factor

  FLASHBSR_DEVICE void load(const char* from) {
    if constexpr (sizeof words == 16) {
      const uint4 x = *reinterpret_cast<const uint4*>(from);
      words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    } else {
      const uint2 x = *reinterpret_cast<const uint2*>(from);
      words[0] = x.x, words[1] = x.y;
    }
  }

  /// Integers come by the last bits of 2^23, small floats by exponents: a code's bits on the border
  /// of exponent and mantissa are the value times a power of two, whether it is subnormal or not.
  FLASHBSR_DEVICE float value(int i) const {
    if constexpr (kCodes == DType::kI8) {
      const uint32_t code = (words[i / 4] >> i % 4 * 8 & 255u) ^ 128u;
      return (bits_float(0x4b000000u | code) - 8388736.0f) * factor;
    } else if constexpr (kCodes == DType::kE4M3) {
      const uint32_t code = words[i / 4] >> i % 4 * 8;
      if ((code & 127u) == 127u) return not_a_number();
      return bits_float((code & 128u) << 24 | (code & 127u) << 20) * 0x1p120f * factor;
    } else if constexpr (kCodes == DType::kI4) {
      const uint32_t code = words[i / 8] >> i % 8 * 4 & 15u;
      return (bits_float(0x4b000000u | code) - (8388608.0f + zero)) * factor;
    } else {
      const uint32_t code = words[i / 8] >> i % 8 * 4;
      return bits_float((code & 8u) << 28 | (code & 7u) << 22) * 0x1p126f * factor;
    }
  }

  FLASHBSR_DEVICE void store(char* to, DType type) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = value(8 * n + 2 * i), high = value(8 * n + 2 * i + 1);
        pairs[i] = type == DType::kBF16 ? ptx::pack2<DType::kBF16>(low, high)
                                        : ptx::pack2<DType::kF16>(low, high);
      }
      reinterpret_cast<uint4*>(to)[n] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
};

/// The scales of a row of K's codes.
struct KeyScales {
  float first, second;  ///< of the halves, or both that of the row
  bool one;

  FLASHBSR_DEVICE KeyScales(const PagedView& scales, const char* row, bool has_zeros)
      : one(scales.dim == 1) {
    first = load_as_float(row, 0, scales.dtype);
    second = one ? first : load_as_float(row, 1, scales.dtype);
    if (has_zeros) first = int4_scale(first), second = int4_scale(second);
  }
  /// A second half that is nothing, or nothing beside the first: its scale cannot divide that.
  FLASHBSR_DEVICE bool drops() const {
    return !one && fabsf(second) < max_of(0x1p-100f, 0x1p-64f * fabsf(first));
  }
  FLASHBSR_DEVICE float a() const { return one || drops() ? 1.0f : __fdividef(first, second); }
  FLASHBSR_DEVICE float b() const { return drops() ? first : second; }
};

/// Where a token's row of a head is, and where it goes.
struct RowPlace {
  int64_t page, to;
  int32_t within = 0;

  FLASHBSR_DEVICE RowPlace(const DequantizePagesArgs& a, const Request& r, int32_t position)
      : page(int64_t{r.kv_begin} + position), to(page) {
    if (a.kv_indices) {
      const int32_t number = a.page_size.quotient(position);
      within = a.page_size.remainder(position, number);
      to = int64_t{r.kv_begin} + number;
      page = a.kv_indices[to];
    }
  }
};

/// Tokens [begin, end) of a request, by a block.
/// @tparam kKeyCodes  K stay codes
template <DType kCodes, bool kKeyCodes>
FLASHBSR_DEVICE void dequantize_rows(const DequantizePagesArgs& a, const DequantizeRows& x,
                                     const Request& r, int32_t begin, int32_t end) {
  constexpr bool kZeros = kCodes == DType::kI4;
  constexpr int kBytes = sizeof(CodeUnit<kCodes>::words);
  constexpr int kInFlight = kBytesInFlight / kBytes;
  const int32_t units = (end - begin) * static_cast<int32_t>(x.units.divisor);
  const int32_t row_units = static_cast<int32_t>(x.row_units.divisor);
  for (int32_t first = static_cast<int32_t>(threadIdx.x); first < units;
       first += kThreads * kInFlight) {
    CodeUnit<kCodes> unit[kInFlight];
    char* out[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int32_t nth = first + i * kThreads;
      out[i] = nullptr;
      if (nth >= units) continue;
      const int32_t token = x.units.quotient(nth), rest = x.units.remainder(nth, token);
      const int32_t head = x.row_units.quotient(rest), at = x.row_units.remainder(rest, head);
      const RowPlace place(a, r, begin + token);
      unit[i].load(x.codes.row(place.page, place.within, head) + kBytes * at);
      const char* const scales = x.scales.row(place.page, place.within, head);
      const int32_t group = at * x.scales.dim / row_units;
      if constexpr (!kKeyCodes || kZeros) {
        const float scale = load_as_float(scales, group, x.scales.dtype);
        if constexpr (kZeros) unit[i].zero = static_cast<float>(int4_zero(scale));
        if constexpr (!kKeyCodes) unit[i].factor = kZeros ? int4_scale(scale) : scale;
      }
      if constexpr (kKeyCodes && kZeros) {
        if (group == 1 && KeyScales(x.scales, scales, kZeros).drops()) unit[i].factor = 0.0f;
      }
      out[i] = x.out.row(place.to, place.within, head) + 2 * kCodeGroup * at;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (out[i]) unit[i].store(out[i], x.out.dtype);
    }
  }
}

/// The factors of logits, of tokens [begin, end) of a request.
FLASHBSR_DEVICE void write_factors(const DequantizePagesArgs& a, const Request& r, int32_t begin,
                                   int32_t end) {
  const DequantizeRows& k = a.k;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kDequantizeTokens * k.codes.heads;
       i += kThreads) {
    const int32_t head = i / kDequantizeTokens, token = begin + i % kDequantizeTokens;
    if (token >= end) continue;
    const RowPlace place(a, r, token);
    const KeyScales scales(k.scales, k.scales.row(place.page, place.within, head),
                           k.codes.dtype == DType::kI4);
    *reinterpret_cast<float*>(k.a.row(place.to, place.within, head)) = scales.a();
    *reinterpret_cast<float*>(k.b.row(place.to, place.within, head)) = scales.b();
  }
}

template <DType kCodes>
FLASHBSR_DEVICE void dequantize_both(const DequantizePagesArgs& a, const Request& r, int32_t begin,
                                     int32_t end) {
  constexpr bool kKeyCodes = kCodes != DType::kE2M1;
  dequantize_rows<kCodes, kKeyCodes>(a, a.k, r, begin, end);
  dequantize_rows<kCodes, false>(a, a.v, r, begin, end);
  if constexpr (kKeyCodes) write_factors(a, r, begin, end);
}

FLASHBSR_DEVICE void dequantize_pages(const DequantizePagesArgs& a) {
  const PlanHeader& h = *a.header;
  for (int64_t i = first_index(); a.kv_indices && i < h.num_kv_indices; i += index_stride()) {
    a.page_ids[i] = static_cast<int32_t>(i);
  }
  const int32_t blocks = max_of(ceil_div(h.max_kv_len, kDequantizeTokens), 1);
  const int64_t all = int64_t{blocks} * h.num_requests;
  for (int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    const Request r = a.requests[i / blocks];
    const int32_t begin = static_cast<int32_t>(i % blocks) * kDequantizeTokens;
    const int32_t end = min_of(begin + kDequantizeTokens, r.kv_len);
    if (begin >= end) continue;
    switch (a.k.codes.dtype) {
      case DType::kI8: dequantize_both<DType::kI8>(a, r, begin, end); break;
      case DType::kE4M3: dequantize_both<DType::kE4M3>(a, r, begin, end); break;
      case DType::kI4: dequantize_both<DType::kI4>(a, r, begin, end); break;
      default: dequantize_both<DType::kE2M1>(a, r, begin, end);
    }
  }
}

}  // namespace flashbsr::ops
