#include "../common/plan.h"

#include "config.h"

namespace videoattn {
namespace {

int splits(const VideoattnCall& call) {
    const int64_t blocks = ceil_div(call.kv_len, blackwell::kTileRows);
    if (call.splits > 0) return static_cast<int>(call.splits < blocks ? call.splits : blocks);
    const Tiling tiling{static_cast<double>(ceil_div(call.q_len, blackwell::kItemRows) * call.heads), 1.0};
    constexpr double kMerge = 4.0;  // not measured
    return choose_splits(&tiling, 1, blocks, call.num_sms, kMerge);
}

template <typename Config>
int plan_config(const VideoattnCall& call, VideoattnPlan* plan, const Message& message) {
    using namespace blackwell;
    Args args{};
    args.lse = call.lse;
    args.kv_lengths = call.kv_lengths;
    const int parts = call.workspace == nullptr ? 1 : splits(call);
    if (parts == 1) args.gate = call.gate;
    if (parts > 1) {
        args.partial_out = static_cast<float*>(call.workspace);
        args.lse = args.partial_out + workspace_of(call, parts).output_bytes / 4;
    }
    args.batch = static_cast<int32_t>(call.batch);
    args.heads = Divisor(call.heads);
    args.q_len = static_cast<int32_t>(call.q_len);
    args.kv_len = static_cast<int32_t>(call.kv_len);
    const int64_t q_blocks = ceil_div(call.q_len, kItemRows);
    args.q_blocks = Divisor(q_blocks);
    args.splits = Divisor(parts);
    // The kernel counts items in 32 bits and steps past the last one by a grid.
    const double items = static_cast<double>(q_blocks) * parts * call.heads * call.batch;
    if (items > 2147000000.0)
        return message.fail(VIDEOATTN_UNSUPPORTED, "%.0f work items are more than one launch can count", items);
    args.items = static_cast<int32_t>(items);
    args.scale_log2 = call.scale * 1.4426950408889634f;

    if (call.rows != 0 && call.rows != kItemRows)
        return message.fail(VIDEOATTN_UNSUPPORTED, "rows is %d; this kernel has %d", call.rows, kItemRows);
    const int64_t wanted = call.grid > 0 ? call.grid : call.num_sms;
    if (wanted < 1) return message.fail(VIDEOATTN_UNSUPPORTED, "neither grid nor num_sms is given");
    snprintf(plan->kernel, sizeof(plan->kernel), "videoattn_blackwell_d%d_%s", Config::kHeadDim,
             call.dtype == VIDEOATTN_BF16 ? "bf16" : "fp16");
    plan->grid[0] = static_cast<uint32_t>(wanted < args.items ? wanted : args.items);
    plan->grid[1] = plan->grid[2] = 1;
    plan->block[0] = kThreads;
    plan->block[1] = plan->block[2] = 1;
    plan->cluster[0] = plan->cluster[1] = plan->cluster[2] = 1;
    plan->dynamic_smem = Config::kSmemBytes;
    add_map(plan, bshd_map(call, call.q, call.q_len, kTileRows, kPromote256B));
    add_map(plan, bshd_map(call, call.k, call.kv_len, kTileRows, kPromote256B));
    add_map(plan, bshd_map(call, call.v, call.kv_len, kTileRows, kPromote256B));
    add_map(plan, bshd_map(call, call.out, call.q_len, kOutRows, kPromoteNone));
    add_args(plan, args);
    return VIDEOATTN_OK;
}

}  // namespace

int plan_blackwell(const VideoattnCall& call, VideoattnPlan* plan, const Message& message) {
    // store_partial writes 32 bytes at a time.
    if (reinterpret_cast<uintptr_t>(call.workspace) % 32 != 0)
        return message.fail(VIDEOATTN_UNSUPPORTED, "workspace does not start at a multiple of 32 bytes");
    return call.head_dim == 128 ? plan_config<blackwell::Config128>(call, plan, message)
                                : plan_config<blackwell::Config64>(call, plan, message);
}

int splits_blackwell(const VideoattnCall& call) { return splits(call); }

}  // namespace videoattn
