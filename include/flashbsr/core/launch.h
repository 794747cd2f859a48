// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What a CUDA kernel gets: the run's parameters, and where the plan lies in device memory. Under a
// CUDA graph everything here stays the same from replay to replay; what plan() changes is behind
// the pointers.
#pragma once

#include <flashbsr/core/params.h>

namespace flashbsr {

/// Division of non-negative 31-bit integers by a number known at launch: one multiplication
/// (Granlund & Montgomery, PLDI 1994).
struct FastDiv {
  uint32_t divisor = 1;
  uint32_t multiplier = 0;
  uint32_t shift = 0;

  FastDiv() = default;
  FLASHBSR_FN explicit FastDiv(uint32_t d) : divisor(d) {
    uint32_t bits = 0;
    while ((uint64_t{1} << bits) < d) ++bits;
    if (bits == 0) return;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + bits)) + d - 1) / d);
    shift = bits - 1;
  }

  FLASHBSR_FN int32_t quotient(int32_t n) const {
    if (divisor == 1) return n;
    const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(n)) * multiplier;
    return static_cast<int32_t>(static_cast<uint32_t>(product >> 32) >> shift);
  }
  FLASHBSR_FN int32_t remainder(int32_t n, int32_t q) const {
    return n - q * static_cast<int32_t>(divisor);
  }
};

/// key_position() of core/plan.h without a division, for kernels that ask for every logit.
struct KeyShare {
  FastDiv interleave;
  int32_t size = 1;
  int32_t rank = 0;

  /// All keys are here, and each is its position.
  FLASHBSR_FN bool whole() const { return size <= 1; }
  FLASHBSR_FN int32_t position(int32_t key) const {
    if (whole()) return key;
    const int32_t block = interleave.quotient(key);
    return (block * size + rank) * static_cast<int32_t>(interleave.divisor) +
           interleave.remainder(key, block);
  }
};

/// How a kernel overlaps the one before it in the stream (sm_90 and later).
enum class Overlap : int32_t {
  kNone = 0,      ///< starts when the kernel before has finished
  kPrologue = 1,  ///< reads the plan before it has finished: safe, plans are written by copies
  kKv = 2,        ///< reads K and V too: the caller promises that they are not being written
  kLaunch = 3,    ///< is there, and reads nothing: the kernel before it writes the plan
};

/// Words behind the arrival counters, for kernels whose idle warps merge (kernel/merge_queue.h).
enum class MergeQueueWord : int32_t {
  kBegun = 0,     ///< blocks that run
  kFinished = 1,  ///< warps that have left
  kPlaced = 2,    ///< merges that have a place in the list
  kTaken = 3,     ///< tickets: places that somebody looks at
  kList = 4,      ///< a word for every merge
};

FLASHBSR_FN int64_t num_arrival_counters(const PlanHeader& h) {
  return 1 + static_cast<int64_t>(h.max_merges);
}

/// Warps that share a merge, where several do (kPlanSlicedMerges).
inline constexpr int kMergeSlices = 32;

/// Words of KernelArgs::counters.
FLASHBSR_FN int64_t num_counters(const PlanHeader& h) {
  const int64_t arrivals = num_arrival_counters(h);
  const bool sliced = h.flags & kPlanSlicedMerges;
  if (h.num_narrow_workers == 0 && !sliced) return arrivals;
  return arrivals + static_cast<int64_t>(MergeQueueWord::kList) +
         static_cast<int64_t>(h.max_merges) * (sliced ? kMergeSlices : 1);
}

struct KernelArgs {
  // The plan's sections, in device memory.
  const PlanHeader* header = nullptr;
  const WorkerStart* starts = nullptr;
  const Request* requests = nullptr;
  const WorkItem* items = nullptr;
  const int32_t* queue_indptr = nullptr;
  const int32_t* queue_items = nullptr;
  const Merge* merges = nullptr;
  const int32_t* kv_indices = nullptr;  ///< null: ragged, the page of a token is its row
  const int32_t* q_rows = nullptr;      ///< query tokens of shared parts
  const MergePart* merge_parts = nullptr;

