// Where the time goes: in a build with VIDEOATTN_PROFILE every role writes the nanosecond at which it enters a phase,
// scripts/profile_hopper.py reads them. In any other build this is nothing.
#pragma once

#include "config.h"

namespace videoattn::hopper {

// A phase lasts until the same role enters the next one.
enum class Phase {
    kEnd = 1,
    // producer
    kKeyBuffer,    // waits for a free buffer of keys
    kValueBuffer,  // of values
    kQueryBuffer,  // of queries
    kLoad,         // issues a copy
    // consumers
    kKeys,     // waits for keys and, at a tile's start, for queries
    kTurn,     // waits for its turn
    kIssue,    // issues wgmma, waits for values
    kScores,   // waits for scores
    kSoftmax,  // exponentials
    kOutput,   // waits for the P V
    kPack,     // P to 16 bits
    kEpilogue,  // LSE and O
};

constexpr int kProfileEvents = 4096;  // of one role of one CTA; later ones are dropped

#ifdef VIDEOATTN_PROFILE
class Recorder {
  public:
    // `role`: 0 the producer, 1 .. consumers; only threads with `records` write.
    __device__ Recorder(const Args& args, int roles, int role, bool records) {
        next_ = args.profile + (static_cast<int64_t>(blockIdx.x) * roles + role) * kProfileEvents;
        left_ = records && args.profile != nullptr ? kProfileEvents : 0;
    }

    __device__ __forceinline__ void enter(Phase phase) {
        if (left_ == 0) return;
        uint64_t now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
        *next_++ = static_cast<uint64_t>(phase) << 56 | (now & 0xffffffffffffffull);
        --left_;
    }

  private:
    uint64_t* next_;
    int left_;
};
#else
class Recorder {
  public:
    __device__ Recorder(const Args&, int, int, bool) {}
    __device__ __forceinline__ void enter(Phase) {}
};
#endif

}  // namespace videoattn::hopper
