// Online softmax over one warpgroup's 64 x kTileN scores, in wgmma's accumulator layout: a thread holds two rows
// (t / 4 and t / 4 + 8 of its warp's 16) and of each 8-column block the columns 2 (t % 4) and 2 (t % 4) + 1.
#pragma once

#include <cmath>

#include "ptx.cuh"

namespace videoattn::hopper {

// A row's "reference" is the running row maximum, m elsewhere, but one that may lag the true maximum: FA4's conditional
// rescaling (FA4 paper, section 3.1.2). bf16, fp16 and the fp32 sums hold what P becomes by it without loss.

// What a thread's share of a block (kTileN / 4 values a row) may sum to before the reference moves. P stays below 2^10,
// and many moderately large values move it too.
constexpr float kTrustedSum = 1024.0f;

// The shift of a row whose first block had no finite score: against it every finite score's exponential overflows, and the
// row begins anew with that block. A reference only moves up, and 0 could be too high for all that follow.
constexpr float kNoReference = -0x1p127f;

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ int quad_max(int x) {
    x = max(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return max(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

template <int kColumns>
struct Softmax {
    static constexpr int kBlocks = kColumns / 8;

    // Exponentials below 2^kSafePower leave a thread's sum of a block finite: at most 2^127, and so below 2^128 however
    // its additions round.
    static constexpr int kSummed = kColumns / 4;  // values of a row in one thread
    static constexpr int kSafePower = kSummed <= 32 ? 122 : 121;
    static_assert(kSummed <= 1 << (127 - kSafePower));

    float shift[2];    // scale_log2 * the row's reference maximum
    float row_sum[2];  // this thread's share
    float scale_log2;

    __device__ __forceinline__ explicit Softmax(float scale_log2_) : scale_log2(scale_log2_) {}

    // Columns at and past `valid` of this tile leave the softmax.
    static __device__ __forceinline__ void mask(float (&s)[kColumns / 2], int valid) {
        const int first = 2 * (threadIdx.x % 4);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (8 * block + first + e % 2 >= valid) s[4 * block + e] = -INFINITY;
        }
    }

    // Begins a tile's rows: its first block's own maxima are the reference, and s becomes scale_log2 * s - shift, at
    // most half a unit in the last place of shift: too little to overflow P up to scores of 2^28.
    __device__ __forceinline__ void begin(float (&s)[kColumns / 2]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float a = fmaxf(s[2 * row], s[2 * row + 1]);
            float b = fmaxf(s[4 + 2 * row], s[4 + 2 * row + 1]);
#pragma unroll
            for (int block = 2; block < kBlocks; block += 2) {
                a = fmaxf(a, fmaxf(s[4 * block + 2 * row], s[4 * block + 2 * row + 1]));
                b = fmaxf(b, fmaxf(s[4 * block + 4 + 2 * row], s[4 * block + 4 + 2 * row + 1]));
            }
            const float top = quad_max(fmaxf(a, b));
            shift[row] = top == -INFINITY ? kNoReference : top * scale_log2;
            row_sum[row] = 0.0f;
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = s[4 * block + 2 * row + e];
                    x = fmaf(x, scale_log2, -shift[row]);
                }
            }
        }
    }

