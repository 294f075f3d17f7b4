// SPDX-License-Identifier: Apache-2.0
// Sizes, parameters and shared memory of mla_tree_verify. Every number of the kernel is defined here once.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace sm120::mla_tree_verify {

constexpr int kDimQk = 576;  // 512 latent + 64 rope
constexpr int kDimV = 512;   // V is the first 512 columns of K
constexpr int kMaxTree = 65;
constexpr int kMaxHeads = 128;
constexpr int kMaxBatch = 128;

constexpr int kBlockRows = 32;  // query rows of a block: two tiles of 16
constexpr int kStepKeys = 32;   // keys between two block barriers
constexpr int kStageKeys = 16;  // keys of a ring stage; a step takes two
constexpr int kNumStages = 5;
constexpr int kStepsInFlight = 4;  // at most 3 steps have keys in the ring; a power of two is cheaper to index
constexpr int kNumWarps = 8;
constexpr int kNumThreads = 32 * kNumWarps;

constexpr int kRowBytes = kDimQk * 2;
constexpr int kRowStride = kRowBytes + 16;  // odd multiple of 16 bytes: the 8 rows of an ldmatrix hit distinct banks
constexpr int kStageBytes = kStageKeys * kRowStride;
constexpr int kProbStride = (kStepKeys + 8) * 2;  // bytes; same reason
constexpr int kOutBytes = kDimV * 2;
constexpr int kOutStride = kOutBytes + 16;  // same reason, for fragments on their way out

constexpr int kTilesQk = kDimQk / 16;              // k16 products of a score
constexpr int kKeyGroups = kStepKeys / 8;          // a warp scores 8 keys for one tile of rows
constexpr int kWarpColumns = kDimV / kNumWarps;    // columns of V of a warp
constexpr int kCopyKeys = kStageKeys / kNumWarps;  // keys of a stage that one warp copies
constexpr int kSlotStages = 32 / kCopyKeys;        // stages whose slots a warp keeps
constexpr int kKeyBuffers = 2;                     // fragments of keys in registers, one ahead of its products
constexpr int kSums = 3;                           // independent sums of a score: they hide the latency of a product
constexpr int kTreeWords = 3;                      // 32-bit words of a row's tree mask

// The reference of a row's exponentials starts at zero and moves when a score is further away than this (log2). Powers
// of two up to there cost no accuracy in bf16, whose exponent is that of fp32.
constexpr float kReferenceSlack = 16.f;
constexpr float kLowest = -1e30f;  // finite: differences of two of them are no NaN

constexpr int kMaxWaves = 4;
constexpr int kSharedLimit = 101376;  // bytes that a block of sm_120 may own

static_assert(kKeyGroups * (kBlockRows / 16) == kNumWarps, "each warp scores one 16 x 8 tile");
static_assert(kBlockRows * kRowStride <= 2 * kStageBytes, "Q passes through the last two stages");
static_assert(kMaxTree <= 32 * kTreeWords, "a tree row's mask is kTreeWords words");

// A number of splits that fills whole waves of the GPU, with the cost model by which the device picks one per request.
struct SplitChoice {
  int num_splits;
  float waves;           // waves of blocks that the whole batch takes
  float steps_per_wave;  // waves / num_splits
};

struct Params {
  const __nv_bfloat16* q;  // [bs * T, H, 576], strides in elements
  int64_t q_token_stride, q_head_stride;
  const unsigned char* kv_pool;  // [slots, 576] bf16
  int64_t kv_slot_bytes;
  const int* kv_indptr;          // [bs + 1], prefix only
  const int64_t* kv_indices;     // [total prefix]
  const void* qo_indptr;         // [bs + 1] int32 or int64: first tree row of a request
  const int64_t* out_cache_loc;  // [bs * T]
  const uint8_t* mask;           // nullptr: causal chain
  const int64_t* mask_indptr;    // [bs + 1]: first mask byte of a request
  __nv_bfloat16* out;            // [bs * T, H, 512], strides in elements
  int64_t out_token_stride, out_head_stride;
  __nv_bfloat16* partial_out;  // [bs, splits, T * H, 512]
  float* partial_lse;          // [bs, T * H, splits], log2
  int qo_indptr_is_64, mask_is_full;
  int num_tokens, num_heads, num_rows, rows_per_block, num_splits;
  float scale_log2;
  SplitChoice choices[kMaxWaves];
};

// Where the keys of a block come from; kept in shared memory since registers are short.
struct KeySource {
  int prefix_begin;  // first entry of the request in kv_indices
  int tree_begin;    // and in out_cache_loc
  int prefix_len, last_key;
  int first_key;  // of the split
  int is_only_split;
};

struct __align__(128) SharedStorage {
  unsigned char kv[kNumStages][kStageBytes];
  unsigned char prob[2][kBlockRows * kProbStride];
  float row_exchange[kKeyGroups][kBlockRows];  // maxima or sums of the key groups
  float row_scale[kBlockRows];
  uint32_t visible[kBlockRows][kTreeWords];  // tree keys that a row sees
  uint32_t live[kTreeWords];                 // tree keys that any row of this block sees
  KeySource source;
  alignas(8) uint32_t slots[kNumWarps][kSlotStages * kCopyKeys];
  uint64_t full[kStepsInFlight];  // the keys of a step have arrived
  uint64_t q_full;
};
static_assert(sizeof(SharedStorage) <= kSharedLimit, "one block must fit sm_120's shared memory");

}  // namespace sm120::mla_tree_verify
