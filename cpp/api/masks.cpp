// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Masks of a plan, as bits behind each other.
#include <algorithm>
#include <string>

#include <flashbsr/core/math.h>
#include <flashbsr/cpu/bits.h>

#include "arrays.h"

namespace flashbsr::api {

namespace {

void check_bytes(const char* name, int64_t actual, int64_t expected, const char* what) {
  if (actual == expected) return;
  throw Error(ErrorCode::kShape, name, std::to_string(actual) + " elements",
              std::to_string(expected) + " (" + what + ")");
}

const Array& one_mask(const MaskArrays& mask) {
  if (mask.boolean && mask.packed) {
    throw Error(ErrorCode::kValue, mask.packed->name, "both masks",
                "a boolean mask or a packed one");
  }
  if (mask.parents && (mask.boolean || mask.packed)) {
    throw Error(ErrorCode::kValue, mask.parents->name, "an array next to a mask",
                "None: a mask says all there is to say, or the mask without");
  }
  return mask.boolean ? *mask.boolean : mask.packed ? *mask.packed : *mask.parents;
}

/// The tokens of a tree that are keys here: of every request, `tokens` from `begin` on.
struct TreeKeys {
  std::vector<int32_t> tokens;
  std::vector<size_t> begin;

  /// The keys from the position of the first query on, which the mask will have bits of.
  void find(const Shape& shape, Layout& layout) {
    PlanHeader h{};
    shape.write_visibility(h);
    for (size_t b = 0; b < layout.requests.size(); ++b) {
      Request& r = layout.requests[b];
      const int32_t first = layout.positions[b];
      r.mask_begin = max_of(min_of(keys_before(h, first), r.kv_len), 0);
      begin.push_back(tokens.size());
      for (int32_t j = r.mask_begin; j < r.kv_len; ++j) {
        const int64_t token = int64_t{key_position(h, j)} - first;
        if (token >= r.q_len) {
          flashbsr::detail::bad_index(flashbsr::detail::at("q_positions", r.index), first,
                                      "the position of a tree's first token: there are keys here "
                                      "behind its last one");
        }
        tokens.push_back(static_cast<int32_t>(token));
      }
    }
    flashbsr::detail::finish(layout);
  }
};

/// Every query token sees what its parent sees, and itself.
void take_tree(const Array& parents, const Shape* placed, Layout& layout,
               std::vector<uint8_t>& bits) {
  const IndexView parent = indices(parents);
  flashbsr::detail::check_length(parents.name, parent.size, layout.num_q_tokens,
                                 "one per query token");
  TreeKeys keys;
  if (placed) {
    keys.find(*placed, layout);
  } else {
    mask_new_tokens(layout, parents.name);
  }
  place_masks(layout);
  bits.assign(static_cast<size_t>(layout.mask_bytes), 0);
  for (size_t b = 0; b < layout.requests.size(); ++b) {
    const Request& r = layout.requests[b];
    const int64_t columns = r.kv_len - r.mask_begin;
    uint8_t* out = bits.data() + r.mask_offset();
    const auto keep = [&](int64_t bit) {
      out[bit / 8] = static_cast<uint8_t>(out[bit / 8] | 1 << (bit % 8));
    };
    for (int64_t t = 0; t < r.q_len; ++t) {
      const int64_t above = parent[r.q_begin + t];
      if (above < -1 || above >= t) {
        flashbsr::detail::bad_index(flashbsr::detail::at(parents.name, r.q_begin + t), above,
                                    "-1 or an earlier token of the request, in [0, " +
                                        std::to_string(t) +
                                        "): counted from its first, parents before children");
      }
      int64_t column = columns - 1;
      for (int64_t a = t; a >= 0; a = parent[r.q_begin + a]) {
        if (!placed) {
          keep(t * columns + a);
          continue;
        }
        const int32_t* token = keys.tokens.data() + keys.begin[b];
        while (column >= 0 && token[column] > a) --column;
        if (column >= 0 && token[column] == a) keep(t * columns + column);
      }
    }
  }
}

}  // namespace

void take_mask(const MaskArrays& mask, const Shape* placed, Layout& layout,
               std::vector<uint8_t>& bits) {
  const Array& a = one_mask(mask);
  if (mask.parents) return take_tree(a, placed, layout, bits);
  check_contiguous(a);
  const uint8_t* in = static_cast<const uint8_t*>(a.data);
  place_masks(layout);
  bits.assign(static_cast<size_t>(layout.mask_bytes), 0);
  if (mask.packed) {
    check_element(a, {Element::kU8});
    check_bytes(a.name, a.size(), layout.mask_bytes,
                "bytes: sum of ceil(q_len * kv_len / 8) over the requests");
    std::copy(in, in + a.size(), bits.begin());
    return;
  }
  check_element(a, {Element::kBool, Element::kU8});
  check_bytes(a.name, a.size(), layout.mask_bits, "sum of q_len * kv_len over the requests");
  for (const Request& r : layout.requests) {
    const int64_t count = static_cast<int64_t>(r.q_len) * r.kv_len;
    cpu::pack_bits(in, count, bits.data() + r.mask_offset(), true);
    in += count;
  }
}

/// Block masks come block after block, [blocks, r, c]. In the layout a block row is one request
/// whose columns are its blocks side by side, a short one at the end.
void take_block_mask(const MaskArrays& mask, int64_t r, const IndexView& columns, Layout& layout,
                     std::vector<uint8_t>& bits) {
  const Array& a = one_mask(mask);
  check_contiguous(a);
  const int64_t c = layout.page_size;
  const int64_t blocks = static_cast<int64_t>(layout.kv_indices.size());
  if (mask.packed) {
    check_element(a, {Element::kU8});
    check_bytes(a.name, a.size(), ceil_div<int64_t>(blocks * r * c, 8), "ceil(blocks * R * C / 8)");
  } else {
    check_element(a, {Element::kBool, Element::kU8});
    check_shape(a, {blocks, r, c});
  }
  const uint8_t* in = static_cast<const uint8_t*>(a.data);
  const auto kept = [&](int64_t i) { return mask.packed ? in[i / 8] >> (i % 8) & 1 : in[i] != 0; };
  place_masks(layout);
  bits.assign(static_cast<size_t>(layout.mask_bytes), 0);
  for (const Request& request : layout.requests) {
    uint8_t* out = bits.data() + request.mask_offset();
    // The layout has exchanged a short block with the last one of the row.
    const int64_t end = request.kv_begin + ceil_div<int64_t>(request.kv_len, c), last = end - 1;
    int64_t moved = last;
    for (int64_t i = request.kv_begin; i < end; ++i) {
      if (columns[i] != layout.kv_indices[static_cast<size_t>(i)]) {
        moved = i;
        break;
      }
    }
    for (int64_t row = 0; row < request.q_len; ++row) {
      for (int64_t column = 0; column < request.kv_len; ++column) {
        int64_t block = request.kv_begin + column / c;
        block = block == moved ? last : block == last ? moved : block;
        const int64_t bit = row * request.kv_len + column;
        if (kept((block * r + row) * c + column % c)) {
          out[bit / 8] = static_cast<uint8_t>(out[bit / 8] | 1 << (bit % 8));
        }
      }
    }
  }
}

}  // namespace flashbsr::api
