// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The C interface of libflashbsr: attention over KV caches from C11, and from whatever calls C.
//
//   options -> fbsr_attention_create -> fbsr_plan (each batch) -> fbsr_run (each layer) -> destroy
//
// Arrays are DLPack's tensors, borrowed: nothing is copied and nothing is owned, `shape` and
// `strides` (in elements; NULL: compact) are read during the call only. They are in host memory
// (kDLCPU) or on a CUDA device (kDLCUDA, kDLCUDAManaged), all of a call in one place, but for those
// of fbsr_plan, which are read on the host. H_qo and H_kv are heads of queries and of KV, D head
// dims. Indices are int32 or int64. Lengths are tokens, offsets elements, sizes bytes.
//
// Errors: every function that can fail returns a status; fbsr_last_error() is the sentence.
// A call that fails leaves the caller's arrays as they were, where they are in host memory.
//
// Structs begin with their size. Fill in defaults by the function of the same name with _init, then
// set fields: programs that were compiled with an earlier header of this FBSR_ABI_VERSION go on
// working. Fields named as booleans are 0 or 1.
//
// Threads: functions without a handle may be called from any. One handle is used by one thread at a
// time or by several, who wait for each other. On the CPU a call returns when its results are
// there.
//
// Streams: `stream` is a CUstream or cudaStream_t, NULL the legacy default one. On a device calls
// are put on it and return; arrays must stay until it has come past them. With arrays in host
// memory it is NULL.
#pragma once

#include <stddef.h>
#include <stdint.h>

// Changes with what breaks compiled programs, and with it the name of the shared library.
#define FBSR_ABI_VERSION 1

#if defined(__GNUC__)
#define FBSR_API __attribute__((visibility("default")))
#else
#define FBSR_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// DLPack's DLTensor: the official header's where it was included before this one, otherwise a
// struct of the same layout, so that pointers can be cast.
#ifdef DLPACK_DLPACK_H_
typedef DLTensor fbsr_tensor;
#else
typedef struct fbsr_tensor {
  void* data;
  struct {
    int32_t device_type;  // 1: host memory, 2: CUDA, 13: CUDA managed memory
    int32_t device_id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code;  // 0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 10 float8_e4m3fn, 12 float8_e5m2
    uint8_t bits;
    uint16_t lanes;  // 1
  } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} fbsr_tensor;
#endif

// --- Errors --------------------------------------------------------------------------------------

typedef enum fbsr_status {
  FBSR_OK = 0,
  FBSR_ERROR_VALUE = 1,        // an option or a combination without a meaning
  FBSR_ERROR_SHAPE = 2,        // shapes, strides, alignment
  FBSR_ERROR_DTYPE = 3,        // types of elements
  FBSR_ERROR_DEVICE = 4,       // an array in another memory than the rest
  FBSR_ERROR_INDEX_RANGE = 5,  // page ids, offsets and lengths out of range
  FBSR_ERROR_CAPACITY = 6,     // more than the capacity or the workspace
  FBSR_ERROR_PLAN = 7,         // no plan, or arrays that do not match it
  FBSR_ERROR_UNSUPPORTED = 8,  // what this build or device does not have
  FBSR_ERROR_CUDA = 9,         // the driver refused
  FBSR_ERROR_NO_MEMORY = 10,   // of the host
  FBSR_ERROR_INTERNAL = 11     // a defect of the library
} fbsr_status;

// "ShapeError": the exception of the Python package; "OK" of FBSR_OK.
FBSR_API const char* fbsr_status_name(fbsr_status status);
// "q: got shape (2, 4); expected 3 dimensions [tokens, heads, dim]". Of the calling thread's last
// failure, valid until its next; "" before the first.
FBSR_API const char* fbsr_last_error(void);

// --- The library ---------------------------------------------------------------------------------

FBSR_API uint32_t fbsr_abi_version(void);  // FBSR_ABI_VERSION that the library was built with
FBSR_API const char* fbsr_version(void);   // "0.1.0"
FBSR_API const char* fbsr_isa(void);       // SIMD level in use, "avx2"
// Why no GPU can be used, valid until the thread's next call of it; "" where one can.
FBSR_API const char* fbsr_cuda_problem(void);

// --- Attention -----------------------------------------------------------------------------------

