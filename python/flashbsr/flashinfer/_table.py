# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The door's arguments, each described once: names | type and shape | what it becomes | meaning.

Before a point in a name stands where a row holds; without one it holds wherever no special row
does. Names with the suffixes ``_p`` and ``_d`` are found without them. What an argument becomes:
``spec`` or ``task``, with ``:field`` where that has another name, is a field of `AttentionSpec` or
`TaskInfo`; ``layout`` says who meets whom; ``key`` chooses the engine; ``plan`` and ``run`` are
options of these, ``wrapper`` of the object, ``op`` of a function around attention.
``nothing``: accepted without effect, and leaving it out gives the same result. ``refused``: raises
`UnsupportedError` unless it is left at its default. For both the text is the reason.
"""

ROWS = """
float_workspace_buffer workspace_buffer | None, int or array | wrapper | Memory for partial results:
    None (owned, sized by the plan), the most bytes to own, or a contiguous array of any type,
    16-byte aligned, which is used as bytes. `CapacityError` where a plan needs more.
kv_layout | {"NHD", "HND"} | task | Order of tokens and heads in a page; of ragged keys and values
    in the whole array.
backend | {"auto", "cpu", "cuda", "fa2", "fa3"} | task | As in `TaskInfo`.
use_cuda_graph | bool | wrapper | A captured `run` may be replayed over later plans: memory, kernel
    and grid stay. Needs the buffers on a GPU, and holds the options to those of the captured run.
paged_kv_indptr_buffer paged_kv_indices_buffer paged_kv_last_page_len_buffer qo_indptr_buf
    paged_kv_indptr_buf paged_kv_indices_buf paged_kv_last_page_len_buf kv_indptr_buf indptr_buffer
    indices_buffer last_page_len_buffer | array on a GPU | wrapper | With `use_cuda_graph` their
    lengths are the capacity: of indptrs the most requests + 1, of indices the most pages. They are
    neither read nor written; without effect otherwise.
jit_args | sequence, optional | wrapper | FlashInfer's declaration of a variant, of which
    AttentionSink and FlashSigmoid are known by their names. Others: `AttentionSpec.from_source`.
lse_base | {"2", "e"} | task | Base of the LSE: 2 as FlashInfer has it, or natural.
num_threads | int, optional | task | Threads on the CPU. Default: the machine's cores.
max_q_tokens max_kv_tokens | int, optional | wrapper | With `use_cuda_graph`: the most rows of q,
    and of k. Default: those of the first plan.
num_levels | int | wrapper | Levels of shared KV, the requests' own included.
device | str or torch.device | wrapper | ``"cpu"``, ``"cuda"`` or ``"cuda:1"`` and the like. Left
    out: where the arrays are.
indptr kv_indptr paged_kv_indptr unique_kv_indptr | int32 or int64 array [B + 1] | layout | Pages of
    each request: from ``indptr[i]`` to ``indptr[i + 1]`` of the indices.
indices kv_indices paged_kv_indices unique_kv_indices | int32 or int64 array [>= indptr[-1]] |
    layout | Page ids.
last_page_len paged_kv_last_page_len unique_kv_last_page_len kv_last_page_len | int32 or int64 array
    [B] | layout | Tokens in each request's last page, 1 to page_size. None: `seq_lens` instead.
qo_indptr | int32 or int64 array [B + 1] | layout | Rows of q of each request: from ``qo_indptr[i]``
    to ``qo_indptr[i + 1]``.
ragged.kv_indptr | int32 or int64 array [B + 1] | layout | Rows of k and v of each request,
    likewise.
v_indptr o_indptr | int32 or int64 array [B + 1], optional | layout | Only what `kv_indptr` and
    `qo_indptr` say: v has the rows of k, the output those of q.
kv_len_arr | int32 or int64 array [B] | layout | KV tokens of each request, the new ones included.
seq_lens | int32 or int64 array [B], optional | layout | KV tokens of each request, where the
    lengths of last pages are not given. Beside them it has no effect; on the host it is checked to
    say the same.
block_tables | int32 or int64 array [B, max_pages], optional | layout | Page ids of each request,
    with `seq_lens`, where indptr is None. Beside indptr it has no effect.
