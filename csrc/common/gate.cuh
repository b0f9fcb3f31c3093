// The gates of LTX-2.3's heads: the output is multiplied by twice the sigmoid of its head's logit. Rounded are, as in
// diffusers, the output, the sigmoid and the product.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../api.h"
#include "ptx.cuh"

namespace videoattn {

// The products of two pairs of 16-bit values.
template <typename Element>
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b);

#define VIDEOATTN_MULTIPLY(ELEMENT, TYPE)                                                        \
    template <>                                                                                  \
    __device__ __forceinline__ uint32_t multiply<ELEMENT>(uint32_t a, uint32_t b) {              \
        uint32_t products;                                                                       \
        asm("mul.rn." TYPE " %0, %1, %2;" : "=r"(products) : "r"(a), "r"(b));                    \
        return products;                                                                         \
    }
VIDEOATTN_MULTIPLY(__nv_bfloat16, "bf16x2")
VIDEOATTN_MULTIPLY(__half, "f16x2")
#undef VIDEOATTN_MULTIPLY

// The same value twice.
template <typename Element>
__device__ __forceinline__ uint32_t twice(float x);

template <>
__device__ __forceinline__ uint32_t twice<__nv_bfloat16>(float x) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(x));
    return pair;
}

template <>
__device__ __forceinline__ uint32_t twice<__half>(float x) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(x));
    return pair;
}

// The gate of a logit, as a pair. Doubling it after rounding matters where fp16 has subnormal numbers.
template <typename Element>
__device__ __forceinline__ uint32_t gate_of(Element logit) {
    constexpr float kLog2E = 1.4426950408889634f;
    const float power = ptx::ex2_approx_ftz(static_cast<float>(logit) * -kLog2E);
    const float sigmoid = ptx::rcp_approx_ftz(1.0f + power);
    return multiply<Element>(twice<Element>(sigmoid), twice<Element>(2.0f));
}

template <typename Element>
__device__ __forceinline__ uint32_t gate_of(const VideoattnGate& gate, int64_t batch, int64_t query, int head) {
    const Element* logits = static_cast<const Element*>(gate.data);
    return gate_of(__ldg(logits + batch * gate.stride_batch + query * gate.stride_seq + head));
}

}  // namespace videoattn
