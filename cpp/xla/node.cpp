// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "node.h"

namespace flashbsr::xla {

namespace {

using api::Element;

struct TypeRow {
  int32_t type;
  Element element;
};
constexpr TypeRow kTypes[] = {{11, Element::kF32},  {10, Element::kF16},  {16, Element::kBF16},
                              {20, Element::kE4M3}, {19, Element::kE5M2}, {4, Element::kI32},
                              {5, Element::kI64},   {6, Element::kU8},    {1, Element::kBool}};
constexpr int32_t kInt32 = 4, kInt64 = 5, kFloat64 = 12;

[[noreturn]] void refuse(const char* what) {
  throw Error(ErrorCode::kUnsupported, "jaxlib", what, "0.6 or later");
}

}  // namespace

Node::Node(const Frame& frame, bool cuda) : frame_(frame) {
  if (cuda) {
    place_ = {.cuda = true, .device = device()};
    GetStream stream{sizeof(GetStream), nullptr, frame.context, nullptr};
    if (frame.api->get_stream(&stream)) refuse("one without streams");
    stream_ = stream.stream;
  }
  operands_.reserve(static_cast<size_t>(frame.operands.size));
  each("names", [&](std::string_view name) {
    const auto at = static_cast<int64_t>(operands_.size());
    if (at == frame.operands.size) return;
    Named& named = operands_.emplace_back(Named{std::string(name), {}});
    named.array = array(frame.operands, at, named.name.c_str());
  });
}

// A failure of XLA's would be the handler's to free: every node has a device, and on a GPU a
// stream.
int32_t Node::device() const {
  if (frame_.api->bytes < sizeof(Api)) refuse("one that does not say where a node is");
  GetDevice device{sizeof(GetDevice), nullptr, frame_.context, 0};
  if (frame_.api->get_device(&device)) refuse("one that does not say where a node is");
  return device.ordinal;
}

const api::Array* Node::find(std::string_view name) const {
  for (const Named& named : operands_) {
    if (named.name == name) return &named.array;
  }
  return nullptr;
}

const api::Array& Node::operand(std::string_view name) const {
  const api::Array* found = find(name);
  if (!found) throw Error(ErrorCode::kValue, std::string(name), "no operand", "an array");
  return *found;
}

std::optional<api::Array> Node::maybe(std::string_view name) const {
  const api::Array* found = find(name);
  return found ? std::optional<api::Array>(*found) : std::nullopt;
}

api::Array Node::result(int64_t at, const char* name) const {
  return array(frame_.results, at, name);
}

const void* Node::attribute(std::string_view name, int32_t kind) const {
  const Attributes& all = frame_.attributes;
  for (int64_t i = 0; i < all.size; ++i) {
    if (all.kinds[i] == kind && std::string_view(all.names[i]->data, all.names[i]->size) == name) {
      return all.items[i];
    }
  }
  return nullptr;
}

std::string_view Node::text(std::string_view name) const {
  const auto* found = static_cast<const Text*>(attribute(name, kText));
  return found ? std::string_view(found->data, found->size) : std::string_view();
}

std::optional<double> Node::number(std::string_view name) const {
  const auto* found = static_cast<const Scalar*>(attribute(name, kScalar));
  if (!found) return std::nullopt;
  switch (found->type) {
    case kInt32: return *static_cast<const int32_t*>(found->value);
    case kInt64: return static_cast<double>(*static_cast<const int64_t*>(found->value));
    case kFloat64: return *static_cast<const double*>(found->value);
    default:
      throw Error(ErrorCode::kDType, std::string(name), "another type", "int32, int64 or float64");
  }
}

api::Array Node::array(const Buffers& from, int64_t at, const char* name) const {
  const auto& buffer = *static_cast<const Buffer*>(from.items[at]);
  api::Array a;
  a.name = name;
  a.place = place_;
  a.data = buffer.data;
  if (buffer.rank > api::Array::kMaxDims) {
    throw Error(ErrorCode::kShape, name, std::to_string(buffer.rank) + " dimensions",
                "at most " + std::to_string(api::Array::kMaxDims));
  }
  a.ndim = static_cast<int>(buffer.rank);
  int64_t stride = 1;
  for (int i = a.ndim - 1; i >= 0; --i) {
    a.shape[i] = buffer.dims[i];
    a.stride[i] = stride;
    stride *= buffer.dims[i];
  }
  a.element = Element::kOther;
  for (const TypeRow& row : kTypes) {
    if (row.type == buffer.type) a.element = row.element;
  }
  return a;
}

}  // namespace flashbsr::xla
