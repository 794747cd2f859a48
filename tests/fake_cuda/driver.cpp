// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A libcuda.so.1 for machines without a GPU, to test the host's side of the CUDA engine. "Device"
// memory is host memory, and an attention kernel is the CPU engine on the same KernelArgs.
//
// It is as lazy as the model allows: work on a stream runs when somebody waits for it, and then no
// work of another stream runs unless an event asks for it. So a missing wait between streams, or a
// pinned buffer that is written again too early, changes results every time and not now and then.
// What is not allowed during a capture fails as in the real driver.
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <flashbsr/core/launch.h>
#include <flashbsr/core/resolve.h>
#include <flashbsr/cpu/engine.h>
#include <flashbsr/cpu/kernels.h>
#include <flashbsr/kernel/ops/args.h>

#include "apart.h"
#include "dense_pages.h"
#include "output_rows.h"
#include "pairs.h"
#include "poison.h"
#include "state.h"
#include "tensor_map.h"

namespace {

using namespace fake;

/// Of the fake GPUs, 90 for 9.0.
int from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}
int capability() { return from_environment("FAKE_CUDA_CAPABILITY", 90); }
int multiprocessors() { return from_environment("FAKE_CUDA_SMS", 6); }
/// Of a block, at most.
int shared_memory() {
  switch (capability()) {
    case 75: return 64 << 10;
    case 80:
    case 87: return 163 << 10;
    case 90:
    case 100:
    case 103: return 227 << 10;
    default: return 99 << 10;
  }
}

/// Lives as long as the process: streams' threads may outlive main().
PoisonedMemory& device_memory() {
  static auto* const memory = new PoisonedMemory(kPoison);
  return *memory;
}

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

/// The CPU's code of a kernel's variant: built in, or what fake_variant() was told.
const flashbsr::cpu::KernelTable& table_of(const std::string& kernel) {
  for (const auto& [name, table] : state().variants) {
    for (const char* code : {"", "_masked", "_gather", "_masked_gather"}) {
      if (kernel.ends_with("_" + name + code)) return table;
    }
  }
  return flashbsr::cpu::kernel_table();
}

void attend(const flashbsr::KernelArgs& args, const flashbsr::cpu::KernelTable& table, bool sigmoid,
            bool narrow) {
  flashbsr::cpu::Engine engine(table, 1);
  // Kernels have their page ids from the arguments, which need not be the plan's.
  const int32_t* plan = reinterpret_cast<const int32_t*>(args.header);
  std::vector<int32_t> copy(plan, plan + args.header->total_size);
  if (args.kv_indices) {
    std::copy_n(args.kv_indices, args.header->num_kv_indices,
                copy.begin() + args.header->off_kv_indices);
  }
  fake::keep_items(copy, args, narrow);
  fake::attend_pairs(args, [&](const flashbsr::Params& params) {
    engine.run(flashbsr::PlanView{copy.data()}, params,
               sigmoid ? flashbsr::Activation::kSigmoid : flashbsr::Activation::kSoftmax);
  });
  for (int64_t i = 0; i < flashbsr::num_counters(*args.header); ++i) {
    if (args.counters[i] != 0) std::abort();  // must be zero before a kernel
  }
}

void check_pages(const flashbsr::ops::CheckPagesArgs& a) {
  for (int64_t i = 0; i < a.header->num_kv_indices; ++i) {
    const int32_t page = a.kv_indices[i];
    if (page >= 0 && page < a.pages) continue;
    *a.first_bad =
        std::min(*a.first_bad, static_cast<uint64_t>(i) << 32 | static_cast<uint32_t>(page));
  }
}

}  // namespace

