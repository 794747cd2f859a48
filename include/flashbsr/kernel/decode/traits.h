// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The decode kernel's shapes: what its template parameters mean in threads and bytes. Constants
// only, so that the host's registry reads them too.
#pragma once

#include <flashbsr/core/dtype.h>
#include <flashbsr/core/launch.h>
#include <flashbsr/core/math.h>
#include <flashbsr/core/plan.h>

namespace flashbsr {

/// A work item with what its request adds, as the block keeps it in shared memory.
struct alignas(16) DecodeItem {
  int32_t kv_begin;  ///< KV positions [kv_begin, kv_end)
  int32_t kv_end;
  int32_t kv_table;  ///< Request::kv_begin
  int16_t kv_head;
  int16_t merge_count;
  int32_t row_begin;  ///< packed rows
  int32_t row_count;
  int32_t slot;
  int32_t merge;
  int32_t request;
  int32_t q_begin;  ///< of a shared part ~Request::q_begin: 48 bytes are what there is room for
  int32_t q_len;    ///< as Request::q_len
  int32_t kv_len;

  FLASHBSR_FN bool shared() const { return q_begin < 0; }
  /// Of a request that pads a graph, say: nothing is loaded for it.
  FLASHBSR_FN bool empty() const { return kv_begin >= kv_end; }
};

/// Whose threads decode: all of a block, or a warpgroup beside others that have wide items
/// (sm90a/narrow.h).
enum class DecodeHost { kBlock, kWarpgroup };

/// @tparam arch      instruction set, 80 or 90
/// @tparam head_dim  64, 128, 256 or 512; smaller dims are padded with zeros in shared memory
/// @tparam kv        type of K and V: that of Q, or codes
/// @tparam rows      packed rows of an item, 8 or 16
/// @tparam scaled    K and V have scales of every token and head: logits take K's, weights V's
/// @tparam heads     KV heads of an item, 1 or 2: its rows are those of both. Of packed codes
/// @tparam copies    kBoxes: stages come by TMA, K, V and scales of two heads at once
template <int arch, int head_dim, DType kv, int rows, int stages = 2,
          DecodeHost host = DecodeHost::kBlock, bool scaled = false, int heads = 1,
          KvCopies copies = KvCopies::kRows>
struct DecodeTraits {
  static constexpr int kArch = arch;
  static constexpr int kHeadDim = head_dim;
  static constexpr DType kKv = kv;
  static constexpr int kRows = rows;
  static constexpr int kHeads = heads;
  static constexpr bool kBoxes = copies == KvCopies::kBoxes;

  /// Elements of a byte, which are widened on their way to the tensor cores.
  static constexpr bool kBytes = dtype_size(kv) == 1 && !is_packed(kv);
  /// Two of them in a byte, and scales of groups of them.
  static constexpr bool kPacked = is_packed(kv);
  static constexpr bool kTokenScales = scaled;
  /// K and V of a stage are copied together: fewer instructions, which limit there. Otherwise K's
  /// place is reloaded as soon as K has been multiplied.
  static constexpr bool kTogether = kPacked;
  static_assert(scaled || (kv != DType::kI8 && !kPacked));
  static_assert(heads == 1 || (heads == 2 && kPacked && rows == 8));
  static_assert(!kBoxes || (heads == 2 && head_dim == 128 && arch >= 90));

  /// What the tensor cores multiply with Q: all codes are exact in fp16, and take fewest
  /// instructions to it.
  static constexpr DType kKeyCompute = dtype_size(kv) == 1 ? DType::kF16 : kv;
  /// And with weights. V's scales make these of any size, and so bf16, but NVFP4's codes take them.
  static constexpr DType kCompute = kTokenScales && kv != DType::kE2M1 ? DType::kBF16 : kKeyCompute;

  /// What codes are divided by where they are multiplied (ptx/codes.h).
  static constexpr float kKeyUnit = kv == DType::kE2M1 ? 128.0f : kPacked ? 512.0f : 1.0f;
  static constexpr float kValueUnit = kv == DType::kE2M1            ? 128.0f
                                      : kPacked || kv == DType::kI8 ? 64.0f
                                                                    : 1.0f;

