// SPDX-License-Identifier: Apache-2.0
// Grid dependencies, uniform values, and approximate arithmetic: one PTX instruction per function.
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

// A load that stays where it is written: the compiler moves plain ones past an early return.
__device__ __forceinline__ int load_now(const int* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}

__device__ __forceinline__ int64_t load_now(const int64_t* address) {
  int64_t value;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(address));
  return value;
}

// threadIdx.x, read where it is asked for.
__device__ __forceinline__ uint32_t thread_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// A barrier of two warps; `index` counts from 0 and must stay below 15.
__device__ __forceinline__ void pair_barrier(int index) {
  asm volatile("barrier.sync.aligned %0, 64;" ::"r"(index + 1) : "memory");
}

// A value that is the same in all lanes, in a uniform register.
__device__ __forceinline__ int uniform(int value) { return __reduce_max_sync(~0u, value); }

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

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }

__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

}  // namespace sm120::ptx
