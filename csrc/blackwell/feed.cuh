// The roles of one thread or one warp that keep the tensor core fed: TMA loads, clearing of V, MMA issue.
#pragma once

#include "work.cuh"

namespace videoattn::blackwell {

constexpr int kBoxColumns = 64;
constexpr int kRowBytes = kBoxColumns * 2;
constexpr int kBoxBytes = kTileRows * kRowBytes;
constexpr int kAtomRows = 8, kAtomBytes = kAtomRows * kRowBytes;

template <typename C>
__device__ __forceinline__ void load_thread(Shared<C>& shared, uint32_t smem, const CUtensorMap& q_map,
                                            const CUtensorMap& k_map, const CUtensorMap& v_map, const Args& args) {
    Ring<C> ring;
    uint32_t q_parity[kQTiles] = {0, 0};
    ptx::prefetch_tensormap(q_map);
    ptx::prefetch_tensormap(k_map);
    ptx::prefetch_tensormap(v_map);
    for (Work work(args); work.valid(); work.next()) {
        if (work.tiles == 0) {
            continue;
        }
#pragma unroll
        for (int q = 0; q < kQTiles; ++q) {
            if (q < work.q_tiles) {
                // NOTES: inverted parity: a new barrier counts its phase -1 as complete.
                ptx::mbarrier_wait(shared.q_empty[q], q_parity[q] ^ 1, "q_empty", q);
                q_parity[q] ^= 1;
                ptx::mbarrier_arrive_expect_tx(shared.q_full[q], C::kTileBytes);
                ptx::tma_load_5d(smem + C::kQOffset + q * C::kTileBytes, q_map, 0, work.q_row + q * kTileRows, 0,
                                 work.head, work.batch, shared.q_full[q]);
            }
        }
        for (int token = 0; token < 2 * work.tiles; ++token) {
            // K0, K1, V0, K2, V1, ...: after the first, odd tokens are K and even ones V, but the last is V too.
            const bool is_v = token > 0 && (token % 2 == 0 || token == 2 * work.tiles - 1);
            const int tile = work.first_tile + (is_v ? (token - 1) / 2 : (token + 1) / 2);
            ptx::mbarrier_wait(shared.kv_empty[ring.slot], ring.parity ^ 1, "kv_empty", ring.slot);
            ptx::mbarrier_arrive_expect_tx(shared.kv_full[ring.slot], C::kTileBytes);
            ptx::tma_load_5d(smem + C::kKvOffset + ring.slot * C::kTileBytes, is_v ? v_map : k_map, 0,
                             tile * kTileRows, 0, work.head, work.batch, shared.kv_full[ring.slot]);
            ring.advance();
        }
    }
}

// One warp, in launches with key lengths. It passes every token, so that its barrier phases can't run apart, and
// zeroes the rows of V between the length and the end of their K step.
template <typename C>
__device__ __forceinline__ void clear_warp(Shared<C>& shared, uint32_t smem, const Args& args) {
    constexpr int kPieces = C::kHeadDim * 2 / 16;  // 16-byte pieces of a row, over all boxes
    Ring<C> ring;
    for (Work work(args); work.valid(); work.next()) {
        for (int token = 0; token < 2 * work.tiles; ++token) {
            wait_warp(shared.kv_full[ring.slot], ring.parity, "kv_full (clear)", ring.slot);
            const bool clears = token == 2 * work.tiles - 1 && work.needs_clearing();
            if (clears) {
                const uint32_t v = smem + C::kKvOffset + ring.slot * C::kTileBytes;
                const int first = work.tail();
                const int end = (first + layouts::kMmaK - 1) / layouts::kMmaK * layouts::kMmaK;
                for (int i = threadIdx.x % 32; i < (end - first) * kPieces; i += 32) {
                    const int row = first + i / kPieces, piece = i % kPieces;
                    // A row lies within its 128-byte line whatever the swizzle does to it.
                    ptx::st_shared_v4(v + piece / 8 * kBoxBytes + row * kRowBytes + piece % 8 * 16, 0, 0, 0, 0);
                }
                ptx::fence_proxy_async_smem();
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) {
                if (clears) {
                    ptx::mbarrier_arrive(shared.v_clean[ring.slot]);
                }
                ptx::mbarrier_arrive(shared.kv_empty[ring.slot]);
            }
            ring.advance();
        }
    }
}

// S = Q K^T.
template <typename C, layouts::InputType kType>
__device__ __forceinline__ void mma_qk(TmemAddress s, uint32_t q, uint32_t k) {
    constexpr uint32_t kInstruction =
        layouts::instruction_descriptor(kTileRows, kTileRows, kType, layouts::Major::kK);
    const uint64_t q_tile = layouts::smem_descriptor(q, 16, kAtomBytes, layouts::Swizzle::k128B);
    const uint64_t k_tile = layouts::smem_descriptor(k, 16, kAtomBytes, layouts::Swizzle::k128B);
#pragma unroll
    for (int column = 0; column < C::kHeadDim; column += layouts::kMmaK) {
        const uint32_t offset = column / kBoxColumns * kBoxBytes + column % kBoxColumns * 2;
        ptx::tcgen05_mma_ss(s, layouts::advance(q_tile, offset), layouts::advance(k_tile, offset), kInstruction,
                            column > 0);
    }
}

// O {+}= P V over the first `keys` keys, rounded up to whole K steps.
template <typename C, layouts::InputType kType>
__device__ __forceinline__ void mma_pv(TmemAddress o, TmemAddress p, uint32_t v, int keys, bool accumulate) {
    constexpr uint32_t kInstruction =
        layouts::instruction_descriptor(kTileRows, C::kHeadDim, kType, layouts::Major::kMn);
    const uint64_t v_tile = layouts::smem_descriptor(v, kBoxBytes, kAtomBytes, layouts::Swizzle::k128B);
#pragma unroll
    for (int key = 0; key < kTileRows; key += layouts::kMmaK) {
        if (key < keys) {
            ptx::tcgen05_mma_ts(o, p + key / 2, layouts::advance(v_tile, key / kAtomRows * kAtomBytes), kInstruction,
                                accumulate || key > 0);
        }
    }
}

template <typename C, layouts::InputType kType>
__device__ __forceinline__ void mma_thread(Shared<C>& shared, uint32_t smem, TmemAddress tmem, const Args& args) {
    Ring<C> ring;
    // The next wait's parity for each barrier, a bit of one register: with four of them ptxas spills for sm_103a.
    constexpr int kClean = 0, kQFull = C::kSlots, kPReady = kQFull + kQTiles, kScoresRead = kPReady + kQTiles;
    uint32_t parities = 1u << kScoresRead;
    const auto parity = [&](int bit) {
        const uint32_t now = parities >> bit & 1;
        parities ^= 1u << bit;
        return now;
    };
    const auto kv = [&](int slot) { return smem + C::kKvOffset + slot * C::kTileBytes; };
    const auto multiply_qk = [&](int q, int slot, bool last) {
        ptx::mbarrier_wait(shared.scores_read, parity(kScoresRead), "scores_read");
        ptx::tcgen05_fence_after_thread_sync();
        mma_qk<C, kType>(tmem, smem + C::kQOffset + q * C::kTileBytes, kv(slot));
        ptx::tcgen05_commit(shared.scores_done[q]);
        if (last) {
            ptx::tcgen05_commit(shared.q_empty[q]);
        }
    };
    for (Work work(args); work.valid(); work.next()) {
        if (work.tiles == 0) {
            continue;
        }
        ptx::mbarrier_wait(shared.kv_full[ring.slot], ring.parity, "kv_full (first K)", ring.slot);
        for (int q = 0; q < work.q_tiles; ++q) {
            ptx::mbarrier_wait(shared.q_full[q], parity(kQFull + q), "q_full", q);
            multiply_qk(q, ring.slot, work.tiles == 1);
        }
        ptx::tcgen05_commit(shared.kv_empty[ring.slot]);
        ring.advance();

        for (int tile = 0; tile < work.tiles; ++tile) {
            const bool last = tile + 1 == work.tiles;
            int k_slot = 0;
            if (!last) {
                k_slot = ring.slot;
                ptx::mbarrier_wait(shared.kv_full[k_slot], ring.parity, "kv_full (K)", k_slot);
                ring.advance();
            }
            const int v_slot = ring.slot;
            const uint32_t v_parity = ring.parity;
            ring.advance();
            for (int q = 0; q < work.q_tiles; ++q) {
                if (!last) {
                    multiply_qk(q, k_slot, tile + 2 == work.tiles);
                    if (q + 1 == work.q_tiles) {
                        ptx::tcgen05_commit(shared.kv_empty[k_slot]);
                    }
                }
                if (q == 0) {
                    ptx::mbarrier_wait(shared.kv_full[v_slot], v_parity, "kv_full (V)", v_slot);
                    if (last && work.needs_clearing()) {
                        ptx::mbarrier_wait(shared.v_clean[v_slot], parity(kClean + v_slot), "v_clean", v_slot);
                    }
                }
                ptx::mbarrier_wait(shared.p_ready[q], parity(kPReady + q), "p_ready", q);
                ptx::tcgen05_fence_after_thread_sync();
                mma_pv<C, kType>(tmem + C::kTmemO + q * C::kHeadDim, tmem + C::kTmemP + q * kTileRows / 2, kv(v_slot),
                                 last ? work.tail() : kTileRows, tile > 0);
                ptx::tcgen05_commit(shared.output_done[q]);
            }
            ptx::tcgen05_commit(shared.kv_empty[v_slot]);
        }
    }
}

}  // namespace videoattn::blackwell
