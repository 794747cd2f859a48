// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "graph_pin.h"

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "memory.h"

namespace flashbsr::cuda {

namespace {

struct Pinned {
  std::shared_ptr<void> kept, alive;
};

/// Never destroyed: graphs may outlive every object of the process.
struct Graves {
  std::mutex mutex;
  std::vector<std::shared_ptr<void>> kept;
  std::atomic<bool> any{false};
};

Graves& graves() {
  static Graves* const instance = new Graves;
  return *instance;
}

/// On a thread of the driver's, which holds locks of its own: no call of the driver's here.
void CUDA_CB unpin(void* data) {
  const std::unique_ptr<Pinned> pinned(static_cast<Pinned*>(data));
  Graves& g = graves();
  const std::lock_guard hold(g.mutex);
  g.kept.push_back(std::move(pinned->kept));
  g.any.store(true, std::memory_order_release);
}

}  // namespace

Capture capture_of(CUstream stream) {
  if (is_default(stream)) return {};
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  Capture capture;
  cuuint64_t id = 0;
  check(api().stream_get_capture_info(stream, &status, &id, &capture.graph, nullptr, nullptr),
        "cuStreamGetCaptureInfo");
  if (status == CU_STREAM_CAPTURE_STATUS_NONE) return {};
  capture.id = id;
  return capture;
}

void pin(const Capture& capture, std::shared_ptr<void> kept, std::shared_ptr<void> alive) {
  auto pinned = std::make_unique<Pinned>(Pinned{std::move(kept), std::move(alive)});
  CUuserObject object = nullptr;
  check(
      api().user_object_create(&object, pinned.get(), &unpin, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
      "cuUserObjectCreate");
  pinned.release();  // the driver's from here on
  check(api().graph_retain_user_object(capture.graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE),
        "cuGraphRetainUserObject");
}

void sweep_pins() {
  Graves& g = graves();
  if (!g.any.load(std::memory_order_acquire)) return;
  std::vector<std::shared_ptr<void>> kept;
  {
    const std::lock_guard hold(g.mutex);
    kept.swap(g.kept);
    g.any.store(false, std::memory_order_release);
  }
}  // here, without the lock

}  // namespace flashbsr::cuda
