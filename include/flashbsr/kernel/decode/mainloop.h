// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// One stage of one warp: S^T = K Q^T, online softmax, O^T += V^T P^T. Keys are the rows of the
// matrix instruction (M = 16) and queries its 8 columns, so 8 packed rows waste nothing.
//
// Lane (g, t) = (lane / 4, lane % 4) holds the logits of tokens g, g + 8 and packed rows 2 t,
// 2 t + 1 of every 16 x 8 tile, and of O the same rows at dims that value_dim() names.
#pragma once

#include <flashbsr/kernel/decode/loader.h>
#include <flashbsr/kernel/decode/packed.h>
#include <flashbsr/kernel/decode/query.h>
#include <flashbsr/kernel/decode/rotate.h>
#include <flashbsr/kernel/decode/state.h>
#include <flashbsr/ptx/math.h>
#include <flashbsr/ptx/mma.h>
#include <flashbsr/variant/variant.h>

namespace flashbsr {

template <class Traits, class Variant>
class DecodeMath {
 public:
  using Query = DecodeQuery<Traits>;
  using State = DecodeState<Traits>;

  FLASHBSR_DEVICE DecodeMath(const KernelArgs& args, int lane)
      : args_(args), variant_(args.params), g_(lane >> 2), t_(lane & 3), lane_(lane) {}

  FLASHBSR_DEVICE void begin(const DecodeItem& item, const DecodeReady<Traits>& ready) {
    whole_ = ready.whole;
    visible_ = ready.visible;
    if (variant_.masks_logits()) {
      const int32_t masked = variant_.mask_begin(args_.requests[item.request]);
      whole_.end = min_of(whole_.end, masked);
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      scale_[n][0] = ready.scale[8 * n + 2 * t_];
      scale_[n][1] = ready.scale[8 * n + 2 * t_ + 1];
    }
  }

