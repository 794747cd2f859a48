# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
#
# What FLASHBSR_CUDA, FLASHBSR_CUDA_TOOLKIT, FLASHBSR_CUDA_ARCHS and FLASHBSR_KERNELS mean. Gives FLASHBSR_CUDA_COMPILER,
# "nvcc", "nvrtc" or empty, and flashbsr_add_cuda_library. It makes device code only: everything on
# the host's side is plain C++ and needs one header of the toolkit, cuda.h, and no library of it.

set(FLASHBSR_NVCC_MINIMUM 12.4)
set(FLASHBSR_CUDA_TOOLKIT "" CACHE STRING
    "CUDA toolkit: a folder, 'pip' or 'nvrtc' for packages of Python, empty to look for nvcc")
set(FLASHBSR_CUDA_ARCHS "" CACHE STRING
    "Architectures to compile CUDA kernels for: 80;90, native (this machine's GPUs), empty: 75;80;90")
set(FLASHBSR_KERNELS "all" CACHE STRING
    "all rows of cpp/instances.txt, or common: rare ones are compiled when they are first used")
set(FLASHBSR_KERNEL_CACHE "" CACHE STRING
    "A folder where builds for several Pythons share their kernels; empty: none")

if(NOT FLASHBSR_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "FLASHBSR_CUDA: got '${FLASHBSR_CUDA}'; expected AUTO, ON or OFF")
endif()

# flashbsr_find_nvcc(<out> <out-problem>): an nvcc that serves, or why there is none.
function(flashbsr_find_nvcc out problem)
  set(${out} "" PARENT_SCOPE)
  set(${problem} "" PARENT_SCOPE)
  set(toolkit "${FLASHBSR_CUDA_TOOLKIT}")
  if(toolkit STREQUAL "pip")
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
    set(FLASHBSR_CUDA_COMPILER_VERSION "${CMAKE_MATCH_1}" PARENT_SCOPE)
    flashbsr_find_cuda_include("${nvcc}" include)
    if(include)
      execute_process(COMMAND "${nvcc}" --list-gpu-arch OUTPUT_VARIABLE known)
      string(REGEX MATCHALL "[0-9]+" known "${known}")
      list(JOIN known " " known)
      set(FLASHBSR_KNOWN_ARCHS "${known}" PARENT_SCOPE)
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

# flashbsr_find_nvrtc(<out> <out-problem>): whether the packages of Python have NVRTC, or why not.
function(flashbsr_find_nvrtc out problem)
  set(${out} "" PARENT_SCOPE)
  set(${problem} "" PARENT_SCOPE)
  execute_process(COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/nvrtc_packages.py"
                  OUTPUT_VARIABLE found ERROR_VARIABLE missing RESULT_VARIABLE status
                  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
  if(NOT status EQUAL 0)
    set(${problem} "${missing}" PARENT_SCOPE)
    return()
  endif()
  list(GET found 0 version)
  list(GET found 1 include)
  list(GET found 2 known)
  set(FLASHBSR_CUDA_COMPILER_VERSION "${version}" PARENT_SCOPE)
  set(FLASHBSR_CUDA_INCLUDE "${include}" PARENT_SCOPE)
  set(FLASHBSR_KNOWN_ARCHS "${known}" PARENT_SCOPE)
  set(${out} "${Python_EXECUTABLE}" PARENT_SCOPE)
endfunction()

set(FLASHBSR_CUDA_COMPILER "")
if(NOT FLASHBSR_CUDA STREQUAL "OFF")
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)  # it runs the compiler
endif()
if(NOT FLASHBSR_CUDA STREQUAL "OFF")
  set(kind nvcc)
  if(FLASHBSR_CUDA_TOOLKIT STREQUAL "nvrtc")
    set(kind nvrtc)
  endif()
  cmake_language(CALL flashbsr_find_${kind} found problem)
  if(found)
    set(FLASHBSR_CUDA_COMPILER ${kind})
    set(FLASHBSR_NVCC "${found}")
  elseif(FLASHBSR_CUDA STREQUAL "ON" OR FLASHBSR_CUDA_TOOLKIT)
    message(FATAL_ERROR
            "FLASHBSR_CUDA=${FLASHBSR_CUDA}: ${problem}. Or build the CPU engine with "
            "FLASHBSR_CUDA=OFF (pip install . -C cmake.define.FLASHBSR_CUDA=OFF).")
  endif()