extern "C" {

// --- What tests ask and do

long fake_calls(const char* name) { return state().calls[name]; }
const char* fake_kernel() { return state().last_kernel.c_str(); }
int fake_grid() { return state().last_grid; }
int fake_threads() { return state().last_threads; }
int fake_shared() { return state().last_shared; }
int fake_overlap() { return state().last_overlap; }
int fake_programmatic() { return state().last_programmatic; }
int fake_cluster() { return state().last_cluster; }
int fake_path() { return state().last_path; }
int fake_box() { return state().last_box; }
/// Kernels of this variant of a user's compute with the CPU's shared object of it.
int fake_variant(const char* name, const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* symbol = library ? dlsym(library, "flashbsr_cpu_kernels") : nullptr;
  if (!symbol) return 1;
  flashbsr::cpu::KernelTable table =
      *reinterpret_cast<const flashbsr::cpu::KernelTable* (*)()>(symbol)();
  const flashbsr::cpu::KernelTable& own = flashbsr::cpu::kernel_table();
  if (table.lanes != own.lanes) return 2;  // another level's: it could not borrow blocks
  std::copy_n(own.blocks, 2, table.blocks);
  state().variants[name] = table;
  return 0;
}
void fake_corrupt_page(int index, int page) {
  const_cast<int32_t*>(state().last_pages)[index] = page;
}
void fake_refuse_maps_of(const void* array) { state().unmapped = array; }
void fake_memory_clock(int khz) { state().memory_khz = khz; }
void fake_drain() {
  const Call call("fake_drain");
  drain_all();
}
void fake_begin_capture(CUstream stream) {
  const Call call("fake_begin_capture");
  stream_of(stream).capturing = std::make_unique<Graph>();
  stream_of(stream).capturing->capture = state().next_capture++;
}
int fake_end_capture(CUstream stream) {
  const Call call("fake_end_capture");
  state().graphs.push_back(std::move(stream_of(stream).capturing));
  return static_cast<int>(state().graphs.size()) - 1;
}
void fake_replay(int graph, CUstream stream) {
  const Call call("fake_replay");
  for (const Op& op : state().graphs[static_cast<size_t>(graph)]->ops) put(stream_of(stream), op);
}
/// The driver tells about user objects on a thread of its own.
void fake_destroy_graph(int graph) {
  std::unique_ptr<Graph> gone;
  {
    const Call call("fake_destroy_graph");
    drain_all();
    gone = std::move(state().graphs[static_cast<size_t>(graph)]);
  }
  std::thread([&] {
    in_destructor = true;
    for (UserObject* object : gone->kept) {
      object->destroy(object->data);
      delete object;
    }
  }).join();
}

// --- The driver

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
                                                         : "CUDA_ERROR_FAKE";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "fake", CUDA_SUCCESS; }
