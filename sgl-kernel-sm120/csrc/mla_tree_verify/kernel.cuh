// SPDX-License-Identifier: Apache-2.0
// MLA tree-verify attention: softmax attention of T tree tokens x H heads over a paged prefix and the tree itself.
//
// The T * H rows of a request share its keys (576 wide; V is the first 512 columns). A block takes 32 or 64 rows
// and one split of the keys and leaves a normalised partial result with its log-sum-exp; combine.cuh merges the splits.
//   bound   sm_120: DRAM up to about 120 rows per request, tensor cores beyond
//   warps   8. Scores, 32 rows: a warp has 16 rows (queries in registers, all 576 columns) x 8 keys of the step.
//           64 rows: half of the columns x all 32 keys, and pairs of warps exchange sums.
//           Values: a warp has 64 columns of V x all rows.
//   keys    ring of 5 (64 rows: 4) stages x 16 keys in shared memory; a row is one bulk copy; row stride 1,168 bytes
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
template <class B>
struct Place {
  int warp, lane, row_tile, share, row, quad_lane;

  // Reads the thread's index anew, so that what a rarely taken path derives from it costs no registers elsewhere.
  __device__ __forceinline__ Place() {
    const uint32_t thread = ptx::thread_index();
    warp = __shfl_sync(~0u, thread >> 5, 0);
    lane = thread & 31;
    row_tile = warp % B::kRowTiles;
    share = warp / B::kRowTiles;
    row = row_tile * 16 + (lane >> 2);
    quad_lane = lane & 3;
  }
};

// Copies keys into the ring: every warp copies kCopyKeys keys of each stage. The slots of the next kSlotStages stages
// lie in shared memory; half of them are replaced at a time, so that no step waits for the load of a slot.
template <class B>
struct KeyCopier {
  const Params& p;
  SharedStorage<B>& shared;
  const Place<B>& at;

  // Entry `lane` of the slots from stage `first` on. Keys past the end repeat the last one. A pool has fewer than 2^31
  // slots, so the low word is the slot.
  __device__ __forceinline__ const uint32_t* slot_address(const KeySource& source, const Place<B>& place,
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
    const uint32_t barrier =
        ptx::shared_address(&shared.full[index / B::kBarrierStages % (kStepsInFlight * B::kStepBarriers)]);
    ptx::elected_bulk_load_2(exists, target, target + kRowStride,
                             p.kv_pool + static_cast<int64_t>(slots.x) * p.kv_slot_bytes,
                             p.kv_pool + static_cast<int64_t>(slots.y) * p.kv_slot_bytes, kRowBytes, barrier);
    advance(index);
  }

  // After stage `index`: where half of the slots are used up, the other half has arrived and the next one is loaded.
  __device__ __forceinline__ void advance(int index) {
    constexpr int kHalf = kSlotStages / 2;
    if (index % kHalf != kHalf - 1) return;
    ptx::copy_wait();
    __syncwarp();
    const Place<B> here;
    const int first = index + 1 + kHalf;
    if (here.lane < kHalf * kCopyKeys)
      ptx::copy_4(ptx::shared_address(&shared.slots[here.warp][first % kSlotStages * kCopyKeys + here.lane]),
                  slot_address(shared.source, here, first));
  }
};

