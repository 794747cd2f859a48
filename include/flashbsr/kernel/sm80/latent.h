// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Multi-head latent attention (DeepSeek-V2, 2024) through mma.sync: K is a latent and a tail, V the
// same latent; a tile is read once and used twice. O of 64 rows and 512 dims is half of an SM's
// registers, so there is one block of eight warps, and who has which rows differs by product:
//
//   S = Q K^T   16 rows in a warp, and a part of the dims: two halves (64 rows) of 32 tokens, or
//               four quarters (16 rows) of 16; parts meet in shared memory
//   weights     of 16 rows and 16 tokens in a warp; P in shared memory, as A operands lie
//   O += P V    32 rows in a warp, so that a fragment of V feeds two products, and 128 dims
//
// A tile has two barriers of the block: K is there; P is there. The second one votes whether a
// row's weights are too large for its reference (mainloop.h): then it is raised and O rescaled.
// docs/kernels/mla.md.
#pragma once

#include <flashbsr/kernel/merge_queue.h>
#include <flashbsr/kernel/sm80/kernel.h>
#include <flashbsr/ptx/shared.h>

namespace flashbsr::sm80 {

/// Where S of 16 rows, rows / 16 of which are `band`, and of the tokens of block `block` is added
/// up, and its weights are afterwards.
template <class Traits>
FLASHBSR_DEVICE uint32_t latent_unit(uint32_t memory, int32_t band, int32_t block) {
  return memory + Traits::kExchangeOffset + (band * Traits::kBlocks + block) * Traits::kUnitBytes;
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
        memory_(memory),
        part_(static_cast<uint32_t>(thread) / 32 / Traits::kRowWarps) {
    static_assert(Base::kBands == 1 && Base::kTokenTiles == 2);
  }

  /// Once rows, scales and Q of an item are in shared memory.
  FLASHBSR_DEVICE void begin(const Task& task) {
    Base::begin(task);
    base_[0] = base_[1] = Base::kShift - kNothing;
    sum_[0] = sum_[1] = 0.0f;
    const Queries queries = this_queries();
#pragma unroll
    for (int n = 0; n < Traits::kKeptSteps; ++n) queries.load(kept_[n], 0, step_of(n));
  }

  /// Whether this warp makes weights: of block_of() of each tile.
  FLASHBSR_DEVICE bool owns() const { return key_warp() < kOwners; }

  /// S of the tile at KV position `begin`, `tile` bytes from the first, and where this warp owns
  /// tokens their weights. False: a weight does not fit its type.
  FLASHBSR_DEVICE bool score(int32_t begin, uint32_t tile) {
    const TileSight sight = Base::sight(begin);
    if (sight.any) {
      multiply(tile);
      if (owns()) Base::soften(begin + block() * Traits::kScoreTokens, sight.all);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) s_[0][e / 4][e % 4] = -infinity();
    }
    return !owns() || weigh();
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
    weigh();
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
  /// What weights of 4 tokens may add up to: mainloop.h.
  static constexpr float kMost = 32768.0f;

  FLASHBSR_DEVICE int32_t key_warp() const { return part_ % Traits::kKeyWarps; }
  FLASHBSR_DEVICE int32_t token_warp() const { return part_ / Traits::kKeyWarps; }
  FLASHBSR_DEVICE int32_t band() const { return this->first_row_ / 16; }
  /// Of tokens, that this warp owns.
  FLASHBSR_DEVICE int32_t block() const { return token_warp() * kOwners + key_warp(); }
  FLASHBSR_DEVICE State state() const { return State(memory_); }
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
  FLASHBSR_DEVICE Queries this_queries() const {
    Queries queries = this->queries_;
    queries.base ^= turn();
    return queries;
  }

  /// S of own tokens, by all warps that share them.
  FLASHBSR_DEVICE void multiply(uint32_t tile) {
    float s[2 * kOwners][4] = {};
    const Queries queries = this_queries();
    Keys keys(this->key_tile_ + tile + token_warp() * Traits::kWarpTokens * Keys::kRowBytes, lane_);
    keys.base ^= turn();
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      uint32_t a[4];
      if (n < Traits::kKeptSteps) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = kept_[n][i];
      } else {
        queries.load(a, 0, step_of(n));
      }
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
    const int32_t mine = key_warp(), first = token_warp() * kOwners;
#pragma unroll
    for (int j = 0; j < kOwners; ++j) {
      if (j == mine) continue;
      const uint32_t to =
          latent_unit<Traits>(memory_, band(), first + j) + (mine - (mine > j)) * 1024 + lane_ * 16;
      put(to, s[2 * j]);
      put(to + 512, s[2 * j + 1]);
    }
    ptx::named_barrier_sync(1 + band() + token_warp() * Traits::kRowWarps, 32 * Traits::kKeyWarps);
    if (!owns()) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s_[0][i][e] = s[i][e];
#pragma unroll
        for (int j = 1; j < kOwners; ++j) s_[0][i][e] = mine == j ? s[2 * j + i][e] : s_[0][i][e];
      }
    }
    const uint32_t from = latent_unit<Traits>(memory_, band(), block()) + lane_ * 16;
