// Step 3: 128-byte swizzle. Eight-row atoms are 64 elements wide, their 16-byte pieces permuted by the row number, so
// that rows and columns alike spread over all banks. Two TMA instructions load a tile instead of sixteen.
//
//   leader thread   TMA K,V | QK            |                      PV          |
//   all threads             .     scores_done | max, exp, P, O*=a | sync |  output_done
//
// The same two boxes serve both majors. Read K-major (Q, K), eight rows are one 1024-byte atom and a K step of 16
// elements is 32 bytes further in it. Read MN-major (V), eight keys are one atom, a K step of 16 keys is two atoms
// further, and LBO leads to the other 64 columns.
#include "rows.cuh"

using namespace ladder;

namespace {

constexpr int kThreads = 128;
constexpr int kTmemColumns = 256;  // S at column 0, P over its first 64, O at 128
constexpr int kBoxColumns = 64;
constexpr int kBoxBytes = kTileRows * kBoxColumns * 2;
constexpr int kAtomBytes = kRowGroup * kBoxColumns * 2;

__device__ void load_tile(uint32_t smem, const CUtensorMap& map, int row, uint64_t& barrier) {
#pragma unroll
    for (int column = 0; column < kHeadDim; column += kBoxColumns) {
        ptx::tma_load_2d(smem + column / kBoxColumns * kBoxBytes, map, column, row, barrier);
    }
}

// S = Q K^T.
__device__ void mma_qk(TmemAddress s, uint32_t q, uint32_t k) {
    const uint64_t q_tile = layouts::smem_descriptor(q, 16, kAtomBytes, layouts::Swizzle::k128B);
    const uint64_t k_tile = layouts::smem_descriptor(k, 16, kAtomBytes, layouts::Swizzle::k128B);
#pragma unroll
    for (int step = 0; step < kHeadDim / kMmaK; ++step) {
        const int column = step * kMmaK;
        const uint32_t offset = column / kBoxColumns * kBoxBytes + column % kBoxColumns * 2;
        ptx::tcgen05_mma_ss(s, layouts::advance(q_tile, offset), layouts::advance(k_tile, offset), kMmaQk, step > 0);
    }
}

// O {+}= P V.
__device__ void mma_pv(TmemAddress o, TmemAddress p, uint32_t v, bool accumulate) {
    const uint64_t v_tile = layouts::smem_descriptor(v, kBoxBytes, kAtomBytes, layouts::Swizzle::k128B);
#pragma unroll
    for (int step = 0; step < kTileRows / kMmaK; ++step) {
        ptx::tcgen05_mma_ts(o, p + step * kMmaK / 2, layouts::advance(v_tile, step * kMmaK / kRowGroup * kAtomBytes),
                            kMmaPv, accumulate || step > 0);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    ladder_03_swizzle(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                       const __grid_constant__ CUtensorMap v_map, __nv_bfloat16* out, int q_len, int kv_len) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ uint64_t loaded, scores_done, output_done;
    __shared__ uint32_t tmem_slot;
    const uint32_t q_smem = ptx::smem_address(smem);
    const uint32_t k_smem = q_smem + kTileBytes;
    const uint32_t v_smem = k_smem + kTileBytes;

    const int warp = threadIdx.x / 32;
    const bool leader = warp == 0 && ptx::elect_one();
    if (leader) {
        ptx::mbarrier_init(loaded, 1);       // the leader's expect_tx
        ptx::mbarrier_init(scores_done, 1);  // commit
        ptx::mbarrier_init(output_done, 1);  // commit
        publish_barriers();
    }
    __syncwarp();
    const TmemAddress tmem = set_up<kTmemColumns>(warp == 0, tmem_slot);
    const TmemAddress s = tmem, o = tmem + 128;

    const int q_row = blockIdx.x * kTileRows;
    const int kv_row = q_row / q_len * kv_len;
    float row_max = -INFINITY, row_sum = 0.0f;

    for (int tile = 0; tile < kv_len / kTileRows; ++tile) {
        const uint32_t parity = tile & 1;
        if (leader) {
            ptx::mbarrier_arrive_expect_tx(loaded, (tile == 0 ? 3 : 2) * kTileBytes);
            if (tile == 0) {
                load_tile(q_smem, q_map, q_row, loaded);
            }
            load_tile(k_smem, k_map, kv_row + tile * kTileRows, loaded);
            load_tile(v_smem, v_map, kv_row + tile * kTileRows, loaded);
            wait_thread(loaded, parity);
            mma_qk(s, q_smem, k_smem);
            ptx::tcgen05_commit(scores_done);
        }
        __syncwarp();
        wait_warp(scores_done, parity);
        ptx::tcgen05_fence_after_thread_sync();

        const float new_max = fmaxf(row_max, tile_row_max(warp_lanes(s)) * kSoftmaxScale);
        const float factor = expf(row_max - new_max);
        row_max = new_max;
        row_sum = row_sum * factor + exponentiate(warp_lanes(s), row_max);
        if (tile > 0) {
            rescale_output(warp_lanes(o), factor);
        }
        ptx::tcgen05_wait_st();
        ptx::tcgen05_fence_before_thread_sync();
        __syncthreads();

        if (leader) {
            ptx::tcgen05_fence_after_thread_sync();
            mma_pv(o, s, v_smem, tile > 0);
            ptx::tcgen05_commit(output_done);
        }
        __syncwarp();
        wait_warp(output_done, parity);
        ptx::tcgen05_fence_after_thread_sync();
    }

    const size_t row = static_cast<size_t>(q_row) + threadIdx.x;
    store_output_row(warp_lanes(o), 1.0f / row_sum, out + row * kHeadDim);
    tear_down<kTmemColumns>(warp == 0, tmem);
}
