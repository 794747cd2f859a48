# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
#
# cmake -DLOG=<file> -P compile_kernel.cmake -- <nvcc> <arguments>: runs the compiler, keeps what ptxas
# says of registers and spills in the log (tools/kernel_registers.py reads it), prints it in short.

set(command "")
set(found FALSE)
math(EXPR last "${CMAKE_ARGC} - 1")
foreach(i RANGE ${last})
  if(found)
    list(APPEND command "${CMAKE_ARGV${i}}")
  elseif(CMAKE_ARGV${i} STREQUAL "--")
    set(found TRUE)
  endif()
endforeach()

execute_process(COMMAND ${command} RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE text)
get_filename_component(name "${LOG}" NAME_WE)
if(NOT status EQUAL 0)
  message(NOTICE "${text}")
  message(FATAL_ERROR "${name}: nvcc failed (${status})")
endif()
file(WRITE "${LOG}" "${text}")

set(report "")
string(REGEX MATCHALL "for 'sm_[0-9a-z]+'|[0-9]+ bytes spill stores|Used [0-9]+ registers" facts "${text}")
foreach(fact IN LISTS facts)
  if(fact MATCHES "sm_[0-9a-z]+")
    string(APPEND report "  ${CMAKE_MATCH_0}")
  elseif(fact MATCHES "^([1-9][0-9]*) bytes")
    string(APPEND report " SPILLS ${CMAKE_MATCH_1} bytes")
  elseif(fact MATCHES "Used ([0-9]+)")
    string(APPEND report " ${CMAKE_MATCH_1} registers")
  endif()
endforeach()
string(REGEX MATCHALL "[^\n]*warning[^\n]*" warnings "${text}")
list(JOIN warnings "\n" warnings)
message(NOTICE "${name}${report}")
if(warnings)
  message(NOTICE "${warnings}")
endif()
