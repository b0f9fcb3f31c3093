// Step 4: warp specialisation. Rows, loads and MMA issue become separate warps that meet only at barriers. Nothing
// overlaps yet: there is one K/V slot and one Q tile. But from here on a role waits for what it needs, not for the CTA.
//
//   load   K,V(0) |                                        | K,V(1) |
//   mma           | QK(0)        |            | PV(0)      |        | QK(1) ...
//   row 0-3                      | softmax(0) |                             | softmax(1) ...
//            kv_full      scores_done      p_ready    output_done
#include "rows.cuh"
#include "tiles.cuh"

using namespace ladder;

namespace {

constexpr int kRowWarps = 4, kLoadWarp = 4, kMmaWarp = 5;
constexpr int kThreads = 192;
constexpr int kTmemColumns = 256;  // S at column 0, P over its first 64, O at 128

struct Barriers {
    uint64_t q_full, kv_full, scores_done, p_ready, output_done;
};

__device__ void initialise(Barriers& bar) {
    ptx::mbarrier_init(bar.q_full, 1);           // expect_tx of the load thread
    ptx::mbarrier_init(bar.kv_full, 1);          // the same
    ptx::mbarrier_init(bar.scores_done, 1);      // commit
    ptx::mbarrier_init(bar.p_ready, kRowWarps);  // one a warp: P is stored and O rescaled
    ptx::mbarrier_init(bar.output_done, 1);      // commit
}

__device__ void load_thread(Barriers& bar, const CUtensorMap& q_map, const CUtensorMap& k_map,
                            const CUtensorMap& v_map, uint32_t q, uint32_t k, uint32_t v, int q_row, int kv_row,
                            int tiles) {
    ptx::mbarrier_arrive_expect_tx(bar.q_full, kTileBytes);
    load_tile(q, q_map, q_row, bar.q_full);
    for (int tile = 0; tile < tiles; ++tile) {
        if (tile > 0) {
            wait_thread(bar.output_done, (tile - 1) & 1);
        }
        ptx::mbarrier_arrive_expect_tx(bar.kv_full, 2 * kTileBytes);
        load_tile(k, k_map, kv_row + tile * kTileRows, bar.kv_full);
        load_tile(v, v_map, kv_row + tile * kTileRows, bar.kv_full);
    }
}

__device__ void mma_thread(Barriers& bar, uint32_t q, uint32_t k, uint32_t v, TmemAddress s, TmemAddress o,
                           int tiles) {
    wait_thread(bar.q_full, 0);
    for (int tile = 0; tile < tiles; ++tile) {
        const uint32_t parity = tile & 1;
        wait_thread(bar.kv_full, parity);
        if (tile > 0) {
            // NOTES: S(tile) overwrites P(tile - 1). The ISA orders two MMAs only if they share the accumulator.
            wait_thread(bar.output_done, parity ^ 1);
            ptx::tcgen05_fence_after_thread_sync();
        }
        mma_qk(s, q, k);
        ptx::tcgen05_commit(bar.scores_done);
        wait_thread(bar.p_ready, parity);
        ptx::tcgen05_fence_after_thread_sync();
        mma_pv(o, s, v, tile > 0);
        ptx::tcgen05_commit(bar.output_done);
    }
}

__device__ void row_warp(Barriers& bar, TmemAddress s, TmemAddress o, __nv_bfloat16* out_row, int tiles) {
    float row_max = -INFINITY, row_sum = 0.0f;
    for (int tile = 0; tile < tiles; ++tile) {
        const uint32_t parity = tile & 1;
        wait_warp(bar.scores_done, parity);
        ptx::tcgen05_fence_after_thread_sync();

        const float new_max = fmaxf(row_max, tile_row_max(s) * kSoftmaxScale);
        const float factor = expf(row_max - new_max);
        row_max = new_max;
        row_sum = row_sum * factor + exponentiate(s, row_max);
        if (tile > 0) {
            wait_warp(bar.output_done, parity ^ 1);
            ptx::tcgen05_fence_after_thread_sync();
            rescale_output(o, factor);
        }
        ptx::tcgen05_wait_st();
        arrive_warp(bar.p_ready);
    }
    wait_warp(bar.output_done, (tiles - 1) & 1);
    ptx::tcgen05_fence_after_thread_sync();
    store_output_row(o, 1.0f / row_sum, out_row);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    ladder_04_warp_specialisation(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                                  const __grid_constant__ CUtensorMap v_map, __nv_bfloat16* out, int q_len,
                                  int kv_len) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ Barriers bar;
    __shared__ uint32_t tmem_slot;
    const uint32_t q = ptx::smem_address(smem), k = q + kTileBytes, v = k + kTileBytes;

    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        initialise(bar);
        publish_barriers();
    }
    const TmemAddress tmem = set_up<kTmemColumns>(warp == kMmaWarp, tmem_slot);
    const TmemAddress s = tmem, o = tmem + 128;

    const int q_row = blockIdx.x * kTileRows;
    const int kv_row = q_row / q_len * kv_len;
    const int tiles = kv_len / kTileRows;
    if (warp < kRowWarps) {
        const size_t row = static_cast<size_t>(q_row) + threadIdx.x;
        row_warp(bar, warp_lanes(s), warp_lanes(o), out + row * kHeadDim, tiles);
    } else if (warp == kLoadWarp) {
        if (ptx::elect_one()) {
            load_thread(bar, q_map, k_map, v_map, q, k, v, q_row, kv_row, tiles);
        }
    } else if (ptx::elect_one()) {
        mma_thread(bar, q, k, v, s, o, tiles);
    }
    tear_down<kTmemColumns>(warp == kMmaWarp, tmem);
}
