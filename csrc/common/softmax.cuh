// Pieces of the online softmax in the base-2 domain.
#pragma once

#include "ptx.cuh"

namespace softmax {

constexpr float kLog2E = 1.4426950408889634f;

// Cubic of least relative error (8.6e-5) for 2^f on [0, 1] with 2^0 = 1 exact; bf16 rounds by up to 2e-3,
// fp16 by 2.4e-4.
constexpr float kExp2C1 = 0.6951166391372681f;
constexpr float kExp2C2 = 0.22764497995376587f;
constexpr float kExp2C3 = 0.07706724107265472f;

// 2^x of two values on the FMA and ALU pipes, for x up to 127; x below -126 counts as -126. NaN does not come out as NaN
// but as 3.4e38, which bf16 and fp16 round to infinity.
//
// Adding 1.5 * 2^23 with rounding down leaves floor(x) in the low mantissa bits. The polynomial takes the fraction,
// and the integer, shifted into the exponent field, scales the result (FA4 paper 3.1.3; Cody and Waite 1980).
__device__ __forceinline__ float2 exp2_software(float2 x) {
    constexpr float kMagic = 12582912.0f;
    x.x = ptx::max_nan(x.x, -126.0f);
    x.y = ptx::max_nan(x.y, -126.0f);
    const float2 biased = ptx::add_rm_ftz_f32x2(x, make_float2(kMagic, kMagic));
    const float2 fraction =
        ptx::sub_rn_ftz_f32x2(x, ptx::sub_rn_ftz_f32x2(biased, make_float2(kMagic, kMagic)));
    float2 y = ptx::fma_rn_ftz_f32x2(fraction, make_float2(kExp2C3, kExp2C3), make_float2(kExp2C2, kExp2C2));
    y = ptx::fma_rn_ftz_f32x2(y, fraction, make_float2(kExp2C1, kExp2C1));
    // NOTES: scalar, because a scalar FMA takes 1.0 as an immediate where the packed one holds two registers.
    y = make_float2(fmaf(y.x, fraction.x, 1.0f), fmaf(y.y, fraction.y, 1.0f));
    y.x = __int_as_float(__float_as_int(y.x) + (__float_as_int(biased.x) << 23));
    y.y = __int_as_float(__float_as_int(y.y) + (__float_as_int(biased.y) << 23));
    return y;
}

}  // namespace softmax
