// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// An attention kernel of our own on a GPU, from flashbsr's headers alone: a variant that pulls
// logits towards recent keys, in the library's prefill and decode loops, planned by its scheduler
// and launched with <<<>>>. Checked against plain loops.
//
//   nvcc -std=c++20 -O3 -arch=native -I$(python -c "import flashbsr;
//   print(flashbsr.get_include())")
//       kernel.cu -o kernel
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include <cuda_fp16.h>
#include <flashbsr/core/launch.h>
#include <flashbsr/kernel/decode/kernel.h>
#include <flashbsr/kernel/sm80/kernel.h>
#include <flashbsr/plan/gpu.h>
#include <flashbsr/plan/schedule.h>

struct Recency : flashbsr::VariantBase {
  FLASHBSR_FN explicit Recency(const flashbsr::Params&) {}
  FLASHBSR_FN bool transforms_logits() const { return true; }
  template <class M>
  FLASHBSR_FN typename M::Float logits_transform(typename M::Float x,
                                                 const flashbsr::LogitsAt<M>& at) const {
    return x + 0.01f * M::to_float(at.kv_position - at.q_position);
  }
};

using Prefill = flashbsr::sm80::PrefillTraits<64, flashbsr::DType::kF16, 64>;
using Decode = flashbsr::DecodeTraits<80, 64, flashbsr::DType::kF16, 8>;

__global__ void __launch_bounds__(Prefill::kThreads, Prefill::kBlocksPerSM)
    recency_prefill(const __grid_constant__ flashbsr::KernelArgs args) {
  flashbsr::sm80::prefill<Prefill, Recency>(args);
}

__global__ void __launch_bounds__(Decode::kThreads, Decode::kBlocksPerSM)
    recency_decode(const __grid_constant__ flashbsr::KernelArgs args) {
  flashbsr::decode<Decode, Recency>(args);
}