/// What NVRTC asks a driver for, and does without.
CUresult cuGetExportTable(const void** table, const CUuuid*) {
  return *table = nullptr, CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuDeviceGetCount(int* count) { return *count = kDevices, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int size, CUdevice) {
  std::strncpy(name, "Fake GPU", static_cast<size_t>(size));
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  return *bytes = size_t{1} << 32, CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability() / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability() % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = multiprocessors(); break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = shared_memory(); break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      *value = shared_memory() + 1024;
      break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = state().memory_khz; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 6144; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return *context = reinterpret_cast<CUcontext>(context_of + device), CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = contexts.empty() ? nullptr : reinterpret_cast<CUcontext>(context_of + contexts.back());
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) {
  return *device = contexts.empty() ? 0 : contexts.back(), CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  contexts.push_back(static_cast<int>(reinterpret_cast<char*>(context) - context_of));
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext*) { return contexts.pop_back(), CUDA_SUCCESS; }
CUresult cuCtxSynchronize() {
  const Call call("cuCtxSynchronize");
  return drain_all(), CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* image, CUjit_option*, void**, unsigned,
                           CUlibraryOption*, void**, unsigned) {
  const Call call("cuLibraryLoadData");
  if (forbidden()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (!image) return CUDA_ERROR_INVALID_IMAGE;
  return *library = nullptr, CUDA_SUCCESS;
}
CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char* name) {
  const Call call("cuLibraryGetKernel");
  const std::string& kept = *state().names.insert(name).first;
  *kernel = reinterpret_cast<CUkernel>(const_cast<std::string*>(&kept));
  return CUDA_SUCCESS;
}
CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  return *function = reinterpret_cast<CUfunction>(kernel), CUDA_SUCCESS;
}
CUresult cuKernelGetAttribute(int* value, CUfunction_attribute, CUkernel, CUdevice) {
  return *value = 0, CUDA_SUCCESS;
}
CUresult cuKernelSetAttribute(CUfunction_attribute, int, CUkernel, CUdevice) {
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params,
                          void**) {
  const Call call("cuLaunchKernelEx");
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  const std::string& name = *reinterpret_cast<const std::string*>(function);
  state().last_kernel = name;
  state().last_grid = static_cast<int>(config->gridDimX);
  state().last_threads = static_cast<int>(config->blockDimX);
  state().last_shared = static_cast<int>(config->sharedMemBytes);
  state().last_programmatic = state().last_cluster = 0;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& a = config->attrs[i];
    if (a.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      state().last_programmatic = 1;
    if (a.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      state().last_cluster = static_cast<int>(a.value.clusterDim.x);
      if (config->gridDimX % a.value.clusterDim.x) return CUDA_ERROR_INVALID_VALUE;
    }
  }
  state().last_path = -1;
  Op op;
  const bool older = starts_with(name, "decode_") || starts_with(name, "prefill_") ||
                     starts_with(name, "latent_mma_");
  const bool latent = !older && starts_with(name, "latent_");
  const bool hopper = latent || starts_with(name, "hopper_") || starts_with(name, "mixed_");
  if (hopper) {
    const auto& args = *static_cast<const flashbsr::HopperArgs*>(params[0]);
    if (!fake::consistent(args)) return CUDA_ERROR_INVALID_VALUE;
    state().last_path = static_cast<int>(args.path);
    state().last_box = args.box_tokens;
  }
  if (!fake::pairs_consistent(name, params[0])) return CUDA_ERROR_INVALID_VALUE;
  if (hopper || older) {
    const auto args = *static_cast<const flashbsr::KernelArgs*>(params[0]);  // they begin with it
    state().last_pages = args.kv_indices;
    state().last_overlap = static_cast<int>(args.overlap);
    const bool sigmoid = name.find("sigmoid") != std::string::npos;
    const flashbsr::cpu::KernelTable& table = table_of(name);
    const bool narrow = starts_with(name, "decode");
    op.work = [=, &table] { attend(args, table, sigmoid, narrow); };
  } else if (name == "check_pages") {
    const auto args = *static_cast<const flashbsr::ops::CheckPagesArgs*>(params[0]);
    op.work = [=] { check_pages(args); };
  } else if (name == "clear_rows") {
    const auto args = *static_cast<const flashbsr::ops::ClearRowsArgs*>(params[0]);
    op.work = [=] { fake::clear_rows(args); };
  } else if (name == "quantize_outputs") {
    const auto args = *static_cast<const flashbsr::ops::QuantizeOutputsArgs*>(params[0]);
    op.work = [=] { fake::quantize_outputs(args); };
  } else if (name.rfind("dequantize_pages", 0) == 0) {
    const auto args = *static_cast<const flashbsr::ops::DequantizePagesArgs*>(params[0]);
    op.work = [=] { fake::dequantize_pages(args); };
  } else if (name == "resolve") {
    const auto args = *static_cast<const flashbsr::ops::ResolveArgs*>(params[0]);
    // As a grid of several threads does, in some order.
    op.work = [=] {
      const flashbsr::BoundPlan plan(args.plan);
      for (int thread = 4; plan.bound() && thread >= 0; --thread) {
        plan.resolve(args.lengths, thread, 5);
      }
    };
  } else {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  put(stream_of(config->hStream), std::move(op));
  return CUDA_SUCCESS;
}

/// As many as there are SMs for, in rows of 16 as an H200's.
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig* config) {
  const Call call("cuOccupancyMaxActiveClusters");
  const int size = static_cast<int>(config->attrs[0].value.clusterDim.x);
  const int sms = multiprocessors();
  return *clusters = sms / 16 * (16 / size) + sms % 16 / size, CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* extents, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  const Call call("cuTensorMapEncodeTiled");
  if (address == state().unmapped) return CUDA_ERROR_INVALID_VALUE;
  return fake::encode(map, type, rank, address, extents, strides, box, steps, interleave, swizzle,
                      fill)
             ? CUDA_SUCCESS
             : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes) {
  const Call call("cuMemAlloc");
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (forbidden()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  void* memory = device_memory().take(bytes);
  return *pointer = reinterpret_cast<CUdeviceptr>(memory),
         memory ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemFree_v2(CUdeviceptr pointer) {
  const Call call("cuMemFree");
  if (forbidden()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  drain_all();
  return device_memory().give_back(reinterpret_cast<void*>(pointer)), CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  const Call call("cuMemHostAlloc");
  if (forbidden()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  *pointer = std::malloc(bytes);
  state().pinned[static_cast<char*>(*pointer)] = bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void* pointer) {
  const Call call("cuMemFreeHost");
  drain_all();
  state().pinned.erase(static_cast<char*>(pointer));
  return std::free(pointer), CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  const Call call("cuMemcpyHtoDAsync");
  copy_later(reinterpret_cast<void*>(to), from, bytes, stream, !is_pinned(from));
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  const Call call("cuMemcpyDtoHAsync");
  copy_later(to, reinterpret_cast<const void*>(from), bytes, stream);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  const Call call("cuMemcpyDtoDAsync");
  copy_later(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes, stream);
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  const Call call("cuMemsetD8Async");
  put(stream_of(stream), {.work = [=] { std::memset(reinterpret_cast<void*>(to), value, count); }});
  return CUDA_SUCCESS;
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  const Call call("cuMemsetD32Async");
  put(stream_of(stream),
      {.work = [=] { std::fill_n(reinterpret_cast<unsigned*>(to), count, value); }});
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void*, CUpointer_attribute, CUdeviceptr) {
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuStreamCreate(CUstream* stream, unsigned) {
  const Call call("cuStreamCreate");
  auto* s = new Stream{.id = state().next_id++, .queue = {}, .capturing = nullptr};
  state().streams.insert(s);
  return *stream = reinterpret_cast<CUstream>(s), CUDA_SUCCESS;
}
CUresult cuStreamDestroy_v2(CUstream stream) {
  const Call call("cuStreamDestroy");
  Stream& s = stream_of(stream);
  drain(s);
  state().streams.erase(&s);
  delete &s;
  return CUDA_SUCCESS;
}
CUresult cuStreamGetId(CUstream stream, unsigned long long* id) {
  if (stream_of(stream).capturing) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return *id = stream_of(stream).id, CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream stream) {
  const Call call("cuStreamSynchronize");
  if (stream_of(stream).capturing) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return drain(stream_of(stream)), CUDA_SUCCESS;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent handle, unsigned) {
  const Call call("cuStreamWaitEvent");
  Event* event = reinterpret_cast<Event*>(handle);
  if ((stream_of(stream).capturing != nullptr) != event->in_capture)
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  if (event->last) put(stream_of(stream), {.work = {}, .wait = event->last});
  return CUDA_SUCCESS;
}
CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                   CUgraph* graph, const CUgraphNode**, size_t*) {
  const Call call("cuStreamGetCaptureInfo");
  Graph* found = stream_of(stream).capturing.get();
  *status = found ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  if (!found) return CUDA_SUCCESS;
  *id = found->capture;
  *graph = reinterpret_cast<CUgraph>(found);
  return CUDA_SUCCESS;
}
CUresult cuUserObjectCreate(CUuserObject* object, void* data, CUhostFn destroy, unsigned count,
                            unsigned flags) {
  const Call call("cuUserObjectCreate");
  if (count != 1 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) return CUDA_ERROR_INVALID_VALUE;
  *object = reinterpret_cast<CUuserObject>(new UserObject{data, destroy});
  return CUDA_SUCCESS;
}
CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count,
                                 unsigned flags) {
  const Call call("cuGraphRetainUserObject");
  if (!graph || count != 1 || flags != CU_GRAPH_USER_OBJECT_MOVE) return CUDA_ERROR_INVALID_VALUE;
  reinterpret_cast<Graph*>(graph)->kept.push_back(reinterpret_cast<UserObject*>(object));
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  *status =
      stream_of(stream).capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return std::swap(*mode, capture_mode), CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent* event, unsigned) {
  const Call call("cuEventCreate");
  return *event = reinterpret_cast<CUevent>(new Event), CUDA_SUCCESS;
}
CUresult cuEventDestroy_v2(CUevent event) {
  const Call call("cuEventDestroy");
  drain_all();
  return delete reinterpret_cast<Event*>(event), CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent handle, CUstream stream) {
  const Call call("cuEventRecord");
  Event* event = reinterpret_cast<Event*>(handle);
  Stream& s = stream_of(stream);
  event->in_capture = s.capturing != nullptr;
  event->last = std::make_shared<Mark>(Mark{&s});
  put(s, {.work = {}, .record = event->last});
  return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent handle) {
  const Call call("cuEventQuery");
  const Event* event = reinterpret_cast<Event*>(handle);
  return !event->last || event->last->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuEventSynchronize(CUevent handle) {
  const Call call("cuEventSynchronize");
  if (forbidden()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const Event* event = reinterpret_cast<Event*>(handle);
  if (event->last) run_until(*event->last);
  return CUDA_SUCCESS;
}

}  // extern "C"
