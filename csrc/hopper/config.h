// Tile shapes and shared-memory map of the Hopper kernel, read by its planner and by the kernel itself.
#pragma once

#include <cstdint>

#include "../api.h"
#include "../common/divisor.h"

namespace videoattn::hopper {

constexpr int kGroupRows = 64;  // query rows of one consumer warpgroup: the M of one wgmma
constexpr int kWarpRows = 16;   // of one of its warps, which stores them by itself

// What a configuration may choose; scripts/tune_hopper.py builds the kernel with other choices.
struct Choices {
    static constexpr int kConsumers = 2;  // consumer warpgroups
    static constexpr int kFewestConsumers = 2;  // that a launch may have, with a warpgroup less for each one missing
    static constexpr int kTileN = 128;
    static constexpr int kStages = 2;
    static constexpr bool kQInRegisters = false;
    static constexpr int kQueryBuffers = 1;  // 2: the next tile's Q loads while this one's is waited for
    // For launches whose keys fill at most kStages blocks: K and V of a head are loaded once for all neighbouring tiles
    // of a CTA.
    static constexpr bool kResident = false;
    static constexpr bool kTurns = true;  // whether consumers take turns at issuing
    static constexpr bool kGates = true;  // whether calls with gates may come
};

struct D128N128Choices : Choices {
    static constexpr bool kQInRegisters = true;
};

// 128 keys need more than the 160 registers of three consumers.
struct D64N112Choices : Choices {
    static constexpr int kConsumers = 3;
    static constexpr int kTileN = 112;
};

struct D64N96Choices : D64N112Choices {
    static constexpr int kTileN = 96;
    static constexpr int kStages = 3;
};

// With one or two blocks of keys, queries are used too rarely to be worth their way into registers. A tile is little more
// than its store, where a branch on gates costs 3 to 8 %.
struct D128N128ShortChoices : Choices {
    static constexpr int kQueryBuffers = 2;
    static constexpr bool kResident = true;
    static constexpr bool kGates = false;
};

struct D64N96ShortChoices : D64N96Choices {
    static constexpr int kQueryBuffers = 2;
    static constexpr bool kResident = true;
};

struct D64N64ShortChoices : D64N96ShortChoices {
    static constexpr int kTileN = 64;
    static constexpr int kStages = 5;
};

// The choices and what follows from them.
template <int kHeadDim_, typename C>
struct Config : C {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kTileM = C::kConsumers * kGroupRows;
    static constexpr int kThreads = 128 * (C::kConsumers + 1);
    // setmaxnreg pools: launch-time registers x threads cover producer + consumers.
    static constexpr int kProducerRegisters = C::kConsumers > 2 ? 32 : 24;
    static constexpr int kConsumerRegisters = C::kConsumers > 2 ? 160 : 240;

    static constexpr int kGroupBytes = kGroupRows * kHeadDim * 2;  // a warpgroup's Q, or its O
    static constexpr int kKvBytes = C::kTileN * kHeadDim * 2;

    static constexpr int kQOffset = 0;
    static constexpr int kOOffset = C::kQueryBuffers * C::kConsumers * kGroupBytes;
    static constexpr int kKOffset = kOOffset + C::kConsumers * kGroupBytes;
    static constexpr int kVOffset = kKOffset + C::kStages * kKvBytes;
    static constexpr int kBarrierOffset = kVOffset + C::kStages * kKvBytes;
    static constexpr int kBarriers = 2 * C::kConsumers * (C::kQueryBuffers + C::kGates) + 5 * C::kStages;
    static constexpr int kGateOffset = kBarrierOffset + 8 * kBarriers;  // of each row a pair
    static constexpr int kSmemBytes = kGateOffset + (C::kGates ? 4 * C::kConsumers * kGroupRows : 0);
    static_assert(kSmemBytes <= 232448, "more shared memory than a CTA can have on sm_90");
    static_assert(kGroupBytes % 1024 == 0 && kKvBytes % 1024 == 0, "swizzle atoms are 1024 bytes");
};

using D128N128 = Config<128, D128N128Choices>;
using D64N112 = Config<64, D64N112Choices>;
using D64N96 = Config<64, D64N96Choices>;
using D128N128Short = Config<128, D128N128ShortChoices>;
using D64N96Short = Config<64, D64N96ShortChoices>;
using D64N64Short = Config<64, D64N64ShortChoices>;

// Up to this many keys the key tile is chosen to fit their number.
constexpr int kShortKeys = 1024;

// A (batch, seq, heads, head_dim) tensor of 16-bit values; strides in elements.
struct Strided {
    void* data;
    int64_t stride_batch, stride_seq, stride_head;
};

// The kernel's last parameter.
struct Args {
    float* lse;  // (splits, batch, heads, q_len), or null
    const int32_t* kv_lengths;
    float* partial_out;  // where splits > 1: (splits, batch, heads, q_len, head_dim)
    int32_t batch;
    Divisor heads;
    int32_t q_len;
    int32_t kv_len;
    Divisor q_tiles;  // of a head
    Divisor splits;
    int32_t tiles;  // q_tiles * splits * heads * batch, in this order from the fastest
    int32_t share, more;  // where keys stay: of a CTA's tiles, and how many CTAs have one more
    float scale_log2;  // softmax scale * log2(e)
    Strided q, k, out;  // for what TMA does not move
    VideoattnGate gate;  // of what is not merged
    uint64_t* profile;  // where events go in a build with VIDEOATTN_PROFILE
};

}  // namespace videoattn::hopper
