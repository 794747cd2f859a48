// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "templates.h"

#include <string_view>

#include <flashbsr/kernel/decode/traits.h>
#include <flashbsr/kernel/sm75/traits.h>
#include <flashbsr/kernel/sm80/traits.h>
#include <flashbsr/kernel/sm90a/traits.h>

namespace flashbsr::cuda {

namespace {

using Found = std::optional<TemplateRow>;

template <class Traits>
TemplateRow row_of(int arch, bool exact, int head_dim, int head_dim_vo) {
  return {arch,
          exact,
          head_dim,
          head_dim_vo,
          {Traits::kThreads, Traits::kSmemBytes, Traits::kBlocksPerSM, Traits::kKvTile}};
}

/// Calls f.operator()<kType>() for that of kTypes which a type is.
template <DType... kTypes, class F>
Found with_one_of(DType type, const F& f) {
  Found found;
  ((type == kTypes && (found = f.template operator()<kTypes>(), true)) || ...);
  return found;
}

/// The same for a type of K and V, and for one that has scales of every token.
template <class F>
Found with_kv(DType kv, const F& f) {
  using enum DType;
  return with_one_of<kF16, kBF16, kE4M3, kE5M2>(kv, f);
}
template <class F>
Found with_codes(DType kv, const F& f) {
  using enum DType;
  return with_one_of<kE4M3, kE5M2, kI8, kI4, kE2M1>(kv, f);
}

/// Calls f.operator()<kDim>() for the smallest head dim of mma.sync kernels that holds both.
template <class F>
Found with_dim(const TemplateQuery& q, const F& f) {
  const int dim = max_of(q.head_dim, q.head_dim_vo);
  if (dim <= 64) return f.template operator()<64>();
  if (dim <= 128) return f.template operator()<128>();
  if (dim <= 256) return f.template operator()<256>();
  return {};
}

/// The same, up to 512: where warps share rows, or a row has several turns of a warp.
template <class F>
Found with_wide_dim(const TemplateQuery& q, const F& f) {
  const int dim = max_of(q.head_dim, q.head_dim_vo);
  return dim > 256 && dim <= 512 ? f.template operator()<512>() : with_dim(q, f);
}

/// 8 rows: hooks take the registers that 16 would need.
Found find_decode(const TemplateQuery& q, int cc) {
  if (q.rows != 8 || q.q == DType::kE4M3 || cc < 80) return {};
  return with_kv(q.kv, [&]<DType kKv>() {
    return with_wide_dim(q, [&]<int kDim>() -> Found {
      // Widening e4m3 without the instruction of sm_90 takes registers: 600 bytes would spill.
      if (kDim > 256 && kKv == DType::kE4M3 && cc < 90) return {};
      if (cc >= 90) return row_of<DecodeTraits<90, kDim, kKv, 8>>(90, false, kDim, kDim);
      return row_of<DecodeTraits<80, kDim, kKv, 8>>(80, false, kDim, kDim);
    });
  });
}

/// Codes with scales of every token.
template <DType kKv>
Found scaled_row(const TemplateQuery& q, int cc) {
  const auto row = [&]<int kDim>() -> Found {
    constexpr DecodeHost kHost = DecodeHost::kBlock;
    if (cc >= 90)
      return row_of<DecodeTraits<90, kDim, kKv, 8, 2, kHost, true>>(90, false, kDim, kDim);
    return row_of<DecodeTraits<80, kDim, kKv, 8, 2, kHost, true>>(80, false, kDim, kDim);
  };
  const int dim = max_of(q.head_dim, q.head_dim_vo);
  if (dim <= 64) return row.template operator()<64>();
  if (dim <= 128) return row.template operator()<128>();
  return {};
}

Found find_decode_scaled(const TemplateQuery& q, int cc) {
  if (q.rows != 8 || q.q == DType::kE4M3 || q.v != q.kv || cc < 80) return {};
  return with_codes(q.kv, [&]<DType kKv>() { return scaled_row<kKv>(q, cc); });
}

/// K and V of one type: a thread keeps as much of a tile of both.
Found turing_scaled(const TemplateQuery& q) {
  const int dim = max_of(q.head_dim, q.head_dim_vo);
  if (q.v != q.kv || dim > 128) return {};
  return with_codes(q.kv, [&]<DType kKv>() -> Found {
    if (dim <= 64) return row_of<sm75::ScaledPrefillTraits<64, kKv, 64>>(75, false, 64, 64);
    return row_of<sm75::ScaledPrefillTraits<128, kKv, 64>>(75, false, 128, 128);
  });
}

/// Rows are rewritten in their tiles where a variant has hooks of them: codes have no room for
/// that.
Found find_prefill_scaled(const TemplateQuery& q, int cc) {
  if (q.rows != 64 || q.q == DType::kE4M3 || q.row_hooks || cc < 75) return {};
  if (cc < 80) return turing_scaled(q);
  const auto row = [&]<DType kKv, DType kV>() -> Found {
    const int dim = max_of(q.head_dim, q.head_dim_vo);
    if (dim <= 64) {
      return row_of<sm80::ScaledPrefillTraits<64, kKv, 64, 80, kV>>(80, false, 64, 64);
    }
    if (dim <= 128) {
      return row_of<sm80::ScaledPrefillTraits<128, kKv, 64, 80, kV>>(80, false, 128, 128);
    }
    return {};
  };
  return with_codes(q.kv, [&]<DType kKv>() {
    return with_codes(q.v, [&]<DType kV>() { return row.template operator()<kKv, kV>(); });
  });
}

Found find_prefill(const TemplateQuery& q, int cc) {
  if (q.rows != 64 || q.q == DType::kE4M3 || cc < 75) return {};
  // Rows are rewritten in their tiles: float8 has no room for that, and sm_75 none for outputs.
  if (q.row_hooks && (cc < 80 || dtype_size(q.kv) == 1)) return {};
  if (cc < 80) {
    return with_one_of<DType::kF16, DType::kE4M3, DType::kE5M2>(q.kv, [&]<DType kKv>() -> Found {
      if (kKv == DType::kF16 && q.q != kKv) return {};
      return with_dim(q, [&]<int kDim>() -> Found {
        if constexpr (kKv != DType::kF16 && kDim > 128) {
          return {};
        } else {
          return row_of<sm75::PrefillTraits<kDim, kKv, 64>>(75, false, kDim, kDim);
        }
      });
    });
  }
  return with_kv(q.kv, [&]<DType kKv>() {
    return with_wide_dim(q, [&]<int kDim>() -> Found {
      return row_of<sm80::PrefillTraits<kDim, kKv, 64>>(80, false, kDim, kDim);
    });
  });
}

/// Latents of other dims than the table's; nothing is padded.
template <int kArch, int kLatent, int kTail>
Found latent_row(const TemplateQuery& q) {
  const auto row = [&]<DType kType, int kRows>() -> Found {
    using Traits = sm80::LatentTraits<kLatent, kTail, kType, kRows, kArch>;
    return row_of<Traits>(kArch, false, Traits::kHeadDim, kLatent);
  };
  const auto of_type = [&]<DType kType>() -> Found {
    switch (q.rows) {
      case 16: return row.template operator()<kType, 16>();
      case 32: return row.template operator()<kType, 32>();
      case 64: return row.template operator()<kType, 64>();
      default: return {};
    }
  };
  if (q.kv == DType::kF16) return of_type.template operator()<DType::kF16>();
  if (q.kv == DType::kBF16) return of_type.template operator()<DType::kBF16>();
  return {};
}

/// Of codes, with one scale or ("latent_mma_packed") in rows of 656 bytes.
template <bool kPacked>
Found latent_code_row(const TemplateQuery& q, int cc) {
  if (q.rows != 16 || q.kv != DType::kE4M3 || q.head_dim != 576 || q.head_dim_vo != 512) return {};
  const auto row = [&]<int kArch>() -> Found {
    using Traits = sm80::LatentTraits<512, 64, DType::kE4M3, 16, kArch, kPacked>;
    return row_of<Traits>(kArch, false, 576, 512);
  };
  return cc >= 90 ? row.template operator()<90>() : row.template operator()<80>();
}

Found find_latent(const TemplateQuery& q, int cc) {
  if (cc < 80) return {};
  if (std::string_view(q.family) == "latent_mma_packed") return latent_code_row<true>(q, cc);
  if (q.q != q.kv) return latent_code_row<false>(q, cc);
  const int tail = q.head_dim - q.head_dim_vo;
  // Three tiles of 64 rows have room in 227 KB, which 9.0 and 10.x have and 12.x have not.
  const bool roomy = cc >= 90 && cc < 120;
  const auto with_tail = [&]<int kLatent>() -> Found {
    if (tail == 0) return roomy ? latent_row<90, kLatent, 0>(q) : latent_row<80, kLatent, 0>(q);
    if (tail == 64) return roomy ? latent_row<90, kLatent, 64>(q) : latent_row<80, kLatent, 64>(q);
    return {};
  };
  switch (q.head_dim_vo) {
    case 256: return with_tail.template operator()<256>();
    case 320: return with_tail.template operator()<320>();
    case 384: return with_tail.template operator()<384>();
    case 512: return with_tail.template operator()<512>();
    default: return {};
  }
}

template <DType kQ, DType kKv, bool kPacked>
Found hopper_latent_row(bool hooks) {
  using sm90a::LatentTraits;
  if (hooks) return row_of<LatentTraits<512, 64, kQ, kKv, kPacked, true>>(90, true, 576, 512);
  return row_of<LatentTraits<512, 64, kQ, kKv, kPacked, false>>(90, true, 576, 512);
}

/// Of Q's type ("latent"), of e4m3 with one scale ("latent_codes") or with four in each row
/// ("latent_packed").
Found find_hopper_latent(const TemplateQuery& q, int cc) {
  using enum DType;
  if (cc != 90 || q.rows != 64 || q.head_dim != 576 || q.head_dim_vo != 512) return {};
  const std::string_view family = q.family;
  const auto of_type = [&]<DType kQ>() -> Found {
    if (family == "latent_packed") return hopper_latent_row<kQ, kE4M3, true>(q.hooks);
    if (family == "latent_codes") return hopper_latent_row<kQ, kE4M3, false>(q.hooks);
    return hopper_latent_row<kQ, kQ, false>(q.hooks);
  };
  if (q.q == kF16) return of_type.template operator()<kF16>();
  if (q.q == kBF16) return of_type.template operator()<kBF16>();
  return {};
}

template <int kDim, DType kQ, DType kKv>
Found hopper_scaled_row(bool hooks) {
  using sm90a::ScaledTraits;
  if (hooks) return row_of<ScaledTraits<kDim, kDim, kQ, 192, true, kKv>>(90, true, kDim, kDim);
  return row_of<ScaledTraits<kDim, kDim, kQ, 192, false, kKv>>(90, true, kDim, kDim);
}

/// Larger heads have no room for codes as they lie and as they are widened.
Found find_hopper_scaled(const TemplateQuery& q, int cc) {
  using enum DType;
  if (cc != 90 || q.rows != 192 || q.v != q.kv) return {};
  const auto row = [&]<int kDim>() -> Found {
    if (q.q == kF16 && q.kv == kI8) return hopper_scaled_row<kDim, kF16, kI8>(q.hooks);
    if (q.q == kBF16 && q.kv == kI8) return hopper_scaled_row<kDim, kBF16, kI8>(q.hooks);
    if (q.q == kF16 && q.kv == kE4M3) return hopper_scaled_row<kDim, kF16, kE4M3>(q.hooks);
    if (q.q == kBF16 && q.kv == kE4M3) return hopper_scaled_row<kDim, kBF16, kE4M3>(q.hooks);
    return {};
  };
  const int dim = max_of(q.head_dim, q.head_dim_vo);
  if (dim <= 64) return row.template operator()<64>();
  if (dim <= 128) return row.template operator()<128>();
  return {};
}

template <int kDimQk, int kDimVo, int kRows, DType kQ, DType kKv>
Found hopper_row(bool hooks) {
  using sm90a::HopperTraits;
  if (hooks)
    return row_of<HopperTraits<kDimQk, kDimVo, kQ, kRows, true, kKv>>(90, true, kDimQk, kDimVo);
  return row_of<HopperTraits<kDimQk, kDimVo, kQ, kRows, false, kKv>>(90, true, kDimQk, kDimVo);
}

/// The pairs of types that wgmma kernels are made of.
template <int kDimQk, int kDimVo, int kRows>
Found hopper_types(const TemplateQuery& q) {
  using enum DType;
  const bool same = q.q == q.kv;
  if (same && q.q == kF16) return hopper_row<kDimQk, kDimVo, kRows, kF16, kF16>(q.hooks);
  if (same && q.q == kBF16) return hopper_row<kDimQk, kDimVo, kRows, kBF16, kBF16>(q.hooks);
  if (same && q.q == kE4M3) return hopper_row<kDimQk, kDimVo, kRows, kE4M3, kE4M3>(q.hooks);
  if constexpr (kDimQk <= 128) {  // the others have no room for K as it lies and as it is widened
    if (q.kv != kE4M3) return {};
    if (q.q == kF16) return hopper_row<kDimQk, kDimVo, kRows, kF16, kE4M3>(q.hooks);
    if (q.q == kBF16) return hopper_row<kDimQk, kDimVo, kRows, kBF16, kE4M3>(q.hooks);
  }
  return {};
}

Found find_hopper(const TemplateQuery& q, int cc) {
  if (cc != 90) return {};
  const auto holds = [&](int qk, int vo) { return q.head_dim <= qk && q.head_dim_vo <= vo; };
  if (q.rows == 192) {
    if (holds(64, 64)) return hopper_types<64, 64, 192>(q);
    if (holds(128, 128)) return hopper_types<128, 128, 192>(q);
  } else if (q.rows == 128) {
    if (holds(192, 128)) return hopper_types<192, 128, 128>(q);
    if (holds(256, 256)) return hopper_types<256, 256, 128>(q);
  }
  return {};
}

}  // namespace

Found find_template(const TemplateQuery& query, int cc) {
  const std::string_view family = query.family;
  if (family == "prefill") return find_prefill(query, cc);
  if (family == "prefill_scaled") return find_prefill_scaled(query, cc);
  if (query.row_hooks) return {};
  if (family == "decode") return find_decode(query, cc);
  if (family == "decode_scaled") return find_decode_scaled(query, cc);
  if (family == "hopper") return find_hopper(query, cc);
  if (family.starts_with("latent_mma")) return find_latent(query, cc);
  if (family.starts_with("latent")) return find_hopper_latent(query, cc);
  if (family == "hopper_scaled") return find_hopper_scaled(query, cc);
  return {};
}

}  // namespace flashbsr::cuda
