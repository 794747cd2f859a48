// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The run-time choice of the SIMD level.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>

#include <flashbsr/core/error.h>
#include <flashbsr/cpu/tile_permission.h>

#include "cpu_features.h"
#include "dispatch.h"

namespace flashbsr {
namespace {

class Environment {
 public:
  explicit Environment(const char* value) { setenv("FLASHBSR_ISA", value, 1); }
  ~Environment() { unsetenv("FLASHBSR_ISA"); }
};

TEST(Dispatch, BaselineIsAlwaysThereAndTheBestIsChosen) {
  const auto& tables = cpu::available_tables();
  ASSERT_FALSE(tables.empty());
  EXPECT_STREQ(tables.front()->isa, "baseline");
  EXPECT_EQ(&cpu::chosen_table(), tables.back());
  for (size_t i = 1; i < tables.size(); ++i) EXPECT_GE(tables[i]->lanes, tables[i - 1]->lanes);
}

TEST(Dispatch, TheEnvironmentNamesALevel) {
  for (const cpu::KernelTable* table : cpu::available_tables()) {
    const Environment environment(table->isa);
    EXPECT_EQ(&cpu::chosen_table(), table);
  }
  const Environment empty("");
  EXPECT_EQ(&cpu::chosen_table(), cpu::available_tables().back());
}

TEST(Dispatch, AnUnknownLevelIsAnErrorThatListsTheKnown) {
  const Environment environment("avx9000");
  try {
    cpu::chosen_table();
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument, "FLASHBSR_ISA");
    EXPECT_NE(std::string(error.what()).find("baseline"), std::string::npos) << error.what();
  }
}

// A CPU with everything, under an operating system that saves all registers.
constexpr cpu::CpuidWords kAll{~0u, ~0u, ~0u, ~0u, ~0u};

TEST(Features, ALevelNeedsEachOfItsBitsAndThoseOfTheLevelBelow) {
  const cpu::CpuFeatures all = cpu::features_of(kAll);
  EXPECT_TRUE(all.avx2 && all.avx512 && all.avx512_bf16 && all.avx512_amx);
  const cpu::CpuFeatures none = cpu::features_of({});
  EXPECT_FALSE(none.avx2 || none.avx512 || none.avx512_bf16 || none.avx512_amx);
  struct Bit {
    uint32_t cpu::CpuidWords::* word;
    int bit;
    bool avx2, avx512, bf16 = false;  // what remains without it
  };
  const auto ecx1 = &cpu::CpuidWords::leaf1_ecx, ebx7 = &cpu::CpuidWords::leaf7_ebx;
  const auto eax71 = &cpu::CpuidWords::leaf7_1_eax, edx7 = &cpu::CpuidWords::leaf7_edx;
  const auto xcr0 = &cpu::CpuidWords::xcr0;
  const Bit needed[] = {
      {ecx1, 12, false, false},     {ecx1, 28, false, false},     {ecx1, 29, false, false},
      {ebx7, 5, false, false},      {ebx7, 16, true, false},      {ebx7, 17, true, false},
      {ebx7, 30, true, false},      {ebx7, 31, true, false},      {eax71, 5, true, true},
      {xcr0, 1, false, false},      {xcr0, 2, false, false},      {xcr0, 5, true, false},
      {xcr0, 6, true, false},       {xcr0, 7, true, false},       {xcr0, 17, true, true, true},
      {xcr0, 18, true, true, true}, {edx7, 24, true, true, true}, {edx7, 25, true, true, true},
  };
  for (const Bit& bit : needed) {
    cpu::CpuidWords words = kAll;
    words.*bit.word &= ~(1u << bit.bit);
    const cpu::CpuFeatures f = cpu::features_of(words);
    EXPECT_EQ(f.avx2, bit.avx2) << "bit " << bit.bit;
    EXPECT_EQ(f.avx512, bit.avx512) << "bit " << bit.bit;
    EXPECT_EQ(f.avx512_bf16, bit.bf16) << "bit " << bit.bit;
    EXPECT_FALSE(f.avx512_amx) << "bit " << bit.bit;
  }
}

#if defined(__x86_64__)
/// The line "flags" of the first CPU, of a kernel that has such a file.
std::set<std::string> proc_flags() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("flags")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

TEST(Features, AreWhatTheKernelSays) {
  const std::set<std::string> flags = proc_flags();
  if (flags.empty()) GTEST_SKIP() << "/proc/cpuinfo has no line of flags";
  const auto all = [&](auto... names) { return (flags.contains(names) && ...); };
  const cpu::CpuFeatures has = cpu::features_of(cpu::read_cpuid());
  EXPECT_EQ(has.avx2, all("avx", "avx2", "fma", "f16c"));
  EXPECT_EQ(has.avx512, has.avx2 && all("avx512f", "avx512bw", "avx512dq", "avx512vl"));
  EXPECT_EQ(has.avx512_bf16, has.avx512 && all("avx512_bf16"));
}

TEST(Features, AreWhatTheCompilersLibrarySays) {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("sse2")) GTEST_SKIP() << "it knows nothing: every x86-64 has SSE2";
  const cpu::CpuFeatures has = cpu::features_of(cpu::read_cpuid());
  EXPECT_EQ(has.avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
  EXPECT_EQ(has.avx512,
            has.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
  EXPECT_EQ(has.avx512_bf16, has.avx512 && __builtin_cpu_supports("avx512bf16"));
}
#endif

TEST(Dispatch, EveryLevelThatTheMachineHasIsThere) {
  const cpu::CpuFeatures has = cpu::features_of(cpu::read_cpuid());
  std::set<std::string> levels;
  for (const cpu::KernelTable* table : cpu::available_tables()) levels.insert(table->isa);
#if defined(FLASHBSR_HAVE_AVX2)
  EXPECT_EQ(levels.contains("avx2"), has.avx2);
#endif
#if defined(FLASHBSR_HAVE_AVX512)
  EXPECT_EQ(levels.contains("avx512"), has.avx512);
#endif
#if defined(FLASHBSR_HAVE_AVX512_BF16)
  EXPECT_EQ(levels.contains("avx512_bf16"), has.avx512_bf16);
  EXPECT_EQ(levels.contains("avx512_amx"), has.avx512_amx && cpu::may_use_tiles());
#endif
}

}  // namespace
}  // namespace flashbsr
