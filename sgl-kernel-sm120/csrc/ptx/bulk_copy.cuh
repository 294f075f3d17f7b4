// SPDX-License-Identifier: Apache-2.0
// Bulk copies and the barriers that they complete on (PTX ISA 9.7.9.25 and 9.7.13.15).
//
// The destination of a load is spelled .shared::cta: for sm_120 the .shared::cluster form becomes a system call that
// costs 14 KB of stack per thread.
#pragma once

#include <cstdint>

namespace sm120::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_arrivals) : "memory");
}

__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, int num_bytes) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}

// Returns once the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "wait_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait_%=; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Bytes, addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, int num_bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(num_bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, uint32_t shared, int num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(num_bytes)
               : "memory");
}

// Waits until the calling thread's bulk stores are complete.
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders ordinary shared-memory accesses of this thread before bulk copies that follow a barrier.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace sm120::ptx
