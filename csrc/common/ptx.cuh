// One thin wrapper per PTX instruction. Names follow the instruction; what an instruction orders, and what it
// leaves unordered, stands beside it (PTX ISA 9.7.9, 9.7.13.15, 9.7.16).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <stdio.h>

namespace ptx {

using TmemAddress = uint32_t;  // bits 31..16 lane, bits 15..0 column

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---------------------------------------------------------------- warps

__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{\n\t.reg .pred leader;\n\t"
        "elect.sync _|leader, 0xffffffff;\n\t"
        "selp.u32 %0, 1, 0, leader;\n\t}"
        : "=r"(elected));
    return elected != 0;
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---------------------------------------------------------------- mbarrier

__device__ __forceinline__ void mbarrier_init(uint64_t& barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(&barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(&barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t& barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(&barrier)), "r"(bytes)
                 : "memory");
}

// True once the phase of this parity has completed; may be false spuriously, so callers loop.
__device__ __forceinline__ bool mbarrier_try_wait(uint64_t& barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, done;\n\t}"
        : "=r"(done)
        : "r"(smem_address(&barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

#ifdef VIDEOATTN_BOUNDED_WAITS
// Debug builds (-DVIDEOATTN_BOUNDED_WAITS=10000000): a barrier that never completes traps and says which it was.
__device__ __forceinline__ void mbarrier_wait(uint64_t& barrier, uint32_t parity, const char* name, int index = 0) {
    for (long long tries = 0; !mbarrier_try_wait(barrier, parity); ++tries) {
        if (tries == VIDEOATTN_BOUNDED_WAITS) {
            printf("CTA %d thread %d: barrier %s[%d] never completed its phase of parity %u\n", blockIdx.x,
                   threadIdx.x, name, index, parity);
            __trap();
        }
    }
}
#else
__device__ __forceinline__ void mbarrier_wait(uint64_t& barrier, uint32_t parity, const char* = nullptr, int = 0) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}
#endif

// Makes mbarrier.init visible to the cluster and to the engines that arrive on barriers; a CTA or cluster
// synchronisation must follow.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders this thread's generic accesses to shared memory against TMA and MMA accesses (async proxy).
__device__ __forceinline__ void fence_proxy_async_smem() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---------------------------------------------------------------- TMA

// x is the innermost coordinate. The barrier receives the box's bytes as complete_tx.
__device__ __forceinline__ void tma_load_2d(uint32_t smem, const CUtensorMap& map, int x, int y, uint64_t& barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            smem),
        "l"(&map), "r"(x), "r"(y), "r"(smem_address(&barrier))
        : "memory");
}

__device__ __forceinline__ void tma_load_5d(uint32_t smem, const CUtensorMap& map, int c0, int c1, int c2, int c3,
                                            int c4, uint64_t& barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(smem),
        "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(smem_address(&barrier))
        : "memory");
}

// Elements outside the tensor are not written. Tracked by this thread's bulk groups.
__device__ __forceinline__ void tma_store_5d(const CUtensorMap& map, int c0, int c1, int c2, int c3, int c4,
                                             uint32_t smem) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(
                     &map),
                 "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(smem)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Shared memory of this thread's stores may be overwritten.
__device__ __forceinline__ void bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// This thread's stores are complete.
__device__ __forceinline__ void bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// ---------------------------------------------------------------- tcgen05: tensor memory

// Whole warp. Blocks until the columns are free; the address appears at smem_slot as a generic store.
template <int kColumns>
__device__ __forceinline__ void tcgen05_alloc(uint32_t smem_slot) {
    static_assert(kColumns >= 32 && kColumns <= 512 && (kColumns & (kColumns - 1)) == 0);
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(smem_slot), "n"(kColumns)
                 : "memory");
}

template <int kColumns>
__device__ __forceinline__ void tcgen05_dealloc(TmemAddress address) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(kColumns) : "memory");
}

__device__ __forceinline__ void tcgen05_relinquish_alloc_permit() {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
}

// Carry the order of tcgen05 operations across a thread synchronisation. They wait for nothing by themselves.
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

