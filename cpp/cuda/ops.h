// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Launches of the kernels around attention. The views in the arguments are checked; here follow
// units, items and grids. Asynchronous, without allocation: every call can be captured in a CUDA
// graph, except for download().
#pragma once

#include <vector>

#include <flashbsr/kernel/ops/args.h>

namespace flashbsr::cuda {

/// Where a kernel runs.
struct Queue {
  int device = 0;
  void* stream = nullptr;
};

void append_paged_kv(ops::AppendArgs args, int64_t tokens, const Queue& queue);
/// To codes with scales of every token and head.
void append_paged_kv_quantize(ops::QuantizeArgs args, int64_t tokens, const Queue& queue);

/// Keys by RoPE before they are quantised.
void rope_append_quantize(ops::RopeQuantizeArgs args, int64_t tokens, const Queue& queue);

/// All slots of a cache.
void dequantize_kv(ops::DequantizeArgs args, const Queue& queue);
void rope(ops::RopeArgs args, int64_t tokens, const Queue& queue);
void hadamard(ops::HadamardArgs args, const Queue& queue);
/// The states a and b; or, with `stacked`, those along a dimension of a.
void merge(ops::MergeArgs args, bool stacked, int64_t tokens, const Queue& queue);
/// One rank's part of a merge of several. `args.merge.rows` is set.
void merge_peers(ops::PeerMergeArgs args, const Queue& queue);
/// With indptr, segment by segment: out_indptr is written first.
void packbits(const ops::PackArgs& args, int32_t* out_indptr, const Queue& queue);
void get_batch_indices_positions(const ops::BatchIndicesArgs& args, const Queue& queue);
void get_seq_lens(const ops::SeqLensArgs& args, const Queue& queue);

/// Values of an index array, after the work that is on the stream. Waits.
std::vector<int64_t> download(const Indices& indices, const Queue& queue);

/// The blocks of an operation.
struct OpGrid {
  int64_t blocks = 0;  ///< one for every part of the work
  /// At most so many for each SM, which go on to further parts; 0: all. Many short blocks cost more
  /// than blocks that go on: 0.94 of the copy rate in place of 0.88 for two states, on an H200.
  int blocks_per_sm = 32;
  int threads = ops::kThreads;
  bool overlap = false;  ///< Launch::overlap
  const char* kv = "-";  ///< types, of a family with a kernel for each
};

/// Launches the kernel of a family. `args` is its parameter.
void launch_op(const char* family, const Queue& queue, const OpGrid& grid, const void* args);

template <class Args>
void launch_op(const char* family, const Queue& queue, const OpGrid& grid, const Args& args) {
  if (grid.blocks > 0) launch_op(family, queue, grid, static_cast<const void*>(&args));
}

}  // namespace flashbsr::cuda
