// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The plan: one flat int32 buffer that every backend consumes.
//
//   [PlanHeader][WorkerStart x workers][Request x max][WorkItem x max][queue_indptr][queue_items]
//   [Merge x max][bounds][kv_indices][q_rows][MergePart x max]
//
// Section offsets (in int32 units) are fixed by the capacity, so under a CUDA graph the pointers
// and the grid stay the same while the contents change. Everything here is plain old data.
//
// Words:
//   packed row   query token x group: row r of a request and a KV head is query token r / group and
//                query head kv_head * group + r % group, so one KV head's queries share each KV
//                load.
//   row tile     a run of packed rows of one (request, KV head) that one work item computes.
//   work item    a row tile meets a range of KV positions. Independent of every other item.
//   slot         where an item leaves its partial state (O, LSE): the first of its rows among those
//                of all partial states. Items of tiles that were split have one.
//   merge        the partial states of a run of rows, contracted in order: deterministic.
//   shared part  KV that several requests begin with, as one more request: its rows are theirs, its
//                KV is loaded once for all. Composable formats: the KV matrix is stored in parts
//                with block rows of different heights (FlashInfer, MLSys 2025, section 3.1.2).
#pragma once

#include <flashbsr/config.h>

namespace flashbsr {

inline constexpr int32_t kPlanMagic = 0x52534246;  // "FBSR", little endian
inline constexpr int32_t kPlanVersion = 9;

/// One request, or a shared part: where its query rows and its KV live.
struct Request {
  int32_t q_begin;  ///< first query token, row of q and o; of a shared part, place in q_rows
  /// Query tokens. In a kPlanPlaced plan kv_len less the position of the first of them, which is
  /// what kernels want to know: they find it, here as there, as kv_len - q_len.
  int32_t q_len;
  int32_t kv_begin;  ///< paged: first entry in kv_indices. ragged: first token row of k and v
  int32_t kv_len;    ///< KV tokens
  int32_t mask_lo;   ///< byte offset of its packed custom mask, low and high 32 bits; -1, -1: none.
                     ///< Of a shared part that is together the row of its first query token. Of a
                     ///< request of a kPlanPlaced plan its number of query tokens
  int32_t mask_hi;
  int32_t index;       ///< its own number in the batch, for variants; negative: a shared part
  int32_t mask_begin;  ///< the mask has bits from this KV position on; all before is kept

  FLASHBSR_FN bool shared() const { return index < 0; }
  /// Whether its rows of q follow each other in memory.
  FLASHBSR_FN bool rows_together() const { return index != kScattered; }
  static constexpr int32_t kTogether = -1, kScattered = -2;  ///< `index` of shared parts
  FLASHBSR_FN int64_t mask_offset() const {
    return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(mask_hi)) << 32 |
                                static_cast<uint32_t>(mask_lo));
  }
};

/// One row tile against one KV range. 32 bytes, so a device loads it in two vector loads.
struct WorkItem {
  int32_t request;
  int32_t row_begin;  ///< first packed row within the request
  int32_t row_count;
  int16_t kv_head;
  int16_t merge_count;  ///< of a shared part, or of a request that has one: several
  int32_t kv_begin;     ///< KV positions [kv_begin, kv_end), trimmed by causality and window
  int32_t kv_end;
  int32_t slot;   ///< -1: writes the final output. Otherwise the first row of its partial state
  int32_t merge;  ///< -1, or the first of the merge_count merges this item contributes to
};

/// The contraction of a run of a request's rows: state_count partial states, in order.
struct Merge {
  int32_t request;
  int32_t row_begin;
  int32_t row_count;
  int32_t kv_head;
  int32_t slot;  ///< without parts: state i of row 0 is at slot + i row_count
  int32_t state_count;
  int32_t part;  ///< its first MergePart; -1: none
  int32_t part_count;
};

