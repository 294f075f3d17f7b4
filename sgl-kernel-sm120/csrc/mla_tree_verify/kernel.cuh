// SPDX-License-Identifier: Apache-2.0
// MLA tree-verify attention: softmax attention of T tree tokens x H heads over a paged prefix and the tree itself.
//
// The T * H rows of a request share its keys (576 wide; V is the first 512 columns). A block takes 32 rows and one
// split of the keys and leaves a normalised partial result with its log-sum-exp; combine.cuh merges the splits.
//   bound   sm_120: DRAM up to about 128 rows per request, tensor cores beyond
//   warps   8. Scores: a warp has 16 rows (queries in registers, all 576 columns) x 8 keys of the step, so that no
//           partial scores cross warps. Values: a warp has 64 columns of V x all 32 rows.
//   keys    ring of 5 stages x 16 keys in shared memory; a row is one bulk copy; row stride 1,168 bytes, no swizzle
//   step    32 keys: scores -> exponentials against a fixed reference -> weights to shared memory -> block barrier ->
//           values. The barrier also tells whether a step is rare: it holds hidden keys, or a score left the range of
//           its reference. Before it every warp takes the values of the first stage into registers, so that it frees
//           one stage for the next keys at once and the other one a step later: no second barrier.
//   memory  at most 101,376 bytes and 255 registers without a spill: one block per SM
#pragma once

#include "../ptx/bulk_copy.cuh"
#include "../ptx/control.cuh"
#include "../ptx/matrix.cuh"
#include "config.cuh"
#include "work.cuh"

namespace sm120::mla_tree_verify {

// What a thread knows of its place. Fragment rows are `row` and `row + 8`, fragment columns 2 * quad_lane and + 1.
struct Place {
  int warp, lane, row_tile, key_group, row, quad_lane;

  // Reads the thread's index anew, so that what a rarely taken path derives from it costs no registers elsewhere.
  __device__ __forceinline__ Place() {
    const uint32_t thread = ptx::thread_index();
    warp = __shfl_sync(~0u, thread >> 5, 0);
    lane = thread & 31;
    row_tile = warp & 1;
    key_group = warp >> 1;
    row = row_tile * 16 + (lane >> 2);
    quad_lane = lane & 3;
  }
};

// Copies keys into the ring: every warp copies kCopyKeys keys of each stage. The slots of the next kSlotStages stages
// lie in shared memory; half of them are replaced at a time, so that no step waits for the load of a slot.
struct KeyCopier {
  const Params& p;
  SharedStorage& shared;
  const Place& at;

  // Entry `lane` of the slots from stage `first` on. Keys past the end repeat the last one. A pool has fewer than 2^31
  // slots, so the low word is the slot.
  __device__ __forceinline__ const uint32_t* slot_address(const KeySource& source, const Place& place,
                                                          int first) const {
    const int stage = first + place.lane / kCopyKeys;
    const int key =
        min(source.first_key + stage * kStageKeys + place.warp * kCopyKeys + place.lane % kCopyKeys, source.last_key);
    const int64_t* slot = key < source.prefix_len ? p.kv_indices + source.prefix_begin + key
                                                  : p.out_cache_loc + source.tree_begin + (key - source.prefix_len);
    return reinterpret_cast<const uint32_t*>(slot);
  }

  // The first slots, on their way to a register and then stored: nothing can be copied before.
  __device__ __forceinline__ uint32_t load_first_slots(const KeySource& source) const {
    return __ldcg(slot_address(source, at, 0));
  }
  __device__ __forceinline__ void keep_first_slots(uint32_t slot) {
    shared.slots[at.warp][at.lane] = slot;
    __syncwarp();
  }

  // Stages are copied in order: `index` counts from the start of the split, `stage` is its place in the ring.
  __device__ __forceinline__ void copy(int index, int stage, bool exists) {
    static_assert(kCopyKeys == 2);
    const uint2 slots = *reinterpret_cast<const uint2*>(&shared.slots[at.warp][index % kSlotStages * kCopyKeys]);
    const uint32_t target = ptx::shared_address(&shared.kv[stage][at.warp * kCopyKeys * kRowStride]);
    const uint32_t barrier = ptx::shared_address(&shared.full[index / 2 % kStepsInFlight]);
    ptx::elected_bulk_load_2(exists, target, target + kRowStride,
                             p.kv_pool + static_cast<int64_t>(slots.x) * p.kv_slot_bytes,
                             p.kv_pool + static_cast<int64_t>(slots.y) * p.kv_slot_bytes, kRowBytes, barrier);
  }

