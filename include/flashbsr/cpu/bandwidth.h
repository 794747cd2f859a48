// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The memory bandwidth that the benchmarks hold their figures against, in bytes per second:
//   triad  a[i] = b[i] + s * c[i], 12 bytes an element as STREAM counts (McCalpin, 1995)
//   read   the sum of one array
// The best of several passes, after one that touches the pages.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>

#include <sys/mman.h>

#include <flashbsr/cpu/thread_pool.h>

namespace flashbsr::cpu {

struct Bandwidth {
  double triad = 0;
  double read = 0;
};

/// Floats on huge pages where the system has them, as NumPy allocates its large arrays. Untouched.
class HugeArray {
 public:
  explicit HugeArray(int64_t n) : bytes_(static_cast<size_t>(n) * sizeof(float)) {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<float*>(p);
#if defined(MADV_HUGEPAGE)
    madvise(p, bytes_, MADV_HUGEPAGE);
#endif
  }
  ~HugeArray() { munmap(data_, bytes_); }
  HugeArray(const HugeArray&) = delete;
  HugeArray& operator=(const HugeArray&) = delete;

  float& operator[](int64_t i) const { return data_[i]; }

 private:
  size_t bytes_;
  float* data_;
};

inline Bandwidth measure_bandwidth(int64_t bytes, int threads) {
  const int64_t n = bytes / static_cast<int64_t>(sizeof(float));
  // Untouched: the first pass places the pages with the threads that use them.
  const HugeArray a(n), b(n), c(n);
  const auto pool = shared_pool(threads);
  const auto timed = [&](auto&& body) {
    const auto start = std::chrono::steady_clock::now();
    std::atomic<int> next{0};
    const int parts = 64 * threads;
    pool->run(threads, [&](int) {
      for (int p = next.fetch_add(1); p < parts; p = next.fetch_add(1)) {
        body(n * p / parts, n * (p + 1) / parts);
      }
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  timed([&](int64_t i, int64_t end) {
    for (; i < end; ++i) a[i] = 0.0f, b[i] = 1.0f, c[i] = 2.0f;
  });
  std::atomic<float> sink{0};
  Bandwidth best;
  for (int pass = 0; pass < 7; ++pass) {
    const double triad = timed([&](int64_t i, int64_t end) {
      for (; i < end; ++i) a[i] = b[i] + 3.0f * c[i];
    });
    const double read = timed([&](int64_t i, int64_t end) {
      float sum[64] = {};
      for (; i + 64 <= end; i += 64) {
        for (int j = 0; j < 64; ++j) sum[j] += a[i + j];
      }
      float total = 0;
      for (const float s : sum) total += s;
      sink.store(total, std::memory_order_relaxed);
    });
    best.triad = std::max(best.triad, 12.0 * static_cast<double>(n) / triad);
    best.read = std::max(best.read, 4.0 * static_cast<double>(n) / read);
  }
  return best;
}

}  // namespace flashbsr::cpu
