// SPDX-License-Identifier: Apache-2.0
// The C interface of the library, and its only declaration. Pointers are device memory unless they say otherwise.
// Functions that return int give 0, a cudaError_t, or SGL_SM120_INVALID_ARGUMENT.
#ifndef SGL_KERNEL_SM120_H_
#define SGL_KERNEL_SM120_H_

#include <stdint.h>

#define SGL_SM120_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// Raised with every change of a structure or a function below.
#define SGL_SM120_ABI_VERSION 2

#define SGL_SM120_INVALID_ARGUMENT (-1)

// Largest sizes of mla_tree_verify.
#define SGL_SM120_MAX_BATCH 128
#define SGL_SM120_MAX_TREE 65
#define SGL_SM120_MAX_HEADS 128
#define SGL_SM120_MAX_SMS 16383

// Row r of request b is tree token r / num_heads, head r % num_heads. Strides are in elements; rows start at multiples
// of 16 bytes.
typedef struct SglSm120MlaTreeVerify {
  const void* q;                 // bf16 [batch_size * num_tokens, num_heads, 576]
  const void* kv_pool;           // bf16 [num_slots, 576]
  const int32_t* kv_indptr;      // [batch_size + 1], prefix only
  const int64_t* kv_indices;     // [total prefix], slots
  const void* qo_indptr;         // int32 or int64 [batch_size + 1]
  const int64_t* out_cache_loc;  // [batch_size * num_tokens], slots of the tree tokens
  const uint8_t* custom_mask;    // NULL: a chain. Non-zero: visible
  const int64_t* mask_indptr;    // [batch_size + 1], first byte of a request; NULL with a NULL mask
  void* out;                     // bf16 [batch_size * num_tokens, num_heads, 512]
  void* workspace;               // 16-byte aligned
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t kv_slot_stride;
  int64_t out_token_stride;
  int64_t out_head_stride;
  int64_t workspace_bytes;
  int32_t batch_size;
  int32_t num_tokens;
  int32_t num_heads;
  int32_t num_splits;
  int32_t num_sms;
  int32_t qo_indptr_is_int64;
  int32_t mask_is_full;  // 1: rows of prefix + tree bytes, of which the last num_tokens are read; 0: num_tokens bytes
  float scale;
} SglSm120MlaTreeVerify;

// Host only: never touches a GPU. Splits and rows are 0 for a num_sms outside 1 to SGL_SM120_MAX_SMS.
SGL_SM120_EXPORT int32_t sgl_sm120_abi_version(void);
SGL_SM120_EXPORT const char* sgl_sm120_error_string(int32_t code);
SGL_SM120_EXPORT int32_t sgl_sm120_mla_tree_verify_splits(int32_t batch_size, int32_t num_tokens, int32_t num_heads,
                                                          int32_t num_sms);
SGL_SM120_EXPORT int64_t sgl_sm120_mla_tree_verify_workspace_bytes(int32_t batch_size, int32_t num_tokens,
                                                                   int32_t num_heads, int32_t num_splits);

// Rows of a block: 32 or 64; and the dynamic shared memory of such a block, 0 for another number.
SGL_SM120_EXPORT int32_t sgl_sm120_mla_tree_verify_block_rows(int32_t batch_size, int32_t num_tokens, int32_t num_heads,
                                                              int32_t num_sms);
SGL_SM120_EXPORT int32_t sgl_sm120_mla_tree_verify_shared_bytes(int32_t block_rows);

// Launches on the current device. `stream` is a cudaStream_t.
SGL_SM120_EXPORT int32_t sgl_sm120_mla_tree_verify(const SglSm120MlaTreeVerify* args, void* stream);

#ifdef __cplusplus
}
#endif

#endif  // SGL_KERNEL_SM120_H_