  /// num_counters() words: [0]: items claimed; [1 + m]: states of merge m that have arrived; for
  /// mixed batches then MergeQueueWord. Zero before a kernel and after it.
  int32_t* counters = nullptr;

  FastDiv group;      ///< query heads of a KV head
  FastDiv page_size;  ///< tokens of a page
  KeyShare share;     ///< which keys are here, under context parallelism
  Overlap overlap = Overlap::kNone;

  Params params;  ///< last, since it ends with what most kernels do not read
};

/// What the driver makes of an array for the copy engine of sm_90 (cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
  uint64_t words[16] = {};
};

/// How K and V come to shared memory on sm_90a.
enum class KvPath : int32_t {
  kRagged = 0,  ///< by TMA, a box per tile
  kPaged = 1,   ///< by TMA, boxes of a page or part of one
  kGather = 2,  ///< by cp.async, row by row: where boxes would be of few tokens
};

/// From a row of K or V to the next one of its head, in pages and in tokens of a page: in
/// HopperArgs::gather_unit bytes, so that a row's place is a 32-bit number.
struct GatherSteps {
  int32_t page = 0;
  int32_t token = 0;
};

/// Which of them a kernel of the Hopper family has code for.
enum class KvCopies : int32_t {
  kEither,  ///< all
  kBoxes,   ///< TMA
  kRows,    ///< the gather, which takes any K and V
};

/// What a kernel of the Hopper family gets.
struct HopperArgs {
  KernelArgs base;
  TensorMap q;        ///< (dim, head of the group, token, KV head); a box: all tokens of a tile
  TensorMap q_token;  ///< the same; a box: one token. Where requests share KV
  TensorMap k;        ///< (dim, token of the page, KV head, page); ragged: one page
  TensorMap v;
  TensorMap out;  ///< as q; boxes of 16 rows
  KvPath path = KvPath::kGather;
  int32_t box_tokens = 1;   ///< KV tokens of a box; tiles of kPaged begin at multiples of it
  int32_t query_bytes = 0;  ///< of an item's Q: as many whole tokens as a tile has room for
  int32_t query_tokens = 0;
  bool store_boxes = false;  ///< O goes out by TMA where 16 rows exist
  GatherSteps key_steps, value_steps;
  int32_t gather_unit = 16;  ///< bytes, a power of two
  int32_t cluster = 1;       ///< blocks that merge among themselves: PlanHeader::cluster_parts
};

/// What decode of two KV heads of packed codes gets, whose stages come by TMA. A token's heads
/// follow each other in memory, and boxes are two of them by 16 tokens.
struct PairArgs {
  KernelArgs base;
  TensorMap k, v;      ///< (byte of a token's heads, token of the page, page); ragged: one page
  TensorMap k_scales;  ///< the same
  TensorMap v_scales;
};

/// `header` is the host's copy of the plan at `plan` in device memory.
FLASHBSR_FN KernelArgs kernel_args(const Params& params, const PlanHeader& header,
                                   const int32_t* plan, int32_t* counters) {
  KernelArgs a;
  a.params = params;
  a.header = reinterpret_cast<const PlanHeader*>(plan);
  a.starts = reinterpret_cast<const WorkerStart*>(plan + header.off_starts);
  a.requests = reinterpret_cast<const Request*>(plan + header.off_requests);
  a.items = reinterpret_cast<const WorkItem*>(plan + header.off_items);
  a.queue_indptr = plan + header.off_queue_indptr;
  a.queue_items = plan + header.off_queue_items;
  a.merges = reinterpret_cast<const Merge*>(plan + header.off_merges);
  if (header.flags & kPlanPaged) a.kv_indices = plan + header.off_kv_indices;
  a.q_rows = plan + header.off_q_rows;
  a.merge_parts = reinterpret_cast<const MergePart*>(plan + header.off_merge_parts);
  a.counters = counters;
  a.group = FastDiv(static_cast<uint32_t>(header.group_size));
  a.page_size = FastDiv(static_cast<uint32_t>(header.page_size));
  if (header.context_size > 1) {
    a.share = {FastDiv(static_cast<uint32_t>(header.context_interleave)), header.context_size,
               header.context_rank};
  }
  return a;
}

}  // namespace flashbsr
