// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Sentences are those of AttentionSpec and TaskInfo (python/flashbsr), whose errors have the same
// causes; tests/build/test_c_library.py compares them.
#include "options.h"

#include <cmath>
#include <string>

#include "guard.h"

namespace flashbsr::c {

namespace {

using Options = fbsr_attention_options;

constexpr int32_t kMaxHeadDim = 512, kMaxLatentDim = 576, kHeadDimMultiple = 8;

[[noreturn]] void refuse(ErrorCode code, const char* name, const std::string& actual,
                         const std::string& expected) {
  throw Error(code, name, actual, expected);
}

void at_least(const char* name, int64_t value, int64_t least) {
  if (value >= least) return;
  refuse(ErrorCode::kValue, name, std::to_string(value), "at least " + std::to_string(least));
}

void finite(const char* name, double value) {
  if (std::isfinite(value)) return;
  refuse(ErrorCode::kValue, name, std::to_string(value), "a finite number");
}

void positive(const char* name, double value) {
  finite(name, value);
  if (value > 0) return;
  refuse(ErrorCode::kValue, name, std::to_string(value), "a positive number");
}

void check_heads(const Options& o, int32_t dim_vo) {
  at_least("num_qo_heads", o.num_qo_heads, 1);
  at_least("num_kv_heads", o.num_kv_heads, 1);
  at_least("head_dim_qk", o.head_dim_qk, 1);
  at_least("head_dim_vo", dim_vo, 1);
  if (o.num_qo_heads % o.num_kv_heads != 0) {
    refuse(ErrorCode::kShape, "num_qo_heads", std::to_string(o.num_qo_heads),
           "a multiple of num_kv_heads=" + std::to_string(o.num_kv_heads));
  }
  if (o.latent && o.num_kv_heads != 1) {
    refuse(ErrorCode::kShape, "num_kv_heads", std::to_string(o.num_kv_heads), "1 with latent=True");
  }
  if (o.latent && dim_vo > o.head_dim_qk) {
    refuse(ErrorCode::kShape, "head_dim_vo", std::to_string(dim_vo),
           "at most " + std::to_string(o.head_dim_qk));
  }
  const auto dim = [](const char* name, int32_t value, int32_t most) {
    if (value <= most && value % kHeadDimMultiple == 0) return;
    refuse(ErrorCode::kUnsupported, name, std::to_string(value),
           "a multiple of " + std::to_string(kHeadDimMultiple) + ", at most " +
               std::to_string(most) +
               " (pad the last dimension with zeros and pass sm_scale=1/sqrt(unpadded dim))");
  };
  dim("head_dim_qk", o.head_dim_qk, o.latent ? kMaxLatentDim : kMaxHeadDim);
  dim("head_dim_vo", dim_vo, kMaxHeadDim);
  if (o.latent && o.sm_scale == 0) {
    refuse(ErrorCode::kValue, "sm_scale", "None",
           "a number with latent=True: 1/sqrt(head dim before absorption), of 192 for "
           "DeepSeek-V3");
  }
}

void check_rope(const Options& o, bool rotates) {
  positive("rope_theta", o.rope_theta);
  positive("rope_scale", o.rope_scale);
  const char* given = o.rope_llama31      ? "rope_llama31"
                      : o.rotary_dim      ? "rotary_dim"
                      : o.rope_interleave ? "rope_interleave"
                                          : nullptr;
  if (given && !rotates) {
    refuse(ErrorCode::kValue, given, "a value",
           "the default unless pos_encoding_mode='ROPE_LLAMA'");
  }
  if (o.rotary_dim < 0 || o.rotary_dim % 2 != 0) {
    refuse(ErrorCode::kValue, "rotary_dim", std::to_string(o.rotary_dim), "an even number");
  }
  if (o.rotary_dim > o.head_dim_qk) {
    refuse(ErrorCode::kValue, "rotary_dim", std::to_string(o.rotary_dim),
           "at most head_dim_qk=" + std::to_string(o.head_dim_qk) + " rotated dims");
  }
  const double low = o.rope_low_freq_factor, high = o.rope_high_freq_factor;
  if (o.rope_llama31 && !(0 < low && low < high && 0 < o.rope_old_context_len)) {
    refuse(ErrorCode::kValue, "rope_llama31", "other numbers",
           "0 < low_freq_factor < high_freq_factor, 0 < old_context_len");
  }
}

void check_types(const api::AttentionOptions& o) {
  const auto wide = [](const std::optional<DType>& type) { return type && dtype_size(*type) > 1; };
  const auto name = [](const std::optional<DType>& type) { return dtype_name(*type); };
  if (o.q_dtype && dtype_size(*o.q_dtype) == 1 && *o.q_dtype != DType::kE4M3) {
    refuse(ErrorCode::kDType, "q_dtype", name(o.q_dtype),
           "float32, float16, bfloat16 or float8_e4m3fn");
  }
  if (o.o_dtype && !wide(o.o_dtype)) {
    refuse(ErrorCode::kDType, "o_dtype", name(o.o_dtype), "float32, float16 or bfloat16");
  }
  for (const std::optional<DType>& type : {o.kv_dtype, o.v_dtype}) {
    if (o.q_dtype == DType::kE4M3 && type && *type != *o.q_dtype) {
      refuse(ErrorCode::kDType, "kv_dtype", name(type),
             "float8_e4m3fn as q_dtype; any KV goes with 16-bit q");
    }
    if (wide(type) && ((o.q_dtype && *type != *o.q_dtype) || o.kv_dtype != o.v_dtype)) {
      const std::string one = o.q_dtype ? std::string(name(o.q_dtype)) + " as q_dtype, or " : "";
      refuse(ErrorCode::kDType, "kv_dtype", name(type), one + "float8, int8, int4 or nvfp4");
    }
  }
}

/// All of a capacity, or none of it.
void check_capacity(const Options& o) {
  const bool by_length = o.max_kv_len >= 0;
  if (by_length && o.max_kv_pages >= 0) {
    refuse(ErrorCode::kValue, "max_kv_len", std::to_string(o.max_kv_len),
           "None beside max_kv_pages");
  }
  const std::pair<const char*, int32_t> parts[] = {
      {"max_batch_size", o.max_batch_size},
      {"max_q_tokens", o.max_q_tokens},
      {by_length ? "max_kv_len" : "max_kv_pages", by_length ? o.max_kv_len : o.max_kv_pages}};
  int given = 0;
  for (const auto& [name, value] : parts) {
    at_least(name, value, -1);
    given += value >= 0;
  }
  for (const auto& [name, value] : parts) {
    if (value < 0 && given > 0) {
      refuse(ErrorCode::kValue, name, "None", "a number: a capacity is all three, or none");
    }
  }
}

void check_schedule(const Options& o) {
  check_capacity(o);
  at_least("num_workers", o.num_workers, 0);
  at_least("num_threads", o.num_threads, 0);
  at_least("fixed_split_size", o.fixed_split_size, 0);
  at_least("device", o.device, -1);
  at_least("workspace_bytes", o.workspace_bytes, -1);
  if (o.disable_split_kv && o.fixed_split_size > 0) {
    refuse(ErrorCode::kValue, "fixed_split_size", std::to_string(o.fixed_split_size),
           "None when disable_split_kv=True");
  }
  if (o.device >= 0 && o.backend < FBSR_BACKEND_CUDA) {
    refuse(ErrorCode::kValue, "device", std::to_string(o.device),
           "None unless backend='cuda', 'fa2' or 'fa3'");
  }
}

void check_share(const Shape& shape) {
  if (shape.context_rank < 0 || shape.context_rank >= shape.context_size) {
    refuse(ErrorCode::kValue, "context_rank", std::to_string(shape.context_rank),
           "from 0, below context_size=" + std::to_string(shape.context_size));
  }
  if (int64_t{shape.context_size} * shape.context_interleave >= 1 << 30) {
    refuse(ErrorCode::kValue, "context_interleave", std::to_string(shape.context_interleave),
           "context_size * context_interleave below 2^30");
  }
}

}  // namespace

Options default_options() {
  Options o{};
  o.window_left = o.device = -1;
  o.max_batch_size = o.max_q_tokens = o.max_kv_pages = o.max_kv_len = -1;
  o.workspace_bytes = -1;
  const RopeFrequencies rope;
  o.rope_theta = rope.theta;
  o.rope_scale = rope.scale;
  o.rope_low_freq_factor = rope.low_freq_factor;
  o.rope_high_freq_factor = rope.high_freq_factor;
  o.rope_old_context_len = rope.old_context_len;
  return o;
}

api::AttentionOptions checked_options(const Options& given) {
  const Options& o = given;
  api::AttentionOptions to;
  to.latent = boolean("latent", o.latent);
  to.head_dim_qk = o.head_dim_qk;
  to.head_dim_vo = o.head_dim_vo == 0 ? o.head_dim_qk : o.head_dim_vo;
  finite("sm_scale", o.sm_scale);
  check_heads(o, to.head_dim_vo);
  at_least("window_left", o.window_left, -1);
  to.shape = {.num_qo_heads = o.num_qo_heads,
              .num_kv_heads = o.num_kv_heads,
              .causal = boolean("causal", o.causal),
              .window_left = o.window_left,
              .context_size = max_of(o.context_size, 1),
              .context_rank = o.context_rank,
              .context_interleave = max_of(o.context_interleave, 1)};
  check_share(to.shape);
  to.hnd = choice("kv_layout", o.kv_layout, FBSR_NHD, FBSR_HND) == FBSR_HND;
  to.q_dtype = dtype("q_dtype", o.q_dtype);
  to.kv_dtype = dtype("kv_dtype", o.kv_dtype);
  to.v_dtype = o.v_dtype == FBSR_DTYPE_OF_ARRAYS ? to.kv_dtype : dtype("v_dtype", o.v_dtype);
  to.o_dtype = dtype("o_dtype", o.o_dtype);
  check_types(to);
  to.sm_scale = o.sm_scale == 0
                    ? static_cast<float>(1 / std::sqrt(static_cast<double>(o.head_dim_qk)))
                    : o.sm_scale;
  finite("logits_soft_cap", o.logits_soft_cap);
  if (o.logits_soft_cap < 0) {
    refuse(ErrorCode::kValue, "logits_soft_cap", std::to_string(o.logits_soft_cap),
           "a positive number, or None or 0: off");
  }
  to.soft_cap = o.logits_soft_cap;
  switch (choice("position", o.position, FBSR_POSITION_NONE, FBSR_POSITION_ALIBI)) {
    case FBSR_POSITION_ROPE_LLAMA: to.position = Position::kRopeLlama; break;
    case FBSR_POSITION_ALIBI: to.position = Position::kAlibi; break;
    default: to.position = Position::kNone;
  }
  const bool sigmoid =
      choice("activation", o.activation, FBSR_SOFTMAX, FBSR_SIGMOID) == FBSR_SIGMOID;
  to.activation = sigmoid ? Activation::kSigmoid : Activation::kSoftmax;
  finite("sigmoid_bias", o.sigmoid_bias);
  if (o.sigmoid_bias != 0 && !sigmoid) {
    refuse(ErrorCode::kValue, "sigmoid_bias", std::to_string(o.sigmoid_bias),
           "0 unless activation='sigmoid'");
  }
  to.sigmoid_bias = o.sigmoid_bias;
  to.lse_base2 = boolean("lse_base2", o.lse_base2);
  check_rope(o, to.position == Position::kRopeLlama);
  RopeFrequencies& f = to.rope.frequencies;
  f.theta = o.rope_theta;
  f.scale = o.rope_scale;
  f.llama31 = boolean("rope_llama31", o.rope_llama31);
  f.low_freq_factor = o.rope_low_freq_factor;
  f.high_freq_factor = o.rope_high_freq_factor;
  f.old_context_len = o.rope_old_context_len;
  to.rope.rotary_dim = o.rotary_dim == 0 ? o.head_dim_qk : o.rotary_dim;
  to.rope.interleave = boolean("rope_interleave", o.rope_interleave);
  to.fast_fp8 = boolean("fp8_accumulation_fast", o.fp8_accumulation_fast);
  const int32_t backend = choice("backend", o.backend, FBSR_BACKEND_AUTO, FBSR_BACKEND_FA3);
  check_schedule(o);
  to.split = {.fixed_size = o.fixed_split_size,
              .disabled = boolean("disable_split_kv", o.disable_split_kv)};
  to.capacity = {.max_requests = o.max_batch_size,
                 .max_q_tokens = o.max_q_tokens,
                 .max_kv_indices = o.max_kv_pages,
                 .max_kv_len = o.max_kv_len};
  to.num_workers = o.num_workers;
  to.num_threads = o.num_threads;
  to.backend = backend == FBSR_BACKEND_AUTO  ? api::BackendChoice::kAuto
               : backend == FBSR_BACKEND_CPU ? api::BackendChoice::kCpu
                                             : api::BackendChoice::kCuda;
  to.family = backend == FBSR_BACKEND_FA2   ? api::Family::kFa2
              : backend == FBSR_BACKEND_FA3 ? api::Family::kFa3
                                            : api::Family::kAuto;
  to.device = o.device;
  return to;
}

}  // namespace flashbsr::c
