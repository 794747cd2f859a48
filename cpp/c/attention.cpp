// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// api::Attention for C: it renames, and computes nothing.
#include <memory>

#include "../api/attention.h"
#include "../api/ops_common.h"
#include "../cpu/dispatch.h"
#include "../cuda/backend.h"
#include "guard.h"
#include "options.h"

struct fbsr_attention {
  std::shared_ptr<flashbsr::api::Attention> engine;
  flashbsr::api::AttentionOptions options;
  bool check = false;
};

namespace flashbsr::c {

std::string& last_error() {
  thread_local std::string text;
  return text;
}

namespace {

api::Attention& engine_of(fbsr_attention* attention, const char* name = "attention") {
  if (attention) return *attention->engine;
  throw Error(ErrorCode::kValue, name, "NULL", "a handle of fbsr_attention_create");
}

/// Throws for an array that the kind of layout does not have.
void refuse_others(const fbsr_layout& l, const char* kind,
                   std::initializer_list<const fbsr_tensor*> taken) {
  const std::pair<const char*, const fbsr_tensor*> all[] = {
      {"qo_indptr", l.qo_indptr},   {"kv_indptr", l.kv_indptr},
      {"kv_indices", l.kv_indices}, {"last_page_len", l.last_page_len},
      {"kv_lens", l.kv_lens},       {"block_tables", l.block_tables}};
  for (const auto& [name, tensor] : all) {
    if (!tensor || std::find(taken.begin(), taken.end(), tensor) != taken.end()) continue;
    throw Error(ErrorCode::kValue, name, "a tensor", std::string("NULL with ") + kind);
  }
}

api::Array host_array(const fbsr_tensor* tensor, const char* name) {
  if (tensor) return *maybe_host_array(tensor, name);
  throw Error(ErrorCode::kValue, name, "NULL", "a tensor");
}

api::LayoutArrays layout_of(const fbsr_layout& l, int32_t num_kv_heads) {
  const int32_t kind = choice("kind", l.kind, FBSR_RAGGED, FBSR_BOUNDS);
  const bool per_head = boolean("per_head", l.per_head);
  if (per_head && kind != FBSR_BOUNDS) {
    throw Error(ErrorCode::kValue, "per_head", "1", "0 unless the layout is FBSR_BOUNDS");
  }
  if (kind != FBSR_RAGGED && l.page_size < 1) {
    throw Error(ErrorCode::kValue, "page_size", std::to_string(l.page_size), "at least 1");
  }
  std::optional<api::Array> qo = maybe_host_array(l.qo_indptr, "qo_indptr");
  if (kind == FBSR_RAGGED) {
    refuse_others(l, "FBSR_RAGGED", {l.qo_indptr, l.kv_indptr});
    return api::RaggedArrays{.qo_indptr = qo, .kv_indptr = host_array(l.kv_indptr, "kv_indptr")};
  }
  if (kind == FBSR_PAGED) {
    refuse_others(l, "FBSR_PAGED",
                  {l.qo_indptr, l.kv_indptr, l.kv_indices, l.last_page_len, l.kv_lens});
    return api::PagedArrays{.qo_indptr = qo,
                            .kv_indptr = host_array(l.kv_indptr, "kv_indptr"),
                            .kv_indices = host_array(l.kv_indices, "kv_indices"),
                            .last_page_len = maybe_host_array(l.last_page_len, "last_page_len"),
                            .kv_lens = maybe_host_array(l.kv_lens, "kv_lens"),
                            .page_size = l.page_size};
  }
  if (kind == FBSR_BLOCK_TABLE) {
    refuse_others(l, "FBSR_BLOCK_TABLE", {l.qo_indptr, l.block_tables, l.kv_lens});
    return api::BlockTableArrays{.qo_indptr = qo,
                                 .block_tables = host_array(l.block_tables, "block_tables"),
                                 .kv_lens = host_array(l.kv_lens, "kv_lens"),
                                 .page_size = l.page_size};
  }
  refuse_others(l, "FBSR_BOUNDS", {l.qo_indptr, l.kv_lens});
  return api::BoundsArrays{.qo_indptr = qo,
                           .kv_lens = host_array(l.kv_lens, "kv_lens"),
                           .page_size = l.page_size,
                           .heads = per_head ? num_kv_heads : 0,
                           .common_prefix = 0};
}

/// A draft's position is its depth, and kernels count along the drafts.
void check_trees(const api::AttentionOptions& options) {
  if (options.position != Position::kNone) {
    throw Error(ErrorCode::kUnsupported, "pos_encoding_mode", "a position encoding",
                "'NONE' with tree_parents: a draft's position is its depth. Rotate q and k first");
  }
  if (options.shape.window_left >= 0) {
    throw Error(ErrorCode::kUnsupported, "window_left", std::to_string(options.shape.window_left),
                "-1 with tree_parents: a draft's window ends at its depth. Write tree and window "
                "into one custom_mask");
  }
}

api::LengthArrays lengths_of(const fbsr_lengths& l) {
  api::LengthArrays to{.kv_lens = array(l.kv_lens, "kv_lens"),
                       .block_tables = maybe_array(l.block_tables, "block_tables"),
                       .kv_indptr = maybe_array(l.kv_indptr, "kv_indptr"),
                       .kv_indices = maybe_array(l.kv_indices, "kv_indices"),
                       .qo_indptr = maybe_array(l.qo_indptr, "qo_indptr"),
                       .q_positions = maybe_array(l.q_positions, "q_positions")};
  return to;
}

/// A number, or an array in its place.
api::Scale scale_of(const char* name, float number, const std::optional<api::Array>& per_head,
                    const std::optional<api::Array>& per_token) {
  if (per_head && number != 1) {
    throw Error(ErrorCode::kValue, name, "a number and an array", "one of them");
  }
  return {.number = number,
          .per_head = per_head ? &*per_head : nullptr,
          .per_token = per_token ? &*per_token : nullptr};
}

const api::Array* pointer(const std::optional<api::Array>& a) { return a ? &*a : nullptr; }

api::RunOptions run_options(const fbsr_run_arguments& a, bool on_device, bool check) {
  const bool no_overlap = boolean("disable_pdl", a.disable_pdl),
             ready = boolean("kv_ready", a.kv_ready);
  if (no_overlap && ready) {
    throw Error(ErrorCode::kValue, "kv_ready", "1", "0 with disable_pdl");
  }
  if (!on_device && (ready || a.stream)) {
    throw Error(ErrorCode::kUnsupported, ready ? "kv_ready" : "stream", "a value",
                "the default: q is in host memory, where nothing is launched");
  }
  return {.stream = a.stream,
          .overlap = !on_device || no_overlap ? Overlap::kNone
                     : ready                  ? Overlap::kKv
                                              : Overlap::kPrologue,
          .check = check || api::checking(),
          .wait = false};
}

void run(fbsr_attention* attention, const fbsr_run_arguments& a) {
  api::Attention& engine = engine_of(attention);
  const api::Array q = array(a.q, "q"), k = array(a.k, a.v ? "k" : "kv"), out = array(a.out, "out");
  const auto v = maybe_array(a.v, "v"), lse = maybe_array(a.lse, "lse"),
             q_heads = maybe_array(a.q_scale_per_head, "q_scale"),
             k_heads = maybe_array(a.k_scale_per_head, "k_scale"),
             v_heads = maybe_array(a.v_scale_per_head, "v_scale"),
             k_tokens = maybe_array(a.k_scale_per_token, "k_scale"),
             v_tokens = maybe_array(a.v_scale_per_token, "v_scale"),
             sinks = maybe_array(a.sinks, "sinks"),
             slopes = maybe_array(a.alibi_slopes, "alibi_slopes");
  const api::RunArrays arrays{.q = q,
                              .k = k,
                              .v = pointer(v),
                              .out = out,
                              .lse = pointer(lse),
                              .q_scale = scale_of("q_scale", a.q_scale, q_heads, std::nullopt),
                              .k_scale = scale_of("k_scale", a.k_scale, k_heads, k_tokens),
                              .v_scale = scale_of("v_scale", a.v_scale, v_heads, v_tokens),
                              .sinks = pointer(sinks),
                              .alibi_slopes = pointer(slopes),
                              .extras = {}};
  const api::RunOptions options = run_options(a, q.place.cuda, attention->check);
  if (!a.lengths) return engine.run(arrays, options);
  engine.run(arrays, lengths_of(checked(a.lengths, "lengths")), options);
}

}  // namespace

}  // namespace flashbsr::c