  /// The next stage of the ring, whose first token is KV position `position`. K goes back to the
  /// ring as soon as it has been multiplied, V at the end: the more is under way, the better.
  template <class Ring>
  FLASHBSR_DEVICE void step(const DecodeItem& item, const Query& query, Ring& ring,
                            int32_t position, State& state) {
    float s[kSubTiles][kTiles][4];
    const uint32_t tile = keys(item, ring, position);
    if constexpr (Traits::kPacked) {
      float of_heads[Traits::kHeads * kSubTiles][kTiles][4];
      with_packed_run<Traits>(args_.params.k_scales.dim, [&]<int kRun>() {
        packed_scores<Traits, kRun>(query, tile, ring.key_scales(), lane_, of_heads);
      });
      pick_heads(of_heads, s);
    } else {
      scores(query, tile, s);
      if constexpr (Traits::kTokenScales) scale_logits(ring.key_scales(), s);
    }
    ring.produce_keys();
    const bool cut = position < whole_.begin || position + Traits::kKvTile > whole_.end;
    const bool hooks = !Variant::use_softmax || variant_.transforms_logits();
    if (cut || hooks) {
      masked(item, position, s);
    } else {
#pragma unroll
      for (int u = 0; u < kSubTiles; ++u) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s[u][n][i] *= scale_[n][i & 1] * kLog2e;
        }
      }
    }
    if constexpr (Variant::use_softmax) raise_max(s, state);
    const float* scales = nullptr;
    if constexpr (Traits::kTokenScales) scales = ring.value_scales();
    accumulate(ring.wait_for_values(item, position, cut), scales, s, state);
    ring.produce_values();
  }

 private:
  static constexpr int kTiles = Traits::kRows / 8;
  static constexpr int kSubTiles = Traits::kKvTile / 16;  // of a head
  static constexpr int kSteps = Traits::kHeadDim / 16;
  static constexpr DType kType = Traits::kCompute;
  /// Weights in fp16 are kept 2^8 larger, so that small ones are not lost as subnormals.
  static constexpr float kShift = kType == DType::kF16 ? 8.0f : 0.0f;
  /// How far logits may be beyond their reference, in powers of two: fp16 ends at 2^16.
  static constexpr float kSlack = kType == DType::kF16 ? 7.0f : 8.0f;
  static constexpr float kOutside = Variant::use_softmax ? -infinity() : 0.0f;

  /// Whether packed row `row` is of an item's second KV head. A group's rows, 2, 4 or 8 of them,
  /// are halves of one and of the other.
  FLASHBSR_DEVICE bool of_second_head(int row) const {
    return row & static_cast<int>(args_.group.divisor >> 1);
  }

  /// Every head's keys meet every row's queries: 8 columns take a product as long as 4. A row keeps
  /// what its own head's gave.
  FLASHBSR_DEVICE void pick_heads(const float (&of_heads)[Traits::kHeads * kSubTiles][kTiles][4],
                                  float (&s)[kSubTiles][kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = Traits::kHeads == 2 && of_second_head(2 * t_ + (i & 1)) ? 1 : 0;
#pragma unroll
      for (int u = 0; u < kSubTiles; ++u) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          s[u][n][i] =
              head == 0 ? of_heads[u][n][i] : of_heads[(Traits::kHeads - 1) * kSubTiles + u][n][i];
        }
      }
    }
  }

  /// By K's scales; this lane's tokens are g and g + 8 of every 16.
  FLASHBSR_DEVICE void scale_logits(const float* scales, float (&s)[kSubTiles][kTiles][4]) const {
#pragma unroll
    for (int u = 0; u < kSubTiles; ++u) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[u][n][i] *= scales[16 * u + 8 * (i >> 1) + g_];
      }
    }
  }

  /// The stage's K, rotated where that is asked for.
  template <class Ring>
  FLASHBSR_DEVICE uint32_t keys(const DecodeItem& item, Ring& ring, int32_t position) const {
    if constexpr (kDecodeRotates<Traits, Variant>) {
      if (args_.params.rope.fine && !args_.share.whole()) {
        const uint32_t tile = ring.wait_for_keys();
        rotate_share<Traits>(args_, tile, position, item.kv_end, lane_);
        return tile;
      }
      if (args_.params.rope.fine) {
        DecodeRotator<Traits> rotator(args_.params.rope, position, lane_);
        const uint32_t tile = ring.wait_for_keys();
        rotator.run(tile);
        return tile;
      }
    }
    return ring.wait_for_keys();
  }

  FLASHBSR_DEVICE int q_head(const DecodeItem& item, int packed, int token) const {
    return item.kv_head * static_cast<int>(args_.group.divisor) +
           args_.group.remainder(packed, token);
  }

  template <DType kTo>
  FLASHBSR_DEVICE static void widen(uint32_t bytes, uint32_t& low, uint32_t& high) {
    ptx::widen_bytes<Traits::kArch, Traits::kKv, kTo>(bytes, low, high);
  }

  /// Two k-steps of K, rows 16 u to 16 u + 15: `first` and `second` are A operands.
  FLASHBSR_DEVICE void load_keys(uint32_t tile, int u, int pair, uint32_t (&first)[4],
                                 uint32_t (&second)[4]) const {
    const int row = 16 * u + (lane_ & 15);
    if constexpr (Traits::kBytes) {
      uint32_t raw[4];
      ptx::ldmatrix_x4(raw, tile + decode_tile_offset<Traits>(row, 2 * pair + (lane_ >> 4)));
      widen<Traits::kKeyCompute>(raw[0], first[0], first[2]);
      widen<Traits::kKeyCompute>(raw[1], first[1], first[3]);
      widen<Traits::kKeyCompute>(raw[2], second[0], second[2]);
      widen<Traits::kKeyCompute>(raw[3], second[1], second[3]);
    } else {
      ptx::ldmatrix_x4(first, tile + decode_tile_offset<Traits>(row, 4 * pair + (lane_ >> 4)));
      ptx::ldmatrix_x4(second, tile + decode_tile_offset<Traits>(row, 4 * pair + 2 + (lane_ >> 4)));
    }
  }

  FLASHBSR_DEVICE void scores(const Query& query, uint32_t tile,
                              float (&s)[kSubTiles][kTiles][4]) const {
#pragma unroll
    for (int u = 0; u < kSubTiles; ++u) {
      float even[kTiles][4], odd[kTiles][4];  // two chains: the instruction's latency is long
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) even[n][i] = odd[n][i] = 0;
      }
