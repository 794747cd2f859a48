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
#include <flashbsr/kernel/ops/indices.h>
#include <flashbsr/ptx/convert.h>

namespace flashbsr::ops {

/// Tokens of a thread that are under way at once: the look-up of a page, then its codes, are two
/// waits for memory. 32 bytes of codes.
template <DType kCodes>
inline constexpr int kTokensInFlight = kCodes == DType::kI8 || kCodes == DType::kE4M3 ? 2 : 4;
/// Blocks of an SM, by registers: 40 of a thread, or 64. So 49 KB of codes of eight bits are on
/// their way to an SM, or 33 of those of four.
template <DType kCodes>
inline constexpr int kDequantizeBlocks = kCodes == DType::kI8 || kCodes == DType::kE4M3 ? 6 : 4;

/// What a thread has of a row: kCodePiece elements of its first half and as many of the second.
template <int kArch, DType kCodes>
struct CodeUnit {
  static constexpr bool kBytes = kCodes == DType::kI8 || kCodes == DType::kE4M3;
  static constexpr int kPieceBytes = kCodePiece * (kBytes ? 2 : 1) / 2;
  uint32_t words[2][kPieceBytes / 4];

  /// @param half  bytes from one piece to the other
  FLASHBSR_DEVICE void load(const char* from, int32_t half) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if constexpr (kBytes) {
        const uint2 x = *reinterpret_cast<const uint2*>(from + p * half);
        words[p][0] = x.x, words[p][1] = x.y;
      } else {
        words[p][0] = *reinterpret_cast<const uint32_t*>(from + p * half);
      }
    }
  }

  /// Codes less their zero point. Integers come by the last bits of 2^23, e2m1 by its exponent: a
  /// code's bits on the border of exponent and mantissa are the value times a power of two, whether
  /// it is subnormal or not.
  FLASHBSR_DEVICE void codes(int piece, float zero, float (&x)[kCodePiece]) const {
    const auto& w = words[piece];
    if constexpr (kCodes == DType::kE4M3) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t low, high;
        ptx::float8_to_f16<kArch, DType::kE4M3>(w[i], low, high);
        x[4 * i] = ptx::unpack_low<DType::kF16>(low),
              x[4 * i + 1] = ptx::unpack_high<DType::kF16>(low);
        x[4 * i + 2] = ptx::unpack_low<DType::kF16>(high),
                  x[4 * i + 3] = ptx::unpack_high<DType::kF16>(high);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCodePiece; ++i) {
        if constexpr (kCodes == DType::kI8) {
          const uint32_t above = w[i / 4] ^ 0x80808080u;  // code + 128
          x[i] = bits_float(ptx::permute_bytes(above, 0x4b000000u, 0x7440 + i % 4)) - 8388736.0f;
        } else if constexpr (kCodes == DType::kI4) {
          x[i] = bits_float(0x4b000000u | (w[0] >> 4 * i & 15u)) - (8388608.0f + zero);
        } else {
          const uint32_t code = w[0] >> 4 * i;
          x[i] = bits_float((code & 8u) << 28 | (code & 7u) << 22) * 0x1p126f;
        }
      }
    }
  }

  FLASHBSR_DEVICE void store(char* to, int piece, DType type, float zero, float factor) const {
    float x[kCodePiece];
    codes(piece, zero, x);
    uint32_t pairs[kCodePiece / 2];
#pragma unroll
    for (int i = 0; i < kCodePiece / 2; ++i) {
      const float low = x[2 * i] * factor, high = x[2 * i + 1] * factor;
      pairs[i] = type == DType::kBF16 ? ptx::pack2<DType::kBF16>(low, high)
                                      : ptx::pack2<DType::kF16>(low, high);
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};

/// Scale `i` of a row, as it lies there: it is looked at when codes have come, too.
FLASHBSR_DEVICE uint32_t scale_bits(const char* row, int32_t i, DType type) {
  if (type == DType::kF32) return reinterpret_cast<const uint32_t*>(row)[i];
  if (type == DType::kF16) return reinterpret_cast<const uint16_t*>(row)[i];
  return reinterpret_cast<const uint8_t*>(row)[i];
}
template <int kArch>
FLASHBSR_DEVICE float scale_value(uint32_t bits, DType type) {
  if (type == DType::kF32) return bits_float(bits);
  uint32_t half = bits, rest;
  if (type == DType::kE4M3) ptx::float8_to_f16<kArch, DType::kE4M3>(bits, half, rest);
  return ptx::unpack_low<DType::kF16>(half);
}

/// The scales of a row of K's codes: of the halves, or both that of the row.
struct KeyScales {
  float first, second;
  bool one;

  /// A second half that is nothing, or nothing beside the first: its scale cannot divide that.
  FLASHBSR_DEVICE bool drops() const {
    return !one && fabsf(second) < max_of(0x1p-100f, 0x1p-64f * fabsf(first));
  }
  FLASHBSR_DEVICE float a() const { return one || drops() ? 1.0f : __fdividef(first, second); }
  FLASHBSR_DEVICE float b() const { return drops() ? first : second; }
};

/// Where a token's row of a head is, and where it goes.
struct RowPlace {
  int32_t page = 0, to = 0, within = 0;

  RowPlace() = default;
  FLASHBSR_DEVICE RowPlace(const DequantizePagesArgs& a, const Request& r, int32_t position)
      : page(r.kv_begin + position), to(page) {
    if (a.kv_indices) {
      const int32_t number = a.page_size.quotient(position);
      within = a.page_size.remainder(position, number);
      to = r.kv_begin + number;
      page = a.kv_indices[to];
    }
  }
};

/// Tokens [begin, end) of a request, by a block.
/// @tparam kKeyCodes  K stay codes
template <int kArch, DType kCodes, bool kKeyCodes>
FLASHBSR_DEVICE void dequantize_rows(const DequantizePagesArgs& a, const DequantizeRows& x,
                                     const Request& r, int32_t begin, int32_t end) {
  using Unit = CodeUnit<kArch, kCodes>;
  constexpr int kInFlight = kTokensInFlight<kCodes>;
  constexpr bool kZeros = kCodes == DType::kI4, kFine = kZeros || kCodes == DType::kE2M1;
  constexpr bool kScaled = !kKeyCodes || kZeros;
  // Some codes have scales of one type only.
  const DType scale_type = kZeros                          ? DType::kF32
                           : kFine                         ? DType::kE4M3
                           : x.scales.dtype == DType::kF16 ? DType::kF16
                                                           : DType::kF32;
  const int32_t thread = static_cast<int32_t>(threadIdx.x), lanes = 1 << x.lanes_log2;
  const int32_t step = kThreads >> x.lanes_log2;
  const int32_t row_units = static_cast<int32_t>(x.row_units.divisor);
  for (int32_t u = thread & (lanes - 1); u < x.units; u += lanes) {
    const int32_t head = x.row_units.quotient(u), at = x.row_units.remainder(u, head);
    const int32_t group[2] = {x.group_pieces.quotient(at), x.group_pieces.quotient(at + row_units)};
    const char* const codes = x.codes.row(0, 0, head) + Unit::kPieceBytes * at;
    char* const out = x.out.row(0, 0, head) + 2 * kCodePiece * at;
    for (int32_t token = begin + (thread >> x.lanes_log2); token < end; token += step * kInFlight) {
      RowPlace place[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (token + i * step < end) place[i] = RowPlace(a, r, token + i * step);
      }
      Unit unit[kInFlight];
      uint32_t scale[kInFlight][2];  // of both pieces, as they lie there
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (token + i * step >= end) continue;
        unit[i].load(codes + x.codes.row_offset(place[i].page, place[i].within),
                     Unit::kPieceBytes * row_units);
        if constexpr (kScaled) {
          const char* const row = x.scales.row(place[i].page, place[i].within, head);
          scale[i][0] = scale_bits(row, kFine ? group[0] : 0, scale_type);
          if constexpr (kFine) scale[i][1] = scale_bits(row, group[1], scale_type);
        }
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (token + i * step >= end) continue;
        char* const to = out + x.out.row_offset(place[i].to, place[i].within);
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          float zero = 0, factor = 1;
          if constexpr (kScaled) {
            const float value = scale_value<kArch>(scale[i][kFine ? p : 0], scale_type);
            if constexpr (kZeros) zero = static_cast<float>(int4_zero(value));
            if constexpr (!kKeyCodes) factor = kZeros ? int4_scale(value) : value;
          }
          if constexpr (kKeyCodes && kZeros) {
            const auto of_piece = [&](int n) { return int4_scale(bits_float(scale[i][n])); };
            const KeyScales both{of_piece(0), of_piece(1), x.scales.dim == 1};
            if (p == 1 && both.drops()) factor = 0.0f;
          }
          unit[i].store(to + 2 * kCodePiece * row_units * p, p, x.out.dtype, zero, factor);
        }
      }
    }
  }
}