// The block's query rows, by bulk copies into the last stages of the ring. Rows past the end become zero, visible to
// the block after its next barrier: copies of one row by all blocks would queue at one place of the L2.
template <class B>
__device__ __forceinline__ void copy_queries(const Params& p, SharedStorage<B>& shared, const Place<B>& at,
                                             int64_t token, int first_row, int end_row) {
  constexpr int kWarpRows = B::kRows / kNumWarps;
  const uint32_t barrier = ptx::shared_address(&shared.q_full);
  if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(barrier, (end_row - first_row) * kRowBytes);
  const int first = at.warp * kWarpRows, num_rows = min(max(end_row - first_row - first, 0), kWarpRows);
  unsigned char* target = shared.kv[B::kNumStages - B::kQueryStages] + first * kRowStride;
  if (at.lane < num_rows) {
    const int row = first_row + first + at.lane;
    const __nv_bfloat16* source = p.q + (token + row / p.num_heads) * p.q_token_stride +
                                  static_cast<int64_t>(row % p.num_heads) * p.q_head_stride;
    ptx::bulk_load(ptx::shared_address(target + at.lane * kRowStride), source, kRowBytes, barrier);
  }
#pragma unroll 1
  for (int row = num_rows; row < kWarpRows; row++)
#pragma unroll 1
    for (int byte = at.lane * 16; byte < kRowBytes; byte += 32 * 16)
      *reinterpret_cast<uint4*>(target + row * kRowStride + byte) = make_uint4(0, 0, 0, 0);
  if (num_rows < kWarpRows) ptx::fence_async_proxy();  // before keys are copied here
}

// The tree's mask as the rows of a block see it: one bit per tree key. Its bytes are requested before anything that has
// to wait, all at once, and turned into bits once the copies are on their way.
template <class B>
struct TreeMask {
  static constexpr int kWarpRows = B::kRows / kNumWarps;
  uint8_t bytes[kWarpRows][kTreeWords];

  __device__ __forceinline__ void request(const Params& p, const Place<B>& at, int64_t begin, int prefix_len,
                                          int first_row, int end_row) {
    const int64_t row_bytes = p.mask_is_full ? static_cast<int64_t>(prefix_len) + p.num_tokens : p.num_tokens;
    const uint8_t* mask = p.mask + begin + (p.mask_is_full ? prefix_len : 0) + at.lane;
#pragma unroll
    for (int i = 0; i < kWarpRows; i++) {
      const int token = min(first_row + at.warp * kWarpRows + i, end_row - 1) / p.num_heads;
#pragma unroll
      for (int word = 0; word < kTreeWords; word++) {
        const int key = word * 32 + at.lane;
        bytes[i][word] = p.mask == nullptr ? key <= token : 0;
        if (p.mask != nullptr && key < p.num_tokens) bytes[i][word] = mask[token * row_bytes + word * 32];
      }
    }
  }

  // Visible to the block after its next barrier.
  __device__ __forceinline__ void keep(const Params& p, SharedStorage<B>& shared, const Place<B>& at) const {
#pragma unroll
    for (int i = 0; i < kWarpRows; i++)
#pragma unroll
      for (int word = 0; word < kTreeWords; word++) {
        const uint32_t bits = __ballot_sync(~0u, bytes[i][word] != 0 && word * 32 + at.lane < p.num_tokens);
        if (at.lane == 0) shared.visible[at.warp * kWarpRows + i][word] = bits;
      }
  }
};

// Which tree keys any row of the block sees, from what it sees of each; visible after the next barrier.
template <class B>
__device__ __forceinline__ void find_live_keys(SharedStorage<B>& shared, const Place<B>& at) {
  if (at.warp >= kTreeWords) return;
  uint32_t bits = 0;
#pragma unroll
  for (int row = 0; row < B::kRows; row += 32) bits |= shared.visible[row + at.lane][at.warp];
  bits = __reduce_or_sync(~0u, bits);
  if (at.lane == 0) shared.live[at.warp] = bits;
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
template <class B>
__device__ __forceinline__ void clear_dead_keys(SharedStorage<B>& shared, const Place<B>& at, uint32_t live, int stage0,
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

// Scores of the keys of a thread: group g holds keys 8 * share + 16 * g + (0 to 7) of the step.
template <class B>
using Scores = float[B::kOwnGroups][4];

// Scores of keys that a row does not see become -inf.
template <class B>
__device__ __forceinline__ void hide_keys(const SharedStorage<B>& shared, const Place<B>& at, Scores<B>& score,
                                          int first_key, int prefix_len) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t bits =
        step_bits(shared.visible[at.row + 8 * i], first_key, prefix_len) >> (at.share * 8 + at.quad_lane * 2);
#pragma unroll
    for (int g = 0; g < B::kOwnGroups; g++) {
      if (!(bits >> 16 * g & 1)) score[g][2 * i] = -INFINITY;
      if (!(bits >> 16 * g & 2)) score[g][2 * i + 1] = -INFINITY;
    }
  }
}

