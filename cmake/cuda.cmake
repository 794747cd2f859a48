# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
#
# What FLASHBSR_CUDA, FLASHBSR_CUDA_TOOLKIT and FLASHBSR_CUDA_ARCHS mean. Gives FLASHBSR_NVCC, empty
# without a CUDA compiler, and flashbsr_add_cuda_library. nvcc makes device code only: everything on
# the host's side is plain C++ and needs one header of the toolkit, cuda.h, and no library of it.

set(FLASHBSR_NVCC_MINIMUM 12.4)
set(FLASHBSR_CUDA_TOOLKIT "" CACHE STRING
    "CUDA toolkit: a folder, 'pip' for the nvidia-cuda-* packages of Python, empty to look for nvcc")
set(FLASHBSR_CUDA_ARCHS "75;80;90" CACHE STRING
    "Architectures to compile CUDA kernels for, such as 80;90")

if(NOT FLASHBSR_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "FLASHBSR_CUDA: got '${FLASHBSR_CUDA}'; expected AUTO, ON or OFF")
endif()

# flashbsr_find_nvcc(<out> <out-problem>): an nvcc that serves, or why there is none.
function(flashbsr_find_nvcc out problem)
  set(${out} "" PARENT_SCOPE)
  set(${problem} "" PARENT_SCOPE)
  set(toolkit "${FLASHBSR_CUDA_TOOLKIT}")
  if(toolkit STREQUAL "pip")
    find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
    # The packages of CUDA 13 share one folder; those of CUDA 12 lack cicc and are no compiler.
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
              "import nvidia; print(*[p + '/cu13' for p in nvidia.__path__], sep=';')"
      OUTPUT_VARIABLE folders OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_program(nvcc nvcc PATHS ${folders} PATH_SUFFIXES bin NO_DEFAULT_PATH NO_CACHE)
    string(CONCAT missing
           "no nvcc in the packages of ${Python_EXECUTABLE}. FLASHBSR_CUDA_TOOLKIT=pip in the "
           "environment lets pip bring them for the build; with --no-build-isolation pip install "
           "nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl")
  elseif(toolkit)
    find_program(nvcc nvcc PATHS "${toolkit}" PATH_SUFFIXES bin NO_DEFAULT_PATH NO_CACHE)
    set(missing "no bin/nvcc in FLASHBSR_CUDA_TOOLKIT=${toolkit}")
  else()
    set(hints "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}")
    if(DEFINED ENV{CUDACXX})
      get_filename_component(folder "$ENV{CUDACXX}" DIRECTORY)
      list(PREPEND hints "${folder}")
    endif()
    find_program(nvcc nvcc HINTS ${hints} PATHS /usr/local/cuda PATH_SUFFIXES bin NO_CACHE)
    set(missing "no nvcc was found: put it on PATH or set CUDA_HOME or FLASHBSR_CUDA_TOOLKIT")
  endif()
  if(NOT nvcc)
    set(${problem} "${missing}" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE text ERROR_QUIET)
  if(NOT text MATCHES "release [0-9.]+, V([0-9]+\\.[0-9]+\\.[0-9]+)")
    set(${problem} "'${nvcc} --version' does not say its version" PARENT_SCOPE)
  elseif(CMAKE_MATCH_1 VERSION_LESS FLASHBSR_NVCC_MINIMUM)
    set(${problem} "${nvcc} is ${CMAKE_MATCH_1}; ${FLASHBSR_NVCC_MINIMUM} or later is needed"
        PARENT_SCOPE)
  else()
    set(FLASHBSR_NVCC_VERSION "${CMAKE_MATCH_1}" PARENT_SCOPE)
    flashbsr_find_cuda_include("${nvcc}" include)
    if(include)
      set(FLASHBSR_CUDA_INCLUDE "${include}" PARENT_SCOPE)
      set(${out} "${nvcc}" PARENT_SCOPE)
    else()
      set(${problem} "${nvcc} has no cuda.h beside it" PARENT_SCOPE)
    endif()
  endif()
endfunction()

# flashbsr_find_cuda_include(<nvcc> <out>): the folder of cuda.h. nvcc knows it, wherever a script or
# a link on PATH leads.
function(flashbsr_find_cuda_include nvcc out)
  execute_process(COMMAND "${nvcc}" --dryrun -x cu -E /dev/null
                  OUTPUT_VARIABLE text ERROR_VARIABLE text)
  string(REGEX MATCHALL "\"-I[^\"]+\"" folders "${text}")
  string(REGEX MATCHALL "TOP=[^\n]+" top "${text}")
  string(REGEX REPLACE "\"-I|\"" "" folders "${folders}")
  string(REGEX REPLACE "TOP=" "" top "${top}")
  find_path(found cuda.h PATHS ${folders} ${top} PATH_SUFFIXES include NO_DEFAULT_PATH NO_CACHE)
  if(found)
    get_filename_component(found "${found}" REALPATH)
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

