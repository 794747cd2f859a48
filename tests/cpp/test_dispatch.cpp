// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The run-time choice of the SIMD level.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include <flashbsr/core/error.h>

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

}  // namespace
}  // namespace flashbsr