#define PTX_OUT4(v, i) "=r"(v[i]), "=r"(v[i + 1]), "=r"(v[i + 2]), "=r"(v[i + 3])
#define PTX_OUT8(v, i) PTX_OUT4(v, i), PTX_OUT4(v, i + 4)
#define PTX_OUT16(v, i) PTX_OUT8(v, i), PTX_OUT8(v, i + 8)
#define PTX_IN4(v, i) "r"(v[i]), "r"(v[i + 1]), "r"(v[i + 2]), "r"(v[i + 3])
#define PTX_IN8(v, i) PTX_IN4(v, i), PTX_IN4(v, i + 4)
#define PTX_IN16(v, i) PTX_IN8(v, i), PTX_IN8(v, i + 8)
#define PTX_FLOAT_OUT4(v, i) "=f"(v[i]), "=f"(v[i + 1]), "=f"(v[i + 2]), "=f"(v[i + 3])
#define PTX_FLOAT_OUT8(v, i) PTX_FLOAT_OUT4(v, i), PTX_FLOAT_OUT4(v, i + 4)
#define PTX_FLOAT_OUT16(v, i) PTX_FLOAT_OUT8(v, i), PTX_FLOAT_OUT8(v, i + 8)
#define PTX_FLOAT_IN4(v, i) "f"(v[i]), "f"(v[i + 1]), "f"(v[i + 2]), "f"(v[i + 3])
#define PTX_FLOAT_IN8(v, i) PTX_FLOAT_IN4(v, i), PTX_FLOAT_IN4(v, i + 4)
#define PTX_FLOAT_IN16(v, i) PTX_FLOAT_IN8(v, i), PTX_FLOAT_IN8(v, i + 8)
#define PTX_FLOAT_INOUT4(v, i) "+f"(v[i]), "+f"(v[i + 1]), "+f"(v[i + 2]), "+f"(v[i + 3])
#define PTX_FLOAT_INOUT16(v, i) \
    PTX_FLOAT_INOUT4(v, i), PTX_FLOAT_INOUT4(v, i + 4), PTX_FLOAT_INOUT4(v, i + 8), PTX_FLOAT_INOUT4(v, i + 12)

#define PTX_FLOAT_INOUT8(v, i) PTX_FLOAT_INOUT4(v, i), PTX_FLOAT_INOUT4(v, i + 4)

// Shape 32x32b: lane t of the warp reads TMEM lane (address lane + t), register i is column (address column + i).
// A warp reaches only the lanes 32 * (warp mod 4) .. + 31. Results may be used after tcgen05_wait_ld.
__device__ __forceinline__ void tcgen05_ld_x8(float (&v)[8], TmemAddress address) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : PTX_FLOAT_OUT8(v, 0)
                 : "r"(address));
}

__device__ __forceinline__ void tcgen05_ld_x16(float (&v)[16], TmemAddress address) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x16.b32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
        : PTX_FLOAT_OUT16(v, 0)
        : "r"(address));
}

__device__ __forceinline__ void tcgen05_ld_x32(float (&v)[32], TmemAddress address) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x32.b32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
        : PTX_FLOAT_OUT16(v, 0), PTX_FLOAT_OUT16(v, 16)
        : "r"(address));
}

// As tcgen05_ld_x32, with the maximum of this lane's 32 values beside them. sm_103 and sm_110 only.
__device__ __forceinline__ void tcgen05_ld_red_max_x32(float (&v)[32], float& max, TmemAddress address) {
    asm volatile(
        "tcgen05.ld.red.sync.aligned.32x32b.x32.max.f32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, [%33];"
        : PTX_FLOAT_OUT16(v, 0), PTX_FLOAT_OUT16(v, 16), "=f"(max)
        : "r"(address));
}

__device__ __forceinline__ void tcgen05_st_x8(TmemAddress address, const uint32_t (&v)[8]) {
    asm volatile("tcgen05.st.sync.aligned.32x32b.x8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"r"(address),
                 PTX_IN8(v, 0)
                 : "memory");
}

__device__ __forceinline__ void tcgen05_st_x16(TmemAddress address, const float (&v)[16]) {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], "
        "{%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16};" ::"r"(address),
        PTX_FLOAT_IN16(v, 0)
        : "memory");
}

__device__ __forceinline__ void tcgen05_st_x16(TmemAddress address, const uint32_t (&v)[16]) {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], "
        "{%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16};" ::"r"(address),
        PTX_IN16(v, 0)
        : "memory");
}

__device__ __forceinline__ void tcgen05_st_x32(TmemAddress address, const float (&v)[32]) {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x32.b32 [%0], "
        "{%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32};" ::"r"(address),
        PTX_FLOAT_IN16(v, 0), PTX_FLOAT_IN16(v, 16)
        : "memory");
}

// NOTES: arithmetic on a loaded register is free to move above an asm that does not name it. Passing the registers
// through this empty statement, after the wait, keeps their first use below it.
__device__ __forceinline__ void use_after_wait(float& v) {
    asm volatile("" : "+f"(v));
}

__device__ __forceinline__ void use_after_wait(float (&v)[8]) {
    asm volatile("" : PTX_FLOAT_INOUT8(v, 0));
}

__device__ __forceinline__ void use_after_wait(float (&v)[16]) {
    asm volatile("" : PTX_FLOAT_INOUT16(v, 0));
}

__device__ __forceinline__ void use_after_wait(float (&v)[32]) {
    asm volatile("" : PTX_FLOAT_INOUT16(v, 0), PTX_FLOAT_INOUT16(v, 16));
}

// Blocks until this thread's own earlier loads have arrived.
template <typename... Registers>
__device__ __forceinline__ void tcgen05_wait_ld(Registers&... registers) {
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    (use_after_wait(registers), ...);
}

__device__ __forceinline__ void tcgen05_wait_st() {
    asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}