tables.block_tables | int32 or int64 array [B, max_pages] | layout | Page ids; those beyond a
    request's length are not read.
page_size | int | layout | Tokens of a page.
q_len_per_req | int | key | Query tokens of each request, causal among themselves. More than one
    needs ``use_tensor_cores=True`` and as many keys; fixed in graph mode.
custom_mask | bool or uint8 array, optional | plan | True keeps: [sum of q_len * kv_len], row-major
    per request. Replaces causality; a window still holds.
single.custom_mask | bool or uint8 array, optional | layout | True keeps: qo_len * kv_len elements
    in any shape. Replaces causality; a window still holds.
packed_custom_mask | uint8 array, optional | plan | The same in little-endian bits, each request
    from a byte on: what ``segment_packbits(..., bitorder="little")`` makes.
tree_parents | int32 or int64 array [rows of q], optional | plan | Query tokens are a tree per
    request, given by their parents, instead of causality and masks: see `Attention.plan` and
    `draft_trees`.
prefix_len_ptr | integer array [B], optional | layout | Multi-item scoring: tokens of each request
    before its items, which all items see and which see no item.
token_pos_in_items_ptr | integer array [B * token_pos_in_items_len], optional | layout | Multi-item
    scoring: position of each token behind the prefix in its item; delimiters have 0. uint16 and the
    like.
token_pos_in_items_len | int | layout | Multi-item scoring: entries of each request.
qo_indptr_arr | list of integer arrays [num_groups + 1] | layout | Rows of q of the groups of each
    level. Level 0 has the largest groups, the last level the requests; a group is made of whole
    groups of the next level.
paged_kv_indptr_arr paged_kv_indices_arr levels.paged_kv_last_page_len | list of integer arrays |
    layout | Page table of the groups of each level.
sparse.indptr | int32 or int64 array [ceil(M / R) + 1] | layout | Blocks of each row of blocks.
sparse.indices | int32 or int64 array [nnz] | layout | Columns of blocks, 0 to ``ceil(N / C) - 1``.
M N R C | int | layout | M queries and N keys in blocks of R rows and C columns; the last ones may
    be short.
mask | bool array [nnz, R, C], optional | layout | Elements of each block that count.
packed_mask | uint8 array [ceil(nnz * R * C / 8)], optional | layout | The same, flattened, in
    little-endian bits.
per_head | bool | layout | Each KV head has a matrix of its own: `indptr` has the block rows of head
    0, then those of head 1; indices and masks in that order.
block_mask_map | bool array [num_kv_heads, MB, NB] | layout | Which block of queries meets which
    block of keys.
block_row_sz block_col_sz | integer array [num_kv_heads, MB or NB] | layout | Tokens of each block,
    0 or more, the same sum in every head.
mla.qo_indptr mla.kv_indptr mla.kv_indices mla.kv_len_arr | int32 or int64 array | layout | Rows of
    q of each request [B + 1], its pages [B + 1] and their ids, its KV tokens [B]. In the
    constructor arrays on a GPU, whose lengths are the capacity of `use_cuda_graph`.
num_heads | int | task:num_qo_heads | Query heads. There is one KV head, the latent.
head_dim_ckv kv_lora_rank | int | task:head_dim_vo | Of the latent, which is also V: 512.
head_dim_kpe qk_rope_head_dim | int | key | Of the rotated part of the keys: 64, or 0.
qk_nope_head_dim | int | nothing | it is of keys before absorption.
mla.sm_scale | float | spec | Of the logits: ``1 / sqrt(head dim before absorption)``, of 192.
q_nope q_pe | array [rows, num_heads, head_dim_ckv], [rows, num_heads, head_dim_kpe] | run |
    Absorbed queries, and their rotated part. They are copied side by side.
mla.ckv_cache mla.kpe_cache | array [pages, page_size, dim] | run | Latents, and rotated keys.
return_lse_base_on_e | bool | run | The natural LSE, base 2 otherwise; another than last plans anew.
ckv_scale kpe_scale | float, optional | run | What float8 latents and rotated keys are multiplied
    by: one number for both.
ckv_scale_arr kv_len page_table | default only | refused | a scale is one number, and `plan` says
    lengths and pages.
