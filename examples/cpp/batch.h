// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What both programs need around the kernels: requests over a paged KV cache, the views of their
// arrays, and plain loops in double precision to compare with.
#pragma once

#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include <flashbsr/core/params.h>
#include <flashbsr/plan/schedule.h>

struct Batch {
  static constexpr int kHeads = 8, kKvHeads = 2, kDim = 64, kPageSize = 16;
  static constexpr int64_t kRow = kKvHeads * kDim;        // a token of K or of V
  static constexpr int64_t kPage = 2 * kPageSize * kRow;  // a page: its K, then its V

  // Request b has query tokens [qo_indptr[b], qo_indptr[b + 1]), the last of its kv_lens[b] tokens,
  // whose pages are kv_indices[kv_indptr[b]], ..., kv_indices[kv_indptr[b + 1] - 1].
  std::vector<int32_t> qo_indptr{0}, kv_lens, kv_indptr{0}, kv_indices;
  std::vector<float> q, cache;
  flashbsr::Layout layout;

  Batch(const std::vector<int32_t>& q_lens, const std::vector<int32_t>& lens) : kv_lens(lens) {
    for (size_t b = 0; b < lens.size(); ++b) {
      qo_indptr.push_back(qo_indptr.back() + q_lens[b]);
      kv_indptr.push_back(kv_indptr.back() + (lens[b] + kPageSize - 1) / kPageSize);
    }
    for (int32_t i = kv_indptr.back(); i-- > 0;) kv_indices.push_back(i);
    // Multiples of 2^-7, which float16 holds exactly: every program has the same numbers.
    std::mt19937 random(0);
    std::normal_distribution<float> normal;
    const auto draw = [&] { return std::round(normal(random) * 128) / 128; };
    q.resize(qo_indptr.back() * kHeads * kDim);
    for (float& x : q) x = draw();
    // Slots that belong to nobody hold NaN, as in any cache that was used before.
    cache.assign(kv_indices.size() * kPage, std::numeric_limits<float>::quiet_NaN());
    for (size_t b = 0; b < lens.size(); ++b) {
      for (int32_t j = 0; j < lens[b]; ++j) {
        const int64_t at = key(b, j);
        for (int64_t i = 0; i < kRow; ++i) {
          cache[at + i] = draw();
          cache[at + kPageSize * kRow + i] = draw();
        }
      }
    }
    const flashbsr::IndexView queries(qo_indptr), lengths(kv_lens);
    flashbsr::paged_layout(layout, &queries, flashbsr::IndexView(kv_indptr),
                           flashbsr::IndexView(kv_indices), /*last_page_len=*/nullptr, &lengths,
                           kPageSize);
  }

  /// Where token j of request b has its keys; its values are kPageSize * kRow further.
  int64_t key(size_t b, int32_t j) const {
    return kv_indices[kv_indptr[b] + j / kPageSize] * kPage + j % kPageSize * kRow;
  }

  static flashbsr::Shape shape() {
    return {.num_qo_heads = kHeads, .num_kv_heads = kKvHeads, .causal = true};
  }

  /// Views for a run. `q_data` and `cache_data` hold copies of q and cache in `type`, `out` has
  /// room for floats as q has. Strides are in elements.
  flashbsr::Params params(void* q_data, void* cache_data, flashbsr::DType type, float* out) const {
    flashbsr::Params p;
    p.q = {.data = q_data,
           .dtype = type,
           .tokens = qo_indptr.back(),
           .heads = kHeads,
           .dim = kDim,
           .stride_token = kHeads * kDim,
           .stride_head = kDim};
    p.out = p.q;
    p.out.data = out;
    p.out.dtype = flashbsr::DType::kF32;
    p.k = {.data = cache_data,
           .dtype = type,
           .pages = static_cast<int64_t>(kv_indices.size()),
           .page_size = kPageSize,
           .heads = kKvHeads,
           .dim = kDim,
           .stride_page = kPage,
           .stride_token = kRow,
           .stride_head = kDim};
    p.v = p.k;
    p.v.data = p.k.row(0, kPageSize, 0);  // behind the page's keys
    p.sm_scale = 1.0f / std::sqrt(static_cast<float>(kDim));
    return p;
  }

  /// Compares with o_i = sum_j weight(x_ij) v_j, divided by the sum of the weights if `normalise`.
  bool check(const char* name, const std::vector<float>& out, double tolerance, bool normalise,
             const std::function<double(double)>& weight) const {
    const double scale = 1.0 / std::sqrt(static_cast<double>(kDim));
    double worst = 0;
    for (size_t b = 0; b < kv_lens.size(); ++b) {
      const int32_t q_len = qo_indptr[b + 1] - qo_indptr[b];
      for (int32_t row = 0; row < q_len * kHeads; ++row) {
        const int32_t position = kv_lens[b] - q_len + row / kHeads, head = row % kHeads;
        const int64_t query = (int64_t{qo_indptr[b]} * kHeads + row) * kDim;
        std::vector<double> o(kDim);
        double sum = 0;
        for (int32_t j = 0; j <= position; ++j) {
          const float* k = cache.data() + key(b, j) + head / (kHeads / kKvHeads) * kDim;
          double x = 0;
          for (int d = 0; d < kDim; ++d) x += double{q[query + d]} * k[d];
          const double w = weight(x * scale);
          sum += w;
          for (int d = 0; d < kDim; ++d) o[d] += w * k[kPageSize * kRow + d];
        }
        for (int d = 0; d < kDim; ++d) {
          const double error = std::fabs(out[query + d] - o[d] / (normalise ? sum : 1.0));
          worst = error <= worst ? worst : error;  // keeps a NaN
        }
      }
    }
    const bool good = worst < tolerance;
    std::printf("%s: largest error %.1e, %s\n", name, worst, good ? "ok" : "WRONG");
    return good;
  }
};
