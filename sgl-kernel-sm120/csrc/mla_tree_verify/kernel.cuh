// SPDX-License-Identifier: Apache-2.0
// MLA tree-verify attention: softmax attention of T tree tokens x H heads over a paged prefix and the tree itself.
//
// The T * H rows of a request share its keys (576 wide; V is the first 512 columns). A block takes 32 rows and one
// split of the keys and leaves a normalised partial result with its log-sum-exp; combine.cuh merges the splits.
//   bound   sm_120: DRAM up to about 128 rows per request, tensor cores beyond
//   warps   8. Scores: warp = one tile of 16 rows (queries in registers, all 576 columns) x 8 keys of the step.
//           Values: warp = 64 columns of V x all 32 rows.
//   keys    ring of 5 stages x 16 keys in shared memory; a row is one bulk copy; row stride 1,168 bytes, no swizzle
//   step    32 keys: scores -> exponentials against a fixed reference -> P to shared memory -> one barrier -> values.
//           The barrier also asks whether any score outgrew the reference of its row; only then is it moved.
//           Consumed stages are refilled by all warps in the middle of the next step's scores.
//   memory  101,376 bytes at most, one block per SM, 255 registers
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

  __device__ __forceinline__ Place() {
    warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    lane = threadIdx.x & 31;
    row_tile = warp & 1;
    key_group = warp >> 1;
    row = row_tile * 16 + (lane >> 2);
    quad_lane = lane & 3;
  }
};

// Copies keys into the ring. Every warp copies kCopyKeys keys of each stage; a register holds the slots of the next
// kBatchStages stages and a second one is on its way, so that no step waits for the load of a slot.
struct KeyCopier {
  const Params& p;
  SharedStorage& shared;
  const Place& at;
  int prefix_begin, tree_begin, prefix_len, last_key, first_key;
  uint32_t batch, next_batch;

  __device__ __forceinline__ KeyCopier(const Params& params, SharedStorage& storage, const Place& place, const Work& work,
                                       int request, int64_t token, int first_step)
      : p(params), shared(storage), at(place) {
    prefix_begin = p.kv_indptr[request];
    tree_begin = static_cast<int>(token);
    prefix_len = work.prefix_len;
    last_key = work.num_keys - 1;
    first_key = first_step * kStepKeys;
    batch = load_batch(0);
    next_batch = load_batch(kBatchStages);
  }

  // Lane l: slot of key l % kCopyKeys of this warp in stage first + l / kCopyKeys. Keys past the end repeat the last
  // one. A pool has fewer than 2^31 slots, so the low word is the slot.
  __device__ __forceinline__ uint32_t load_batch(int first) const {
    const int stage = first + at.lane / kCopyKeys;
    const int key = min(first_key + stage * kStageKeys + at.warp * kCopyKeys + at.lane % kCopyKeys, last_key);
    const int64_t* slot = key < prefix_len ? p.kv_indices + prefix_begin + key
                                           : p.out_cache_loc + tree_begin + (key - prefix_len);
    return __ldcg(reinterpret_cast<const uint32_t*>(slot));
  }

