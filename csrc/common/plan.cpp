#include "plan.h"

#include <algorithm>
#include <cmath>

#include "merge.h"

namespace videoattn {
namespace {

constexpr int64_t kMaxCoordinate = (int64_t{1} << 31) - 512;  // TMA coordinates are signed 32 bit
constexpr int64_t kMaxByteStride = int64_t{1} << 40;

int check_tensor(const VideoattnCall& call, const VideoattnTensor& tensor, const char* name, int64_t seq_len,
                 const Message& message) {
    if (tensor.data == nullptr) return message.fail(VIDEOATTN_UNSUPPORTED, "%s is a null pointer", name);
    if (reinterpret_cast<uintptr_t>(tensor.data) % 16 != 0)
        return message.fail(VIDEOATTN_UNSUPPORTED, "%s does not start at a multiple of 16 bytes; copy it", name);
    const struct {
        const char* dimension;
        int64_t stride, size;
    } strides[] = {{"batch", tensor.stride_batch, call.batch},
                   {"seq", tensor.stride_seq, seq_len},
                   {"head", tensor.stride_head, call.heads}};
    for (const auto& s : strides) {
        if (s.size == 1) continue;
        const int64_t bytes = 2 * s.stride;
        if (s.stride <= 0)
            return message.fail(VIDEOATTN_UNSUPPORTED, "%s has a %s stride of %lld, which TMA can't take; copy it",
                                name, s.dimension, static_cast<long long>(s.stride));
        if (bytes % 16 != 0)
            return message.fail(VIDEOATTN_UNSUPPORTED,
                                "%s has a %s stride of %lld bytes, which is no multiple of 16; copy it", name,
                                s.dimension, static_cast<long long>(bytes));
        if (bytes >= kMaxByteStride)
            return message.fail(VIDEOATTN_UNSUPPORTED, "%s has a %s stride of %lld bytes; TMA ends at 2^40", name,
                                s.dimension, static_cast<long long>(bytes));
    }
    return VIDEOATTN_OK;
}

}  // namespace

int check_call(const VideoattnCall& call, const Message& message) {
    const struct {
        const char* name;
        int64_t size;
    } sizes[] = {{"batch", call.batch}, {"heads", call.heads}, {"q_len", call.q_len}, {"kv_len", call.kv_len}};
    for (const auto& s : sizes)
        if (s.size < 1 || s.size > kMaxCoordinate)
            return message.fail(VIDEOATTN_UNSUPPORTED, "%s is %lld; it must lie in 1 .. %lld", s.name,
                                static_cast<long long>(s.size), static_cast<long long>(kMaxCoordinate));
    if (call.dtype != VIDEOATTN_BF16 && call.dtype != VIDEOATTN_FP16)
        return message.fail(VIDEOATTN_UNSUPPORTED, "dtype code %d is neither bf16 (0) nor fp16 (1)", call.dtype);
    if (call.head_dim != 64 && call.head_dim != 128)
        return message.fail(VIDEOATTN_UNSUPPORTED, "head_dim is %lld; the kernel has 64 and 128",
                            static_cast<long long>(call.head_dim));
    if (!(std::isfinite(call.scale) && call.scale > 0))
        return message.fail(VIDEOATTN_UNSUPPORTED, "scale is %g; the kernel needs a finite scale above 0",
                            static_cast<double>(call.scale));
    if (call.splits < 0 || call.splits > kMaxSplits)
        return message.fail(VIDEOATTN_UNSUPPORTED, "splits is %d; it must lie in 0 .. %d", call.splits, kMaxSplits);
    if (call.reserved != 0) return message.fail(VIDEOATTN_UNSUPPORTED, "reserved is %d, not 0", call.reserved);
    if (reinterpret_cast<uintptr_t>(call.workspace) % 16 != 0)
        return message.fail(VIDEOATTN_UNSUPPORTED, "workspace does not start at a multiple of 16 bytes");
    if (call.grid < 0 || call.grid > 65535)
        return message.fail(VIDEOATTN_UNSUPPORTED, "grid is %d; it must lie in 0 .. 65535", call.grid);
    if (reinterpret_cast<uintptr_t>(call.lse) % 4 != 0)
        return message.fail(VIDEOATTN_UNSUPPORTED, "lse does not start at a multiple of 4 bytes");
    if (reinterpret_cast<uintptr_t>(call.kv_lengths) % 4 != 0)
        return message.fail(VIDEOATTN_UNSUPPORTED, "kv_lengths does not start at a multiple of 4 bytes");
    if (reinterpret_cast<uintptr_t>(call.gate.data) % 2 != 0)
        return message.fail(VIDEOATTN_UNSUPPORTED, "gate does not start at a multiple of 2 bytes");
    if (call.gate.stride_batch < 0 || call.gate.stride_seq < 0)
        return message.fail(VIDEOATTN_UNSUPPORTED, "gate has a negative stride");
    int status = check_tensor(call, call.q, "q", call.q_len, message);
    if (status == VIDEOATTN_OK) status = check_tensor(call, call.k, "k", call.kv_len, message);
    if (status == VIDEOATTN_OK) status = check_tensor(call, call.v, "v", call.kv_len, message);
    if (status == VIDEOATTN_OK) status = check_tensor(call, call.out, "out", call.q_len, message);
    return status;
}

int check_arch(int arch, const Message& message) {
    if (arch == 90 || arch == 100 || arch == 103) return VIDEOATTN_OK;
    return message.fail(VIDEOATTN_UNSUPPORTED, "no kernel for compute capability %d.%d", arch / 10, arch % 10);
}

VideoattnTensorMap bshd_map(const VideoattnCall& call, const VideoattnTensor& tensor, int64_t seq_len, int rows,
                            int promotion) {
    VideoattnTensorMap map{};
    map.address = reinterpret_cast<uint64_t>(tensor.data);
    map.dtype = call.dtype == VIDEOATTN_BF16 ? kMapBf16 : kMapFp16;
    map.rank = 5;
    const int64_t blocks = call.head_dim / 64;
    const uint64_t dims[] = {64, static_cast<uint64_t>(seq_len), static_cast<uint64_t>(blocks),
                             static_cast<uint64_t>(call.heads), static_cast<uint64_t>(call.batch)};
    const int64_t strides[] = {tensor.stride_seq, 64, tensor.stride_head, tensor.stride_batch};
    const uint32_t box[] = {64, static_cast<uint32_t>(rows), static_cast<uint32_t>(blocks), 1, 1};
    for (int i = 0; i < 5; ++i) {
        map.dims[i] = dims[i];
        map.box[i] = box[i];
    }
    // A dimension of one element may carry any stride in torch; the encoder still checks it.
    for (int i = 0; i < 4; ++i) map.byte_strides[i] = dims[i + 1] == 1 ? 128 : 2 * strides[i];
    map.swizzle = kSwizzle128B;
    map.l2_promotion = promotion;
    map.oob_fill = 0;
    return map;
}

void add_map(VideoattnPlan* plan, const VideoattnTensorMap& map) {
    plan->params[plan->num_params++] = {plan->num_maps, 0, 128};
    plan->maps[plan->num_maps++] = map;
}

void add_bytes(VideoattnPlan* plan, const void* bytes, size_t count, size_t alignment) {
    const uint32_t offset = static_cast<uint32_t>(ceil_div(plan->args_bytes, alignment) * alignment);
    plan->params[plan->num_params++] = {-1, offset, static_cast<uint32_t>(count)};
    memcpy(plan->args + offset, bytes, count);
    plan->args_bytes = offset + static_cast<uint32_t>(count);
}

double tiling_cost(const Tiling& tiling, int splits, int64_t blocks, int num_sms) {
    constexpr double kTileCost = 2.0;  // of a tile besides its blocks
    const double waves = std::ceil(tiling.items * splits / num_sms);
    return waves * (static_cast<double>(ceil_div(blocks, splits)) + kTileCost) * tiling.step;
}

int choose_splits(const Tiling* tilings, int count, int64_t blocks, int num_sms, double merge) {
    if (num_sms < 1 || tilings[0].items >= 2 * num_sms) return 1;
    int best = 1;
    double best_cost = 0;
    for (int splits = 1; splits <= kMaxSplits && splits <= blocks; ++splits) {
        double cost = tiling_cost(tilings[0], splits, blocks, num_sms);
        for (int i = 1; i < count; ++i) cost = std::min(cost, tiling_cost(tilings[i], splits, blocks, num_sms));
        if (splits > 1) cost += merge;
        if (splits == 1 || cost < best_cost) {
            best = splits;
            best_cost = cost;
        }
    }
    return best;
}

Workspace workspace_of(const VideoattnCall& call, int splits) {
    if (splits <= 1) return {0, 0};
    const uint64_t rows = static_cast<uint64_t>(splits) * call.batch * call.heads * call.q_len;
    return {rows * call.head_dim * 4, rows * 4};
}

int plan_merge(const VideoattnCall& call, int splits, VideoattnPlan* plan, const Message& message) {
    if (splits <= 1 || call.workspace == nullptr) return VIDEOATTN_OK;
    const Workspace parts = workspace_of(call, splits);
    MergeArgs args{};
    args.partial_out = static_cast<const float*>(call.workspace);
    args.partial_lse = args.partial_out + parts.output_bytes / 4;
    args.out = call.out.data;
    args.lse = call.lse;
    args.stride_batch = call.out.stride_batch;
    args.stride_seq = call.out.stride_seq;
    args.stride_head = call.out.stride_head;
    args.gate = call.gate;
    args.rows = call.batch * call.heads * call.q_len;
    args.heads = static_cast<int32_t>(call.heads);
    args.q_len = static_cast<int32_t>(call.q_len);
    args.splits = splits;
    snprintf(plan->kernel, sizeof(plan->kernel), "videoattn_merge_d%d_%s", static_cast<int>(call.head_dim),
             call.dtype == VIDEOATTN_BF16 ? "bf16" : "fp16");
    const int64_t ctas = ceil_div(args.rows * (call.head_dim / kMergeColumns), kMergeThreads);
    if (ctas > 0x7fffffff) return message.fail(VIDEOATTN_UNSUPPORTED, "too many rows to merge");
    plan->grid[0] = static_cast<uint32_t>(ctas);
    plan->block[0] = kMergeThreads;
    for (int i = 0; i < 3; ++i) {
        if (i > 0) plan->grid[i] = plan->block[i] = 1;
        plan->cluster[i] = 1;
    }
    add_args(plan, args);
    return VIDEOATTN_OK;
}

namespace {

int splits_of(const VideoattnCall& call) { return call.arch == 90 ? splits_hopper(call) : splits_blackwell(call); }

int prepare(const VideoattnCall* call, VideoattnPlan* plan, const Message& message) {
    if (call->struct_bytes != sizeof(VideoattnCall))
        return message.fail(VIDEOATTN_UNSUPPORTED, "the caller's VideoattnCall has %u bytes, the library's has %zu",
                            call->struct_bytes, sizeof(VideoattnCall));
    memset(plan, 0, sizeof(*plan));
    plan->struct_bytes = sizeof(*plan);
    return check_call(*call, message);
}

}  // namespace
}  // namespace videoattn

extern "C" int videoattn_plan(const VideoattnCall* call, VideoattnPlan* plan, char* text, size_t bytes) {
    const videoattn::Message message{text, bytes};
    int status = videoattn::prepare(call, plan, message);
    if (status == VIDEOATTN_OK) status = videoattn::check_arch(call->arch, message);
    if (status != VIDEOATTN_OK) return status;
    return call->arch == 90 ? videoattn::plan_hopper(*call, plan, message)
                            : videoattn::plan_blackwell(*call, plan, message);
}

extern "C" int videoattn_plan_merge(const VideoattnCall* call, VideoattnPlan* plan, char* text, size_t bytes) {
    const videoattn::Message message{text, bytes};
    const int status = videoattn::prepare(call, plan, message);
    if (status != VIDEOATTN_OK) return status;
    return videoattn::plan_merge(*call, videoattn::splits_of(*call), plan, message);
}

extern "C" uint64_t videoattn_workspace_bytes(const VideoattnCall* call) {
    const videoattn::Workspace parts = videoattn::workspace_of(*call, videoattn::splits_of(*call));
    return parts.output_bytes + parts.lse_bytes;
}
