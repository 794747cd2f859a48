// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What XLA and a handler of its programs' nodes hand each other: the C structs of XLA's foreign
// function interface, up to what is used, under names of our own. They are an interface that XLA
// keeps between versions: with them one build serves every jaxlib, with no header of it at build
// time and no compiler at the user's. tests/build/test_xla.py holds them against jaxlib's header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashbsr::xla {

/// The versions whose layouts these are: 0.1 (jaxlib 0.6) to 0.5 (jaxlib 0.12).
constexpr int32_t kMajor = 0, kFirstMinor = 1, kLastMinor = 5;

/// Each struct begins with its size, and with extensions, of which one matters.
struct Extension {
  size_t bytes;
  int32_t kind;  ///< 1: Metadata follows
  Extension* next;
};

struct Version {
  size_t bytes;
  Extension* extensions;
  int32_t major, minor;
};

/// Of a node's operand or result, which lies densely, rows last.
struct Buffer {
  size_t bytes;
  Extension* extensions;
  int32_t type;
  void* data;
  int64_t rank;
  int64_t* dims;
};

/// Operands, or results; kind 1 is a Buffer.
struct Buffers {
  size_t bytes;
  Extension* extensions;
  int64_t size;
  int32_t* kinds;
  void** items;
};

struct Text {
  const char* data;
  size_t size;
};

struct Scalar {
  int32_t type;
  void* value;
};

constexpr int32_t kScalar = 3, kText = 4;  ///< kinds of attributes

/// Constants of the node, by name.
struct Attributes {
  size_t bytes;
  Extension* extensions;
  int64_t size;
  int32_t* kinds;
  Text** names;
  void** items;
};

struct Failure;  ///< XLA's; null: none
struct Context;  ///< of a node that runs

struct NewFailure {
  size_t bytes;
  Extension* extensions;
  const char* text;
  int32_t code;
};

struct GetStream {
  size_t bytes;
  Extension* extensions;
  Context* context;
  void* stream;  ///< result
};

struct GetDevice {
  size_t bytes;
  Extension* extensions;
  Context* context;
  int32_t ordinal;  ///< result
};

/// Functions of XLA's.
struct Api {
  size_t bytes;
  Extension* extensions;
  Version version;
  const void* internal;
  Failure* (*new_failure)(NewFailure*);
  void* others[3];
  Failure* (*get_stream)(GetStream*);
  void* more[12];
  Failure* (*get_device)(GetDevice*);
};

constexpr int32_t kExecute = 3;  ///< the only stage that these handlers have

/// One call of a handler.
struct Frame {
  size_t bytes;
  Extension* extensions;
  const Api* api;
  Context* context;
  int32_t stage;
  Buffers operands;
  Buffers results;
  Attributes attributes;
};

/// What XLA asks of a handler when it is registered.
struct Metadata {
  size_t bytes;
  Version version;
  uint32_t traits;
};

constexpr uint32_t kCapturable = 1;  ///< the same work on the device, however often it is replayed

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

using Handler = Failure* (*)(Frame*);

}  // namespace flashbsr::xla
