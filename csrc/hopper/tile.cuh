// Where a CTA works and what it works in: tiles, the shared-memory map, the ring of key and value buffers.
#pragma once

#include "config.h"
#include "ptx.cuh"

namespace videoattn::hopper {

// 64 kConsumers query rows against a run of key blocks of one head. Rows past q_len, in a cluster all of a CTA's, are
// computed and not stored.
struct Tile {
    int batch, head, row;     // first query row
    int split, first_block, blocks;
    int tail;      // valid keys of the last block
    bool clear;    // whether that block holds rows past the key length that TMA brings: 0 * NaN would reach O
};

// The CTAs of a cluster work on neighbouring query tiles of the same head, against the same keys: the place in the
// cluster is the lowest digit of a tile's number, and all CTAs of a cluster count the others alike.
template <typename C>
__device__ __forceinline__ int first_tile() {
    return blockIdx.x / C::kCluster;
}

template <typename C>
__device__ __forceinline__ int tile_step() {
    return gridDim.x / C::kCluster;
}

template <typename C>
__device__ __forceinline__ int rank_in_cluster() {
    return C::kCluster == 1 ? 0 : static_cast<int>(cluster_rank());
}

template <typename C>
__device__ __forceinline__ Tile locate(const Args& args, int index) {
    Tile tile;
    int rest = index / args.q_tiles;
    tile.row = ((index - rest * args.q_tiles) * C::kCluster + rank_in_cluster<C>()) * C::kTileM;
    tile.split = rest;
    if (args.splits > 1) {
        rest /= args.splits;
        tile.split -= rest * args.splits;
    } else {
        tile.split = 0;
    }
    tile.batch = rest / args.heads;
    tile.head = rest - tile.batch * args.heads;
    int length = args.kv_len;
    if (args.kv_lengths != nullptr) length = max(0, min(__ldg(args.kv_lengths + tile.batch), args.kv_len));
    const int blocks = (length + C::kTileN - 1) / C::kTileN;
    tile.first_block = 0;
    tile.blocks = blocks;
    if (args.splits > 1) {
        const auto first = [&](int split) { return static_cast<int>(static_cast<int64_t>(blocks) * split / args.splits); };
        tile.first_block = first(tile.split);
        tile.blocks = first(tile.split + 1) - tile.first_block;
    }
    tile.tail = min(C::kTileN, length - (tile.first_block + tile.blocks - 1) * C::kTileN);
    tile.clear = tile.tail < C::kTileN && length < args.kv_len;
    return tile;
}

// A row of the tile's head.
template <typename Element>
__device__ __forceinline__ Element* at(const Strided& tensor, const Tile& tile, int row) {
    return static_cast<Element*>(tensor.data) + tile.batch * tensor.stride_batch + row * tensor.stride_seq +
           tile.head * tensor.stride_head;
}

template <typename C>
struct Shared {
    uint32_t base;

    __device__ __forceinline__ uint32_t q(int group, int buffer = 0) const {
        return base + C::kQOffset + (buffer * C::kConsumers + group) * C::kGroupBytes;
    }
    __device__ __forceinline__ uint32_t o(int group) const { return base + C::kOOffset + group * C::kGroupBytes; }
    __device__ __forceinline__ uint32_t k(int stage) const { return base + C::kKOffset + stage * C::kKvBytes; }
    __device__ __forceinline__ uint32_t v(int stage) const { return base + C::kVOffset + stage * C::kKvBytes; }
    __device__ __forceinline__ uint32_t barrier(int index) const { return base + C::kBarrierOffset + 8 * index; }
    __device__ __forceinline__ uint32_t q_full(int group, int buffer = 0) const {
        return barrier(2 * buffer * C::kConsumers + group);
    }
    __device__ __forceinline__ uint32_t q_empty(int group, int buffer = 0) const {
        return barrier((2 * buffer + 1) * C::kConsumers + group);
    }
    __device__ __forceinline__ uint32_t k_full(int stage) const {
        return barrier(2 * C::kConsumers * C::kQueryBuffers + stage);
    }
    __device__ __forceinline__ uint32_t k_empty(int stage) const { return k_full(stage + C::kStages); }
    __device__ __forceinline__ uint32_t v_full(int stage) const { return k_full(stage + 2 * C::kStages); }
    __device__ __forceinline__ uint32_t v_empty(int stage) const { return k_full(stage + 3 * C::kStages); }
    __device__ __forceinline__ uint32_t v_clean(int stage) const { return k_full(stage + 4 * C::kStages); }
};

// One arrival of the calling warp at a barrier of every CTA of the cluster: all of them write into the buffer that it
// guards.
template <typename C>
__device__ __forceinline__ void release_shared(uint32_t barrier) {
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (C::kCluster == 1) {
        if (lane == 0) mbarrier_arrive(barrier);
    } else {
        if (lane < C::kCluster) mbarrier_arrive_cluster(barrier, lane);
    }
}

// A position in the ring of key or value buffers.
template <typename C>
struct Ring {
    int stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == C::kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

}  // namespace videoattn::hopper
