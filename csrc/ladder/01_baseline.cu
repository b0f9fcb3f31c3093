// Step 1: baseline. One CTA computes 128 rows of O; all four warps walk through load, QK, softmax, PV together.
//
//   leader thread   TMA K,V | QK            |                      PV          |
//   all threads             .     scores_done | max, exp, P, O*=a | sync |  output_done
//
// Tiles lie unswizzled in shared memory: eight-column boxes (16 bytes wide, 128 rows), one after another. Such a box
// is a column of 8x8 core matrices; Q and K read the boxes K-major, V reads the very same layout MN-major.
// P takes the place of K, which is dead once the scores are there.
#include "ladder.cuh"

using namespace ladder;

namespace {

constexpr int kThreads = 128;
constexpr int kTmemColumns = 256;  // S at column 0, O at 128
constexpr int kBoxColumns = 8;
constexpr int kBoxBytes = kTileRows * kBoxColumns * 2;
constexpr int kCoreBytes = kRowGroup * kBoxColumns * 2;

__device__ void load_tile(uint32_t smem, const CUtensorMap& map, int row, uint64_t& barrier) {
    for (int column = 0; column < kHeadDim; column += kBoxColumns) {
        ptx::tma_load_2d(smem + column / kBoxColumns * kBoxBytes, map, column, row, barrier);
    }
}

// S = Q K^T.
__device__ void mma_qk(TmemAddress s, uint32_t q, uint32_t k) {
    const uint64_t q_tile = layouts::smem_descriptor(q, kBoxBytes, kCoreBytes, layouts::Swizzle::kNone);
    const uint64_t k_tile = layouts::smem_descriptor(k, kBoxBytes, kCoreBytes, layouts::Swizzle::kNone);
#pragma unroll
    for (int step = 0; step < kHeadDim / kMmaK; ++step) {
        const uint32_t offset = step * kMmaK / kBoxColumns * kBoxBytes;
        ptx::tcgen05_mma_ss(s, layouts::advance(q_tile, offset), layouts::advance(k_tile, offset), kMmaQk, step > 0);
    }
}

// O {+}= P V.
__device__ void mma_pv(TmemAddress o, uint32_t p, uint32_t v, bool accumulate) {
    const uint64_t p_tile = layouts::smem_descriptor(p, kBoxBytes, kCoreBytes, layouts::Swizzle::kNone);
    const uint64_t v_tile = layouts::smem_descriptor(v, kCoreBytes, kBoxBytes, layouts::Swizzle::kNone);
#pragma unroll
    for (int step = 0; step < kTileRows / kMmaK; ++step) {
        ptx::tcgen05_mma_ss(o, layouts::advance(p_tile, step * kMmaK / kBoxColumns * kBoxBytes),
                            layouts::advance(v_tile, step * kMmaK / kRowGroup * kCoreBytes), kMmaPv,
                            accumulate || step > 0);
    }
}

__device__ float tile_row_max(TmemAddress s) {
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

// P = exp(S * scale - row_max) into shared memory, its row sum as result.
__device__ float exponentiate(TmemAddress s, float row_max, uint32_t p_row) {
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
        const uint32_t box = p_row + column / kBoxColumns * kBoxBytes;
        ptx::st_shared_v4(box, packed[0], packed[1], packed[2], packed[3]);
        ptx::st_shared_v4(box + kBoxBytes, packed[4], packed[5], packed[6], packed[7]);
    }
    return row_sum;
}

__device__ void rescale_output(TmemAddress o, float factor) {
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

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    ladder_01_baseline(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
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
        row_sum = row_sum * factor + exponentiate(warp_lanes(s), row_max, k_smem + threadIdx.x * 16);
        if (tile > 0) {
            rescale_output(warp_lanes(o), factor);
            ptx::tcgen05_wait_st();
        }
        ptx::fence_proxy_async_smem();
        ptx::tcgen05_fence_before_thread_sync();
        __syncthreads();

        if (leader) {
            ptx::tcgen05_fence_after_thread_sync();
            mma_pv(o, k_smem, v_smem, tile > 0);
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
