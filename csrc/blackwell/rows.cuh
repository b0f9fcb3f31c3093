// The roles that have one thread a row: softmax (a warpgroup for each Q tile) and correction (one for both).
#pragma once

#include "../common/gate.cuh"
#include "../common/softmax.cuh"
#include "work.cuh"

namespace videoattn::blackwell {

constexpr float kRescaleThreshold = 8.0f;  // log2: P stays below 256
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kChunk = 32;
constexpr int kChunks = kTileRows / kChunk;

// Pairs of exponentials, of each eight, on the FMA pipe. For head_dim 128 as many as bring the MUFU below the tensor
// core's 1024 clocks a tile, for 64 (512 clocks) until the ALU would take over (scripts/budget_blackwell.py). B300 has
// twice the MUFU rate and needs none (FA4 the same).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 1000
template <typename C>
constexpr int kSoftwarePairs = C::kHeadDim == 128 ? 1 : 2;
#else
template <typename C>
constexpr int kSoftwarePairs = 0;
#endif

__device__ __forceinline__ uint32_t pack(float2 v, __nv_bfloat16) { return ptx::cvt_bf16x2(v.x, v.y); }
__device__ __forceinline__ uint32_t pack(float2 v, __half) { return ptx::cvt_f16x2(v.x, v.y); }

// P = 2^(S * scale - row_max) of 32 scores, packed; adds to the row sum.
template <typename C, typename Element>
__device__ __forceinline__ void exponentiate(uint32_t (&packed)[kChunk / 2], const float (&s)[kChunk], float scale_log2,
                                             float minus_max, float2& row_sum) {
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
        float2 p = ptx::fma_rn_ftz_f32x2(make_float2(s[2 * i], s[2 * i + 1]), make_float2(scale_log2, scale_log2),
                                         make_float2(minus_max, minus_max));
        if (i % 8 < 8 - kSoftwarePairs<C>) {
            p = make_float2(ptx::ex2_approx_ftz(p.x), ptx::ex2_approx_ftz(p.y));
        } else {
            p = softmax::exp2_software(p);
        }
        row_sum = ptx::add_rn_ftz_f32x2(row_sum, p);
        packed[i] = pack(p, Element());
    }
}

__device__ __forceinline__ float row_max_of(const float (&s)[kChunks][kChunk]) {
    float max[4] = {s[0][0], s[0][1], s[0][2], s[0][3]};
#pragma unroll
    for (int i = 4; i < kTileRows; i += 2) {
        float& chain = max[i / 2 % 4];
        chain = ptx::max3(chain, s[i / kChunk][i % kChunk], s[i / kChunk][i % kChunk + 1]);
    }
    return fmaxf(ptx::max3(max[0], max[1], max[2]), max[3]);
}

