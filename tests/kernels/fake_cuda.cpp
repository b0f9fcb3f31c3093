// A CUDA runtime that owns no GPU: it counts what the library asks for and records what it launches. Linked with the
// library's own host sources instead of cudart, it shows what the launcher does on a machine without a device.
#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "common/launch.h"

namespace {

std::atomic<int> driver_version{13000}, devices{2}, launch_error{0};
std::atomic<int> attribute_queries{0}, function_attributes{0}, maps_encoded{0}, device_switches{0};
std::atomic<bool> recording{false};
char lacking[64] = "";  // a kernel without an image
thread_local int current_device = 0;

}  // namespace

extern "C" {

// One launch as the fake saw it; `address` is the base of the first parameter's tensor map.
struct FakeLaunch {
    char kernel[64];
    int32_t device;
    uint32_t grid[3], block[3], dynamic_smem;
    uint64_t stream;
    uint64_t address;
    uint64_t args[4];  // the first bytes of the last parameter
};

static std::mutex launches_lock;
static std::vector<FakeLaunch> launches;

void fake_configure(int version, int device_count, int error_of_launches, int record) {
    driver_version = version;
    devices = device_count;
    launch_error = error_of_launches;
    recording = record != 0;
    lacking[0] = 0;
    attribute_queries = function_attributes = maps_encoded = device_switches = 0;
    const std::lock_guard<std::mutex> hold(launches_lock);
    launches.clear();
}

void fake_counts(int* counts) {
    const int now[] = {attribute_queries, function_attributes, maps_encoded, device_switches};
    memcpy(counts, now, sizeof(now));
}

int fake_launches(FakeLaunch* out, int room) {
    const std::lock_guard<std::mutex> hold(launches_lock);
    for (int i = 0; i < room && i < static_cast<int>(launches.size()); ++i) out[i] = launches[i];
    return static_cast<int>(launches.size());
}

void fake_lack(const char* kernel) { strncpy(lacking, kernel, sizeof(lacking) - 1); }

int fake_current_device(void) { return current_device; }

// Tensors of the CPU say that they are on device -1; here that is device 0.
int fake_attention(const VideoattnCall* call, char* message, size_t message_bytes) {
    VideoattnCall moved = *call;
    if (moved.device == -1) moved.device = 0;
    return videoattn_attention(&moved, message, message_bytes);
}

static CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void* address, const cuuint64_t*,
                             const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                             CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    ++maps_encoded;
    memcpy(map, &address, sizeof(address));
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** pointer, unsigned int, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
    const bool known = strcmp(name, "cuTensorMapEncodeTiled") == 0;
    *pointer = known ? reinterpret_cast<void*>(&encode_tiled) : nullptr;
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= devices) return cudaErrorInvalidDevice;
    ++device_switches;
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = driver_version;
    return cudaSuccess;
}

// Device 0 is an H200, 1 a B200, every other one an RTX 3090.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    if (device < 0 || device >= devices) return cudaErrorInvalidDevice;
    ++attribute_queries;
    constexpr int kMajor[] = {9, 10, 8}, kMinor[] = {0, 0, 6}, kSms[] = {132, 148, 82};
    const int kind = device < 2 ? device : 2;
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor:
            *value = kMajor[kind];
            return cudaSuccess;
        case cudaDevAttrComputeCapabilityMinor:
            *value = kMinor[kind];
            return cudaSuccess;
        case cudaDevAttrMultiProcessorCount:
            *value = kSms[kind];
            return cudaSuccess;
        default:
            return cudaErrorInvalidValue;
    }
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* function) {
    const bool lacks = strcmp(static_cast<const char*>(function), lacking) == 0;
    return lacks ? cudaErrorNoKernelImageForDevice : cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
    ++function_attributes;
    return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** params) {
    if (recording) {
        FakeLaunch launch{};
        strncpy(launch.kernel, static_cast<const char*>(function), sizeof(launch.kernel) - 1);
        launch.device = current_device;
        const dim3 shapes[] = {config->gridDim, config->blockDim};
        for (int i = 0; i < 2; ++i) {
            uint32_t* out = i == 0 ? launch.grid : launch.block;
            out[0] = shapes[i].x, out[1] = shapes[i].y, out[2] = shapes[i].z;
        }
        launch.dynamic_smem = static_cast<uint32_t>(config->dynamicSmemBytes);
        launch.stream = reinterpret_cast<uint64_t>(config->stream);
        memcpy(&launch.address, params[0], sizeof(launch.address));
        // Attention kernels take four maps and their arguments; merging takes arguments alone.
        if (launch.dynamic_smem > 0) memcpy(launch.args, params[4], sizeof(launch.args));
        const std::lock_guard<std::mutex> hold(launches_lock);
        launches.push_back(launch);
    }
    return static_cast<cudaError_t>(launch_error.load());
}

cudaError_t cudaGetLastError(void) { return cudaSuccess; }

const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorInvalidDevice ? "invalid device ordinal" : "a fake error";
}

}  // extern "C"

namespace videoattn {

#define ENTRY(NAME) {#NAME, #NAME},  // a kernel's "function" is its name
// Generated from the kernels' own lists: HOPPER_ENTRIES, BLACKWELL_ENTRIES, MERGE_ENTRIES.
#include "entries.inc"

#define LIST(FUNCTION, ENTRIES)                                 \
    KernelList FUNCTION() {                                     \
        static const Kernel kernels[] = {ENTRIES};              \
        return {kernels, sizeof(kernels) / sizeof(kernels[0])}; \
    }
LIST(hopper_kernels, HOPPER_ENTRIES)
LIST(blackwell_kernels, BLACKWELL_ENTRIES)
LIST(merge_kernels, MERGE_ENTRIES)

}  // namespace videoattn
