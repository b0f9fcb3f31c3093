// Tile shapes, memory maps and the last parameter of the Blackwell kernel, read by its planner and by the kernel.
#pragma once

#include <cstdint>

#include "../api.h"
#include "../common/divisor.h"

namespace videoattn::blackwell {

constexpr int kTileRows = 128;  // queries of a tile, and keys of a tile: M and N of one MMA
constexpr int kQTiles = 2;      // of one work item
constexpr int kItemRows = kQTiles * kTileRows;
constexpr int kOutRows = 32;  // rows of one output box: a correction warp's
constexpr int kThreads = 512;
constexpr int kMaxSmemBytes = 232448;

// Launch-time registers x threads = 64K cover these, a warpgroup each (softmax: two).
constexpr int kSoftmaxRegisters = 184, kCorrectionRegisters = 88, kOtherRegisters = 56;
static_assert(2 * kSoftmaxRegisters + kCorrectionRegisters + kOtherRegisters <= 512);

template <int kHeadDim_, int kSlots_>
struct Config {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kSlots = kSlots_;  // of the K/V ring
    static constexpr int kTileBytes = kTileRows * kHeadDim * 2;
    static constexpr int kOutBytes = kOutRows * kHeadDim * 2;

    static constexpr int kQOffset = 0;
    static constexpr int kKvOffset = kQOffset + kQTiles * kTileBytes;
    static constexpr int kOutOffset = kKvOffset + kSlots * kTileBytes;
    static constexpr int kStateOffset = kOutOffset + 4 * kOutBytes;  // barriers and row state
    static constexpr int kStateBytes = 3072;
    static constexpr int kSmemBytes = kStateOffset + kStateBytes;
    static_assert(kSmemBytes <= kMaxSmemBytes);

    // Tensor memory: S at column 0, P of both Q tiles, two values a column, at 128, O of both at 256.
    static constexpr int kTmemP = 128, kTmemO = 256, kTmemColumns = 512;
    static_assert(kTmemO + kQTiles * kHeadDim <= kTmemColumns);
};

using Config128 = Config<128, 4>;
using Config64 = Config<64, 8>;

struct Args {
    float* lse;  // where splits > 1: (splits, batch, heads, q_len), else the caller's, or null
    const int32_t* kv_lengths;
    float* partial_out;  // where splits > 1: (splits, batch, heads, q_len, head_dim)
    int32_t batch;
    Divisor heads;
    int32_t q_len;
    int32_t kv_len;
    Divisor q_blocks;
    Divisor splits;
    int32_t items;     // q_blocks * splits * heads * batch, in this order from the fastest
    float scale_log2;  // softmax scale * log2(e)
    VideoattnGate gate;  // of what is not merged
};

}  // namespace videoattn::blackwell
