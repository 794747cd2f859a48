// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "backend.h"

#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include <flashbsr/core/error.h>

#include "choice.h"
#include "hopper_args.h"
#include "kernel_limits.h"
#include "launcher.h"
#include "memory.h"
#include "page_check.h"

namespace flashbsr::cuda {

namespace {

using api::Batch;
using api::HostPlan;
using api::RunOptions;

constexpr int64_t kAlign = 256;  // of sections in device memory
constexpr double kManyRows = 1e9;
/// Bits are read as words of 32, and a tile's worth of them behind the last.
constexpr int64_t kMaskSlack = 64;

/// What a captured run holds on to: later plans must leave it where it is.
struct Captured {
  const KernelRow* kernel = nullptr;
  Need need;  ///< that it was chosen for
  bool masked = false;
  bool paged = false;  ///< the plan then
  int32_t page_size = 1;
  int32_t kv_tokens = 0;
  int64_t q_rows = 0;  ///< most of all captured runs
  int64_t kv_rows = 0;
};

class CudaBackend final : public api::Backend {
 public:
  CudaBackend(const api::AttentionOptions& options, int device)
      : o_(options),
        device_(device),
        info_(device_info(device)),
        plan_(device),
        counters_(device),
        partials_(device),
        slopes_(device),
        coarse_(device),
        fine_(device),
        page_check_(device),
        staging_(device),
        order_(device) {
    bandwidth_ = memory_bandwidth(device);
    if (o_.custom_variant) variant_ = o_.provider->name();
  }

  api::Place place() const override { return {.cuda = true, .device = device_}; }
  Workers limits(const Batch& batch) override;
  void take_plan(const HostPlan& plan, char* workspace, void* stream) override;
  bool serves(const Params& params, void* stream) override;
  void run(Params& params, const RunOptions& options) override;
  bool captured() const override { return captured_.has_value(); }

  std::string kernel_name() const override { return kernel_ ? kernel_->name : ""; }
  std::string device_name() const override { return info_.name; }
  double bandwidth() const override { return bandwidth_; }
  api::RunStats stats() const override { return {}; }

 private:
  const KernelRow* kernel_for(const Need& need);
  [[noreturn]] void refuse_float8() const;
  void check_kernel(const KernelRow& row) const;
  void check_captured(const HostPlan& plan) const;
  void grow(DeviceMemory& memory, int64_t bytes, const char* what);
  int64_t stage_plan(const HostPlan& plan, int64_t mask_at);
  void place_rope(const HostPlan& plan, CUstream stream);
  void place_slopes(const HostPlan& plan, CUstream stream);

  const api::AttentionOptions o_;
  const int device_;
  const DeviceInfo& info_;
  double bandwidth_ = 0;
  std::string variant_;  ///< name of the caller's own

  Need need_;  ///< of the last plan
  std::array<std::pair<Need, const KernelRow*>, 4> known_{};
  size_t next_known_ = 0;
  const KernelRow* kernel_ = nullptr;
  DType q_ = DType::kF16, kv_ = DType::kF16;
  bool gathers_ = false;  ///< a run has brought K and V that TMA cannot copy
  PlanHeader header_{};
  bool masked_ = false;
  char* workspace_ = nullptr;

