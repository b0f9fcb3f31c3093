#include "launch.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

namespace videoattn {
namespace {

constexpr int kMaxDevices = 64;
constexpr int kMaxKernels = 64;  // over all families

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The library never links libcuda, so that it loads where there is none.
EncodeTiled encode_tiled() {
    static const EncodeTiled function = [] {
        void* pointer = nullptr;
        cudaDriverEntryPointQueryResult found;
        const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000,
                                                                   cudaEnableDefault, &found);
        return reinterpret_cast<EncodeTiled>(error == cudaSuccess && found == cudaDriverEntryPointSuccess ? pointer
                                                                                                         : nullptr);
    }();
    return function;
}

// Makes `device` current for a scope.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device) {
        if ((status_ = cudaGetDevice(&previous_)) != cudaSuccess || previous_ == device) return;
        status_ = cudaSetDevice(device);
        restore_ = status_ == cudaSuccess;
    }
    ~DeviceGuard() {
        if (restore_) cudaSetDevice(previous_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;
    cudaError_t status() const { return status_; }

  private:
    int previous_ = 0;
    bool restore_ = false;
    cudaError_t status_;
};

int cuda_error(const Message& message, const char* what, cudaError_t error) {
    cudaGetLastError();  // ours is reported here; the caller's next check must not find it
    return message.fail(VIDEOATTN_CUDA_ERROR, "%s: %s", what, cudaGetErrorString(error));
}

struct LoadedKernel {
    const void* function;
    int slot;
};

LoadedKernel find_kernel(const char* name) {
    const KernelList lists[] = {hopper_kernels(), blackwell_kernels(), merge_kernels()};
    int slot = 0;
    for (const KernelList& list : lists)
        for (int i = 0; i < list.count; ++i, ++slot)
            if (strcmp(list.kernels[i].name, name) == 0) return {list.kernels[i].function, slot};
    return {nullptr, -1};
}

int encode(const VideoattnTensorMap& map, CUtensorMap* encoded, const Message& message) {
    const EncodeTiled function = encode_tiled();
    if (function == nullptr)
        return message.fail(VIDEOATTN_CUDA_ERROR, "the driver has no cuTensorMapEncodeTiled; it needs CUDA 12 or newer");
    cuuint64_t dims[5], strides[4];
    cuuint32_t box[5], element_strides[5] = {1, 1, 1, 1, 1};
    for (int i = 0; i < 5; ++i) {
        dims[i] = map.dims[i];
        box[i] = map.box[i];
        if (i < 4) strides[i] = map.byte_strides[i];
    }
    const CUresult result =
        function(encoded, static_cast<CUtensorMapDataType>(map.dtype), map.rank, reinterpret_cast<void*>(map.address),
                 dims, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                 static_cast<CUtensorMapSwizzle>(map.swizzle), static_cast<CUtensorMapL2promotion>(map.l2_promotion),
                 static_cast<CUtensorMapFloatOOBfill>(map.oob_fill));
    if (result != CUDA_SUCCESS)
        return message.fail(VIDEOATTN_CUDA_ERROR, "cuTensorMapEncodeTiled refused a map (CUresult %d)",
                            static_cast<int>(result));
    return VIDEOATTN_OK;
}

}  // namespace

int device_facts(int device, DeviceFacts* facts, const Message& message) {
    // Each entry is one word, so that threads may race to fill it: arch * 65536 + SM count.
    static std::atomic<uint32_t> cache[kMaxDevices];
    if (device < 0 || device >= kMaxDevices)
        return message.fail(VIDEOATTN_UNSUPPORTED, "device ordinal %d lies outside 0 .. %d", device, kMaxDevices - 1);
    uint32_t word = cache[device].load(std::memory_order_relaxed);
    if (word == 0) {
        int major = 0, minor = 0, num_sms = 0;
        cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
        if (error != cudaSuccess) return cuda_error(message, "asking for the device's attributes", error);
        word = static_cast<uint32_t>(10 * major + minor) << 16 | static_cast<uint32_t>(num_sms);
        cache[device].store(word, std::memory_order_relaxed);
    }
    facts->arch = static_cast<int>(word >> 16);
    facts->num_sms = static_cast<int>(word & 0xffff);
    return VIDEOATTN_OK;
}