  // After stage `index`: where half of the slots are used up, the other half has arrived and the next one is loaded.
  __device__ __forceinline__ void advance(int index) {
    constexpr int kHalf = kSlotStages / 2;
    if (index % kHalf != kHalf - 1) return;
    ptx::copy_wait();
    __syncwarp();
    const Place here;
    const int first = index + 1 + kHalf;
    if (here.lane < kHalf * kCopyKeys)
      ptx::copy_4(ptx::shared_address(&shared.slots[here.warp][first % kSlotStages * kCopyKeys + here.lane]),
                  slot_address(shared.source, here, first));
  }
};

// The block's query rows, by bulk copies into the last two stages of the ring. Rows past the end repeat the last one.
__device__ __forceinline__ void copy_queries(const Params& p, SharedStorage& shared, const Place& at, int64_t token,
                                             int first_row, int end_row) {
  const uint32_t barrier = ptx::shared_address(&shared.q_full);
  if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(barrier, kBlockRows * kRowBytes);
  constexpr int kWarpRows = kBlockRows / kNumWarps;
  if (at.lane < kWarpRows) {
    const int local = at.warp * kWarpRows + at.lane;
    const int row = min(first_row + local, end_row - 1);
    const __nv_bfloat16* source = p.q + (token + row / p.num_heads) * p.q_token_stride +
                                  static_cast<int64_t>(row % p.num_heads) * p.q_head_stride;
    ptx::bulk_load(ptx::shared_address(&shared.kv[kNumStages - 2][local * kRowStride]), source, kRowBytes, barrier);
  }
}

// One bit per tree key for every row of the block, and which keys any of them sees.
__device__ __forceinline__ void load_tree_mask(const Params& p, SharedStorage& shared, const Place& at, int request,
                                               int prefix_len, int first_row, int end_row) {
  const int64_t row_bytes = p.mask_is_full ? static_cast<int64_t>(prefix_len) + p.num_tokens : p.num_tokens;
  const uint8_t* mask =
      p.mask == nullptr ? nullptr : p.mask + p.mask_indptr[request] + (p.mask_is_full ? prefix_len : 0);
  constexpr int kWarpRows = kBlockRows / kNumWarps;
#pragma unroll
  for (int i = 0; i < kWarpRows; i++) {
    const int local = at.warp * kWarpRows + i;
    const int token = min(first_row + local, end_row - 1) / p.num_heads;
#pragma unroll
    for (int word = 0; word < kTreeWords; word++) {
      const int key = word * 32 + at.lane;
      bool sees = key < p.num_tokens;
      if (mask == nullptr) {
        sees = sees && key <= token;
      } else if (sees) {
        sees = mask[token * row_bytes + key] != 0;
      }
      const uint32_t bits = __ballot_sync(~0u, sees);
      if (at.lane == 0) shared.visible[local][word] = bits;
    }
  }
  __syncthreads();
  if (at.warp < kTreeWords) {
    const uint32_t bits = __reduce_or_sync(~0u, shared.visible[at.lane][at.warp]);
    if (at.lane == 0) shared.live[at.warp] = bits;
  }
  __syncthreads();
}

// Bit k: is key first_key + k of prefix ++ tree among those of `words` (tree) or part of the prefix?
__device__ __forceinline__ uint32_t step_bits(const uint32_t* words, int first_key, int prefix_len) {
  const int offset = first_key - prefix_len;  // tree key of bit 0
  if (offset <= -kStepKeys) return ~0u;
  if (offset < 0) return (words[0] << -offset) | ((1u << -offset) - 1);
  const int word = offset / 32;
  const uint32_t low = word < kTreeWords ? words[word] : 0;
  const uint32_t high = word + 1 < kTreeWords ? words[word + 1] : 0;
  return __funnelshift_r(low, high, offset % 32);
}

// Values of keys that no row of the block sees become zero: their weight is zero, but zero times NaN is not.
__device__ __forceinline__ void clear_dead_keys(SharedStorage& shared, const Place& at, uint32_t live, int stage0,
                                                int stage1) {
  constexpr int kWarpKeys = kStepKeys / kNumWarps;
#pragma unroll 1
  for (int i = 0; i < kWarpKeys; i++) {
    const int key = at.warp * kWarpKeys + i;
    if (live >> key & 1) continue;
    unsigned char* row = &shared.kv[key < kStageKeys ? stage0 : stage1][key % kStageKeys * kRowStride];
#pragma unroll 1
    for (int byte = at.lane * 16; byte < kRowBytes; byte += 32 * 16)
      *reinterpret_cast<uint4*>(row + byte) = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_proxy();  // before the stage is filled again
}

// Scores of keys that a row does not see become -inf.
__device__ __forceinline__ void hide_keys(const SharedStorage& shared, const Place& at, float (&score)[4],
                                          int first_key, int prefix_len) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t bits =
        step_bits(shared.visible[at.row + 8 * i], first_key, prefix_len) >> (at.key_group * 8 + at.quad_lane * 2);
    if (!(bits & 1)) score[2 * i] = -INFINITY;
    if (!(bits & 2)) score[2 * i + 1] = -INFINITY;
  }
}