using namespace flashbsr;

const char* fbsr_status_name(fbsr_status status) {
  if (status == FBSR_OK) return "OK";
  if (status == FBSR_ERROR_NO_MEMORY) return "MemoryError";
  const bool known = status > FBSR_OK && status <= FBSR_ERROR_CUDA;
  return known ? error_name(static_cast<ErrorCode>(static_cast<int>(status) - 1)) : "InternalError";
}

const char* fbsr_last_error(void) { return c::last_error().c_str(); }
uint32_t fbsr_abi_version(void) { return FBSR_ABI_VERSION; }
const char* fbsr_version(void) { return FLASHBSR_VERSION; }
const char* fbsr_isa(void) { return cpu::chosen_table().isa; }

const char* fbsr_cuda_problem(void) {
  thread_local std::string text;
  text = cuda::why_unavailable();
  return text.c_str();
}

fbsr_status fbsr_attention_options_init(fbsr_attention_options* options, size_t size) {
  return c::initialise(options, size, c::default_options());
}

fbsr_status fbsr_attention_create(const fbsr_attention_options* options,
                                  fbsr_attention** attention) {
  return c::guarded([&] {
    if (!attention) throw Error(ErrorCode::kValue, "attention", "NULL", "where to write a handle");
    *attention = nullptr;
    const fbsr_attention_options& given = c::checked(options, "options");
    auto made = std::make_unique<fbsr_attention>();
    made->options = c::checked_options(given);
    made->check = c::boolean("check", given.check);
    made->engine = std::make_shared<api::Attention>(made->options);
    if (given.workspace_bytes >= 0) made->engine->set_workspace_bytes(given.workspace_bytes);
    *attention = made.release();
  });
}