#pragma unroll
      for (int pair = 0; pair < kSteps / 2; ++pair) {
        uint32_t first[4], second[4];
        load_keys(tile, u, pair, first, second);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint4 b = query.operands(n, pair);
          ptx::mma_m16n8k16<Traits::kKeyCompute>(even[n], first, b.x, b.y);
          ptx::mma_m16n8k16<Traits::kKeyCompute>(odd[n], second, b.z, b.w);
        }
      }
      add(even, odd, s[u]);
    }
  }

  FLASHBSR_DEVICE static void add(const float (&a)[kTiles][4], const float (&b)[kTiles][4],
                                  float (&s)[kTiles][4]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = a[n][i] + b[n][i];
    }
  }

  /// Scaled logits in base 2, -inf where a row does not see the token; without softmax, weights.
  FLASHBSR_DEVICE void masked(const DecodeItem& item, int32_t position,
                              float (&s)[kSubTiles][kTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = min_of(8 * n + 2 * t_ + i, item.row_count - 1);
        const int packed = item.row_begin + row, token = args_.group.quotient(packed);
        const Span visible = visible_[row];
        const int head = q_head(item, packed, token);
#pragma unroll
        for (int u = 0; u < kSubTiles; ++u) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int32_t at = position + 16 * u + g_ + 8 * h;
            float& x = s[u][n][2 * h + i];
            x = logit(item, token, head, at, x * scale_[n][i]);
            if (at < visible.begin || at >= visible.end) x = kOutside;
          }
        }
      }
    }
  }

  FLASHBSR_DEVICE float logit(const DecodeItem& item, int token, int head, int32_t position,
                              float x) const {
    if (!variant_.transforms_logits() && !variant_.masks_logits()) return weight(x);
    if (position >= item.kv_end) return kOutside;  // no mask bit is read beyond the request
    const LogitsAt<ThreadMath> at{.request = args_.requests + item.request,
                                  .q_token = token,
                                  .q_position = item.kv_len - item.q_len + token,
                                  .q_head = head,
                                  .kv_head = item.kv_head,
                                  .kv_first = position,
                                  .lanes = 1,
                                  .kv_position = args_.share.position(position),
                                  .row_value = variant_.row_value(head)};
    if (variant_.transforms_logits()) x = variant_.template logits_transform<ThreadMath>(x, at);
    if (variant_.masks_logits() && !variant_.template logits_mask<ThreadMath>(at)) {
      return kOutside;
    }
    return weight(x);
  }

  /// Of a natural logit: what exponents are made of, or without softmax the weight.
  FLASHBSR_DEVICE float weight(float x) const {
    if constexpr (Variant::use_softmax) {
      return x * kLog2e;
    } else {
      return kWeightUnit<Traits, Variant> * variant_.template activation<ThreadMath>(x);
    }
  }

  /// New references, and what was accumulated under the old ones shrunk to them. As long as no
  /// logit is beyond its row's by more than kSlack, they stay: no maxima are exchanged between
  /// lanes, which takes six shuffles, one after another in pairs.
  FLASHBSR_DEVICE void raise_max(const float (&s)[kSubTiles][kTiles][4], State& state) const {
    float peak[kTiles][2];
    bool grows = false;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = ptx::max(s[0][n][i], s[0][n][2 + i]);
#pragma unroll
        for (int u = 1; u < kSubTiles; ++u) {
          x = ptx::max(x, ptx::max(s[u][n][i], s[u][n][2 + i]));
        }
        peak[n][i] = x;
        grows = grows || x > state.max[n][i] + kSlack;
      }
    }
    if (!__any_sync(~0u, grows)) return;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = peak[n][i];
