# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
#
# What FLASHBSR_CUDA means. Gives FLASHBSR_NVCC (empty without a CUDA compiler).

if(NOT FLASHBSR_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "FLASHBSR_CUDA: got '${FLASHBSR_CUDA}'; expected AUTO, ON or OFF")
endif()

set(FLASHBSR_NVCC "")
if(NOT FLASHBSR_CUDA STREQUAL "OFF")
  find_program(FLASHBSR_NVCC_PROGRAM nvcc
               HINTS "$ENV{CUDACXX}" ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda
               PATH_SUFFIXES bin)
  if(FLASHBSR_NVCC_PROGRAM)
    set(FLASHBSR_NVCC "${FLASHBSR_NVCC_PROGRAM}")
  endif()
endif()

if(FLASHBSR_CUDA STREQUAL "ON")
  if(NOT FLASHBSR_NVCC)
    message(FATAL_ERROR
            "FLASHBSR_CUDA=ON, but no nvcc was found. Put nvcc on PATH or set CUDA_HOME, or build "
            "the CPU engine with FLASHBSR_CUDA=OFF (pip install . -C cmake.define.FLASHBSR_CUDA=OFF).")
  endif()
  message(FATAL_ERROR
          "FLASHBSR_CUDA=ON, but CUDA kernels are not part of flashbsr ${PROJECT_VERSION}. Build the "
          "CPU engine with FLASHBSR_CUDA=OFF or AUTO (pip install . -C cmake.define.FLASHBSR_CUDA=OFF).")
elseif(FLASHBSR_NVCC)
  message(STATUS "flashbsr: found ${FLASHBSR_NVCC}, but flashbsr ${PROJECT_VERSION} ships no CUDA "
                 "kernels yet; building the CPU engine")
else()
  message(STATUS "flashbsr: building the CPU engine")
endif()
