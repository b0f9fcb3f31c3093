// Descriptors of tcgen05.mma kind::f16 (PTX ISA 9.7.16.4, 9.7.16.5): where an operand tile lies in shared memory and
// which shape, types and majors one instruction has.
#pragma once

#include <stdint.h>

namespace layouts {

enum class Swizzle : uint64_t { kNone = 0, k128B = 2, k64B = 4, k32B = 6 };
enum class InputType : uint32_t { kF16 = 0, kBf16 = 1 };
enum class Major : uint32_t { kK = 0, kMn = 1 };

constexpr int kMmaK = 16;  // 16-bit elements of the reduction dimension per instruction

// 16-byte units in the address, LBO and SBO fields. In K-major swizzled layouts the hardware ignores LBO.
__host__ __device__ constexpr uint64_t smem_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes,
                                                       Swizzle swizzle) {
    return (static_cast<uint64_t>((address & 0x3ffff) >> 4)) | (static_cast<uint64_t>(leading_bytes >> 4) << 16) |
           (static_cast<uint64_t>(stride_bytes >> 4) << 32) | (uint64_t{1} << 46) |
           (static_cast<uint64_t>(swizzle) << 61);
}

// The descriptor of the same layout `bytes` further on.
__host__ __device__ constexpr uint64_t advance(uint64_t descriptor, uint32_t bytes) {
    return descriptor + (bytes >> 4);
}

__host__ __device__ constexpr uint32_t instruction_descriptor(int m, int n, InputType type, Major b_major,
                                                              bool f32_accumulator = true) {
    return (static_cast<uint32_t>(f32_accumulator) << 4) | (static_cast<uint32_t>(type) << 7) |
           (static_cast<uint32_t>(type) << 10) | (static_cast<uint32_t>(b_major) << 16) |
           (static_cast<uint32_t>(n >> 3) << 17) | (static_cast<uint32_t>(m >> 4) << 24);
}

static_assert(instruction_descriptor(128, 128, InputType::kBf16, Major::kK) == 0x08200490);
static_assert(instruction_descriptor(128, 128, InputType::kBf16, Major::kMn) == 0x08210490);
static_assert(smem_descriptor(0, 16, 1024, Swizzle::k128B) >> 32 == 0x40004040);

}  // namespace layouts
