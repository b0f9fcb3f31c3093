// Tiles in the 128-byte swizzle and the two products on them, as step 3 introduces them.
//
// A [128, 128] bf16 tile is two TMA boxes of 64 columns (128 bytes) by 128 rows, one after the other. Read K-major,
// eight rows are one 1024-byte atom and a K step of 16 elements is 32 bytes further in it. Read MN-major (V), eight
// keys are one atom, a K step of 16 keys is two atoms further, and LBO leads to the other 64 columns.
#pragma once

#include "ladder.cuh"

namespace ladder {

constexpr int kBoxColumns = 64;
constexpr int kBoxBytes = kTileRows * kBoxColumns * 2;
constexpr int kAtomBytes = kRowGroup * kBoxColumns * 2;

__device__ __forceinline__ void load_tile(uint32_t smem, const CUtensorMap& map, int row, uint64_t& barrier) {
#pragma unroll
    for (int column = 0; column < kHeadDim; column += kBoxColumns) {
        ptx::tma_load_2d(smem + column / kBoxColumns * kBoxBytes, map, column, row, barrier);
    }
}

// S = Q K^T.
__device__ __forceinline__ void mma_qk(TmemAddress s, uint32_t q, uint32_t k) {
    const uint64_t q_tile = layouts::smem_descriptor(q, 16, kAtomBytes, layouts::Swizzle::k128B);
    const uint64_t k_tile = layouts::smem_descriptor(k, 16, kAtomBytes, layouts::Swizzle::k128B);
#pragma unroll
    for (int step = 0; step < kHeadDim / kMmaK; ++step) {
        const int column = step * kMmaK;
        const uint32_t offset = column / kBoxColumns * kBoxBytes + column % kBoxColumns * 2;
        ptx::tcgen05_mma_ss(s, layouts::advance(q_tile, offset), layouts::advance(k_tile, offset), kMmaQk, step > 0);
    }
}

// O {+}= P V over the keys of the K steps [first, last); p is the column of key 0.
__device__ __forceinline__ void mma_pv(TmemAddress o, TmemAddress p, uint32_t v, int first, int last,
                                       bool accumulate) {
    const uint64_t v_tile = layouts::smem_descriptor(v, kBoxBytes, kAtomBytes, layouts::Swizzle::k128B);
#pragma unroll
    for (int step = first; step < last; ++step) {
        ptx::tcgen05_mma_ts(o, p + step * kMmaK / 2, layouts::advance(v_tile, step * kMmaK / kRowGroup * kAtomBytes),
                            kMmaPv, accumulate || step > first);
    }
}

__device__ __forceinline__ void mma_pv(TmemAddress o, TmemAddress p, uint32_t v, bool accumulate) {
    mma_pv(o, p, v, 0, kTileRows / kMmaK, accumulate);
}

}  // namespace ladder
