// Entry points of api.h that need CUDA; videoattn_plan lives with the planners.
#include "api.h"

#include <cuda_runtime.h>

#include <cstring>
#include <memory>

#include "common/launch.h"

#define VIDEOATTN_TEXT2(x) #x
#define VIDEOATTN_TEXT(x) VIDEOATTN_TEXT2(x)
#ifndef VIDEOATTN_ARCHS
#define VIDEOATTN_ARCHS 90
#endif
#ifndef VIDEOATTN_SOURCE_HASH
#define VIDEOATTN_SOURCE_HASH unknown
#endif

using videoattn::Message;

namespace videoattn {
namespace {

// A call's launches, made ready. Allocators hand out the same addresses again and again, so that most calls of a
// model repeat an earlier one up to its stream; planning and encoding cost more than the launch does.
struct Launches {
    bool filled;
    VideoattnCall key;  // stream cleared
    bool merges;
    Prepared attention, merge;
};

constexpr size_t kCachedCalls = 32;  // direct-mapped, for each thread

size_t slot_of(const VideoattnCall& key) {
    static_assert(sizeof(VideoattnCall) % 8 == 0, "hashed by words");
    constexpr uint64_t kPrime = 1099511628211ull;
    constexpr int kWords = sizeof(VideoattnCall) / 8;
    uint64_t words[kWords], hash[2] = {14695981039346656037ull, kPrime};  // two, as each multiplication waits for the last
    memcpy(words, &key, sizeof(words));
#pragma GCC unroll 64
    for (int i = 0; i < kWords; ++i) hash[i % 2] = (hash[i % 2] ^ words[i]) * kPrime;
    return ((hash[0] * kPrime ^ hash[1]) >> 32) % kCachedCalls;
}

int fill(const VideoattnCall& call, Launches* launches, const Message& message) {
    VideoattnCall resolved = call;
    if (call.arch == 0 || call.num_sms == 0) {
        DeviceFacts facts;
        const int status = device_facts(call.device, &facts, message);
        if (status != VIDEOATTN_OK) return status;
        if (call.arch == 0) resolved.arch = facts.arch;
        if (call.num_sms == 0) resolved.num_sms = facts.num_sms;
    }
    VideoattnPlan plan;
    int status = videoattn_plan(&resolved, &plan, message.text, message.bytes);
    if (status == VIDEOATTN_OK) status = prepare(plan, call.device, &launches->attention, message);
    if (status != VIDEOATTN_OK) return status;
    launches->merges = false;
    if (call.workspace != nullptr) {
        status = videoattn_plan_merge(&resolved, &plan, message.text, message.bytes);
        launches->merges = status == VIDEOATTN_OK && plan.grid[0] != 0;
        if (launches->merges) status = prepare(plan, call.device, &launches->merge, message);
    }
    return status;
}

}  // namespace
}  // namespace videoattn

extern "C" int videoattn_attention(const VideoattnCall* call, char* text, size_t bytes) {
    using namespace videoattn;
    const Message message{text, bytes};
    if (call->struct_bytes != sizeof(VideoattnCall))
        return message.fail(VIDEOATTN_UNSUPPORTED, "the caller's VideoattnCall has %u bytes, the library's has %zu",
                            call->struct_bytes, sizeof(VideoattnCall));
    VideoattnCall key = *call;
    key.stream = nullptr;
    static thread_local const std::unique_ptr<Launches[]> cache(new Launches[kCachedCalls]());
    Launches& launches = cache[slot_of(key)];
    if (!launches.filled || memcmp(&launches.key, &key, sizeof(key)) != 0) {
        launches.filled = false;
        const int status = fill(key, &launches, message);
        if (status != VIDEOATTN_OK) return status;
        launches.key = key;
        launches.filled = true;
    }
    const int status = submit(launches.attention, call->device, call->stream, message);
    if (status != VIDEOATTN_OK || !launches.merges) return status;
    return submit(launches.merge, call->device, call->stream, message);
}

extern "C" int videoattn_check_device(int device, char* text, size_t bytes) {
    return videoattn::check_device(device, Message{text, bytes});
}

extern "C" const char* videoattn_build_info(void) {
    return "{\"api_version\": " VIDEOATTN_TEXT(VIDEOATTN_API_VERSION) ", \"archs\": \"" VIDEOATTN_TEXT(VIDEOATTN_ARCHS)
           "\", \"cuda\": " VIDEOATTN_TEXT(CUDART_VERSION) ", \"source\": \"" VIDEOATTN_TEXT(
               VIDEOATTN_SOURCE_HASH) "\"}";
}
