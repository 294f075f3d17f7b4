// SPDX-License-Identifier: Apache-2.0
// Grid, split choices and launches of mla_tree_verify. Shapes alone decide them, so that a CUDA graph can replay them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "combine.cuh"
#include "config.cuh"
#include "kernel.cuh"

namespace sm120::mla_tree_verify {

constexpr int64_t kPartialRowBytes = kOutBytes + sizeof(float);

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

inline int num_row_blocks(int num_rows) { return ceil_div(num_rows, kBlockRows); }

// The most splits that fit `waves` waves of one block per SM.
inline SplitChoice splits_of_waves(int blocks_per_split, int num_sms, int waves, int limit) {
  SplitChoice choice;
  choice.num_splits = std::clamp(waves * num_sms / blocks_per_split, 1, limit);
  choice.waves = static_cast<float>(ceil_div(blocks_per_split * choice.num_splits, num_sms));
  choice.steps_per_wave = choice.waves / choice.num_splits;
  return choice;
}

// Splits per request: whole waves, and more than one only where the last one would leave many SMs idle.
inline int plan_splits(int batch_size, int num_tokens, int num_heads, int num_sms) {
  const int blocks_per_split = batch_size * num_row_blocks(num_tokens * num_heads);
  SplitChoice best = splits_of_waves(blocks_per_split, num_sms, 1, num_sms);
  for (int waves = 2; waves <= kMaxWaves; waves++) {
    const SplitChoice choice = splits_of_waves(blocks_per_split, num_sms, waves, waves * num_sms);
    if (choice.steps_per_wave < 0.99f * best.steps_per_wave) best = choice;
  }
  return best.num_splits;
}

inline int64_t workspace_bytes(int batch_size, int num_tokens, int num_heads, int num_splits) {
  return num_splits == 1 ? 0
                         : static_cast<int64_t>(batch_size) * num_splits * num_tokens * num_heads * kPartialRowBytes;
}

// Raises the shared memory limit of the kernel, once per device.
inline cudaError_t configure_device() {
  static std::atomic<uint64_t> configured{0};
  int device;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (configured.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  cudaError_t error = cudaFuncSetAttribute(split_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(sizeof(SharedStorage)));
  if (error == cudaSuccess) configured.fetch_or(bit, std::memory_order_relaxed);
  return error;
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

inline cudaError_t launch(Params params, int batch_size, int num_sms, cudaStream_t stream) {
  if (cudaError_t error = configure_device(); error != cudaSuccess) return error;
  const int row_blocks = num_row_blocks(params.num_rows);
  params.rows_per_block = ceil_div(params.num_rows, row_blocks);
  for (int i = 0; i < kMaxWaves; i++)
    params.choices[i] = splits_of_waves(batch_size * row_blocks, num_sms, i + 1, params.num_splits);
  // Splits are the slowest dimension: row blocks that share keys run side by side, and blocks without work come last.
  cudaError_t error = launch_kernel(split_kernel, dim3(row_blocks, batch_size, params.num_splits), kNumThreads,
                                    sizeof(SharedStorage), false, params, stream);
  if (error != cudaSuccess || params.num_splits == 1) return error;
  return launch_kernel(combine_kernel, dim3(kDimV / kCombineColumns, params.num_rows, batch_size), 32 * kCombineWarps,
                       0, true, params, stream);
}

}  // namespace sm120::mla_tree_verify