// ---------------------------------------------------------------- tcgen05: MMA

// D (TMEM, f32) = A (smem) * B (smem) {+ D}. One thread issues; completion through tcgen05_commit of that thread.
__device__ __forceinline__ void tcgen05_mma_ss(TmemAddress d, uint64_t a, uint64_t b, uint32_t instruction,
                                               bool accumulate) {
    asm volatile(
        "{\n\t.reg .pred accumulate;\n\t"
        "setp.ne.b32 accumulate, %4, 0;\n\t"
        "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, accumulate;\n\t}" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(static_cast<uint32_t>(accumulate))
        : "memory");
}

// As above with A in tensor memory, two 16-bit values a column.
__device__ __forceinline__ void tcgen05_mma_ts(TmemAddress d, TmemAddress a, uint64_t b, uint32_t instruction,
                                               bool accumulate) {
    asm volatile(
        "{\n\t.reg .pred accumulate;\n\t"
        "setp.ne.b32 accumulate, %4, 0;\n\t"
        "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, accumulate;\n\t}" ::"r"(d),
        "r"(a), "l"(b), "r"(instruction), "r"(static_cast<uint32_t>(accumulate))
        : "memory");
}

// One arrival on the barrier once every earlier MMA of this thread has completed; acts as
// fence::before_thread_sync.
__device__ __forceinline__ void tcgen05_commit(uint64_t& barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                     smem_address(&barrier))
                 : "memory");
}

// ---------------------------------------------------------------- warp-level MMA (sm_80 and later)

// Four 8x8 matrices of 16-bit values; lanes 8i .. 8i + 7 give the row addresses of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&v)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : PTX_OUT4(v, 0)
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&v)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : PTX_OUT4(v, 0)
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : PTX_FLOAT_INOUT4(d, 0)
        : PTX_IN4(a, 0), "r"(b0), "r"(b1));
}

// ---------------------------------------------------------------- memory

__device__ __forceinline__ void st_shared_v4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// 32 bytes, one whole L2 sector, from one lane.
__device__ __forceinline__ void st_global_v8(void* address, const uint32_t (&v)[8]) {
    asm volatile("st.global.v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"l"(address), PTX_IN8(v, 0) : "memory");
}

// ---------------------------------------------------------------- arithmetic

// 2^x, max error 2 ulp; subnormal results become 0.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float rcp_approx_ftz(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two half-precision exponentials, max relative error 2^-9.9.
__device__ __forceinline__ uint32_t ex2_approx_f16x2(uint32_t x) {
    uint32_t y;
    asm("ex2.approx.f16x2 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ uint32_t add_f16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// The first operand of cvt.rn.bf16x2 lands in the upper half: `low` is the element at the lower address.
__device__ __forceinline__ uint32_t cvt_bf16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ uint32_t cvt_f16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// NaN if either is.
__device__ __forceinline__ float max_nan(float a, float b) {
    float d;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

// sm_100 and later.
__device__ __forceinline__ float max3(float a, float b, float c) {
    float d;
    asm("max.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}

// Two f32 operations an instruction, on a register pair (sm_100 and later).
namespace detail {
__device__ __forceinline__ uint64_t pair(float2 v) {
    uint64_t bits;
    asm("mov.b64 %0, {%1, %2};" : "=l"(bits) : "f"(v.x), "f"(v.y));
    return bits;
}

__device__ __forceinline__ float2 unpair(uint64_t bits) {
    float2 v;
    asm("mov.b64 {%0, %1}, %2;" : "=f"(v.x), "=f"(v.y) : "l"(bits));
    return v;
}
}  // namespace detail

__device__ __forceinline__ float2 fma_rn_ftz_f32x2(float2 a, float2 b, float2 c) {
    uint64_t d;
    asm("fma.rn.ftz.f32x2 %0, %1, %2, %3;" : "=l"(d) : "l"(detail::pair(a)), "l"(detail::pair(b)), "l"(detail::pair(c)));
    return detail::unpair(d);
}

__device__ __forceinline__ float2 add_rn_ftz_f32x2(float2 a, float2 b) {
    uint64_t d;
    asm("add.rn.ftz.f32x2 %0, %1, %2;" : "=l"(d) : "l"(detail::pair(a)), "l"(detail::pair(b)));
    return detail::unpair(d);
}

__device__ __forceinline__ float2 sub_rn_ftz_f32x2(float2 a, float2 b) {
    uint64_t d;
    asm("sub.rn.ftz.f32x2 %0, %1, %2;" : "=l"(d) : "l"(detail::pair(a)), "l"(detail::pair(b)));
    return detail::unpair(d);
}

// Rounds towards minus infinity.
__device__ __forceinline__ float2 add_rm_ftz_f32x2(float2 a, float2 b) {
    uint64_t d;
    asm("add.rm.ftz.f32x2 %0, %1, %2;" : "=l"(d) : "l"(detail::pair(a)), "l"(detail::pair(b)));
    return detail::unpair(d);
}

}  // namespace ptx