int check_device(int device, const Message& message) {
    int driver = 0;
    const cudaError_t error = cudaDriverGetVersion(&driver);
    if (error != cudaSuccess || driver == 0)
        return message.fail(VIDEOATTN_CUDA_ERROR, "no NVIDIA driver answers on this machine");
    constexpr int kBuiltMajor = CUDART_VERSION / 1000;
    if (driver / 1000 < kBuiltMajor)
        return message.fail(VIDEOATTN_UNSUPPORTED,
                            "the driver serves CUDA %d.%d, this build needs CUDA %d (%s): update the driver or "
                            "build with nvcc %d",
                            driver / 1000, driver % 1000 / 10, kBuiltMajor,
                            kBuiltMajor >= 13 ? "driver 580 or newer" : "driver 525 or newer", driver / 1000);
    DeviceFacts facts;
    const int status = device_facts(device, &facts, message);
    return status == VIDEOATTN_OK ? check_arch(facts.arch, message) : status;
}

int prepare(const VideoattnPlan& plan, int device, Prepared* prepared, const Message& message) {
    const LoadedKernel kernel = find_kernel(plan.kernel);
    if (kernel.function == nullptr)
        return message.fail(VIDEOATTN_UNSUPPORTED, "this build does not contain the kernel %s", plan.kernel);
    if (device < 0 || device >= kMaxDevices || kernel.slot >= kMaxKernels)
        return message.fail(VIDEOATTN_UNSUPPORTED, "device ordinal %d lies outside 0 .. %d", device, kMaxDevices - 1);
    const DeviceGuard guard(device);
    if (guard.status() != cudaSuccess) return cuda_error(message, "selecting the device", guard.status());

    // Once per kernel and device; the runtime would look the kernel up again on every call.
    static std::atomic<bool> configured[kMaxDevices][kMaxKernels];
    std::atomic<bool>& ready = configured[device][kernel.slot];
    if (!ready.load(std::memory_order_acquire)) {
        // Fails where there is no image for the device, before another kernel of the call is launched.
        cudaFuncAttributes attributes;
        cudaError_t error = cudaFuncGetAttributes(&attributes, kernel.function);
        if (error == cudaSuccess && plan.dynamic_smem > 0)
            error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(plan.dynamic_smem));
        if (error != cudaSuccess) return cuda_error(message, plan.kernel, error);
        ready.store(true, std::memory_order_release);
    }
    prepared->function = kernel.function;
    prepared->plan = plan;
    for (int i = 0; i < plan.num_maps; ++i) {
        const int status = encode(plan.maps[i], &prepared->maps[i], message);
        if (status != VIDEOATTN_OK) return status;
    }
    return VIDEOATTN_OK;
}

int submit(const Prepared& prepared, int device, void* stream, const Message& message) {
    const VideoattnPlan& plan = prepared.plan;
    const DeviceGuard guard(device);
    if (guard.status() != cudaSuccess) return cuda_error(message, "selecting the device", guard.status());
    void* params[sizeof(plan.params) / sizeof(plan.params[0])];
    for (int i = 0; i < plan.num_params; ++i) {
        const VideoattnParam& param = plan.params[i];
        const void* value = param.tensor_map >= 0 ? static_cast<const void*>(&prepared.maps[param.tensor_map])
                                                  : plan.args + param.offset;
        params[i] = const_cast<void*>(value);  // the launch copies parameters and writes nothing
    }

    cudaLaunchConfig_t config{};
    config.gridDim = dim3(plan.grid[0], plan.grid[1], plan.grid[2]);
    config.blockDim = dim3(plan.block[0], plan.block[1], plan.block[2]);
    config.dynamicSmemBytes = plan.dynamic_smem;
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attribute;
    if (plan.cluster[0] * plan.cluster[1] * plan.cluster[2] > 1) {
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = plan.cluster[0];
        attribute.val.clusterDim.y = plan.cluster[1];
        attribute.val.clusterDim.z = plan.cluster[2];
        config.attrs = &attribute;
        config.numAttrs = 1;
    }
    const cudaError_t error = cudaLaunchKernelExC(&config, prepared.function, params);
    if (error != cudaSuccess) return cuda_error(message, plan.kernel, error);
    return VIDEOATTN_OK;
}

}  // namespace videoattn