typedef enum fbsr_kv_layout { FBSR_NHD = 0, FBSR_HND = 1 } fbsr_kv_layout;
typedef enum fbsr_backend {
  FBSR_BACKEND_AUTO = 0,  // where q of the first run is
  FBSR_BACKEND_CPU = 1,
  FBSR_BACKEND_CUDA = 2,
  FBSR_BACKEND_FA2 = 3,  // CUDA, kernels of every GPU
  FBSR_BACKEND_FA3 = 4   // CUDA, kernels of compute capability 9.0
} fbsr_backend;
typedef enum fbsr_position {
  FBSR_POSITION_NONE = 0,
  FBSR_POSITION_ROPE_LLAMA = 1,  // rotate q and k inside the kernel
  FBSR_POSITION_ALIBI = 2
} fbsr_position;
typedef enum fbsr_activation { FBSR_SOFTMAX = 0, FBSR_SIGMOID = 1 } fbsr_activation;
typedef enum fbsr_dtype {
  FBSR_DTYPE_OF_ARRAYS = 0,
  FBSR_FLOAT32 = 1,
  FBSR_FLOAT16 = 2,
  FBSR_BFLOAT16 = 3,
  FBSR_FLOAT8_E4M3FN = 4,
  FBSR_FLOAT8_E5M2 = 5,
  FBSR_INT8 = 6,
  FBSR_INT4 = 7,  // two in a byte of a uint8 array
  FBSR_NVFP4 = 8  // likewise
} fbsr_dtype;

// What is computed, with the names and meanings of the Python package's AttentionSpec and TaskInfo.
// Variants of one's own, YaRN and given frequencies of RoPE are not here.
typedef struct fbsr_attention_options {
  size_t size;
  int32_t num_qo_heads;  // a multiple of num_kv_heads
  int32_t num_kv_heads;
  int32_t head_dim_qk;      // a multiple of 8, at most 512
  int32_t head_dim_vo;      // 0: head_dim_qk
  int32_t kv_layout;        // fbsr_kv_layout
  int32_t latent;           // 1: MLA, one KV head whose V are the first dims of K
  int32_t causal;           // 1: the last query token sees every key, those before it one less each
  int32_t window_left;      // keys further behind than this are masked; -1: none
  float sm_scale;           // of the logits; 0: 1 / sqrt(head_dim_qk)
  float logits_soft_cap;    // 0: off
  int32_t position;         // fbsr_position
  int32_t activation;       // fbsr_activation
  float sigmoid_bias;       // with FBSR_SIGMOID only
  int32_t lse_base2;        // 1: LSE to the base of 2, not e
  double rope_theta;        // 10000
  double rope_scale;        // 1; divides positions
  int32_t rotary_dim;       // 0: head_dim_qk
  int32_t rope_interleave;  // 1: pairs (2 i, 2 i + 1), not (i, i + rotary_dim / 2)
  int32_t rope_llama31;     // 1: with the three below, the frequencies of Llama 3.1
  double rope_low_freq_factor, rope_high_freq_factor, rope_old_context_len;
  int32_t q_dtype, kv_dtype, v_dtype, o_dtype;  // fbsr_dtype; v_dtype where V is not kv_dtype
  int32_t fp8_accumulation_fast;                // 1: fewer promotions of float8 sums
  // A capacity, for CUDA graphs that follow later plans: all of the first two and one of the last
  // two, or none (-1).
  int32_t max_batch_size, max_q_tokens, max_kv_pages, max_kv_len;
  int32_t num_workers;       // queues of a plan; 0: the device's default
  int32_t num_threads;       // of the CPU; 0: the cores that this process may use
  int32_t fixed_split_size;  // > 0: KV is cut at its multiples (batch invariance)
  int32_t disable_split_kv;  // 1: never cut
  int32_t backend;           // fbsr_backend
  int32_t device;            // CUDA ordinal; -1: that of the arrays
  int32_t check;             // 1: page ids are validated on the device before each run
  int64_t workspace_bytes;   // the most that partial states may take; -1: as many as plans need
  // Keys here are the share of one of context_size ranks (0 or 1: all): of every context_size *
  // context_interleave positions context_interleave in a row. Plans say q_positions then.
  int32_t context_size, context_rank, context_interleave;
} fbsr_attention_options;

FBSR_API fbsr_status fbsr_attention_options_init(fbsr_attention_options* options, size_t size);

typedef struct fbsr_attention fbsr_attention;

// Writes a handle, the caller's to destroy; NULL where it fails.
FBSR_API fbsr_status fbsr_attention_create(const fbsr_attention_options* options,
                                           fbsr_attention** attention);
// NULL is no error. Not while another thread uses it; work on streams and graphs that were captured
// may go on.
FBSR_API void fbsr_attention_destroy(fbsr_attention* attention);

