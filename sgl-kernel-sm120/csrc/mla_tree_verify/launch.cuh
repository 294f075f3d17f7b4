// SPDX-License-Identifier: Apache-2.0
// Grid, split choices and launches of mla_tree_verify. Shapes alone decide them, so that a CUDA graph can replay them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "combine.cuh"
#include "config.cuh"
#include "kernel.cuh"

namespace sm120::mla_tree_verify {

constexpr int64_t kPartialRowBytes = kOutBytes + sizeof(float);

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The most splits that fit `waves` waves of one block per SM.
inline SplitChoice splits_of_waves(int blocks_per_split, int num_sms, int waves, int limit) {
  SplitChoice choice;
  choice.num_splits = std::clamp(waves * num_sms / blocks_per_split, 1, limit);
  choice.waves = static_cast<float>(ceil_div(blocks_per_split * choice.num_splits, num_sms));
  choice.steps_per_wave = choice.waves / choice.num_splits;
  return choice;
}

// Splits per request: whole waves, and more than one only where the last one would leave many SMs idle.
inline SplitChoice choose_splits(int blocks_per_split, int num_sms) {
  SplitChoice best = splits_of_waves(blocks_per_split, num_sms, 1, num_sms);
  for (int waves = 2; waves <= kMaxWaves; waves++) {
    const SplitChoice choice = splits_of_waves(blocks_per_split, num_sms, waves, waves * num_sms);
    if (choice.steps_per_wave < 0.99f * best.steps_per_wave) best = choice;
  }
  return best;
}

// What the shapes of a call decide.
struct Plan {
  int row_tiles;  // of a block
  int row_blocks, num_splits;
  float overhead_steps, cost;
};

template <class B>
Plan plan_with(int batch_size, int num_rows, int num_sms) {
  const int row_blocks = ceil_div(num_rows, B::kRows), blocks_per_split = batch_size * row_blocks;
  const int num_splits = choose_splits(blocks_per_split, num_sms).num_splits;
  float cost = INFINITY;
  for (int waves = 1; waves <= kMaxWaves; waves++) {  // the device picks among these
    const SplitChoice choice = splits_of_waves(blocks_per_split, num_sms, waves, num_splits);
    cost = std::min(cost, choice.waves * B::kOverheadSteps + kTypicalSteps * choice.steps_per_wave);
  }
  return {B::kRowTiles, row_blocks, num_splits, B::kOverheadSteps, B::kStepCost * cost};
}

// The cheapest kind of block for a context of kTypicalSteps.
inline Plan plan(int batch_size, int num_tokens, int num_heads, int num_sms) {
  const int num_rows = num_tokens * num_heads;
  const Plan low = plan_with<LowBlock>(batch_size, num_rows, num_sms);
  const Plan tall = plan_with<TallBlock>(batch_size, num_rows, num_sms);
  return tall.cost < low.cost ? tall : low;
}

inline int64_t workspace_bytes(int batch_size, int num_tokens, int num_heads, int num_splits) {
  return num_splits == 1 ? 0
                         : static_cast<int64_t>(batch_size) * num_splits * num_tokens * num_heads * kPartialRowBytes;
}

template <class B>
cudaError_t raise_shared_limit() {
  return cudaFuncSetAttribute(split_kernel<B>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(sizeof(SharedStorage<B>)));
}

// Raises the shared memory limit of the kernels, once per device.
inline cudaError_t configure_device() {
  static std::atomic<uint64_t> configured{0};
  int device;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (configured.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  if (cudaError_t error = raise_shared_limit<LowBlock>(); error != cudaSuccess) return error;
  if (cudaError_t error = raise_shared_limit<TallBlock>(); error != cudaSuccess) return error;
  configured.fetch_or(bit, std::memory_order_relaxed);
  return cudaSuccess;
}

// With `overlaps`, the kernel may start while the one before it in the stream still runs, and waits for it on the
// device.
template <class Kernel>
cudaError_t launch_kernel(Kernel kernel, dim3 grid, int num_threads, size_t shared_bytes, bool overlaps,
                          const Params& params, cudaStream_t stream) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(num_threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <class B>
cudaError_t launch_splits(dim3 grid, const Params& params, cudaStream_t stream) {
  return launch_kernel(split_kernel<B>, grid, kNumThreads, sizeof(SharedStorage<B>), false, params, stream);
}

// params.num_splits may differ from the planned number.
inline cudaError_t launch(Params params, int batch_size, int num_sms, cudaStream_t stream) {
  if (cudaError_t error = configure_device(); error != cudaSuccess) return error;
  const Plan planned = plan(batch_size, params.num_tokens, params.num_heads, num_sms);
  params.rows_per_block = ceil_div(params.num_rows, planned.row_blocks);
  params.overhead_steps = planned.overhead_steps;
  params.combine_team = combine_team(params.num_splits);
  for (int i = 0; i < kMaxWaves; i++)
    params.choices[i] = splits_of_waves(batch_size * planned.row_blocks, num_sms, i + 1, params.num_splits);
  // Splits are the slowest dimension: row blocks that share keys run side by side, and blocks without work come last.
  const dim3 grid(planned.row_blocks, batch_size, params.num_splits);
  cudaError_t error = planned.row_tiles == TallBlock::kRowTiles ? launch_splits<TallBlock>(grid, params, stream)
                                                                : launch_splits<LowBlock>(grid, params, stream);
  if (error != cudaSuccess || params.num_splits == 1) return error;
  const int num_teams = kCombineWarps / params.combine_team;
  return launch_kernel(combine_kernel, dim3(ceil_div(params.num_rows * kCombineParts, num_teams), batch_size),
                       32 * kCombineWarps, 0, true, params, stream);
}

}  // namespace sm120::mla_tree_verify
