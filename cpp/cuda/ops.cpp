// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "ops.h"

#include <flashbsr/kernel/ops/prepare.h>

namespace flashbsr::cuda {

using namespace ops;

namespace {

/// Runs `launch` over the tokens, as many at once as 31-bit items allow.
template <class Args, class Launch>
void cut(Args& args, int64_t tokens, int64_t items_per_token, const Launch& launch) {
  const int64_t most = max_of<int64_t>(kMaxItems / max_of<int64_t>(items_per_token, 1), 1);
  for (args.first_token = 0; args.first_token < tokens; args.first_token += most) {
    launch(min_of(tokens - args.first_token, most));
  }
}

/// Of one launch. Returns in how many spans they are.
int64_t take_tokens(QuantizeArgs& args, int64_t count) {
  args.tokens = static_cast<int32_t>(count);
  args.spans = ceil_div(args.tokens, args.span);
  return args.spans;
}

}  // namespace

void append_paged_kv(AppendArgs args, int64_t tokens, const Queue& queue) {
  const bool copy = prepare(args);
  const char* family = copy ? "append_paged_kv" : "append_paged_kv_convert";
  const int64_t items = items_per_token(args);
  cut(args, tokens, items, [&](int64_t count) {
    args.tokens = static_cast<int32_t>(count);
    OpGrid grid{.blocks = blocks_for(count * items)};
    // Plain copies: 0.92 of the copy rate in place of 0.91 (16 x 8192 tokens), and launched early
    // 0.88 in place of 0.86 (16 x 1024).
    if (copy) grid = {.blocks = grid.blocks, .blocks_per_sm = 0, .overlap = true};
    launch_op(family, queue, grid, args);
  });
}

void append_paged_kv_quantize(QuantizeArgs args, int64_t tokens, const Queue& queue) {
  const int64_t items = prepare(args, nullptr, tokens);
  cut(args, tokens, items, [&](int64_t count) {
    const uint32_t blocks = blocks_for(take_tokens(args, count) * items);
    launch_op("append_paged_kv_quantize", queue, {.blocks = blocks}, args);
  });
}

void rope_append_quantize(RopeQuantizeArgs args, int64_t tokens, const Queue& queue) {
  int64_t items = prepare(args.append, &args.rotation, tokens);
  if (args.matrix.order > 1) args.append.k.runs = 0;
  if (args.matrix.order && (args.append.k.runs == 0 || args.append.v.runs == 0)) {
    items = 2 * int64_t{args.append.k.in.heads};  // a warp takes a head
    args.append.span = 1;
  }
  cut(args.append, tokens, items, [&](int64_t count) {
    const uint32_t blocks = blocks_for(take_tokens(args.append, count) * items);
    const char* family = args.matrix.order ? "rope_hadamard_quantize" : "rope_append_quantize";
    launch_op(family, queue, {.blocks = blocks}, args);
  });
}

void dequantize_kv(DequantizeArgs args, const Queue& queue) {
  const int64_t heads = args.cache.heads;
  args.heads = FastDiv(static_cast<uint32_t>(max_of<int64_t>(heads, 1)));
  cut(args, args.cache.pages * args.cache.page_size, heads, [&](int64_t count) {
    args.tokens = static_cast<int32_t>(count);
    launch_op("dequantize_kv", queue, {.blocks = blocks_for(count * heads)}, args);
  });
}

void rope(RopeArgs args, int64_t tokens, const Queue& queue) {
  prepare(args, tokens);
  const int64_t items = args.q.parts + args.k.parts + args.v.parts;
  cut(args, tokens, items, [&](int64_t count) {
    args.tokens = static_cast<int32_t>(count);
    const char* family = args.matrix.order ? "rope_hadamard" : "rope";
    launch_op(family, queue, {.blocks = blocks_for(count * items)}, args);
  });
}

void hadamard(HadamardArgs args, const Queue& queue) {
  prepare(args);
  const int64_t heads = args.in.heads;
  cut(args, args.in.tokens, heads, [&](int64_t count) {
    args.rows = static_cast<int32_t>(count * heads);
    const int64_t warps = ceil_div<int64_t>(args.rows, rows_of_warp(args));
    launch_op("hadamard", queue, {.blocks = blocks_for(warps)}, args);
  });
}

void merge(MergeArgs args, bool stacked, int64_t tokens, const Queue& queue) {
  prepare(args, stacked);
  const int64_t heads = args.out.v.heads;
  cut(args, tokens, heads, [&](int64_t count) {
    args.rows = static_cast<int32_t>(count * heads);
    launch_op(stacked ? "merge_states" : "merge_state", queue, {.blocks = blocks_for(args)}, args);
  });
}

void merge_peers(PeerMergeArgs args, const Queue& queue) {
  prepare(args);
  const DType out = args.merge.out.v.dtype;
  const char* const kv = out == DType::kBF16           ? "bf16"
                         : out == DType::kF16          ? "f16"
                         : args.travel == DType::kBF16 ? "f32xbf16"
                         : args.travel == DType::kF16  ? "f32xf16"
                                                       : "f32";
  launch_op("merge_peers", queue,
            {.blocks = blocks_for(args.merge),
             .blocks_per_sm = kPeerBlocks,  // they wait for other GPUs' blocks: all must run
             .overlap = true,               // and send as soon as attention ends
             .kv = kv},
            args);
}

void packbits(const PackArgs& args, int32_t* out_indptr, const Queue& queue) {
  if (!out_indptr) {
    const int64_t blocks = args.size ? blocks_for_threads(ceil_div<int64_t>(args.size, 8)) : 0;
    launch_op("packbits", queue, {.blocks = blocks}, args);
    return;
  }
  launch_op("segment_indptr", queue, {.blocks = 1, .threads = kScanThreads},
            SegmentIndptrArgs{args.indptr, out_indptr});
  // A block per segment, as far as that fills a device.
  const int64_t blocks = min_of<int64_t>(args.indptr.size - 1, 4096);
  launch_op("segment_packbits", queue, {.blocks = blocks}, args);
}

void get_batch_indices_positions(const BatchIndicesArgs& args, const Queue& queue) {
  const int64_t blocks = args.nnz ? blocks_for_threads(args.nnz) : 0;
  launch_op("get_batch_indices_positions", queue, {.blocks = blocks}, args);
}

void get_seq_lens(const SeqLensArgs& args, const Queue& queue) {
  const int64_t requests = args.last_page_len.size;
  const int64_t blocks = requests ? blocks_for_threads(requests) : 0;
  launch_op("get_seq_lens", queue, {.blocks = blocks}, args);
}

}  // namespace flashbsr::cuda
