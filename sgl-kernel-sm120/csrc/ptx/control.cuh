// SPDX-License-Identifier: Apache-2.0
// Grid dependencies, lane election, and approximate arithmetic: one PTX instruction per function.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace sm120::ptx {

// Waits until the kernel before this one in the stream has finished and its writes are visible (PTX ISA 9.7.13.13).
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel in the stream start its prologue once every block has called this or ended.
__device__ __forceinline__ void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// True in exactly one lane. ptxas knows that it is one, so a bulk copy behind it needs no loop over lanes.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
  return elected != 0;
}

// 2^x with denormals flushed to zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

}  // namespace sm120::ptx
