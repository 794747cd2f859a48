// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What a warp does in latent attention (latent.h): its part of S and of the weights, and of O.
#pragma once

#include <flashbsr/kernel/sm80/latent_codes.h>
#include <flashbsr/kernel/sm80/mainloop.h>
#include <flashbsr/ptx/shared.h>

namespace flashbsr::sm80 {

/// Where S of rows [16 band, 16 band + 16) and the tokens of block `block` is added up, and where
/// its weights are afterwards; `exchange` bytes from those of the first tile.
template <class Traits>
FLASHBSR_DEVICE uint32_t latent_unit(uint32_t memory, uint32_t exchange, int32_t band,
                                     int32_t block) {
  return memory + Traits::kExchangeOffset + exchange +
         (band * Traits::kBlocks + block) * Traits::kUnitBytes;
}

/// Numbers of every row in shared memory.
template <class Traits>
struct LatentState {
  uint32_t base;

  FLASHBSR_DEVICE explicit LatentState(uint32_t memory) : base(memory + Traits::kStateOffset) {}

  /// Largest logits of a block of tokens, and at an item's end the sums of its weights.
  FLASHBSR_DEVICE uint32_t of_block(int32_t block, int32_t row) const { return at(block, row); }
  FLASHBSR_DEVICE uint32_t shrink(int32_t row) const { return at(Traits::kBlocks, row); }
  FLASHBSR_DEVICE uint32_t reference(int32_t row) const { return at(Traits::kBlocks + 1, row); }

  FLASHBSR_DEVICE static float load(uint32_t address) {
    return __uint_as_float(ptx::load_shared(address));
  }
  FLASHBSR_DEVICE static void store(uint32_t address, float x) {
    ptx::store_shared(address, __float_as_uint(x));
  }

 private:
  FLASHBSR_DEVICE uint32_t at(int32_t which, int32_t row) const {
    return base + (which * Traits::kRows + row) * 4;
  }
};

/// A warp's part of S, and the weights of the tokens that are its own.
template <class Traits, class Variant>
class LatentScores : public Scores<Traits, Variant> {
  using Base = Scores<Traits, Variant>;
  using State = LatentState<Traits>;

 public:
  FLASHBSR_DEVICE LatentScores(const KernelArgs& args, const BlockState& state, uint32_t memory,
                               int32_t thread)
      : Base(args, state, memory, thread),
        params_(args.params),
        memory_(memory),
        part_(static_cast<uint32_t>(thread) / 32 / Traits::kRowWarps) {
    static_assert(Base::kBands == 1 && Base::kTokenTiles == 2);
  }

  /// Once rows, scales and Q of an item are in shared memory.
  FLASHBSR_DEVICE void begin(const Task& task) {
    Base::begin(task);
    base_[0] = base_[1] = Base::kShift - kNothing;
    sum_[0] = sum_[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < Traits::kKeptSteps; ++n) load_queries(kept_[n], n);
  }

  /// Whether this warp makes weights: of block_of() of each tile.
  FLASHBSR_DEVICE bool owns() const { return key_warp() < kOwners; }

  /// This warp's part of S of the tile at KV position `begin`, `tile` bytes from the first, to
  /// those who own the tokens.
  FLASHBSR_DEVICE void score(int32_t begin, uint32_t tile, uint32_t exchange) {
    exchange_ = exchange;
    tile_ = tile;
    if (Base::sight(begin).any) {
      multiply(tile);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) s_[0][e / 4][e % 4] = -infinity();
    }
  }
  /// The weights of its own tokens, once the others' parts are there. False: one does not fit its
  /// type.
  FLASHBSR_DEVICE bool weigh(int32_t begin) {
    const TileSight sight = Base::sight(begin);
    meet();
    if (sight.any && owns()) {
      collect();
      Base::soften(begin + block() * Traits::kScoreTokens, sight.all);
    }
    return !owns() || make();
  }

  /// Between barriers, where a weight did not fit: what raise() needs of all owners.
  FLASHBSR_DEVICE void tell_top() const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = ptx::max(ptx::max(s_[0][0][2 * h], s_[0][0][2 * h + 1]),
                           ptx::max(s_[0][1][2 * h], s_[0][1][2 * h + 1]));
      top = ptx::max(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = ptx::max(top, __shfl_xor_sync(0xffffffffu, top, 2));
      if (leads()) State::store(state().of_block(block(), row_of(h)), top * factor_[0][h]);
    }
  }
  /// References that the tile's weights fit, and these weights.
  FLASHBSR_DEVICE void raise() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t row = row_of(h);
      float top = State::load(state().of_block(0, row));