// A thread's share of the softmax: two rows. Their references are kept in shared memory, since registers are short.
template <class B>
struct Softmax {
  float sum[2] = {0.f, 0.f};

  // exp2(score * scale - reference) of a tile, stored as bf16. Returns whether the reference must move: a score is
  // above the slack, or all that this thread has of a row are below `lowest`.
  __device__ __forceinline__ bool exponentiate(const Scores<B>& score, const float (&reference)[2], float scale,
                                               uint32_t address, float lowest, float (&add)[2]) {
    float top[2];
#pragma unroll
    for (int g = 0; g < B::kOwnGroups; g++) {
      float excess[4], prob[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        excess[i] = __fmaf_rn(score[g][i], scale, -reference[i / 2]);
        prob[i] = ptx::exp2_approx(excess[i]);
      }
      const uint32_t packed[2] = {ptx::pack_bf16(prob[0], prob[1]), ptx::pack_bf16(prob[2], prob[3])};
      ptx::store_shared(address + g * 32, packed[0]);
      ptx::store_shared(address + g * 32 + 8 * kProbStride, packed[1]);
      // The sum is of what the values are multiplied by, rounding included.
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float pair = ptx::low_bf16(packed[i]) + ptx::high_bf16(packed[i]);
        const float larger = fmaxf(excess[2 * i], excess[2 * i + 1]);
        add[i] = g == 0 ? pair : add[i] + pair;
        top[i] = g == 0 ? larger : fmaxf(top[i], larger);
      }
    }
    return fmaxf(top[0], top[1]) > kReferenceSlack || fminf(top[0], top[1]) < lowest;
  }

  // All warps: the reference becomes the larger of itself and this step's maximum; leaves in row_scale what the results
  // so far are multiplied by. Before the first step any reference will do, since nothing depends on it yet.
  __device__ __forceinline__ void move_reference(SharedStorage<B>& shared, const Place<B>& at, const Scores<B>& score,
                                                 float scale, bool is_first, float (&reference)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float top = -INFINITY;
#pragma unroll
      for (int g = 0; g < B::kOwnGroups; g++)
        top = fmaxf(top, fmaxf(score[g][2 * i] * scale, score[g][2 * i + 1] * scale));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      if (at.quad_lane == 0) shared.row_exchange[at.share][at.row + 8 * i] = top;
      reference[i] = is_first ? kLowest : shared.row_reference[at.row + 8 * i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float top = reference[i];
#pragma unroll
      for (int share = 0; share < B::kShares; share++) top = fmaxf(top, shared.row_exchange[share][at.row + 8 * i]);
      const float factor = ptx::exp2_approx(reference[i] - top);
      reference[i] = top;
      sum[i] *= factor;
      if (at.share == 0 && at.quad_lane == 0) {
        shared.row_scale[at.row + 8 * i] = factor;
        shared.row_reference[at.row + 8 * i] = top;
      }
    }
  }
};

template <class B>
using Output = float[B::kRowTiles][kWarpColumns / 8][4];

// 16 rows x 16 columns of the output from 16 keys.
__device__ __forceinline__ void multiply(float (&out)[kWarpColumns / 8][4], int n, const uint32_t (&weight)[4],
                                         const uint32_t (&value)[4]) {
  ptx::mma_m16n8k16(out[2 * n], weight, value[0], value[1]);
  ptx::mma_m16n8k16(out[2 * n + 1], weight, value[2], value[3]);
}