template <typename C, typename Element>
__device__ __forceinline__ void softmax_warp(Shared<C>& shared, int q, TmemAddress tmem, const Args& args) {
    const int row = threadIdx.x % kTileRows;
    const TmemAddress s_tmem = warp_lanes(tmem), p_tmem = warp_lanes(tmem + C::kTmemP + q * kTileRows / 2);
    uint32_t scores_parity = 0, output_parity = 1, place = 0;
    const auto send = [&](float message) {
        shared.messages[q].value[place][row] = message;
        arrive_warp(shared.message_ready[q][place]);
        place ^= 1;
    };
    for (Work work(args); work.valid(); work.next()) {
        if (q >= work.q_tiles || work.tiles == 0) {
            continue;
        }
        float row_max = -INFINITY, row_sum = 0.0f;
        for (int tile = 0; tile < work.tiles; ++tile) {
            wait_warp(shared.scores_done[q], scores_parity, "scores_done", q);
            scores_parity ^= 1;
            ptx::tcgen05_fence_after_thread_sync();
            float s[kChunks][kChunk];
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                ptx::tcgen05_ld_x32(s[chunk], s_tmem + chunk * kChunk);
            }
            ptx::tcgen05_wait_ld(s[0], s[1], s[2], s[3]);
            arrive_warp(shared.scores_read);
            if (tile + 1 == work.tiles && work.tail() < kTileRows) {
                const int tail = work.tail();
#pragma unroll
                for (int i = 0; i < kTileRows; ++i) {
                    s[i / kChunk][i % kChunk] = i < tail ? s[i / kChunk][i % kChunk] : -INFINITY;
                }
            }

            const float new_max = fmaxf(row_max, row_max_of(s) * args.scale_log2);
            float factor = 1.0f;
            if (__any_sync(0xffffffff, new_max - row_max >= kRescaleThreshold)) {
                // A row of -inf alone has no basis yet, and -inf - -inf would be NaN.
                factor = new_max == -INFINITY ? 1.0f : ptx::ex2_approx_ftz(row_max - new_max);
                row_max = new_max;
            }
            if (tile > 0) {
                send(factor);
            }

            const float minus_max = row_max == -INFINITY ? 0.0f : -row_max;
            float2 sums = make_float2(row_sum * factor, 0.0f);
            uint32_t packed[2][kChunk / 2];
            exponentiate<C, Element>(packed[0], s[0], args.scale_log2, minus_max, sums);
            exponentiate<C, Element>(packed[1], s[1], args.scale_log2, minus_max, sums);
            // The last tile's PV may be reading P until here.
            wait_warp(shared.output_done[q], output_parity, "output_done (softmax)", q);
            output_parity ^= 1;
            ptx::tcgen05_fence_after_thread_sync();
            ptx::tcgen05_st_x16(p_tmem, packed[0]);
            ptx::tcgen05_st_x16(p_tmem + kChunk / 2, packed[1]);
#pragma unroll
            for (int chunk = 2; chunk < kChunks; ++chunk) {
                exponentiate<C, Element>(packed[chunk % 2], s[chunk], args.scale_log2, minus_max, sums);
                ptx::tcgen05_st_x16(p_tmem + chunk * kChunk / 2, packed[chunk % 2]);
            }
            ptx::tcgen05_wait_st();
            arrive_warp(shared.p_ready[q]);
            row_sum = sums.x + sums.y;
        }
        if (args.lse != nullptr && work.q_row + q * kTileRows + row < args.q_len) {
            args.lse[work.flat_row(work.q_row + q * kTileRows + row)] = (row_max + log2f(row_sum)) * kLn2;
        }
        send(row_sum);
    }
}

// O of this warp's 32 rows, times each row's scale and gate, to global memory through shared memory. Zeros if the item
// has no keys.
template <typename C, typename Element>
__device__ __forceinline__ void store_output(uint32_t staging, const CUtensorMap& o_map, TmemAddress o_tmem, float scale,
                                             uint32_t gate, const Work& work, int q) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
        ptx::bulk_wait_group_read();  // of the store before
    }
    __syncwarp();