#pragma unroll
      for (int i = 1; i < Traits::kBlocks; ++i) {
        top = ptx::max(top, State::load(state().of_block(i, row)));
      }
      const float lower = ptx::min(base_[h], Base::kShift - top);
      const float shrink = ptx::exp2(lower - base_[h]);
      base_[h] = lower;
      sum_[h] *= shrink;
      if (block() == 0 && leads()) State::store(state().shrink(row), shrink);
    }
    make();
  }
  /// The tile's weights count.
  FLASHBSR_DEVICE void add() {
    sum_[0] += made_[0];
    sum_[1] += made_[1];
  }

  /// What LatentOutput::end() reads behind a barrier.
  FLASHBSR_DEVICE void end() const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = sum_[h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (!leads()) continue;
      const int32_t row = row_of(h);
      State::store(state().of_block(block(), row), sum);
      if (block() == 0) State::store(state().reference(row), base_[h]);
    }
  }

 private:
  using Base::factor_, Base::lane_, Base::s_;
  using Queries = typename Base::Queries;
  using Keys = typename Base::Keys;
  /// Warps of those that share tokens which own 16 of them each.
  static constexpr int kOwners = Traits::kWarpTokens / Traits::kScoreTokens;
  static constexpr int kLineSteps = 4 / Traits::kKeyWarps;  ///< of a warp, in 64 dims
  static constexpr int kSteps = Traits::kHeadDim / 64 * kLineSteps;
  /// What weights of 4 tokens may add up to: mainloop.h. Times scales they stay finite below 16 of
  /// these, which is latents of 7168; the largest has all bits of fp16 from scales of 2^-21 on.
  static constexpr float kMost = Traits::kRowScales ? 4096.0f : 32768.0f;

  FLASHBSR_DEVICE int32_t key_warp() const { return part_ % Traits::kKeyWarps; }
  FLASHBSR_DEVICE int32_t token_warp() const { return part_ / Traits::kKeyWarps; }
  FLASHBSR_DEVICE int32_t band() const { return this->first_row_ / 16; }
  /// Of tokens, that this warp owns.
  FLASHBSR_DEVICE int32_t block() const { return token_warp() * kOwners + key_warp(); }
  FLASHBSR_DEVICE State state() const { return State(memory_); }
  /// What of a block of tokens is this lane's.
  FLASHBSR_DEVICE uint32_t unit(int32_t block) const {
    return latent_unit<Traits>(memory_, exchange_, band(), block) + lane_ * 16;
  }
  /// Of half `h` of the rows. Seldom: nothing of it is kept.
  FLASHBSR_DEVICE static int32_t row_of(int h) {
    const int32_t thread = ptx::thread_index();
    return Base::first_row(thread / 32) + h * 8 + thread % 32 / 4;
  }
  FLASHBSR_DEVICE static bool leads() { return ptx::thread_index() % 4 == 0; }  ///< of a quad

  /// Its steps are some of each line of 64 dims, so that their places in a line, which are
  /// permuted, differ from those of the first warp by one XOR.
  FLASHBSR_DEVICE static constexpr int step_of(int n) {
    return n / kLineSteps * 4 + n % kLineSteps;
  }
  FLASHBSR_DEVICE uint32_t turn() const { return key_warp() * (kLineSteps * 32); }
  /// Step `n` of this warp's. Of codes a warp has dims that share scales, and the tail's last.
  FLASHBSR_DEVICE void load_queries(uint32_t (&a)[4], int n) const {
    Queries queries = this->queries_;
    if constexpr (Traits::kBytes) {
      if (n == kSteps - 1) {
        queries.base ^= key_warp() * 32;
        queries.load(a, 0, Traits::kValueDim / 16);
      } else {
        queries.base += key_warp() * (kSteps - 1) * 32;
        queries.load(a, 0, n);
      }
    } else {
      queries.base ^= turn();
      queries.load(a, 0, step_of(n));
    }
  }
  FLASHBSR_DEVICE void queries_of(uint32_t (&a)[4], int n) const {
    if (n >= Traits::kKeptSteps) return load_queries(a, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = kept_[n][i];
  }

  /// S of all tokens of this warp by some of the dims. Others' own tokens go to shared memory.
  FLASHBSR_DEVICE void multiply(uint32_t tile) {
    float s[2 * kOwners][4] = {};
    if constexpr (Traits::kBytes) {
      const CodedKeys<Traits> keys(this->key_tile_ + tile, token_warp() * Traits::kWarpTokens,
                                   key_warp(), lane_);
      keys.multiply(s, params_.q.dtype, [&](uint32_t (&a)[4], int n) { queries_of(a, n); });
    } else {
      Keys keys(this->key_tile_ + tile + token_warp() * Traits::kWarpTokens * Keys::kRowBytes,
                lane_);
      keys.base ^= turn();
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        uint32_t a[4];
        queries_of(a, n);
#pragma unroll
        for (int j = 0; j < kOwners; ++j) {
          uint32_t k[2][2];
          keys.load(k, j * 16, step_of(n));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            mma_16x8x16<Traits::kArch, Traits::kCompute>(s[2 * j + i], a, k[i][0], k[i][1]);
          }
        }
      }
    }
    const int32_t mine = key_warp(), first = token_warp() * kOwners;