// A thread's share of the softmax: two rows.
struct Softmax {
  float reference[2] = {0.f, 0.f};
  float sum[2] = {0.f, 0.f};

  // exp2(score * scale - reference) of a tile, stored as bf16. Returns whether the reference must move: a score is
  // above the slack, or all that this thread has of a row are below `lowest`.
  __device__ __forceinline__ bool exponentiate(const float (&score)[4], float scale, uint32_t address, float lowest,
                                               float (&add)[2]) {
    float excess[4], prob[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      excess[i] = __fmaf_rn(score[i], scale, -reference[i / 2]);
      prob[i] = ptx::exp2_approx(excess[i]);
    }
    const uint32_t packed[2] = {ptx::pack_bf16(prob[0], prob[1]), ptx::pack_bf16(prob[2], prob[3])};
    ptx::store_shared(address, packed[0]);
    ptx::store_shared(address + 8 * kProbStride, packed[1]);
    // The sum is of what the values are multiplied by, rounding included.
#pragma unroll
    for (int i = 0; i < 2; i++) add[i] = ptx::low_bf16(packed[i]) + ptx::high_bf16(packed[i]);
    const float top0 = fmaxf(excess[0], excess[1]), top1 = fmaxf(excess[2], excess[3]);
    return fmaxf(top0, top1) > kReferenceSlack || fminf(top0, top1) < lowest;
  }

  // Before the first step: any reference will do, since nothing depends on it yet.
  __device__ __forceinline__ void forget_reference() { reference[0] = reference[1] = kLowest; }

  // All warps: the reference becomes the maximum so far; leaves in row_scale what the results so far are multiplied by.
  __device__ __forceinline__ void move_reference(SharedStorage& shared, const Place& at, const float (&score)[4],
                                                 float scale) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float top = fmaxf(score[2 * i] * scale, score[2 * i + 1] * scale);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      if (at.quad_lane == 0) shared.row_exchange[at.key_group][at.row + 8 * i] = top;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float top = reference[i];
#pragma unroll
      for (int group = 0; group < kKeyGroups; group++) top = fmaxf(top, shared.row_exchange[group][at.row + 8 * i]);
      const float factor = ptx::exp2_approx(reference[i] - top);
      reference[i] = top;
      sum[i] *= factor;
      if (at.key_group == 0 && at.quad_lane == 0) shared.row_scale[at.row + 8 * i] = factor;
    }
  }
};

using Output = float[kBlockRows / 16][kWarpColumns / 8][4];

// 16 rows x 16 columns of the output from 16 keys.
__device__ __forceinline__ void multiply(float (&out)[kWarpColumns / 8][4], int n, const uint32_t (&weight)[4],
                                         const uint32_t (&value)[4]) {
  ptx::mma_m16n8k16(out[2 * n], weight, value[0], value[1]);
  ptx::mma_m16n8k16(out[2 * n + 1], weight, value[2], value[3]);
}

__device__ __forceinline__ void scale_rows(Output& out, const SharedStorage& shared, const Place& at) {
#pragma unroll
  for (int m = 0; m < kBlockRows / 16; m++) {
    const float scale0 = shared.row_scale[m * 16 + (at.lane >> 2)],
                scale1 = shared.row_scale[m * 16 + 8 + (at.lane >> 2)];
#pragma unroll
    for (int n = 0; n < kWarpColumns / 8; n++) {
      out[m][n][0] *= scale0;
      out[m][n][1] *= scale0;
      out[m][n][2] *= scale1;
      out[m][n][3] *= scale1;
    }
  }
}