#pragma unroll
    for (int column = 0; column < C::kHeadDim; column += kChunk) {
        uint32_t packed[kChunk / 2] = {};
        if (work.tiles > 0) {
            float v[kChunk];
            ptx::tcgen05_ld_x32(v, o_tmem + column);
            ptx::tcgen05_wait_ld(v);
#pragma unroll
            for (int i = 0; i < kChunk / 2; ++i) {
                packed[i] = pack(make_float2(v[2 * i] * scale, v[2 * i + 1] * scale), Element());
            }
            if (work.args.gate.data != nullptr) {
#pragma unroll
                for (int i = 0; i < kChunk / 2; ++i) {
                    packed[i] = multiply<Element>(packed[i], gate);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kChunk / 8; ++i) {
            const int piece = column % 64 / 8 + i;
            const uint32_t line = staging + column / 64 * kOutRows * 128 + lane * 128;
            ptx::st_shared_v4(line + ((piece ^ (lane & 7)) << 4), packed[4 * i], packed[4 * i + 1], packed[4 * i + 2],
                              packed[4 * i + 3]);
        }
    }
    ptx::fence_proxy_async_smem();
    __syncwarp();
    if (lane == 0) {
        const int first_row = work.q_row + q * kTileRows + threadIdx.x / 32 % kWarps * kOutRows;
        if (first_row < work.args.q_len) {
            ptx::tma_store_5d(o_map, 0, first_row, 0, work.head, work.batch, staging);
        }
        ptx::bulk_commit_group();
    }
}

// The same in fp32 to the workspace, for the kernel that merges the parts of the keys.
template <typename C>
__device__ __forceinline__ void store_partial(TmemAddress o_tmem, float scale, const Work& work, int query) {
    float* const target = work.args.partial_out + work.flat_row(query) * C::kHeadDim;
#pragma unroll
    for (int column = 0; column < C::kHeadDim; column += 8) {
        float v[8] = {};
        if (work.tiles > 0) {
            ptx::tcgen05_ld_x8(v, o_tmem + column);
            ptx::tcgen05_wait_ld(v);
        }
        if (query < work.args.q_len) {
            uint32_t bits[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                bits[i] = __float_as_uint(v[i] * scale);
            }
            ptx::st_global_v8(target + column, bits);
        }
        __syncwarp();
    }
}

template <typename C, typename Element>
__device__ __forceinline__ void correction_warp(Shared<C>& shared, uint32_t smem, TmemAddress tmem,
                                                const CUtensorMap& o_map, const Args& args) {
    const int row = threadIdx.x % kTileRows;
    const uint32_t staging = smem + C::kOutOffset + threadIdx.x / 32 % kWarps * C::kOutBytes;
    const TmemAddress o_tmem = warp_lanes(tmem + C::kTmemO);
    uint32_t output_parity = 0, received = 0;  // a bit for each Q tile; two: which place, and its parity
    const auto wait_output = [&](int q) {
        wait_warp(shared.output_done[q], output_parity >> q & 1, "output_done (correction)", q);
        output_parity ^= 1u << q;
        ptx::tcgen05_fence_after_thread_sync();
    };
    const auto receive = [&](int q) {
        const uint32_t count = received >> (2 * q) & 3;
        wait_warp(shared.message_ready[q][count & 1], count >> 1, "message_ready", 2 * q + (count & 1));
        received ^= (count ^ ((count + 1) & 3)) << (2 * q);
        return shared.messages[q].value[count & 1][row];
    };
    for (Work work(args); work.valid(); work.next()) {
        if (work.tiles > 0) {
            for (int q = 0; q < work.q_tiles; ++q) {
                arrive_warp(shared.p_ready[q]);  // the first PV overwrites O, which is stored by now
            }
        }
        for (int tile = 1; tile < work.tiles; ++tile) {
            for (int q = 0; q < work.q_tiles; ++q) {
                const float factor = receive(q);
                wait_output(q);
                if (__any_sync(0xffffffff, factor != 1.0f)) {
#pragma unroll
                    for (int column = 0; column < C::kHeadDim; column += kChunk) {
                        float v[kChunk];
                        ptx::tcgen05_ld_x32(v, o_tmem + q * C::kHeadDim + column);
                        ptx::tcgen05_wait_ld(v);
#pragma unroll
                        for (int i = 0; i < kChunk; ++i) {
                            v[i] *= factor;
                        }
                        ptx::tcgen05_st_x32(o_tmem + q * C::kHeadDim + column, v);
                    }
                    ptx::tcgen05_wait_st();
                }
                arrive_warp(shared.p_ready[q]);
            }
        }
        for (int q = 0; q < work.q_tiles; ++q) {
            float scale = 0.0f;
            uint32_t gate = 0;
            if (work.tiles > 0) {
                const int query = work.q_row + q * kTileRows + row;
                if (args.gate.data != nullptr && query < args.q_len) {
                    gate = gate_of<Element>(args.gate, work.batch, query, work.head);  // beside the last PV
                }
                scale = 1.0f / receive(q);
                wait_output(q);
            } else if (args.lse != nullptr && work.q_row + q * kTileRows + row < args.q_len) {
                args.lse[work.flat_row(work.q_row + q * kTileRows + row)] = -INFINITY;
            }
            if (args.splits.value > 1) {
                store_partial<C>(o_tmem + q * C::kHeadDim, scale, work, work.q_row + q * kTileRows + row);
            } else {
                store_output<C, Element>(staging, o_map, o_tmem + q * C::kHeadDim, scale, gate, work, q);
            }
        }
    }
    if (threadIdx.x % 32 == 0) {
        ptx::bulk_wait_group();
    }
}

}  // namespace videoattn::blackwell
