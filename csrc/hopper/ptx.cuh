// One thin wrapper per instruction of the Hopper kernel, beside those of common/ptx.cuh that take the same operands.
// Addresses, those of barriers too, are 32-bit shared-window addresses here; common/ptx.cuh takes barriers as objects.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstdio>

#include "../common/ptx.cuh"

namespace videoattn::hopper {

using ptx::bulk_commit_group;
using ptx::bulk_wait_group;
using ptx::bulk_wait_group_read;
using ptx::ex2_approx_ftz;
using ptx::fence_mbarrier_init;
using ptx::fence_proxy_async_smem;
using ptx::ldmatrix_x4;
using ptx::prefetch_tensormap;
using ptx::rcp_approx_ftz;
using ptx::setmaxnreg_dec;
using ptx::setmaxnreg_inc;
using ptx::smem_address;

// ---- mbarrier (PTX ISA 9.7.13.15) ----

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#ifdef VIDEOATTN_BOUNDED_WAITS
    for (int tries = 0; !mbarrier_try_wait(barrier, parity); ++tries) {
        if (tries == VIDEOATTN_BOUNDED_WAITS) {
            printf("videoattn: CTA %d thread %d: barrier at shared address %u never completed phase parity %u\n",
                   blockIdx.x, threadIdx.x, barrier, parity);
            __trap();
        }
    }
#else
    while (!mbarrier_try_wait(barrier, parity)) {
    }
#endif
}

// ---- named barriers ----

__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- TMA (PTX ISA 9.7.9.27) ----

__device__ __forceinline__ void tma_load(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int row, int head,
                                         int batch) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %3, %5, %6}], [%2];" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t smem, int row, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %2, %4, %5}], [%1];" ::"l"(map),
        "r"(smem), "r"(0), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

// ---- wgmma bookkeeping (PTX ISA 9.7.15.7) ----

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of an accumulator across the asynchronous instructions that own it.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// ---- fragments ----

__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

__device__ __forceinline__ void store_zero16(uint32_t address) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// Two neighbouring 16-bit values.
__device__ __forceinline__ uint32_t load_pair(const void* pointer) {
    uint32_t pair;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(pair) : "l"(pointer) : "memory");
    return pair;
}

// D += A B of one warp, 16 x 8 x 16; its D and A fragments are those of a wgmma's warp.
template <typename Element>
__device__ __forceinline__ void mma(float& d0, float& d1, float& d2, float& d3, const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1);

#define VIDEOATTN_MMA(ELEMENT, TYPE)                                                                               \
    template <>                                                                                                    \
    __device__ __forceinline__ void mma<ELEMENT>(float& d0, float& d1, float& d2, float& d3,                       \
                                                 const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {               \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                                 \
            ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                 \
            : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)                                                               \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                       \
    }
VIDEOATTN_MMA(__nv_bfloat16, "bf16")
VIDEOATTN_MMA(__half, "f16")
#undef VIDEOATTN_MMA

template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
    return ptx::cvt_bf16x2(low, high);
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
    return ptx::cvt_f16x2(low, high);
}

}  // namespace videoattn::hopper
