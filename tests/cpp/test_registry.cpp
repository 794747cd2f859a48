// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The choice among kernels, over a table of the test's own: no CUDA is needed for it.
#include <gtest/gtest.h>

#include <flashbsr/core/error.h>

#include "cuda/registry.h"

namespace flashbsr::cuda {

namespace {

constexpr KernelRow row(const char* name, const char* family, int arch, int head_dim,
                        const char* kv, int rows, std::initializer_list<int> sass, int ptx) {
  KernelRow r{name,    family,  arch, head_dim, kv, rows, rows ? "plain" : "-",
              nullptr, nullptr, {},   {},       ptx};
  int i = 0;
  for (const int target : sass) r.sass[i++] = target;
  return r;
}

const KernelRow kRows[] = {
    row("decode_sm80_d256", "decode", 80, 256, "bf16", 8, {80}, 0),
    row("decode_sm80_d128", "decode", 80, 128, "bf16", 8, {80}, 0),
    row("decode_sm90_d128", "decode", 90, 128, "bf16", 8, {90}, 90),
    row("decode_sm80_d64", "decode", 80, 64, "bf16", 8, {80}, 0),
    row("prefill_sm80_d128", "prefill", 80, 128, "f16", 64, {80, 90}, 90),
    row("append", "append", 75, 0, "-", 0, {75, 80, 90}, 90),
};

const char* chosen(const KernelQuery& query, int cc) {
  const KernelRow* found = try_find(query, cc);
  return found ? found->name : "none";
}

KernelQuery decode(int head_dim) { return {"decode", head_dim, "bf16", 8, "plain"}; }

}  // namespace

std::span<const KernelRow> kernel_rows() { return kRows; }

namespace {

TEST(Registry, TakesTheSmallestSufficientHeadDim) {
  EXPECT_STREQ(chosen(decode(8), 80), "decode_sm80_d64");
  EXPECT_STREQ(chosen(decode(64), 80), "decode_sm80_d64");
  EXPECT_STREQ(chosen(decode(72), 80), "decode_sm80_d128");
  EXPECT_STREQ(chosen(decode(256), 80), "decode_sm80_d256");
  EXPECT_STREQ(chosen(decode(264), 80), "none");
}

TEST(Registry, MachineCodeServesItsMajorVersionFromItsMinorOn) {
  EXPECT_STREQ(chosen(decode(128), 86), "decode_sm80_d128");
  EXPECT_STREQ(chosen(decode(128), 89), "decode_sm80_d128");
  EXPECT_STREQ(chosen(decode(128), 75), "none");
  EXPECT_STREQ(chosen(decode(128), 90), "decode_sm90_d128");
}

TEST(Registry, PtxServesDevicesToCome) {
  EXPECT_STREQ(chosen(decode(128), 120), "decode_sm90_d128");
  EXPECT_STREQ(chosen(decode(256), 120), "none");
  EXPECT_STREQ(chosen({.family = "append"}, 121), "append");
  EXPECT_STREQ(chosen({.family = "append"}, 70), "none");
}

TEST(Registry, AbsentColumnsMatchAbsentColumnsOnly) {
  EXPECT_STREQ(chosen({.family = "append"}, 80), "append");
  EXPECT_STREQ(chosen({"append", 64, "bf16", 8, "plain"}, 80), "none");
  EXPECT_STREQ(chosen({.family = "decode"}, 80), "none");
}

TEST(Registry, AMissSaysWhatWasAskedWhatIsNearAndTheWayOut) {
  try {
    find({"prefill", 128, "e4m3", 64, "plain"}, 90);
    FAIL() << "found";
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::kUnsupported);
    EXPECT_EQ(e.argument, "kernel");
    EXPECT_EQ(e.actual, "prefill, head_dim 128, KV e4m3, 64 rows, variant plain on sm_90");
    EXPECT_NE(e.expected.find("prefill_sm80_d128 (sm_80 sm_90 compute_90)"), std::string::npos);
    EXPECT_NE(e.expected.find("backend=\"cpu\""), std::string::npos);
  }
}

}  // namespace

}  // namespace flashbsr::cuda