// Memory for partial states, uint8 [bytes], where the computation is, until the handle is
// destroyed.
FBSR_API fbsr_status fbsr_set_workspace(fbsr_attention* attention, const fbsr_tensor* workspace);
// Bytes of partial states: of the capacity where there is one, otherwise of the last plan.
FBSR_API fbsr_status fbsr_workspace_size(fbsr_attention* attention, int64_t* bytes);
// The kernel of the plan, into `text` of `size` bytes, cut to them.
FBSR_API fbsr_status fbsr_kernel_name(fbsr_attention* attention, char* text, size_t size);

// --- Plans ---------------------------------------------------------------------------------------

typedef enum fbsr_layout_kind {
  FBSR_RAGGED = 1,       // qo_indptr, kv_indptr: KV one after another
  FBSR_PAGED = 2,        // qo_indptr, kv_indptr, kv_indices, last_page_len or kv_lens, page_size
  FBSR_BLOCK_TABLE = 3,  // qo_indptr, block_tables, kv_lens, page_size
  FBSR_BOUNDS = 4        // qo_indptr, kv_lens (bounds), page_size: fbsr_update brings lengths
} fbsr_layout_kind;

// Who meets whom. Arrays of other kinds are NULL; all are contiguous and in host memory.
typedef struct fbsr_layout {
  size_t size;
  int32_t kind;                      // fbsr_layout_kind
  int32_t page_size;                 // tokens
  const fbsr_tensor* qo_indptr;      // [batch + 1] rows of q; NULL: one each (decode)
  const fbsr_tensor* kv_indptr;      // [batch + 1]
  const fbsr_tensor* kv_indices;     // [nnz] page ids
  const fbsr_tensor* last_page_len;  // [batch] tokens in the last page, 1 to page_size
  const fbsr_tensor* kv_lens;        // [batch] tokens; with per_head [batch * H_kv]
  const fbsr_tensor* block_tables;   // [batch, max_pages] page ids
  int32_t per_head;                  // 1, of bounds: each KV head has lengths of its own
} fbsr_layout;

typedef struct fbsr_plan_options {
  size_t size;
  const fbsr_tensor* custom_mask;  // bool or uint8 [sum q_len * kv_len]; not causal then
  const fbsr_tensor*
      packed_custom_mask;           // uint8 [sum ceil(q_len * kv_len / 8)], little-endian bits
  const fbsr_tensor* tree_parents;  // [q tokens] parent in the request's tree; -1: a root
  int32_t share_prefixes;           // 1: KV that requests share is loaded once where it pays
  void* stream;                     // of the copy to a device
  const fbsr_tensor* q_positions;   // [batch] of first query tokens; NULL: the last tokens
} fbsr_plan_options;

FBSR_API fbsr_status fbsr_layout_init(fbsr_layout* layout, size_t size);
FBSR_API fbsr_status fbsr_plan_options_init(fbsr_plan_options* options, size_t size);

// Plans a batch, for any number of runs. `options` NULL: defaults. Its arrays are not needed
// afterwards. A plan that fails leaves none.
FBSR_API fbsr_status fbsr_plan(fbsr_attention* attention, const fbsr_layout* layout,
                               const fbsr_plan_options* options);
// The batch that `like` is planned for, and its schedule where that is the same.
FBSR_API fbsr_status fbsr_plan_like(fbsr_attention* attention, fbsr_attention* like, void* stream);

// Lengths and pages of a plan of bounds, in host memory or on the device.
typedef struct fbsr_lengths {
  size_t size;
  const fbsr_tensor* kv_lens;       // [batch], or [batch, H_kv]
  const fbsr_tensor* block_tables;  // [batch, max_pages], or [batch, H_kv, max_pages]
  const fbsr_tensor* kv_indptr;     // or CSR: [batch + 1]
  const fbsr_tensor* kv_indices;    //   and [nnz]
  const fbsr_tensor* qo_indptr;     // [batch + 1] fewer rows of q than planned; NULL: as planned
  const fbsr_tensor* q_positions;   // [batch], where the plan had some
} fbsr_lengths;

FBSR_API fbsr_status fbsr_lengths_init(fbsr_lengths* lengths, size_t size);
// Of all runs from now on. The data of these arrays (not the tensors) is read again when a run
// needs another plan: it stays until the next fbsr_update, fbsr_plan or fbsr_attention_destroy.
FBSR_API fbsr_status fbsr_update(fbsr_attention* attention, const fbsr_lengths* lengths,
                                 void* stream);

// --- Runs ----------------------------------------------------------------------------------------

