// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Products of few query rows with int8 and int4 codes as integers, where the level has tiles (AMX).
#pragma once

#if defined(__AMX_INT8__)
#include <flashbsr/cpu/tiles.h>
#else
#include <flashbsr/cpu/codes.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

inline constexpr bool kHasIntegers = false;

FLASHBSR_FN bool in_integers(const PagedView&, const PagedView&) { return false; }
inline void begin_tiles() {}
inline void end_tiles() {}

struct IntegerMemory {
  int64_t bytes = 0;

  IntegerMemory(char*, int, int) {}
};

// Names for code that this level leaves out.
void split_query(const float*, int, int, int, const IntegerMemory&);
template <DType T>
void score_integers(const Operand&, int, const float*, int, int, const IntegerMemory&, float*, int);
template <DType T>
void interleave_values(const Operand&, int, int8_t*);
template <DType T>
void accumulate_integers(const Operand&, int, const float*, int, const float*, int, int,
                         const int8_t*, const IntegerMemory&, float*, int64_t);

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
#endif
