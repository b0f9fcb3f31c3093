// Step 15: deferred score waits. A wait after each of eight TMEM loads pays the load latency eight times. Now five loads
// share one wait, the other three fly while the first are reduced, and four chains of maxima hide fmax's own latency.
// All eight in flight at once would need 128 registers, which is all there are with 14 warps.
//
// The pipeline is step 14's.
#include "../common/softmax.cuh"
#include "rows.cuh"
#include "tiles.cuh"

using namespace ladder;

namespace {

constexpr int kQTiles = 2;
constexpr int kRowWarps = 4;  // softmax, a Q tile
constexpr int kCorrectionWarps = 4, kFirstCorrectionWarp = 8;  // for both Q tiles
constexpr int kLoadWarp = 12, kMmaWarp = 13;
constexpr int kSlots = 3;
constexpr int kThreads = 448;
constexpr int kTmemColumns = 512;  // S0 at column 0, S1 at 128, O0 at 256, O1 at 384; P over the last 64 of its S
constexpr int kTmemO = 256;
constexpr int kTmemP = 64;  // from its S
constexpr float kRescaleThreshold = 8.0f;  // log2: P stays below 256
constexpr float kScaleLog2 = kSoftmaxScale * softmax::kLog2E;

// Scores of one row: columns 32..127 stay in registers, columns 0..31 are read again.
constexpr int kLowColumns = 32;
constexpr int kLowSteps = kLowColumns / kMmaK;
constexpr int kChunk = 16;
constexpr int kHighChunks = (kTileRows - kLowColumns) / kChunk;

struct Barriers {
    uint64_t q_full[kQTiles], q_empty[kQTiles], kv_full[kSlots], kv_empty[kSlots];
    uint64_t scores_done[kQTiles], p_high_ready[kQTiles], p_low_ready[kQTiles], output_done[kQTiles];
    uint64_t factor_ready[kQTiles], sum_ready[kQTiles], sum_free[kQTiles];
};

// What a row's softmax thread tells its correction thread.
struct RowState {
    float factor[kQTiles][kTileRows];       // of O, tile by tile from the second on; 1 if the basis stays
    float inverse_sum[kQTiles][kTileRows];  // at the end
};

__device__ void initialise(Barriers& bar) {
    for (int slot = 0; slot < kSlots; ++slot) {
        ptx::mbarrier_init(bar.kv_full[slot], 1);   // expect_tx of the load thread
        ptx::mbarrier_init(bar.kv_empty[slot], 1);  // commit after the second Q tile's use
    }
    for (int q = 0; q < kQTiles; ++q) {
        ptx::mbarrier_init(bar.q_full[q], 1);                                   // expect_tx of the load thread
        ptx::mbarrier_init(bar.q_empty[q], 1);                                  // commit after the item's last QK
        ptx::mbarrier_init(bar.scores_done[q], 1);                              // commit
        ptx::mbarrier_init(bar.p_high_ready[q], kRowWarps + kCorrectionWarps);  // one a warp: P of keys 32.. is stored,
                                                                                // O rescaled, or read out at the end
        ptx::mbarrier_init(bar.p_low_ready[q], kRowWarps);                      // one a warp: P of keys 0..31 is stored
        ptx::mbarrier_init(bar.output_done[q], 1);                              // commit
        ptx::mbarrier_init(bar.factor_ready[q], kRowWarps);                     // one a warp: factor is written
        ptx::mbarrier_init(bar.sum_ready[q], kRowWarps);                        // one a warp: inverse_sum is written
        ptx::mbarrier_init(bar.sum_free[q], kCorrectionWarps);                  // one a warp: inverse_sum is read
    }
}

// The work items of this CTA: 256 rows of Q each, in steps of the grid.
struct Work {
    int q_len, kv_len, items;
    int item = blockIdx.x;
    uint32_t parity = 0;  // of the barriers that complete once an item

