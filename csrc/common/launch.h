// Launching what a plan describes. The only file pair that talks to the CUDA runtime and driver.
#pragma once

#include <cuda.h>

#include "plan.h"

namespace videoattn {

struct Kernel {
    const char* name;      // as in VideoattnPlan.kernel
    const void* function;  // the __global__ function
};

struct KernelList {
    const Kernel* kernels;
    int count;
};

#define VIDEOATTN_ENTRY(NAME) {#NAME, reinterpret_cast<const void*>(NAME)}

KernelList hopper_kernels();
KernelList blackwell_kernels();
KernelList merge_kernels();

struct DeviceFacts {
    int arch;  // compute capability without its dot
    int num_sms;
};

// Cached per device; asks the driver on first use only.
int device_facts(int device, DeviceFacts* facts, const Message& message);

// Whether the driver is new enough for this build and a kernel family serves the device. Makes no context there, so it
// can't tell whether the driver loads the images: `prepare` does.
int check_device(int device, const Message& message);

// A plan that only lacks its stream: the loaded kernel and the encoded tensor maps.
struct Prepared {
    const void* function;
    VideoattnPlan plan;
    CUtensorMap maps[sizeof(VideoattnPlan::maps) / sizeof(VideoattnTensorMap)];
};

// Finds and configures the plan's kernel on `device`, which must have an image for it, and encodes its tensor maps.
int prepare(const VideoattnPlan& plan, int device, Prepared* prepared, const Message& message);

// Launches on `stream` of `device`.
int submit(const Prepared& prepared, int device, void* stream, const Message& message);

}  // namespace videoattn
