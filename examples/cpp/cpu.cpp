// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Attention on the CPU with nothing but flashbsr's headers: one batch with a prompt, a chunk of a
// prompt and a decode step, through the built-in kernels and through FlashSigmoid.
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include <flashbsr/cpu/engine.h>
#include <flashbsr/cpu/kernels.h>

#include "batch.h"
#include "flash_sigmoid.h"

namespace cpu = flashbsr::cpu;

std::vector<float> attend(Batch& batch, const cpu::KernelTable& kernels, bool softmax, float bias) {
  // 1. The plan: who computes what, from lengths alone.
  flashbsr::Planner planner;
  const flashbsr::PlanView plan = planner.plan(batch.layout, Batch::shape());
  const flashbsr::PlanHeader& header = plan.header();

  // 2. The arrays, the variant's own number, and memory for requests that were split.
  std::vector<float> out(batch.q.size(), std::numeric_limits<float>::quiet_NaN());
  flashbsr::Params params =
      batch.params(batch.q.data(), batch.cache.data(), flashbsr::DType::kF32, out.data());
  params.extras.scalar[0] = std::bit_cast<uint32_t>(bias);
  const int64_t rows = header.num_partial_rows;
  std::vector<float> partial(flashbsr::partial_bytes(rows, Batch::kDim) / sizeof(float));
  params.partial_out = partial.data();
  params.partial_lse = partial.data() + rows * Batch::kDim;

  // 3. The run.
  cpu::Engine engine(kernels);
  engine.run(plan, params,
             softmax ? flashbsr::Activation::kSoftmax : flashbsr::Activation::kSigmoid);
  return out;
}

int main() {
  Batch batch({40, 8, 1}, {40, 500, 1999});
  const cpu::KernelTable& builtin = cpu::kernel_table();
  std::printf("flashbsr %s, SIMD level %s, %d lanes\n", FLASHBSR_VERSION, builtin.isa,
              builtin.lanes);
  bool good = batch.check("causal attention", attend(batch, builtin, true, 0.0f), 1e-5, true,
                          [](double x) { return std::exp(x); });

  // A table of one variant, in float32 products: the same loops, compiled for our struct.
  const cpu::KernelTable& own = cpu::variant_table<cpu::F32Op, FlashSigmoid>();
  const float bias = -3.0f;
  good &= batch.check("FlashSigmoid", attend(batch, own, false, bias), 1e-4, false,
                      [&](double x) { return 1 / (1 + std::exp(-(x + bias))); });
  return good ? 0 : 1;
}