  /// Warps that stream, each with a ring of its own. The rings of 8 fill an SM of 227 KB; the 99 KB
  /// of sm_86 and sm_89 hold half, and rows of 256 take twice the room, of 512 four times.
  static constexpr bool kOwnsBlock = host == DecodeHost::kBlock;
  static constexpr int kWarps = !kOwnsBlock             ? 3
                                : kPacked && arch >= 90 ? 12
                                : rows > 8
                                    ? (arch >= 90 ? 6 : 4)
                                    : (arch >= 90 ? 8 : 4) / max_of(ceil_div(head_dim, 128), 1);
  /// Warps that merge the others' states and write, so that streaming goes on meanwhile. Two for 16
  /// rows: 320 threads may have 204 registers each, 384 only 170.
  static constexpr int kEpilogueWarps = !kOwnsBlock ? 1 : rows > 8 ? 2 : 4;
  static constexpr int kThreads = 32 * (kWarps + kEpilogueWarps);
  static constexpr int kBlocksPerSM = 1;

  /// Rows of a stage, each of a token and a head: 4 KB of K and 4 KB of V, and at least one matrix
  /// tile. Of packed codes 64, whose logits a lane has registers for, or 2 KB before sm_90: with
  /// their scales, the 99 KB of sm_86 hold no more.
  static constexpr int kRowBytes = static_cast<int>(row_bytes(kv, head_dim));
  static constexpr int kStageRows =
      kPacked ? min_of(64, 2048 / kRowBytes) : max_of(16, 4096 / kRowBytes);
  static constexpr int kKvTile = kStageRows / heads;  ///< tokens of a stage
  /// Of a token in a tile: in boxes heads lie side by side, otherwise one behind the other.
  static constexpr int kTokenBytes = kBoxes ? kRowBytes * heads : kRowBytes;
  static constexpr int kStages = stages;
  static constexpr int kStageBytes = 2 * kStageRows * kRowBytes;
  /// Bytes of a scale, and words of those of a row of K or V at most: int4 has one for 32 codes or
  /// more, NVFP4 one for 16. In boxes two words, since a box has 16 bytes of a token at least.
  static constexpr int kScaleSize = kv == DType::kE2M1 ? 1 : 4;
  static constexpr int kScaleWords = kBoxes               ? 2
                                     : kv == DType::kE2M1 ? head_dim / 64
                                     : kPacked            ? head_dim / 32
                                                          : 1;
  /// Those of a warp's stages, and where the next ones of V are.
  static constexpr int kScaleBytes =
      kTokenScales ? kStageRows * (2 * kStages * kScaleWords * 4 + (kTogether ? 0 : 8)) : 0;
  /// Beside a warp's ring: scales, and where rows to copy are, or the barriers of boxes.
  static constexpr int kRowsBytes = kBoxes ? round_up(kScaleBytes + 2 * 32 * 16 + 8 * kStages, 128)
                                           : kStageRows * (16 + 8) + kScaleBytes;

  /// Items that fit in shared memory at once; a longer queue is worked off in turns.
  static constexpr int kItems = arch >= 90 && stages == 2 && kOwnsBlock ? 128 : 32;

  // Named barriers: all threads, the epilogue warps, and all again, when the streaming warps have
  // left their states (they arrive and go on; before they leave the next ones they wait for empty()
  // of DecodeShared). Those below 9 are the Hopper kernels' own, and up to three warpgroups decode.
  static constexpr int kAllBarrier = kOwnsBlock ? 0 : 9;
  static constexpr int kEpilogueBarrier = 1;
  static constexpr int kStatesBarrier = kOwnsBlock ? 2 : 12;

  // Shared memory: [rings][two items ready to multiply][rows to copy][O of every streaming
  // warp][its maxima and sums][items][barriers][barriers of rings that are filled by TMA]
  static constexpr int kReadyOffset = kWarps * kStages * kStageBytes;
  static constexpr int kReadyBytes = 16 * head_dim * (rows / 8) + 12 * rows + 16;
  static constexpr int kRowsOffset = round_up(kReadyOffset + 2 * kReadyBytes, kBoxes ? 128 : 16);
  static constexpr int kStateOffset = kRowsOffset + kWarps * kRowsBytes;
  static constexpr int kSumsOffset = kStateOffset + kWarps * rows * head_dim * 4;
  static constexpr int kItemsOffset = kSumsOffset + kWarps * rows * 8;
  static constexpr int kBarrierOffset =
      kItemsOffset + kItems * static_cast<int>(sizeof(DecodeItem));
  static constexpr int kRingBarrierOffset = kBarrierOffset + 48;
  static constexpr int kRingBarrierBytes = kOwnsBlock ? 0 : 2 * 8 * kStages;  ///< of a warp
  static constexpr int kSmemBytes = kRingBarrierOffset + kWarps * kRingBarrierBytes;
};

}  // namespace flashbsr
