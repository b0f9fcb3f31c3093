// Entry points of api.h that need CUDA; videoattn_plan lives with the planners.
#include "api.h"

#include <cuda_runtime.h>

#include "common/launch.h"

#define VIDEOATTN_TEXT2(x) #x
#define VIDEOATTN_TEXT(x) VIDEOATTN_TEXT2(x)
#ifndef VIDEOATTN_ARCHS
#define VIDEOATTN_ARCHS 90
#endif

using videoattn::Message;

extern "C" int videoattn_attention(const VideoattnCall* call, char* text, size_t bytes) {
    const Message message{text, bytes};
    if (call->struct_bytes != sizeof(VideoattnCall))
        return message.fail(VIDEOATTN_UNSUPPORTED, "the caller's VideoattnCall has %u bytes, the library's has %zu",
                            call->struct_bytes, sizeof(VideoattnCall));
    VideoattnCall resolved = *call;
    if (call->arch == 0 || call->num_sms == 0) {
        videoattn::DeviceFacts facts;
        const int status = videoattn::device_facts(call->device, &facts, message);
        if (status != VIDEOATTN_OK) return status;
        if (call->arch == 0) resolved.arch = facts.arch;
        if (call->num_sms == 0) resolved.num_sms = facts.num_sms;
    }
    VideoattnPlan plan;
    int status = videoattn_plan(&resolved, &plan, text, bytes);
    if (status == VIDEOATTN_OK) status = videoattn::launch_plan(plan, call->device, call->stream, message);
    if (status != VIDEOATTN_OK || call->workspace == nullptr) return status;
    status = videoattn_plan_merge(&resolved, &plan, text, bytes);
    if (status != VIDEOATTN_OK || plan.grid[0] == 0) return status;
    return videoattn::launch_plan(plan, call->device, call->stream, message);
}

extern "C" int videoattn_check_device(int device, char* text, size_t bytes) {
    return videoattn::check_device(device, Message{text, bytes});
}

extern "C" const char* videoattn_build_info(void) {
    return "{\"api_version\": " VIDEOATTN_TEXT(VIDEOATTN_API_VERSION) ", \"archs\": \"" VIDEOATTN_TEXT(VIDEOATTN_ARCHS)
           "\", \"cuda\": " VIDEOATTN_TEXT(CUDART_VERSION) "}";
}