void fbsr_attention_destroy(fbsr_attention* attention) { delete attention; }

fbsr_status fbsr_set_workspace(fbsr_attention* attention, const fbsr_tensor* workspace) {
  return c::guarded(
      [&] { c::engine_of(attention).set_workspace(c::array(workspace, "workspace")); });
}

fbsr_status fbsr_workspace_size(fbsr_attention* attention, int64_t* bytes) {
  return c::guarded([&] {
    if (!bytes) throw Error(ErrorCode::kValue, "bytes", "NULL", "where to write a number");
    *bytes = c::engine_of(attention).workspace_size();
  });
}

fbsr_status fbsr_kernel_name(fbsr_attention* attention, char* text, size_t size) {
  return c::guarded([&] {
    if (!text || size == 0) throw Error(ErrorCode::kValue, "text", "no room", "1 byte or more");
    const std::string name = c::engine_of(attention).kernel_name();
    const size_t length = std::min(name.size(), size - 1);
    std::memcpy(text, name.data(), length);
    text[length] = 0;
  });
}

fbsr_status fbsr_layout_init(fbsr_layout* layout, size_t size) {
  return c::initialise(layout, size, fbsr_layout{});
}

fbsr_status fbsr_plan_options_init(fbsr_plan_options* options, size_t size) {
  fbsr_plan_options defaults{};
  defaults.share_prefixes = 1;
  return c::initialise(options, size, defaults);
}

fbsr_status fbsr_plan(fbsr_attention* attention, const fbsr_layout* layout,
                      const fbsr_plan_options* options) {
  return c::guarded([&] {
    cuda::sweep();
    api::Attention& engine = c::engine_of(attention);
    fbsr_plan_options o{};
    o.share_prefixes = 1;
    if (options) o = c::checked(options, "options");
    const fbsr_layout& l = c::checked(layout, "layout");
    if (o.tree_parents) c::check_trees(attention->options);
    engine.plan(c::layout_of(l, attention->options.shape.num_kv_heads),
                {.mask = {.boolean = c::maybe_host_array(o.custom_mask, "custom_mask"),
                          .packed = c::maybe_host_array(o.packed_custom_mask, "packed_custom_mask"),
                          .parents = c::maybe_host_array(o.tree_parents, "tree_parents")},
                 .q_positions = c::maybe_host_array(o.q_positions, "q_positions"),
                 .share = c::boolean("share_prefixes", o.share_prefixes),
                 .stream = o.stream});
  });
}

fbsr_status fbsr_plan_like(fbsr_attention* attention, fbsr_attention* like, void* stream) {
  return c::guarded([&] {
    cuda::sweep();
    c::engine_of(attention).plan(c::engine_of(like, "like"), stream);
  });
}

fbsr_status fbsr_lengths_init(fbsr_lengths* lengths, size_t size) {
  return c::initialise(lengths, size, fbsr_lengths{});
}

fbsr_status fbsr_update(fbsr_attention* attention, const fbsr_lengths* lengths, void* stream) {
  return c::guarded([&] {
    api::Attention& engine = c::engine_of(attention);
    engine.update(c::lengths_of(c::checked(lengths, "lengths")),
                  {.stream = stream, .check = attention->check || api::checking()});
  });
}

fbsr_status fbsr_run_arguments_init(fbsr_run_arguments* arguments, size_t size) {
  fbsr_run_arguments defaults{};
  defaults.q_scale = defaults.k_scale = defaults.v_scale = 1;
  return c::initialise(arguments, size, defaults);
}

fbsr_status fbsr_run(fbsr_attention* attention, const fbsr_run_arguments* arguments) {
  return c::guarded([&] { c::run(attention, c::checked(arguments, "arguments")); });
}