#pragma unroll
    for (int part = 0; part < 2 * (Traits::kKeyWarps - 1); ++part) {
      float x[4];
      ptx::load_shared(from + part * 512, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) s_[0][part % 2][e] += x[e];
    }
  }
  FLASHBSR_DEVICE static void put(uint32_t to, const float (&s)[4]) {
    ptx::store_shared(to, s[0], s[1], s[2], s[3]);
  }

  /// Makes weights, and puts them where the parts of S were: each lane what it has read itself.
  FLASHBSR_DEVICE bool weigh() {
    uint32_t p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i % 2;
      const float x = ptx::exp2(__fmaf_rn(s_[0][i / 2][2 * h], factor_[0][h], base_[h]));
      const float y = ptx::exp2(__fmaf_rn(s_[0][i / 2][2 * h + 1], factor_[0][h], base_[h]));
      made_[h] = i < 2 ? x + y : made_[h] + (x + y);
      p[i] = ptx::pack2<Traits::kCompute, Traits::kArch>(x, y);
    }
    ptx::store_shared_16(latent_unit<Traits>(memory_, band(), block()) + lane_ * 16,
                         {p[0], p[1], p[2], p[3]});
    return made_[0] < kMost && made_[1] < kMost;
  }

  const uint32_t memory_;
  const int32_t part_;  ///< which of the warps that share rows
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
  static constexpr int kDims = Traits::kValueDim / Traits::kDimWarps;
  static constexpr int kDimTiles = kDims / 8;
  static constexpr float kShift = Scores<Traits, Variant>::kShift;

  float o[kBands][kDimTiles][4];
  float base[kBands][2], sum[kBands][2];  ///< from end() on

  FLASHBSR_DEVICE LatentOutput(uint32_t memory, int32_t thread)
      : memory_(memory), lane_(thread % 32), first_row_(first_row(thread / 32)) {}

  FLASHBSR_DEVICE static int32_t first_row(int32_t warp) {
    return static_cast<uint32_t>(warp) % kRowGroups * (16 * kBands);
  }
  FLASHBSR_DEVICE static int32_t first_dim(int32_t thread) {
    return static_cast<uint32_t>(thread) / (32 * kRowGroups) * kDims;
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
  FLASHBSR_DEVICE void accumulate(uint32_t tile) {
    if (idle_) return;
    using Values = ValueFragments<Traits::kArch, Traits::kHeadDim, Traits::kKv>;
    const Values values(memory_ + Traits::kKeyOffset + tile + first_dim(ptx::thread_index()) * 2,
                        lane_);
#pragma unroll
    for (int j = 0; j < Traits::kBlocks; ++j) {
      uint32_t p[kBands][4];
#pragma unroll
      for (int b = 0; b < kBands; ++b) {
        const uint4 x =
            ptx::load_shared_16(latent_unit<Traits>(memory_, first_row_ / 16 + b, j) + lane_ * 16);
        p[b][0] = x.x, p[b][1] = x.y, p[b][2] = x.z, p[b][3] = x.w;
      }
#pragma unroll
      for (int d = 0; d < kDims; d += Values::kDims) {
        uint32_t v[2][2];
        values.load(v, j * 16, d);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
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

template <class Traits, class Variant>
FLASHBSR_DEVICE void attend_latent(const KernelArgs& args) {
  static_assert(Variant::use_softmax);
  constexpr int kTile = Traits::kKvTile;
  /// Of a merge, in a lane: as many as registers have room for.
  constexpr int kQuads = Traits::kValueDim / 128, kLoads = Traits::kBlocksPerSM == 1 ? 32 : 16;
  extern __shared__ __align__(1024) char memory[];
  const BlockState state(memory, Traits{});
  const uint32_t shared = ptx::shared_address(memory), keys = shared + Traits::kKeyOffset;

  ptx::wait_for_prerequisites<Traits::kArch>();
  const MergeQueue<kMergeSlices> merges(args);
  merges.template begin<Traits::kWarps>(ptx::thread_index());
  KvLoader<Traits> loader(state, ptx::thread_index());
  LatentScores<Traits, Variant> scores(args, state, shared, ptx::thread_index());
  LatentOutput<Traits, Variant> output(shared, ptx::thread_index());

  if (threadIdx.x == 0) claim_task(args, *state.task);
  for (;;) {
    const int32_t thread = ptx::thread_index();  // anew: what is derived from it is not kept
    __syncthreads();
    Task& task = *state.task;
    if (!task.valid) break;
    int32_t first = last_tile<Traits>(task.item);
    const int32_t kv_begin = task.item.kv_begin;
    const bool empty = first < kv_begin;

    begin_item<Traits>(args, state, loader, thread, shared, first, empty);
    if (!empty) loader.visit_latents(task, first, 0, AsyncCopy{keys});
    ptx::cp_async_wait_all();
    __syncthreads();

    scores.begin(task);
    output.begin(task);
    uint32_t slot = 0;  // of notes and of tiles
    for (; first >= kv_begin; first -= kTile, slot ^= 1) {
      if (first - kTile >= kv_begin) {
        loader.visit_latents(task, first - kTile, slot ^ 1,
                             AsyncCopy{keys + (slot ^ 1) * Traits::kTileBytes});
      }
      loader.note(args, task, first - 2 * kTile, slot);
      loader.look_up(args, task, first - 3 * kTile, slot ^ 1);
      const uint32_t tile = slot * Traits::kTileBytes;
      const bool fits = scores.score(first, tile);
      if (__syncthreads_or(!fits)) [[unlikely]] {
        if (scores.owns()) scores.tell_top();
        __syncthreads();
        if (scores.owns()) scores.raise();
        __syncthreads();
        output.rescale();
      }
      if (scores.owns()) scores.add();
      output.accumulate(tile);
      ptx::cp_async_wait_all();
      __syncthreads();  // the next tile is there, and nobody reads this one any more
    }

    if (scores.owns()) scores.end();
    __syncthreads();
    output.end();
    write_rows<Traits, Variant>(args, task, state.rows, output, memory);
    __syncthreads();
    if (task.item.slot >= 0 && ptx::thread_index() < 32) {
      merges.arrive_and_push_slices(task.item.merge, task.item.merge_count, ptx::thread_index());
    }
    __syncthreads();
    next_task(state, ptx::thread_index());
  }
  merges.template drain<true, Traits::kArch, Traits::kWarps, kQuads, kLoads>(ptx::thread_index());
}

}  // namespace flashbsr::sm80