    __device__ bool valid() const { return item < items; }
    __device__ void next() {
        item += gridDim.x;
        parity ^= 1;
    }
    __device__ int tiles() const { return kv_len / kTileRows; }
    __device__ int q_row() const { return item * kQTiles * kTileRows; }
    __device__ int kv_row() const { return q_row() / q_len * kv_len; }
};

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
                            const CUtensorMap& v_map, uint32_t q, uint32_t kv, Work work) {
    Ring ring;
    for (; work.valid(); work.next()) {
        for (int i = 0; i < kQTiles; ++i) {
            wait_thread(bar.q_empty[i], work.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(bar.q_full[i], kTileBytes);
            load_tile(q + i * kTileBytes, q_map, work.q_row() + i * kTileRows, bar.q_full[i]);
        }
        for (int token = 0; token < 2 * work.tiles(); ++token) {
            // NOTES: the inverted parity lets the first round through: a new barrier counts its phase -1 as complete.
            wait_thread(bar.kv_empty[ring.slot], ring.parity[ring.slot] ^ 1);
            ptx::mbarrier_arrive_expect_tx(bar.kv_full[ring.slot], kTileBytes);
            load_tile(kv + ring.slot * kTileBytes, token % 2 == 0 ? k_map : v_map,
                      work.kv_row() + token / 2 * kTileRows, bar.kv_full[ring.slot]);
            ring.advance();
        }
    }
}

__device__ void mma_thread(Barriers& bar, uint32_t q, uint32_t kv, TmemAddress tmem, Work work) {
    Ring ring;
    uint32_t parity = 0;  // of the barriers that complete once a tile
    bool first_item = true;
    const auto multiply_qk = [&](int i, int slot, bool last) {
        mma_qk(tmem + i * 128, q + i * kTileBytes, kv + slot * kTileBytes);
        ptx::tcgen05_commit(bar.scores_done[i]);
        if (last) {
            ptx::tcgen05_commit(bar.q_empty[i]);
        }
        if (i == kQTiles - 1) {
            ptx::tcgen05_commit(bar.kv_empty[slot]);
        }
    };
    for (; work.valid(); work.next()) {
        const int tiles = work.tiles();
        wait_thread(bar.kv_full[ring.slot], ring.parity[ring.slot]);
        for (int i = 0; i < kQTiles; ++i) {
            wait_thread(bar.q_full[i], work.parity);
            if (!first_item) {
                wait_thread(bar.output_done[i], parity ^ 1);
                ptx::tcgen05_fence_after_thread_sync();
            }
            multiply_qk(i, ring.slot, tiles == 1);
        }
        first_item = false;
        ring.advance();

        for (int tile = 0; tile < tiles; ++tile) {
            const bool has_next = tile + 1 < tiles;
            const int v_slot = ring.slot;
            wait_thread(bar.kv_full[v_slot], ring.parity[v_slot]);
            ring.advance();
            const int k_slot = ring.slot;
            for (int i = 0; i < kQTiles; ++i) {
                const TmemAddress o = tmem + kTmemO + i * 128, p = tmem + i * 128 + kTmemP;
                const uint32_t v = kv + v_slot * kTileBytes;
                wait_thread(bar.p_high_ready[i], parity);
                ptx::tcgen05_fence_after_thread_sync();
                mma_pv(o, p, v, kLowSteps, kTileRows / kMmaK, tile > 0);
                wait_thread(bar.p_low_ready[i], parity);
                ptx::tcgen05_fence_after_thread_sync();
                mma_pv(o, p, v, 0, kLowSteps, true);
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
                    multiply_qk(i, k_slot, tile + 2 == tiles);
                }
            }
            if (has_next) {
                ring.advance();
            }
            parity ^= 1;
        }
    }
}