sparse_mla_top_k sparse_mla_top_k_lens | default only | refused | `integrations.flash_mla` takes
    indices.
is_var_seq cute_dsl_impl kv_scale_format | any | nothing | it chooses among FlashInfer's kernels.
num_qo_heads num_kv_heads | int | task | Heads of q and of KV; the first is a multiple of the
    second.
head_dim | int | task:head_dim_qk | Of q, k and v: a multiple of 8, at most 512.
head_dim_qk | int | task | Of q and k: a multiple of 8, at most 512.
head_dim_vo | int, optional | task | Of v and the output. Default: that of q.
causal causal_p | bool | spec | Key j is visible to query i iff ``j <= i + kv_len - q_len`` (aligned
    at the end).
levels.causal shared.causal | bool | spec | Of the last level: queries are the last of their
    request's own tokens, and all of them see the levels above.
sparse.causal | bool | layout | Key j is visible to query i iff ``j <= i + N - M``, beside the mask.
    With blocks of different sizes only False.
pos_encoding_mode | {"NONE", "ROPE_LLAMA", "ALIBI"} | spec | As in `AttentionSpec`.
sparse.pos_encoding_mode | {"NONE"} | layout | Only NONE: `apply_rope_pos_ids` before.
window_left | int | spec | Keys kept behind the query, inclusive. -1: all.
logits_soft_cap | float, optional | spec | ``cap * tanh(x / cap)`` of the scaled logits. None or 0:
    off.
sm_scale | float, optional | spec | Default ``1 / sqrt(head_dim_qk)``.
rope_scale rope_theta | float, optional | spec | Of ROPE_LLAMA. Default 1 and 10000.
q_data_type | data type | task:q_dtype | Of q, in any framework's notation. Left out: that of the
    arrays.
kv_data_type | data type, optional | task:kv_dtype | Of KV. Default: `q_data_type` where that is
    given, otherwise that of the arrays.
data_type | data type, optional | key | Of q and of KV where `q_data_type` or `kv_data_type` is not
    given.
o_data_type | data type, optional | task:o_dtype | Of the output: float32, float16, bfloat16 or
    float8_e4m3fn. Default: that of q (bfloat16 for float8).
sparse.o_data_type | data type | task:o_dtype | Of the output. Left out: that of q, or float16 where
    `q_data_type` is given.
fixed_split_size | int, optional | task | Cut every KV range at multiples of this many pages
    (ragged: tokens): a result then does not depend on the rest of the batch.
disable_split_kv | bool | task | Never cut a KV range.
fp8_accumulation | {"default", "fast"} | task | As in `TaskInfo`.
share_prefixes | {"auto", "off"} | plan | Whether pages that requests begin with are loaded once
    where that pays: see `Attention.plan`.
stream | CUDA stream or int, optional | plan | Where it is done on a GPU. Default: the framework's
    current stream.
args kwargs options | any | run | Of the call that this one stands for.
global_override_indptr_cpu | int32 or int64 array [B + 1], optional | layout | The same as `indptr`,
    on the host, and read instead.
q query | array [rows, num_qo_heads, head_dim_qk] | run | Queries: float16, bfloat16, float8_e4m3fn,
    or on the CPU float32.
one.q | array [num_qo_heads, head_dim] | run | The query: float16, bfloat16, float8_e4m3fn, or on
    the CPU float32.
variable.q | array [num_qo_heads, queries, head_dim] | run | Queries, heads first.
paged_kv_cache kv_cache unique_kv_cache | array, or tuple or list of two | run | Stacked ``[pages,
    2, page_size, num_kv_heads, head_dim]`` (HND: page_size and num_kv_heads swapped), or ``(k,
    v)``, a tuple or a list, without the 2; the type of q, or unless that is float8 also
    float8_e4m3fn or float8_e5m2. Any strides but the last.
k v | array [tokens, num_kv_heads, head_dim] | run | HND: the first two dimensions swapped. The type
    of q, or unless that is float8 also float8_e4m3fn or float8_e5m2. Any strides but the last.
