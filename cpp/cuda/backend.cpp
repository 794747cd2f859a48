// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "backend.h"

#include <array>
#include <map>
#include <utility>
#include <vector>

#include <flashbsr/core/error.h>

#include "captured.h"
#include "choice.h"
#include "graph_pin.h"
#include "hopper_args.h"
#include "kernel_limits.h"
#include "launcher.h"
#include "memory.h"
#include "ops.h"
#include "page_check.h"
#include "placed_plan.h"

namespace flashbsr::cuda {

namespace {

using api::Batch;
using api::HostPlan;
using api::RunOptions;

constexpr double kManyRows = 1e9;
class CudaBackend final : public api::Backend {
 public:
  CudaBackend(const api::AttentionOptions& options, int device)
      : o_(options),
        device_(device),
        info_(device_info(device)),
        own_(std::make_shared<PlacedPlan>(options, device)),
        page_check_(device),
        plans_(std::make_shared<PinnedPlans>(device)),
        staging_(device),
        order_(device),
        order_in_capture_(device) {
    bandwidth_ = memory_bandwidth(device);
    if (o_.custom_variant) variant_ = o_.provider->name();
  }

  api::Place place() const override { return {.cuda = true, .device = device_}; }
  Workers limits(const Batch& batch) override;
  std::shared_ptr<PlanMemory> plan_memory() override { return plans_; }
  void take_plan(const HostPlan& plan, const api::Borrowed& borrowed, void* stream) override;
  void resolve(const api::LengthViews& lengths, const api::ResolveOptions& options) override;
  bool serves(const Params& params, void* stream) override;
  void run(Params& params, const RunOptions& options) override;
  bool captured() const override { return !captured_.expired(); }

  std::string kernel_name() const override {
    if (!kernel_) return "";
    return (narrow_ ? std::string(narrow_->name) + " + " : "") + kernel_->name;
  }
  std::string device_name() const override { return info_.name; }
  double bandwidth() const override { return bandwidth_; }
  api::RunStats stats() const override { return {}; }

 private:
  const KernelRow* kernel_for(const Need& need);
  const KernelRow* dense_kernel(Need& need, const Batch& batch, int32_t narrow_rows);
  const KernelRow* narrow_kernel(Need need);
  bool has_usual_heads(Need need);
  Workers limits_of(const KernelRow& row, const Batch& batch, DType k, DType v);
  [[noreturn]] void refuse_float8() const;
  /// Whether replays follow later plans: then all runs share one plan in memory.
  bool graph_mode() const { return o_.capacity.fixed(); }
  struct Use {
    PlacedPlan* placed;
    UseOrder* order;  ///< null: of a capture alone
    std::shared_ptr<Captured> held = nullptr;
  };
  Use use_of(CUstream stream, bool captures);
  void place_own(CUstream stream);
  PlacedPlan& place_for(const Capture& capture, CUstream stream);
  std::shared_ptr<Captured> hold_own(const Capture& capture);

  const api::AttentionOptions o_;
  const int device_;
  const DeviceInfo& info_;
  double bandwidth_ = 0;
  std::map<const KernelRow*, ClusterBlocks> cluster_blocks_;  ///< of kernels that were asked
  std::string variant_;                                       ///< name of the caller's own

  Need need_;  ///< of the last plan
  std::array<std::pair<Need, const KernelRow*>, 8> known_{};
  size_t next_known_ = 0;
  const KernelRow* kernel_ = nullptr;
  const KernelRow* narrow_ = nullptr;  ///< before it, of narrow tiles
  DType q_ = DType::kF16, kv_ = DType::kF16, v_ = DType::kF16;
  bool guessed_ = false;      ///< these types, of the last plan
  bool gathers_ = false;      ///< a run has brought K and V that TMA cannot copy
  bool dense_ = false;        ///< codes are written as 16 bits before the kernel
  bool half_scales_ = false;  ///< a run has brought scales in float16
  bool head_scales_ = false;  ///< or others of every KV head beside them
  CodeScales code_scales_;