  // Stages are copied in order: `index` counts from the start of the split, `slot` is its place in the ring.
  __device__ __forceinline__ void copy(int index, int stage) {
    uint32_t slots[kCopyKeys];
#pragma unroll
    for (int i = 0; i < kCopyKeys; i++)
      slots[i] = __shfl_sync(~0u, batch, (index % kBatchStages) * kCopyKeys + i);
    if (ptx::elect_one()) {
      const uint32_t barrier = ptx::shared_address(&shared.full[stage]);
      ptx::mbarrier_arrive_expect(barrier, kCopyKeys * kRowBytes);
#pragma unroll
      for (int i = 0; i < kCopyKeys; i++)
        ptx::bulk_load(ptx::shared_address(&shared.kv[stage][(at.warp * kCopyKeys + i) * kRowStride]),
                       p.kv_pool + static_cast<int64_t>(slots[i]) * p.kv_slot_bytes, kRowBytes, barrier);
    }
    if (index % kBatchStages == kBatchStages - 1) {
      batch = next_batch;
      next_batch = load_batch(index + 1 + kBatchStages);
    }
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
  const uint8_t* mask = p.mask == nullptr ? nullptr
                                          : p.mask + p.mask_indptr[request] + (p.mask_is_full ? prefix_len : 0);
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
  if (live == ~0u) return;
  constexpr int kWarpKeys = kStepKeys / kNumWarps;
  for (int i = 0; i < kWarpKeys; i++) {
    const int key = at.warp * kWarpKeys + i;
    if (live >> key & 1) continue;
    unsigned char* row = &shared.kv[key < kStageKeys ? stage0 : stage1][key % kStageKeys * kRowStride];
    for (int byte = at.lane * 16; byte < kRowBytes; byte += 32 * 16)
      *reinterpret_cast<uint4*>(row + byte) = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_proxy();  // before the stage is filled again
  __syncthreads();
}

// A thread's share of the softmax: two rows.
struct Softmax {
  float reference[2] = {kLowest, kLowest};
  float sum[2] = {0.f, 0.f};

  // exp2(score * scale - reference) of a tile, stored as bf16; returns whether a score outgrew its reference.
  __device__ __forceinline__ bool exponentiate(const float (&score)[4], float scale, uint32_t address, float (&add)[2]) {
    float excess[4], prob[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      excess[i] = score[i] * scale - reference[i / 2];
      prob[i] = ptx::exp2_approx(excess[i]);
    }
    ptx::store_shared(address, ptx::pack_bf16(prob[0], prob[1]));
    ptx::store_shared(address + 8 * kProbStride, ptx::pack_bf16(prob[2], prob[3]));
    add[0] = prob[0] + prob[1];
    add[1] = prob[2] + prob[3];
    return fmaxf(fmaxf(excess[0], excess[1]), fmaxf(excess[2], excess[3])) > kReferenceSlack;
  }

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

__device__ __forceinline__ void scale_rows(Output& out, const SharedStorage& shared, const Place& at) {
#pragma unroll
  for (int m = 0; m < kBlockRows / 16; m++) {
    const float scale0 = shared.row_scale[m * 16 + (at.lane >> 2)], scale1 = shared.row_scale[m * 16 + 8 + (at.lane >> 2)];
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
      const uint32_t address = base + (m * 16 + (at.lane >> 2)) * kOutStride +
                               (at.warp * kWarpColumns + n * 8 + at.quad_lane * 2) * 2;
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
      target = p.partial_out +
               ((static_cast<int64_t>(request) * p.num_splits + split) * p.num_rows + row) * kDimV;
    }
    ptx::bulk_store(target, base + local * kOutStride, kOutBytes);
    ptx::bulk_store_wait();
  }
}

__global__ void __launch_bounds__(kNumThreads, 1) split_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char raw_storage[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(raw_storage);
  const Place at;
  const int split = blockIdx.y, request = blockIdx.z;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kNumStages; i++) ptx::mbarrier_init(ptx::shared_address(&shared.full[i]), kNumWarps);
    ptx::mbarrier_init(ptx::shared_address(&shared.consumed), kNumWarps);
    ptx::mbarrier_init(ptx::shared_address(&shared.q_full), 1);
    ptx::fence_mbarrier_init();
  }
  ptx::grid_dependency_wait();
  const Work work(p, request);
  if (split >= work.num_active) return;
  const int first_step = work.first_step(split), num_steps = work.first_step(split + 1) - first_step;
  const int num_stages = 2 * num_steps;
  const int64_t token = first_token(p, request);
  const int first_row = blockIdx.x * p.rows_per_block, end_row = min(first_row + p.rows_per_block, p.num_rows);
  KeyCopier copier(p, shared, at, work, request, token, first_step);
  __syncthreads();

  // Queries and the first keys are on their way together; the stages that the queries pass through follow.
  copy_queries(p, shared, at, token, first_row, end_row);
#pragma unroll
  for (int i = 0; i < kNumStages - 2; i++)
    if (i < num_stages) copier.copy(i, i);
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
  for (int i = kNumStages - 2; i < kNumStages; i++)
    if (i < num_stages) copier.copy(i, i);

  Output out = {};
  Softmax softmax;
  const uint32_t ring = ptx::shared_address(shared.kv);
  const uint32_t key_offset = (at.key_group % 2 * 8 + (at.lane & 7)) * kRowStride + (at.lane >> 3) * 16;
  const uint32_t value_offset = (at.lane & 15) * kRowStride + (at.lane >> 4) * 16 + at.warp * kWarpColumns * 2;
  const uint32_t prob_store = ptx::shared_address(shared.prob) + at.row * kProbStride + (at.key_group * 8 + at.quad_lane * 2) * 2;
  const uint32_t prob_load = ptx::shared_address(shared.prob) + (at.lane & 15) * kProbStride + (at.lane >> 4) * 16;
  const uint32_t full = ptx::shared_address(shared.full), consumed = ptx::shared_address(&shared.consumed);
  constexpr uint32_t kProbBytes = kBlockRows * kProbStride;

