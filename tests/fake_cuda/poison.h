// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Memory of the device in which every byte is poison until it is written. Writing that into each
// allocation, workspaces above all, was a third of kernel_cases.py's time (33 s, now 19); so pages
// are those of one file, which a process gets as its own when it writes into them.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

namespace fake {

class PoisonedMemory {
 public:
  explicit PoisonedMemory(unsigned char poison) : file_(memfd_create("poison", MFD_CLOEXEC)) {
    if (file_ < 0 || ftruncate(file_, kFile) != 0) throw std::runtime_error("memfd_create");
    void* all = mmap(nullptr, kFile, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (all == MAP_FAILED) throw std::runtime_error("mmap");
    std::memset(all, poison, kFile);
    munmap(all, kFile);
  }
  /// At a multiple of the page size. Null: there is no more.
  void* take(size_t bytes) {
    const size_t size = (bytes / kFile + 1) * kFile;  // of nothing, too
    void* memory =
        mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    for (size_t at = 0; at < size; at += kFile) {
      if (mmap(static_cast<char*>(memory) + at, kFile, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, file_, 0) == MAP_FAILED) {
        munmap(memory, size);
        return nullptr;
      }
    }
    const std::lock_guard lock(mutex_);
    sizes_[memory] = size;
    return memory;
  }

  void give_back(void* memory) {
    const std::lock_guard lock(mutex_);
    const auto found = sizes_.find(memory);
    if (found == sizes_.end()) return;
    munmap(memory, found->second);
    sizes_.erase(found);
  }

 private:
  static constexpr size_t kFile = size_t{1} << 22;

  const int file_;
  std::mutex mutex_;
  std::map<void*, size_t> sizes_;
};

}  // namespace fake
