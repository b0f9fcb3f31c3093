// O = sum_s exp(LSE_s - LSE) O_s with LSE = log sum_s exp(LSE_s), in the fixed order of the parts.

#include "merge.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "gate.cuh"
#include "launch.h"

namespace videoattn {
namespace {

template <typename Element>
__device__ __forceinline__ Element rounded(float x);

template <>
__device__ __forceinline__ __nv_bfloat16 rounded<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

template <>
__device__ __forceinline__ __half rounded<__half>(float x) {
    return __float2half_rn(x);
}

template <int kHeadDim, typename Element>
__device__ __forceinline__ void merge(const MergeArgs& args) {
    constexpr int kPieces = kHeadDim / kMergeColumns;
    const int64_t piece = static_cast<int64_t>(blockIdx.x) * kMergeThreads + threadIdx.x;
    const int64_t row = piece / kPieces;
    const int column = static_cast<int>(piece % kPieces) * kMergeColumns;
    if (row >= args.rows) return;

    float top = -INFINITY;
    for (int split = 0; split < args.splits; ++split) top = fmaxf(top, args.partial_lse[split * args.rows + row]);
    float sum = 0.0f, out[kMergeColumns] = {};
    // Without a key in any part every weight is 0; so is a part's own without a key in it.
    const float shift = top == -INFINITY ? 0.0f : top;
    for (int split = 0; split < args.splits; ++split) {
        const float part_lse = args.partial_lse[split * args.rows + row];
        // A part whose scores are all -inf holds NaN; that is the row's only where no part has another score.
        if (part_lse == -INFINITY && top != -INFINITY) continue;
        const float weight = expf(part_lse - shift);
        sum += weight;
        const float4* part = reinterpret_cast<const float4*>(
            args.partial_out + (split * args.rows + row) * kHeadDim + column);
#pragma unroll
        for (int i = 0; i < kMergeColumns / 4; ++i) {
            const float4 x = part[i];
            out[4 * i] = fmaf(weight, x.x, out[4 * i]);
            out[4 * i + 1] = fmaf(weight, x.y, out[4 * i + 1]);
            out[4 * i + 2] = fmaf(weight, x.z, out[4 * i + 2]);
            out[4 * i + 3] = fmaf(weight, x.w, out[4 * i + 3]);
        }
    }
    const float lse = sum == 0.0f ? -INFINITY : shift + logf(sum);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    alignas(16) Element packed[kMergeColumns];
#pragma unroll
    for (int i = 0; i < kMergeColumns; ++i) packed[i] = rounded<Element>(out[i] * inverse);
    const int64_t pair = row / args.q_len, position = row - pair * args.q_len;
    const int64_t batch = pair / args.heads, head = pair - batch * args.heads;
    uint4 stored = *reinterpret_cast<const uint4*>(packed);
    if (args.gate.data != nullptr) {
        const uint32_t gate = gate_of<Element>(args.gate, batch, position, static_cast<int>(head));
        stored.x = multiply<Element>(stored.x, gate);
        stored.y = multiply<Element>(stored.y, gate);
        stored.z = multiply<Element>(stored.z, gate);
        stored.w = multiply<Element>(stored.w, gate);
    }
    Element* target = static_cast<Element*>(args.out) + batch * args.stride_batch + position * args.stride_seq +
                      head * args.stride_head + column;
    *reinterpret_cast<uint4*>(target) = stored;
    if (args.lse != nullptr && column == 0) args.lse[row] = lse;
}

}  // namespace
}  // namespace videoattn

#define VIDEOATTN_MERGE_KERNEL(NAME, HEAD_DIM, ELEMENT)                                         \
    extern "C" __global__ void __launch_bounds__(videoattn::kMergeThreads)                      \
        NAME(const videoattn::MergeArgs args) {                                                 \
        videoattn::merge<HEAD_DIM, ELEMENT>(args);                                              \
    }

VIDEOATTN_MERGE_KERNEL(videoattn_merge_d128_bf16, 128, __nv_bfloat16)
VIDEOATTN_MERGE_KERNEL(videoattn_merge_d128_fp16, 128, __half)
VIDEOATTN_MERGE_KERNEL(videoattn_merge_d64_bf16, 64, __nv_bfloat16)
VIDEOATTN_MERGE_KERNEL(videoattn_merge_d64_fp16, 64, __half)

namespace videoattn {

KernelList merge_kernels() {
    static const Kernel kernels[] = {
        VIDEOATTN_ENTRY(videoattn_merge_d128_bf16),
        VIDEOATTN_ENTRY(videoattn_merge_d128_fp16),
        VIDEOATTN_ENTRY(videoattn_merge_d64_bf16),
        VIDEOATTN_ENTRY(videoattn_merge_d64_fp16),
    };
    return {kernels, sizeof(kernels) / sizeof(kernels[0])};
}

}  // namespace videoattn
