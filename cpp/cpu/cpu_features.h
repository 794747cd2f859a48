// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What an x86 CPU and its operating system can run, by cpuid and xgetbv. Not by
// __builtin_cpu_supports: it asks a library of the compiler's, and where that is missing (zig c++,
// which wheels may be built with) it answers 0, at a quarter of the speed and without a word.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace flashbsr::cpu {

/// The words that decide, as the CPU gives them; 0 where it has no such leaf.
struct CpuidWords {
  uint32_t leaf1_ecx = 0;
  uint32_t leaf7_ebx = 0;
  uint32_t leaf7_edx = 0;
  uint32_t leaf7_1_eax = 0;
  uint32_t xcr0 = 0;  ///< registers that the operating system saves; 0: it does not say (OSXSAVE)
};

/// A SIMD level is all instructions that cmake/isa.cmake lets its sources use.
struct CpuFeatures {
  bool avx2 = false;  ///< with FMA and F16C
  bool avx512 = false;
  bool avx512_bf16 = false;
  bool avx512_amx = false;  ///< tiles of int8; may_use_tiles() too
};

constexpr CpuFeatures features_of(const CpuidWords& words) {
  const auto all = [](uint32_t word, auto... bits) {
    const uint32_t wanted = ((uint32_t{1} << bits) | ...);
    return (word & wanted) == wanted;
  };
  CpuFeatures f;
  // XMM and YMM are saved; FMA, AVX, F16C; AVX2.
  f.avx2 = all(words.xcr0, 1, 2) && all(words.leaf1_ecx, 12, 28, 29) && all(words.leaf7_ebx, 5);
  // Masks and both halves of ZMM are saved; F, DQ, BW, VL.
  f.avx512 = f.avx2 && all(words.xcr0, 5, 6, 7) && all(words.leaf7_ebx, 16, 17, 30, 31);
  f.avx512_bf16 = f.avx512 && all(words.leaf7_1_eax, 5);
  // Tiles and their shapes are saved; tiles, int8 in them.
  f.avx512_amx = f.avx512_bf16 && all(words.xcr0, 17, 18) && all(words.leaf7_edx, 24, 25);
  return f;
}

#if defined(__x86_64__)
inline CpuidWords read_cpuid() {
  CpuidWords words;
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return words;
  words.leaf1_ecx = ecx;
  if (ecx >> 27 & 1) asm volatile("xgetbv" : "=a"(words.xcr0), "=d"(edx) : "c"(0));
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return words;
  words.leaf7_ebx = ebx;
  words.leaf7_edx = edx;
  const uint32_t subleaves = eax;
  if (subleaves >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) words.leaf7_1_eax = eax;
  return words;
}
#else
inline CpuidWords read_cpuid() { return {}; }
#endif

}  // namespace flashbsr::cpu
