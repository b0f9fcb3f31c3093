// Tile shapes and shared-memory map of the Hopper kernel, read by its planner and by the kernel itself.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define VIDEOATTN_HD __host__ __device__
#else
#define VIDEOATTN_HD
#endif

namespace videoattn::hopper {

constexpr int kGroupRows = 64;  // query rows of one consumer warpgroup: the M of one wgmma

// kSoftExp2: every how many 8-column blocks of the scores one takes its exponentials on the FMA pipe; 0: none.
template <int kHeadDim_, int kConsumers_, int kTileN_, int kStages_, bool kQInRegisters_, int kSoftExp2_>
struct Config {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kConsumers = kConsumers_;  // consumer warpgroups
    static constexpr int kTileM = kConsumers * kGroupRows;
    static constexpr int kTileN = kTileN_;
    static constexpr int kStages = kStages_;
    static constexpr bool kQInRegisters = kQInRegisters_;
    static constexpr int kSoftExp2 = kSoftExp2_;
    static constexpr int kThreads = 128 * (kConsumers + 1);
    // setmaxnreg pools: launch-time registers x threads cover producer + consumers.
    static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;

    static constexpr int kGroupBytes = kGroupRows * kHeadDim * 2;  // a warpgroup's Q, or its O
    static constexpr int kKvBytes = kTileN * kHeadDim * 2;
    static constexpr int kQOffset = 0;
    static constexpr int kOOffset = kQOffset + kConsumers * kGroupBytes;
    static constexpr int kKOffset = kOOffset + kConsumers * kGroupBytes;
    static constexpr int kVOffset = kKOffset + kStages * kKvBytes;
    static constexpr int kBarrierOffset = kVOffset + kStages * kKvBytes;
    static constexpr int kBarriers = 2 * kConsumers + 5 * kStages;
    // 1024 more: the kernel rounds its base up to the 128-byte swizzle's period.
    static constexpr int kSmemBytes = kBarrierOffset + 8 * kBarriers + 1024;
    static_assert(kSmemBytes <= 232448, "more shared memory than a CTA can have on sm_90");
    static_assert(kGroupBytes % 1024 == 0 && kKvBytes % 1024 == 0, "swizzle atoms are 1024 bytes");
};

using D128N128 = Config<128, 2, 128, 2, true, 0>;
using D64N128 = Config<64, 3, 128, 2, false, 8>;
using D64N96 = Config<64, 3, 96, 3, false, 8>;

// Up to this many keys the key tile is chosen to fit their number.
constexpr int kShortKeys = 1024;

// The kernel's last parameter.
struct Args {
    float* lse;
    const int32_t* kv_lengths;
    float* partial_out;  // where splits > 1: (splits, batch, heads, q_len, head_dim)
    float* partial_lse;  // (splits, batch, heads, q_len)
    int32_t batch;
    int32_t heads;
    int32_t q_len;
    int32_t kv_len;
    int32_t q_tiles;
    int32_t splits;
    int32_t tiles;  // q_tiles * splits * heads * batch, in this order from the fastest
    float scale_log2;  // softmax scale * log2(e)
};

}  // namespace videoattn::hopper
