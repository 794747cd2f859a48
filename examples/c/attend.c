// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Causal attention of two requests, 3 and 1 new tokens, over a paged cache: append, plan, run, and
// the same by the formula in float64. Pages that no request has are NaN.
#include <flashbsr/c_api.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kQoHeads = 4, kKvHeads = 2, kDim = 64, kPageSize = 16, kPages = 6, kTokens = 4 };
enum { kLengths = 2, kPageElements = kPageSize * kKvHeads * kDim };

static const int32_t qo_indptr[] = {0, 3, 4}, kv_indptr[] = {0, 3, 4}, kv_indices[] = {5, 2, 0, 3};
static const int32_t kv_lens[] = {37, 9};

static void must(fbsr_status status) {
  if (status == FBSR_OK) return;
  fprintf(stderr, "%s: %s\n", fbsr_status_name(status), fbsr_last_error());
  exit(1);
}

// A compact tensor in host memory; `code` and `bits` are DLPack's.
static fbsr_tensor tensor(const void* data, int code, int bits, int ndim, const int64_t* shape) {
  fbsr_tensor t = {.data = (void*)data, .device = {1, 0}, .ndim = ndim};
  t.dtype.code = (uint8_t)code;
  t.dtype.bits = (uint8_t)bits;
  t.dtype.lanes = 1;
  t.shape = (int64_t*)shape;
  return t;
}

static float number(void) { return (float)rand() / (float)RAND_MAX - 0.5f; }

// Row of position `j` of request `b` in the cache.
static const float* row(const float* cache, int b, int j, int head) {
  const int page = kv_indices[kv_indptr[b] + j / kPageSize];
  return cache + ((page * kPageSize + j % kPageSize) * kKvHeads + head) * kDim;
}

static double largest_error(const float* q, const float* k, const float* v, const float* out) {
  double worst = 0;
  for (int b = 0; b < kLengths; ++b) {
    for (int t = qo_indptr[b]; t < qo_indptr[b + 1]; ++t) {
      const int seen = kv_lens[b] - (qo_indptr[b + 1] - 1 - t);
      for (int h = 0; h < kQoHeads; ++h) {
        const int kv_head = h / (kQoHeads / kKvHeads);
        double sum = 0, result[kDim] = {0};
        for (int j = 0; j < seen; ++j) {
          double dot = 0;
          for (int d = 0; d < kDim; ++d) {
            dot += (double)q[(t * kQoHeads + h) * kDim + d] * row(k, b, j, kv_head)[d];
          }
          const double p = exp(dot / sqrt(kDim));
          sum += p;
          for (int d = 0; d < kDim; ++d) result[d] += p * row(v, b, j, kv_head)[d];
        }
        for (int d = 0; d < kDim; ++d) {
          const double error = fabs(out[(t * kQoHeads + h) * kDim + d] - result[d] / sum);
          if (!(error <= worst)) worst = error;  // NaN is the largest
        }
      }
    }
  }
  return worst;
}

int main(void) {
  static float q[kTokens * kQoHeads * kDim], out[kTokens * kQoHeads * kDim];
  static float k[kPages * kPageElements], v[kPages * kPageElements];
  static float new_k[kTokens * kKvHeads * kDim], new_v[kTokens * kKvHeads * kDim];
  for (int i = 0; i < kPages * kPageElements; ++i) k[i] = v[i] = NAN;
  for (int i = 0; i < kTokens * kQoHeads * kDim; ++i) q[i] = number();
  for (int i = 0; i < kTokens * kKvHeads * kDim; ++i) new_k[i] = number(), new_v[i] = number();
  for (int b = 0; b < kLengths; ++b) {  // what earlier steps have written
    const int before = kv_lens[b] - (qo_indptr[b + 1] - qo_indptr[b]);
    for (int j = 0; j < before; ++j) {
      for (int i = 0; i < kKvHeads * kDim; ++i) {
        ((float*)row(k, b, j, 0))[i] = number();
        ((float*)row(v, b, j, 0))[i] = number();
      }
    }
  }
  const int64_t q_shape[] = {kTokens, kQoHeads, kDim}, new_shape[] = {kTokens, kKvHeads, kDim};
  const int64_t cache_shape[] = {kPages, kPageSize, kKvHeads, kDim};
  const int64_t three[] = {3}, four[] = {4}, two[] = {2};
  const fbsr_tensor q_t = tensor(q, 2, 32, 3, q_shape), out_t = tensor(out, 2, 32, 3, q_shape);
  const fbsr_tensor k_t = tensor(k, 2, 32, 4, cache_shape), v_t = tensor(v, 2, 32, 4, cache_shape);
  const fbsr_tensor new_k_t = tensor(new_k, 2, 32, 3, new_shape);
  const fbsr_tensor new_v_t = tensor(new_v, 2, 32, 3, new_shape);
  const fbsr_tensor qo_t = tensor(qo_indptr, 0, 32, 1, three);
  const fbsr_tensor kv_t = tensor(kv_indptr, 0, 32, 1, three);
  const fbsr_tensor pages_t = tensor(kv_indices, 0, 32, 1, four);
  const fbsr_tensor lens_t = tensor(kv_lens, 0, 32, 1, two);

  // New rows of K and V into the cache: page * page_size + token in it.
  int64_t slots[kTokens];
  for (int b = 0; b < kLengths; ++b) {
    for (int t = qo_indptr[b]; t < qo_indptr[b + 1]; ++t) {
      const int j = kv_lens[b] - (qo_indptr[b + 1] - t);
      slots[t] = (int64_t)kv_indices[kv_indptr[b] + j / kPageSize] * kPageSize + j % kPageSize;
    }
  }
  const fbsr_tensor slots_t = tensor(slots, 0, 64, 1, four);
  fbsr_append_arguments append;
  must(fbsr_append_arguments_init(&append, sizeof append));
  append.key = &new_k_t;
  append.value = &new_v_t;
  append.k_cache = &k_t;
  append.v_cache = &v_t;
  append.slot_mapping = &slots_t;
  must(fbsr_append(&append));

  fbsr_attention_options options;
  must(fbsr_attention_options_init(&options, sizeof options));
  options.num_qo_heads = kQoHeads;
  options.num_kv_heads = kKvHeads;
  options.head_dim_qk = kDim;
  options.causal = 1;
  fbsr_attention* attention;
  must(fbsr_attention_create(&options, &attention));

  fbsr_layout layout;
  must(fbsr_layout_init(&layout, sizeof layout));
  layout.kind = FBSR_PAGED;
  layout.page_size = kPageSize;
  layout.qo_indptr = &qo_t;
  layout.kv_indptr = &kv_t;
  layout.kv_indices = &pages_t;
  layout.kv_lens = &lens_t;
  must(fbsr_plan(attention, &layout, NULL));

  fbsr_run_arguments run;
  must(fbsr_run_arguments_init(&run, sizeof run));
  run.q = &q_t;
  run.k = &k_t;
  run.v = &v_t;
  run.out = &out_t;
  must(fbsr_run(attention, &run));
  fbsr_attention_destroy(attention);

  const double error = largest_error(q, k, v, out);
  printf("flashbsr %s, %s: largest error %.1e\n", fbsr_version(), fbsr_isa(), error);
  return error < 1e-6 ? 0 : 1;
}
