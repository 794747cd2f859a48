// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Codes to 16 bits, for the requests of a plan, or for some of them. Pages are written one behind
// the other, and attention reads them by a list that says where. Slots behind a request's end are
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

/// Blocks of an SM, by registers: 48 of a thread, or 64. So 80 KB of codes of eight bits are on
/// their way to an SM.
template <DType kCodes>
inline constexpr int kDequantizeBlocks = kCodes == DType::kI8 || kCodes == DType::kE4M3 ? 5 : 4;

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

/// Where a token's row is in its head, and where it goes.
struct RowPlace {
  int32_t page = 0, to = 0, within = 0;

  RowPlace() = default;
  FLASHBSR_DEVICE RowPlace(const DequantizePagesArgs& a, const Request& r, int32_t first_page,
                           int32_t position)
      : page(r.kv_begin + position), to(page) {
    if (a.kv_indices) {
      const int32_t number = a.page_size.quotient(position);
      within = a.page_size.remainder(position, number);
      to = first_page + number;
      page = a.kv_indices[r.kv_begin + number];
    }
  }
};

/// Some codes have scales of one type only.
template <DType kCodes>
FLASHBSR_DEVICE DType scale_type(const PagedView& scales) {
  if constexpr (kCodes == DType::kI4) return DType::kF32;
  if constexpr (kCodes == DType::kE2M1) return DType::kE4M3;
  return scales.dtype == DType::kF16 ? DType::kF16 : DType::kF32;
}

/// What a thread has of a block's tokens, of K or of V: a unit of a token, and of every step-th
/// behind it.
/// @tparam kStayCodes  those of K, but for NVFP4
template <int kArch, DType kCodes, bool kStayCodes>
class RowParts {
 public:
  using Unit = CodeUnit<kArch, kCodes>;
  static constexpr int kCount = kTokensInFlight;
  static constexpr bool kZeros = kCodes == DType::kI4;
  static constexpr bool kFine = kZeros || kCodes == DType::kE2M1;  ///< a scale for each piece
  static constexpr bool kScaled = !kStayCodes || kZeros;

  /// @param first  of a thread's units of a token
  FLASHBSR_DEVICE RowParts(const DequantizeRows& x, int32_t first) : x_(x) {
    const int32_t thread = static_cast<int32_t>(threadIdx.x);
    const int32_t u = first + (thread & ((1 << x.lanes_log2) - 1));
    live_ = u < x.units;
    head_ = x.row_units.quotient(u);
    at_ = x.row_units.remainder(u, head_);
  }

  FLASHBSR_DEVICE void find(const DequantizePagesArgs& a, const Request& r, int32_t first_page,
                            int32_t begin, int32_t end) {
    const int32_t step = kThreads >> x_.lanes_log2;
    int32_t token = begin + (static_cast<int32_t>(threadIdx.x) >> x_.lanes_log2);
#pragma unroll
    for (int i = 0; i < kCount; ++i, token += step) {
      place_[i].within = -1;
      if (live_ && token < end) place_[i] = RowPlace(a, r, first_page, token);
    }
  }

