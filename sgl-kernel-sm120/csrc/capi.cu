// SPDX-License-Identifier: Apache-2.0
// The C interface: ranges, parameters, launch. Tensors are checked in Python, where their names are known.
#include "include/sgl_kernel_sm120.h"
#include "mla_tree_verify/launch.cuh"

namespace op = sm120::mla_tree_verify;

constexpr int kMaxSplits = 65535;  // of a grid dimension

static_assert(SGL_SM120_MAX_BATCH == op::kMaxBatch && SGL_SM120_MAX_TREE == op::kMaxTree &&
                  SGL_SM120_MAX_HEADS == op::kMaxHeads && SGL_SM120_MAX_SMS <= kMaxSplits / op::kMaxWaves,
              "the header and the kernel must agree on the largest sizes");

namespace {

bool can_plan(int num_sms) { return num_sms >= 1 && num_sms <= SGL_SM120_MAX_SMS; }

bool in_range(const SglSm120MlaTreeVerify& a) {
  return a.batch_size >= 1 && a.batch_size <= op::kMaxBatch && a.num_tokens >= 1 && a.num_tokens <= op::kMaxTree &&
         a.num_heads >= 1 && a.num_heads <= op::kMaxHeads && a.num_splits >= 1 && a.num_splits <= kMaxSplits &&
         can_plan(a.num_sms) && (a.custom_mask == nullptr || a.mask_indptr != nullptr) &&
         a.workspace_bytes >= op::workspace_bytes(a.batch_size, a.num_tokens, a.num_heads, a.num_splits);
}

}  // namespace

extern "C" {

int32_t sgl_sm120_abi_version(void) { return SGL_SM120_ABI_VERSION; }

const char* sgl_sm120_error_string(int32_t code) {
  if (code == SGL_SM120_INVALID_ARGUMENT) return "invalid argument";
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

int32_t sgl_sm120_mla_tree_verify_splits(int32_t batch_size, int32_t num_tokens, int32_t num_heads, int32_t num_sms) {
  return can_plan(num_sms) ? op::plan(batch_size, num_tokens, num_heads, num_sms).num_splits : 0;
}

int64_t sgl_sm120_mla_tree_verify_workspace_bytes(int32_t batch_size, int32_t num_tokens, int32_t num_heads,
                                                  int32_t num_splits) {
  return op::workspace_bytes(batch_size, num_tokens, num_heads, num_splits);
}

int32_t sgl_sm120_mla_tree_verify_block_rows(int32_t batch_size, int32_t num_tokens, int32_t num_heads,
                                             int32_t num_sms) {
  return can_plan(num_sms) ? 16 * op::plan(batch_size, num_tokens, num_heads, num_sms).row_tiles : 0;
}

int32_t sgl_sm120_mla_tree_verify_shared_bytes(int32_t block_rows) {
  return static_cast<int32_t>(block_rows == op::LowBlock::kRows    ? sizeof(op::SharedStorage<op::LowBlock>)
                              : block_rows == op::TallBlock::kRows ? sizeof(op::SharedStorage<op::TallBlock>)
                                                                   : 0);
}

int32_t sgl_sm120_mla_tree_verify(const SglSm120MlaTreeVerify* args, void* stream) {
  const SglSm120MlaTreeVerify& a = *args;
  if (!in_range(a)) return SGL_SM120_INVALID_ARGUMENT;
  op::Params p = {};
  p.q = static_cast<const __nv_bfloat16*>(a.q);
  p.q_token_stride = a.q_token_stride;
  p.q_head_stride = a.q_head_stride;
  p.kv_pool = static_cast<const unsigned char*>(a.kv_pool);
  p.kv_slot_bytes = a.kv_slot_stride * static_cast<int64_t>(sizeof(__nv_bfloat16));
  p.kv_indptr = a.kv_indptr;
  p.kv_indices = a.kv_indices;
  p.qo_indptr = a.qo_indptr;
  p.qo_indptr_is_64 = a.qo_indptr_is_int64;
  p.out_cache_loc = a.out_cache_loc;
  p.mask = a.custom_mask;
  p.mask_indptr = a.mask_indptr;
  p.mask_is_full = a.mask_is_full;
  p.out = static_cast<__nv_bfloat16*>(a.out);
  p.out_token_stride = a.out_token_stride;
  p.out_head_stride = a.out_head_stride;
  p.num_tokens = a.num_tokens;
  p.num_heads = a.num_heads;
  p.num_rows = a.num_tokens * a.num_heads;
  p.num_splits = a.num_splits;
  p.scale_log2 = a.scale * 1.4426950408889634f;
  p.partial_out = static_cast<__nv_bfloat16*>(a.workspace);
  p.partial_lse = reinterpret_cast<float*>(p.partial_out +
                                           static_cast<int64_t>(a.batch_size) * a.num_splits * p.num_rows * op::kDimV);
  return op::launch(p, a.batch_size, a.num_sms, static_cast<cudaStream_t>(stream));
}

}  // extern "C"