  DeviceMemory plan_;  ///< the plan, and behind it the mask
  int64_t mask_at_ = 0;
  DeviceMemory counters_;
  DeviceMemory partials_;
  DeviceMemory slopes_;
  DeviceMemory coarse_, fine_;  ///< RoPE tables
  int64_t rope_rows_ = 0;       ///< of the coarse table that are there
  RopeTables rope_;             ///< of the last plan
  PageCheck page_check_;
  Staging staging_;
  UseOrder order_;
  std::optional<Captured> captured_;
  HopperMaps maps_;
};

Workers CudaBackend::limits(const Batch& batch) {
  const int group = o_.shape.num_qo_heads / o_.shape.num_kv_heads;
  if (batch.kv == DType::kF32) {
    throw Error(ErrorCode::kUnsupported, "kv_dtype", "float32 on " + place_text(place()),
                "float16, bfloat16 or float8 there; backend='cpu' computes in float32");
  }
  double rows = static_cast<double>(batch.q_tokens) * group /
                static_cast<double>(max_of<int64_t>(batch.requests, 1));
  if (batch.per_head) rows *= o_.shape.num_kv_heads;
  if (batch.shares) rows = kManyRows;
  // Replays have the kernel of the capture, which is right for any number of rows.
  if (captured_) rows = captured_->need.rows;
  // Fixed splits promise that a request's bits do not depend on its batch: nor may the kernel.
  if (o_.split.fixed_size > 0) rows = batch.decode ? group : 64;
  // 16-bit K and V go with queries of their own type only.
  const DType q = dtype_size(batch.kv) == 2 ? batch.kv : batch.q;
  Need need{.head_dim_qk = o_.head_dim_qk,
            .head_dim_vo = o_.head_dim_vo,
            .q = q,
            .kv = batch.kv,
            .soft_cap = o_.soft_cap > 0,
            .alibi = o_.position == Position::kAlibi,
            .rotates = o_.position == Position::kRopeLlama,
            .masked = batch.masked,
            .sigmoid = o_.activation == Activation::kSigmoid,
            .rows = rows,
            .group = group,
            .family = o_.family,
            .variant = o_.custom_variant ? &variant_ : nullptr,
            .row_hooks = o_.row_hooks,
            .fast_sums = o_.fast_fp8,
            .mixed_rows = captured_ ? captured_->need.mixed_rows : batch.mixed_rows,
            .provider = o_.provider};
  if (need.mixed_rows > 0) {
    Need any = need;
    any.rows = kManyRows;  // whatever the average: there is one kernel
    if (kernel_for(any)) {
      need = any;
    } else {
      need.mixed_rows = 0;
    }
  }
  const KernelRow* found = kernel_for(need);
  if (found && found->copies == KvCopies::kBoxes && (gathers_ || !kv_box(*found, batch.page_run))) {
    need.gathers = true;
    found = kernel_for(need);
  }
  if (!found && q == DType::kE4M3) refuse_float8();
  if (!found) found = &choose_kernel(need, info_);  // says why there is none
  need_ = need;
  const KernelRow& row = *found;
  check_kernel(row);
  // Compiling takes a second: not for types that the first run may correct.
  if (!row.jit || !batch.guessed) prepare(row, device_);
  kernel_ = &row;
  q_ = q;
  kv_ = batch.kv;
  const int bytes_per_token = (o_.head_dim_qk + o_.head_dim_vo) * dtype_size(kv_);
  return limits_of(row, info_, group, bytes_per_token, bandwidth_);
}

/// Steps of a serving loop need the same, up to three kernels to choose from: the table of 170 rows
/// is gone through once for each.
const KernelRow* CudaBackend::kernel_for(const Need& need) {
  for (const auto& [known, row] : known_) {
    if (row && known == need) return row;
  }
  const KernelRow* row = try_choose_kernel(need, info_);
  if (row) known_[next_known_++ % known_.size()] = {need, row};
  return row;
}

/// Queries that no kernel reads.
void CudaBackend::refuse_float8() const {
  throw Error(ErrorCode::kUnsupported, "q", "float8_e4m3fn in " + place_text(place()),
              "float16 or bfloat16 there, which a float8 cache goes with; float8 queries are "
              "computed on compute capability 9.0 without RoPE (cpp/instances.txt, family hopper), "
              "and by backend='cpu'");
}

void CudaBackend::check_kernel(const KernelRow& row) const {
  if (o_.position == Position::kRopeLlama && row.head_dim != o_.head_dim_qk) {
    throw Error(ErrorCode::kUnsupported, "pos_encoding_mode",
                "'ROPE_LLAMA' with head_dim_qk=" + std::to_string(o_.head_dim_qk) + " on " +
                    place_text(place()),
                "head_dim_qk of 64, 128, 256 or 512, not below head_dim_vo; or rotate q and k with "
                "apply_rope first");
  }
  // Pairs are groups of 16 dims apart: a step of the matrix instructions.
  if (o_.position == Position::kRopeLlama && !o_.rope.interleave && o_.rope.rotary_dim % 32) {
    throw Error(ErrorCode::kUnsupported, "rotary_dim",
                std::to_string(o_.rope.rotary_dim) + " on " + place_text(place()),
                "a multiple of 32 there without rope_interleave; or apply_rope first");
  }
}

/// A replay has the arguments of the captured launch: pointers, arrays, grid. Whatever they could
/// not serve must not be planned.
void CudaBackend::check_captured(const HostPlan& plan) const {
  if (!captured_) return;
  const Captured& c = *captured_;
  if (c.kernel != kernel_) {
    throw Error(ErrorCode::kPlan, "plan", std::string("a batch for ") + kernel_->name,
                std::string("one for ") + c.kernel->name +
                    ", which a captured run has (custom masks, types and, where splits are fixed, "
                    "a qo_indptr decide); take another flashbsr.Attention");
  }
  const PlanHeader& h = plan.plan.header();
  const auto refuse = [](const char* name, const std::string& actual, const std::string& most) {
    throw Error(ErrorCode::kCapacity, name, actual, most + ", since a captured run has that much");
  };
  if (((h.flags & kPlanPaged) != 0) != c.paged || h.page_size != c.page_size) {
    const auto text = [](bool paged, int32_t size) {
      return paged ? "pages of " + std::to_string(size) : std::string("ragged KV");
    };
    throw Error(ErrorCode::kPlan, "layout", text((h.flags & kPlanPaged) != 0, h.page_size),
                text(c.paged, c.page_size) +
                    ", as for the captured run; another flashbsr.Attention for the other");
  }
  if ((plan.mask != nullptr) != c.masked) {
    throw Error(ErrorCode::kPlan, "custom_mask", c.masked ? "None" : "an array",
                std::string(c.masked ? "an array" : "None") +
                    ", as for the captured run; another flashbsr.Attention for the other");
  }
  if (h.num_q_tokens > c.q_rows) {
    refuse("qo_indptr", std::to_string(h.num_q_tokens) + " query tokens",
           "at most " + std::to_string(c.q_rows));
  }
  if (h.num_kv_rows > c.kv_rows) {
    refuse(c.paged ? "kv_indices" : "kv_indptr",
           std::to_string(h.num_kv_rows) + (c.paged ? " pages" : " token rows"),
           "at most " + std::to_string(c.kv_rows));
  }
  if (h.num_kv_tokens != c.kv_tokens) {
    throw Error(ErrorCode::kPlan, "N", std::to_string(h.num_kv_tokens) + " KV tokens",
                std::to_string(c.kv_tokens) +
                    " as for the captured run (0: whole blocks), whose last block is as short");
  }
}

void CudaBackend::grow(DeviceMemory& memory, int64_t bytes, const char* what) {
  if (captured_ && memory.data() && bytes > memory.size()) {
    throw Error(ErrorCode::kCapacity, what, std::to_string(bytes) + " bytes",
                "at most " + std::to_string(memory.size()) +
                    ", which a captured run holds; plan the largest batch before the capture");
  }
  memory.fit(bytes);
}

/// Writes the parts in use at their offsets into the pinned buffer; the gaps between are never
/// read. Zeros follow the mask. Returns the bytes to copy.
int64_t CudaBackend::stage_plan(const HostPlan& plan, int64_t mask_at) {
  const PlanHeader& h = plan.plan.header();
  int64_t words = static_cast<int64_t>(h.off_kv_indices) + h.num_kv_indices;
  // Last, because most plans have none.
  if (h.num_shared > 0) words = h.off_merge_parts + 4 * static_cast<int64_t>(h.num_merge_parts);
  const int64_t bytes = plan.mask ? mask_at + plan.mask_bytes + kMaskSlack : 4 * words;
  char* out = staging_.next(bytes);
  const auto put = [&](int64_t at, int64_t words) {
    std::memcpy(out + 4 * at, plan.plan.data + at, static_cast<size_t>(4 * words));
  };
  put(0, h.off_requests + 8 * (static_cast<int64_t>(h.num_requests) + h.num_shared));
  put(h.off_items, 8 * static_cast<int64_t>(h.num_items));
  put(h.off_queue_indptr, h.num_workers + 1);
  put(h.off_queue_items, h.num_items);
  put(h.off_merges, 8 * static_cast<int64_t>(h.num_merges));
  put(h.off_kv_indices, h.num_kv_indices);
  put(h.off_q_rows, h.num_q_rows);
  put(h.off_merge_parts, 4 * static_cast<int64_t>(h.num_merge_parts));
  if (plan.mask) {
    std::memset(out + mask_at - kMaskSlack, 0, kMaskSlack);
    std::memcpy(out + mask_at, plan.mask, static_cast<size_t>(plan.mask_bytes));
    std::memset(out + mask_at + plan.mask_bytes, 0, kMaskSlack);
  }
  return bytes;
}

void CudaBackend::take_plan(const HostPlan& plan, char* workspace, void* stream_handle) {
  const CUstream stream = static_cast<CUstream>(stream_handle);
  const ContextGuard context(device_);
  const RelaxedCapture relaxed;
  if (capturing(stream)) {
    throw Error(ErrorCode::kPlan, "stream", "a stream that is being captured",
                "plan() outside of the capture, and for arrays whose type or device the TaskInfo "
                "leaves open one run() before it");
  }
  check_captured(plan);
  const PlanHeader& h = plan.plan.header();
  const int64_t mask_at =
      round_up<int64_t>(4 * static_cast<int64_t>(h.total_size) + kMaskSlack, kAlign);
  grow(plan_, mask_at + plan.mask_bytes + kMaskSlack, "plan");
  const int64_t counters = 4 * num_counters(h);
  const bool fresh = counters > counters_.size();
  grow(counters_, counters, "plan");
  if (!workspace) {
    const int64_t bytes = partial_bytes(h.max_partial_rows, o_.head_dim_vo);
    if (bytes) grow(partials_, bytes, "workspace");
  }
  const int64_t bytes = stage_plan(plan, mask_at);
  order_.before(stream);
  staging_.copy(plan_.address(), bytes, stream);
  if (fresh) {
    // Zero before a kernel and after it: once is enough.
    check(api().memset_d32_async(counters_.address(), 0, static_cast<size_t>(counters_.size() / 4),
                                 stream),
          "cuMemsetD32Async");
  }
  place_rope(plan, stream);
  place_slopes(plan, stream);
  order_.after(stream);
  header_ = h;
  masked_ = plan.mask != nullptr;
  mask_at_ = mask_at;
  workspace_ = workspace ? workspace : partials_.data();
}

/// Copies the tables, whole where they moved, otherwise the rows that are new. Their source is not
/// pinned, so that it has been read when the copy returns.
void CudaBackend::place_rope(const HostPlan& plan, CUstream stream) {
  if (plan.rope_positions == 0) return;
  rope_ = plan.rope;
  const auto rows_for = [](int64_t positions) { return positions / RopeTables::kFine + 1; };
  const int64_t row_bytes = 4 * static_cast<int64_t>(o_.head_dim_qk);
  const auto copy = [&](CUdeviceptr to, const float* from, int64_t bytes) {
    check(api().memcpy_htod_async(to, from, static_cast<size_t>(bytes), stream),
          "cuMemcpyHtoDAsync of RoPE tables");
  };
  if (!fine_.data()) {
    fine_.fit(RopeTables::kFine * row_bytes);
    copy(fine_.address(), plan.rope.fine, RopeTables::kFine * row_bytes);
  }
  const int64_t rows = rows_for(plan.rope_positions);
  if (rows <= rope_rows_) return;
  if (rows * row_bytes > coarse_.size()) {
    const int64_t room = max_of(2 * rows, rows_for(plan.rope_capacity));
    grow(coarse_, room * row_bytes, "RoPE tables");
    rope_rows_ = 0;
  }
  const int64_t old = rope_rows_ * row_bytes;
  copy(coarse_.address() + static_cast<CUdeviceptr>(old), plan.rope.coarse + old / 4,
       rows * row_bytes - old);
  rope_rows_ = rows;
}

void CudaBackend::place_slopes(const HostPlan& plan, CUstream stream) {
  if (!plan.slopes || slopes_.data()) return;
  const int64_t bytes = 4 * static_cast<int64_t>(o_.shape.num_qo_heads);
  slopes_.fit(bytes);
  check(api().memcpy_htod_async(slopes_.address(), plan.slopes, static_cast<size_t>(bytes), stream),
        "cuMemcpyHtoDAsync of ALiBi slopes");
}

bool CudaBackend::serves(const Params& params, void*) {
  if (params.q.dtype == DType::kF32) {
    throw Error(ErrorCode::kUnsupported, "q", "float32 in " + place_text(place()),
                "float16 or bfloat16 there; arrays in host memory and backend='cpu' compute in "
                "float32");
  }
  if (!kernel_ || params.k.dtype != kv_) return false;
  // Other families' kernels for 16-bit Q and float8 K take either type of Q.
  const bool either = !is_hopper(*kernel_) && params.q.dtype != DType::kE4M3;
  if (params.q.dtype != q_ && !(either && q_ != DType::kE4M3)) return false;
  if (kernel_->copies == KvCopies::kBoxes &&
      !takes_boxes(params.k, params.v, *kernel_, header_, maps_)) {
    gathers_ = true;
    return false;
  }
  return true;
}

void CudaBackend::run(Params& params, const RunOptions& options) {
  const CUstream stream = static_cast<CUstream>(options.stream);
  const ContextGuard context(device_);
  const bool captured = capturing(stream);
  // A replay may find items where there are none now.
  if (header_.num_items == 0 && !captured) return;
  const auto floats = [](const DeviceMemory& m) {
    return reinterpret_cast<const float*>(m.data());
  };
  if (masked_) params.custom_mask = reinterpret_cast<const uint8_t*>(plan_.data() + mask_at_);
  if (o_.position == Position::kRopeLlama) {
    params.rope = {floats(coarse_), floats(fine_), rope_.half, rope_.interleave};
  }
  if (o_.position == Position::kAlibi && !params.alibi_slopes)
    params.alibi_slopes = floats(slopes_);
  api::place_partials(params, header_, workspace_, o_.head_dim_vo);
  KernelArgs args = kernel_args(params, header_, reinterpret_cast<const int32_t*>(plan_.data()),
                                reinterpret_cast<int32_t*>(counters_.data()));
  args.overlap = info_.cc >= 90 ? options.overlap : Overlap::kNone;
  if (options.check && captured) {
    throw Error(ErrorCode::kUnsupported, "check", "True while a CUDA graph is captured",
                "False there (FLASHBSR_CHECK unset): the verdict has to be waited for");
  }
  if (!captured) order_.before(stream);
  if (options.check && args.kv_indices) {
    page_check_(args.header, args.kv_indices, min_of(params.k.pages, params.v.pages), stream);
  }
  const Launch where{
      .device = device_,
      .stream = stream,
      .grid_x = header_.num_workers - header_.num_narrow_workers + header_.num_narrow_blocks,
      .overlap = args.overlap != Overlap::kNone};
  if (is_hopper(*kernel_)) {
    launch(*kernel_, where, hopper_args(args, *kernel_, header_, maps_));
  } else {
    launch(*kernel_, where, args);
  }
  if (captured) {
    if (!captured_)
      captured_ = Captured{.kernel = kernel_,
                           .need = need_,
                           .masked = masked_,
                           .paged = (header_.flags & kPlanPaged) != 0,
                           .page_size = header_.page_size,
                           .kv_tokens = header_.num_kv_tokens};
    captured_->q_rows = max_of(captured_->q_rows, params.q.tokens);
    captured_->kv_rows = max_of(captured_->kv_rows, min_of(params.k.pages, params.v.pages));
  } else {
    order_.after(stream);
  }
  if (options.wait) check(api().stream_synchronize(stream), "cuStreamSynchronize");
}

}  // namespace

std::string why_unavailable() { return available() ? "" : unavailable_reason(); }

int current_device() {
  CUcontext context = nullptr;
  if (!available() || api().ctx_get_current(&context) != CUDA_SUCCESS || !context) return 0;
  CUdevice device = 0;
  check(api().ctx_get_device(&device), "cuCtxGetDevice");
  return static_cast<int>(device);
}

std::unique_ptr<api::Backend> make_backend(const api::AttentionOptions& options, int device) {
  if (!available()) {
    throw Error(ErrorCode::kUnsupported, "backend", "'cuda'",
                "'auto' or 'cpu': " + unavailable_reason());
  }
  return std::make_unique<CudaBackend>(options, device);
}

}  // namespace flashbsr::cuda
