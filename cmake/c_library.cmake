# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
#
# libflashbsr: the functions of include/flashbsr/c_api.h, shared (flashbsr::c) and static
# (flashbsr::c_static), from the same objects.

file(STRINGS include/flashbsr/c_api.h abi REGEX "^#define FBSR_ABI_VERSION ")
string(REGEX REPLACE ".* " "" abi "${abi}")

add_library(flashbsr_c_objects OBJECT ${flashbsr_api} cpp/c/attention.cpp cpp/c/options.cpp
                                      cpp/c/ops.cpp)
target_link_libraries(flashbsr_c_objects PRIVATE flashbsr_headers flashbsr_cpu)
flashbsr_compile_options(flashbsr_c_objects)
set(objects $<TARGET_OBJECTS:flashbsr_c_objects> $<TARGET_OBJECTS:flashbsr_cpu>)
if(TARGET flashbsr_cuda)
  list(APPEND objects $<TARGET_OBJECTS:flashbsr_cuda>)
endif()

add_library(flashbsr_c SHARED ${objects})
add_library(flashbsr_c_static STATIC ${objects})
set_target_properties(flashbsr_c PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${abi})
if(NOT APPLE)
  # Templates of the standard library are visible whatever the objects say: a list of what is
  # exported. Apple's linker does not read such lists.
  set(exported "${PROJECT_SOURCE_DIR}/cmake/libflashbsr.map")
  target_link_options(flashbsr_c PRIVATE "LINKER:--version-script=${exported}" "LINKER:-z,defs")
  set_target_properties(flashbsr_c PROPERTIES LINK_DEPENDS "${exported}")
endif()
foreach(kind IN ITEMS c c_static)
  add_library(flashbsr::${kind} ALIAS flashbsr_${kind})
  set_target_properties(flashbsr_${kind} PROPERTIES EXPORT_NAME ${kind} OUTPUT_NAME flashbsr
                                                    LINKER_LANGUAGE CXX)
  target_include_directories(
    flashbsr_${kind} INTERFACE "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
                               "$<INSTALL_INTERFACE:include>")
  target_link_libraries(flashbsr_${kind} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
endforeach()

if(FLASHBSR_INSTALL)
  install(TARGETS flashbsr_c flashbsr_c_static EXPORT flashbsrTargets LIBRARY DESTINATION lib
          ARCHIVE DESTINATION lib)
  configure_file(cmake/flashbsr.pc.in flashbsr.pc @ONLY)
  install(FILES "${CMAKE_CURRENT_BINARY_DIR}/flashbsr.pc" DESTINATION lib/pkgconfig)
endif()