/// Partial states of a merge that one tile left: state i of the merge's first row is at
/// slot + i stride.
struct MergePart {
  int32_t slot;
  int32_t count;
  int32_t stride;
  int32_t reserved0;
};

/// What a worker needs to begin, in one place: the first item of its queue and that item's request.
/// (Through queue_indptr, queue_items, items and requests it would be four loads, one after
/// another.)
struct WorkerStart {
  WorkItem item;  ///< request -1: the queue is empty
  Request request;
};

enum PlanFlags : int32_t {
  kPlanCausal = 1 << 0,
  kPlanPaged = 1 << 1,
  kPlanCustomMask = 1 << 2,
  kPlanPerHead = 1 << 3,       ///< a request belongs to one KV head, that of its items
  kPlanSlicedMerges = 1 << 4,  ///< warps of all blocks share a merge
  kPlanPlaced = 1 << 5,        ///< requests say where their queries are: Request::q_len
};

/// How the KV ranges were cut.
enum PlanPolicy : int32_t {
  kPolicyAlgorithm1 = 0,  ///< chunks of at most one quota, total / workers
  kPolicyDisabled = 1,    ///< asked for: nothing is split
  kPolicyFixed = 2,       ///< asked for: at multiples of a number of tokens
  kPolicyWhole = 3,       ///< cheapest of several by the cost model: nothing is split
  kPolicyQuota = 4,       ///< cheapest of several: chunks of at most policy_percent of a quota
  kPolicyEven = 5,  ///< cheapest of several: parts of one size, policy_percent / 100 rounds of all
                    ///< workers
  kPolicyTail = 6,  ///< cheapest of several: only the tiles beyond the last full round of all
                    ///< workers are split, into policy_percent / 100 rounds
  kPolicyCluster = 7,  ///< cheapest of several: every tile in cluster_parts parts, whose blocks
                       ///< merge among themselves; items follow each other tile by tile
};

/// 72 words. `num_*` describe the contents, `max_*` the capacity, `off_*` the sections.
struct PlanHeader {
  int32_t magic;
  int32_t version;
  int32_t total_size;  ///< of the whole buffer, in int32
  int32_t flags;       ///< PlanFlags

  int32_t num_requests;
  int32_t num_items;
  int32_t num_workers;  ///< queues
  int32_t num_merges;
  int32_t num_slots;  ///< partial states
  int32_t num_kv_indices;
  int32_t num_q_tokens;  ///< rows of q the run must bring
  int32_t num_kv_rows;   ///< ragged: token rows of k, v the run must bring. paged: highest page + 1

  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t group_size;   ///< num_qo_heads / num_kv_heads
  int32_t page_size;    ///< 1 for ragged
  int32_t window_left;  ///< -1: off
  int32_t tile_rows;    ///< most packed rows that an item may have
  int32_t max_kv_len;
  int32_t kv_chunk;  ///< the chunk bound that the scheduler chose for a full tile, in KV tokens

  int32_t max_requests;
  int32_t max_items;
  int32_t max_merges;
  int32_t max_partial_rows;
  int32_t max_kv_indices;

  int32_t off_requests;
  int32_t off_items;         ///< in claim order: most expensive first
  int32_t off_queue_indptr;  ///< num_workers + 1
  int32_t off_queue_items;   ///< item indices, queue by queue
  int32_t off_merges;
  int32_t off_kv_indices;

  int32_t mean_cost;  ///< of a worker's queue, in units of the cost model, saturated
  int32_t max_cost;   ///< of the most loaded queue

  /// cost(item) = cost_per_item + (kv_end - kv_begin) * (cost_per_kv + cost_per_kv_row *
  /// ceil(row_count / 2^cost_row_shift)), and cost_per_split where it has a slot
  int32_t cost_per_item;
  int32_t cost_per_kv;
  int32_t cost_per_kv_row;
  int32_t max_rows;  ///< most packed rows of any item

