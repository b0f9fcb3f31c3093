// What every step of the ladder shares: the problem, the tile, set-up and tear-down, the store of one output row.
//
// The problem: O = softmax(Q K^T / sqrt(128)) V, bf16, head_dim 128, no mask. Q and O are [batch * heads * q_len, 128],
// K and V [batch * heads * kv_len, 128], all contiguous. q_len is a multiple of the rows of one CTA, kv_len of 128.
#pragma once

#include "../common/layouts.cuh"
#include "../common/ptx.cuh"

namespace ladder {

using layouts::kMmaK;
using ptx::TmemAddress;

constexpr int kTileRows = 128;  // queries of a tile, and keys of a tile
constexpr int kHeadDim = 128;
constexpr int kTileBytes = kTileRows * kHeadDim * 2;
constexpr int kRowGroup = 8;  // rows of one swizzle atom
constexpr float kSoftmaxScale = 0.08838834764831845f;  // 1 / sqrt(128)

constexpr uint32_t kMmaQk =
    layouts::instruction_descriptor(kTileRows, kTileRows, layouts::InputType::kBf16, layouts::Major::kK);
constexpr uint32_t kMmaPv =
    layouts::instruction_descriptor(kTileRows, kHeadDim, layouts::InputType::kBf16, layouts::Major::kMn);

// The wait of a whole warp: whatever warp-collective instruction follows finds the warp converged.
__device__ __forceinline__ void wait_warp(uint64_t& barrier, uint32_t parity) {
    ptx::mbarrier_wait(barrier, parity);
    __syncwarp();
}

__device__ __forceinline__ void wait_thread(uint64_t& barrier, uint32_t parity) {
    ptx::mbarrier_wait(barrier, parity);
}

// One arrival for the warp, after all its lanes. What the lanes did in tensor memory must have been waited for.
__device__ __forceinline__ void arrive_warp(uint64_t& barrier) {
    ptx::tcgen05_fence_before_thread_sync();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        ptx::mbarrier_arrive(barrier);
    }
}

// Follows the barriers' initialisation by the thread that did it; a CTA synchronisation must follow.
__device__ __forceinline__ void publish_barriers() {
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async_smem();
}

// Whole CTA: the owner warp allocates tensor memory, and everyone sees its address and the barriers.
template <int kColumns>
__device__ __forceinline__ TmemAddress set_up(bool owner, uint32_t& tmem_slot) {
    if (owner) {
        ptx::tcgen05_alloc<kColumns>(ptx::smem_address(&tmem_slot));
        ptx::tcgen05_relinquish_alloc_permit();
    }
    __syncwarp();
    ptx::tcgen05_fence_before_thread_sync();
    __syncthreads();
    ptx::tcgen05_fence_after_thread_sync();
    return tmem_slot;
}

// Whole CTA, once every warp has waited for what it started in tensor memory.
template <int kColumns>
__device__ __forceinline__ void tear_down(bool owner, TmemAddress tmem) {
    __syncwarp();
    ptx::tcgen05_fence_before_thread_sync();
    __syncthreads();
    ptx::tcgen05_fence_after_thread_sync();
    if (owner) {
        ptx::tcgen05_dealloc<kColumns>(tmem);
    }
}

// TMEM address of this warp's 32 lanes.
__device__ __forceinline__ TmemAddress warp_lanes(TmemAddress address) {
    return address + ((threadIdx.x / 32 % 4) << 21);
}

// O of this thread's row, scaled and rounded, to global memory. The warp's lanes hold 32 consecutive rows.
__device__ __forceinline__ void store_output_row(TmemAddress o, float scale, __nv_bfloat16* row) {
#pragma unroll
    for (int column = 0; column < kHeadDim; column += 16) {
        float v[16];
        ptx::tcgen05_ld_x16(v, o + column);
        ptx::tcgen05_wait_ld(v);
        uint32_t packed[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            packed[i] = ptx::cvt_bf16x2(v[2 * i] * scale, v[2 * i + 1] * scale);
        }
        ptx::st_global_v8(row + column, packed);
    }
}

}  // namespace ladder
