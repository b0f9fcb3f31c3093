// Row work of steps 3 to 7: one thread owns one row of S, P and O in tensor memory. Addresses name the warp's lanes.
#pragma once

#include "ladder.cuh"

namespace ladder {

__device__ __forceinline__ float tile_row_max(TmemAddress s) {
    float row_max = -INFINITY;
    for (int column = 0; column < kTileRows; column += 16) {
        float v[16];
        ptx::tcgen05_ld_x16(v, s + column);
        ptx::tcgen05_wait_ld(v);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            row_max = fmaxf(row_max, v[i]);
        }
    }
    return row_max;
}

// P = exp(S * scale - row_max), two values a column, over the columns of S already read; its row sum as result.
__device__ __forceinline__ float exponentiate(TmemAddress s, float row_max) {
    float row_sum = 0.0f;
    for (int column = 0; column < kTileRows; column += 16) {
        float v[16];
        ptx::tcgen05_ld_x16(v, s + column);
        ptx::tcgen05_wait_ld(v);
        uint32_t packed[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float p0 = expf(v[2 * i] * kSoftmaxScale - row_max);
            const float p1 = expf(v[2 * i + 1] * kSoftmaxScale - row_max);
            row_sum += p0;
            row_sum += p1;
            packed[i] = ptx::cvt_bf16x2(p0, p1);
        }
        ptx::tcgen05_st_x8(s + column / 2, packed);
    }
    return row_sum;
}

__device__ __forceinline__ void rescale_output(TmemAddress o, float factor) {
    for (int column = 0; column < kHeadDim; column += 16) {
        float v[16];
        ptx::tcgen05_ld_x16(v, o + column);
        ptx::tcgen05_wait_ld(v);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            v[i] *= factor;
        }
        ptx::tcgen05_st_x16(o + column, v);
    }
}

}  // namespace ladder