// Normalised rows leave through the ring: fragments to shared memory, then one bulk store per row.
__device__ __forceinline__ void store_rows(const Params& p, SharedStorage& shared, const Place& at, const Output& out,
                                           bool is_final, int request, int split, int first_row, int end_row) {
  const uint32_t base = ptx::shared_address(shared.kv);
#pragma unroll
  for (int m = 0; m < kBlockRows / 16; m++)
#pragma unroll
    for (int n = 0; n < kWarpColumns / 8; n++) {
      const uint32_t address =
          base + (m * 16 + (at.lane >> 2)) * kOutStride + (at.warp * kWarpColumns + n * 8 + at.quad_lane * 2) * 2;
      ptx::store_shared(address, ptx::pack_bf16(out[m][n][0], out[m][n][1]));
      ptx::store_shared(address + 8 * kOutStride, ptx::pack_bf16(out[m][n][2], out[m][n][3]));
    }
  ptx::fence_async_proxy();
  __syncthreads();
  constexpr int kWarpRows = kBlockRows / kNumWarps;
  const int local = at.warp * kWarpRows + at.lane, row = first_row + local;
  if (at.lane < kWarpRows && row < end_row) {
    __nv_bfloat16* target;
    if (is_final) {
      target = p.out + (first_token(p, request) + row / p.num_heads) * p.out_token_stride +
               static_cast<int64_t>(row % p.num_heads) * p.out_head_stride;
    } else {
      target = p.partial_out + ((static_cast<int64_t>(request) * p.num_splits + split) * p.num_rows + row) * kDimV;
    }
    ptx::bulk_store(target, base + local * kOutStride, kOutBytes);
    ptx::bulk_store_wait();
  }
}

// Row sums, normalisation, and the way out.
__device__ __forceinline__ void finish(const Params& p, SharedStorage& shared, Softmax& softmax, Output& out) {
  const Place at;
  const int request = blockIdx.y, split = blockIdx.z;
  const int first_row = blockIdx.x * p.rows_per_block, end_row = min(first_row + p.rows_per_block, p.num_rows);
  // Row sums over the lanes and key groups that share a row
#pragma unroll
  for (int i = 0; i < 2; i++) {
    softmax.sum[i] += __shfl_xor_sync(~0u, softmax.sum[i], 1);
    softmax.sum[i] += __shfl_xor_sync(~0u, softmax.sum[i], 2);
    if (at.quad_lane == 0) shared.row_exchange[at.key_group][at.row + 8 * i] = softmax.sum[i];
  }
  __syncthreads();
  if (at.key_group == 0 && at.quad_lane == 0) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float sum = 0.f;
#pragma unroll
      for (int group = 0; group < kKeyGroups; group++) sum += shared.row_exchange[group][at.row + 8 * i];
      // A row that sees no key gives zeros and takes no part in the merge; NaN stays NaN.
      shared.row_scale[at.row + 8 * i] = sum == 0.f ? 0.f : 1.f / sum;
      const int row = first_row + at.row + 8 * i;
      if (row < end_row && !shared.source.is_only_split)
        p.partial_lse[(static_cast<int64_t>(request) * p.num_rows + row) * p.num_splits + split] =
            sum == 0.f ? -INFINITY : softmax.reference[i] + __log2f(sum);
    }
  }
  __syncthreads();
  scale_rows(out, shared, at);
  store_rows(p, shared, at, out, shared.source.is_only_split, request, split, first_row, end_row);
}

