# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
#
# FLASHBSR_CUDA_ARCHS -> FLASHBSR_TARGETS, what machine code is made for; and what that will take.

# flashbsr_native_archs(<out>): those of this machine's GPUs, by the driver's nvidia-smi.
function(flashbsr_native_archs out)
  set(text "")
  find_program(smi nvidia-smi NO_CACHE)
  if(smi)
    execute_process(COMMAND "${smi}" --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE text ERROR_QUIET)
  endif()
  string(REGEX MATCHALL "[0-9]+\\.[0-9]" archs "${text}")
  if(NOT archs)
    message(FATAL_ERROR "FLASHBSR_CUDA_ARCHS: got 'native', and nvidia-smi names no GPU of this "
                        "machine; expected numbers such as 80;90")
  endif()
  string(REPLACE "." "" archs "${archs}")
  set(${out} "${archs}" PARENT_SCOPE)
endfunction()

# Gives FLASHBSR_TARGETS, the architectures that FLASHBSR_CUDA_ARCHS means, and the highest of them.
macro(flashbsr_choose_targets)
  set(FLASHBSR_TARGETS "${FLASHBSR_CUDA_ARCHS}")
  if(FLASHBSR_TARGETS STREQUAL "")
    set(FLASHBSR_TARGETS 75 80 90)
  elseif(FLASHBSR_TARGETS STREQUAL "native")
    flashbsr_native_archs(FLASHBSR_TARGETS)
  endif()
  foreach(arch IN LISTS FLASHBSR_TARGETS)
    if(NOT arch MATCHES "^[0-9]+$" OR NOT " ${FLASHBSR_KNOWN_ARCHS} " MATCHES " ${arch} ")
      message(FATAL_ERROR
              "FLASHBSR_CUDA_ARCHS: got '${FLASHBSR_TARGETS}'; expected native, or numbers "
              "separated by semicolons that ${FLASHBSR_CUDA_COMPILER} "
              "${FLASHBSR_CUDA_COMPILER_VERSION} knows: ${FLASHBSR_KNOWN_ARCHS}")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES FLASHBSR_TARGETS)
  list(SORT FLASHBSR_TARGETS COMPARE NATURAL)
  list(GET FLASHBSR_TARGETS -1 FLASHBSR_HIGHEST_ARCH)
endmacro()

# flashbsr_describe_effort(<images> <out>): "about 4 minutes on 2 cores". By the CPU seconds
# of an image, the mean of the table with its part of the C++ sources (docs/building.md, "Cost").
function(flashbsr_describe_effort images out)
  cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
  set(cores_text "${cores} cores")
  if(cores LESS 2)
    set(cores 1)
    set(cores_text "one core")
  endif()
  if(FLASHBSR_CUDA_COMPILER STREQUAL "nvrtc")
    set(tenths 16)
  else()
    set(tenths 17)
  endif()
  math(EXPR minutes "(${images} * ${tenths} / ${cores} + 300) / 600")
  if(minutes LESS 1)
    set(text "less than a minute")
  elseif(minutes EQUAL 1)
    set(text "about a minute")
  else()
    set(text "about ${minutes} minutes")
  endif()
  set(${out} "${text} on ${cores_text}" PARENT_SCOPE)
endfunction()
