// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A small pool for jobs of microseconds: the caller works too, helpers spin briefly before they
// sleep, and a helper that wakes too late finds the job closed instead of being waited for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#endif

namespace flashbsr::cpu {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Cores this process may run on; all of them where a system binds no process to some (macOS).
inline int available_cores() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n ? static_cast<int>(n) : 1;
}

class ThreadPool {
 public:
  explicit ThreadPool(int threads) : owner_(getpid()) {
    for (int i = 1; i < threads; ++i) helpers_.emplace_back([this, i] { serve(i); });
  }

  ~ThreadPool() {
    // After fork the helpers do not exist in the child: their handles must be dropped, not joined.
    if (getpid() != owner_) {
      for (std::thread& t : helpers_) t.detach();
      return;
    }
    stop_.store(true);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (std::thread& t : helpers_) t.join();
  }

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(helpers_.size()) + 1; }
  bool alive() const { return getpid() == owner_; }

  /// Calls work(0) here and work(i) on helpers i < threads that arrive in time. `work` must share
  /// one counter of things to do and return when it is exhausted. If another job holds the pool,
  /// the caller works alone: correct, never a deadlock.
  template <class Work>
  void run(int threads, Work&& work) {
    std::unique_lock<std::mutex> hold(busy_, std::try_to_lock);
    if (threads <= 1 || helpers_.empty() || !hold) {
      work(0);
      return;
    }
    context_ = const_cast<void*>(static_cast<const void*>(&work));
    call_ = [](void* w, int i) { (*static_cast<std::remove_reference_t<Work>*>(w))(i); };
    limit_ = threads;
    open_.store(true);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    work(0);
    open_.store(false);
    // A helper that was preempted in its last item needs this core more than we do.
    for (int i = 0; inside_.load() != 0; ++i) {
      if (i < kPatience) {
        cpu_relax();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  static constexpr auto kSpin = std::chrono::microseconds(50);
  static constexpr int kPatience = 2000;  ///< pauses before yielding, some 50 us

  void serve(int index) {
    uint32_t seen = 0;
    for (;;) {
      wait_past(seen);
      seen = epoch_.load();
      if (stop_.load()) return;
      // Announce first, look second; the caller closes first, counts second. One of the two sees
      // the other (sequential consistency), so no helper runs a job that was torn down.
      inside_.fetch_add(1);
      if (open_.load() && index < limit_) call_(context_, index);
      inside_.fetch_sub(1);
    }
  }

  void wait_past(uint32_t seen) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    for (int i = 0; epoch_.load(std::memory_order_relaxed) == seen; ++i) {
      cpu_relax();
      if (i % 64 == 63 && std::chrono::steady_clock::now() > deadline) {
        epoch_.wait(seen);
        return;
      }
    }
  }

  const pid_t owner_;
  std::mutex busy_;
  void* context_ = nullptr;
  void (*call_)(void*, int) = nullptr;
  int limit_ = 0;
  std::atomic<uint32_t> epoch_{0};
  std::atomic<bool> open_{false};
  std::atomic<bool> stop_{false};
  std::atomic<int> inside_{0};
  std::vector<std::thread> helpers_;
};

/// The process's pool, with at least `threads` threads. Rebuilt after fork and when it must grow; a
/// run in progress keeps the pool it started on.
inline std::shared_ptr<ThreadPool> shared_pool(int threads) {
  static std::mutex guard;
  static std::shared_ptr<ThreadPool> pool;
  const std::lock_guard<std::mutex> hold(guard);
  if (!pool || !pool->alive() || pool->threads() < threads) {
    pool = std::make_shared<ThreadPool>(threads);
  }
  return pool;
}

}  // namespace flashbsr::cpu