template <int kArch>
FLASHBSR_DEVICE KeyScales key_scales(const DequantizeRows& k, const char* row) {
  const auto scale = [&](int32_t i) {
    const float x = scale_value<kArch>(scale_bits(row, i, k.scales.dtype), k.scales.dtype);
    return k.codes.dtype == DType::kI4 ? int4_scale(x) : x;
  };
  const float first = scale(0);
  const bool one = k.scales.dim == 1;
  return {first, one ? first : scale(1), one};
}

/// The factors of logits, of tokens [begin, end) of a request.
template <int kArch>
FLASHBSR_DEVICE void write_factors(const DequantizePagesArgs& a, const Request& r, int32_t begin,
                                   int32_t end) {
  const DequantizeRows& k = a.k;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < k.codes.heads << a.tokens_log2;
       i += kThreads) {
    const int32_t head = i >> a.tokens_log2, token = begin + (i & ((1 << a.tokens_log2) - 1));
    if (token >= end) continue;
    const RowPlace place(a, r, token);
    const KeyScales scales = key_scales<kArch>(k, k.scales.row(place.page, place.within, head));
    *reinterpret_cast<float*>(k.a.row(place.to, place.within, head)) = scales.a();
    *reinterpret_cast<float*>(k.b.row(place.to, place.within, head)) = scales.b();
  }
}

template <int kArch, DType kCodes>
FLASHBSR_DEVICE void dequantize_pages(const DequantizePagesArgs& a) {
  const PlanHeader& h = *a.header;
  for (int64_t i = first_index(); a.kv_indices && i < h.num_kv_indices; i += index_stride()) {
    a.page_ids[i] = static_cast<int32_t>(i);
  }
  const int32_t tokens = 1 << a.tokens_log2;
  const int32_t blocks = max_of(ceil_div(h.max_kv_len, tokens), 1);
  const int64_t all = int64_t{blocks} * h.num_requests;
  for (int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    const Request r = a.requests[i / blocks];
    const int32_t begin = static_cast<int32_t>(i % blocks) * tokens;
    const int32_t end = min_of(begin + tokens, r.kv_len);
    constexpr bool kKeyCodes = kCodes != DType::kE2M1;
    dequantize_rows<kArch, kCodes, kKeyCodes>(a, a.k, r, begin, end);
    dequantize_rows<kArch, kCodes, false>(a, a.v, r, begin, end);
    if constexpr (kKeyCodes) write_factors<kArch>(a, r, begin, end);
  }
}

}  // namespace flashbsr::ops