#pragma unroll
    for (int j = 0; j < kOwners; ++j) {
      if (j == mine) continue;
      const uint32_t to = unit(first + j) + (mine - (mine > j)) * 1024;
      put(to, s[2 * j]);
      put(to + 512, s[2 * j + 1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s_[0][i][e] = s[i][e];
#pragma unroll
        for (int j = 1; j < kOwners; ++j) s_[0][i][e] = mine == j ? s[2 * j + i][e] : s_[0][i][e];
      }
    }
  }
  /// Adds the others' parts to S of own tokens.
  FLASHBSR_DEVICE void collect() {
    const uint32_t from = unit(block());
#pragma unroll
    for (int part = 0; part < 2 * (Traits::kKeyWarps - 1); ++part) {
      float x[4];
      ptx::load_shared(from + part * 512, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) s_[0][part % 2][e] += x[e];
    }
  }
  /// Of those that share rows and tokens; also where they see nothing: racecheck seems to count a
  /// warp's barriers, and where some had fewer it took block-wide ones for missing.
  FLASHBSR_DEVICE void meet() const {
    const int32_t mine = band() + token_warp() * Traits::kRowWarps;
#pragma unroll
    for (int i = 0; i < Traits::kWarps / Traits::kKeyWarps; ++i) {
      if (i == mine) ptx::named_barrier_sync(1 + i, 32 * Traits::kKeyWarps);
    }
  }
  FLASHBSR_DEVICE static void put(uint32_t to, const float (&s)[4]) {
    ptx::store_shared(to, s[0], s[1], s[2], s[3]);
  }

  /// Makes weights, and puts them where the parts of S were: each lane what it has read itself.
  FLASHBSR_DEVICE bool make() {
    uint32_t p[4];
    [[maybe_unused]] float w[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i % 2;
      const float x = ptx::exp2(__fmaf_rn(s_[0][i / 2][2 * h], factor_[0][h], base_[h]));
      const float y = ptx::exp2(__fmaf_rn(s_[0][i / 2][2 * h + 1], factor_[0][h], base_[h]));
      made_[h] = i < 2 ? x + y : made_[h] + (x + y);
      if constexpr (Traits::kRowScales) {
        w[i][0] = x, w[i][1] = y;
      } else {
        p[i] = ptx::pack2<Traits::kCompute, Traits::kArch>(x, y);
      }
    }
    if constexpr (Traits::kRowScales) {
      store_scaled_weights<Traits>(unit(block()), this->key_tile_ + tile_,
                                   block() * Traits::kScoreTokens, lane_, w);
    } else {
      ptx::store_shared_16(unit(block()), {p[0], p[1], p[2], p[3]});
    }
    return made_[0] < kMost && made_[1] < kMost;
  }

  const Params& params_;
  const uint32_t memory_;
  const int32_t part_;                ///< which of the warps that share rows
  uint32_t exchange_ = 0, tile_ = 0;  ///< of the weights at hand
  uint32_t kept_[Traits::kKeptSteps][4];
  float base_[2], sum_[2];  ///< of a thread's rows g and g + 8: as in Mainloop
  float made_[2];           ///< what the last weights add to sums
};

/// A warp's part of O: some rows, some dims. As write_rows() takes it.
template <class Traits, class Variant>
class LatentOutput {
  using State = LatentState<Traits>;

 public:
  static constexpr int kBands = Traits::kOutputBands;
  /// Of 16 dims, as many as lines of 64 that its warps take.
  static constexpr int kChunks = ceil_div(Traits::kValueDim / 64, Traits::kDimWarps / 4);
  static constexpr int kDims = 16 * kChunks;
  static constexpr int kDimTiles = kDims / 8;
  /// Dims are not padded, but of an odd number of lines some warps have one less.
  static constexpr bool kExact = Traits::kValueDim / 64 % (Traits::kDimWarps / 4) == 0;
  static constexpr float kShift = Scores<Traits, Variant>::kShift;

