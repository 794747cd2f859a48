// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The pool: every thing to do is done exactly once, by callers from many threads, in jobs of
// microseconds that come and go while helpers are still waking up. Run under TSan as well.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <atomic>
#include <thread>
#include <vector>

#include <flashbsr/cpu/thread_pool.h>

namespace flashbsr::cpu {
namespace {

// One job: `count` slots, each written without synchronisation by whoever claims it.
void run_job(ThreadPool& pool, int threads, int count) {
  std::vector<int> done(count, 0);
  std::atomic<int> next{0};
  std::atomic<int> wrong_index{0};
  pool.run(threads, [&](int thread) {
    if (thread < 0 || thread >= threads) wrong_index.fetch_add(1);
    for (int i; (i = next.fetch_add(1)) < count;) ++done[i];
  });
  ASSERT_EQ(wrong_index.load(), 0);
  for (int i = 0; i < count; ++i) ASSERT_EQ(done[i], 1) << "slot " << i;
}

TEST(ThreadPool, ManyShortJobs) {
  ThreadPool pool(4);
  for (int job = 0; job < 3000; ++job) run_job(pool, 1 + job % 4, job % 50);
}

TEST(ThreadPool, JobsAfterHelpersFellAsleep) {
  ThreadPool pool(3);
  for (int job = 0; job < 20; ++job) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    run_job(pool, 3, 1000);
  }
}

TEST(ThreadPool, CallersFromManyThreads) {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int job = 0; job < 500; ++job) run_job(pool, 3, 30);
    });
  }
  for (std::thread& t : callers) t.join();
}

TEST(ThreadPool, AJobInsideAJobRunsAlone) {
  ThreadPool pool(3);
  std::atomic<int> next{0};
  pool.run(3, [&](int) {
    while (next.fetch_add(1) < 20) run_job(pool, 3, 10);
  });
}

TEST(ThreadPool, ConstructionAndDestructionDoNotHang) {
  for (int i = 0; i < 200; ++i) ThreadPool pool(1 + i % 4);
}

TEST(SharedPool, GrowsAndKeepsRunning) {
  const auto small = shared_pool(2);
  const auto large = shared_pool(4);
  EXPECT_GE(large->threads(), 4);
  EXPECT_EQ(shared_pool(3), large);
  run_job(*small, 2, 100);  // whoever still holds the old pool may use it
  run_job(*large, 4, 100);
}

#if !defined(__SANITIZE_THREAD__)  // TSan does not support threads after fork
TEST(SharedPool, WorksInAForkedChild) {
  run_job(*shared_pool(3), 3, 100);
  const pid_t child = fork();
  if (child == 0) {
    const auto pool = shared_pool(3);
    std::atomic<int> next{0}, sum{0};
    pool->run(3, [&](int) {
      for (int i; (i = next.fetch_add(1)) < 100;) sum.fetch_add(i);
    });
    _exit(sum.load() == 4950 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif

}  // namespace
}  // namespace flashbsr::cpu