template <class B>
__device__ __forceinline__ void scale_rows(Output<B>& out, const SharedStorage<B>& shared, const Place<B>& at) {
#pragma unroll
  for (int m = 0; m < B::kRowTiles; m++) {
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
template <class B>
__device__ __forceinline__ void store_rows(const Params& p, SharedStorage<B>& shared, const Place<B>& at,
                                           const Output<B>& out, bool is_final, int request, int split, int first_row,
                                           int end_row) {
  const uint32_t base = ptx::shared_address(shared.kv);
#pragma unroll
  for (int m = 0; m < B::kRowTiles; m++)
#pragma unroll
    for (int n = 0; n < kWarpColumns / 8; n++) {
      const uint32_t address =
          base + (m * 16 + (at.lane >> 2)) * kOutStride + (at.warp * kWarpColumns + n * 8 + at.quad_lane * 2) * 2;
      ptx::store_shared(address, ptx::pack_bf16(out[m][n][0], out[m][n][1]));
      ptx::store_shared(address + 8 * kOutStride, ptx::pack_bf16(out[m][n][2], out[m][n][3]));
    }
  ptx::fence_async_proxy();
  __syncthreads();
  constexpr int kWarpRows = B::kRows / kNumWarps;
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
template <class B>
__device__ __forceinline__ void finish(const Params& p, SharedStorage<B>& shared, Softmax<B>& softmax, Output<B>& out) {
  const Place<B> at;
  const int request = blockIdx.y, split = blockIdx.z;
  const int first_row = blockIdx.x * p.rows_per_block, end_row = min(first_row + p.rows_per_block, p.num_rows);
  // Row sums over the lanes and warps that share a row
#pragma unroll
  for (int i = 0; i < 2; i++) {
    softmax.sum[i] += __shfl_xor_sync(~0u, softmax.sum[i], 1);
    softmax.sum[i] += __shfl_xor_sync(~0u, softmax.sum[i], 2);
    if (at.quad_lane == 0) shared.row_exchange[at.share][at.row + 8 * i] = softmax.sum[i];
  }
  __syncthreads();
  if (at.share == 0 && at.quad_lane == 0) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float sum = 0.f;
#pragma unroll
      for (int share = 0; share < B::kShares; share++) sum += shared.row_exchange[share][at.row + 8 * i];
      // A row that sees no key gives zeros and takes no part in the merge; NaN stays NaN.
      shared.row_scale[at.row + 8 * i] = sum == 0.f ? 0.f : 1.f / sum;
      const int row = first_row + at.row + 8 * i;
      if (row < end_row && !shared.source.is_only_split)
        p.partial_lse[(static_cast<int64_t>(request) * p.num_rows + row) * p.num_splits + split] =
            sum == 0.f ? -INFINITY : shared.row_reference[at.row + 8 * i] + __log2f(sum);
    }
  }
  __syncthreads();
  scale_rows(out, shared, at);
  store_rows(p, shared, at, out, shared.source.is_only_split, request, split, first_row, end_row);
}

// Scores of 16 queries x 8 keys. Independent sums hide the latency of the products; key[0] holds the first keys.
template <class B>
__device__ __forceinline__ void score_all_columns(Scores<B>& score, const uint32_t (&query)[B::kScoreTiles][4],
                                                  uint32_t (&key)[kKeyBuffers][4], uint32_t address) {
  constexpr int kLoads = B::kScoreTiles / 2;
  float sums[kSums][4] = {};
#pragma unroll
  for (int k = 0; k < kLoads; k++) {
    if (k + 1 < kLoads) ptx::ldmatrix_x4(key[(k + 1) % kKeyBuffers], address + (k + 1) * 64);
    ptx::mma_m16n8k16(sums[2 * k % kSums], query[2 * k], key[k % kKeyBuffers][0], key[k % kKeyBuffers][1]);
    ptx::mma_m16n8k16(sums[(2 * k + 1) % kSums], query[2 * k + 1], key[k % kKeyBuffers][2], key[k % kKeyBuffers][3]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    score[0][i] = sums[0][i] + sums[1][i];
#pragma unroll
    for (int j = 2; j < kSums; j++) score[0][i] += sums[j][i];
  }
}

// Scores of 16 queries x 32 keys over half of the columns, stage by stage; those of the other share's keys go to its
// warp by way of shared memory, and its sums for this share's keys are added.
template <class B>
__device__ __forceinline__ void score_half_columns(Scores<B>& score, const uint32_t (&query)[B::kScoreTiles][4],
                                                   uint32_t (&key)[kKeyBuffers][4], uint32_t address,
                                                   uint32_t second_barrier, uint32_t parity,
                                                   float4 (&partial)[2][kNumThreads]) {
  constexpr int kLoads = B::kScoreTiles;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float sums[2][4] = {};  // of this share's keys and of the other's
#pragma unroll
    for (int k = 0; k < kLoads; k++) {
      if (k + 1 < kLoads) {
        ptx::ldmatrix_x4(key[(k + 1) % kKeyBuffers], address + half * kStageBytes + (k + 1) * 32);
      } else if (half == 0) {
        ptx::mbarrier_wait(second_barrier, parity);
        ptx::ldmatrix_x4(key[0], address + kStageBytes);
      }
#pragma unroll
      for (int g = 0; g < 2; g++)
        ptx::mma_m16n8k16(sums[g], query[k], key[k % kKeyBuffers][2 * g], key[k % kKeyBuffers][2 * g + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) score[half][i] = sums[0][i];
    partial[half][ptx::thread_index() ^ kNumThreads / 2] = make_float4(sums[1][0], sums[1][1], sums[1][2], sums[1][3]);
  }
  const uint32_t thread = ptx::thread_index();
  ptx::pair_barrier(thread / 32 % B::kRowTiles);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float4 other = partial[half][thread];
    score[half][0] += other.x;
    score[half][1] += other.y;
    score[half][2] += other.z;
    score[half][3] += other.w;
  }
}

template <class B>
__global__ void __launch_bounds__(kNumThreads, 1) split_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char raw_storage[];
  SharedStorage<B>& shared = *reinterpret_cast<SharedStorage<B>*>(raw_storage);
  const Place<B> at;
  const int request = blockIdx.y, split = blockIdx.z;

  if (threadIdx.x == 0) {
    for (uint64_t& barrier : shared.full)
      ptx::mbarrier_init(ptx::shared_address(&barrier), B::kBarrierStages * kNumWarps);
    ptx::mbarrier_init(ptx::shared_address(&shared.q_full), 1);
    ptx::fence_mbarrier_init();
  }
  // Everything that is known by request alone is requested together, before any of it is waited for.
  const int prefix_begin = ptx::load_now(p.kv_indptr + request), prefix_end = ptx::load_now(p.kv_indptr + request + 1);
  const int64_t token = first_token(p, request);
  // Without a mask some readable number. ptxas moves loads past an early return that does not need them: no offset is
  // INT64_MIN.
  const int64_t mask_begin = ptx::load_now((p.mask == nullptr ? p.out_cache_loc : p.mask_indptr) + request);
  const Work work(p, prefix_begin, prefix_end);
  if (split >= work.num_active || mask_begin == INT64_MIN) return;
  const int first_step = work.first_step(split);
  const int num_steps = ptx::uniform(work.first_step(split + 1) - first_step);
  const int num_stages = 2 * num_steps;
  const KeySource source = {prefix_begin,      static_cast<int>(token), work.prefix_len,
                            work.num_keys - 1, first_step * kStepKeys,  work.num_active == 1};
  if (threadIdx.x == 0) shared.source = source;
  if (threadIdx.x < B::kRows) shared.row_reference[threadIdx.x] = 0.f;
  KeyCopier<B> copier{p, shared, at};
  const uint32_t first_slot = copier.load_first_slots(source);
  const int first_row = blockIdx.x * p.rows_per_block, end_row = min(first_row + p.rows_per_block, p.num_rows);
  const bool has_tree_keys = (first_step + num_steps) * kStepKeys > work.prefix_len;
  TreeMask<B> mask;
  if (has_tree_keys) mask.request(p, at, mask_begin, work.prefix_len, first_row, end_row);
  __syncthreads();

  // Queries and the first keys are on their way together; the stages that the queries pass through follow.
  copy_queries(p, shared, at, token, first_row, end_row);
  copier.keep_first_slots(first_slot);
#pragma unroll
  for (int i = 0; i < B::kNumStages - B::kQueryStages; i++) copier.copy(i, i, i < num_stages);
  if (has_tree_keys) mask.keep(p, shared, at);
  __syncthreads();
  uint32_t query[B::kScoreTiles][4];
  ptx::mbarrier_wait(ptx::shared_address(&shared.q_full), 0);
  const uint32_t query_address = ptx::shared_address(shared.kv[B::kNumStages - B::kQueryStages]) +
                                 (at.row_tile * 16 + (at.lane & 15)) * kRowStride + (at.lane >> 4) * 16 +
                                 at.share % B::kColumnParts * (kRowBytes / B::kColumnParts);
#pragma unroll
  for (int k = 0; k < B::kScoreTiles; k++) ptx::ldmatrix_x4(query[k], query_address + k * 32);
  __syncthreads();
#pragma unroll
  for (int i = B::kNumStages - B::kQueryStages; i < B::kNumStages; i++) copier.copy(i, i, i < num_stages);
  if (has_tree_keys) find_live_keys(shared, at);

  Output<B> out = {};
  Softmax<B> softmax;
  const uint32_t ring = ptx::shared_address(shared.kv);
  // Fragments of keys. 32 rows: 8 keys x 32 columns. 64: 8 keys of this share and 8 of the other x 16 columns.
  const uint32_t key_offset = B::kColumnParts == 1
                                  ? ring + (at.share % 2 * 8 + (at.lane & 7)) * kRowStride + (at.lane >> 3) * 16
                                  : ring + ((at.share ^ at.lane >> 4) * 8 + (at.lane & 7)) * kRowStride +
                                        (at.lane >> 3 & 1) * 16 + at.share * (kRowBytes / 2);
  auto value_offset = [&](const Place<B>& place) {
    return ring + (place.lane & 15) * kRowStride + (place.lane >> 4) * 16 + place.warp * kWarpColumns * 2;
  };
  auto prob_store = [&](const Place<B>& place) {
    return ptx::shared_address(shared.prob) + place.row * kProbStride + place.share * 16 + place.quad_lane * 4;
  };
  auto prob_load = [&] {
    const uint32_t lane = ptx::thread_index() % 32;
    return ptx::shared_address(shared.prob) + lane % 16 * kProbStride + lane / 16 * 16;
  };
  const uint32_t full = ptx::shared_address(shared.full);
  constexpr uint32_t kProbBytes = B::kRows * kProbStride;
  constexpr int kValueLoads = kWarpColumns / 16, kRowTiles = B::kRowTiles;

  const int boundary_step =
      ptx::uniform(work.prefix_len / kStepKeys - first_step);  // from here on a step holds hidden keys
  int stage0 = 0;
  auto second_stage = [&] { return B::kNumStages % 2 == 0 || stage0 + 1 < B::kNumStages ? stage0 + 1 : 0; };
  uint32_t key[kKeyBuffers][4];
  auto barrier_of = [&](int step) { return full + step % kStepsInFlight * (8 * B::kStepBarriers); };
  auto parity_of = [&](int step) -> uint32_t { return step / kStepsInFlight & 1; };
  auto load_first_keys = [&](int step, bool arrived) {
    if (!arrived) ptx::mbarrier_wait(barrier_of(step), parity_of(step));
    const int stage = B::kColumnParts == 1 && at.share >= 2 ? second_stage() : stage0;
    ptx::ldmatrix_x4(key[0], key_offset + stage * kStageBytes);
  };
  auto score_keys = [&](Scores<B>& score, int step) {
    if constexpr (B::kColumnParts == 1)
      score_all_columns<B>(score, query, key, key_offset + (at.share < 2 ? stage0 : second_stage()) * kStageBytes);
    else
      score_half_columns<B>(score, query, key, key_offset + stage0 * kStageBytes, barrier_of(step) + 8, parity_of(step),
                            shared.partial);
  };
  load_first_keys(0, false);
#pragma unroll 1
  for (int step = 0; step < num_steps; step++) {
    Scores<B> score;
    score_keys(score, step);
    const Place<B> now;
    const uint32_t values = value_offset(now);
    // Values of the first stage: once every warp has them in registers, that stage is free.
    uint32_t value[kValueLoads][4], weight[2][4];
#pragma unroll
    for (int n = 0; n < kValueLoads; n++) ptx::ldmatrix_x4_trans(value[n], values + stage0 * kStageBytes + n * 32);
    const bool at_boundary = step >= boundary_step;
    float add[2];
    const uint32_t prob = (step & 1) * kProbBytes;
    // The reference starts at zero, which suits most rows: only then can it be too high.
    const float lowest = step == 0 ? -kReferenceSlack : -INFINITY;
    const float reference[2] = {shared.row_reference[now.row], shared.row_reference[now.row + 8]};
    const bool outgrown = softmax.exponentiate(score, reference, p.scale_log2, prob_store(now) + prob, lowest, add);
    const uint32_t weights = prob_load() + prob;
    // Weights of a row tile for the first stage, then of each for the second.
    auto load_weights = [&](int index) {
      ptx::ldmatrix_x4(weight[index % 2], weights + index % kRowTiles * (16 * kProbStride) + index / kRowTiles * 32);
    };
    const bool is_rare = __syncthreads_or(outgrown || at_boundary);
    load_weights(0);
    if (is_rare) {
      const Place<B> here;
      // The scores once more: keeping them would cost registers in every step.
      load_first_keys(step, true);
      score_keys(score, step);
      const int first_key = shared.source.first_key + step * kStepKeys, prefix_len = shared.source.prefix_len;
      if (at_boundary) hide_keys(shared, here, score, first_key, prefix_len);
      float reference[2];
      softmax.move_reference(shared, here, score, p.scale_log2, step == 0, reference);
      if (at_boundary)
        clear_dead_keys(shared, here, step_bits(shared.live, first_key, prefix_len), stage0, second_stage());
      softmax.exponentiate(score, reference, p.scale_log2, prob_store(here) + prob, -INFINITY, add);
      __syncthreads();
      scale_rows(out, shared, here);
      load_weights(0);
#pragma unroll
      for (int n = 0; n < kValueLoads; n++) ptx::ldmatrix_x4_trans(value[n], values + stage0 * kStageBytes + n * 32);
      __syncthreads();
    }
    load_weights(1);
    softmax.sum[0] += add[0];
    softmax.sum[1] += add[1];

    // Every warp is past this step's scores and the values of its first stage, and past all of the step before: the
    // stages behind them are filled again. One tile of rows after the other, so that the weights and values of the
    // second half are on their way while the first half is multiplied.
    const int next_stage = 2 * step + B::kNumStages;
    copier.copy(next_stage - 1, stage0 == 0 ? B::kNumStages - 1 : stage0 - 1, step > 0 && next_stage - 1 < num_stages);
#pragma unroll
    for (int i = 0; i < kRowTiles; i++) {
#pragma unroll
      for (int n = 0; n < kValueLoads; n++) {
        multiply(out[i], n, weight[i % 2], value[n]);
        if (i == kRowTiles - 1) ptx::ldmatrix_x4_trans(value[n], values + second_stage() * kStageBytes + n * 32);
      }
      load_weights(i + 2);
    }
    const bool arrived = ptx::mbarrier_test(barrier_of(step + 1), parity_of(step + 1));
#pragma unroll
    for (int i = 0; i < kRowTiles; i++) {
#pragma unroll
      for (int n = 0; n < kValueLoads; n++) multiply(out[i], n, weight[i % 2], value[n]);
      if (i + 2 < kRowTiles) load_weights(kRowTiles + i + 2);
    }
    copier.copy(next_stage, stage0, next_stage < num_stages);

    stage0 = stage0 + 2 >= B::kNumStages ? stage0 + 2 - B::kNumStages : stage0 + 2;
    if (step + 1 < num_steps) load_first_keys(step + 1, arrived);
  }
  ptx::grid_dependency_launch();

  // The block's place once more: keeping it would cost registers in every step.
  finish<B>(p, shared, softmax, out);
}

}  // namespace sm120::mla_tree_verify