variable.k variable.v | array [num_kv_heads, keys, head_dim] | run | Keys and values, heads first.
k_shared v_shared | array [prefix_len, num_kv_heads, head_dim] | run | The prefix (HND: heads
    first). Views of pages of the cache make one launch of it; arrays beside the cache two, and a
    merge in float32.
k_cache v_cache | array [pages, num_kv_heads, page_size, head_dim] | run | The halves of a cache;
    for prompts without `block_tables` tokens, ``[tokens, num_kv_heads, head_dim]``.
run.args | arrays or floats | run | ``scale_q, scale_k, scale_v``; of the variant AttentionSink
    ``sink, sm_scale``, of FlashSigmoid ``logits_scale, sigmoid_bias``.
q_scale k_scale v_scale scale_q scale_k scale_v | float or float32 array, optional | run | One
    number, or one per head (q: num_qo_heads, k and v: num_kv_heads). Those of q and k multiply the
    logits, that of v the output.
bmm1_scale bmm2_scale | float or float32 array, optional | run | Of the logits, with ``1 /
    sqrt(head_dim)`` in it, and of the output: one number, on a GPU read once a call; or one per
    query head and one per KV head.
scale | float | spec:sm_scale | Of the logits.
out | array of the output's shape, optional | run | Written and returned.
lse | float32 array [rows, num_qo_heads], optional | run | Written; returned with
    ``return_lse=True``.
return_lse return_lse_p return_lse_d | bool | run | Return ``(out, lse)``.
enable_pdl | bool, optional | run | On GPUs of compute capability 9.0 and later: start before the
    kernel ahead in the stream has finished, reading no more than the plan. None and True; False:
    never.
run.window_left run.q_len_per_req | int, optional | run | Only what was planned.
run.logits_soft_cap | float, optional | run | Only what was planned; 0: that.
sinks sink | float32 array [num_qo_heads], optional | run | Learned logit per head that takes part
    in the softmax and the LSE, and has no value; of the trtllm functions also a list of it.
sinks.sm_scale | float, optional | run | Of the logits. Default: what was planned.
alibi_slopes | float32 array [num_qo_heads], optional | run | Of ALIBI. Default: the standard ones;
    under tensor parallelism pass this rank's part.
kv_ready | bool | run | The caller promises that the kernel ahead in the stream does not write the
    cache.
tables.seq_lens | int32, uint32 or int64 array [B] | layout | KV tokens of each request, the new
    ones included.
actual_seq_lens_q actual_seq_lens_kv | integer array of B values | layout | Query tokens, and KV
    tokens, of each request.
max_seq_len max_q_len max_kv_len tables.max_token_per_sequence tables.max_sequence_kv | int | layout
    | No request is longer.
cum_seq_lens_q q_cu_seq_lens | int32 or int64 array [B + 1] | layout | Rows of q of each request,
    where they differ.
batch_size | int | layout | That of `seq_lens`.
out_dtype o_dtype | data type, optional | task:o_dtype | Of the output. Default: that of `out`,
    otherwise of q (bfloat16 for float8).
uses_shared_paged_kv_idx | only True | refused | K and V have one table; a tuple (k, v) may have
    arrays of its own.
tables.o_scale | any | nothing | `bmm2_scale` has 1 / o_scale in it, as it has in FlashInfer.
batch_offsets_q batch_offsets_o batch_offsets_k batch_offsets_v batch_offsets_stats | integer array,
    optional | layout | Only those of requests without gaps between them.
batch_offsets_units | {"elements", "tokens"} | layout | Of the offsets.
v_a v_b v_other merge.v | array [n, num_heads, head_dim] | op | Outputs of parts of the keys; many
    of them as [n, num_states, num_heads, head_dim].
s_a s_b s s_other | float32 array, of those outputs without the last dimension | op | Their LSE.
merge.mask | bool or uint8 array [n], optional | op | Rows with 0 stay.
append_ckv append_kpe | array [nnz, dim] | op | Compressed keys and values, and the rotated part of
    the keys, of new tokens.
ckv_cache kpe_cache | array [pages, page_size, dim] | op | Written.
batch_indices positions | int32 or int64 array [nnz] | op | Request of each row (-1: none), and its
    position there.