__global__ void __launch_bounds__(kNumThreads, 1) split_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char raw_storage[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(raw_storage);
  const Place at;
  const int request = blockIdx.y, split = blockIdx.z;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStepsInFlight; i++) ptx::mbarrier_init(ptx::shared_address(&shared.full[i]), 2 * kNumWarps);
    ptx::mbarrier_init(ptx::shared_address(&shared.q_full), 1);
    ptx::fence_mbarrier_init();
  }
  const Work work(p, request);
  const int64_t token = first_token(p, request);
  if (split >= work.num_active) return;
  const int first_step = work.first_step(split);
  const int num_steps = ptx::uniform(work.first_step(split + 1) - first_step);
  const int num_stages = 2 * num_steps;
  const KeySource source = {p.kv_indptr[request], static_cast<int>(token), work.prefix_len,
                            work.num_keys - 1,    first_step * kStepKeys,  work.num_active == 1};
  if (threadIdx.x == 0) shared.source = source;
  KeyCopier copier{p, shared, at};
  const uint32_t first_slot = copier.load_first_slots(source);
  __syncthreads();

  const int first_row = blockIdx.x * p.rows_per_block, end_row = min(first_row + p.rows_per_block, p.num_rows);
  // Queries and the first keys are on their way together; the stages that the queries pass through follow.
  copy_queries(p, shared, at, token, first_row, end_row);
  copier.keep_first_slots(first_slot);
#pragma unroll
  for (int i = 0; i < kNumStages - 2; i++) copier.copy(i, i, i < num_stages);
  if ((first_step + num_steps) * kStepKeys > work.prefix_len)
    load_tree_mask(p, shared, at, request, work.prefix_len, first_row, end_row);
  uint32_t query[kTilesQk][4];
  ptx::mbarrier_wait(ptx::shared_address(&shared.q_full), 0);
  const uint32_t query_address = ptx::shared_address(shared.kv[kNumStages - 2]) +
                                 (at.row_tile * 16 + (at.lane & 15)) * kRowStride + (at.lane >> 4) * 16;
#pragma unroll
  for (int k = 0; k < kTilesQk; k++) ptx::ldmatrix_x4(query[k], query_address + k * 32);
  __syncthreads();
