// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A random attention problem in memory of its own, poisoned with NaN wherever nothing may be read,
// and the same attention as naive loops in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include <flashbsr/core/params.h>
#include <flashbsr/plan/schedule.h>

namespace flashbsr::test {

/// What is special about a problem. Lengths are (query tokens, KV tokens) per request.
struct Case {
  std::string name;
  std::vector<std::pair<int, int>> lengths = {{5, 70}, {1, 300}, {0, 8}, {3, 0}, {17, 17}};
  int num_kv_heads = 2, group = 3;
  int dim_qk = 64, dim_vo = 64;
  int page_size = 16;  ///< 0: ragged KV
  bool head_major = false;
  DType q = DType::kF32, kv = DType::kF32, out = DType::kF32;
  Shape shape = {};  ///< causal and window; the heads are filled in
  float soft_cap = 0;
  bool alibi = false, sinks = false, mask = false, rope = false, head_scales = false;
  bool masks_new_tokens = false;  ///< the mask has no other columns
  Activation activation = Activation::kSoftmax;
  SplitPolicy split = {};
  int num_workers = 8, tile_rows = 16, min_chunk = 64;
};

inline void PrintTo(const Case& c, std::ostream* os) { *os << c.name; }

/// Elements of one type with padding between rows, everything NaN until written.
struct Array {
  DType dtype;
  std::vector<char> bytes;

