// Merging the parts of a call whose keys were split: what the planner and the kernel agree on.
#pragma once

#include <cstdint>

#include "../api.h"

namespace videoattn {

constexpr int kMaxSplits = 32;
constexpr int kMergeThreads = 128;
constexpr int kMergeColumns = 8;  // of one thread: 16 bytes of output

struct MergeArgs {
    const float* partial_out;  // (splits, rows, head_dim), each divided by its own row sum
    const float* partial_lse;  // (splits, rows)
    void* out;
    float* lse;  // (rows), or null
    int64_t stride_batch, stride_seq, stride_head;  // of out, in elements
    VideoattnGate gate;
    int64_t rows;                                   // batch * heads * q_len
    int32_t heads, q_len, splits;
};

}  // namespace videoattn
