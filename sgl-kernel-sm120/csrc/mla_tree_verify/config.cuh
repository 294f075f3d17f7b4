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

constexpr int kStepKeys = 32;      // keys between two block barriers
constexpr int kStageKeys = 16;     // keys of a ring stage; a step takes two
constexpr int kStepsInFlight = 4;  // at most 3 steps have keys in the ring; a power of two is cheaper to index
constexpr int kNumWarps = 8;
constexpr int kNumThreads = 32 * kNumWarps;

constexpr int kRowBytes = kDimQk * 2;
constexpr int kRowStride = kRowBytes + 16;  // odd multiple of 16 bytes: the 8 rows of an ldmatrix hit distinct banks
constexpr int kStageBytes = kStageKeys * kRowStride;
constexpr int kProbStride = (kStepKeys + 8) * 2;  // bytes; same reason
constexpr int kOutBytes = kDimV * 2;
constexpr int kOutStride = kOutBytes + 16;  // same reason, for fragments on their way out

constexpr int kWarpColumns = kDimV / kNumWarps;    // columns of V of a warp
constexpr int kCopyKeys = kStageKeys / kNumWarps;  // keys of a stage that one warp copies
constexpr int kSlotStages = 32 / kCopyKeys;        // stages whose slots a warp keeps
constexpr int kKeyBuffers = 2;                     // fragments of keys in registers, one ahead of its products
constexpr int kSums = 3;       // independent sums of a score of 32 rows hide the latency of a product
constexpr int kTreeWords = 3;  // 32-bit words of a row's tree mask

// The reference of a row's exponentials starts at zero and moves when a score is further away than this (log2). Powers
// of two up to there cost no accuracy in bf16, whose exponent is that of fp32.
constexpr float kReferenceSlack = 16.f;
constexpr float kLowest = -1e30f;  // finite: differences of two of them are no NaN

constexpr int kMaxWaves = 4;
constexpr float kTypicalSteps = 256.f;  // length of the context for which the kind of block is chosen
constexpr int kSharedLimit = 101376;    // bytes that a block of sm_120 may own

static_assert(kMaxTree <= 32 * kTreeWords, "a tree row's mask is kTreeWords words");

// Blocks of 32 rows (two tiles of 16) and of 64 (four), and what follows from that.
//   32   a warp holds all columns of 16 queries and scores 8 keys of a step.
//   64   a warp holds half of the columns of 16 queries: it scores all keys of a step over its half, and
//        the two warps of a tile exchange sums, so that each ends up with half of the keys.
template <int kTiles>
struct Block {
  static constexpr int kRowTiles = kTiles;
  static constexpr int kRows = 16 * kRowTiles;
  static constexpr int kShares = kNumWarps / kRowTiles;  // warps of a row tile; each computes the weights of its keys
  static constexpr int kColumnParts = kRowTiles / 2;     // warps over which the columns of a query are spread
  static constexpr int kScoreTiles = kDimQk / 16 / kColumnParts;  // k16 products of a score in one warp
  static constexpr int kOwnGroups = kStepKeys / 8 / kShares;      // groups of 8 keys whose weights a warp computes
  static constexpr int kNumStages = kColumnParts == 1 ? 5 : 4;
  static constexpr int kQueryStages = kRows / kStageKeys;  // the last stages, through which the queries pass
  static constexpr int kBarrierStages = 2 / kColumnParts;  // stages whose arrival one barrier announces
  static constexpr int kStepBarriers = 2 / kBarrierStages;
  // Measured on an H200: a step against one of 32 rows, and what a block costs beside its steps, in steps.
  static constexpr float kStepCost = kColumnParts == 1 ? 1.f : 1.8f;
  static constexpr float kOverheadSteps = kColumnParts == 1 ? 6.f : 4.f;
};
using LowBlock = Block<2>;
using TallBlock = Block<4>;

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
  int num_tokens, num_heads, num_rows, rows_per_block, num_splits, combine_team;
  float scale_log2, overhead_steps;
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

template <class B>
struct __align__(128) SharedStorage {
  unsigned char kv[B::kNumStages][kStageBytes];
  unsigned char prob[2][B::kRows * kProbStride];
  float4 partial[B::kColumnParts][B::kColumnParts == 1 ? 1 : kNumThreads];  // scores over half of the columns
  float row_exchange[B::kShares][B::kRows];                                 // maxima or sums of the shares
  float row_scale[B::kRows], row_reference[B::kRows];
  uint32_t visible[B::kRows][kTreeWords];  // tree keys that a row sees
  uint32_t live[kTreeWords];               // tree keys that any row of this block sees
  KeySource source;
  alignas(8) uint32_t slots[kNumWarps][kSlotStages * kCopyKeys];
  uint64_t full[kStepsInFlight * B::kStepBarriers];  // the keys of a step, or of one of its stages, have arrived
  uint64_t q_full;
};
static_assert(sizeof(SharedStorage<LowBlock>) <= kSharedLimit && sizeof(SharedStorage<TallBlock>) <= kSharedLimit,
              "one block must fit sm_120's shared memory");

}  // namespace sm120::mla_tree_verify
