// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What the kernels around attention get: append to a paged cache, rotary embedding, Hadamard
// transform, merge of states, bit packing, index arithmetic, the page check. Plain data that host
// and device compilers read.
//
// Index arrays stay on the device, so the host does not see their values. A kernel skips what they
// name outside of the caller's arrays, and writes nothing there.
#pragma once

#include <flashbsr/core/launch.h>
#include <flashbsr/core/lengths.h>
#include <flashbsr/core/math.h>
#include <flashbsr/core/view.h>

namespace flashbsr::ops {

/// Threads of a block, of every kernel here but `segment_indptr`.
inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
/// Blocks that an SM shall hold at least: a bound on registers.
inline constexpr int kCopyBlocks = 4;
inline constexpr int kMergeBlocks = 4;  ///< of two states
/// Of any number of states: what fits the registers without spills.
template <int kArch>
inline constexpr int kMergeManyBlocks = kArch >= 90 ? 3 : 2;
/// Of those of several GPUs, and as many run at once: they wait for each other.
inline constexpr int kPeerBlocks = 2;
inline constexpr int kConvertBlocks = 3;
inline constexpr int kQuantizeBlocks = 4;
inline constexpr int kRopeBlocks = 2;
/// Units that a lane of a merge has in flight, of each of up to four states.
inline constexpr int kMergeUnits = 2;
/// Items of one launch: what FastDiv divides. The host cuts larger inputs.
inline constexpr int64_t kMaxItems = int64_t{1} << 30;

/// Where the rows of an append go: token t to slot mapping[t], or, where that is not given, to
/// position positions[t] of request batch_indices[t].
struct Slots {
  Indices mapping{};      ///< page x page_size + token within the page; -1: nowhere
  Indices batch_indices;  ///< -1: padding
  Indices positions{};
  Indices kv_indices;
  Indices kv_indptr;
  FastDiv page_size{};
  int64_t pages = 0;  ///< of the cache
};

/// Elements of a converted unit.
inline constexpr int kUnit = 8;
/// Units that a lane has in flight: an item is 32 times as many.
inline constexpr int kUnitsInFlight = 4;
/// Elements that a lane quantises at once, and most tokens of which it does so one after another.
inline constexpr int kRun = 16;
inline constexpr int kMaxSpan = 16;

/// K or V of an append.
struct AppendRows {
  RaggedView in;
  PagedView cache;
  float inverse_scale = 1.0f;
  int32_t copy_bytes =
      0;                ///< of a unit, a power of two up to 16, where rows are copied bit for bit
  int32_t unit = 1;     ///< elements of a unit; where rows are converted, kUnit or 1
  int32_t units = 0;    ///< of a token: heads x dim / unit
  FastDiv parts{};      ///< items of a token
  FastDiv row_units{};  ///< units of a head: dim / unit
  /// Where every 32nd unit is equally far from the one before, in bytes: heads follow one another,
  /// or a head is a part of a warp's units. Saves the address arithmetic of each.
  bool linear = false;
  int64_t in_step = 0;
  int64_t cache_step = 0;
};

struct AppendArgs {
  AppendRows k, v;
  Slots slots;
  int64_t first_token = 0;  ///< of this launch
  int32_t tokens = 0;
};

/// K or V of an append that quantises.
struct QuantizeRows {
  RaggedView in;
  PagedView cache;   ///< codes
  PagedView scales;  ///< of every token and head; dim: groups of a row
  float inverse_scale = 1.0f;
  bool aligned = false;  ///< rows of `in` to 8 bytes
  // Where lanes take runs of kRun elements (quantize_runs.h).
  int32_t runs = 0;        ///< of a token; 0: a warp takes a head
  int32_t group_log2 = 0;  ///< of a scale's runs
  FastDiv parts{};         ///< items of a token
  FastDiv head_runs{};     ///< runs of a head
};

struct QuantizeArgs {
  QuantizeRows k, v;  ///< of as many heads
  Slots slots;
  FastDiv heads{};
  int32_t span = 1;         ///< tokens of an item, where lanes take runs
  int32_t spans = 0;        ///< of this launch
  int64_t first_token = 0;  ///< of this launch
  int32_t tokens = 0;
};

/// A cache of codes that is read back.
struct DequantizeArgs {
  PagedView cache;
  PagedView scales;     ///< of every token and head; dim: groups of a row
  PagedView out;        ///< floats
  float number = 1.0f;  ///< on all of them
  FastDiv heads{};
  int64_t first_token = 0;  ///< slots of this launch
  int32_t tokens = 0;
};

/// Elements of a row that a warp's part of shared memory holds.
inline constexpr int kMaxHadamardDim = 512;

/// Rows, each times a Hadamard matrix: the product of one of `order` rows and Sylvester's.
struct HadamardArgs {
  RaggedView in, out;
  float scale = 1.0f;       ///< of the matrix
  int32_t order = 1;        ///< 1, 12 or 20
  int32_t lanes_log2 = -1;  ///< of a row in registers; -1: rows go through shared memory
  FastDiv heads{};
  int64_t first_token = 0;
  int32_t rows = 0;  ///< tokens x heads of this launch
};

/// A Hadamard matrix that heads are multiplied by behind their rotation.
struct HadamardMatrix {
  float scale = 1.0f;
  int32_t order = 0;  ///< 1, 12 or 20; 0: none
};

/// Angles of a rotary embedding: of a table, or computed.
struct Rotation {
  static constexpr int kMaxPairs = 256;