// Two batches of loads, one wait each: columns 0..79 arrive together, and 80..127 are in flight while those are reduced.
__device__ float load_scores(float (&high)[kHighChunks][kChunk], TmemAddress s) {
    constexpr int kFirst = kHighChunks / 2;
    const TmemAddress cached = s + kLowColumns;
    float max[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    const auto reduce = [&](const float (&v)[kChunk]) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            max[i % 4] = fmaxf(max[i % 4], v[i]);
        }
    };
    float low[2][kChunk];
    ptx::tcgen05_ld_x16(low[0], s);
    ptx::tcgen05_ld_x16(low[1], s + kChunk);
#pragma unroll
    for (int chunk = 0; chunk < kFirst; ++chunk) {
        ptx::tcgen05_ld_x16(high[chunk], cached + chunk * kChunk);
    }
    ptx::tcgen05_wait_ld(low[0], low[1], high[0], high[1], high[2]);
    reduce(low[0]);
    reduce(low[1]);
#pragma unroll
    for (int chunk = kFirst; chunk < kHighChunks; ++chunk) {
        ptx::tcgen05_ld_x16(high[chunk], cached + chunk * kChunk);
    }
#pragma unroll
    for (int chunk = 0; chunk < kFirst; ++chunk) {
        reduce(high[chunk]);
    }
    ptx::tcgen05_wait_ld(high[3], high[4], high[5]);
#pragma unroll
    for (int chunk = kFirst; chunk < kHighChunks; ++chunk) {
        reduce(high[chunk]);
    }
    return fmaxf(fmaxf(max[0], max[1]), fmaxf(max[2], max[3]));
}

// P = 2^(S * scale - row_max) of 16 scores: twelve on the MUFU, the last four on the FMA pipe. Adds to row_sum.
__device__ void exponentiate_chunk(uint32_t (&packed)[8], const float (&v)[16], float row_max, float& row_sum) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float2 p = ptx::fma_rn_ftz_f32x2(make_float2(v[2 * i], v[2 * i + 1]), make_float2(kScaleLog2, kScaleLog2),
                                         make_float2(-row_max, -row_max));
        if (i < 6) {
            p = make_float2(ptx::ex2_approx_ftz(p.x), ptx::ex2_approx_ftz(p.y));
        } else {
            p = softmax::exp2_software(p);
        }
        row_sum += p.x;
        row_sum += p.y;
        packed[i] = ptx::cvt_bf16x2(p.x, p.y);
    }
}

// P of the cached columns, over the upper half of S, of which registers hold a copy. Adds to row_sum.
__device__ void exponentiate_high(const float (&high)[kHighChunks][kChunk], TmemAddress s, float row_max,
                                  float& row_sum) {
#pragma unroll
    for (int chunk = kHighChunks - 1; chunk >= 0; --chunk) {
        uint32_t packed[8];
        exponentiate_chunk(packed, high[chunk], row_max, row_sum);
        ptx::tcgen05_st_x8(s + kTmemP + (kLowColumns + chunk * kChunk) / 2, packed);
    }
}

// P of the columns that are read again. Adds to row_sum.
__device__ void exponentiate_low(TmemAddress s, float row_max, float& row_sum) {
#pragma unroll
    for (int column = kLowColumns - kChunk; column >= 0; column -= kChunk) {
        float v[kChunk];
        ptx::tcgen05_ld_x16(v, s + column);
        ptx::tcgen05_wait_ld(v);
        uint32_t packed[8];
        exponentiate_chunk(packed, v, row_max, row_sum);
        ptx::tcgen05_st_x8(s + kTmemP + column / 2, packed);
    }
}

