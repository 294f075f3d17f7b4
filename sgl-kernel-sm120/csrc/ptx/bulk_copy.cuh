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

// Whether the phase of this parity has completed.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

// Bytes, addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, int num_bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(num_bytes), "r"(barrier)
               : "memory");
}

// One lane of the warp announces and issues two loads, if `condition` holds. One asm block, so that no branch ends the
// run of instructions that the loads overlap with.
__device__ __forceinline__ void elected_bulk_load_2(bool condition, uint32_t shared0, uint32_t shared1,
                                                    const void* global0, const void* global1, int num_bytes,
                                                    uint32_t barrier) {
  asm volatile(
      "{ .reg .pred elected, issue; .reg .b64 state;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "setp.ne.and.b32 issue, %0, 0, elected;\n"
      "@issue mbarrier.arrive.expect_tx.shared::cta.b64 state, [%6], %7;\n"
      "@issue cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%1], [%3], %5, [%6];\n"
      "@issue cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%2], [%4], %5, [%6]; }" ::"r"(
          static_cast<int>(condition)),
      "r"(shared0), "r"(shared1), "l"(global0), "l"(global1), "r"(num_bytes), "r"(barrier), "r"(2 * num_bytes)
      : "memory");
}

// Four bytes, by the calling thread.
__device__ __forceinline__ void copy_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

// Waits for the calling thread's copies.
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

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
