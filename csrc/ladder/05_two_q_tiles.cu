// Step 5: two Q tiles a CTA. Each K and V tile serves 256 queries, and each Q tile has rows warps of its own, so that
// the rows of one tile run beside the MMAs of the other. S, P and O exist twice: tensor memory is full.
//
//   load   K,V(0) |                                                               | K,V(1)
//   mma           | QK0(0)  QK1(0)  |              | PV0(0)  | PV1(0)             |
//   row 0-3               | softmax0(0)            |
//   row 4-7                         | softmax1(0)            |
//            kv_full      scores_done[q]      p_ready[q]     output_done[q]
#include "rows.cuh"
#include "tiles.cuh"

using namespace ladder;

namespace {

constexpr int kQTiles = 2;
constexpr int kRowWarps = 4;  // a Q tile
constexpr int kLoadWarp = 8, kMmaWarp = 9;
constexpr int kThreads = 320;
constexpr int kTmemColumns = 512;  // S0 at column 0, S1 at 128, O0 at 256, O1 at 384; P over the first 64 of its S
constexpr int kTmemO = 256;

struct Barriers {
    uint64_t q_full, kv_full, scores_done[kQTiles], p_ready[kQTiles], output_done[kQTiles];
};

__device__ void initialise(Barriers& bar) {
    ptx::mbarrier_init(bar.q_full, 1);   // expect_tx of the load thread
    ptx::mbarrier_init(bar.kv_full, 1);  // the same
    for (int q = 0; q < kQTiles; ++q) {
        ptx::mbarrier_init(bar.scores_done[q], 1);      // commit
        ptx::mbarrier_init(bar.p_ready[q], kRowWarps);  // one a warp: P is stored and O rescaled
        ptx::mbarrier_init(bar.output_done[q], 1);      // commit
    }
}

__device__ void load_thread(Barriers& bar, const CUtensorMap& q_map, const CUtensorMap& k_map,
                            const CUtensorMap& v_map, uint32_t q, uint32_t k, uint32_t v, int q_row, int kv_row,
                            int tiles) {
    ptx::mbarrier_arrive_expect_tx(bar.q_full, kQTiles * kTileBytes);
    load_tile(q, q_map, q_row, bar.q_full);
    load_tile(q + kTileBytes, q_map, q_row + kTileRows, bar.q_full);
    for (int tile = 0; tile < tiles; ++tile) {
        if (tile > 0) {
            wait_thread(bar.output_done[1], (tile - 1) & 1);  // its commit covers the MMAs of Q tile 0 too
        }
        ptx::mbarrier_arrive_expect_tx(bar.kv_full, 2 * kTileBytes);
        load_tile(k, k_map, kv_row + tile * kTileRows, bar.kv_full);
        load_tile(v, v_map, kv_row + tile * kTileRows, bar.kv_full);
    }
}

__device__ void mma_thread(Barriers& bar, uint32_t q, uint32_t k, uint32_t v, TmemAddress tmem, int tiles) {
    wait_thread(bar.q_full, 0);
    for (int tile = 0; tile < tiles; ++tile) {
        const uint32_t parity = tile & 1;
        wait_thread(bar.kv_full, parity);
        for (int i = 0; i < kQTiles; ++i) {
            if (tile > 0) {
                // NOTES: S(tile) overwrites P(tile - 1). The ISA orders two MMAs only if they share the accumulator.
                wait_thread(bar.output_done[i], parity ^ 1);
                ptx::tcgen05_fence_after_thread_sync();
            }
            mma_qk(tmem + i * 128, q + i * kTileBytes, k);
            ptx::tcgen05_commit(bar.scores_done[i]);
        }
        for (int i = 0; i < kQTiles; ++i) {
            wait_thread(bar.p_ready[i], parity);
            ptx::tcgen05_fence_after_thread_sync();
            mma_pv(tmem + kTmemO + i * 128, tmem + i * 128, v, tile > 0);
            ptx::tcgen05_commit(bar.output_done[i]);
        }
    }
}

__device__ void row_warp(Barriers& bar, int i, TmemAddress s, TmemAddress o, __nv_bfloat16* out_row, int tiles) {
    float row_max = -INFINITY, row_sum = 0.0f;
    for (int tile = 0; tile < tiles; ++tile) {
        const uint32_t parity = tile & 1;
        wait_warp(bar.scores_done[i], parity);
        ptx::tcgen05_fence_after_thread_sync();

        const float new_max = fmaxf(row_max, tile_row_max(s) * kSoftmaxScale);
        const float factor = expf(row_max - new_max);
        row_max = new_max;
        row_sum = row_sum * factor + exponentiate(s, row_max);
        if (tile > 0) {
            wait_warp(bar.output_done[i], parity ^ 1);
            ptx::tcgen05_fence_after_thread_sync();
            rescale_output(o, factor);
        }
        ptx::tcgen05_wait_st();
        arrive_warp(bar.p_ready[i]);
    }
    wait_warp(bar.output_done[i], (tiles - 1) & 1);
    ptx::tcgen05_fence_after_thread_sync();
    store_output_row(o, 1.0f / row_sum, out_row);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    ladder_05_two_q_tiles(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                          const __grid_constant__ CUtensorMap v_map, __nv_bfloat16* out, int q_len, int kv_len) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ Barriers bar;
    __shared__ uint32_t tmem_slot;
    const uint32_t q = ptx::smem_address(smem), k = q + kQTiles * kTileBytes, v = k + kTileBytes;

    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        initialise(bar);
        publish_barriers();
    }
    const TmemAddress tmem = set_up<kTmemColumns>(warp == kMmaWarp, tmem_slot);

    const int q_row = blockIdx.x * kQTiles * kTileRows;
    const int kv_row = q_row / q_len * kv_len;
    const int tiles = kv_len / kTileRows;
    if (warp < kQTiles * kRowWarps) {
        const int i = warp / kRowWarps;
        const size_t row = static_cast<size_t>(q_row) + threadIdx.x;
        row_warp(bar, i, warp_lanes(tmem + i * 128), warp_lanes(tmem + kTmemO + i * 128), out + row * kHeadDim, tiles);
    } else if (warp == kLoadWarp) {
        if (ptx::elect_one()) {
            load_thread(bar, q_map, k_map, v_map, q, k, v, q_row, kv_row, tiles);
        }
    } else if (ptx::elect_one()) {
        mma_thread(bar, q, k, v, tmem, tiles);
    }
    tear_down<kTmemColumns>(warp == kMmaWarp, tmem);
}
