// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The choice among kernels, over a table of the test's own: no CUDA is needed for it.
#include <gtest/gtest.h>

#include <flashbsr/core/error.h>

#include "cuda/registry.h"

namespace flashbsr::cuda {

namespace {

struct Dims {
  int qk, vo;
  constexpr Dims(int dim) : qk(dim), vo(dim) {}
  constexpr Dims(int qk, int vo) : qk(qk), vo(vo) {}
};

KernelRow row(const char* name, const char* family, int arch, Dims dims, const char* kv, int rows,
              std::initializer_list<int> sass, int ptx) {
  KernelRow r{};
  r.name = name;
  r.family = family;
  r.arch = arch;
  r.head_dim = dims.qk;
  r.head_dim_vo = dims.vo;
  r.kv = kv;
  r.rows = rows;
  r.variant = rows ? "plain" : "-";
  r.ptx = ptx;
  int i = 0;
  for (const int target : sass) r.sass[i++] = target;
  return r;
}

/// For sm_90a alone.
KernelRow exact(const char* name, Dims dims) {
  KernelRow r = row(name, "hopper", 90, dims, "bf16", 128, {90}, 0);
  r.exact = true;
  return r;
}

const KernelRow kRows[] = {
    row("decode_sm80_d256", "decode", 80, 256, "bf16", 8, {80}, 0),
    row("decode_sm80_d128", "decode", 80, 128, "bf16", 8, {80}, 0),
    row("decode_sm90_d128", "decode", 90, 128, "bf16", 8, {90}, 90),
    row("decode_sm80_d64", "decode", 80, 64, "bf16", 8, {80}, 0),
    row("prefill_sm80_d128", "prefill", 80, 128, "f16", 64, {80, 90}, 90),
    exact("hopper_d256", 256),
    exact("hopper_d192x128", {192, 128}),
    exact("hopper_d128", 128),
    row("append", "append", 75, 0, "-", 0, {75, 80, 90}, 90),
};

const char* chosen(const KernelQuery& query, int cc) {
  const KernelRow* found = try_find(query, cc);
  return found ? found->name : "none";
}

KernelQuery decode(int head_dim) { return {"decode", head_dim, head_dim, "bf16", 8, "plain"}; }
KernelQuery hopper(int qk, int vo) { return {"hopper", qk, vo, "bf16", 128, "plain"}; }

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

TEST(Registry, HeadDimsOfVAreSufficientToo) {
  EXPECT_STREQ(chosen(hopper(128, 128), 90), "hopper_d128");
  EXPECT_STREQ(chosen(hopper(64, 128), 90), "hopper_d128");
  EXPECT_STREQ(chosen(hopper(192, 128), 90), "hopper_d192x128");
  EXPECT_STREQ(chosen(hopper(136, 64), 90), "hopper_d192x128");
  EXPECT_STREQ(chosen(hopper(192, 136), 90), "hopper_d256");
  EXPECT_STREQ(chosen(hopper(64, 256), 90), "hopper_d256");
  EXPECT_STREQ(chosen(hopper(264, 64), 90), "none");
}

TEST(Registry, SomeRowsServeOneDeviceAlone) {
  for (const int cc : {80, 89, 100, 120}) EXPECT_STREQ(chosen(hopper(128, 128), cc), "none");
  EXPECT_EQ(exact("hopper", 128).targets(), "sm_90a");
  EXPECT_EQ(row("prefill", "prefill", 80, 128, "f16", 64, {80, 90}, 90).targets(),
            "sm_80 sm_90 compute_90");
}

TEST(Registry, AbsentColumnsMatchAbsentColumnsOnly) {
  EXPECT_STREQ(chosen({.family = "append"}, 80), "append");
  EXPECT_STREQ(chosen({"append", 64, 64, "bf16", 8, "plain"}, 80), "none");
  EXPECT_STREQ(chosen({.family = "decode"}, 80), "none");
}

TEST(Registry, AMissSaysWhatWasAskedWhatIsNearAndTheWayOut) {
  try {
    find({"prefill", 128, 128, "e4m3", 64, "plain"}, 90);
    FAIL() << "found";
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::kUnsupported);
    EXPECT_EQ(e.argument, "kernel");
    EXPECT_EQ(e.actual, "prefill, head_dim 128, KV e4m3, 64 rows, variant plain on sm_90");
    EXPECT_NE(e.expected.find("prefill_sm80_d128 (sm_80 sm_90 compute_90)"), std::string::npos);
    EXPECT_NE(e.expected.find("backend=\"cpu\""), std::string::npos);
  }
  try {
    find(hopper(192, 128), 80);
    FAIL() << "found";
  } catch (const Error& e) {
    EXPECT_EQ(e.actual,
              "hopper, head_dim 192 and 128 of v, KV bf16, 128 rows, variant plain on sm_80");
    EXPECT_NE(e.expected.find("(sm_90a)"), std::string::npos);
  }
}

}  // namespace

}  // namespace flashbsr::cuda
