#include "../common/plan.h"

#include "config.h"

namespace videoattn {
namespace {

// Tilings of `entries` batch entries by all consumers, one less and so on.
template <typename Config>
struct Tilings {
    static constexpr int kCount = Config::kConsumers - Config::kFewestConsumers + 1;
    // Of a key block, for each consumer less: two of three take 0.75 to 0.88 of the time (docs/hopper.md), they have less
    // to do beside a wait.
    static constexpr double kStep = 0.2;
    Tiling ways[kCount];

    Tilings(const VideoattnCall& call, int64_t entries) {
        for (int less = 0; less < kCount; ++less) {
            const int64_t tiles = ceil_div(call.q_len, (Config::kConsumers - less) * hopper::kGroupRows);
            ways[less] = {static_cast<double>(tiles) * call.heads * entries, 1.0 - less * kStep};
        }
    }
};

template <typename Config>
int64_t key_blocks(const VideoattnCall& call) {
    return ceil_div(call.kv_len, Config::kTileN);
}

template <typename Config>
int splits(const VideoattnCall& call) {
    const int64_t blocks = key_blocks<Config>(call);
    if (call.splits > 0) return static_cast<int>(call.splits < blocks ? call.splits : blocks);
    // At head dim 64 measured on an H200 (docs/hopper.md, audio text); at 128 a block is twice the work.
    constexpr double kMerge = Config::kHeadDim == 64 ? 5.5 : 4.0;
    using Ways = Tilings<Config>;
    return choose_splits(Ways(call, 1).ways, Ways::kCount, blocks, call.num_sms, kMerge);
}

// Consumers of each of `ctas` CTAs. Unlike the parts of the keys they may depend on the batch: a row is computed the
// same way by any number of them.
template <typename Config>
int consumers(const VideoattnCall& call, int parts, int ctas) {
    if (call.rows > 0) return call.rows / hopper::kGroupRows;
    const Tilings<Config> tilings(call, call.batch);
    const auto cost = [&](int less) {
        return tiling_cost(tilings.ways[less], parts, key_blocks<Config>(call), ctas);
    };
    int best = 0;
    for (int less = 1; less < tilings.kCount; ++less)
        if (cost(less) < cost(best)) best = less;
    return Config::kConsumers - best;
}

hopper::Strided strided(const VideoattnTensor& tensor) {
    return {tensor.data, tensor.stride_batch, tensor.stride_seq, tensor.stride_head};
}

template <typename Config>
int plan_config(const VideoattnCall& call, VideoattnPlan* plan, const Message& message) {
    hopper::Args args{};
    args.lse = call.lse;
#ifdef VIDEOATTN_PROFILE
    const int parts = 1;
    args.profile = static_cast<uint64_t*>(call.workspace);
#else
    const int parts = call.workspace == nullptr ? 1 : splits<Config>(call);
#endif
    if (parts > 1) {
        args.partial_out = static_cast<float*>(call.workspace);
        args.lse = args.partial_out + workspace_of(call, parts).output_bytes / 4;
    }
    if (parts == 1) args.gate = call.gate;
    args.kv_lengths = call.kv_lengths;
    args.q = strided(call.q);
    args.k = strided(call.k);
    args.out = strided(call.out);
    args.batch = static_cast<int32_t>(call.batch);
    args.heads = Divisor(call.heads);
    args.q_len = static_cast<int32_t>(call.q_len);
    args.kv_len = static_cast<int32_t>(call.kv_len);
    const int64_t wanted = call.grid > 0 ? call.grid : call.num_sms;
    if (wanted < 1) return message.fail(VIDEOATTN_UNSUPPORTED, "neither grid nor num_sms is given");
    const int fewest = Config::kFewestConsumers * hopper::kGroupRows;
    if (call.rows != 0 && (call.rows % hopper::kGroupRows != 0 || call.rows < fewest || call.rows > Config::kTileM))
        return message.fail(VIDEOATTN_UNSUPPORTED, "rows is %d; this kernel takes multiples of 64, %d .. %d", call.rows,
                            fewest, Config::kTileM);
    const int groups = consumers<Config>(call, parts, static_cast<int>(wanted));
    const int64_t q_tiles = ceil_div(call.q_len, groups * hopper::kGroupRows);
    args.q_tiles = Divisor(q_tiles);
    args.splits = Divisor(parts);
    // The kernel counts tiles in 32 bits and steps past the last one by a grid.
    const double tiles = static_cast<double>(q_tiles) * parts * call.heads * call.batch;
    if (tiles > 2147000000.0)
        return message.fail(VIDEOATTN_UNSUPPORTED, "%.0f query tiles are more than one launch can count", tiles);
    args.tiles = static_cast<int32_t>(tiles);
    args.scale_log2 = call.scale * 1.4426950408889634f;

    snprintf(plan->kernel, sizeof(plan->kernel), "videoattn_hopper_d%d_n%d%s_%s", Config::kHeadDim, Config::kTileN,
             Config::kResident ? "_short" : "", call.dtype == VIDEOATTN_BF16 ? "bf16" : "fp16");
    plan->grid[0] = static_cast<uint32_t>(wanted < args.tiles ? wanted : args.tiles);
    plan->grid[1] = plan->grid[2] = 1;
    args.share = args.tiles / static_cast<int32_t>(plan->grid[0]);
    args.more = args.tiles % static_cast<int32_t>(plan->grid[0]);
    plan->block[0] = 128 * (groups + 1);
    plan->block[1] = plan->block[2] = 1;
    plan->cluster[0] = plan->cluster[1] = plan->cluster[2] = 1;
    plan->dynamic_smem = Config::kSmemBytes;
    add_map(plan, bshd_map(call, call.q, call.q_len, hopper::kGroupRows, kPromote128B));
    add_map(plan, bshd_map(call, call.k, call.kv_len, Config::kTileN, kPromote256B));
    add_map(plan, bshd_map(call, call.v, call.kv_len, Config::kTileN, kPromote256B));
    add_map(plan, bshd_map(call, call.out, call.q_len, hopper::kWarpRows, kPromoteNone));
    add_args(plan, args);
    return VIDEOATTN_OK;
}

// Keys as a configuration computes them, whole tiles.
template <typename Config>
int64_t padded(const VideoattnCall& call) {
    return ceil_div(call.kv_len, Config::kTileN) * Config::kTileN;
}

// Whether the keys stay in shared memory.
template <typename Config>
bool stay(const VideoattnCall& call) {
    return call.kv_len <= Config::kStages * Config::kTileN;
}

// Calls `use` with the configuration for the call: at head dim 64 the key tile that takes least time, the wider of two
// where padding comes out the same.
template <typename Use>
int with_config(const VideoattnCall& call, const Use& use) {
    using namespace hopper;
    if (call.head_dim == 128) {
        const bool gated = call.gate.data != nullptr && !D128N128Short::kGates;
        return stay<D128N128Short>(call) && !gated ? use(D128N128Short{}) : use(D128N128{});
    }
    if (stay<D64N96Short>(call)) {
        const bool narrow = padded<D64N64Short>(call) < padded<D64N96Short>(call);
        return narrow ? use(D64N64Short{}) : use(D64N96Short{});
    }
    if (call.kv_len > kShortKeys) return use(D64N112{});
    return padded<D64N96>(call) < padded<D64N112>(call) ? use(D64N96{}) : use(D64N112{});
}

}  // namespace

int plan_hopper(const VideoattnCall& call, VideoattnPlan* plan, const Message& message) {
    return with_config(call, [&](auto config) { return plan_config<decltype(config)>(call, plan, message); });
}

int splits_hopper(const VideoattnCall& call) {
    return with_config(call, [&](auto config) { return splits<decltype(config)>(call); });
}

}  // namespace videoattn