  HostPlan host_;  ///< the last plan; its memory is the caller's until the next
  api::Borrowed borrowed_;
  std::shared_ptr<PlacedPlan> own_;  ///< of all runs but captured ones outside of graph mode
  bool placed_ = false;              ///< own_ has the last plan
  /// Captures under way that have the last plan in memory of their own, for each of their streams.
  struct InCapture {
    unsigned long long id;
    CUstream stream;
    std::weak_ptr<PlacedPlan> placed;
  };
  std::vector<InCapture> in_captures_;
  std::weak_ptr<Captured> captured_;  ///< of own_, by the graphs that hold it
  unsigned long long holding_ = 0;    ///< the last capture that holds own_
  PageCheck page_check_;
  std::shared_ptr<PinnedPlans> plans_;
  Staging staging_;  ///< of masks and lengths
  UseOrder order_, order_in_capture_;
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
  // Fixed splits promise that a request's bits do not depend on its batch: nor may the kernel.
  if (o_.split.fixed_size > 0) rows = batch.decode ? group : 64;
  // 16-bit K and V go with queries of their own type only.
  const DType q = dtype_size(batch.kv) == 2 ? batch.kv : batch.q;
  Need need = need_of(o_, batch, q, rows);
  need.half_scales = batch.scaled && half_scales_;
  need.pairs = !head_scales_ && pay_together(o_, batch, rows, info_.sm_count);
  if (o_.custom_variant) need.variant = &variant_;
  const KernelRow* narrow = nullptr;
  if (need.mixed_rows > 0) {
    Need any = need;
    any.rows = kManyRows;  // whatever the average: there is one kernel
    if (kernel_for(any)) {
      need = any;
    } else {
      narrow = narrow_kernel(need);
      if (narrow) need.rows = kManyRows, need.tile_rows = need.mixed_rows;
      need.mixed_rows = 0;
    }
  }
  if (need.tile_rows > 0 && !has_usual_heads(need)) need.tile_rows = 0;
  const KernelRow* found = kernel_for(need);
  if (found && found->copies == KvCopies::kBoxes && (gathers_ || !may_box(*found, batch, o_))) {
    need.gathers = true;
    found = kernel_for(need);
  }
  if (!found && q == DType::kE4M3) refuse_float8();
  if (!found) found = &choose_kernel(need, info_);  // says why there is none
  const KernelRow* coded = found;
  Need dense = need;
  Workers limits = limits_of(*coded, batch, batch.kv, batch.v);
  dense_ = false;
  const int32_t few = narrow ? narrow_rows(group) : 0;
  if (const KernelRow* other = dense_kernel(dense, batch, few)) {
    Workers with = limits_of(*other, batch, batch.q, batch.q);
    const double pass =
        dequantize_us(dense_pass(o_, batch, bandwidth_, few), o_.shape.num_kv_heads);
    if (pass + attention_us(with.wide, o_.shape, *batch.lengths, few) <
        attention_us(limits.wide, o_.shape, *batch.lengths, few)) {
      dense_ = true;
      found = other;
      limits = with;
      limits.wide.cost_of_launch += flashbsr::detail::gpu_units(pass);
    }
  }
  need_ = need;
  const KernelRow& row = *found;
  check_rotation(o_, row, place());
  kernel_ = &row;
  narrow_ = is_decode(row) ? nullptr : narrow;
  if (narrow_) {
    limits.narrow = limits_of(*narrow_, batch, batch.kv, batch.v).wide;
    limits.narrow_rows = few;
    limits.apart = true;
  }
  guessed_ = batch.guessed;
  q_ = q;
  kv_ = batch.kv;
  v_ = batch.v;
  return limits;
}

/// @param k, v  what the kernel reads
Workers CudaBackend::limits_of(const KernelRow& row, const Batch& batch, DType k, DType v) {
  const TokenBytes bytes = token_bytes(o_, batch.scaled, k, v);
  ClusterBlocks blocks{};
  if (row.takes_clusters()) {
    auto at = cluster_blocks_.find(&row);
    if (at == cluster_blocks_.end()) {
      prepare(row, device_);
      at = cluster_blocks_.emplace(&row, cluster_blocks(row, device_)).first;
    }
    blocks = at->second;
  }
  const int group = o_.shape.num_qo_heads / o_.shape.num_kv_heads;
  return cuda::limits_of(row, info_, group, batch.page_run, bytes, bandwidth_, blocks);
}

/// The kernel over a batch's codes in 16 bits; null: none.
const KernelRow* CudaBackend::dense_kernel(Need& need, const Batch& batch, int32_t narrow_rows) {
  const std::optional<Need> dense = dense_need(o_, need, batch, code_scales_, narrow_rows);
  if (!dense || info_.cc < 80) return nullptr;
  need = *dense;
  const KernelRow* row = kernel_for(need);
  if (row && row->copies == KvCopies::kBoxes && !may_box(*row, batch, o_)) {
    need.gathers = true;
    row = kernel_for(need);
  }
  return need.tile_rows > 0 && !has_usual_heads(need) ? nullptr : row;
}

/// What streams narrow tiles before the kernel of wide ones, where none does both: a launch more,
/// which what is captured under a capacity has no room for.
const KernelRow* CudaBackend::narrow_kernel(Need need) {
  if (o_.capacity.fixed() || need.latent || need.places) return nullptr;
  need.rows = narrow_rows(need.group);
  need.mixed_rows = need.tile_rows = 0;
  need.pairs = false;
  const KernelRow* row = kernel_for(need);
  return row && is_decode(*row) ? row : nullptr;
}

/// Not those of a kernel of larger heads, whose tiles have so few rows for want of room.
bool CudaBackend::has_usual_heads(Need need) {
  const KernelRow* asked = kernel_for(need);
  need.tile_rows = 0;
  const KernelRow* usual = kernel_for(need);
  return asked && usual && asked->head_dim == usual->head_dim;
}

/// Steps of a serving loop need the same, up to six kernels to choose from: the table of 170 rows
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

void CudaBackend::take_plan(const HostPlan& plan, const api::Borrowed& borrowed,
                            void* stream_handle) {
  // Compiling takes a second: not for types that the first run may correct, and not for a kernel
  // that was asked for its price only.
  for (const KernelRow* row : {kernel_, narrow_}) {
    if (row && (!row->jit || !guessed_)) prepare(*row, device_);
  }
  const CUstream stream = static_cast<CUstream>(stream_handle);
  const ContextGuard context(device_);
  const bool captures = capturing(stream);
  if (graph_mode()) {
    if (captures) {
      throw Error(ErrorCode::kPlan, "stream", "a stream that is being captured",
                  "plan() outside of the capture, and for arrays whose type or device the TaskInfo "
                  "leaves open one run() before it: with a capacity a replay follows later plans");
    }
    if (const auto held = captured_.lock()) check_captured(*held, *kernel_, plan);
  }
  host_ = plan;
  borrowed_ = borrowed;
  placed_ = false;
  in_captures_.clear();
  if (!captures) place_own(stream);
}

void CudaBackend::place_own(CUstream stream) {
  const RelaxedCapture relaxed;
  order_.before(stream);
  own_->take(host_, borrowed_, {*plans_, staging_}, stream,
             captured() ? Hold::kByGraphs : Hold::kNobody);
  order_.after(stream);
  placed_ = true;
}

/// Each capture has the plan in memory of its own, that of its graph: what is planned and run later
/// is none of its concern. It is put there on another stream, at once, and is no part of the graph.
PlacedPlan& CudaBackend::place_for(const Capture& capture, CUstream stream) {
  for (const InCapture& known : in_captures_) {
    if (known.id != capture.id || known.stream != stream) continue;
    if (const auto placed = known.placed.lock()) return *placed;
  }
  const RelaxedCapture relaxed;
  const auto placed = std::make_shared<PlacedPlan>(o_, device_);
  const CUstream side = side_stream(device_);
  placed->take(host_, borrowed_, {*plans_, staging_}, side, Hold::kAtOnce);
  pin(capture, placed, nullptr);
  std::erase_if(in_captures_, [](const InCapture& known) { return known.placed.expired(); });
  in_captures_.push_back({capture.id, stream, placed});
  return *placed;
}

/// In graph mode every graph holds the one plan there is.
std::shared_ptr<Captured> CudaBackend::hold_own(const Capture& capture) {
  std::shared_ptr<Captured> held = captured_.lock();
  const PlanHeader& h = own_->header();
  if (!held) {
    held = std::make_shared<Captured>(Captured{.kernel = kernel_,
                                               .masked = own_->masked(),
                                               .paged = (h.flags & kPlanPaged) != 0,
                                               .bounds = h.off_bounds != 0,
                                               .page_size = h.page_size,
                                               .kv_tokens = h.num_kv_tokens});
    captured_ = held;
  }
  if (holding_ != capture.id) {
    plans_->wait();
    pin(capture, own_, held);
    holding_ = capture.id;
    order_in_capture_.restart();
  }
  return held;
}

/// Where the plan of a call on `stream` is, and what orders its uses.
CudaBackend::Use CudaBackend::use_of(CUstream stream, bool captures) {
  if (!captures) {
    if (!placed_) place_own(stream);
    return {own_.get(), &order_};
  }
  const Capture capture = capture_of(stream);
  if (!graph_mode()) return {&place_for(capture, stream), nullptr};
  return {own_.get(), &order_in_capture_, hold_own(capture)};
}

void CudaBackend::resolve(const api::LengthViews& lengths, const api::ResolveOptions& options) {
  const CUstream stream = static_cast<CUstream>(options.stream);
  const ContextGuard context(device_);
  const bool captures = capturing(stream);
  bool host = false;
  for (int i = 0; i < lengths.count; ++i) host = host || lengths.views[i].host;
  if (captures && (host || options.check)) {
    throw Error(ErrorCode::kUnsupported, host ? "kv_lens" : "check",
                host ? "arrays in host memory while a CUDA graph is captured" : "True",
                host ? "arrays on the device there, which a replay reads anew"
                     : "False while a CUDA graph is captured: the verdict has to be waited for");
  }
  if (options.check) {
    const Indices& lens = lengths.lengths.kv_lens;
    if (lengths.on_host(&Lengths::kv_lens)) {
      api::check_lengths(lens, host_.plan);
    } else {
      api::check_lengths(download(lens, {.device = device_, .stream = stream}), host_.plan);
    }
  }
  const Use use = use_of(stream, captures);
  if (use.order) use.order->before(stream, captures);
  use.placed->resolve(lengths, staging_, stream);
  if (use.order) use.order->after(stream);
}

bool CudaBackend::serves(const Params& params, void*) {
  if (params.q.dtype == DType::kF32) {
    throw Error(ErrorCode::kUnsupported, "q", "float32 in " + place_text(place()),
                "float16 or bfloat16 there; arrays in host memory and backend='cpu' compute in "
                "float32");
  }
  half_scales_ =
      half_scales_ || params.k_scales.dtype == DType::kF16 || params.v_scales.dtype == DType::kF16;
  head_scales_ =
      head_scales_ || (has_token_scales(params) && (params.k_head_scale || params.v_head_scale));
  if (!kernel_ || params.k.dtype != kv_) return false;
  if (head_scales_ && heads_of_item(*kernel_) > 1) return false;
  if (!o_.latent && params.v.dtype != v_) return false;
  if (need_.scaled != has_token_scales(params)) return false;
  if (need_.scaled && half_scales_ && !dense_ && is_hopper(*kernel_)) return false;
  if (dense_ && !code_scales_.serve(params, kernel_->head_dim)) return false;
  // Other families' kernels for 16-bit Q and float8 K take either type of Q.
  const bool either = !dense_ && !is_hopper(*kernel_) && params.q.dtype != DType::kE4M3;
  if (params.q.dtype != q_ && !(either && q_ != DType::kE4M3)) return false;
  if (!dense_ && kernel_->copies == KvCopies::kBoxes &&
      !takes_boxes(params, *kernel_, host_.plan.header(), maps_)) {
    gathers_ = need_.gathers = true;
    if (!takes_pair_boxes(*kernel_)) return false;
    kernel_ = &choose_kernel(need_, info_);  // for the same plan, in a capture too
  }
  return true;
}

void CudaBackend::run(Params& params, const RunOptions& options) {
  const CUstream stream = static_cast<CUstream>(options.stream);
  const ContextGuard context(device_);
  const bool captures = capturing(stream);
  // A replay in graph mode may find items where there are none now.
  if (host_.plan.header().num_items == 0 && !(captures && graph_mode())) return;
  if (options.check && captures) {
    throw Error(ErrorCode::kUnsupported, "check", "True while a CUDA graph is captured",
                "False there (FLASHBSR_CHECK unset): the verdict has to be waited for");
  }
  const Use use = use_of(stream, captures);
  if (use.held) {
    use.held->q_rows = max_of(use.held->q_rows, params.q.tokens);
    use.held->kv_rows = max_of(use.held->kv_rows, min_of(params.k.pages, params.v.pages));
  }
  PlacedPlan* const placed = use.placed;
  UseOrder* const order = use.order;
  if (!placed->complete()) {
    api::lengths_missing(captures ? "update() or run(kv_lens=, block_tables=) inside of the "
                                    "capture, which has a plan of its own"
                                  : "run(kv_lens=, block_tables=) or update()");
  }
  const PlanHeader& header = placed->header();
  KernelArgs args = placed->args(params);
  const bool fresh = placed->take_fresh();
  // Kernels of older rows have no instruction that waits.
  args.overlap = min_of(info_.cc, kernel_->arch) < 90 ? Overlap::kNone : options.overlap;
  if (fresh && args.overlap != Overlap::kNone) args.overlap = Overlap::kLaunch;
  if (order) order->before(stream, captures);
  if (options.check && args.kv_indices) {
    page_check_(args.header, args.kv_indices, min_of(params.k.pages, params.v.pages), stream);
  }
  if (narrow_) {
    // Its workers' queues are behind those of the wide ones.
    KernelArgs few = args;
    const int32_t first = header.num_workers - header.num_narrow_workers;
    few.starts += first;
    few.queue_indptr += first;
    launch(*narrow_,
           {.device = device_,
            .stream = stream,
            .grid_x = header.num_narrow_workers,
            .overlap = args.overlap != Overlap::kNone},
           few);
  }
  if (dense_) {
    placed->dense().write(args, host_.plan, stream);
    args.overlap = Overlap::kNone;  // it reads what the pass writes
  }
  const Launch where{
      .device = device_,
      .stream = stream,
      .grid_x = header.cluster_parts
                    ? header.num_items
                    : header.num_workers - header.num_narrow_workers + header.num_narrow_blocks,
      .overlap = args.overlap != Overlap::kNone,
      .cluster = max_of(header.cluster_parts, 1)};
  if (is_hopper(*kernel_)) {
    launch(*kernel_, where, hopper_args(args, *kernel_, header, maps_));
  } else if (takes_pair_boxes(*kernel_)) {
    launch(*kernel_, where, pair_args(args, *kernel_, header, maps_));
  } else {
    launch(*kernel_, where, args);
  }
  placed->finish(args, params, stream);
  if (order) order->after(stream);
  if (options.wait) check(api().stream_synchronize(stream), "cuStreamSynchronize");
}

}  // namespace

std::string why_unavailable() { return available() ? "" : unavailable_reason(); }

void sweep() { sweep_pins(); }

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