set(FLASHBSR_NVCC "")
if(NOT FLASHBSR_CUDA STREQUAL "OFF")
  flashbsr_find_nvcc(FLASHBSR_NVCC problem)
  if(NOT FLASHBSR_NVCC AND (FLASHBSR_CUDA STREQUAL "ON" OR FLASHBSR_CUDA_TOOLKIT))
    message(FATAL_ERROR
            "FLASHBSR_CUDA=${FLASHBSR_CUDA}: ${problem}. Or build the CPU engine with "
            "FLASHBSR_CUDA=OFF (pip install . -C cmake.define.FLASHBSR_CUDA=OFF).")
  endif()
endif()

if(NOT FLASHBSR_NVCC)
  if(problem)
    message(STATUS "flashbsr: no CUDA kernels, ${problem}")
  endif()
  message(STATUS "flashbsr: building the CPU engine")
  return()
endif()

execute_process(COMMAND "${FLASHBSR_NVCC}" --list-gpu-arch OUTPUT_VARIABLE known)
foreach(arch IN LISTS FLASHBSR_CUDA_ARCHS)
  if(NOT arch MATCHES "^[0-9]+$" OR NOT known MATCHES "compute_${arch}\n")
    string(REGEX REPLACE "[ \t\r\n]*compute_" " " known "${known}")
    string(STRIP "${known}" known)
    message(FATAL_ERROR "FLASHBSR_CUDA_ARCHS: got '${FLASHBSR_CUDA_ARCHS}'; expected numbers separated "
                        "by semicolons that nvcc ${FLASHBSR_NVCC_VERSION} knows: ${known}")
  endif()
endforeach()
list(REMOVE_DUPLICATES FLASHBSR_CUDA_ARCHS)
list(SORT FLASHBSR_CUDA_ARCHS COMPARE NATURAL)
list(GET FLASHBSR_CUDA_ARCHS -1 FLASHBSR_HIGHEST_ARCH)
message(STATUS "flashbsr: CUDA kernels by ${FLASHBSR_NVCC} (${FLASHBSR_NVCC_VERSION})")

# Small wheels: every image is compressed, and decompressed when its kernel is first used.
if(FLASHBSR_NVCC_VERSION VERSION_GREATER_EQUAL 12.8)
  set(FLASHBSR_NVCC_COMPRESS --compress-mode=size)
else()
  set(FLASHBSR_NVCC_COMPRESS -Xfatbin=-compress-all)
endif()

include(cmake/instances.cmake)

# flashbsr_compile_kernel(<name> <source> <sass> <ptx>): <name>.fatbin and its log beside the source.
function(flashbsr_compile_kernel name source sass ptx)
  set(targets "")
  foreach(target IN LISTS sass)
    list(APPEND targets -gencode arch=compute_${target},code=sm_${target})
  endforeach()
  if(ptx)
    list(APPEND targets -gencode arch=compute_${ptx},code=compute_${ptx})
  endif()
  get_filename_component(folder "${source}" DIRECTORY)
  set(base "${folder}/${name}")
  add_custom_command(
    OUTPUT "${base}.fatbin"
    BYPRODUCTS "${base}.log"
    COMMAND "${CMAKE_COMMAND}" "-DLOG=${base}.log" -P "${PROJECT_SOURCE_DIR}/cmake/compile_kernel.cmake" --
            "${FLASHBSR_NVCC}" -fatbin ${targets} ${FLASHBSR_NVCC_COMPRESS} -std=c++20 -O3
            -Xptxas=-v -ccbin "${CMAKE_CXX_COMPILER}" -allow-unsupported-compiler
            "-I${PROJECT_SOURCE_DIR}/include" -MMD -MF "${base}.d" -MT "${base}.fatbin"
            "${source}" -o "${base}.fatbin"
    DEPENDS "${source}" "${PROJECT_SOURCE_DIR}/cmake/compile_kernel.cmake"
    DEPFILE "${base}.d"
    COMMENT "CUDA kernel ${name}"
    VERBATIM)
endfunction()

# flashbsr_add_cuda_library(<target> <source>...): the host's side and the embedded kernels.
function(flashbsr_add_cuda_library target)
  flashbsr_add_kernels("${PROJECT_SOURCE_DIR}/cpp/instances.txt" generated)
  add_library(${target} OBJECT ${ARGN} ${generated})
  target_link_libraries(${target} PUBLIC flashbsr_headers ${CMAKE_DL_LIBS})
  target_include_directories(${target} SYSTEM PRIVATE "${FLASHBSR_CUDA_INCLUDE}")
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/cpp")
  flashbsr_compile_options(${target})
endfunction()