  float o[kBands][kDimTiles][4];
  float base[kBands][2], sum[kBands][2];  ///< from end() on

  FLASHBSR_DEVICE LatentOutput(uint32_t memory, int32_t thread)
      : memory_(memory), lane_(thread % 32), first_row_(first_row(thread / 32)) {}

  FLASHBSR_DEVICE static int32_t first_row(int32_t warp) {
    return static_cast<uint32_t>(warp) % kRowGroups * (16 * kBands);
  }
  FLASHBSR_DEVICE static int32_t first_dim(int32_t thread) {
    const uint32_t part = static_cast<uint32_t>(thread) / (32 * kRowGroups);
    return Traits::kBytes ? part * kDims : part % 4 * 16 + part / 4 * 64;
  }
  FLASHBSR_DEVICE static constexpr int column(int dim) {
    return Traits::kBytes ? dim : dim / 16 * kStride + dim % 16;
  }

  FLASHBSR_DEVICE void begin(const Task& task) {
    idle_ = first_row_ >= task.item.row_count;
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[b][n][e] = 0.0f;
      }
    }
  }

  /// By what LatentScores::raise() has told.
  FLASHBSR_DEVICE void rescale() {
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float shrink = State::load(State(memory_).shrink(row_of(b, h)));
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
          o[b][n][2 * h] *= shrink;
          o[b][n][2 * h + 1] *= shrink;
        }
      }
    }
  }

  /// O += P V, for the tile `tile` bytes from the first.
  FLASHBSR_DEVICE void accumulate(uint32_t tile, uint32_t exchange) {
    if (idle_) return;
    constexpr int kRowDims = Traits::kBytes ? Traits::kValueDim : Traits::kHeadDim;
    constexpr int kSize = dtype_size(Traits::kKv), kLineDims = 128 / kSize;
    using Values = ValueFragments<Traits::kArch, kRowDims, Traits::kKv>;
    const int32_t dim = first_dim(ptx::thread_index());
    Values values(memory_ + Traits::kKeyOffset + tile + dim / kLineDims * 128, lane_);
    values.base ^= dim % kLineDims * kSize;  // as step_of() has it
    // Of each group of dims weights lie there by its scales.
    const uint32_t group = Traits::kRowScales ? dim / PackedLatent::kGroupDims * 512 : 0;
#pragma unroll
    for (int j = 0; j < Traits::kBlocks; ++j) {
      uint32_t p[kBands][4];
#pragma unroll
      for (int b = 0; b < kBands; ++b) {
        const uint4 x = ptx::load_shared_16(
            latent_unit<Traits>(memory_, exchange, first_row_ / 16 + b, j) + group + lane_ * 16);
        p[b][0] = x.x, p[b][1] = x.y, p[b][2] = x.z, p[b][3] = x.w;
      }
#pragma unroll
      for (int d = 0; d < kDims; d += Values::kDims) {
        // Those dims are not written either (kExact).
        if (column(d) + kStride > Traits::kValueDim && dim + column(d) >= Traits::kValueDim) break;
        uint32_t v[Values::kDims / 8][2];
        values.load(v, j * 16, column(d));
#pragma unroll
        for (int i = 0; i < Values::kDims / 8; ++i) {
#pragma unroll
          for (int b = 0; b < kBands; ++b) {
            mma_16x8x16<Traits::kArch, Traits::kCompute>(o[b][d / 8 + i], p[b], v[i][0], v[i][1]);
          }
        }
      }
    }
  }

  /// Sums and references; behind a barrier after LatentScores::end().
  FLASHBSR_DEVICE void end() {
    static_assert(Traits::kBlocks <= 4);  // one each for the lanes that write_rows() adds up
    const State state(memory_);
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t row = row_of(b, h), block = ptx::thread_index() % 4;
        sum[b][h] = block < Traits::kBlocks ? State::load(state.of_block(block, row)) : 0.0f;
        base[b][h] = State::load(state.reference(row));
      }
    }
  }

 private:
  static constexpr int kRowGroups = Traits::kRowWarps / kBands;
  static constexpr int kStride = Traits::kDimWarps / 4 * 64;  ///< dims from a chunk to the next

  /// Seldom: nothing of it is kept.
  FLASHBSR_DEVICE static int32_t row_of(int band, int half) {
    const int32_t thread = ptx::thread_index();
    return first_row(thread / 32) + band * 16 + half * 8 + thread % 32 / 4;
  }

  const uint32_t memory_;
  const int32_t lane_;
  const int32_t first_row_;
  bool idle_;  ///< no row of the item is among these
};

}  // namespace flashbsr::sm80
