// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Linux has 8 KB for a thread's tiles (AMX) only where a process has asked for it (Linux 5.16).
#pragma once

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flashbsr::cpu {

/// Asks once per translation unit, which all get the same answer: one instance for all would be
/// that of a SIMD level that this machine need not have. Threads and children have the permission
/// too.
static inline bool may_use_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  static const bool granted = [] {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return granted;
#else
  return false;
#endif
}

}  // namespace flashbsr::cpu