    // s becomes scale_log2 * s - shift after every reference that its row exceeds has moved up to it; O must be
    // multiplied by `factor`. Above 0 floats order as integers, and nothing below 0 matters here, so that one three-way
    // integer maximum replaces two floating-point ones.
    __device__ __forceinline__ void raise(float (&s)[kColumns / 2], float (&factor)[2]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float first = -INFINITY;
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
                first = fmaxf(first, fmaxf(s[4 * block + 2 * row], s[4 * block + 2 * row + 1]));
            first = quad_max(first);
            if (shift[row] == kNoReference && first != -INFINITY) shift[row] = first * scale_log2;
        }
        int top[2] = {0, 0};
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                float& a = s[4 * block + 2 * row];
                float& b = s[4 * block + 2 * row + 1];
                a = fmaf(a, scale_log2, -shift[row]);
                b = fmaf(b, scale_log2, -shift[row]);
                top[row] = max(max(__float_as_int(a), __float_as_int(b)), top[row]);
            }
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float above = __int_as_float(quad_max(top[row]));
            const float move = above <= 0.0f ? 0.0f : above;  // NaN moves too: sum and O become NaN
            shift[row] += move;
            factor[row] = ex2_approx_ftz(-move);
            row_sum[row] *= factor[row];
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                s[4 * block + 2 * row] -= move;
                s[4 * block + 2 * row + 1] -= move;
            }
        }
    }

    // s becomes exp2(s); sums are the thread's own.
    __device__ __forceinline__ void exponentiate(float (&s)[kColumns / 2]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float sum[2] = {row_sum[row], 0.0f};
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = s[4 * block + 2 * row + e];
                    x = ex2_approx_ftz(x);
                    sum[e] += x;
                }
            }
            row_sum[row] = sum[0] + sum[1];
        }
    }

    // s becomes exp2(scale_log2 * s - shift), against the references as they stand; `sum` is the block's alone.
    // Elements far above their row's reference show in a sum above kTrustedSum: false where a row of the warp has one,
    // and lower() must follow.
    __device__ __forceinline__ bool exponentiate_unchecked(float (&s)[kColumns / 2], float (&sum)[2]) const {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float part[2] = {0.0f, 0.0f};
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = s[4 * block + 2 * row + e];
                    x = ex2_approx_ftz(fmaf(x, scale_log2, -shift[row]));
                    part[e] += x;
                }
            }
            sum[row] = part[0] + part[1];
        }
        return !__any_sync(0xffffffffu, fmaxf(sum[0], sum[1]) > kTrustedSum);
    }

    __device__ __forceinline__ void add(const float (&sum)[2]) {
        row_sum[0] += sum[0];
        row_sum[1] += sum[1];
    }

    // Moves the references up to the block's maxima, in whole powers of two, which exponentials, sums and O follow by
    // an exact multiplication. False, and nothing done, where an exponential reached 2^kSafePower: it or a sum may have
    // overflowed, and infinity cannot be multiplied back.
    __device__ __forceinline__ bool lower(float (&s)[kColumns / 2], float (&sum)[2], float (&factor)[2]) {
        int top[2] = {0, 0};
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
            for (int e = 0; e < 4; ++e) top[e / 2] = max(top[e / 2], __float_as_int(s[4 * block + e]));
        }
        constexpr int kLimit = (127 + kSafePower) << 23;  // the bits of 2^kSafePower
        if (__any_sync(0xffffffffu, max(top[0], top[1]) >= kLimit)) return false;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int power = max((quad_max(top[row]) >> 23) - 127, 0);
            factor[row] = __int_as_float((127 - power) << 23);
            shift[row] += static_cast<float>(power);
            row_sum[row] *= factor[row];
            sum[row] *= factor[row];
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                s[4 * block + 2 * row] *= factor[row];
                s[4 * block + 2 * row + 1] *= factor[row];
            }
        }
        return true;
    }

    // The row's LSE from its full sum: natural logarithm.
    __device__ __forceinline__ float log_sum(int row, float sum) const {
        constexpr float kLn2 = 0.6931471805599453f;
        return fmaf(shift[row], kLn2, __logf(sum));
    }

    // The accumulator layout of two neighbouring 8-column blocks is the A fragment of one k16 step.
    template <typename Element>
    static __device__ __forceinline__ void pack_fragments(const float (&s)[kColumns / 2],
                                                          uint32_t (&p)[kColumns / 16][4]) {
#pragma unroll
        for (int step = 0; step < kColumns / 16; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) p[step][i] = pack<Element>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
        }
    }
};

}  // namespace videoattn::hopper
