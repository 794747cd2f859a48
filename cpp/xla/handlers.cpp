// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "handlers.h"

#include <bit>
#include <charconv>
#include <exception>

#include "../api/numbered.h"
#include "../api/ops.h"
#include "../api/ops_common.h"
#include "node.h"

namespace flashbsr::xla {

namespace {

using api::Array;

/// An attribute, of one attention or of one for each device; or on the CPU an operand, where
/// another one does not compile the program again.
int64_t number_of(const Node& node) {
  const Array* handle = node.find("handle");
  if (!handle) {
    int64_t found = -1;
    int32_t count = 0;
    const int32_t device = node.number("attentions", 1) == 1 ? 0 : node.device();
    node.each("numbers", [&](std::string_view number) {
      if (count++ == device) std::from_chars(number.begin(), number.end(), found);
    });
    if (device < count) return found;
    throw Error(ErrorCode::kDevice, "attention", "a node on device " + std::to_string(device),
                "one Attention, or one for each device; there are " + std::to_string(count));
  }
  if (node.on_cuda()) {
    throw Error(ErrorCode::kUnsupported, "attention", "a handle in a GPU's program",
                "the Attention itself: the host would have to wait for an operand's value");
  }
  api::check_shape(*handle, {});
  api::check_element(*handle, {api::Element::kI32, api::Element::kI64});
  return handle->element == api::Element::kI64 ? *static_cast<const int64_t*>(handle->data)
                                               : *static_cast<const int32_t*>(handle->data);
}

/// One number, or one per head.
api::Scale scale_of(const Node& node, std::string_view name) {
  api::Scale scale{.number = static_cast<float>(node.number(name, 1.0)),
                   .per_head = node.find(name)};
  if (scale.per_head && scale.per_head->ndim == 0 && !node.on_cuda()) {
    api::check_element(*scale.per_head, {api::Element::kF32});
    scale.number = *static_cast<const float*>(scale.per_head->data);
    scale.per_head = nullptr;
  }
  return scale;
}

uint32_t bits_of(const api::ExtraOption& extra, double value) {
  if (extra.element == api::Element::kF32)
    return std::bit_cast<uint32_t>(static_cast<float>(value));
  if (value < -2147483648.0 || value >= 2147483648.0 ||
      value != static_cast<double>(static_cast<int32_t>(value))) {
    throw Error(ErrorCode::kValue, extra.name, std::to_string(value), "an integer of 32 bits");
  }
  return static_cast<uint32_t>(static_cast<int32_t>(value));
}

/// Values of what the variant declares, and of nothing else.
std::vector<api::ExtraValue> extra_values(const Node& node,
                                          const std::vector<api::ExtraOption>& options) {
  std::vector<api::ExtraValue> values;
  std::string declared;
  for (const api::ExtraOption& extra : options) {
    declared += "," + extra.name;
    const std::optional<double> number = node.number(extra.name);
    const Array* array = node.find(extra.name);
    if (extra.rank == 0 ? !number : !array) {
      throw Error(ErrorCode::kValue, extra.name, number || array ? "another kind" : "nothing",
                  std::string(extra.rank == 0 ? "a number" : "an array") + ", as declared");
    }
    values.push_back({.bits = number ? bits_of(extra, *number) : 0, .array = array});
  }
  node.each("extras", [&](std::string_view name) {
    if ((declared + ",").find("," + std::string(name) + ",") != std::string::npos) return;
    throw Error(
        ErrorCode::kValue, std::string(name), "a value",
        "no such argument; the spec's extras: " + (declared.empty() ? "none" : declared.substr(1)));
  });
  return values;
}

void run(const Node& node) {
  const api::Used attention(number_of(node));
  const Array* stacked = node.find("kv");
  const Array out = node.result(0, "out");
  std::optional<Array> lse;
  if (node.results() > 1) lse = node.result(1, "lse");
  const api::RunArrays arrays{.q = node.operand("q"),
                              .k = stacked ? *stacked : node.operand("k"),
                              .v = stacked ? nullptr : &node.operand("v"),
                              .out = out,
                              .lse = lse ? &*lse : nullptr,
                              .q_scale = scale_of(node, "q_scale"),
                              .k_scale = scale_of(node, "k_scale"),
                              .v_scale = scale_of(node, "v_scale"),
                              .sinks = node.find("sinks"),
                              .alibi_slopes = node.find("alibi_slopes"),
                              .extras = extra_values(node, attention->extras())};
  const api::RunOptions options{.stream = node.stream(),
                                .overlap = node.on_cuda() ? Overlap::kPrologue : Overlap::kNone,
                                .check = attention.check()};
  const Array* lens = node.find("kv_lens");
  if (!lens) return attention->run(arrays, options);
  attention->run(arrays,
                 {.kv_lens = *lens,
                  .block_tables = node.maybe("block_tables"),
                  .kv_indptr = node.maybe("kv_indptr"),
                  .kv_indices = node.maybe("kv_indices"),
                  .qo_indptr = node.maybe("qo_indptr"),
                  .q_positions = node.maybe("q_positions")},
                 options);
}

/// The results are the caches, which XLA has made the operands' own memory, or copies of it.
void append(const Node& node) {
  api::append_paged_kv_cache({.key = node.operand("append_key"),
                              .value = node.operand("append_value"),
                              .k_cache = node.result(0, "k_cache"),
                              .v_cache = node.result(1, "v_cache"),
                              .positions = std::nullopt,
                              .table = std::nullopt,
                              .slot_mapping = node.operand("slot_mapping"),
                              .hnd = node.number("hnd", 0) != 0,
                              .k_scale = static_cast<float>(node.number("k_scale", 1)),
                              .v_scale = static_cast<float>(node.number("v_scale", 1))},
                             node.stream());
}

void rope(const Node& node) {
  api::RopeSettings settings;
  settings.rotary_dim = static_cast<int32_t>(node.number("rotary_dim", 0));
  settings.interleave = node.number("interleave", 0) != 0;
  RopeFrequencies& f = settings.frequencies;
  f.scale = node.number("rope_scale", 1);
  f.theta = node.number("rope_theta", 1e4);
  if (const std::optional<double> low = node.number("low_freq_factor")) {
    f.llama31 = true;
    f.low_freq_factor = *low;
    f.high_freq_factor = node.number("high_freq_factor", 4);
    f.old_context_len = node.number("old_context_len", 8192);
  }
  api::apply_rope(
      {node.operand("q"), node.operand("k"), node.result(0, "q"), node.result(1, "k")},
      {.positions = node.operand("pos_ids"), .indptr = std::nullopt, .offsets = std::nullopt},
      settings, node.stream());
}

void merge(const Node& node) {
  api::merge_state({node.operand("v_a"), node.operand("s_a")},
                   {node.operand("v_b"), node.operand("s_b")},
                   {node.result(0, "v"), node.result(1, "s")}, nullptr,
                   node.number("base2", 0) != 0, node.stream());
}

Failure* fail(const Api& api, const std::string& text) {
  constexpr int32_t kInvalidArgument = 3;
  NewFailure made{sizeof(NewFailure), nullptr, text.c_str(), kInvalidArgument};
  return api.new_failure(&made);
}

/// XLA takes handlers of versions up to its own. The layouts are those of all that are named here,
/// so that the answer may be its own, too. `api`: null in jaxlib 0.6, which asks without.
void describe(const Api* api, uint32_t traits, Metadata& to) {
  const int32_t theirs = api ? api->version.minor : kFirstMinor;
  to.version.bytes = sizeof(Version);
  to.version.major = kMajor;
  to.version.minor = theirs < kFirstMinor ? kFirstMinor : theirs < kLastMinor ? theirs : kLastMinor;
  to.traits = traits;
}

template <void (*body)(const Node&), bool cuda, uint32_t traits>
Failure* handle(Frame* frame) {
  if (frame->extensions && frame->extensions->kind == 1) {
    describe(frame->api, traits,
             *reinterpret_cast<MetadataExtension*>(frame->extensions)->metadata);
    return nullptr;
  }
  try {
    if (frame->bytes < sizeof(Frame) || frame->stage != kExecute) {
      throw Error(ErrorCode::kUnsupported, "jaxlib", "a call that is not known", "0.5 or later");
    }
    body(Node(*frame, cuda));
    return nullptr;
  } catch (const Error& error) {
    return fail(*frame->api, std::string(error_name(error.code)) + ": " + error.what());
  } catch (const std::exception& error) {
    return fail(*frame->api, error.what());
  }
}

/// `capturable`: a replay of what a call has launched is right whatever happens between the two.
/// Not a run, which follows later plans.
template <void (*body)(const Node&), uint32_t capturable>
Target target(const char* name) {
  return {name, &handle<body, false, 0>, &handle<body, true, capturable>};
}

}  // namespace

const std::vector<Target>& targets() {
  static const std::vector<Target> all{
      target<run, 0>("flashbsr_run"), target<append, kCapturable>("flashbsr_append"),
      target<rope, kCapturable>("flashbsr_rope"), target<merge, kCapturable>("flashbsr_merge")};
  return all;
}

}  // namespace flashbsr::xla
