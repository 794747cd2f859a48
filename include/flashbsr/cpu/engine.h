// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Runs a plan on the CPU: threads claim items in plan order, the last item of a split tile merges
// it. Which thread takes an item changes nothing in its result.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include <flashbsr/cpu/kernel_table.h>
#include <flashbsr/cpu/thread_pool.h>
#include <flashbsr/plan/schedule.h>

namespace flashbsr::cpu {

/// Memory aligned to cache lines that only grows.
class AlignedBuffer {
 public:
  char* fit(int64_t bytes) {
    if (bytes > size_) {
      data_.reset(static_cast<char*>(::operator new(static_cast<size_t>(bytes), kAlign)));
      size_ = bytes;
    }
    return data_.get();
  }
  int64_t size() const { return size_; }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(char* p) const { ::operator delete(p, kAlign); }
  };
  std::unique_ptr<char, Free> data_;
  int64_t size_ = 0;
};

using flashbsr::partial_bytes;

struct RunStats {
  double kernel_seconds = 0;         ///< from the first claim to the last result
  std::vector<double> busy_seconds;  ///< per thread; the caller is thread 0
};

/// bf16 dot products where the level has them and every operand is exact in bf16, as all codes are.
inline Compute compute_for(const KernelTable& table, const Params& p) {
  const auto narrow = [](DType t) { return t != DType::kF32 && t != DType::kF16; };
  const bool bf16 = table.has_bf16_dot && p.q.dtype == DType::kBF16 && narrow(p.k.dtype) &&
                    narrow(p.v.dtype) && p.rope.fine == nullptr;
  return bf16 ? Compute::kBf16 : Compute::kF32;
}

class Engine {
 public:
  explicit Engine(const KernelTable& table, int threads = available_cores())
      : table_(&table), threads_(threads) {}

  const KernelTable& table() const { return *table_; }
  /// The kernels of later runs.
  void use(const KernelTable& table) { table_ = &table; }
  int threads() const { return threads_; }

  Compute compute_for(const Params& p) const { return cpu::compute_for(*table_, p); }

  /// `params.partial_out` and `partial_lse` must hold the plan's partial states.
  void run(PlanView plan, const Params& params, Activation activation) {
    const PlanHeader& h = plan.header();
    const int compute = static_cast<int>(compute_for(params));
    const auto attend = table_->attend[compute];
    const void* blocks = table_->blocks[compute];
    const int32_t bundle = bundle_size(h);
    const int64_t scratch = max_of(table_->scratch_bytes(h.tile_rows, params),
                                   bundle * table_->scratch_bytes(kFewRows, params));
    reset_arrivals(h.num_merges);
    stats_.busy_seconds.assign(static_cast<size_t>(threads_), 0.0);
    std::atomic<int32_t> next{0};
    const auto work = [&](int thread) {
      static thread_local AlignedBuffer buffer;
      const auto start = std::chrono::steady_clock::now();
      char* memory = buffer.fit(scratch);
      for (;;) {
        const int32_t first = next.fetch_add(bundle, std::memory_order_relaxed);
        if (first >= h.num_items) break;
        const int32_t count = min_of(bundle, h.num_items - first);
        attend(params, blocks, plan, activation, first, count, memory);
        for (int32_t i = first; i < first + count; ++i) {
          const WorkItem& item = plan.items()[i];
          for (int32_t m = item.merge; m < item.merge + item.merge_count; ++m) {
            // Release our partial state, acquire the others'.
            const int32_t arrived = arrivals_[static_cast<size_t>(m)].fetch_add(1) + 1;
            if (arrived == plan.merges()[m].state_count) {
              table_->merge(params, plan, activation, m);
            }
          }
        }
      }
      // Added, not set: a helper that woke late for the last job may enter this one twice.
      stats_.busy_seconds[static_cast<size_t>(thread)] += seconds_since(start);
    };
    const auto start = std::chrono::steady_clock::now();
    // Below about 20 us of work, waking a helper takes longer than doing it here.
    const int64_t cost = static_cast<int64_t>(h.mean_cost) * h.num_workers;
    const int threads = cost < kSerialCost ? 1 : threads_;
    if (threads > 1) {
      shared_pool(threads)->run(threads, work);
    } else {
      work(0);
    }
    stats_.kernel_seconds = seconds_since(start);
  }

  const RunStats& stats() const { return stats_; }

 private:
  static constexpr int64_t kSerialCost = 24000;

  /// Items claimed at once: KV heads of one chunk, as many as leave each thread eight claims to
  /// balance with. Those of few rows, whose limit is memory, are computed side by side.
  int32_t bundle_size(const PlanHeader& h) const {
    if (h.flags & kPlanPerHead) return 1;  // neighbours are of different requests
    int32_t bundle = min_of(kMaxBundle, h.num_kv_heads);
    while (bundle > 1 && (h.num_kv_heads % bundle != 0 || h.num_items < bundle * threads_ * 8)) {
      --bundle;
    }
    return bundle;
  }

  static double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  void reset_arrivals(int32_t merges) {
    if (static_cast<size_t>(merges) > arrivals_.size()) {
      arrivals_ = std::vector<std::atomic<int32_t>>(static_cast<size_t>(merges) * 2);
    }
    for (int32_t i = 0; i < merges; ++i) arrivals_[static_cast<size_t>(i)].store(0);
  }

  const KernelTable* table_;
  int threads_;
  std::vector<std::atomic<int32_t>> arrivals_;
  RunStats stats_;
};

}  // namespace flashbsr::cpu
