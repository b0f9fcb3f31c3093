// What the planners of the kernel families share: argument checks and tensor maps of BSHD tensors.
// Plain C++17 without CUDA headers, so that it builds with any compiler.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "../api.h"

namespace videoattn {

// Values of the driver's enums (cuda.h), which this header may not include.
enum TensorMapDtype { kMapFp16 = 6, kMapBf16 = 9 };
enum TensorMapSwizzle { kSwizzleNone = 0, kSwizzle32B = 1, kSwizzle64B = 2, kSwizzle128B = 3 };
enum TensorMapPromotion { kPromoteNone = 0, kPromote64B = 1, kPromote128B = 2, kPromote256B = 3 };

// Where a refusal's reason goes; fail() returns the status so that checks read `return message.fail(...)`.
struct Message {
    char* text;
    size_t bytes;

    int fail(int status, const char* format, ...) const __attribute__((format(printf, 3, 4))) {
        va_list arguments;
        va_start(arguments, format);
        if (text != nullptr && bytes > 0) vsnprintf(text, bytes, format, arguments);
        va_end(arguments);
        return status;
    }
};

// Checks every family needs: sizes, scale, alignment and strides of the four tensors.
int check_call(const VideoattnCall& call, const Message& message);

// A rank-5 map (64 columns, seq, head_dim / 64, heads, batch) of a BSHD tensor with 128-byte swizzle: one
// instruction moves `rows` full rows, and no box crosses a head or a batch entry.
VideoattnTensorMap bshd_map(const VideoattnCall& call, const VideoattnTensor& tensor, int64_t seq_len, int rows,
                            int promotion);

// Appends to the kernel's parameter list.
void add_map(VideoattnPlan* plan, const VideoattnTensorMap& map);
void add_bytes(VideoattnPlan* plan, const void* bytes, size_t count, size_t alignment);

template <typename Args>
void add_args(VideoattnPlan* plan, const Args& args) {
    add_bytes(plan, &args, sizeof(Args), alignof(Args));
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A way to cut the queries into tiles.
struct Tiling {
    double items;  // tiles to work on
    double step;   // what a key block takes, beside a full CTA's
};

// Key blocks of a full CTA that so many blocks of each item take on a device, one item a processor at a time.
double tiling_cost(const Tiling& tiling, int splits, int64_t blocks, int num_sms);

// How many parts of the keys to work on at once, so that one batch entry fills the device by one of `count` tilings,
// the first that of full CTAs; 1 where those fill it twice. `merge` is what merging costs a call, in key blocks.
// Batch does not enter, so that an entry's result does not depend on its neighbours.
int choose_splits(const Tiling* tilings, int count, int64_t blocks, int num_sms, double merge);

// A workspace's two parts: fp32 outputs (splits, batch, heads, q_len, head_dim), then LSEs (splits, batch, heads,
// q_len).
struct Workspace {
    uint64_t output_bytes;
    uint64_t lse_bytes;
};
Workspace workspace_of(const VideoattnCall& call, int splits);

// Whether a family serves the compute capability; if not, says so.
int check_arch(int arch, const Message& message);

int plan_hopper(const VideoattnCall& call, VideoattnPlan* plan, const Message& message);
int plan_blackwell(const VideoattnCall& call, VideoattnPlan* plan, const Message& message);
int splits_hopper(const VideoattnCall& call);
int splits_blackwell(const VideoattnCall& call);

int plan_merge(const VideoattnCall& call, int splits, VideoattnPlan* plan, const Message& message);

}  // namespace videoattn