endif()

if(NOT FLASHBSR_CUDA_COMPILER)
  if(problem)
    message(STATUS "flashbsr: no CUDA kernels, ${problem}")
  endif()
  message(STATUS "flashbsr: building the CPU engine")
  return()
endif()

include(cmake/archs.cmake)
flashbsr_choose_targets()
message(STATUS "flashbsr: CUDA kernels by ${FLASHBSR_CUDA_COMPILER} ${FLASHBSR_CUDA_COMPILER_VERSION} (${found})")

# Small wheels: every image is compressed, and decompressed when its kernel is first used.
if(FLASHBSR_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
  set(FLASHBSR_NVCC_COMPRESS --compress-mode=size)
else()
  set(FLASHBSR_NVCC_COMPRESS -Xfatbin=-compress-all)
endif()

include(cmake/instances.cmake)

# Each kernel is looked at after a change of any: the script finds those that include it. A depfile would
# bring the path of CMake into every command, and that moves with each isolated build.
file(GLOB_RECURSE FLASHBSR_DEVICE_HEADERS CONFIGURE_DEPENDS
     "${PROJECT_SOURCE_DIR}/include/flashbsr/*.h")
list(FILTER FLASHBSR_DEVICE_HEADERS EXCLUDE REGEX "/include/flashbsr/(cpu|plan)/")

# flashbsr_compile_kernel(<name> <source> <sass> <ptx>): <name>.fatbin and its log beside the source.
function(flashbsr_compile_kernel name source sass ptx)
  get_filename_component(folder "${source}" DIRECTORY)
  set(base "${folder}/${name}")
  set(scripts "${PROJECT_SOURCE_DIR}/cmake/compile_kernel.py" "${PROJECT_SOURCE_DIR}/cmake/nvrtc_packages.py"
              "${PROJECT_SOURCE_DIR}/cmake/nvcc/cuda_runtime.h")
  set(compiler --compiler "${FLASHBSR_CUDA_COMPILER} ${FLASHBSR_CUDA_COMPILER_VERSION}")
  set(python "${Python_EXECUTABLE}")
  if(FLASHBSR_CUDA_COMPILER STREQUAL "nvcc")
    list(APPEND python -I -S)  # it needs no packages, and begins in half of the time
    list(APPEND compiler --nvcc "${FLASHBSR_NVCC}" --ccbin "${CMAKE_CXX_COMPILER}"
                         "--compress=${FLASHBSR_NVCC_COMPRESS}")
  endif()
  add_custom_command(
    OUTPUT "${base}.fatbin"
    BYPRODUCTS "${base}.log"
    COMMAND ${python} "${PROJECT_SOURCE_DIR}/cmake/compile_kernel.py" "${source}"
            "${base}.fatbin" --include "${PROJECT_SOURCE_DIR}/include" ${compiler}
            --sass ${sass} --ptx ${ptx} "--cache=${FLASHBSR_KERNEL_CACHE}"
    DEPENDS "${source}" ${scripts} ${FLASHBSR_DEVICE_HEADERS}
    COMMENT "CUDA kernel ${name}"
    VERBATIM)
endfunction()

# flashbsr_add_cuda_library(<target> <source>...): the host's side and the embedded kernels.
function(flashbsr_add_cuda_library target)
  flashbsr_add_kernels("${PROJECT_SOURCE_DIR}/cpp/instances.txt" generated)
  add_library(${target} OBJECT ${ARGN} ${generated})
  target_link_libraries(${target} PUBLIC flashbsr_headers ${CMAKE_DL_LIBS})
  # A copy: packages of an isolated build lie at another place each time. It includes nothing of CUDA's.
  file(MAKE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/cuda")
  file(COPY_FILE "${FLASHBSR_CUDA_INCLUDE}/cuda.h" "${CMAKE_CURRENT_BINARY_DIR}/cuda/cuda.h" ONLY_IF_DIFFERENT)
  target_include_directories(${target} SYSTEM PRIVATE "${CMAKE_CURRENT_BINARY_DIR}/cuda")
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/cpp")
  flashbsr_compile_options(${target})
endfunction()
