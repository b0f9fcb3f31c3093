// Where a CTA works and what it works in: tiles, the shared-memory map, the ring of key and value buffers.
#pragma once

#include "config.h"
#include "ptx.cuh"

namespace videoattn::hopper {

// 64 query rows for each consumer against a run of key blocks of one head. Rows past q_len are computed and not stored.
struct Tile {
    int batch, head, row;     // first query row
    int split, first_block, blocks;
    int tail;      // valid keys of the last block
    bool clear;    // whether that block holds rows past the key length that TMA brings: 0 * NaN would reach O
};

// Consumer warpgroups of this launch.
template <typename C>
__device__ __forceinline__ int consumers() {
    return C::kFewestConsumers < C::kConsumers ? blockDim.x / 128 - 1 : C::kConsumers;
}

// A CTA takes every gridDim.x-th tile, so that all CTAs work on the same heads at a time, or, where K and V stay, a run
// of neighbours.
template <typename C>
__device__ __forceinline__ int first_tile(const Args& args, int cta = blockIdx.x) {
    return C::kResident ? cta * args.share + min(cta, args.more) : cta;
}

// One past the last.
template <typename C>
__device__ __forceinline__ int end_tile(const Args& args) {
    return C::kResident ? first_tile<C>(args, blockIdx.x + 1) : args.tiles;
}

template <typename C>
__device__ __forceinline__ int tile_step() {
    return C::kResident ? 1 : gridDim.x;
}

// Whether tile `index` finds in shared memory what tile `before` of this CTA used.
template <typename C>
__device__ __forceinline__ bool same_keys(const Args& args, int before, int index) {
    return C::kResident && args.q_tiles.divide(before) == args.q_tiles.divide(index);
}

template <typename C>
__device__ __forceinline__ Tile locate(const Args& args, int index) {
    Tile tile;
    int rest = args.q_tiles.divide(index);
    tile.row = (index - rest * args.q_tiles.value) * (consumers<C>() * kGroupRows);
    tile.split = rest;
    if (args.splits.value > 1) {
        rest = args.splits.divide(rest);
        tile.split -= rest * args.splits.value;
    } else {
        tile.split = 0;
    }
    tile.batch = args.heads.divide(rest);
    tile.head = rest - tile.batch * args.heads.value;
    int length = args.kv_len;
    if (args.kv_lengths != nullptr) length = max(0, min(__ldg(args.kv_lengths + tile.batch), args.kv_len));
    const int blocks = (length + C::kTileN - 1) / C::kTileN;
    tile.first_block = 0;
    tile.blocks = blocks;
    if (args.splits.value > 1) {
        // At most kMaxSplits x 2^31 / kTileN, below 2^31.
        const auto first = [&](int split) { return args.splits.divide(blocks * split); };
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
    __device__ __forceinline__ uint32_t gates_full(int group) const { return k_full(5 * C::kStages + group); }
    __device__ __forceinline__ uint32_t gates_empty(int group) const { return gates_full(group + C::kConsumers); }
    __device__ __forceinline__ uint32_t gates(int group) const {
        return base + C::kGateOffset + group * (4 * kGroupRows);
    }
};

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
