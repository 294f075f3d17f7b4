// SPDX-License-Identifier: Apache-2.0
// Merges the partial results of the splits of mla_tree_verify.
//
// A team of warps merges 256 columns of one row: every warp of it takes every n-th split, a lane 8 columns. Few splits
// need small teams, of which a block holds several. The first partials are on their way while the weights are computed
// from the log-sum-exps. Requests with one split have nothing to merge.
#pragma once

#include "../ptx/control.cuh"
#include "config.cuh"
#include "work.cuh"

namespace sm120::mla_tree_verify {

constexpr int kCombineColumns = 256;
constexpr int kCombineParts = kDimV / kCombineColumns;
constexpr int kCombineWarps = 8;
constexpr int kCombineAhead = 4;  // partials of a warp that are loaded before the weights are known

__device__ __forceinline__ void accumulate(float (&sum)[8], const uint4& partial, float weight) {
  const uint32_t pairs[4] = {partial.x, partial.y, partial.z, partial.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum[2 * i] += weight * __uint_as_float(pairs[i] << 16);
    sum[2 * i + 1] += weight * __uint_as_float(pairs[i] & 0xffff0000u);
  }
}

// Warps of a team, a power of two: no warp has more partials than it loads ahead, as long as there are warps.
inline int combine_team(int num_splits) {
  int team = 1;
  while (team < kCombineWarps && team * kCombineAhead < num_splits) team *= 2;
  return team;
}

__global__ void __launch_bounds__(32 * kCombineWarps) combine_kernel(const __grid_constant__ Params p) {
  __shared__ float sums[kCombineWarps][kCombineColumns + 8];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, request = blockIdx.y;
  const int team = p.combine_team, member = warp % team;
  const int item = blockIdx.x * (kCombineWarps / team) + warp / team;
  const int row = item / kCombineParts, column = item % kCombineParts * kCombineColumns;
  // Inputs of the call, complete before the split kernel started.
  const Work work(p, p.kv_indptr[request], p.kv_indptr[request + 1]);
  const int64_t token = first_token(p, request);
  ptx::grid_dependency_wait();
  if (work.num_active == 1) return;

  if (row < p.num_rows) {
    const __nv_bfloat16* first =
        p.partial_out + (static_cast<int64_t>(request) * p.num_splits * p.num_rows + row) * kDimV + column + lane * 8;
    auto load = [&](int split) {
      return __ldcg(reinterpret_cast<const uint4*>(first + static_cast<int64_t>(split) * p.num_rows * kDimV));
    };
    uint4 ahead[kCombineAhead];
#pragma unroll
    for (int i = 0; i < kCombineAhead; i++)
      if (member + i * team < work.num_active) ahead[i] = load(member + i * team);

    const float* lse = p.partial_lse + (static_cast<int64_t>(request) * p.num_rows + row) * p.num_splits;
    float top = -INFINITY;
    for (int i = lane; i < work.num_active; i += 32) top = fmaxf(top, lse[i]);
    for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    if (top == -INFINITY) top = 0.f;  // a row that sees no key: all weights are zero, and so is the result
    float total = 0.f;
    for (int i = lane; i < work.num_active; i += 32) total += ptx::exp2_approx(lse[i] - top);
    for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(~0u, total, d);
    const float inverse = total == 0.f ? 0.f : 1.f / total;

    float sum[8] = {};
#pragma unroll
    for (int i = 0; i < kCombineAhead; i++) {
      const int split = member + i * team;
      if (split < work.num_active) accumulate(sum, ahead[i], ptx::exp2_approx(lse[split] - top) * inverse);
    }
#pragma unroll 4
    for (int split = member + kCombineAhead * team; split < work.num_active; split += team)
      accumulate(sum, load(split), ptx::exp2_approx(lse[split] - top) * inverse);
#pragma unroll
    for (int i = 0; i < 8; i++) sums[warp][lane * 8 + i] = sum[i];
  }
  __syncthreads();

  if (row < p.num_rows) {
    __nv_bfloat16* target = p.out + (token + row / p.num_heads) * p.out_token_stride +
                            static_cast<int64_t>(row % p.num_heads) * p.out_head_stride + column;
    for (int pair = member * 32 + lane; pair < kCombineColumns / 2; pair += team * 32) {
      float x = 0.f, y = 0.f;
      for (int i = warp - member; i < warp - member + team; i++) {
        const float2 part = *reinterpret_cast<const float2*>(&sums[i][pair * 2]);
        x += part.x;
        y += part.y;
      }
      *reinterpret_cast<uint32_t*>(target + pair * 2) = ptx::pack_bf16(x, y);
    }
  }
}

}  // namespace sm120::mla_tree_verify