  // How the cut was chosen. Prices are in the units of the cost model, saturated; 0: not priced.
  int32_t policy;          ///< PlanPolicy
  int32_t policy_percent;  ///< of kPolicyQuota, kPolicyEven and kPolicyTail
  int32_t cost_per_split;  ///< what a part of a split tile costs beyond its work
  int32_t price;           ///< of the cut that was taken
  int32_t other_price;     ///< least of its alternatives: splits for kPolicyWhole, otherwise whole
  int32_t units_per_us;    ///< units of cost in a microsecond; 0: the model has no scale

  int32_t off_starts;  ///< WorkerStart, one per worker

  int32_t num_shared;        ///< shared parts; they follow the requests
  int32_t num_partial_rows;  ///< of all partial states
  int32_t num_q_rows;
  int32_t num_merge_parts;
  int32_t max_q_rows;
  int32_t max_merge_parts;
  int32_t off_q_rows;  ///< query tokens of the shared parts: rows of q
  int32_t off_merge_parts;

  /// Where pages follow each other and the last one is short: tokens of k and v. 0: it is whole.
  int32_t num_kv_tokens;

  /// Mixed batches: narrow items, [num_wide_items, num_items), are in the queues of workers of
  /// their own, the last num_narrow_workers, several in a block. Otherwise all items are wide.
  int32_t num_wide_items;
  int32_t num_narrow_workers;
  int32_t narrow_rows;           ///< most packed rows of a narrow item; 0: workers are alike
  int32_t narrow_cost_per_item;  ///< as cost_per_item, ..., of narrow items
  int32_t narrow_cost_per_kv;
  int32_t narrow_cost_per_split;
  int32_t num_narrow_blocks;

  int32_t off_bounds;  ///< 0: the lengths are what was planned
  int32_t kv_tile;     ///< parts of split tiles are multiples of it
  /// Query tokens that there are: num_q_tokens, or fewer where a plan of bounds was resolved so.
  int32_t num_q_tokens_now;

  int32_t cluster_parts;  ///< of kPolicyCluster; otherwise 0

  /// Context parallelism: keys here are the share of one of so many ranks. At most 1: all of them.
  int32_t context_size;
  int32_t context_rank;
  int32_t context_interleave;  ///< tokens in a row that one rank has

  int32_t cost_row_shift;  ///< cost_per_kv_row is of 2^cost_row_shift rows
  /// Of a plan of bounds with a shared part: KV tokens that all requests begin with, whatever
  /// their lengths are; their own items begin there.
  int32_t common_prefix;
  /// Of a plan of bounds with RoPE inside attention, whose tables end there: queries come before
  /// this position, and behind its negative. 0: they may be anywhere.
  int32_t end_position;
  /// KV heads that an item reads: 1, or 2 whose query heads are one group in everything here, and
  /// one of num_kv_heads.
  int32_t heads_of_item;
  int32_t reserved;  ///< 0: records begin at multiples of 32 bytes
};

static_assert(sizeof(Request) == 32 && sizeof(WorkItem) == 32 && sizeof(Merge) == 32);
static_assert(sizeof(MergePart) == 16);
static_assert(sizeof(WorkerStart) == 64);
static_assert(sizeof(PlanHeader) == 72 * sizeof(int32_t));

/// Typed access to a plan buffer. Owns nothing.
struct PlanView {
  const int32_t* data;

