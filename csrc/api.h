// The plain C interface of the videoattn library: one struct in, a status and a message out.
// Plain C, no CUDA headers: Python (ctypes), the simulator and the launcher read the same declarations.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define VIDEOATTN_API_VERSION 2
#define VIDEOATTN_EXPORT __attribute__((visibility("default")))

enum VideoattnStatus {
    VIDEOATTN_OK = 0,
    VIDEOATTN_UNSUPPORTED = 1,  // the kernel can't take these arguments; the message says which and why
    VIDEOATTN_CUDA_ERROR = 2,   // the driver or the runtime refused; the message carries its words
};

enum VideoattnDtype { VIDEOATTN_BF16 = 0, VIDEOATTN_FP16 = 1 };

// A (batch, seq, heads, head_dim) tensor whose last dimension is contiguous. Strides count elements.
typedef struct VideoattnTensor {
    void* data;
    int64_t stride_batch;
    int64_t stride_seq;
    int64_t stride_head;
} VideoattnTensor;

// Logits (batch, q_len, heads), of q's dtype, whose heads lie side by side: every head of the output is multiplied by
// twice the sigmoid of its logit. The output is rounded before, and so is the sigmoid.
typedef struct VideoattnGate {
    const void* data;  // null: no gates
    int64_t stride_batch;
    int64_t stride_seq;
} VideoattnGate;

typedef struct VideoattnCall {
    uint32_t struct_bytes;  // sizeof(VideoattnCall) of the caller
    int32_t arch;           // compute capability without its dot: 90, 100, 103; 0 asks the device
    int32_t device;         // CUDA ordinal; ignored by videoattn_plan
    int32_t dtype;          // VideoattnDtype of q, k, v and out
    int64_t batch, heads, q_len, kv_len, head_dim;
    VideoattnTensor q, k, v, out;
    float* lse;                 // (batch, heads, q_len), contiguous, natural log; null: not wanted
    const int32_t* kv_lengths;  // (batch,) on the device, clamped to [0, kv_len]; null: all kv_len
    float scale;                // softmax(scale * q k^T)
    int32_t grid;               // CTAs to launch, up to 65535; 0: as many as the device runs at once
    int32_t num_sms;            // streaming multiprocessors the plan may count on; 0 asks the device
    int32_t splits;             // parts of the keys worked on at once; 0: chosen by the planner
    int32_t rows;               // query rows a CTA works on at once; 0: chosen by the planner. No result depends on it
    int32_t reserved;           // 0
    void* stream;               // cudaStream_t
    void* workspace;            // videoattn_workspace_bytes bytes on the device, at a multiple of 32 bytes (16 for
                                // compute capability 9.0); null: keys are never split
    VideoattnGate gate;
} VideoattnCall;

// Arguments of cuTensorMapEncodeTiled; enum fields carry the driver's values. Interleave is none and element
// strides are 1.
typedef struct VideoattnTensorMap {
    uint64_t address;
    int32_t dtype;  // CUtensorMapDataType
    int32_t rank;
    uint64_t dims[5];
    uint64_t byte_strides[4];  // of dimensions 1 .. rank - 1
    uint32_t box[5];
    int32_t swizzle;       // CUtensorMapSwizzle
    int32_t l2_promotion;  // CUtensorMapL2promotion
    int32_t oob_fill;      // CUtensorMapFloatOOBfill
} VideoattnTensorMap;

// One kernel parameter: a tensor map (128 bytes, 64-byte aligned), or bytes out of VideoattnPlan.args.
typedef struct VideoattnParam {
    int32_t tensor_map;  // index into VideoattnPlan.maps, or -1
    uint32_t offset;     // into VideoattnPlan.args
    uint32_t bytes;
} VideoattnParam;

typedef struct VideoattnPlan {
    uint32_t struct_bytes;
    char kernel[92];  // the kernel's unmangled symbol
    uint32_t grid[3], block[3], cluster[3];
    uint32_t dynamic_smem;
    int32_t num_maps;
    int32_t num_params;
    uint32_t args_bytes;
    VideoattnTensorMap maps[6];
    VideoattnParam params[8];
    uint8_t args[256];
} VideoattnPlan;

// Shapes, strides and options to tensor maps, grid, shared memory and kernel arguments. Calls no CUDA function.
VIDEOATTN_EXPORT int videoattn_plan(const VideoattnCall* call, VideoattnPlan* plan, char* message,
                                    size_t message_bytes);

// Plan of the kernel that merges the parts of a split call; grid[0] is 0 where the keys are not split.
VIDEOATTN_EXPORT int videoattn_plan_merge(const VideoattnCall* call, VideoattnPlan* plan, char* message,
                                          size_t message_bytes);

// Device bytes that splitting the keys takes; 0: they are not split. Needs arch and num_sms, reads no address.
VIDEOATTN_EXPORT uint64_t videoattn_workspace_bytes(const VideoattnCall* call);

// Plans the call and launches its kernel on call->stream. Never synchronises.
VIDEOATTN_EXPORT int videoattn_attention(const VideoattnCall* call, char* message, size_t message_bytes);

// Whether the driver is new enough for this library, and whether it has kernels for the device's compute capability.
// Makes no context on the device; an image that the driver can't load is an error of the first call.
VIDEOATTN_EXPORT int videoattn_check_device(int device, char* message, size_t message_bytes);

// The API version, architectures, CUDA version and hash of the sources of this build, as JSON.
VIDEOATTN_EXPORT const char* videoattn_build_info(void);

#ifdef __cplusplus
}
#endif
