# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
#
# One translation unit per SIMD level, so that one binary runs on every CPU.
#
# Gives FLASHBSR_LEVELS, the levels beyond the baseline that the compiler and the target have, and
# FLASHBSR_FLAGS_<level>. cpp/cpu/dispatch.cpp sees them as FLASHBSR_HAVE_<LEVEL>. To add a level: a
# file cpp/cpu/kernels_<level>.cpp and a line below.

include(CheckCXXSourceCompiles)

set(FLASHBSR_LEVELS "")
function(flashbsr_level level)
  string(TOUPPER ${level} name)
  string(JOIN " " CMAKE_REQUIRED_FLAGS ${ARGN})
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)  # compiles, and links nothing
  check_cxx_source_compiles("int main() { return 0; }" FLASHBSR_COMPILER_HAS_${name})
  if(FLASHBSR_COMPILER_HAS_${name})
    set(FLASHBSR_LEVELS ${FLASHBSR_LEVELS} ${level} PARENT_SCOPE)
    set(FLASHBSR_FLAGS_${level} ${ARGN} PARENT_SCOPE)
  else()
    message(STATUS "flashbsr: kernels_${level} left out, the compiler does not take ${ARGN}")
  endif()
endfunction()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
  set(avx2 -mavx2 -mfma -mf16c)
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
  flashbsr_level(avx2 ${avx2})
  flashbsr_level(avx512 ${avx512})
  flashbsr_level(avx512_bf16 ${avx512} -mavx512bf16)
  flashbsr_level(avx512_amx ${avx512} -mavx512bf16 -mamx-tile -mamx-int8)
endif()

function(flashbsr_compile_options target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  # Traps and errno are not observed; infinities and NaN are, so no -ffast-math.
  target_compile_options(${target} PRIVATE -Wall -Wextra -fno-math-errno -fno-trapping-math
                                           $<$<CONFIG:Release>:-O3>)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_EXTENSIONS OFF
                                             CXX_VISIBILITY_PRESET hidden
                                             VISIBILITY_INLINES_HIDDEN ON)
endfunction()

function(flashbsr_add_cpu_library target)
  add_library(${target} OBJECT ${ARGN} cpp/cpu/kernels_baseline.cpp)
  set_target_properties(${target} PROPERTIES UNITY_BUILD OFF)  # a level is a translation unit
  target_link_libraries(${target} PUBLIC flashbsr_headers ${CMAKE_DL_LIBS})
  flashbsr_compile_options(${target})
  foreach(level IN LISTS FLASHBSR_LEVELS)
    string(TOUPPER ${level} name)
    target_sources(${target} PRIVATE cpp/cpu/kernels_${level}.cpp)
    set_source_files_properties(cpp/cpu/kernels_${level}.cpp
                                PROPERTIES COMPILE_OPTIONS "${FLASHBSR_FLAGS_${level}}")
    target_compile_definitions(${target} PUBLIC FLASHBSR_HAVE_${name}=1)
    # The same flags for what is compiled at run time.
    string(JOIN " " flags ${FLASHBSR_FLAGS_${level}})
    target_compile_definitions(${target} PRIVATE "FLASHBSR_FLAGS_${name}=\"${flags}\"")
  endforeach()
endfunction()