  FLASHBSR_FN const PlanHeader& header() const {
    return *reinterpret_cast<const PlanHeader*>(data);
  }
  FLASHBSR_FN const WorkerStart* starts() const {
    return reinterpret_cast<const WorkerStart*>(data + header().off_starts);
  }
  FLASHBSR_FN const Request* requests() const {
    return reinterpret_cast<const Request*>(data + header().off_requests);
  }
  FLASHBSR_FN const WorkItem* items() const {
    return reinterpret_cast<const WorkItem*>(data + header().off_items);
  }
  FLASHBSR_FN const Merge* merges() const {
    return reinterpret_cast<const Merge*>(data + header().off_merges);
  }
  FLASHBSR_FN const int32_t* queue_indptr() const { return data + header().off_queue_indptr; }
  FLASHBSR_FN const int32_t* queue_items() const { return data + header().off_queue_items; }
  FLASHBSR_FN const int32_t* kv_indices() const { return data + header().off_kv_indices; }
  FLASHBSR_FN const int32_t* q_rows() const { return data + header().off_q_rows; }
  FLASHBSR_FN const MergePart* merge_parts() const {
    return reinterpret_cast<const MergePart*>(data + header().off_merge_parts);
  }
};

/// KV positions that packed row `row` of a request may see: [begin, end).
struct Span {
  int32_t begin;
  int32_t end;
};

/// Row of q of a request's query token.
FLASHBSR_FN int32_t query_row(const Request& r, int32_t token, const int32_t* q_rows) {
  if (!r.shared()) return r.q_begin + token;
  return r.rows_together() ? r.mask_lo + token : q_rows[r.q_begin + token];
}

/// Position of a request's first query token among its keys, on all ranks. Without kPlanPlaced
/// queries are the last tokens: bottom-right aligned.
FLASHBSR_FN int32_t first_position(const Request& r) { return r.kv_len - r.q_len; }

/// The request with as many query tokens as it has.
FLASHBSR_FN Request counted(const PlanHeader& h, Request r) {
  if (h.flags & kPlanPlaced) r.q_len = r.mask_lo;
  return r;
}

/// How many keys here have positions below `position`: under context parallelism rank r of N has of
/// every N I positions the I from r I on. Below 0, and beyond the last key, as there is no end.
/// Positions are below 2^30 there, and this is of 32 bits: in 64, 22 of Hopper's kernels spilled.
FLASHBSR_FN int32_t keys_before(const PlanHeader& h, int32_t position) {
  if (h.context_size <= 1) return position;
  if (position <= 0) return 0;
  const uint32_t interleave = static_cast<uint32_t>(h.context_interleave);
  const uint32_t block = static_cast<uint32_t>(h.context_size) * interleave;
  const uint32_t p = static_cast<uint32_t>(position), whole = p / block;
  const int32_t rest =
      static_cast<int32_t>(p - whole * block) - h.context_rank * h.context_interleave;
  const int32_t most = h.context_interleave;
  return static_cast<int32_t>(whole * interleave) + (rest < 0 ? 0 : rest > most ? most : rest);
}

/// Position of a request's key `key` here: ((j / I) N + r) I + j mod I.
FLASHBSR_FN int32_t key_position(const PlanHeader& h, int32_t key) {
  if (h.context_size <= 1) return key;
  const int32_t interleave = h.context_interleave, whole = key / interleave;
  return (whole * h.context_size + h.context_rank) * interleave + (key - whole * interleave);
}

/// What a query at `position` sees of kv_len keys that are here. Causality keeps keys up to its own
/// position, the window those >= own - window_left; they follow each other, since positions
/// increase.
FLASHBSR_FN Span visible_keys(const PlanHeader& h, int32_t position, int32_t kv_len) {
  int32_t begin = 0, end = kv_len;
  if (h.flags & kPlanCausal) {
    const int32_t seen = keys_before(h, position + 1);
    if (seen < end) end = seen < 0 ? 0 : seen;
  }
  if (h.window_left >= 0 && position > h.window_left) {
    begin = keys_before(h, position - h.window_left);
    if (begin > end) begin = end;
  }
  return {begin, end};
}
/// Of a shared part every row sees all: plan/share.h.
FLASHBSR_FN Span visible_keys(const PlanHeader& h, const Request& r, int32_t token) {
  return r.shared() ? Span{0, r.kv_len} : visible_keys(h, first_position(r) + token, r.kv_len);
}

}  // namespace flashbsr
