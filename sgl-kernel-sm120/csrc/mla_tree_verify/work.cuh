// SPDX-License-Identifier: Apache-2.0
// How the keys of a request are dealt to splits. Both kernels derive it from the same numbers on the device.
#pragma once

#include "../ptx/control.cuh"
#include "config.cuh"

namespace sm120::mla_tree_verify {

// The keys of a request are its prefix and then its tree, one run cut into steps of kStepKeys.
struct Work {
  int prefix_len, num_keys, num_steps, num_active;

  __device__ __forceinline__ Work(const Params& p, int prefix_begin, int prefix_end) {
    prefix_len = max(prefix_end - prefix_begin, 0);
    num_keys = prefix_len + p.num_tokens;
    num_steps = (num_keys + kStepKeys - 1) / kStepKeys;
    // More waves waste less of the last one, fewer waves pay the cost of a block less often.
    float best = cost_of(p, p.choices[0]);
    num_active = p.choices[0].num_splits;
#pragma unroll
    for (int i = 1; i < kMaxWaves; i++) {
      const float cost = cost_of(p, p.choices[i]);
      if (cost < best) {
        best = cost;
        num_active = p.choices[i].num_splits;
      }
    }
    num_active = min(num_active, num_steps);
  }

  // In steps. Rounded the same way in every kernel, whatever the compiler would fuse: they must agree on num_active.
  __device__ __forceinline__ float cost_of(const Params& p, const SplitChoice& choice) const {
    return __fmaf_rn(choice.waves, p.overhead_steps, __fmul_rn(static_cast<float>(num_steps), choice.steps_per_wave));
  }

  // First step of a split; splits differ by at most one step. num_steps < 2^15 and num_splits < 2^16: no overflow.
  __device__ __forceinline__ int first_step(int split) const {
    return static_cast<unsigned>(split) * static_cast<unsigned>(num_steps) / static_cast<unsigned>(num_active);
  }
};

__device__ __forceinline__ int64_t first_token(const Params& p, int request) {
  return p.qo_indptr_is_64 ? ptx::load_now(static_cast<const int64_t*>(p.qo_indptr) + request)
                           : ptx::load_now(static_cast<const int*>(p.qo_indptr) + request);
}

}  // namespace sm120::mla_tree_verify