specs | sequence of JitSpec | op | What would be built.
cuda.device | torch.device, str or int | op | A GPU.
cuda.pos_encoding_mode cuda.use_fp16_qk_reductions cuda.use_custom_mask cuda.dtype_q cuda.dtype_kv |
    of FlashInfer | op | Number of the position encoding; sums in float16; a mask; element types.
use_tensor_cores | any | nothing | the plan chooses the kernel; kept as the property of that name.
use_fp16_qk_reduction | any | nothing | it allows sums of logits in float16, which here are float32
    at the same speed.
non_blocking | any | nothing | host arrays are never waited for, arrays on a GPU are copied back
    once.
seq_lens_q max_token_per_sequence max_sequence_kv ragged.seq_lens | any | nothing | the plan reads
    the lengths from the indptrs.
custom_mask_buf mask_indptr_buf multi_ctas_kv_counter_buffer | any | nothing | the plan has its own.
max_item_len_ptr | any | nothing | the plan finds the longest by itself.
jit_kwargs | any | nothing | it says what to compile; `plan` says what is computed.
int_workspace_buffer int_workspace_buffers | any | nothing | the plan is in memory of the wrapper's
    own. A buffer must be 16-byte aligned.
cum_seq_lens_kv | any | nothing | `seq_lens` says it. (Engines pass offsets of tokens or of pages.)
causal_d | any | nothing | the one token of a decode is the last.
sinks.pos_encoding_mode sinks.use_fp16_qk_reduction sinks.q_data_type sinks.kv_data_type
    sinks.head_dim_qk sinks.head_dim_vo sinks.window_left | any | nothing | in the constructor it
    says what to compile; `plan` says what is computed.
levels.qo_indptr_buf_arr levels.paged_kv_indptr_buf_arr levels.paged_kv_indices_buf_arr
    levels.paged_kv_last_page_len_buf_arr pod.paged_kv_indptr_buffer pod.paged_kv_indices_buffer
    pod.paged_kv_last_page_len_buffer | any | nothing | there is no graph mode, for which they are.
verbose skip_prebuilt | any | nothing | nothing is compiled ahead.
sparse.rope_scale sparse.rope_theta shared.rope_scale shared.rope_theta | any | nothing | nothing is
    rotated here; `apply_rope` before.
window_right | default only | refused | causality and window_left are built in; custom_mask says
    everything else.
kv_cache_sf | array, or tuple or list of two | run | Block scales of an NVFP4 cache, which is uint8
    with ``head_dim / 2`` last and planned with ``kv_data_type=torch.uint8``: float8_e4m3fn or their
    bytes, in its shape with ``head_dim / 16`` last. Scales of K and V multiply them.
skip_softmax_threshold_scale_factor uses_spcompress bf16q_fp8kv_transform_mode use_fp16_softmax
    o_sf_scale o_sf_vec_size | default only | refused | no kernel here has it.
use_profiler profiler_buffer | default only | refused | `attention.run_stats()` tells what each
    thread did.
sparse.block_mask | default only | refused | leave masked blocks out of `indices`.
o_scale | float, optional | run | Positive; the output is divided by it before it is rounded.
ragged.o_scale | default only | refused | FlashInfer's one kernel that reads it multiplies, its
    name divides: put the factor into v_scale.
tables.mask | default only | refused | causality is built in; a tree of drafts is `tree_parents` of
    `Attention.plan`, any other mask `custom_mask`.
bmm1_scale_log2 | default only | refused | give bmm1_scale.
enable_block_sparse_attention | default only | refused | `BlockSparseAttentionWrapper`.
is_cuda_graph_compatible | default only | refused | lengths on a GPU are read, which cannot be
    captured: BatchDecodeWithPagedKVCacheWrapper(use_cuda_graph=True) and its block_tables.
levels.use_cuda_graph | default only | refused | BatchDecodeWithPagedKVCacheWrapper and
    BatchPrefillWithPagedKVCacheWrapper capture, and find shared prefixes in one page table.
pod.use_cuda_graph | default only | refused | `run` plans.
    BatchPrefillWithPagedKVCacheWrapper(use_cuda_graph=True) captures mixed batches.
pod.jit_args | default only | refused | variants are for the decode and prefill wrappers.
pod.args | default only | refused | options have names here.
"""
