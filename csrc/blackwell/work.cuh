// What the warp roles share: barriers and row state in shared memory, the work items, the K/V ring.
#pragma once

#include "../common/layouts.cuh"
#include "../common/ptx.cuh"
#include "config.h"

namespace videoattn::blackwell {

using ptx::TmemAddress;

constexpr int kWarps = 4;  // of a role that has one thread a row

// What a row's softmax thread tells its correction thread: O's factor at each tile of an item from the second on, then
// the row sum. Messages alternate between two places, because one may be written before the last is read.
struct Messages {
    float value[2][kTileRows];
};

template <typename C>
struct Shared {
    uint64_t q_full[kQTiles], q_empty[kQTiles];
    uint64_t kv_full[C::kSlots], kv_empty[C::kSlots], v_clean[C::kSlots];
    uint64_t scores_done[kQTiles], scores_read, p_ready[kQTiles], output_done[kQTiles];
    uint64_t message_ready[kQTiles][2];
    Messages messages[kQTiles];
    uint32_t tmem_slot;

    __device__ void initialise(bool has_lengths) {
        for (int slot = 0; slot < C::kSlots; ++slot) {
            ptx::mbarrier_init(kv_full[slot], 1);                     // expect_tx of the load thread
            ptx::mbarrier_init(kv_empty[slot], has_lengths ? 2 : 1);  // commit; and the clearing warp, which sees all
            ptx::mbarrier_init(v_clean[slot], 1);                     // the clearing warp
        }
        ptx::mbarrier_init(scores_read, kWarps);  // a lane of each warp of the Q tile whose scores S holds
        for (int q = 0; q < kQTiles; ++q) {
            ptx::mbarrier_init(q_full[q], 1);            // expect_tx of the load thread
            ptx::mbarrier_init(q_empty[q], 1);           // commit after the item's last QK
            ptx::mbarrier_init(scores_done[q], 1);       // commit
            ptx::mbarrier_init(p_ready[q], 2 * kWarps);  // softmax: P is stored; correction: O is in P's basis, or free
            ptx::mbarrier_init(output_done[q], 1);       // commit
            ptx::mbarrier_init(message_ready[q][0], kWarps);  // softmax
            ptx::mbarrier_init(message_ready[q][1], kWarps);
        }
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async_smem();
    }
};

static_assert(sizeof(Shared<Config128>) <= Config128::kStateBytes);
static_assert(sizeof(Shared<Config64>) <= Config64::kStateBytes);

// The wait of a whole warp, converged afterwards.
__device__ __forceinline__ void wait_warp(uint64_t& barrier, uint32_t parity, const char* name, int index = 0) {
    ptx::mbarrier_wait(barrier, parity, name, index);
    __syncwarp();
}

// One arrival for the warp, after all its lanes. What the lanes did in tensor memory must have been waited for.
__device__ __forceinline__ void arrive_warp(uint64_t& barrier) {
    ptx::tcgen05_fence_before_thread_sync();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        ptx::mbarrier_arrive(barrier);
    }
}

// TMEM address of this warp's 32 lanes.
__device__ __forceinline__ TmemAddress warp_lanes(TmemAddress address) {
    return address + ((threadIdx.x / 32 % 4) << 21);
}

// The work items of this CTA: 256 queries of one head and its keys, or a part of them. Consecutive items are neighbours
// in the sequence, so that the CTAs that run together read the same K and V.
struct Work {
    const Args& args;
    int item = blockIdx.x;
    int batch, head, split, q_row;  // q_row: first query
    int length;                     // valid keys of the batch entry
    int first_tile, tiles;          // of keys
    int q_tiles;                    // 1 if the second Q tile lies past the end

    __device__ explicit Work(const Args& args) : args(args) { locate(); }
    __device__ bool valid() const { return item < args.items; }
    __device__ void next() {
        item += gridDim.x;
        locate();
    }

    // Valid keys of the last tile.
    __device__ int tail() const { return min(length - (first_tile + tiles - 1) * kTileRows, kTileRows); }

    // TMA brings keys past the length where the tensor has some, and 0 * NaN would reach O. Whole K steps past the
    // length are never multiplied.
    __device__ bool needs_clearing() const { return length < args.kv_len && tail() % layouts::kMmaK != 0; }

    // Index of a query of this item among all rows, the splits outermost.
    __device__ int64_t flat_row(int query) const {
        const int64_t pair = (static_cast<int64_t>(split) * args.batch + batch) * args.heads.value + head;
        return pair * args.q_len + query;
    }

  private:
    __device__ void locate() {
        if (!valid()) {
            return;
        }
        int rest = args.q_blocks.divide(item);
        q_row = (item - rest * args.q_blocks.value) * kItemRows;
        split = 0;
        if (args.splits.value > 1) {
            const int pair = args.splits.divide(rest);
            split = rest - pair * args.splits.value;
            rest = pair;
        }
        batch = args.heads.divide(rest);
        head = rest - batch * args.heads.value;
        length = args.kv_len;
        if (args.kv_lengths != nullptr) {
            length = max(0, min(__ldg(args.kv_lengths + batch), args.kv_len));
        }
        first_tile = 0;
        tiles = (length + kTileRows - 1) / kTileRows;
        if (args.splits.value > 1) {
            // At most kMaxSplits x 2^31 / kTileRows, below 2^31.
            const int all = tiles;
            first_tile = args.splits.divide(all * split);
            tiles = args.splits.divide(all * (split + 1)) - first_tile;
        }
        q_tiles = args.q_len - q_row > kTileRows ? 2 : 1;
    }
};

// Where a role stands in the ring of K and V tiles. An item's tokens come in the order they are used:
// K0, K1, V0, K2, V1, ... V(last).
template <typename C>
struct Ring {
    int slot = 0;
    uint32_t parity = 0;

    __device__ void advance() {
        if (++slot == C::kSlots) {
            slot = 0;
            parity ^= 1;
        }
    }
};

}  // namespace videoattn::blackwell