  int32_t rotary_dim = 0;
  bool interleave = false;
  const float* cos_sin = nullptr;  ///< [max_position][cosines, then sines] or null
  int64_t cos_sin_stride = 0;
  int64_t max_position = 0;
  /// Turns of pair i per position, as a fraction of 2^64. position x turns, which wraps, is the
  /// angle exactly: no range reduction, and no loss at large positions.
  uint64_t turns[kMaxPairs] = {};
};

/// An append that quantises, with keys by RoPE.
struct RopeQuantizeArgs {
  QuantizeArgs append;
  Indices positions{};  ///< one per token
  Rotation rotation;
  HadamardMatrix matrix{};
};

/// Rows of one array that are rotated, converted or copied: q, k or v.
struct RopeRows {
  RaggedView in;
  RaggedView out{};  ///< where no cache is written
  float inverse_scale = 1.0f;
  int32_t parts = 0;     ///< items of a token
  FastDiv row_units{};   ///< units of a row
  FastDiv tail_units{};  ///< of its part behind rotary_dim
};

/// Rotates q and k; with a cache k, and v as it is, go there.
struct RopeArgs {
  RopeRows q, k, v;
  PagedView k_cache, v_cache;
  bool append = false;
  Slots slots;
  /// A position per token; or, where null, the tokens of request r run on from offsets[r].
  Indices positions{};
  Indices indptr{};
  Indices offsets{};
  Rotation rotation;
  HadamardMatrix matrix{};
  int64_t first_token = 0;
  int32_t tokens = 0;
  int32_t unit = 1;        ///< elements of a unit, kUnit or 1
  int32_t item_heads = 1;  ///< heads of an item
  FastDiv parts{};         ///< items of a token, of q, k and v
};

struct StateView {
  RaggedView v;
  const float* s = nullptr;  ///< [tokens, heads], natural or base 2
  int64_t s_stride_token = 0;
  int64_t s_stride_head = 1;
};

struct MergeArgs {
  StateView a;        ///< merge_state: the first. merge_states: state 0
  StateView b;        ///< merge_state only
  int32_t count = 2;  ///< states
  int64_t v_stride_state = 0;
  int64_t v_step = 0;  ///< the same in bytes
  int64_t s_stride_state = 0;
  StateView out;
  float* s_out = nullptr;         ///< [tokens, heads]; may be the s of an input
  const uint8_t* mask = nullptr;  ///< [tokens] or null: rows with 0 stay as they are
  float unit = 1.0f;              ///< ln 2 for natural LSEs, 1 for base 2
  float per_unit = 1.0f;          ///< its inverse
  bool aligned = false;           ///< every row is a run of whole 16-byte units
  int32_t group_log2 = 0;         ///< lanes of a row
  int64_t first_token = 0;
  int32_t rows = 0;  ///< tokens x heads of this launch
  FastDiv heads{};
};

/// GPUs that merge through each other's memory at most: their addresses are kernel parameters.
inline constexpr int kMaxPeers = 16;
/// A word of an inbox to which nothing has come. As a float it is a NaN, which is sent as another.
inline constexpr uint32_t kNothing = 0xffffffffu;
inline constexpr uint32_t kSentNan = 0x7fff7fffu;  ///< a NaN in all types of partial results

/// What a rank keeps on its device from one merge to the next.
struct PeerControl {
  uint32_t merges = 0;   ///< that have begun; its lowest bit chooses the half of every inbox
  uint32_t broken = 0;   ///< not 0: a peer was missed. Nothing is sent or waited for any more
  uint32_t arrived = 0;  ///< blocks of this merge
  uint32_t padding = 0;
};

/// A partial result of each rank, merged by all of them (kernel/ops/peers.h).
///
/// An inbox is [2 halves][ranks] of `source_bytes`: rows of what travels from that rank, then, from
/// `lse_offset` on, an LSE of each.
struct PeerMergeArgs {
  /// a: this rank's, all heads. out: what it gets, all heads or its own. count: ranks. rows: of
  /// out, which inboxes have room for.
  MergeArgs merge;
  char* inbox[kMaxPeers] = {};  ///< of every rank, as this device addresses them
  int64_t source_bytes = 0;
  int64_t lse_offset = 0;
  PeerControl* control = nullptr;
  /// In memory of the host: 1 + a rank that was missed.
  uint32_t* missed = nullptr;
  uint64_t timeout_ns = 0;
  /// Between two looks at what has not come, where many lanes look.
  uint32_t pause_ns = 0;
  int32_t rank = 0;
  int32_t head_step = 0;  ///< heads of a rank, where each gets its own only; else 0
  DType travel = DType::kF32;
};

struct PackArgs {
  const uint8_t* x = nullptr;
  int64_t size = 0;
  int64_t stride = 1;  ///< of x
  uint8_t* out = nullptr;
  bool little = false;
  /// Of segment_packbits: [segments + 1], checked to ascend by the host. Null: one segment.
  Indices indptr{};
  const int32_t* out_indptr = nullptr;
};

/// out_indptr[i + 1] = out_indptr[i] + ceil((indptr[i + 1] - indptr[i]) / 8), in one block.
inline constexpr int kScanThreads = 1024;
struct SegmentIndptrArgs {
  Indices indptr{};
  int32_t* out_indptr = nullptr;
};

struct BatchIndicesArgs {
  Indices append_indptr;
  Indices seq_lens;
  int64_t nnz = 0;
  int32_t* batch_indices = nullptr;
  int32_t* positions = nullptr;
};

struct SeqLensArgs {
  Indices kv_indptr;
  Indices last_page_len;
  int32_t page_size = 1;
  int32_t* seq_lens = nullptr;
};

/// Validates the page ids of a plan in device memory.
struct CheckPagesArgs {
  const PlanHeader* header = nullptr;
  const int32_t* kv_indices = nullptr;
  int64_t pages = 0;  ///< of the smaller cache
  /// Lowered to (index << 32 | id) of the first bad id. `kNoBadPage` before.
  uint64_t* first_bad = nullptr;
};
inline constexpr uint64_t kNoBadPage = ~uint64_t{0};

/// A plan of bounds in device memory meets the lengths (core/resolve.h).
struct ResolveArgs {
  int32_t* plan = nullptr;
  Lengths lengths;
};

/// NVFP4 as 16 bits, before attention over these: K or V of a plan.
struct DequantizeRows {
  PagedView codes;
  PagedView scales;
  PagedView out;        ///< its page i is the plan's i-th; ragged: its row is the row of the codes
  PagedView a{}, b{};   ///< of K that stay codes: factors of logits, float32, pages as `out` has
  int32_t units = 0;    ///< of a token: heads x dim / (2 kCodePiece)
  FastDiv row_units{};  ///< of a head
  FastDiv group_pieces{};  ///< of a scale
  int32_t lanes_log2 = 0;  ///< threads that have a token's units
};
/// Elements that a thread writes at once, 16 bytes, beside those of its neighbours: with 32 bytes
/// each, a store would write the halves of twice as many sectors. A unit is two of them, in the
/// halves of a row.
inline constexpr int kCodePiece = 8;
/// Tokens of which a thread has a unit at once, of K and of V.
inline constexpr int kTokensInFlight = 2;
/// A request whose codes are widened, and where its pages come to lie.
struct DenseRequest {
  int32_t index;
  int32_t first_page;
};
/// So many may be named one by one.
inline constexpr int kDenseRequests = 64;
struct DequantizePagesArgs {
  const Request* requests = nullptr;
  const int32_t* kv_indices = nullptr;  ///< null: ragged
  int32_t* page_ids = nullptr;          ///< of the pages that are written
  FastDiv page_size{};
  int32_t tokens_log2 = 0;   ///< of a request, that a block takes at once
  int32_t parts = 0;         ///< of so many tokens, of the longest request
  int32_t num_requests = 0;  ///< all of the plan, or those of `some`
  bool named = false;
  DenseRequest some[kDenseRequests];
  DequantizeRows k, v;
};

/// Rows of the outputs behind the last query token that there is become 0 and -inf.
struct ClearRowsArgs {
  const PlanHeader* header = nullptr;
  RaggedView out;  ///< rows of whole 8 bytes, and aligned to them
  float* lse = nullptr;
  int64_t lse_stride_token = 0;
  int64_t lse_stride_head = 0;
};

/// Outputs become codes of NVFP4. Rows of whole 16 elements.
struct QuantizeOutputsArgs {
  const PlanHeader* header = nullptr;  ///< says how many tokens there are
  RaggedView in;                       ///< float32, contiguous
  RaggedView codes;                    ///< aligned to 8 bytes
  RaggedView scales;                   ///< e4m3
};

}  // namespace flashbsr::ops
