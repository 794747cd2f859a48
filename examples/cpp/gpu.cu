// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// FlashSigmoid on a GPU: the struct of the CPU's program in the library's prefill and decode loops,
// planned by its scheduler and launched with <<<>>>.
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

#include <cuda_fp16.h>
#include <flashbsr/plan/gpu.h>

#include "batch.h"
#include "kernels.h"

namespace {

constexpr float kBias = -3.0f;

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::printf("CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

/// Device memory with the contents of a vector.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(std::span<const T> host) : size_(host.size_bytes()) {
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

std::vector<__half> to_half(const std::vector<float>& x) {
  std::vector<__half> y;
  for (float value : x) y.push_back(__float2half(value));
  return y;
}

template <class Kernel>
bool attend(const char* name, const Batch& batch, Kernel kernel, flashbsr::DeviceLimits limits,
            int threads, int smem_bytes) {
  // 1. The plan, for this kernel's tiles and this GPU, and a copy of it on the device.
  flashbsr::Planner planner;
  const flashbsr::PlanView plan = planner.plan(batch.layout, Batch::shape(), limits);
  const flashbsr::PlanHeader& header = plan.header();
  const OnDevice<int32_t> device_plan(planner.buffer());
  const OnDevice<int32_t> counters(std::vector<int32_t>(flashbsr::num_counters(header)));

  // 2. The arrays, the variant's own number, and memory for requests that were split.
  const OnDevice<__half> q(to_half(batch.q)), cache(to_half(batch.cache));
  const OnDevice<float> out(std::vector<float>(batch.q.size(), NAN));
  flashbsr::Params params = batch.params(q.get(), cache.get(), flashbsr::DType::kF16, out.get());
  params.extras.scalar[0] = std::bit_cast<uint32_t>(kBias);
  const int64_t rows = header.num_partial_rows;
  const OnDevice<float> partial(
      std::vector<float>(flashbsr::partial_bytes(rows, Batch::kDim) / sizeof(float)));
  params.partial_out = partial.get();
  params.partial_lse = partial.get() + rows * Batch::kDim;

  // 3. The run: a block for each of the plan's workers.
  const flashbsr::KernelArgs args =
      flashbsr::kernel_args(params, header, device_plan.get(), counters.get());
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes));
  for (int run = 0; run < 2; ++run) {  // the counters are zero again after the first
    kernel<<<header.num_workers, threads, smem_bytes>>>(args);
    check(cudaGetLastError());
  }
  check(cudaDeviceSynchronize());

  std::printf("%d items, %d splits merged; ", header.num_items, header.num_merges);
  // Weights are rounded to float16 before they meet V. Over 5000 tokens that adds up to 1e-3, and
  // to 4e-3 in the worst of 10,000 elements.
  return batch.check(name, out.read(), 1e-2, false,
                     [](double x) { return 1 / (1 + std::exp(-(x + kBias))); });
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU: the kernels were compiled and do not run here\n");
    return 77;  // what CTest takes for a test that was skipped
  }
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0));
  flashbsr::GpuKernel shape{.sms = device.multiProcessorCount,
                            .blocks_per_sm = Prefill::kBlocksPerSM,
                            .rows = Prefill::kRows,
                            .kv_tile = Prefill::kKvTile,
                            .bytes_per_token = 2 * Batch::kDim * 2};
  const Batch prompts({40, 8, 301}, {40, 500, 1000}), steps({1, 1, 1}, {40, 500, 5000});
  bool good = attend("prefill", prompts, sigmoid_prefill, flashbsr::gpu_prefill_limits(shape),
                     Prefill::kThreads, Prefill::kSmemBytes);
  shape.blocks_per_sm = Decode::kBlocksPerSM;
  shape.rows = Decode::kRows;
  shape.kv_tile = Decode::kKvTile;
  good &= attend("decode", steps, sigmoid_decode, flashbsr::gpu_decode_limits(shape),
                 Decode::kThreads, Decode::kSmemBytes);
  return good ? 0 : 1;
}