#pragma unroll
        for (int lane = 4; lane < 32; lane *= 2) x = ptx::max(x, __shfl_xor_sync(~0u, x, lane));
        const float top = ptx::max(state.max[n][i], x);
        // From -inf there is nothing to shrink, and to -inf nothing has come yet.
        const float factor = top == -infinity() ? 1.0f : ptx::exp2(state.max[n][i] - top);
        state.max[n][i] = top;
        state.sum[n][i] *= factor;
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          state.o[j][n][i] *= factor;
          state.o[j][n][2 + i] *= factor;
        }
      }
    }
  }

  /// @param scales  of the values, where there are any
  FLASHBSR_DEVICE void accumulate(uint32_t values, const float* scales,
                                  const float (&s)[kSubTiles][kTiles][4], State& state) const {
    if constexpr (Traits::kPacked) {
      with_packed_run<Traits>(args_.params.v_scales.dim, [&]<int kRun>() {
        float p[kSubTiles][kTiles][4];
#pragma unroll
        for (int u = 0; u < kSubTiles; ++u) weights(s[u], p[u], state);
        packed_values<Traits, kRun>(values, scales, lane_, of_second_head(g_), p, state.o);
      });
    } else {
#pragma unroll
      for (int u = 0; u < kSubTiles; ++u) {
        float p[kTiles][4];
        weights(s[u], p, state);
        if constexpr (Traits::kTokenScales) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) p[n][i] *= scales[16 * u + 8 * (i >> 1) + g_];
          }
        }
        multiply(values, u, p, state);
      }
    }
  }

  /// Of 16 tokens' logits, whose sums they join.
  FLASHBSR_DEVICE void weights(const float (&s)[kTiles][4], float (&p)[kTiles][4],
                               State& state) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Variant::use_softmax) {
          const float top = state.max[n][i & 1];
          p[n][i] = ptx::exp2(s[n][i] - ((top == -infinity() ? 0.0f : top) - kShift));
        } else {
          p[n][i] = s[n][i];
        }
      }
      state.sum[n][0] += p[n][0] + p[n][2];
      state.sum[n][1] += p[n][1] + p[n][3];
    }
  }

  FLASHBSR_DEVICE void multiply(uint32_t values, int u, const float (&p)[kTiles][4],
                                State& state) const {
    uint32_t b[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      // Tokens g x rows 2t, 2t+1 become rows g x tokens 2t, 2t+1: the B operand.
      b[n][0] = ptx::movmatrix_trans(ptx::pack2<kType>(p[n][0], p[n][1]));
      b[n][1] = ptx::movmatrix_trans(ptx::pack2<kType>(p[n][2], p[n][3]));
    }
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      uint32_t first[4], second[4];
      load_values(values, u, pair, first, second);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        ptx::mma_m16n8k16<kType>(state.o[2 * pair][n], first, b[n][0], b[n][1]);
        ptx::mma_m16n8k16<kType>(state.o[2 * pair + 1][n], second, b[n][0], b[n][1]);
      }
    }
  }

  /// V^T of 16 tokens and dims 32 pair to 32 pair + 31, as two A operands.
  FLASHBSR_DEVICE void load_values(uint32_t values, int u, int pair, uint32_t (&first)[4],
                                   uint32_t (&second)[4]) const {
    if constexpr (Traits::kBytes) {
      // Transposed in pairs of bytes: a register holds dims 2g, 2g+1 of tokens 2t and 2t+1.
      const int row = 16 * u + (lane_ & 15);
      uint32_t raw[4];
      ptx::ldmatrix_x4_trans(raw,
                             values + decode_tile_offset<Traits>(row, 2 * pair + (lane_ >> 4)));
#pragma unroll
      for (int i = 0; i < 4; ++i) raw[i] = ptx::permute_bytes(raw[i], 0, 0x3120);
      widen<kType>(raw[0], first[0], first[1]);
      widen<kType>(raw[1], first[2], first[3]);
      widen<kType>(raw[2], second[0], second[1]);
      widen<kType>(raw[3], second[2], second[3]);
    } else {
      const int row = 16 * u + (lane_ & 7) + ((lane_ >> 4) << 3);
      const int chunk = 4 * pair + ((lane_ >> 3) & 1);
      ptx::ldmatrix_x4_trans(first, values + decode_tile_offset<Traits>(row, chunk));
      ptx::ldmatrix_x4_trans(second, values + decode_tile_offset<Traits>(row, chunk + 2));
    }
  }

  const KernelArgs& args_;
  const Variant variant_;
  const int g_;
  const int t_;
  const int lane_;
  Span whole_;                     ///< what every row sees
  const Span* visible_ = nullptr;  ///< what each does
  float scale_[kTiles][2];
};

}  // namespace flashbsr
