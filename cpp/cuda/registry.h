// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels of this build, a row each, and the choice among them. The rows are generated from
// cpp/instances.txt: what is not here does not ship.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include <flashbsr/core/dtype.h>
#include <flashbsr/core/launch.h>

namespace flashbsr::cuda {

/// What the kernel's Traits say. All 0 where a family has none: its host code knows the shape.
struct KernelShape {
  int threads = 0;
  int smem_bytes = 0;  ///< dynamic shared memory of a block
  int blocks_per_sm = 0;
  int kv_tile = 0;
};

inline constexpr int kMaxTargets = 8;

struct JitKernel;

struct KernelRow {
  const char* name;  ///< the symbol, for launches, profilers and messages alike
  const char* family;
  int arch;         ///< instruction set it is written for: 75, 80, 90
  bool exact;       ///< and for no other: sm_90a
  int head_dim;     ///< of Q and K; serves all up to this; 0: not applicable
  int head_dim_vo;  ///< of V and O
  const char*
      kv;    ///< "f16", "bf16", "e4m3", "e5m2", "i8", "i4", "e2m1"; "bf16xi8": and Q; "-": none
  int rows;  ///< packed query rows of an item; 0: not applicable
  const char* variant;         ///< "plain", "standard", "sigmoid", a user's; "-": not applicable
  const unsigned char* image;  ///< null: a rare row, which the build leaves to a provider (jit.h)
  const unsigned char* image_end;
  KernelShape shape;
  int sass[kMaxTargets];  ///< machine code for these, ended by 0
  int ptx;                ///< PTX for this and everything later; 0: none
  /// What compiles it when it is first loaded (jit.h), without an image; null: a row of the build.
  JitKernel* jit = nullptr;
  KvCopies copies = KvCopies::kEither;  ///< of families hopper and mixed

  /// Whether a device of compute capability `cc` (90 for 9.0) can run it: machine code serves its
  /// own major version from its minor version on.
  bool runs_on(int cc) const;
  /// Whether blocks of a cluster may work together (sm90a/cluster_merge.h).
  bool takes_clusters() const { return family[0] == 'l' && exact; }
  /// And whether `size` of them, at most 16, may: three and six only where 64 rows meet 16 bits.
  bool takes_clusters_of(int size) const {
    return takes_clusters() && (16 % size == 0 || std::string_view(family) == "latent");
  }
  /// "sm_80 sm_90 compute_90"
  std::string targets() const;
};

/// Every row, in the order of the table. Generated.
std::span<const KernelRow> kernel_rows();

/// What a kernel has to do. A field of the "not applicable" kind matches rows of that kind only.
struct KernelQuery {
  const char* family;
  int head_dim = 0;
  int head_dim_vo = 0;
  const char* kv = "-";
  int rows = 0;
  const char* variant = "-";
};

/// The row with the smallest sufficient head_dim and, among those, the highest architecture that a
/// device of `cc` can run. Null: there is none.
const KernelRow* try_find(const KernelQuery& query, int cc);

/// The same; throws Error(kUnsupported) naming what was asked, the nearest row and the way out.
const KernelRow& find(const KernelQuery& query, int cc);

/// The table's name of an element type that can be K and V on a GPU; "-" for others.
const char* kv_name(DType type);

}  // namespace flashbsr::cuda