  FLASHBSR_DEVICE void load() {
    const int32_t row_units = static_cast<int32_t>(x_.row_units.divisor);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!there(i)) continue;
      unit_[i].load(x_.codes.row(place_[i].page, place_[i].within, head_) + Unit::kPieceBytes * at_,
                    Unit::kPieceBytes * row_units);
      if constexpr (kScaled) {
        const char* const row = x_.scales.row(place_[i].page, place_[i].within, head_);
        const DType type = scale_type<kCodes>(x_.scales);
        scale_[i][0] = scale_bits(row, kFine ? x_.group_pieces.quotient(at_) : 0, type);
        if constexpr (kFine) {
          scale_[i][1] = scale_bits(row, x_.group_pieces.quotient(at_ + row_units), type);
        }
      }
    }
  }

  FLASHBSR_DEVICE void store() const {
    const int32_t row_units = static_cast<int32_t>(x_.row_units.divisor);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!there(i)) continue;
      char* const to = x_.out.row(place_[i].to, place_[i].within, head_) + 2 * kCodePiece * at_;
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        float zero = 0, factor = 1;
        if constexpr (kScaled) {
          const DType type = scale_type<kCodes>(x_.scales);
          const float value = scale_value<kArch>(scale_[i][kFine ? p : 0], type);
          if constexpr (kZeros) zero = static_cast<float>(int4_zero(value));
          if constexpr (!kStayCodes) factor = kZeros ? int4_scale(value) : value;
        }
        if constexpr (kStayCodes && kZeros) {
          const auto of_piece = [&](int n) { return int4_scale(bits_float(scale_[i][n])); };
          const KeyScales both{of_piece(0), of_piece(1), x_.scales.dim == 1};
          if (p == 1 && both.drops()) factor = 0.0f;
        }
        unit_[i].store(to + 2 * kCodePiece * row_units * p, p, x_.out.dtype, zero, factor);
      }
    }
  }

 private:
  FLASHBSR_DEVICE bool there(int i) const { return place_[i].within >= 0; }

  const DequantizeRows& x_;
  bool live_;
  int32_t head_, at_;
  RowPlace place_[kCount];
  Unit unit_[kCount];
  uint32_t scale_[kCount][2];  ///< of both pieces, as they lie there
};

/// The factors of logits, of tokens [begin, end) of a request.
template <int kArch, DType kCodes>
FLASHBSR_DEVICE void write_factors(const DequantizePagesArgs& a, const Request& r, int32_t begin,
                                   int32_t end) {
  const DequantizeRows& k = a.k;
  const DType type = scale_type<kCodes>(k.scales);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < k.codes.heads << a.tokens_log2;
       i += kThreads) {
    const int32_t head = i >> a.tokens_log2, token = begin + (i & ((1 << a.tokens_log2) - 1));
    if (token >= end) continue;
    const RowPlace place(a, r, r.kv_begin, token);
    const char* const row = k.scales.row(place.page, place.within, head);
    const auto scale = [&](int32_t n) {
      const float x = scale_value<kArch>(scale_bits(row, n, type), type);
      return kCodes == DType::kI4 ? int4_scale(x) : x;
    };
    float* const b = reinterpret_cast<float*>(k.b.row(place.to, place.within, head));
    if constexpr (kCodes != DType::kI4) {
      *b = scale(0);
    } else {
      const bool one = k.scales.dim == 1;
      const KeyScales both{scale(0), scale(one ? 0 : 1), one};
      *reinterpret_cast<float*>(k.a.row(place.to, place.within, head)) = both.a();
      *b = both.b();
    }
  }
}

/// A block has a few tokens of a request at a time, and as many of its bytes under way as there are
/// registers for.
template <int kArch, DType kCodes>
FLASHBSR_DEVICE void dequantize_pages(const DequantizePagesArgs& a) {
  constexpr bool kStayCodes = kCodes != DType::kE2M1;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  int32_t part = static_cast<int32_t>(blockIdx.x), nth = part / a.parts;
  part -= nth * a.parts;
  while (nth < a.num_requests) {
    const Request r = a.requests[a.named ? a.some[nth].index : nth];
    const int32_t first_page = a.named ? a.some[nth].first_page : r.kv_begin;
    const int32_t begin = part << a.tokens_log2;
    const int32_t end = min_of(begin + (1 << a.tokens_log2), r.kv_len);
    if (begin < end) {
      for (int32_t token = begin + thread; a.kv_indices && token < end; token += kThreads) {
        const int32_t number = a.page_size.quotient(token);
        a.page_ids[r.kv_begin + number] = first_page + number;
      }
      for (int32_t first = 0; first < max_of(a.k.units, a.v.units); first += kThreads) {
        RowParts<kArch, kCodes, kStayCodes> k(a.k, first);
        RowParts<kArch, kCodes, false> v(a.v, first);
        k.find(a, r, first_page, begin, end);
        v.find(a, r, first_page, begin, end);
        k.load();
        v.load();
        if (kStayCodes && first == 0) write_factors<kArch, kCodes>(a, r, begin, end);
        k.store();
        v.store();
      }
    }
    part += static_cast<int32_t>(gridDim.x);
    for (; part >= a.parts; part -= a.parts) ++nth;
  }
}

}  // namespace flashbsr::ops
