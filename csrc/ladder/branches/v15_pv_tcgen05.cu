// V15: PV by tcgen05 with a register accumulator. Each tile's product with V lands in tensor memory, is read back 32
// columns at a time, and joins O in registers, where the rescale is one FMA.
//
// Taught: the read-back has a register peak of its own, 32 destinations beside 64 accumulators. Tensor memory exists so
// that O need not be read every tile.
#include "branch.cuh"

using namespace branch;

extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm)
    branch_v15_pv_tcgen05(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                          const __grid_constant__ CUtensorMap v_map, __half* out, int q_len, int kv_len) {
    constexpr int kTmemColumns = 256;
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ Barriers bar;
    __shared__ float sums[2][kQueries];
    __shared__ uint32_t tmem_slot;
    const Tiles at(smem);
    const Place place(q_len, kv_len);
    const int warp = threadIdx.x / 32;
    const bool leader = warp == 0 && ptx::elect_one();
    if (leader) {
        initialise(bar);
    }
    __syncwarp();
    const TmemAddress tmem = ladder::set_up<kTmemColumns>(warp == 0, tmem_slot);
    const TmemAddress s = warp_lanes(tmem), pv = warp_lanes(tmem + kTmemPv) + place.half * kHalfDim;

    float row_max = -INFINITY, row_sum = 0.0f;
    float output[kHalfDim] = {};
    for (int tile = 0; tile < place.tiles; ++tile) {
        const uint32_t parity = tile & 1;
        if (leader) {
            load(bar, at, q_map, k_map, v_map, place, tile);
            ladder::wait_thread(bar.loaded, parity);
            mma_qk(tmem, at);
            ptx::tcgen05_commit(bar.scores_done);
        }
        __syncwarp();
        ladder::wait_warp(bar.scores_done, parity);
        ptx::tcgen05_fence_after_thread_sync();

        float v[kHalfKeys];
        const float new_max = fmaxf(row_max, load_scores(v, s, place.half));
        const float factor = ptx::ex2_approx_ftz(row_max - new_max);
        row_max = new_max;
        row_sum = row_sum * factor + exponentiate(at, place, v, row_max);
        hand_over();

        if (leader) {
            mma_pv(tmem + kTmemPv, at, false);
            ptx::tcgen05_commit(bar.output_done);
        }
        __syncwarp();
        ladder::wait_warp(bar.output_done, parity);
        ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
        for (int column = 0; column < kHalfDim; column += 32) {
            float product[32];
            ptx::tcgen05_ld_x32(product, pv + column);
            ptx::tcgen05_wait_ld(product);
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                output[column + i] = output[column + i] * factor + product[i];
            }
        }
    }

    const float scale = 1.0f / whole_row_sum(sums, place, row_sum);
#pragma unroll
    for (int column = 0; column < kHalfDim; column += 8) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            v[i] = output[column + i];
        }
        store_eight(output_row(out, place) + column, v, scale);
    }
    ladder::tear_down<kTmemColumns>(warp == 0, tmem);
}
