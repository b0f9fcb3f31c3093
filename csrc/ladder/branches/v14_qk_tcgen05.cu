// V14: QK by tcgen05, PV left to the warp-level MMA of sm_80. TMA and tensor memory arrive on one side only: scores come
// from tensor memory, one row a lane; P goes through shared memory into fragments, O stays in fragments.
//
// Taught: how the new layouts must agree. Its two bugs are tests here (wrong lane base of a warp's tensor-memory address;
// 256-byte rows under a descriptor that expects 128-byte ones). It was slower than the kernel it replaced.
#include "branch.cuh"

using namespace branch;

namespace {

// Fragments of 16 rows: register e of block j is row lane / 4 + 8 * (e / 2), column 8j + 2 * (lane mod 4) + e mod 2.
__device__ void rescale(float (&output)[kHeadDim / 8][4], const float (&factors)[kQueries], int first_row) {
    const float high = factors[first_row + threadIdx.x % 32 / 4], low = factors[first_row + threadIdx.x % 32 / 4 + 8];
#pragma unroll
    for (int block = 0; block < kHeadDim / 8; ++block) {
        output[block][0] *= high;
        output[block][1] *= high;
        output[block][2] *= low;
        output[block][3] *= low;
    }
}

__device__ void multiply_pv(float (&output)[kHeadDim / 8][4], const Tiles& at, int first_row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int key = 0; key < kKeys; key += 16) {
        uint32_t p[4];
        ptx::ldmatrix_x4(p, p_piece(at, first_row + lane % 16, key / 8 + lane / 16));
        const int v_key = key + lane % 16;
#pragma unroll
        for (int block = 0; block < kHeadDim / 8; block += 2) {
            const int piece = block + lane / 16;
            uint32_t v[4];
            ptx::ldmatrix_x4_trans(v, at.v + piece / 8 * kKeys * kRowBytes + v_key * kRowBytes +
                                          ((piece % 8 ^ (v_key & 7)) << 4));
            ptx::mma_m16n8k16_f16(output[block], p, v[0], v[1]);
            ptx::mma_m16n8k16_f16(output[block + 1], p, v[2], v[3]);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm)
    branch_v14_qk_tcgen05(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                          const __grid_constant__ CUtensorMap v_map, __half* out, int q_len, int kv_len) {
    constexpr int kTmemColumns = 64;
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ Barriers bar;
    __shared__ float sums[2][kQueries], factors[kQueries];
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
    const TmemAddress s = warp_lanes(tmem);

    float row_max = -INFINITY, row_sum = 0.0f;
    float output[kHeadDim / 8][4] = {};
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
        if (place.half == 0) {
            factors[place.row] = factor;
        }
        hand_over();

        // V came by TMA and is read by every thread here.
        ladder::wait_warp(bar.loaded, parity);
        rescale(output, factors, warp * 16);
        multiply_pv(output, at, warp * 16);
        hand_over();
    }

    // Both threads of a row know its sum; a fragment's rows belong to other threads.
    const float sum = whole_row_sum(sums, place, row_sum);
    if (place.half == 0) {
        factors[place.row] = 1.0f / sum;
    }
    __syncthreads();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int low = 0; low < 2; ++low) {
        const int row = warp * 16 + lane / 4 + 8 * low;
        __half* const to = out + (static_cast<size_t>(place.q_row) + row) * kHeadDim + lane % 4 * 2;
#pragma unroll
        for (int block = 0; block < kHeadDim / 8; ++block) {
            *reinterpret_cast<uint32_t*>(to + block * 8) = ptx::cvt_f16x2(
                output[block][2 * low] * factors[row], output[block][2 * low + 1] * factors[row]);
        }
    }
    ladder::tear_down<kTmemColumns>(warp == 0, tmem);
}