#pragma unroll
  for (int i = kNumStages - 2; i < kNumStages; i++) copier.copy(i, i, i < num_stages);

  Output out = {};
  Softmax softmax;
  const uint32_t ring = ptx::shared_address(shared.kv);
  const uint32_t key_offset = ring + (at.key_group % 2 * 8 + (at.lane & 7)) * kRowStride + (at.lane >> 3) * 16;
  const uint32_t value_offset = ring + (at.lane & 15) * kRowStride + (at.lane >> 4) * 16 + at.warp * kWarpColumns * 2;
  const uint32_t prob_store =
      ptx::shared_address(shared.prob) + at.row * kProbStride + (at.key_group * 8 + at.quad_lane * 2) * 2;
  const uint32_t prob_load = ptx::shared_address(shared.prob) + (at.lane & 15) * kProbStride + (at.lane >> 4) * 16;
  const uint32_t full = ptx::shared_address(shared.full);
  constexpr uint32_t kProbBytes = kBlockRows * kProbStride;
  constexpr int kKeyLoads = kTilesQk / 2, kValueLoads = kWarpColumns / 16, kRowTiles = kBlockRows / 16;

  const int boundary_step =
      ptx::uniform(work.prefix_len / kStepKeys - first_step);  // from here on a step holds hidden keys
  int stage0 = 0, stage1 = 1;
  uint32_t key[kKeyBuffers][4];
  auto load_first_keys = [&](int step, bool arrived) {
    if (!arrived) ptx::mbarrier_wait(full + step % kStepsInFlight * 8, step / kStepsInFlight & 1);
    const uint32_t address = key_offset + (at.key_group < 2 ? stage0 : stage1) * kStageBytes;
#pragma unroll
    for (int k = 0; k < kKeyBuffers - 1; k++) ptx::ldmatrix_x4(key[k], address + k * 64);
  };
  // Scores of 16 rows x 8 keys; independent sums hide the latency of the products.
  auto score_keys = [&](float (&score)[4]) {
    float sums[kSums][4] = {};
    const uint32_t address = key_offset + (at.key_group < 2 ? stage0 : stage1) * kStageBytes;
#pragma unroll
    for (int k = 0; k < kKeyLoads; k++) {
      const int ahead = k + kKeyBuffers - 1;
      if (ahead < kKeyLoads) ptx::ldmatrix_x4(key[ahead % kKeyBuffers], address + ahead * 64);
      ptx::mma_m16n8k16(sums[2 * k % kSums], query[2 * k], key[k % kKeyBuffers][0], key[k % kKeyBuffers][1]);
      ptx::mma_m16n8k16(sums[(2 * k + 1) % kSums], query[2 * k + 1], key[k % kKeyBuffers][2], key[k % kKeyBuffers][3]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      score[i] = sums[0][i] + sums[1][i];
#pragma unroll
      for (int j = 2; j < kSums; j++) score[i] += sums[j][i];
    }
  };
  load_first_keys(0, false);
#pragma unroll 1
  for (int step = 0; step < num_steps; step++) {
    float score[4];
    score_keys(score);
    // Values of the first stage: once every warp has them in registers, that stage is free.
    uint32_t value[kValueLoads][4], weight[kRowTiles][4];
#pragma unroll
    for (int n = 0; n < kValueLoads; n++)
      ptx::ldmatrix_x4_trans(value[n], value_offset + stage0 * kStageBytes + n * 32);
    const bool at_boundary = step >= boundary_step;
    float add[2];
    const uint32_t prob = (step & 1) * kProbBytes;
    // The reference starts at zero, which suits most rows: only then can it be too high.
    const float lowest = step == 0 ? -kReferenceSlack : -INFINITY;
    const bool outgrown = softmax.exponentiate(score, p.scale_log2, prob_store + prob, lowest, add);
    const bool is_rare = __syncthreads_or(outgrown || at_boundary);
    ptx::ldmatrix_x4(weight[0], prob_load + prob);
    if (is_rare) {
      const Place here;
      // The scores once more: keeping them would cost registers in every step.
      load_first_keys(step, true);
      score_keys(score);
      const int first_key = shared.source.first_key + step * kStepKeys, prefix_len = shared.source.prefix_len;
      if (at_boundary) hide_keys(shared, here, score, first_key, prefix_len);
      if (step == 0) softmax.forget_reference();
      softmax.move_reference(shared, here, score, p.scale_log2);
      if (at_boundary) clear_dead_keys(shared, here, step_bits(shared.live, first_key, prefix_len), stage0, stage1);
      softmax.exponentiate(score, p.scale_log2, prob_store + prob, -INFINITY, add);
      __syncthreads();
      scale_rows(out, shared, here);
      ptx::ldmatrix_x4(weight[0], prob_load + prob);
#pragma unroll
      for (int n = 0; n < kValueLoads; n++)
        ptx::ldmatrix_x4_trans(value[n], value_offset + stage0 * kStageBytes + n * 32);
      __syncthreads();
    }
    ptx::ldmatrix_x4(weight[1], prob_load + prob + 16 * kProbStride);
    softmax.sum[0] += add[0];
    softmax.sum[1] += add[1];

    // Every warp is past this step's scores and the values of its first stage, and past all of the step before: the
    // stages behind them are filled again. One tile of rows after the other, so that the weights and values of the
    // second half are on their way while the first half is multiplied.
    const int next_stage = 2 * step + kNumStages;
    copier.copy(next_stage - 1, stage0 == 0 ? kNumStages - 1 : stage0 - 1, step > 0 && next_stage - 1 < num_stages);
#pragma unroll
    for (int n = 0; n < kValueLoads; n++) multiply(out[0], n, weight[0], value[n]);
    ptx::ldmatrix_x4(weight[0], prob_load + prob + 32);
#pragma unroll
    for (int n = 0; n < kValueLoads; n++) {
      multiply(out[1], n, weight[1], value[n]);
      ptx::ldmatrix_x4_trans(value[n], value_offset + stage1 * kStageBytes + n * 32);
    }
    ptx::ldmatrix_x4(weight[1], prob_load + prob + 16 * kProbStride + 32);
    const bool arrived = ptx::mbarrier_test(full + (step + 1) % kStepsInFlight * 8, (step + 1) / kStepsInFlight & 1);
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int n = 0; n < kValueLoads; n++) multiply(out[m], n, weight[m], value[n]);
    copier.copy(next_stage, stage0, next_stage < num_stages);
    copier.advance(next_stage);

    stage0 = stage0 + 2 >= kNumStages ? stage0 + 2 - kNumStages : stage0 + 2;
    stage1 = stage1 + 2 >= kNumStages ? stage1 + 2 - kNumStages : stage1 + 2;
    if (step + 1 < num_steps) load_first_keys(step + 1, arrived);
  }
  ptx::grid_dependency_launch();

  // The block's place once more: keeping it would cost registers in every step.
  finish(p, shared, softmax, out);
}

}  // namespace sm120::mla_tree_verify
