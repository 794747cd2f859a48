// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What nvcc includes before every kernel, found before the toolkit's own of that name: of CUDA's
// headers those for code of the device alone, and of its mathematics what these and kernels call.
// The whole takes as long as a small kernel: 0.1 CPU seconds more, for each of 250 passes.
#pragma once

#define __CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__
#include "crt/host_defines.h"
#include "vector_types.h"

extern "C" {
__host__ __device__ __device_builtin__ void* memcpy(void*, const void*, decltype(sizeof(0)));
__host__ __device__ __device_builtin__ float copysignf(float, float);
__host__ __device__ __device_builtin__ float exp2f(float);
__host__ __device__ __device_builtin__ float fabsf(float);
__host__ __device__ __device_builtin__ float floorf(float);
__host__ __device__ __device_builtin__ float log2f(float);
__host__ __device__ __device_builtin__ float logf(float);
__host__ __device__ __device_builtin__ void sincospif(float, float*, float*);
__host__ __device__ __device_builtin__ float sqrtf(float);
}
__host__ __device__ inline int max(int a, int b) { return a < b ? b : a; }
__host__ __device__ inline int min(int a, int b) { return b < a ? b : a; }

#include "vector_functions.h"
#include "crt/device_functions.h"
#include "device_launch_parameters.h"
