// The producer's warps: one loads by TMA, one clears the rows of V past a key length, one computes gates.
#pragma once

#include "../common/gate.cuh"
#include "profile.cuh"
#include "tile.cuh"

namespace videoattn::hopper {

// Keys of a step come before the values of the step before it: the order in which the consumers need them.
template <typename C>
__device__ __forceinline__ void load(const Shared<C>& smem, const CUtensorMap& q_map, const CUtensorMap& k_map,
                                     const CUtensorMap& v_map, const Args& args) {
    Recorder recorder(args, consumers<C>() + 1, 0, true);
    Ring<C> keys, values;
    uint32_t queries = 0;  // tiles whose queries were asked for
    int value_row = -1, value_head = 0, value_batch = 0;
    const auto load_values = [&] {
        recorder.enter(Phase::kValueBuffer);
        mbarrier_wait(smem.v_empty(values.stage), values.phase ^ 1);
        recorder.enter(Phase::kLoad);
        mbarrier_arrive_expect_tx(smem.v_full(values.stage), C::kKvBytes);
        tma_load(smem.v(values.stage), &v_map, smem.v_full(values.stage), value_row, value_head, value_batch);
        values.advance();
    };
    const auto load_queries = [&](const Tile& tile) {
        const int buffer = queries % C::kQueryBuffers;
        for (int group = 0; group < consumers<C>(); ++group) {
            recorder.enter(Phase::kQueryBuffer);
            mbarrier_wait(smem.q_empty(group, buffer), queries / C::kQueryBuffers & 1 ^ 1);
            recorder.enter(Phase::kLoad);
            mbarrier_arrive_expect_tx(smem.q_full(group, buffer), C::kGroupBytes);
            tma_load(smem.q(group, buffer), &q_map, smem.q_full(group, buffer), tile.row + group * kGroupRows,
                     tile.head, tile.batch);
        }
        ++queries;
    };
    const int first = first_tile<C>(args), end = end_tile<C>(args);
    for (int index = first; index < end; index += tile_step<C>()) {
        const Tile tile = locate<C>(args, index);
        if (index > first && same_keys<C>(args, index - 1, index)) {
            if (tile.blocks > 0) load_queries(tile);
            continue;
        }
        for (int block = tile.blocks - 1; block >= 0; --block) {
            recorder.enter(Phase::kKeyBuffer);
            mbarrier_wait(smem.k_empty(keys.stage), keys.phase ^ 1);
            recorder.enter(Phase::kLoad);
            mbarrier_arrive_expect_tx(smem.k_full(keys.stage), C::kKvBytes);
            const int row = (tile.first_block + block) * C::kTileN;
            tma_load(smem.k(keys.stage), &k_map, smem.k_full(keys.stage), row, tile.head, tile.batch);
            keys.advance();
            if (block == tile.blocks - 1) load_queries(tile);
            if (value_row >= 0) load_values();
            value_row = row;
            value_head = tile.head;
            value_batch = tile.batch;
        }
        // Later tiles of the head load no keys, and these values must not wait for the next head's.
        if (C::kResident && value_row >= 0) {
            load_values();
            value_row = -1;
        }
    }
    if (value_row >= 0) load_values();
    recorder.enter(Phase::kEnd);
}

// The gates of every tile, for the consumers to multiply by as they store it.
template <typename C, typename Element>
__device__ __forceinline__ void fetch_gates(const Shared<C>& smem, const Args& args) {
    const int lane = threadIdx.x % 32;
    uint32_t phase = 1;
    const int end = end_tile<C>(args);
    for (int index = first_tile<C>(args); index < end; index += tile_step<C>()) {
        const Tile tile = locate<C>(args, index);
        if (tile.blocks == 0) continue;
        uint32_t gates[2 * C::kConsumers];  // all are there before the first is waited for
#pragma unroll
        for (int i = 0; i < 2 * C::kConsumers; ++i) {
            // A row past q_len repeats the last one's; nothing of it is stored.
            const int query = min(tile.row + 32 * i + lane, args.q_len - 1);
            gates[i] = gate_of<Element>(args.gate, tile.batch, query, tile.head);
        }
#pragma unroll
        for (int group = 0; group < C::kConsumers; ++group) {
            if (group >= consumers<C>()) break;
            mbarrier_wait(smem.gates_empty(group), phase);
            store_shared(smem.gates(group) + 4 * lane, gates[2 * group]);
            store_shared(smem.gates(group) + 4 * (lane + 32), gates[2 * group + 1]);
            mbarrier_arrive(smem.gates_full(group));
        }
        phase ^= 1;
    }
}

// Follows every value tile of a launch with key lengths, so that it can never mistake one phase for another.
template <typename C>
__device__ __forceinline__ void clear_value_tails(const Shared<C>& smem, const Args& args) {
    constexpr int kBoxRows = C::kTileN * (C::kHeadDim / 64);
    const int lane = threadIdx.x % 32;
    Ring<C> values;
    const int first = first_tile<C>(args), end = end_tile<C>(args);
    for (int index = first; index < end; index += tile_step<C>()) {
        if (index > first && same_keys<C>(args, index - 1, index)) continue;
        const Tile tile = locate<C>(args, index);
        for (int block = 0; block < tile.blocks; ++block) {
            mbarrier_wait(smem.v_full(values.stage), values.phase);
            if (block == 0 && tile.clear) {
                // 128-byte rows of 64 columns, eight 16-byte pieces each; the swizzle stays inside a row.
                for (int piece = lane; piece < 8 * kBoxRows; piece += 32)
                    if (piece / 8 % C::kTileN >= tile.tail) store_zero16(smem.v(values.stage) + 16 * piece);
                fence_proxy_async_smem();
                __syncwarp();
                if (lane == 0) mbarrier_arrive(smem.v_clean(values.stage));
            }
            if (lane == 0) mbarrier_arrive(smem.v_empty(values.stage));
            values.advance();
        }
    }
}

}  // namespace videoattn::hopper