  Array(DType type, int64_t elements) : dtype(type), bytes(elements * dtype_size(type)) {
    for (int64_t i = 0; i < elements; ++i) set(i, std::numeric_limits<float>::quiet_NaN());
  }
  void set(int64_t i, float x) { store_from_float(bytes.data(), i, dtype, x); }
  double get(int64_t i) const { return load_as_float(bytes.data(), i, dtype); }
};

class Problem {
 public:
  explicit Problem(const Case& c, uint32_t seed = 1)
      : c_(c),
        random_(seed),
        heads_(c.num_kv_heads * c.group),
        q_token_(heads_ * c.dim_qk + 8),
        o_token_(heads_ * c.dim_vo + 8) {
    make_layout();
    const int64_t tokens = layout_.num_q_tokens;
    q_ = std::make_unique<Array>(c.q, tokens * q_token_ + 1);
    out_ = std::make_unique<Array>(c.out, tokens * o_token_ + 1);
    lse_.assign(tokens * heads_, std::numeric_limits<float>::quiet_NaN());
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < heads_ * c.dim_qk; ++i) q_->set(t * q_token_ + i, normal_(random_));
    }
    // One page more than the highest: nobody's.
    k_ = std::make_unique<Array>(c.kv, (layout_.num_kv_rows + 1) * page_elements(c.dim_qk));
    v_ = std::make_unique<Array>(c.kv, (layout_.num_kv_rows + 1) * page_elements(c.dim_vo));
    fill_cache();
    make_extras();
  }

  const Layout& layout() const { return layout_; }
  const Case& spec() const { return c_; }
  const std::vector<char>& out_bytes() const { return out_->bytes; }
  const std::vector<float>& lse() const { return lse_; }

  Shape shape() const {
    Shape s = c_.shape;
    s.num_qo_heads = heads_;
    s.num_kv_heads = c_.num_kv_heads;
    s.custom_mask = c_.mask;
    return s;
  }
  DeviceLimits limits() const {
    DeviceLimits l;
    l.num_workers = c_.num_workers;
    l.tile_rows = c_.tile_rows;
    l.min_chunk = c_.min_chunk;
    return l;
  }

  /// Everything but the partial states.
  Params params() {
    Params p;
    p.q = {q_->bytes.data(), c_.q, layout_.num_q_tokens, heads_, c_.dim_qk, q_token_, c_.dim_qk};
    p.out = {out_->bytes.data(), c_.out,   layout_.num_q_tokens, heads_, c_.dim_vo,
             o_token_,           c_.dim_vo};
    p.k = cache_view(*k_, c_.dim_qk);
    p.v = cache_view(*v_, c_.dim_vo);
    p.lse = lse_.data();
    p.lse_stride_token = heads_;
    p.lse_stride_head = 1;
    p.sm_scale = sm_scale();
    p.out_scale = c_.head_scales ? 0.5f : 1.0f;
    if (c_.head_scales) {
      p.q_head_scale = q_scale_.data();
      p.k_head_scale = k_scale_.data();
      p.v_head_scale = v_scale_.data();
    }
    p.soft_cap = c_.soft_cap;
    if (c_.alibi) p.alibi_slopes = slopes_.data();
    if (c_.sinks) p.sinks = sinks_.data();
    if (c_.mask) p.custom_mask = mask_.data();
    p.sigmoid_bias = -2.0f;
    if (c_.rope) p.rope = {coarse_.data(), fine_.data(), c_.dim_qk / 2};
    return p;
  }

  struct Row {
    std::vector<double> o;          ///< [D_vo]
    std::vector<double> magnitude;  ///< sum over keys of |weight x v|, by which errors scale
    double lse;
  };

  /// One row by the formulas, keys one after the other.
  Row reference(int request, int token, int head) const {
    const Request& r = layout_.requests[request];
    const int kv_head = head / c_.group;
    const int position = r.kv_len - r.q_len + token;
    const double scale =
        sm_scale() * (c_.head_scales ? double{q_scale_[head]} * k_scale_[kv_head] : 1.0);
    std::vector<double> query = load_q(r.q_begin + token, head);
    if (c_.rope) rotate(query, std::max(position, 0));
    std::vector<int> keys;
    std::vector<double> logits;
    for (int j = 0; j < r.kv_len; ++j) {
      if (c_.shape.causal && j > position) continue;
      if (c_.shape.window_left >= 0 && j < position - c_.shape.window_left) continue;
      const int64_t bit =
          8 * r.mask_offset() + int64_t{token} * (r.kv_len - r.mask_begin) + j - r.mask_begin;
      if (c_.mask && j >= r.mask_begin && !(mask_[bit / 8] >> (bit % 8) & 1)) continue;
      std::vector<double> key = load_kv(*k_, c_.dim_qk, r, j, kv_head);
      if (c_.rope) rotate(key, j);
      double x = 0;
      for (int d = 0; d < c_.dim_qk; ++d) x += query[d] * key[d];
      x *= scale;
      if (c_.soft_cap > 0) x = c_.soft_cap * std::tanh(x / c_.soft_cap);
      if (c_.alibi) x += slopes_[head] * double(j - position);
      keys.push_back(j);
      logits.push_back(x);
    }
    return weigh(r, head, keys, logits);
  }

  double out_at(int64_t token, int head, int d) const {
    return out_->get(token * o_token_ + head * c_.dim_vo + d);
  }
  bool padding_untouched() const {
    for (int64_t t = 0; t < layout_.num_q_tokens; ++t) {
      for (int64_t i = heads_ * c_.dim_vo; i < o_token_; ++i) {
        if (!std::isnan(out_->get(t * o_token_ + i))) return false;
      }
    }
    return true;
  }

 private:
  float sm_scale() const { return 1.0f / std::sqrt(static_cast<float>(c_.dim_qk)); }
  int page_tokens() const { return std::max(c_.page_size, 1); }
  int64_t page_elements(int dim) const {
    return int64_t{page_tokens()} * c_.num_kv_heads * dim + 8;  // a gap after each page
  }
  int64_t token_stride(int dim) const {
    return c_.head_major ? dim : int64_t{c_.num_kv_heads} * dim;
  }
  int64_t head_stride(int dim) const { return c_.head_major ? int64_t{page_tokens()} * dim : dim; }

  PagedView cache_view(Array& array, int dim) const {
    return {array.bytes.data(), c_.kv, layout_.num_kv_rows, page_tokens(),
            c_.num_kv_heads,    dim,   page_elements(dim),  token_stride(dim),
            head_stride(dim)};
  }

  int64_t kv_offset(int dim, const Request& r, int j, int kv_head) const {
    const int64_t page =
        layout_.paged ? layout_.kv_indices[r.kv_begin + j / c_.page_size] : int64_t{r.kv_begin} + j;
    const int64_t slot = layout_.paged ? j % c_.page_size : 0;
    return page * page_elements(dim) + slot * token_stride(dim) + kv_head * head_stride(dim);
  }

  std::vector<double> load_q(int64_t token, int head) const {
    std::vector<double> row(c_.dim_qk);
    for (int d = 0; d < c_.dim_qk; ++d) row[d] = q_->get(token * q_token_ + head * c_.dim_qk + d);
    return row;
  }
  std::vector<double> load_kv(const Array& array, int dim, const Request& r, int j, int h) const {
    std::vector<double> row(dim);
    for (int d = 0; d < dim; ++d) row[d] = array.get(kv_offset(dim, r, j, h) + d);
    return row;
  }

  double frequency(int i) const { return std::pow(1e4, -2.0 * i / c_.dim_qk); }

  void rotate(std::vector<double>& row, int position) const {
    const int half = c_.dim_qk / 2;
    for (int i = 0; i < half; ++i) {
      const double angle = position * frequency(i);
      const double x = row[i], y = row[i + half];
      row[i] = x * std::cos(angle) - y * std::sin(angle);
      row[i + half] = y * std::cos(angle) + x * std::sin(angle);
    }
  }

  Row weigh(const Request& r, int head, const std::vector<int>& keys,
            const std::vector<double>& logits) const {
    const bool softmax = c_.activation == Activation::kSoftmax;
    const double inf = std::numeric_limits<double>::infinity();
    double top = c_.sinks ? sinks_[head] : -inf, sum = 0;
    for (double x : logits) top = std::max(top, x);
    if (softmax) {
      for (double x : logits) sum += std::exp(x - top);
      if (c_.sinks) sum += std::exp(sinks_[head] - top);
    }
    Row row{std::vector<double>(c_.dim_vo), std::vector<double>(c_.dim_vo),
            !softmax   ? 0
            : sum == 0 ? -inf
                       : top + std::log(sum)};
    const int kv_head = head / c_.group;
    const double v_scale = c_.head_scales ? 0.5 * v_scale_[kv_head] : 1.0;
    for (size_t i = 0; i < keys.size(); ++i) {
      const double w =
          softmax ? std::exp(logits[i] - top) / sum : 1 / (1 + std::exp(-(logits[i] - 2.0)));
      const std::vector<double> v = load_kv(*v_, c_.dim_vo, r, keys[i], kv_head);
      for (int d = 0; d < c_.dim_vo; ++d) {
        row.o[d] += w * v[d] * v_scale;
        row.magnitude[d] += std::fabs(w * v[d] * v_scale);
      }
    }
    return row;
  }

  void make_layout() {
    std::vector<int32_t> qo{0}, kv{0}, lens, pages;
    for (const auto& [q, k] : c_.lengths) {
      qo.push_back(qo.back() + q);
      kv.push_back(kv.back() + ceil_div(k, page_tokens()));
      lens.push_back(k);
    }
    const IndexView qo_view(qo), lens_view(lens);
    if (c_.page_size == 0) {
      ragged_layout(layout_, &qo_view, IndexView(kv));
    } else {
      // Shuffled pages with holes: every other page id is nobody's.
      for (int32_t i = 0; i < kv.back(); ++i) pages.push_back(2 * i + 1);
      std::shuffle(pages.begin(), pages.end(), random_);
      paged_layout(layout_, &qo_view, IndexView(kv), IndexView(pages), nullptr, &lens_view,
                   c_.page_size);
    }
    if (c_.masks_new_tokens) mask_new_tokens(layout_, "mask");
    if (c_.mask) place_masks(layout_);
  }

  void fill_cache() {
    for (const Request& r : layout_.requests) {
      for (int j = 0; j < r.kv_len; ++j) {
        for (int h = 0; h < c_.num_kv_heads; ++h) {
          for (int d = 0; d < c_.dim_qk; ++d) {
            k_->set(kv_offset(c_.dim_qk, r, j, h) + d, normal_(random_));
          }
          for (int d = 0; d < c_.dim_vo; ++d) {
            v_->set(kv_offset(c_.dim_vo, r, j, h) + d, normal_(random_));
          }
        }
      }
    }
  }

  void make_extras() {
    std::uniform_real_distribution<float> uniform(0.5f, 1.5f);
    for (auto* scales : {&q_scale_, &k_scale_, &v_scale_, &slopes_, &sinks_}) {
      for (int h = 0; h < heads_; ++h) scales->push_back(uniform(random_));
    }
    for (float& slope : slopes_) slope *= 0.1f;
    mask_.resize(layout_.mask_bytes);
    for (uint8_t& byte : mask_) byte = static_cast<uint8_t>(random_());
    const int half = c_.dim_qk / 2;
    const auto table = [&](std::vector<float>& to, int count, int step) {
      for (int a = 0; a < count; ++a) {
        for (int i = 0; i < half; ++i) {
          to.push_back(static_cast<float>(std::cos(a * step * frequency(i))));
        }
        for (int i = 0; i < half; ++i) {
          to.push_back(static_cast<float>(std::sin(a * step * frequency(i))));
        }
      }
    };
    table(fine_, RopeTables::kFine, 1);
    table(coarse_, 2000 / RopeTables::kFine, RopeTables::kFine);
  }

  Case c_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  int heads_;
  int64_t q_token_, o_token_;
  Layout layout_;
  std::unique_ptr<Array> q_, k_, v_, out_;
  std::vector<float> lse_, q_scale_, k_scale_, v_scale_, slopes_, sinks_, coarse_, fine_;
  std::vector<uint8_t> mask_;
};

}  // namespace flashbsr::test
