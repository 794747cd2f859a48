# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
#
# The nanobind module and its type stub.

# Interpreter and headers; the stable ABI component where Python has one (3.12 and later).
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module
             OPTIONAL_COMPONENTS Development.SABIModule)
execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
                OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_folder
                COMMAND_ERROR_IS_FATAL ANY)
if(under_skbuild)
  # An isolated build finds it at another place each time, and would compile all that includes it anew.
  get_filename_component(nanobind_package "${nanobind_folder}" DIRECTORY)
  set(nanobind_folder "${CMAKE_CURRENT_BINARY_DIR}/nanobind/cmake")
  execute_process(COMMAND "${CMAKE_COMMAND}" -E copy_directory_if_different "${nanobind_package}"
                          "${CMAKE_CURRENT_BINARY_DIR}/nanobind"
                  COMMAND_ERROR_IS_FATAL ANY)
endif()
find_package(nanobind CONFIG REQUIRED PATHS "${nanobind_folder}" NO_DEFAULT_PATH)

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

# flashbsr_add_sbom(): what the wheel is made of, among its metadata (PEP 770).
function(flashbsr_add_sbom)
  string(STRIP "${FLASHBSR_CUDA_COMPILER} ${FLASHBSR_CUDA_COMPILER_VERSION}" cuda)
  set(output "${CMAKE_CURRENT_BINARY_DIR}/flashbsr.cdx.json")
  execute_process(COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/sbom.py" "${output}"
                          --version "${PROJECT_VERSION}" "--cuda=${cuda}"
                          --compiler "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
                  COMMAND_ERROR_IS_FATAL ANY)
  install(FILES "${output}" DESTINATION "${SKBUILD_METADATA_DIR}/sboms")
endfunction()