namespace {

constexpr int kHeads = 8, kKvHeads = 2, kDim = 64;
const float kScale = 1.0f / std::sqrt(static_cast<float>(kDim));

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::printf("CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

/// Device memory with the contents of a vector.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& host) : size_(host.size() * sizeof(T)) {
    check(cudaMalloc(&data_, size_ ? size_ : 1));
    check(cudaMemcpy(data_, host.data(), size_, cudaMemcpyHostToDevice));
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  T* get() const { return static_cast<T*>(data_); }
  std::vector<T> read() const {
    std::vector<T> host(size_ / sizeof(T));
    check(cudaMemcpy(host.data(), data_, size_, cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  void* data_ = nullptr;
  size_t size_;
};

std::vector<__half> normal(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw;
  std::vector<__half> x(count);
  for (__half& value : x) value = __float2half(draw(random));
  return x;
}

/// Offsets of the rows of requests, for q and for K and V.
struct Batch {
  std::vector<int32_t> qo_indptr, kv_indptr;
};

template <class Kernel>
bool attend(const char* name, const Batch& batch, Kernel kernel, flashbsr::DeviceLimits limits,
            int threads, int smem_bytes) {
  const int64_t q_rows = batch.qo_indptr.back(), kv_rows = batch.kv_indptr.back();
  const std::vector<__half> q = normal(q_rows * kHeads * kDim, 1);
  const std::vector<__half> k = normal(kv_rows * kKvHeads * kDim, 2);
  const std::vector<__half> v = normal(kv_rows * kKvHeads * kDim, 3);
  const OnDevice<__half> device_q(q), device_k(k), device_v(v);
  const OnDevice<float> out(std::vector<float>(q_rows * kHeads * kDim, NAN));

  flashbsr::Layout layout;
  const flashbsr::IndexView qo(batch.qo_indptr), kv(batch.kv_indptr);
  flashbsr::ragged_layout(layout, &qo, kv);
  flashbsr::Planner planner;
  const flashbsr::PlanView plan = planner.plan(
      layout, {.num_qo_heads = kHeads, .num_kv_heads = kKvHeads, .causal = true}, limits);
  const flashbsr::PlanHeader& header = plan.header();
  const OnDevice<int32_t> device_plan(planner.buffer());
  const OnDevice<int32_t> counters(std::vector<int32_t>(1 + header.max_merges));
  const int64_t rows = header.num_partial_rows;
  const OnDevice<float> partial(
      std::vector<float>(flashbsr::partial_bytes(rows, kDim) / sizeof(float)));

  flashbsr::Params params;
  params.q = {.data = device_q.get(),
              .dtype = flashbsr::DType::kF16,
              .tokens = q_rows,
              .heads = kHeads,
              .dim = kDim,
              .stride_token = kHeads * kDim,
              .stride_head = kDim};
  params.out = params.q;
  params.out.data = out.get();
  params.out.dtype = flashbsr::DType::kF32;
  params.k = {.data = device_k.get(),
              .dtype = flashbsr::DType::kF16,
              .pages = kv_rows,
              .page_size = 1,
              .heads = kKvHeads,
              .dim = kDim,
              .stride_page = kKvHeads * kDim,
              .stride_token = kKvHeads * kDim,
              .stride_head = kDim};
  params.v = params.k;
  params.v.data = device_v.get();
  params.sm_scale = kScale;
  params.partial_out = partial.get();
  params.partial_lse = partial.get() + rows * kDim;

  const flashbsr::KernelArgs args =
      flashbsr::kernel_args(params, header, device_plan.get(), counters.get());
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes));
  for (int run = 0; run < 2; ++run) {  // the counters are zero again after the first
    kernel<<<header.num_workers, threads, smem_bytes>>>(args);
    check(cudaGetLastError());
  }
  check(cudaDeviceSynchronize());

  const std::vector<float> got = out.read();
  double worst = 0;
  for (size_t b = 0; b + 1 < batch.qo_indptr.size(); ++b) {
    const int q_len = batch.qo_indptr[b + 1] - batch.qo_indptr[b];
    const int kv_len = batch.kv_indptr[b + 1] - batch.kv_indptr[b];
    for (int t = 0; t < q_len; ++t) {
      const int position = kv_len - q_len + t;
      for (int h = 0; h < kHeads; ++h) {
        const int64_t row = (int64_t{batch.qo_indptr[b] + t} * kHeads + h) * kDim;
        std::vector<double> o(kDim);
        double sum = 0;
        for (int j = 0; j <= position; ++j) {
          const int64_t at =
              (int64_t{batch.kv_indptr[b] + j} * kKvHeads + h / (kHeads / kKvHeads)) * kDim;
          double x = 0;
          for (int d = 0; d < kDim; ++d) {
            x += double{__half2float(q[row + d])} * __half2float(k[at + d]);
          }
          const double weight = std::exp(x * kScale + 0.01 * (j - position));
          sum += weight;
          for (int d = 0; d < kDim; ++d) o[d] += weight * __half2float(v[at + d]);
        }
        for (int d = 0; d < kDim; ++d) {
          const double error = std::fabs(got[row + d] - o[d] / sum);
          worst = error <= worst ? worst : error;  // keeps a NaN
        }
      }
    }
  }
  const bool good = worst < 4e-3;
  std::printf("%s: %d items, %d splits merged, largest error %.2e, %s\n", name, header.num_items,
              header.num_merges, worst, good ? "ok" : "WRONG");
  return good;
}

}  // namespace

int main() {
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0));
  flashbsr::GpuKernel shape{.sms = device.multiProcessorCount,
                            .blocks_per_sm = Prefill::kBlocksPerSM,
                            .rows = Prefill::kRows,
                            .kv_tile = Prefill::kKvTile,
                            .bytes_per_token = 2 * kDim * 2};
  bool good = attend("own prefill", {{0, 40, 48, 349}, {0, 40, 540, 1540}}, recency_prefill,
                     flashbsr::gpu_prefill_limits(shape), Prefill::kThreads, Prefill::kSmemBytes);
  shape.blocks_per_sm = Decode::kBlocksPerSM;
  shape.rows = Decode::kRows;
  shape.kv_tile = Decode::kKvTile;
  good &= attend("own decode", {{0, 1, 2, 3}, {0, 40, 540, 5540}}, recency_decode,
                 flashbsr::gpu_decode_limits(shape), Decode::kThreads, Decode::kSmemBytes);
  return good ? 0 : 1;
}