  int stage0 = 0, stage1 = 1;
  uint32_t parity0 = 0, parity1 = 0;
#pragma unroll 1
  for (int step = 0; step < num_steps; step++) {
    ptx::mbarrier_wait(full + stage0 * 8, parity0);
    ptx::mbarrier_wait(full + stage1 * 8, parity1);
    const int first_key = (first_step + step) * kStepKeys;
    const bool at_boundary = first_key + kStepKeys > work.prefix_len;
    if (at_boundary)
      clear_dead_keys(shared, at, step_bits(shared.live, first_key, work.prefix_len), stage0, stage1);

    // Scores of 16 rows x 8 keys: four independent sums hide the latency of the products.
    float sums[4][4] = {};
    const uint32_t key_address = ring + (at.key_group < 2 ? stage0 : stage1) * kStageBytes + key_offset;
    uint32_t key[2][4];
    ptx::ldmatrix_x4(key[0], key_address);
#pragma unroll
    for (int k = 0; k < kTilesQk / 2; k++) {
      if (k + 1 < kTilesQk / 2) ptx::ldmatrix_x4(key[(k + 1) & 1], key_address + (k + 1) * 64);
      ptx::mma_m16n8k16(sums[2 * k % 4], query[2 * k], key[k & 1][0], key[k & 1][1]);
      ptx::mma_m16n8k16(sums[(2 * k + 1) % 4], query[2 * k + 1], key[k & 1][2], key[k & 1][3]);
      if (k == 6 && step > 0) {
        // Stages of the step before are free once every warp has read its values.
        ptx::mbarrier_wait(consumed, (step - 1) & 1);
        const int index = 2 * step + kNumStages - 2;
        const int free0 = stage0 >= 2 ? stage0 - 2 : stage0 + kNumStages - 2;
        const int free1 = stage1 >= 2 ? stage1 - 2 : stage1 + kNumStages - 2;
        if (index < num_stages) copier.copy(index, free0);
        if (index + 1 < num_stages) copier.copy(index + 1, free1);
      }
    }
    float score[4];
#pragma unroll
    for (int i = 0; i < 4; i++) score[i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    if (at_boundary) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32_t bits = step_bits(shared.visible[at.row + 8 * i], first_key, work.prefix_len) >>
                              (at.key_group * 8 + at.quad_lane * 2);
        if (!(bits & 1)) score[2 * i] = -INFINITY;
        if (!(bits & 2)) score[2 * i + 1] = -INFINITY;
      }
    }

    float add[2];
    const uint32_t prob = (step & 1) * kProbBytes;
    const bool outgrown = softmax.exponentiate(score, p.scale_log2, prob_store + prob, add);
    if (__syncthreads_or(outgrown)) {
      softmax.move_reference(shared, at, score, p.scale_log2);
      softmax.exponentiate(score, p.scale_log2, prob_store + prob, add);
      __syncthreads();
      scale_rows(out, shared, at);
    }
    softmax.sum[0] += add[0];
    softmax.sum[1] += add[1];

#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32_t value_address = ring + (half == 0 ? stage0 : stage1) * kStageBytes + value_offset;
      uint32_t weight[kBlockRows / 16][4], value[2][4];
#pragma unroll
      for (int m = 0; m < kBlockRows / 16; m++)
        ptx::ldmatrix_x4(weight[m], prob_load + prob + m * 16 * kProbStride + half * 32);
      ptx::ldmatrix_x4_trans(value[0], value_address);
#pragma unroll
      for (int n = 0; n < kWarpColumns / 16; n++) {
        if (n + 1 < kWarpColumns / 16) ptx::ldmatrix_x4_trans(value[(n + 1) & 1], value_address + (n + 1) * 32);
#pragma unroll
        for (int m = 0; m < kBlockRows / 16; m++) {
          ptx::mma_m16n8k16(out[m][2 * n], weight[m], value[n & 1][0], value[n & 1][1]);
          ptx::mma_m16n8k16(out[m][2 * n + 1], weight[m], value[n & 1][2], value[n & 1][3]);
        }
      }
    }
    if (at.lane == 0) ptx::mbarrier_arrive(consumed);

    stage0 += 2;
    stage1 += 2;
    if (stage0 >= kNumStages) stage0 -= kNumStages, parity0 ^= 1;
    if (stage1 >= kNumStages) stage1 -= kNumStages, parity1 ^= 1;
  }
  ptx::grid_dependency_launch();

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
      if (row < end_row && work.num_active > 1)
        p.partial_lse[(static_cast<int64_t>(request) * p.num_rows + row) * p.num_splits + split] =
            sum == 0.f ? -INFINITY : softmax.reference[i] + __log2f(sum);
    }
  }
  __syncthreads();
  scale_rows(out, shared, at);
  store_rows(p, shared, at, out, work.num_active == 1, request, split, first_row, end_row);
}

}  // namespace sm120::mla_tree_verify
