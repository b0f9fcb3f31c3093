// Step 8: hardware exp2. The softmax moves to base 2: log2(e) joins the scale, scale and maximum become one FMA, and
// ex2.approx.ftz is the exponential itself, without expf's range reduction around it.
//
// The pipeline is step 7's.
#include "../common/softmax.cuh"
#include "rows.cuh"
#include "tiles.cuh"

using namespace ladder;

namespace {

constexpr int kQTiles = 2;
constexpr int kRowWarps = 4;  // a Q tile
constexpr int kLoadWarp = 8, kMmaWarp = 9;
constexpr int kSlots = 3;
constexpr int kThreads = 320;
constexpr int kTmemColumns = 512;  // S0 at column 0, S1 at 128, O0 at 256, O1 at 384; P over the first 64 of its S
constexpr int kTmemO = 256;
constexpr float kScaleLog2 = kSoftmaxScale * softmax::kLog2E;

struct Barriers {
    uint64_t q_full, kv_full[kSlots], kv_empty[kSlots], scores_done[kQTiles], p_ready[kQTiles], output_done[kQTiles];
};

__device__ void initialise(Barriers& bar) {
    ptx::mbarrier_init(bar.q_full, 1);  // expect_tx of the load thread
    for (int slot = 0; slot < kSlots; ++slot) {
        ptx::mbarrier_init(bar.kv_full[slot], 1);   // expect_tx of the load thread
        ptx::mbarrier_init(bar.kv_empty[slot], 1);  // commit after the second Q tile's use
    }
    for (int q = 0; q < kQTiles; ++q) {
        ptx::mbarrier_init(bar.scores_done[q], 1);      // commit
        ptx::mbarrier_init(bar.p_ready[q], kRowWarps);  // one a warp: P is stored and O rescaled
        ptx::mbarrier_init(bar.output_done[q], 1);      // commit
    }
}

// Where a role stands in the ring: the slot of the next token, and the parity each slot is waited on next.
struct Ring {
    int slot = 0;
    uint32_t parity[kSlots] = {};

    __device__ void advance() {
        parity[slot] ^= 1;
        slot = slot + 1 == kSlots ? 0 : slot + 1;
    }
};

__device__ void load_thread(Barriers& bar, const CUtensorMap& q_map, const CUtensorMap& k_map,
                            const CUtensorMap& v_map, uint32_t q, uint32_t kv, int q_row, int kv_row, int tiles) {
    ptx::mbarrier_arrive_expect_tx(bar.q_full, kQTiles * kTileBytes);
    load_tile(q, q_map, q_row, bar.q_full);
    load_tile(q + kTileBytes, q_map, q_row + kTileRows, bar.q_full);
    Ring ring;
    for (int token = 0; token < 2 * tiles; ++token) {
        // NOTES: the inverted parity lets the first round through: a new barrier counts its phase -1 as complete.
        wait_thread(bar.kv_empty[ring.slot], ring.parity[ring.slot] ^ 1);
        ptx::mbarrier_arrive_expect_tx(bar.kv_full[ring.slot], kTileBytes);
        load_tile(kv + ring.slot * kTileBytes, token % 2 == 0 ? k_map : v_map, kv_row + token / 2 * kTileRows,
                  bar.kv_full[ring.slot]);
        ring.advance();
    }
}

__device__ void mma_thread(Barriers& bar, uint32_t q, uint32_t kv, TmemAddress tmem, int tiles) {
    Ring ring;
    wait_thread(bar.q_full, 0);
    wait_thread(bar.kv_full[ring.slot], ring.parity[ring.slot]);
    for (int i = 0; i < kQTiles; ++i) {
        mma_qk(tmem + i * 128, q + i * kTileBytes, kv + ring.slot * kTileBytes);
        ptx::tcgen05_commit(bar.scores_done[i]);
    }
    ptx::tcgen05_commit(bar.kv_empty[ring.slot]);
    ring.advance();

    for (int tile = 0; tile < tiles; ++tile) {
        const uint32_t parity = tile & 1;
        const bool has_next = tile + 1 < tiles;
        const int v_slot = ring.slot;
        wait_thread(bar.kv_full[v_slot], ring.parity[v_slot]);
        ring.advance();
        const int k_slot = ring.slot;
        for (int i = 0; i < kQTiles; ++i) {
            wait_thread(bar.p_ready[i], parity);
            ptx::tcgen05_fence_after_thread_sync();
            mma_pv(tmem + kTmemO + i * 128, tmem + i * 128, kv + v_slot * kTileBytes, tile > 0);
            ptx::tcgen05_commit(bar.output_done[i]);
            if (i == kQTiles - 1) {
                ptx::tcgen05_commit(bar.kv_empty[v_slot]);
            }
            if (has_next) {
                if (i == 0) {
                    wait_thread(bar.kv_full[k_slot], ring.parity[k_slot]);
                }
                wait_thread(bar.output_done[i], parity);
                ptx::tcgen05_fence_after_thread_sync();
                mma_qk(tmem + i * 128, q + i * kTileBytes, kv + k_slot * kTileBytes);
                ptx::tcgen05_commit(bar.scores_done[i]);
            }
        }
        if (has_next) {
            ptx::tcgen05_commit(bar.kv_empty[k_slot]);
            ring.advance();
        }
    }
}

// P = 2^(S * scale - row_max) over the columns of S already read; its row sum as result.
__device__ float exponentiate_log2(TmemAddress s, float row_max) {
    float row_sum = 0.0f;
    for (int column = 0; column < kTileRows; column += 16) {
        float v[16];
        ptx::tcgen05_ld_x16(v, s + column);
        ptx::tcgen05_wait_ld(v);
        uint32_t packed[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float p0 = ptx::ex2_approx_ftz(fmaf(v[2 * i], kScaleLog2, -row_max));
            const float p1 = ptx::ex2_approx_ftz(fmaf(v[2 * i + 1], kScaleLog2, -row_max));
            row_sum += p0;
            row_sum += p1;
            packed[i] = ptx::cvt_bf16x2(p0, p1);
        }
        ptx::tcgen05_st_x8(s + column / 2, packed);
    }
    return row_sum;
}

__device__ void row_warp(Barriers& bar, int i, TmemAddress s, TmemAddress o, __nv_bfloat16* out_row, int tiles) {
    float row_max = -INFINITY, row_sum = 0.0f;
    for (int tile = 0; tile < tiles; ++tile) {
        const uint32_t parity = tile & 1;
        wait_warp(bar.scores_done[i], parity);
        ptx::tcgen05_fence_after_thread_sync();

        const float new_max = fmaxf(row_max, tile_row_max(s) * kScaleLog2);
        const float factor = ptx::ex2_approx_ftz(row_max - new_max);
        row_max = new_max;
        row_sum = row_sum * factor + exponentiate_log2(s, row_max);
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
    ladder_08_hardware_exp2(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                          const __grid_constant__ CUtensorMap v_map, __nv_bfloat16* out, int q_len, int kv_len) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ Barriers bar;
    __shared__ uint32_t tmem_slot;
    const uint32_t q = ptx::smem_address(smem), kv = q + kQTiles * kTileBytes;

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
            load_thread(bar, q_map, k_map, v_map, q, kv, q_row, kv_row, tiles);
        }
    } else if (ptx::elect_one()) {
        mma_thread(bar, q, kv, tmem, tiles);
    }
    tear_down<kTmemColumns>(warp == kMmaWarp, tmem);
}
