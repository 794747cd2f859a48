// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Attention over a paged KV cache with nothing but flashbsr's headers: a mixed batch (prefill,
// chunked prefill, decode), then the same batch with a variant of our own. Checked against plain
// loops.
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include <flashbsr/cpu/engine.h>
#include <flashbsr/cpu/kernels.h>
#include <flashbsr/plan/schedule.h>

namespace {

constexpr int kHeads = 8, kKvHeads = 2, kDim = 64, kPageSize = 16;
constexpr int64_t kRow = kKvHeads * kDim;        // a token of K or V
constexpr int64_t kPage = 2 * kPageSize * kRow;  // K and V of a page, stacked
const float kScale = 1.0f / std::sqrt(static_cast<float>(kDim));

// Query tokens and KV tokens of three requests; causal, so queries are the last of their sequence.
const std::vector<int32_t> kQoIndptr = {0, 40, 48, 49};
const std::vector<int32_t> kKvLens = {40, 500, 1999};

// A variant is a struct: here logits are pulled towards recent keys.
struct Recency : flashbsr::VariantBase {
  explicit Recency(const flashbsr::Params&) {}
  bool transforms_logits() const { return true; }
  template <class M>
  FLASHBSR_FN typename M::Float logits_transform(typename M::Float x,
                                                 const flashbsr::LogitsAt<M>& at) const {
    return x + 0.01f * M::to_float(at.kv_position - at.q_position);
  }
};

struct Data {
  std::vector<float> q, cache;
  std::vector<int32_t> kv_indptr{0}, pages;
  flashbsr::Layout layout;
};

Data make_data() {
  Data data;
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  for (int32_t len : kKvLens) {
    data.kv_indptr.push_back(data.kv_indptr.back() + (len + kPageSize - 1) / kPageSize);
  }
  for (int32_t i = data.kv_indptr.back(); i-- > 0;) data.pages.push_back(i);
  data.q.resize(kQoIndptr.back() * kHeads * kDim);
  for (float& x : data.q) x = normal(random);
  // Slots that belong to nobody hold NaN, as in any cache that was used before.
  data.cache.assign(data.pages.size() * kPage, std::numeric_limits<float>::quiet_NaN());
  for (size_t b = 0; b < kKvLens.size(); ++b) {
    for (int32_t j = 0; j < kKvLens[b]; ++j) {
      const int64_t page = data.pages[data.kv_indptr[b] + j / kPageSize];
      float* slot = data.cache.data() + page * kPage + (j % kPageSize) * kRow;
      for (int64_t i = 0; i < kRow; ++i) {
        slot[i] = normal(random);
        slot[kPageSize * kRow + i] = normal(random);
      }
    }
  }
  const flashbsr::IndexView qo(kQoIndptr), lens(kKvLens);
  flashbsr::paged_layout(data.layout, &qo, flashbsr::IndexView(data.kv_indptr),
                         flashbsr::IndexView(data.pages), nullptr, &lens, kPageSize);
  return data;
}

std::vector<float> attention(Data& data, const flashbsr::cpu::KernelTable& kernels) {
  flashbsr::Planner planner;
  const flashbsr::PlanView plan =
      planner.plan(data.layout, {.num_qo_heads = kHeads, .num_kv_heads = kKvHeads, .causal = true});
  const flashbsr::PlanHeader& header = plan.header();
  std::printf("plan: %d requests, %d items, %d splits merged, %d workers\n", header.num_requests,
              header.num_items, header.num_merges, header.num_workers);

  std::vector<float> out(data.q.size(), std::numeric_limits<float>::quiet_NaN());
  std::vector<float> partial(
      flashbsr::cpu::partial_bytes(header.num_partial_rows, kDim) / sizeof(float));
  const int64_t pages = static_cast<int64_t>(data.pages.size());
  flashbsr::Params params;
  params.q = {.data = data.q.data(),
              .tokens = header.num_q_tokens,
              .heads = kHeads,
              .dim = kDim,
              .stride_token = kHeads * kDim,
              .stride_head = kDim};
  params.out = params.q;
  params.out.data = out.data();
  params.k = {.data = data.cache.data(),
              .pages = pages,
              .page_size = kPageSize,
              .heads = kKvHeads,
              .dim = kDim,
              .stride_page = kPage,
              .stride_token = kRow,
              .stride_head = kDim};
  params.v = params.k;
  params.v.data = data.cache.data() + kPageSize * kRow;
  params.sm_scale = kScale;
  params.partial_out = partial.data();
  params.partial_lse = partial.data() + int64_t{header.num_partial_rows} * kDim;

  flashbsr::cpu::Engine engine(kernels);
  engine.run(plan, params, flashbsr::Activation::kSoftmax);
  return out;
}

// The largest difference from the formula, evaluated in double precision.
double worst_error(const Data& data, const std::vector<float>& out,
                   const std::function<double(int)>& bias) {
  double worst = 0;
  for (size_t b = 0; b < kKvLens.size(); ++b) {
    const int q_len = kQoIndptr[b + 1] - kQoIndptr[b];
    for (int t = 0; t < q_len; ++t) {
      const int position = kKvLens[b] - q_len + t;
      for (int h = 0; h < kHeads; ++h) {
        const int64_t row = (int64_t{kQoIndptr[b] + t} * kHeads + h) * kDim;
        std::vector<double> o(kDim);
        double sum = 0;
        for (int j = 0; j <= position; ++j) {
          const int64_t page = data.pages[data.kv_indptr[b] + j / kPageSize];
          const float* k = data.cache.data() + page * kPage + (j % kPageSize) * kRow +
                           h / (kHeads / kKvHeads) * kDim;
          const float* v = k + kPageSize * kRow;
          double x = 0;
          for (int d = 0; d < kDim; ++d) x += double{data.q[row + d]} * k[d];
          const double weight = std::exp(x * kScale + bias(j - position));
          sum += weight;
          for (int d = 0; d < kDim; ++d) o[d] += weight * v[d];
        }
        for (int d = 0; d < kDim; ++d) {
          const double error = std::fabs(out[row + d] - o[d] / sum);
          worst = error <= worst ? worst : error;  // keeps a NaN
        }
      }
    }
  }
  return worst;
}

bool check(const char* name, double error) {
  const bool good = error < 1e-5;
  std::printf("%s: largest error %.2e, %s\n", name, error, good ? "ok" : "WRONG");
  return good;
}

}  // namespace

int main() {
  Data data = make_data();
  const flashbsr::cpu::KernelTable& builtin = flashbsr::cpu::kernel_table();
  std::printf("flashbsr %s, SIMD level %s, %d lanes\n", FLASHBSR_VERSION, builtin.isa,
              builtin.lanes);
  bool good = check("causal attention",
                    worst_error(data, attention(data, builtin), [](int) { return 0.0; }));

  flashbsr::cpu::KernelTable own = builtin;
  own.attend[0][0] = &flashbsr::cpu::attend<flashbsr::cpu::F32Op, Recency>;
  good &= check("own variant", worst_error(data, attention(data, own),
                                           [](int distance) { return 0.01 * distance; }));
  return good ? 0 : 1;
}