// A scale of Q and K multiplies logits, one of V the output: a number, or an array in its place.
typedef struct fbsr_run_arguments {
  size_t size;
  const fbsr_tensor* q;  // [q tokens, H_qo, head_dim_qk]
  // Pages: [pages, page_size, H_kv, D], HND [pages, H_kv, page_size, D]; ragged [tokens, H_kv, D].
  // Strides are free but for the last dimension, which is contiguous.
  const fbsr_tensor* k;
  const fbsr_tensor* v;    // NULL: k is [pages, 2, ...], K and V of each page
  const fbsr_tensor* out;  // [q tokens, H_qo, head_dim_vo], written
  const fbsr_tensor* lse;  // NULL, or float32 [q tokens, H_qo], written; -inf where nothing is seen
  float q_scale, k_scale, v_scale;       // 1
  const fbsr_tensor* q_scale_per_head;   // float32 [H_qo], in place of the number
  const fbsr_tensor* k_scale_per_head;   // float32 [H_kv]
  const fbsr_tensor* v_scale_per_head;   // float32 [H_kv]
  const fbsr_tensor* k_scale_per_token;  // beside it: as K without the last dimension, of codes
  const fbsr_tensor* v_scale_per_token;
  const fbsr_tensor* sinks;         // float32 [H_qo] logits that join the softmax's denominator
  const fbsr_tensor* alibi_slopes;  // float32 [H_qo]; NULL: the standard ones
  const fbsr_lengths* lengths;      // fbsr_update of this run alone; nothing is kept then
  int32_t disable_pdl;              // 1: the kernel never starts before the one ahead has finished
  int32_t kv_ready;  // 1: the kernel ahead does not write the cache, which may be read early
  void* stream;
} fbsr_run_arguments;

FBSR_API fbsr_status fbsr_run_arguments_init(fbsr_run_arguments* arguments, size_t size);
FBSR_API fbsr_status fbsr_run(fbsr_attention* attention, const fbsr_run_arguments* arguments);

// --- Around attention ----------------------------------------------------------------------------

// New rows of K and V into a paged cache: by slots, or by a page table.
typedef struct fbsr_append_arguments {
  size_t size;
  const fbsr_tensor* key;               // [tokens, H_kv, head_dim_qk]
  const fbsr_tensor* value;             // [tokens, H_kv, head_dim_vo]
  const fbsr_tensor* k_cache;           // as k of a run, written
  const fbsr_tensor* v_cache;           // as v of a run, written
  const fbsr_tensor* slot_mapping;      // [tokens] page * page_size + token in it; -1: nowhere
  const fbsr_tensor* batch_indices;     // [tokens] request of each; -1: nowhere
  const fbsr_tensor* positions;         // [tokens] position in the request
  const fbsr_tensor* kv_indices;        // [nnz]
  const fbsr_tensor* kv_indptr;         // [batch + 1]
  const fbsr_tensor* kv_last_page_len;  // [batch]
  int32_t kv_layout;                    // fbsr_kv_layout
  float k_scale, v_scale;               // 1; what is stored is divided by it
  const fbsr_tensor* k_scales;          // written: scales of every token, where the cache is codes
  const fbsr_tensor* v_scales;
  int32_t k_dtype, v_dtype;  // fbsr_dtype: FBSR_INT4, FBSR_NVFP4 say what bytes are
  void* stream;
} fbsr_append_arguments;

FBSR_API fbsr_status fbsr_append_arguments_init(fbsr_append_arguments* arguments, size_t size);
FBSR_API fbsr_status fbsr_append(const fbsr_append_arguments* arguments);

// What fbsr_append needs of each new token: append_indptr [batch + 1], seq_lens [batch] with the
// new tokens; batch_indices and positions int32 [tokens], written.
FBSR_API fbsr_status fbsr_batch_indices_positions(const fbsr_tensor* append_indptr,
                                                  const fbsr_tensor* seq_lens,
                                                  const fbsr_tensor* batch_indices,
                                                  const fbsr_tensor* positions, void* stream);

// Attention over two sets of keys from that over each: v [n, heads, D], s (LSE) float32 [n, heads].
// Outputs may be the first state. base2: 1 where LSEs are to the base of 2.
FBSR_API fbsr_status fbsr_merge_state(const fbsr_tensor* v_a, const fbsr_tensor* s_a,
                                      const fbsr_tensor* v_b, const fbsr_tensor* s_b,
                                      const fbsr_tensor* v_out, const fbsr_tensor* s_out,
                                      int32_t base2, void* stream);
// Over many: v [n, states, heads, D], s [n, states, heads]; v_out [n, heads, D], s_out [n, heads].
FBSR_API fbsr_status fbsr_merge_states(const fbsr_tensor* v, const fbsr_tensor* s,
                                       const fbsr_tensor* v_out, const fbsr_tensor* s_out,
                                       int32_t base2, void* stream);

#ifdef __cplusplus
}
#endif