__device__ void softmax_warp(Barriers& bar, RowState& state, int i, TmemAddress s, Work work) {
    const int row = threadIdx.x % kTileRows;
    uint32_t parity = 0;
    for (; work.valid(); work.next()) {
        float row_max = -INFINITY, row_sum = 0.0f;
        for (int tile = 0; tile < work.tiles(); ++tile) {
            wait_warp(bar.scores_done[i], parity);
            parity ^= 1;
            ptx::tcgen05_fence_after_thread_sync();

            float high[kHighChunks][kChunk];
            const float new_max = fmaxf(row_max, load_scores(high, s) * kScaleLog2);
            float factor = 1.0f;
            if (__any_sync(0xffffffff, new_max - row_max >= kRescaleThreshold)) {
                factor = ptx::ex2_approx_ftz(row_max - new_max);
                row_max = new_max;
            }
            if (tile > 0) {
                state.factor[i][row] = factor;
                arrive_warp(bar.factor_ready[i]);
            }
            row_sum *= factor;
            exponentiate_high(high, s, row_max, row_sum);
            ptx::tcgen05_wait_st();
            arrive_warp(bar.p_high_ready[i]);
            exponentiate_low(s, row_max, row_sum);
            ptx::tcgen05_wait_st();
            arrive_warp(bar.p_low_ready[i]);
        }
        wait_warp(bar.sum_free[i], work.parity ^ 1);
        state.inverse_sum[i][row] = 1.0f / row_sum;
        arrive_warp(bar.sum_ready[i]);
    }
}

__device__ void correction_warp(Barriers& bar, const RowState& state, TmemAddress o, __nv_bfloat16* out, Work work) {
    const int row = threadIdx.x % kTileRows;
    uint32_t output_parity = 0, factor_parity = 0;
    for (; work.valid(); work.next()) {
        for (int i = 0; i < kQTiles; ++i) {
            arrive_warp(bar.p_high_ready[i]);  // the first PV overwrites O, which the last item no longer needs
        }
        for (int tile = 1; tile < work.tiles(); ++tile) {
            for (int i = 0; i < kQTiles; ++i) {
                wait_warp(bar.factor_ready[i], factor_parity);
                const float factor = state.factor[i][row];
                wait_warp(bar.output_done[i], output_parity);
                ptx::tcgen05_fence_after_thread_sync();
                if (__any_sync(0xffffffff, factor != 1.0f)) {
                    rescale_output(o + i * 128, factor);
                    ptx::tcgen05_wait_st();
                }
                arrive_warp(bar.p_high_ready[i]);
            }
            factor_parity ^= 1;
            output_parity ^= 1;
        }
        for (int i = 0; i < kQTiles; ++i) {
            wait_warp(bar.sum_ready[i], work.parity);
            const float inverse_sum = state.inverse_sum[i][row];
            arrive_warp(bar.sum_free[i]);
            wait_warp(bar.output_done[i], output_parity);
            ptx::tcgen05_fence_after_thread_sync();
            const size_t out_row = static_cast<size_t>(work.q_row()) + i * kTileRows + row;
            store_output_row(o + i * 128, inverse_sum, out + out_row * kHeadDim);
        }
        output_parity ^= 1;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    ladder_15_deferred_score_waits(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                         const __grid_constant__ CUtensorMap v_map, __nv_bfloat16* out, int q_len, int kv_len,
                         int work_items) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ Barriers bar;
    __shared__ RowState state;
    __shared__ uint32_t tmem_slot;
    const uint32_t q = ptx::smem_address(smem), kv = q + kQTiles * kTileBytes;

    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        initialise(bar);
        publish_barriers();
    }
    const TmemAddress tmem = set_up<kTmemColumns>(warp == kMmaWarp, tmem_slot);

    const Work work{q_len, kv_len, work_items};
    if (warp < kFirstCorrectionWarp) {
        const int i = warp / kRowWarps;
        softmax_warp(bar, state, i, warp_lanes(tmem + i * 128), work);
    } else if (warp < kLoadWarp) {
        correction_warp(bar, state, warp_lanes(tmem + kTmemO), out, work);
    } else if (warp == kLoadWarp) {
        if (ptx::elect_one()) {
            load_thread(bar, q_map, k_map, v_map, q, kv, work);
        }
    } else if (ptx::elect_one()) {
        mma_thread(bar, q, kv, tmem, work);
    }
    tear_down<kTmemColumns>(warp == kMmaWarp, tmem);
}
