# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
#
# The nanobind module and its type stub.

# Interpreter and headers; the stable ABI component where Python has one (3.12 and later).
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module
             OPTIONAL_COMPONENTS Development.SABIModule)
if(NOT under_skbuild)  # scikit-build-core puts nanobind on the prefix path itself
  execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
                  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT
                  COMMAND_ERROR_IS_FATAL ANY)
endif()
find_package(nanobind CONFIG REQUIRED)

function(flashbsr_add_python_module target)
  # NOMINSIZE: the planner lives here, and it is timed in microseconds.
  nanobind_add_module(${target} STABLE_ABI FREE_THREADED NB_STATIC NOMINSIZE NB_SUPPRESS_WARNINGS
                      NB_DOMAIN flashbsr ${ARGN})
  flashbsr_compile_options(${target})
  target_link_libraries(${target} PRIVATE flashbsr_headers flashbsr_cpu)
  if(TARGET flashbsr_cuda)
    target_link_libraries(${target} PRIVATE flashbsr_cuda)
  endif()
  nanobind_add_stub(${target}_stub MODULE ${target} OUTPUT ${target}.pyi DEPENDS ${target}
                    PATTERN_FILE "${PROJECT_SOURCE_DIR}/cmake/_core.pat"
                    PYTHON_PATH $<TARGET_FILE_DIR:${target}>)
  install(TARGETS ${target} LIBRARY DESTINATION .)
  install(FILES "${CMAKE_CURRENT_BINARY_DIR}/${target}.pyi" DESTINATION .)
endfunction()
